"""The loop: lease -> sample -> reward -> signals -> batch -> learn -> commit + publish, as coroutines.

    produce   consumes free slots, leases groups, starts a wave of rollouts; waits for slots
    wave      consumes sampled groups as they complete, gets rewards and signals; fills `ready`
    steps     consumes `prompts_per_step` ready groups, trains, commits, publishes; frees their slots

There are (max_staleness + 1) * prompts_per_step slots, so that nothing runs further ahead of the learner; a group that
is older than `max_staleness` versions when the learner would take it is dropped and counted. With max_staleness 0 a
wave starts only when the one before is trained: the run is synchronous, and two runs give the same bits.

Nothing here knows Ray: the stages are coroutines, with their own deadlines. An error in any of them ends the run.
"""

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cluster.deadline import within
from cluster.fleet import Stale
from cluster.ledger import Ledger
from cluster.pool import START_TIMEOUT_S
from configs.schema import RunConfig
from credit.trajectory import Batch, Prompt, Sample, Signals, Trajectory

MAX_DROPS = 20
"""Groups dropped in a row, as a multiple of prompts_per_step, before the run gives up."""

TOO_LONG = "the prompt is too long"
"""Reason of a drop."""

PATIENCE = 6
"""The loop's own deadline, as a multiple of its stages' and of an actor's start: a fleet tries more than once."""

Metrics = dict[str, float]


def sampling_seed(seed: int, group: int, index: int) -> int:
    """From the run's seed and the completion's place alone, never from time or arrival order. 32 bits."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{group}/{index}".encode(), digest_size=4).digest(), "big")


class Stages(Protocol):
    """What the loop drives."""

    async def prompt(self, group: int) -> Prompt | str: ...
    async def sample(self, prompts: list[Prompt], done: Callable[[list[Sample]], None]) -> None: ...
    async def reward(self, prompt: Prompt, samples: list[Sample]) -> Sequence[float | str]: ...
    async def signals(self, prompt: Prompt, trajectories: list[Trajectory]) -> list[Signals]: ...
    async def assign(self, groups: list["Group"], step: int) -> tuple[Batch, Metrics]: ...
    async def learn(self, batch: Batch) -> Metrics: ...
    async def commit(self, step: int, groups: list["Group"]) -> Metrics: ...
    async def publish(self, version: int) -> Metrics: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The scored completions of one prompt."""

    prompt: Prompt
    trajectories: list[Trajectory]
    signals: list[Signals]
    rewarded_at: float  # monotonic seconds: from here on, waiting for this group is waiting for credit

    @property
    def version(self) -> int:
        return self.trajectories[0].version


@dataclass(slots=True)
class Tally:
    """What happened since the last step, for its record."""

    dropped: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    credit_stall_s: float = 0.0  # the learner idle, for want of nothing but a group's signals


class Busy:
    """Seconds in which at least one group is in a stage, however many overlap there."""

    def __init__(self) -> None:
        self._inside = 0
        self._since = self._seconds = 0.0

    def __enter__(self) -> None:
        if not self._inside:
            self._since = time.monotonic()
        self._inside += 1

    def __exit__(self, *_: object) -> None:
        self._inside -= 1
        if not self._inside:
            self._seconds += time.monotonic() - self._since

    def take(self) -> float:
        """The seconds since the last `take`."""
        now = time.monotonic()
        seconds = self._seconds + (now - self._since if self._inside else 0.0)
        self._since, self._seconds = now, 0.0
        return seconds


