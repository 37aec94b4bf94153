"""Learners of one rank in this process, and the inputs that one- and two-rank tests share."""

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.schema import RunConfig
from learner.learner import Learner
from tests.learner.setting import BETA, CANARY, run_config

MakeLearner = Callable[..., Learner]


@pytest.fixture(scope="package")
def make_learner(tiny_model: Path) -> Iterator[MakeLearner]:
    """Learners of one rank. They share one process group, and leave no trace in the environment of later tests."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        master = f"127.0.0.1:{server.getsockname()[1]}"
    environment, threads = dict(os.environ), torch.get_num_threads()

    def make(run: RunConfig | None = None, **learner: Any) -> Learner:
        return Learner(run or run_config(**learner), str(tiny_model), CANARY, master=master)

    yield make
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture(scope="package")
def start(make_learner: MakeLearner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint before the first update, with B != 0: with a fresh LoRA every A would have a zero gradient."""
    folder = tmp_path_factory.mktemp("start")
    make_learner().save(folder)
    tensors = load_file(folder / "learner.safetensors")
    random = torch.Generator().manual_seed(7)
    for name in sorted(tensors):
        if name.startswith("weight/") and "lora_B" in name:
            tensors[name] = 0.05 * torch.randn(tensors[name].shape, generator=random)
    save_file(tensors, folder / "learner.safetensors")
    return folder


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return _part(folder, "weight/")


def gradient_of(folder: Path) -> dict[str, torch.Tensor]:
    """The gradient of the only update behind a checkpoint: Adam's first moment is (1 - beta1) g."""
    return {name: value / (1 - BETA) for name, value in _part(folder, "exp_avg/").items()}


def _part(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "learner.safetensors")
    return {name.removeprefix(kind): value for name, value in tensors.items() if name.startswith(kind)}
