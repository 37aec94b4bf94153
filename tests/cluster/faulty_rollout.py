"""A rollout worker with faults to switch on: the real engine, loaded wrongly or lost."""

import itertools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

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

    def _load(self, adapter: Adapter) -> None:
        """After the digest was verified: what vLLM is given, or what happens to it."""
        given = adapter
        if self._fault in ON_THE_WAY:
            given = replace(adapter, tensors=ON_THE_WAY[self._fault](adapter.tensors))
        elif self._fault == "rank on the way":
            given = replace(adapter, config=adapter.config | {"r": adapter.config["r"] - 2})
        elif self._fault == "previous version":
            assert self._previous is not None
            given = self._previous
        elif self._fault == "load raises":
            raise OSError("no space is left on the device")
        elif self._fault == "load hangs":
            time.sleep(600)
        elif self._fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._fault == "id reused":
            assert self._active
            self._ids = itertools.chain([self._active[adapter.policy].adapter], self._ids)
        load = self._engine.load
        self._engine.load = lambda number, name, adapter: load(number, name, given)
        try:
            super()._load(adapter)
        finally:
            self._engine.load = load
        number = self._residents[adapter.policy, adapter.version].adapter
        if self._fault == "dropped":
            self._engine._llm.remove_lora(number)
        elif self._fault == "base model":
            self._engine._adapters[number] = None  # pyright: ignore[reportArgumentType]
        elif self._fault == "previous answer":  # the slot is right, and requests go to another one
            assert self._active
            self._engine._adapters[number] = self._engine._adapters[self._active[adapter.policy].adapter]
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


ON_THE_WAY: dict[str, Callable[[Tensors], Tensors]] = {
    "tensor truncated": _truncated,
    "tensor zeroed": _zeroed,
    "tensors swapped": _swapped,
    "module missing": _missing,
}
