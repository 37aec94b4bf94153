"""The two pools: rollout replicas that sample, credit actors that look inside the model."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import nullcontext
from typing import Protocol, TypeVar

import numpy as np

from cluster.deadline import within
from cluster.pool import Holder, Member, Pool
from configs.schema import RunConfig
from credit.trajectory import Prompt, Sample, Signals

log = logging.getLogger("accredit.fleet")

ATTEMPTS = 3
"""Times that the same work is tried on a live member before the run ends: what kills every member must not go on."""


class Stale(RuntimeError):
    """A version so old that the actors have unloaded it."""


class Lost(RuntimeError):
    """DelTA features that died with the credit actor that kept them."""


Key = tuple[int, int]
"""(group, index) of a trajectory."""

T = TypeVar("T")


class Replica(Holder, Protocol):
    def sample(self, prompts: list[Prompt], temperature: float | None = None) -> AsyncIterator[list[Sample]]: ...


class Scorer(Holder, Protocol):
    async def score(
        self, samples: list[Sample], needs: frozenset[str], negatives: dict[int, list[int]] | None
    ) -> list[Signals]: ...
    async def delta_sums(self, coefficients: dict[Key, np.ndarray], policy: str) -> tuple[np.ndarray, np.ndarray]: ...
    async def delta_dots(self, direction: np.ndarray, keys: list[Key], policy: str) -> dict[Key, np.ndarray]: ...
    async def delta_clear(self, keys: list[Key], policy: str) -> None: ...


class Fleet(Pool[Replica]):
    """Rollout replicas.

    The last bits of a log-prob depend on what else is in the batch. A synchronous run promises bits, so there the
    prompts are dealt into one share for each configured replica however many serve, a share meets no other request on
    its replica, and what a failing replica leaves behind is sampled again as a whole share. An asynchronous run
    promises none of it: shares overlap, and only what is missing is sampled again. Neither can a fleet that several
    runs share (`policies`): waiting for one another they would gain nothing.
    """

    def __init__(self, run: RunConfig, start: Callable, policies: int = 1) -> None:
        super().__init__("rollout", run.rollout.replicas, run.rollout.min_replicas, 1, start)
        self.timeout_s = run.rollout.timeout_s
        self.synchronous = run.max_staleness == 0 and policies == 1
        self._turns = {member.name: asyncio.Lock() for member in self.members}  # synchronous: one share at a time

    async def sample(
        self, prompts: list[Prompt], done: Callable[[list[Sample]], None], temperature: float | None = None
    ) -> None:
        """Sample every prompt, all of one policy; `done(samples)` for each group as it completes.

        The prompts are dealt to the serving replicas in order, least loaded first. What a failing replica leaves behind
        is sampled again with the same seeds, on another.
        """
        members = sorted(await self.available(policy=prompts[0].policy), key=lambda member: member.outstanding)
        count = len(self.members) if self.synchronous else len(members)
        async with asyncio.TaskGroup() as tasks:
            for i in range(min(count, len(prompts))):
                tasks.create_task(self._share(members[i % len(members)], prompts[i::count], done, temperature))

    async def _share(
        self,
        member: Member[Replica],
        prompts: list[Prompt],
        done: Callable[[list[Sample]], None],
        temperature: float | None,
    ) -> None:
        missing = {prompt.group: prompt for prompt in prompts}
        error: Exception | None = None
        attempts = 0
        while attempts < ATTEMPTS:
            if error:
                able = await self.available(policy=prompts[0].policy)
                member = min(able, key=lambda other: other.outstanding)
            load = len(missing)
            member.outstanding += load
            try:
                async with self._turns[member.name] if self.synchronous else nullcontext():
                    actor = member.actor
                    again = prompts if self.synchronous else list(missing.values())
                    error = await self._drain(member.name, actor, again, missing, done, temperature)
            finally:
                member.outstanding -= load
            if error is None:
                return
            # a call that finds its actor quarantined already died of other work, perhaps another run's
            attempts += actor is not None and member.actor is actor
            self.quarantine(member, actor, error)
        raise RuntimeError(
            f"rollout: groups {sorted(missing)} failed on {ATTEMPTS} replicas, the last because: {error}"
        ) from error

    async def _drain(
        self,
        name: str,
        actor: Replica | None,
        prompts: list[Prompt],
        missing: dict[int, Prompt],
        done: Callable[[list[Sample]], None],
        temperature: float | None,
    ) -> Exception | None:
        """Sample the prompts and hand over what is missing.

        Returns what went wrong with the replica; an error of `done` is not its fault.
        """
        if actor is None:
            return RuntimeError(f"{name}: quarantined before it began")
        stream = actor.sample(prompts, temperature)
        coming = {prompt.group for prompt in prompts}
        while coming:
            what = f"{name}: the next of groups {sorted(coming)}"
            try:
                samples = await within(self.timeout_s, what, anext(stream))
                group = samples[0].group
                coming.remove(group)
            except StopAsyncIteration:
                return RuntimeError(f"{what}: the stream ended without it")
            except Exception as error:
                return error
            if missing.pop(group, None):
                done(samples)
        return None


class Scorers(Pool[Scorer]):
    """Credit actors. Each holds every version whose trajectories may still be trained."""

    def __init__(self, run: RunConfig, start: Callable) -> None:
        super().__init__("credit", run.credit.replicas, 1, run.max_staleness + 1, start)
        self.timeout_s = run.credit.timeout_s
        self._keeper: dict[tuple[str, int, int], Scorer] = {}  # which actor keeps a trajectory's DelTA features

    async def score(
        self, samples: list[Sample], needs: frozenset[str], negatives: dict[int, list[int]] | None = None
    ) -> list[Signals]:
        """The signals of one group, from the least loaded credit actor; tried again on another when that fails.

        Raises Stale when no actor holds the version of the samples any more.
        """
        group, version, policy = samples[0].group, samples[0].version, samples[0].policy
        error: Exception | None = None
        attempts = 0
        while attempts < ATTEMPTS:
            members = await self.available(version, policy)
            if version < self.current(policy)[0].version:
                raise Stale(f"credit: group {group} was sampled under v{version}, which is no longer held")
            member = min(members, key=lambda other: other.outstanding)
            actor = member.actor
            assert actor is not None
            member.outstanding += 1
            try:
                what = f"{member.name}: signals of group {group}"
                signals = await within(self.timeout_s, what, actor.score(samples, needs, negatives))
                if "delta_feature" in needs:
                    self._keeper |= {(policy, sample.group, sample.index): actor for sample in samples}
                return signals
            except FloatingPointError:
                raise  # the group's fault, or the policy's; the actor is well
            except Exception as failure:
                error = failure
                attempts += member.actor is actor  # else it died of other work, see `Fleet._share`
                self.quarantine(member, actor, error)
            finally:
                member.outstanding -= 1
        raise RuntimeError(f"credit: group {group} failed on {ATTEMPTS} actors, the last because: {error}") from error

    def keeps(self, keys: list[Key], policy: str = "") -> bool:
        """Whether the DelTA features of all `keys` of the policy are on actors that serve."""
        return self._kept(keys, policy) is not None

    async def delta_sums(self, coefficients: dict[Key, np.ndarray], policy: str = "") -> tuple[np.ndarray, np.ndarray]:
        """DelTA's weighted sums of features over all credit actors, each [H]. Raises Lost."""
        sums = await self._ask_keepers(
            "DelTA sums",
            list(coefficients),
            policy,
            lambda actor, keys: actor.delta_sums({key: coefficients[key] for key in keys}, policy),
        )
        return np.sum([positive for positive, _ in sums], 0), np.sum([negative for _, negative in sums], 0)

    async def delta_dots(self, direction: np.ndarray, keys: list[Key], policy: str = "") -> dict[Key, np.ndarray]:
        """The features' dot products with `direction` [H]: [T] for each of `keys`. Raises Lost."""
        answers = await self._ask_keepers(
            "DelTA dot products", keys, policy, lambda actor, kept: actor.delta_dots(direction, kept, policy)
        )
        return {key: values for answer in answers for key, values in answer.items()}

    async def delta_clear(self, keys: list[Key], policy: str = "") -> None:
        """The features of trained and dropped groups are not needed any more; what died with its keeper is gone."""
        held = [key for key in keys if (policy, *key) in self._keeper and self.keeps([key], policy)]
        try:
            await self._ask_keepers("DelTA clear", held, policy, lambda actor, kept: actor.delta_clear(kept, policy))
        except Lost:
            log.info("credit: a keeper of DelTA features died while they were cleared")
        for key in keys:
            self._keeper.pop((policy, *key), None)

    async def _ask_keepers(
        self, what: str, keys: list[Key], policy: str, call: Callable[[Scorer, list[Key]], Awaitable[T]]
    ) -> list[T]:
        kept = self._kept(keys, policy)
        if kept is None:
            raise Lost(f"credit: {what}: the actor that kept the features of some groups is gone")
        calls = (within(self.timeout_s, f"{member.name}: {what}", call(actor, mine)) for member, actor, mine in kept)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for (member, actor, _), answer in zip(kept, answers, strict=True):
            if isinstance(answer, Exception):
                self.quarantine(member, actor, answer)
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        if failures:
            raise Lost(f"credit: {what}: {failures[0]}") from failures[0]
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    def _kept(self, keys: list[Key], policy: str) -> list[tuple[Member[Scorer], Scorer, list[Key]]] | None:
        """Which serving actor keeps which of the keys; None when one of them has no keeper."""
        kept = [
            (member, actor, mine)
            for member in self.serving()
            if (actor := member.actor) and (mine := [key for key in keys if self._keeper.get((policy, *key)) is actor])
        ]
        return kept if sum(len(mine) for _, _, mine in kept) == len(keys) else None
