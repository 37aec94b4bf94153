"""A rollout worker with faults to switch on: the real engine, loaded wrongly or lost."""

import itertools
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from actors.rollout import RolloutWorker
from configs.schema import RunConfig
from credit.adapter import Adapter, digest

A_NAME = "base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight"
B_NAME = "base_model.model.model.layers.0.self_attn.o_proj.lora_B.weight"

Tensors = dict[str, np.ndarray]


class FaultyWorker(RolloutWorker):
    """`arm` chooses what goes wrong in the next load."""

    def __init__(self, run: RunConfig, model_path: str) -> None:
        super().__init__(run, model_path)
        self._fault = ""
        self._previous: Adapter | None = None

    async def arm(self, fault: str) -> None:
        self._fault = fault

    async def load(self, adapter: Adapter) -> np.ndarray:
        config = adapter.config
        if self._fault == "wrong digest":
            adapter = replace(adapter, digest="0" * 64)
        elif self._fault == "wrong rank":
            adapter = _resigned(adapter, config | {"r": config["r"] * 2})
        elif self._fault == "wrong alpha":
            adapter = _resigned(adapter, config | {"lora_alpha": config["lora_alpha"] * 2})
        elif self._fault == "wrong targets":
            adapter = _resigned(adapter, config | {"target_modules": ["q_proj", "v_proj"]})
        return await super().load(adapter)

    def _load(self, adapter: Adapter, folder: Path) -> None:
        """After the digest was verified: what vLLM reads, or what happens to it."""
        if self._fault in IN_THE_FILE:
            tensors = load_file(folder / "adapter_model.safetensors")
            save_file(IN_THE_FILE[self._fault](tensors), folder / "adapter_model.safetensors")
        elif self._fault == "rank of the file":
            path = folder / "adapter_config.json"
            path.write_text(json.dumps(adapter.config | {"r": adapter.config["r"] - 2}))
        elif self._fault == "previous version":
            assert self._previous is not None
            self._previous.save(folder)
        elif self._fault == "load raises":
            raise OSError("no space is left on the device")
        elif self._fault == "load hangs":
            time.sleep(600)
        elif self._fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._fault == "id reused":
            assert self._active is not None
            self._ids = itertools.chain([self._active.adapter], self._ids)
        super()._load(adapter, folder)
        number = self._residents[adapter.version].adapter
        if self._fault == "dropped":
            self._engine._llm.remove_lora(number)
        elif self._fault == "base model":
            self._engine._adapters[number] = None  # pyright: ignore[reportArgumentType]
        elif self._fault == "previous answer":  # the slot is right, and requests go to another one
            assert self._active is not None
            self._engine._adapters[number] = self._engine._adapters[self._active.adapter]
        self._previous = adapter


def _resigned(adapter: Adapter, config: dict) -> Adapter:
    """As an exporter with other settings would have made it: the digest is right."""
    return replace(adapter, config=config, digest=digest(adapter.tensors, config))


def _truncated(tensors: Tensors) -> Tensors:
    return tensors | {B_NAME: tensors[B_NAME][:10].copy()}


def _zeroed(tensors: Tensors) -> Tensors:
    return tensors | {A_NAME: np.zeros_like(tensors[A_NAME])}


def _swapped(tensors: Tensors) -> Tensors:
    other = A_NAME.replace("layers.0", "layers.1")
    return tensors | {A_NAME: tensors[other], other: tensors[A_NAME]}


def _missing(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name not in (A_NAME, B_NAME)}


IN_THE_FILE: dict[str, Callable[[Tensors], Tensors]] = {
    "tensor truncated": _truncated,
    "tensor zeroed": _zeroed,
    "tensors swapped": _swapped,
    "module missing": _missing,
}
