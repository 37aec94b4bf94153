"""The two pools: rollout replicas that sample, credit actors that look inside the model."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from cluster.deadline import within
from cluster.pool import Holder, Member, Pool
from configs.schema import RunConfig
from credit.trajectory import Prompt, Sample, Signals

ATTEMPTS = 3
"""Times that the same work is tried on a live member before the run ends: what kills every member must not go on."""


class Replica(Holder, Protocol):
    def sample(self, prompts: list[Prompt], temperature: float | None = None) -> AsyncIterator[list[Sample]]: ...


class Scorer(Holder, Protocol):
    async def score(
        self, samples: list[Sample], needs: frozenset[str], negatives: dict[int, list[int]] | None
    ) -> list[Signals]: ...


class Fleet(Pool[Replica]):
    """Rollout replicas."""

    def __init__(self, run: RunConfig, start: Callable) -> None:
        super().__init__("rollout", run.rollout.replicas, run.rollout.min_replicas, 1, start)
        self.timeout_s = run.rollout.timeout_s

    async def sample(
        self, prompts: list[Prompt], done: Callable[[list[Sample]], None], temperature: float | None = None
    ) -> None:
        """Sample every prompt; `done(samples)` for each group as it completes.

        The prompts are dealt to the serving replicas in order, least loaded first, so that the same prompts on an idle
        fleet always meet the same companions. What a failing replica leaves behind is sampled again, on another.
        """
        members = sorted(await self.available(self.timeout_s), key=lambda member: member.outstanding)
        shares = [prompts[i :: len(members)] for i in range(len(members))]
        async with asyncio.TaskGroup() as tasks:
            for member, share in zip(members, shares, strict=True):
                if share:
                    tasks.create_task(self._share(member, share, done, temperature))

    async def _share(
        self,
        member: Member[Replica],
        prompts: list[Prompt],
        done: Callable[[list[Sample]], None],
        temperature: float | None,
    ) -> None:
        missing = {prompt.group: prompt for prompt in prompts}
        for attempt in range(1, ATTEMPTS + 1):
            actor, load = member.actor, len(missing)
            member.outstanding += load
            try:
                assert actor is not None
                await self._drain(member.name, actor.sample(list(missing.values()), temperature), missing, done)
                return
            except Exception as error:
                self.quarantine(member, actor, error)
                if attempt == ATTEMPTS:
                    raise RuntimeError(
                        f"rollout: groups {sorted(missing)} failed on {ATTEMPTS} replicas, the last because: {error}"
                    ) from error
            finally:
                member.outstanding -= load
            member = min(await self.available(self.timeout_s), key=lambda other: other.outstanding)

    async def _drain(
        self,
        name: str,
        stream: AsyncIterator[list[Sample]],
        missing: dict[int, Prompt],
        done: Callable[[list[Sample]], None],
    ) -> None:
        while missing:
            what = f"{name}: the next of groups {sorted(missing)}"
            try:
                samples = await within(self.timeout_s, what, anext(stream))
            except StopAsyncIteration:
                raise RuntimeError(f"{what}: the stream ended without it") from None
            del missing[samples[0].group]
            done(samples)


class Scorers(Pool[Scorer]):
    """Credit actors. Each holds every version whose trajectories may still be trained."""

    def __init__(self, run: RunConfig, start: Callable) -> None:
        super().__init__("credit", run.credit.replicas, 1, run.max_staleness + 1, start)
        self.timeout_s = run.credit.timeout_s

    async def score(
        self, samples: list[Sample], needs: frozenset[str], negatives: dict[int, list[int]] | None = None
    ) -> list[Signals]:
        """The signals of one group, from the least loaded credit actor; tried again on another when that fails."""
        for attempt in range(1, ATTEMPTS + 1):
            member = min(await self.available(self.timeout_s), key=lambda other: other.outstanding)
            actor = member.actor
            member.outstanding += 1
            try:
                assert actor is not None
                what = f"{member.name}: signals of group {samples[0].group}"
                return await within(self.timeout_s, what, actor.score(samples, needs, negatives))
            except Exception as error:
                self.quarantine(member, actor, error)
                if attempt == ATTEMPTS:
                    raise RuntimeError(
                        f"credit: group {samples[0].group} failed on {ATTEMPTS} actors, the last because: {error}"
                    ) from error
            finally:
                member.outstanding -= 1
        raise AssertionError
