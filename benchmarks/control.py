"""The control plane alone: the real loop, ledger, pools and publisher over simulated models.

accredit bench control [--replicas 10,100,1000 --trajectories 200000 --json]

A replica answers a prompt after a lognormal time, a credit actor and a learner rank at once; all else is what a run
does: leases, waves over the serving replicas, rewards, signals, `credit.assign`, commits, adapter versions with their
canaries on every member. Reported for each number of replicas: trajectories a second, CPU time for each of them, the
share of it that the ledger takes, and memory.
"""

import asyncio
import json as jsonlib
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

import credit
from benchmarks import machine
from cluster.fleet import Fleet, Scorers
from cluster.ledger import Ledger, audit
from cluster.loop import Group, Loop
from cluster.publisher import Publisher
from configs.schema import RunConfig
from credit.adapter import Adapter, Canary, digest
from credit.trajectory import Batch, Prompt, Sample, Signals, Trajectory

GROUP = 8
PROMPTS_PER_STEP = 512
STALENESS = 2
LATENCY_S = 0.2  # median of a group's time on a replica
SPREAD = 0.5  # of its logarithm
CREDIT_ACTORS, LEARNER_RANKS = 100, 64
TOKENS = np.arange(24)
MASK = TOKENS >= 8
LOGPROBS = np.where(MASK, -1.0, 0.0).astype(np.float32)
BASE = np.linspace(0.0, -3.0, 8, dtype=np.float32)


def main(replicas: list[int], trajectories: int, json: bool) -> list[dict[str, Any]]:
    """Measure and print a table, or JSON."""
    results = [asyncio.run(Simulation(count).measure(trajectories)) for count in replicas]
    host = machine.describe()
    if json:
        print(jsonlib.dumps({"machine": host, "results": results}, indent=1))
        return results
    titles = "replicas,trajectories,trajectories/s,CPU us each,ledger us each,ledger % of wall,MiB grown,balanced"
    table = Table(*titles.split(","), title="control plane, models simulated")
    for row in results:
        table.add_row(
            str(row["replicas"]), f"{row['trajectories']:,}", f"{row['trajectories_per_s']:,.0f}",
            f"{row['cpu_us']:.0f}", f"{row['ledger_us']:.1f}", f"{100 * row['ledger_share']:.2f}",
            f"{row['grown_bytes'] / 2**20:.1f}", str(row["balanced"]),
        )  # fmt: skip
    Console().print(table)
    Console().print(f"{host['cpu']}, {host['cores']} cores, {host['date']}")
    return results


class Actor:
    """A member that holds adapters, samples and scores in no time but the simulated one."""

    def __init__(self, name: str) -> None:
        self.random = random.Random(name)
        self.held: set[int] = set()
        self.version = 0

    async def load(self, adapter: Adapter) -> np.ndarray:
        self.held.add(adapter.version)
        return adapter.canary.adapted

    async def canary(self, tokens: list[int], version: int | None) -> np.ndarray:
        return BASE

    async def activate(self, version: int, policy: str) -> None:
        self.version = version
        self.held = {held for held in self.held if held >= version - STALENESS}

    async def forget(self, policy: str) -> None:
        self.held.clear()

    async def stats(self, policy: str) -> dict[str, Any]:
        return {"versions": {}, "load_s": 0.0, "proof_s": 0.0, "canary_s": 0.0, "most_resident": len(self.held)}

    async def alive(self) -> None: ...

    async def kill(self) -> None: ...

    async def sample(self, prompts: list[Prompt], temperature: float | None = None) -> AsyncIterator[list[Sample]]:
        for group in asyncio.as_completed([self._group(prompt, self.version) for prompt in prompts]):
            yield await group

    async def _group(self, prompt: Prompt, version: int) -> list[Sample]:
        await asyncio.sleep(LATENCY_S * self.random.lognormvariate(0.0, SPREAD))
        return [
            Sample(
                group=prompt.group, index=index, tokens=TOKENS, mask=MASK, logprobs=LOGPROBS, text="", finish="stop",
                version=version, digest="",
            )
            for index in range(GROUP)
        ]  # fmt: skip

    async def score(self, samples: list[Sample], needs: frozenset[str], negatives: Any = None) -> list[Signals]:
        return [{"logp": LOGPROBS} for _ in samples]


