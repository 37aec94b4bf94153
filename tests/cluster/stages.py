"""The loop's stages as plain coroutines that a test controls."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cluster.ledger import Ledger, audit
from cluster.loop import Group, Loop
from configs.schema import ArithmeticData, CreditConfig, RewardConfig, RolloutConfig, RunConfig
from credit.trajectory import Batch, Prompt, Sample, Signals, Trajectory, pad

G = 2
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # fsync is what costs time


def config(
    steps: int = 4, staleness: int = 0, prompts: int = 3, timeout_s: float = 5.0, refill: bool = False
) -> RunConfig:
    return RunConfig(
        name="run",
        steps=steps,
        max_staleness=staleness,
        data=ArithmeticData(task="arithmetic"),
        rollout=RolloutConfig(prompts_per_step=prompts, group_size=G, timeout_s=timeout_s, refill=refill),
        reward=RewardConfig(timeout_s=timeout_s),
        credit=CreditConfig(timeout_s=timeout_s),
    )


def sample_of(group: int, index: int, version: int) -> Sample:
    return Sample(
        group=group,
        index=index,
        tokens=np.array([1, 2, 3]),
        mask=np.array([False, True, True]),
        logprobs=np.zeros(3, np.float32),
        text="",
        finish="stop",
        version=version,
        digest=f"digest {version}",
    )


class Control:
    """Stages that answer after `latency(group)` seconds, or as a test says; they record what they are asked."""

    def __init__(self, ledger: Ledger, version: int = 0, latency: Callable[[int], float] = lambda group: 0.0) -> None:
        self.ledger, self.version, self.latency = ledger, version, latency
        self.trained: list[list[int]] = []  # by step
        self.versions: list[list[int]] = []
        self.open: set[int] = set()
        self.most_open = 0
        self.rewards: dict[int, list[float | str]] = {}
        self.waves: list[list[int]] = []

    async def prompt(self, group: int) -> Prompt | str:
        self.ledger.drawn(group, "", 0, group)
        return Prompt(group=group, tokens=[1], seeds=list(range(G)), prompt="", columns={})

    async def sample(self, prompts: list[Prompt], done: Callable[[list[Sample]], None]) -> None:
        self.waves.append([prompt.group for prompt in prompts])
        self.open |= {prompt.group for prompt in prompts}
        self.most_open = max(self.most_open, len(self.open))
        async with asyncio.TaskGroup() as tasks:
            for prompt in prompts:
                tasks.create_task(self.sample_one(prompt, self.version, done))

    async def sample_one(self, prompt: Prompt, version: int, done: Callable[[list[Sample]], None]) -> None:
        await asyncio.sleep(self.latency(prompt.group))
        done([sample_of(prompt.group, index, version) for index in range(G)])

    async def reward(self, prompt: Prompt, samples: list[Sample]) -> list[float | str]:
        await asyncio.sleep(0)
        rewards = self.rewards.get(prompt.group, [float(sample.index) for sample in samples])
        if sum(not isinstance(reward, str) for reward in rewards) < 2:
            self.open.discard(prompt.group)
        return rewards

    async def signals(self, prompt: Prompt, trajectories: list[Trajectory]) -> list[Signals]:
        await asyncio.sleep(0)
        return [{"logp": row.logprobs} for row in trajectories]

    async def assign(self, groups: list[Group], step: int) -> tuple[Batch, dict[str, float]]:
        rows = [row for group in groups for row in group.trajectories]
        mask = pad([row.mask for row in rows], torch.bool)
        zeros = torch.zeros(mask.shape)
        batch = Batch(
            tokens=pad([row.tokens for row in rows], torch.int64),
            lengths=torch.tensor([len(row.tokens) for row in rows]),
            mask=mask,
            advantages=zeros,
            logp_old=zeros,
            logp_rollout=zeros,
            logp_base=None,
            groups=torch.tensor([row.group for row in rows]),
            rewards=torch.tensor([row.reward for row in rows]),
        )
        return batch, {}

    async def learn(self, batch: Batch) -> dict[str, float]:
        await asyncio.sleep(0)
        return {}

    async def commit(self, step: int, groups: list[Group]) -> dict[str, float]:
        await asyncio.sleep(0)
        trained = [group.prompt.group for group in groups]
        self.ledger.commit(step, step, f"checkpoint {step}", trained)
        self.trained.append(trained)
        self.versions.append([group.version for group in groups])
        self.open -= set(trained)
        return {}

    async def publish(self, version: int) -> dict[str, float]:
        await asyncio.sleep(0)
        self.version = version
        return {}


class Log:
    def __init__(self) -> None:
        self.records: list[dict[str, float]] = []

    async def __call__(self, step: int, metrics: dict[str, float], groups: list[Group], batch: Batch) -> None:
        self.records.append(dict(metrics))


def ledger_in(folder: Path) -> Ledger:
    return Ledger(folder / "ledger.sqlite")


def run(stages: Control, config: RunConfig, log: Log | None = None, limit_s: float = 20.0) -> Loop:
    """Train to the end; a run that hangs is an error here."""
    loop = Loop(config, stages, stages.ledger, stages.version)

    async def main() -> None:
        try:
            async with asyncio.timeout(limit_s):
                await loop.train(log or Log())
        finally:
            assert asyncio.all_tasks() == {asyncio.current_task()}, "tasks outlive the run"

    asyncio.run(main())
    return loop


def closed(ledger: Ledger) -> dict[str, Any]:
    ledger.close()
    return audit(ledger.path)
