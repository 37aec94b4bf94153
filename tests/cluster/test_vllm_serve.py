"""What the learner exports is an adapter for everyone: stock `vllm serve` answers with the worker's own tokens."""

import asyncio
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from actors.rollout import RolloutWorker
from credit.adapter import Adapter
from credit.trajectory import Prompt
from tests.learner.setting import CANARY, make_batch, run_config

START_S = 240.0
PROMPTS = [[10, 11, 12, 13, 14], [40, 60, 30], list(range(50, 70))]
TOKENS = 16
SETTINGS = {"model": {"max_length": 64}, "lr": 3e-2}


def export(model: str, folder: Path) -> Adapter:
    """The adapter of three optimiser steps, saved in `folder`. In a process of its own: DeepSpeed changes it."""
    from learner.learner import Learner

    with socket.create_server(("127.0.0.1", 0)) as server:
        master = f"127.0.0.1:{server.getsockname()[1]}"
    learner = Learner(run_config(**SETTINGS), model, CANARY, master=master)
    for seed in range(3):
        learner.step(make_batch(seed))
    adapter = learner.export(3)
    assert adapter is not None
    adapter.save(folder)
    return adapter


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Adapter, Path]:
    folder = tmp_path_factory.mktemp("adapter")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(export, str(tiny_model), folder).result(timeout=180), folder


@pytest.fixture(scope="module")
def server(tiny_model: Path, adapter: tuple[Adapter, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of vLLM's own server, which knows nothing of this project.

    The module is what `vllm serve` runs. The command itself asks for the version of a distribution called vllm, which
    builds for CPUs do not have.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_model),
        "--served-model-name", "base",
        "--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"ours={adapter[1]}",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "64",
        "--max-num-seqs", "4", "--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20),
    ]  # fmt: skip
    environment = os.environ | {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_S
        while not _up(address):
            assert process.poll() is None, f"vllm serve ended with {process.returncode}:\n{log.read_text()[-3000:]}"
            assert time.monotonic() < deadline, f"vllm serve is not up after {START_S} s:\n{log.read_text()[-3000:]}"
            time.sleep(0.2)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what outlived its parent
        process.wait(20)


def _up(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def complete(address: str, model: str, prompt: list[int]) -> list[int]:
    question: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": TOKENS,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(question).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["token_ids"]


def test_stock_vllm_serves_an_exported_adapter_with_the_tokens_of_our_worker(
    server: str, adapter: tuple[Adapter, Path], tiny_model: Path
):
    run = run_config(**SETTINGS)
    rollout = run.rollout.model_copy(update={"max_new_tokens": TOKENS, "kv_cache_gb": 0.05})
    worker = RolloutWorker(run.model_copy(update={"rollout": rollout}), str(tiny_model))

    async def greedy() -> dict[int, list[int]]:
        await worker.load(adapter[0])
        await worker.activate(adapter[0].version)
        asked = [Prompt(group=i, tokens=p, seeds=[0], prompt="", columns={}) for i, p in enumerate(PROMPTS)]
        samples = [sample async for group in worker.sample(asked, temperature=0.0) for sample in group]
        return {sample.group: sample.tokens[sample.mask].tolist() for sample in samples}

    try:
        ours = asyncio.run(greedy())
    finally:
        worker.close()
    theirs = {i: complete(server, "ours", prompt) for i, prompt in enumerate(PROMPTS)}
    base = {i: complete(server, "base", prompt) for i, prompt in enumerate(PROMPTS)}
    assert theirs == ours
    assert all(theirs[i] != base[i] for i in base), "the adapter changes nothing: the comparison proves nothing"
