"""Actors that are plain objects, with the faults that a test gives them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import numpy as np

from configs.schema import ArithmeticData, CreditConfig, RolloutConfig, RunConfig
from credit.adapter import Adapter, Canary
from credit.trajectory import Prompt, Sample, Signals

TOKENS = [5, 6, 7, 8]
BASE = np.array([0.0, -1.0, -2.0, -3.0], np.float32)
G = 2


def adapted(version: int) -> np.ndarray:
    """A fresh adapter (B = 0) answers as the base does, each later one differently."""
    return BASE - np.float32(0.25 * version)


def adapter(version: int, policy: str = "") -> Adapter:
    canary = Canary(tokens=TOKENS, adapted=adapted(version), base=BASE)
    return Adapter(version=version, digest=f"digest {version}", tensors={}, config={}, canary=canary, policy=policy)


class Dead(Exception):
    pass


class Actor:
    """A member's process. `faults` maps a method to what happens in it instead, until `mend` is called."""

    def __init__(self, name: str, faults: dict[str, Callable[..., Any]]) -> None:
        self.name, self.faults = name, faults
        self.held: dict[tuple[str, int], Adapter] = {}
        self.active: dict[str, int] = {}
        self.killed = False
        self.asked: list[tuple[str, Any]] = []

    async def _enter(self, method: str, argument: Any) -> Any:
        if self.killed:
            raise Dead(self.name)
        self.asked.append((method, argument))
        await asyncio.sleep(0)
        if method in self.faults:
            return await self.faults[method](self, argument)
        return None

    async def load(self, adapter: Adapter) -> np.ndarray:
        answer = await self._enter("load", adapter.version)
        self.held[adapter.policy, adapter.version] = adapter
        return adapted(adapter.version) if answer is None else answer

    async def canary(self, tokens: list[int], version: int | None) -> np.ndarray:
        answer = await self._enter("canary", version)
        assert tokens == TOKENS
        return BASE + np.float32(1e-6) if answer is None else answer

    async def activate(self, version: int, policy: str) -> None:
        await self._enter("activate", version)
        assert (policy, version) in self.held
        self.active[policy] = version

    async def stats(self, policy: str) -> dict[str, Any]:
        return {}

    async def forget(self, policy: str) -> None:
        await self._enter("forget", policy)
        self.active.pop(policy, None)
        self.held = {key: adapter for key, adapter in self.held.items() if key[0] != policy}

    async def alive(self) -> None:
        await asyncio.sleep(0)
        if self.killed:
            raise Dead(self.name)

    async def kill(self) -> None:
        await asyncio.sleep(0)
        if "kill" in self.faults:
            await self.faults["kill"](self, None)
        self.killed = True

    async def sample(self, prompts: list[Prompt], temperature: float | None = None) -> AsyncIterator[list[Sample]]:
        version = self.active[prompts[0].policy]  # a KeyError is work for an actor that serves the base model
        for prompt in prompts:
            await self._enter("sample", prompt.group)
            yield [sample_of(prompt, index, version) for index in range(G)]

    async def score(
        self, samples: list[Sample], needs: frozenset[str], negatives: dict[int, list[int]] | None
    ) -> list[Signals]:
        await self._enter("score", samples[0].version)
        if (samples[0].policy, samples[0].version) not in self.held:
            raise RuntimeError(f"v{samples[0].version} is not resident")
        return [{"logp": sample.logprobs} for sample in samples]

    async def delta_sums(self, coefficients: Any, policy: str) -> Any:
        raise NotImplementedError

    async def delta_dots(self, direction: Any, keys: Any, policy: str) -> Any:
        raise NotImplementedError

    async def delta_clear(self, keys: Any, policy: str) -> None:
        raise NotImplementedError


def sample_of(prompt: Prompt, index: int, version: int) -> Sample:
    return Sample(
        group=prompt.group,
        index=index,
        tokens=np.array([1, prompt.seeds[index]]),
        mask=np.array([False, True]),
        logprobs=np.zeros(2, np.float32),
        text="",
        finish="stop",
        version=version,
        digest=f"digest {version}",
        policy=prompt.policy,
    )


def prompts(*groups: int, policy: str = "") -> list[Prompt]:
    return [
        Prompt(group=group, tokens=[1], seeds=[10 * group + i for i in range(G)], prompt="", columns={}, policy=policy)
        for group in groups
    ]


class World:
    """Starts actors, and remembers all of them. `faults[name]` are those of its first, second, ... actor."""

    def __init__(self) -> None:
        self.actors: list[Actor] = []
        self.faults: dict[str, list[dict[str, Callable[..., Any]]]] = {}
        self.start_faults: dict[str, list[Exception | None]] = {}
        self.delivered: list[list[Sample]] = []
        self.gate: asyncio.Event | None = None  # restarts wait for it

    async def start(self, name: str) -> Actor:
        await asyncio.sleep(0)
        if self.of(name) and self.gate:
            await self.gate.wait()
        if (planned := self.start_faults.get(name)) and (error := planned.pop(0)):
            raise error
        left = self.faults.get(name, [])
        self.actors.append(Actor(name, left.pop(0) if left else {}))
        return self.actors[-1]

    def of(self, name: str) -> list[Actor]:
        return [actor for actor in self.actors if actor.name == name]

    def done(self, samples: list[Sample]) -> None:
        self.delivered.append(samples)

    def groups(self) -> list[int]:
        return sorted(samples[0].group for samples in self.delivered)


def config(replicas: int = 2, minimum: int = 1, staleness: int = 0, timeout_s: float = 3.0) -> RunConfig:
    return RunConfig(
        name="run",
        steps=1,
        max_staleness=staleness,
        data=ArithmeticData(task="arithmetic"),
        rollout=RolloutConfig(replicas=replicas, min_replicas=minimum, group_size=G, timeout_s=timeout_s),
        credit=CreditConfig(replicas=replicas, timeout_s=timeout_s),
    )


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    async def main() -> None:
        async with asyncio.timeout(20):
            await coroutine
        assert asyncio.all_tasks() == {asyncio.current_task()}, "tasks are left over"

    asyncio.run(main())


async def hangs(*_: Any) -> None:
    await asyncio.sleep(1e6)


async def raises(actor: Actor, *_: Any) -> None:
    raise ValueError("the content does not match its digest")


async def dies(actor: Actor, *_: Any) -> None:
    actor.killed = True
    raise Dead(actor.name)


def answers(answer: Callable[[int], np.ndarray], since: int = 1) -> Callable[..., Any]:
    async def fault(actor: Actor, version: int) -> np.ndarray | None:
        return answer(version) if version >= since else None

    return fault
