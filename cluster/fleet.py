"""The two pools: rollout replicas that sample, credit actors that look inside the model."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import numpy as np

from cluster.deadline import within
from cluster.pool import Holder, Member, Pool
from configs.schema import RunConfig
from credit.trajectory import Prompt, Sample, Signals

ATTEMPTS = 3
"""Times that the same work is tried on a live member before the run ends: what kills every member must not go on."""


class Stale(RuntimeError):
    """A version so old that the actors have unloaded it."""


Key = tuple[int, int]
"""(group, index) of a trajectory."""


class Replica(Holder, Protocol):
    def sample(self, prompts: list[Prompt], temperature: float | None = None) -> AsyncIterator[list[Sample]]: ...


class Scorer(Holder, Protocol):
    async def score(
        self, samples: list[Sample], needs: frozenset[str], negatives: dict[int, list[int]] | None
    ) -> list[Signals]: ...
    async def delta_sums(self, coefficients: dict[Key, np.ndarray]) -> tuple[np.ndarray, np.ndarray]: ...
    async def delta_dots(self, direction: np.ndarray, keys: list[Key]) -> dict[Key, np.ndarray]: ...
    async def delta_clear(self, keys: list[Key]) -> None: ...


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
        members = sorted(await self.available(), key=lambda member: member.outstanding)
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
        error: Exception | None = None
        for attempt in range(ATTEMPTS):
            if attempt:
                member = min(await self.available(), key=lambda other: other.outstanding)
            actor, load = member.actor, len(missing)
            member.outstanding += load
            try:
                error = await self._drain(member.name, actor, missing, done, temperature)
            finally:
                member.outstanding -= load
            if error is None:
                return
            self.quarantine(member, actor, error)
        raise RuntimeError(
            f"rollout: groups {sorted(missing)} failed on {ATTEMPTS} replicas, the last because: {error}"
        ) from error

    async def _drain(
        self,
        name: str,
        actor: Replica | None,
        missing: dict[int, Prompt],
        done: Callable[[list[Sample]], None],
        temperature: float | None,
    ) -> Exception | None:
        """Sample what is missing. Returns what went wrong with the replica; an error of `done` is not its fault."""
        if actor is None:
            return RuntimeError(f"{name}: quarantined before it began")
        stream = actor.sample(list(missing.values()), temperature)
        while missing:
            what = f"{name}: the next of groups {sorted(missing)}"
            try:
                samples = await within(self.timeout_s, what, anext(stream))
                del missing[samples[0].group]
            except StopAsyncIteration:
                return RuntimeError(f"{what}: the stream ended without it")
            except Exception as error:
                return error
            done(samples)
        return None


class Scorers(Pool[Scorer]):
    """Credit actors. Each holds every version whose trajectories may still be trained."""

    def __init__(self, run: RunConfig, start: Callable) -> None:
        super().__init__("credit", run.credit.replicas, 1, run.max_staleness + 1, start)
        self.timeout_s = run.credit.timeout_s
        self._keeper: dict[Key, Scorer] = {}  # which actor keeps the DelTA features of a trajectory

    async def score(
        self, samples: list[Sample], needs: frozenset[str], negatives: dict[int, list[int]] | None = None
    ) -> list[Signals]:
        """The signals of one group, from the least loaded credit actor; tried again on another when that fails.

        Raises Stale when no actor holds the version of the samples any more.
        """
        group, version = samples[0].group, samples[0].version
        error: Exception | None = None
        for _ in range(ATTEMPTS):
            members = await self.available(version)
            if version < self.current()[0].version:
                raise Stale(f"credit: group {group} was sampled under v{version}, which is no longer held")
            member = min(members, key=lambda other: other.outstanding)
            actor = member.actor
            assert actor is not None
            member.outstanding += 1
            try:
                what = f"{member.name}: signals of group {group}"
                signals = await within(self.timeout_s, what, actor.score(samples, needs, negatives))
                if "delta_feature" in needs:
                    self._keeper |= {(sample.group, sample.index): actor for sample in samples}
                return signals
            except FloatingPointError:
                raise  # the group's fault, or the policy's; the actor is well
            except Exception as failure:
                error = failure
                self.quarantine(member, actor, error)
            finally:
                member.outstanding -= 1
        raise RuntimeError(f"credit: group {group} failed on {ATTEMPTS} actors, the last because: {error}") from error

    async def delta_sums(self, coefficients: dict[Key, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """DelTA's weighted sums of features over all credit actors, each [H]."""
        parts = [
            actor.delta_sums({key: coefficients[key] for key in keys})
            for actor, keys in self._kept(list(coefficients)).items()
        ]
        sums = await within(self.timeout_s, f"{self.kind}: DelTA sums", asyncio.gather(*parts))
        return np.sum([positive for positive, _ in sums], 0), np.sum([negative for _, negative in sums], 0)

    async def delta_dots(self, direction: np.ndarray, keys: list[Key]) -> dict[Key, np.ndarray]:
        """The features' dot products with `direction` [H]: [T] for each of `keys`."""
        parts = [actor.delta_dots(direction, kept) for actor, kept in self._kept(keys).items()]
        answers = await within(self.timeout_s, f"{self.kind}: DelTA dot products", asyncio.gather(*parts))
        return {key: values for answer in answers for key, values in answer.items()}

    async def delta_clear(self, keys: list[Key]) -> None:
        """The features of a trained batch are not needed any more."""
        parts = [actor.delta_clear(kept) for actor, kept in self._kept(keys).items()]
        for key in keys:
            del self._keeper[key]
        await within(self.timeout_s, f"{self.kind}: DelTA clear", asyncio.gather(*parts))

    def _kept(self, keys: list[Key]) -> dict[Scorer, list[Key]]:
        kept: dict[Scorer, list[Key]] = {}
        for key in keys:
            kept.setdefault(self._keeper[key], []).append(key)
        return kept