class Ranks:
    """The learner's ranks."""

    async def export(self, version: int) -> Adapter:
        adapted = BASE - np.float32(0.01 * (version + 1))
        tensors = {"lora_A": np.full((4, 4), version, np.float32)}
        canary = Canary(tokens=list(range(8)), adapted=adapted, base=BASE)
        return Adapter(version=version, digest=digest(tensors, {}), tensors=tensors, config={}, canary=canary)

    async def step(self) -> None:
        await asyncio.gather(*(asyncio.sleep(0) for _ in range(LEARNER_RANKS)))


class Simulation:
    """The stages of one run."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self.run = RunConfig.model_validate(
            {
                "name": "control",
                "steps": 1_000_000,
                "max_staleness": STALENESS,
                "data": {"task": "arithmetic"},
                "rollout": {"replicas": replicas, "prompts_per_step": PROMPTS_PER_STEP, "group_size": GROUP},
                "credit": {"replicas": CREDIT_ACTORS, "record": []},
            }
        )
        start: Any = self._start
        self.fleet, self.scorers, self.ranks = Fleet(self.run, start), Scorers(self.run, start), Ranks()
        self.seconds = 0.0  # in the ledger

    async def _start(self, name: str) -> Actor:
        return Actor(name)

    async def measure(self, trajectories: int) -> dict[str, Any]:
        steps = -(-trajectories // (PROMPTS_PER_STEP * GROUP))
        run, process = self.run.model_copy(update={"steps": steps}), psutil.Process()
        with tempfile.TemporaryDirectory() as folder:
            self.ledger = self._timed(Ledger(Path(folder) / "ledger.sqlite"))
            self.publisher = Publisher(self.ranks, self.fleet, self.scorers, Path(folder))  # pyright: ignore[reportArgumentType] simulated
            await asyncio.gather(self.fleet.start(), self.scorers.start())
            await self.publish(0)
            memory: list[int] = []

            async def log(step: int, metrics: dict[str, float], groups: list[Group], batch: Batch) -> None:
                memory.append(process.memory_info().rss)

            began, cpu, self.seconds = time.perf_counter(), time.process_time(), 0.0
            await Loop(run, self, self.ledger, 0).train(log)
            wall, cpu = time.perf_counter() - began, time.process_time() - cpu
            count = steps * PROMPTS_PER_STEP * GROUP
            await asyncio.gather(self.fleet.close(), self.scorers.close())
            self.ledger.close()
            return {
                "replicas": self.replicas,
                "trajectories": count,
                "trajectories_per_s": count / wall,
                "cpu_us": 1e6 * cpu / count,
                "ledger_us": 1e6 * self.seconds / count,
                "ledger_share": self.seconds / wall,
                "grown_bytes": memory[-1] - memory[len(memory) // 4],
                "balanced": audit(Path(folder) / "ledger.sqlite")["balanced"],
            }

    def _timed(self, ledger: Ledger) -> Ledger:
        for name in ("lease", "drawn", "sampled", "scored", "dropped", "failed", "commit", "flush"):
            setattr(ledger, name, self._clocked(getattr(ledger, name)))
        return ledger

    def _clocked(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self.seconds += time.perf_counter() - began

        return timed

    async def prompt(self, group: int) -> Prompt:
        self.ledger.drawn(group, "", 0, group)
        return Prompt(group=group, tokens=[1], seeds=list(range(GROUP)), prompt="", columns={})

    async def sample(self, prompts: list[Prompt], done: Callable[[list[Sample]], None]) -> None:
        await self.fleet.sample(prompts, done)

    async def reward(self, prompt: Prompt, samples: list[Sample]) -> list[float | str]:
        return [float(sample.index % 2) for sample in samples]

    async def signals(self, prompt: Prompt, trajectories: list[Trajectory]) -> list[Signals]:
        return await self.scorers.score(list(trajectories), frozenset({"logp"}))

    async def assign(self, groups: list[Group], step: int) -> tuple[Batch, dict[str, float]]:
        rows = [row for group in groups for row in group.trajectories]
        return credit.assign(rows, [signals for group in groups for signals in group.signals], method="uniform")

    async def learn(self, batch: Batch) -> dict[str, float]:
        await self.ranks.step()
        return {}

    async def commit(self, step: int, groups: list[Group]) -> dict[str, float]:
        self.ledger.commit(step, step, "", [group.prompt.group for group in groups])
        return {}

    async def publish(self, version: int) -> dict[str, float]:
        return await self.publisher.publish(version)