class Loop:
    """One run. `version` is the newest published policy; it equals the number of committed steps."""

    def __init__(self, run: RunConfig, stages: Stages, ledger: Ledger, version: int = 0) -> None:
        self.run, self.stages, self.ledger, self.version = run, stages, ledger, version
        self.batch_size = run.rollout.prompts_per_step
        self._earliest = version  # the version that takes what is scored from now on
        # a slot is a group that may be in flight; the last steps free none, so that no group is left over at the end
        self._slots = asyncio.Semaphore(min(run.max_staleness + 1, run.steps - version) * self.batch_size)
        self._ready: asyncio.Queue[Group] = asyncio.Queue()  # bounded by the slots
        self._tally = Tally()
        self._sampling, self._rewarding, self._crediting = Busy(), Busy(), Busy()
        self._drops_in_a_row = 0

    async def train(self, log: Callable[[int, Metrics, list[Group], Batch], Awaitable[None]]) -> None:
        """Run steps until `run.steps` are committed; `log(step, metrics, groups, batch)` after each.

        Raises the first error of any stage, as it was.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                producer = tasks.create_task(self._produce(tasks), name="produce")
                # as a task: errors are then in the order in which they happened
                await tasks.create_task(self._steps(log), name="steps")
                producer.cancel()
        except* Exception as errors:
            first: BaseException = errors
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            raise first from None
        finally:
            self.ledger.flush()

    async def _produce(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            await self._slots.acquire()
            count = 1
            while not self._slots.locked():
                await self._slots.acquire()
                count += 1
            groups = self.ledger.lease(count)
            tasks.create_task(self._wave(groups), name=f"wave {groups[0]}..{groups[-1]}")

    async def _wave(self, groups: list[int]) -> None:
        """Sample the groups, finish each as it completes. Dropped groups are replaced when the whole wave is over."""
        prompts: dict[int, Prompt] = {}
        for group in groups:
            prompt = await self.stages.prompt(group)
            if isinstance(prompt, str):
                self._drop(group, prompt)
            else:
                prompts[group] = prompt
        finishing: list[asyncio.Task[bool]] = []
        async with asyncio.TaskGroup() as tasks:

            def done(samples: list[Sample]) -> None:
                self._tally.tokens += sum(int(sample.mask.sum()) for sample in samples)
                finishing.append(tasks.create_task(self._finish(prompts[samples[0].group], samples)))

            if prompts:
                with self._sampling:
                    await self.stages.sample(list(prompts.values()), done)
        if len(finishing) != len(prompts):
            raise RuntimeError(f"loop: {len(prompts)} groups were to be sampled, got {len(finishing)}: {[*prompts]}")
        kept = sum(task.result() for task in finishing)
        for _ in range(len(groups) - kept):
            self._slots.release()

    async def _finish(self, prompt: Prompt, samples: list[Sample]) -> bool:
        """Reward and signals of one sampled group. False when it was dropped."""
        version, digest = samples[0].version, samples[0].digest
        self.ledger.sampled(prompt.group, version, digest)
        with self._rewarding:
            rewards = await self.stages.reward(prompt, samples)
        trajectories: list[Trajectory] = []
        for sample, reward in zip(samples, rewards, strict=True):
            if isinstance(reward, str):
                self.ledger.failed(prompt.group, sample.index, reward)
                self._tally.failed[reward] += 1
            else:
                trajectories.append(Trajectory.of(sample, reward))
        if len(trajectories) < 2:
            return self._drop(prompt.group, "fewer than two completions have a reward")
        if self._stale(version):
            return self._drop(prompt.group, "stale")
        if self.run.rollout.refill and len({row.reward for row in trajectories}) == 1:
            return self._drop(prompt.group, "all rewards are equal")
        rewarded_at = time.monotonic()
        try:
            with self._crediting:
                signals = await self.stages.signals(prompt, trajectories)
        except Stale:
            return self._drop(prompt.group, "stale")
        except FloatingPointError:
            return self._drop(prompt.group, "a signal is not finite")
        self.ledger.scored(prompt.group, version, digest)
        await self._ready.put(Group(prompt=prompt, trajectories=trajectories, signals=signals, rewarded_at=rewarded_at))
        return True

    def _stale(self, version: int) -> bool:
        return self._earliest - version > self.run.max_staleness

    def _drop(self, group: int, reason: str) -> bool:
        self.ledger.dropped(group, reason)
        self._tally.dropped[reason] += 1
        self._drops_in_a_row += 1
        if self._drops_in_a_row > MAX_DROPS * self.batch_size:
            raise RuntimeError(
                f"loop: {self._drops_in_a_row} groups in a row were dropped, expected at most "
                f"{MAX_DROPS * self.batch_size} ({MAX_DROPS} batches); dropped since the last step: "
                f"{dict(self._tally.dropped)}; failed samples: {dict(self._tally.failed)}"
            )
        return False

    async def _take(self) -> list[Group]:
        """The next batch: fresh groups only, sorted, whatever order they completed in."""
        run, groups = self.run, list[Group]()
        stages = run.rollout.timeout_s + run.reward.timeout_s + run.credit.timeout_s
        while len(groups) < self.batch_size:
            what, limit = "loop: the next scored group", PATIENCE * (START_TIMEOUT_S + stages)
            idle_since = time.monotonic()
            group = await within(limit, what, self._ready.get())
            self._tally.credit_stall_s += max(0.0, time.monotonic() - max(idle_since, group.rewarded_at))
            if self._stale(group.version):
                self._drop(group.prompt.group, "stale")
                self._slots.release()
            else:
                groups.append(group)
                self._drops_in_a_row = 0
        return sorted(groups, key=lambda group: group.prompt.group)

    async def _steps(self, log: Callable[[int, Metrics, list[Group], Batch], Awaitable[None]]) -> None:
        while self.version < self.run.steps:
            step = self.version + 1
            began = time.monotonic()
            groups = await self._take()
            self._earliest = step
            waited = time.monotonic() - began
            batch, metrics = await self.stages.assign(groups, step)
            assigned = time.monotonic()
            metrics |= await self.stages.learn(batch)
            learned = time.monotonic()
            # publishing first: the fleet waits for it, and nothing is trained on the new version before the commit
            async with asyncio.TaskGroup() as both:
                published = both.create_task(self.stages.publish(step))
                committed = both.create_task(self.stages.commit(step, groups))
            metrics |= published.result() | committed.result()
            metrics |= self._step_metrics(groups, batch)
            self.version = step
            if step + self.run.max_staleness < self.run.steps:
                for _ in groups:
                    self._slots.release()
            metrics |= {
                "time/wait_s": waited,
                "time/assign_s": assigned - began - waited,
                "time/learn_s": learned - assigned,
                "time/publish_s": time.monotonic() - learned,
                "time/step_s": time.monotonic() - began,
            }
            await log(step, metrics, groups, batch)

    def _step_metrics(self, groups: list[Group], batch: Batch) -> Metrics:
        tally, self._tally = self._tally, Tally()
        staleness = [self.version - group.version for group in groups]
        return {
            "reward/mean": float(batch.rewards.mean()),
            "reward/std": float(batch.rewards.std()),
            "reward/accuracy": float((batch.rewards >= self.run.reward.correct).float().mean()),
            "staleness/mean": sum(staleness) / len(staleness),
            "staleness/max": max(staleness),
            "rollout/tokens": tally.tokens,
            "rollout/length_mean": float(batch.mask.sum(1).float().mean()),
            "groups/dropped": tally.dropped.total(),
            "groups/too_long": tally.dropped[TOO_LONG],
            "samples/failed": tally.failed.total(),
            "queue/ready": self._ready.qsize(),
            "time/sample_s": self._sampling.take(),
            "time/reward_s": self._rewarding.take(),
            "time/credit_s": self._crediting.take(),
            "time/credit_stall_s": tally.credit_stall_s,
        }
