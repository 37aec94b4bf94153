"""Actors that hold adapter versions: load, canary, accept; quarantine, restart, catch up.

    starting ──adapters loaded and proved──▶ serving ──load, canary, call or deadline failed──▶ restarted

Only a serving member gets work. A member that fails is quarantined at once, killed and started again; before it serves
it loads the newest versions and answers their canaries, so it never serves the base model or a version left behind. The
others go on. The run ends when fewer than `minimum` members serve and one has used up its restarts.

Several runs may share a pool: each is a policy with versions of its own; the policy of a single run is "".
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from cluster.canary import judge, tolerance
from cluster.deadline import within
from credit.adapter import Adapter, label

log = logging.getLogger("accredit.pool")

LOAD_TIMEOUT_S = 60.0
START_TIMEOUT_S = 300.0
WATCH_S = 3.0  # between two questions whether an actor is alive
RESTARTS = 3
"""Restarts of one member that does not come to serve in between, before it is given up."""


class Holder(Protocol):
    """A remote actor that holds adapter versions. Every method raises when the actor is dead."""

    async def load(self, adapter: Adapter) -> np.ndarray: ...
    async def canary(self, tokens: list[int], version: int | None) -> np.ndarray: ...
    async def activate(self, version: int, policy: str) -> None: ...
    async def stats(self, policy: str) -> dict[str, Any]: ...
    async def forget(self, policy: str) -> None: ...
    async def alive(self) -> None: ...
    async def kill(self) -> None: ...


H = TypeVar("H", bound=Holder)


@dataclass(slots=True, eq=False)
class Member(Generic[H]):
    """One place in the pool, whichever actor fills it."""

    name: str
    actor: H | None = None  # None while it is being started
    serving: bool = False
    recovering: bool = False  # being restarted: catches up by itself
    versions: dict[str, int] = field(default_factory=dict)  # newest accepted, by policy
    limit: float = 0.0  # canary tolerance, from measured numerics
    restarts: int = 0
    outstanding: int = 0  # calls or groups under way
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # one adoption at a time, in order of version


class Pool(Generic[H]):
    """`count` members made by `start(name)`; each holds the newest `depth` versions."""

    def __init__(self, kind: str, count: int, minimum: int, depth: int, start: Callable[[str], Awaitable[H]]) -> None:
        self.kind, self.minimum, self.depth = kind, minimum, depth
        self._start = start
        self.members = [Member[H](name=f"{kind}-{i}") for i in range(count)]
        self.recent: dict[str, deque[Adapter]] = {}  # by policy; one more than depth, to tell a version from the last
        self.rejected: dict[str, Exception] = {}  # policies whose adapters no member can hold
        self.refusals: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()  # of a policy's adoptions, in a row
        self.verdicts: Counter[str] = Counter()
        self.restarts = 0
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()  # recoveries and watches
        self._fatal: BaseException | None = None

    async def start(self) -> None:
        """Start every member. Raises what the first failing one raised."""
        await asyncio.gather(*(self._begin(member) for member in self.members))

    async def _begin(self, member: Member[H]) -> None:
        member.actor = await within(START_TIMEOUT_S, f"{member.name}: start", self._start(member.name))
        self._spawn(self._watch(member, member.actor))

    async def _watch(self, member: Member[H], actor: H) -> None:
        """Notice a death of which no call would tell, because none is under way.

        The question waits behind the calls before it, whose deadlines are their callers'. A member that is recovering
        is not asked: its recovery calls it all the time, and two that see one death would start two actors.
        """
        while member.actor is actor:
            if not member.recovering:
                try:
                    await actor.alive()
                except Exception as error:
                    self.quarantine(member, actor, error)
                    return
            await asyncio.sleep(WATCH_S)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def serving(self) -> list[Member[H]]:
        if self._fatal:
            raise self._fatal
        return [member for member in self.members if member.serving]

    async def available(self, version: int = 0, policy: str = "") -> list[Member[H]]:
        """The serving members that accepted the policy's `version` or a newer one; waits for the first.

        Raises the reason when there will be none.
        """
        what = f"{self.kind}: a serving member with {label(version, policy)}"

        def holders() -> list[Member[H]]:
            self._check(policy)
            return [member for member in self.serving() if member.versions.get(policy, -1) >= version]

        async with self._changed:
            return await within(self._patience_s(), what, self._changed.wait_for(holders))

    def _check(self, policy: str) -> None:
        if policy in self.rejected:
            raise self.rejected[policy]

    def _patience_s(self) -> float:
        """A recovery either succeeds or is given up by then: all restarts, each step of them as late as it may be."""
        calls = 2 + 2 * self.depth * max(1, len(self.recent))  # kill, base canary; load and activate for each version
        return (RESTARTS + 1) * (START_TIMEOUT_S + calls * LOAD_TIMEOUT_S)

    def current(self, policy: str = "") -> list[Adapter]:
        """What every serving member holds of a policy, once it has accepted the newest."""
        return list(self.recent[policy])[-self.depth :]

    async def forget(self, policy: str) -> None:
        """The policy's run is over: its slots are free for another's, and a member that starts again needs none."""
        self.recent.pop(policy, None)
        for member in self.members:
            async with member.turn:
                actor = member.actor
                member.versions.pop(policy, None)
                try:
                    if actor is not None:
                        await within(LOAD_TIMEOUT_S, f"{member.name}: forget {policy}", actor.forget(policy))
                except Exception as error:
                    self.quarantine(member, actor, error)

    async def publish(self, adapter: Adapter) -> dict[str, float]:
        """Load `adapter` on every member that is up and accept it where its canary is right.

        Returns when each of them has accepted it or is quarantined. Raises RuntimeError when fewer than `minimum`
        serve it and a member is beyond recovery, or, before any member sees it, when the adapter is not finite.
        """
        if not np.isfinite(adapter.canary.adapted).all():
            raise RuntimeError(f"{self.kind}: {adapter}: the learner's own log-probs of the canary are not finite")
        self.recent.setdefault(adapter.policy, deque(maxlen=self.depth + 1)).append(adapter)
        began = time.monotonic()
        members = [member for member in self.members if not member.recovering]
        seconds = await asyncio.gather(*(self._adopt_or_quarantine(member, adapter) for member in members))
        what = f"{self.kind}: {self.minimum} members serving {adapter}"
        async with self._changed:
            over = lambda: adapter.policy in self.rejected or len(self.serving()) >= self.minimum  # noqa: E731
            await within(self._patience_s(), what, self._changed.wait_for(over))
        self._check(adapter.policy)
        done = [s for s in seconds if s is not None]
        return {
            f"swap/{self.kind}_s": time.monotonic() - began,
            f"swap/{self.kind}_load_s": max(done, default=0.0),
            f"swap/{self.kind}_serving": len(self.serving()),
        }

    async def stats(self, policy: str = "") -> dict[str, dict[str, Any]]:
        """What every serving member says of itself and the policy; one that does not answer is quarantined."""
        members = self.serving()
        answers = await asyncio.gather(*(self._stats(member, member.actor, policy) for member in members))
        return {member.name: answer for member, answer in zip(members, answers, strict=True) if answer is not None}

    async def _stats(self, member: Member[H], actor: H | None, policy: str) -> dict[str, Any] | None:
        try:
            return await within(LOAD_TIMEOUT_S, f"{member.name}: stats", actor.stats(policy)) if actor else None
        except Exception as error:
            self.quarantine(member, actor, error)
            return None

    async def _adopt_or_quarantine(self, member: Member[H], adapter: Adapter) -> float | None:
        actor = member.actor
        try:
            seconds = await self._adopt(member, adapter)
            if member.actor is actor:
                await self._serve(member)
            return seconds
        except Exception as error:
            self.quarantine(member, actor, error)
            return None

    async def _adopt(self, member: Member[H], adapter: Adapter) -> float:
        """Load, ask, judge, accept. Returns the seconds of load and canary."""
        async with member.turn:
            try:
                seconds = await self._prove(member, adapter)
            except Exception as error:
                await self._blame(adapter, error)
                raise
            self._failures.pop(adapter.policy, None)
            return seconds

    async def _blame(self, adapter: Adapter, error: Exception) -> None:
        """Of several runs, one whose adapters the members cannot hold is given up, not the members."""
        self._failures[adapter.policy] += 1
        if self._failures[adapter.policy] < RESTARTS or set(self.recent) <= {adapter.policy}:
            return
        rejected = RuntimeError(f"{self.kind}: {adapter}: failed on {RESTARTS} actors, the last because: {error}")
        self.rejected[adapter.policy] = rejected
        self.recent.pop(adapter.policy)  # a member that starts again does not need it
        async with self._changed:
            self._changed.notify_all()

    async def _prove(self, member: Member[H], adapter: Adapter) -> float:
        actor, began = member.actor, time.monotonic()
        if actor is None or adapter.version <= member.versions.get(adapter.policy, -1):
            return 0.0
        what = f"{member.name}: {adapter}"
        if not member.versions:
            base = await within(LOAD_TIMEOUT_S, f"{what} base canary", actor.canary(adapter.canary.tokens, None))
            member.limit = tolerance(base, adapter.canary.base)
        answer = await within(LOAD_TIMEOUT_S, f"{what} load", actor.load(adapter))
        verdict = judge(answer, adapter.canary.adapted, self._others(adapter), member.limit)
        self.verdicts[verdict] += 1
        seconds = time.monotonic() - began
        await within(LOAD_TIMEOUT_S, f"{what} activate", actor.activate(adapter.version, adapter.policy))
        if member.actor is actor:
            member.versions[adapter.policy] = adapter.version
        return seconds

    def _others(self, adapter: Adapter) -> dict[str, np.ndarray]:
        """What would be answered by the base, by the versions before, and by the newest of the other policies."""
        others = {"base model": adapter.canary.base}
        for policy, recent in self.recent.items():
            if policy == adapter.policy:
                before = {f"version {a.version}": a for a in recent if a.version < adapter.version}
            else:
                before = {f"version {recent[-1].version} of {policy}": recent[-1]}
            # another run's canary may be of other tokens
            same = {name: a for name, a in before.items() if a.canary.tokens == adapter.canary.tokens}
            others |= {name: a.canary.adapted for name, a in same.items()}
        return others

    async def _serve(self, member: Member[H]) -> None:
        member.serving, member.recovering, member.restarts = True, False, 0
        async with self._changed:
            self._changed.notify_all()

    def quarantine(self, member: Member[H], actor: H | None, error: BaseException) -> None:
        """No more work for `member`; restart it in the background. Does nothing when `actor` was replaced already."""
        if member.actor is actor and actor is not None:
            self._restart(member, actor, error)

    def _restart(self, member: Member[H], dead: H, error: BaseException) -> None:
        log.error("%s quarantined: %s: %s", member.name, type(error).__name__, error)
        self.refusals[type(error).__name__] += 1
        member.serving, member.recovering, member.actor, member.versions = False, True, None, {}
        member.restarts += 1
        self._spawn(self._recover(member, dead, error))

    async def _recover(self, member: Member[H], dead: H, error: BaseException) -> None:
        try:
            await within(LOAD_TIMEOUT_S, f"{member.name}: kill", dead.kill())
            if member.restarts <= RESTARTS:
                await self._replace(member)
                return
        except Exception as failure:
            if member.restarts <= RESTARTS:
                self._restart(member, member.actor or dead, failure)
                return
            error = failure
        await self._give_up(member, error)

    async def _replace(self, member: Member[H]) -> None:
        began = time.monotonic()
        self.restarts += 1
        member.turn = asyncio.Lock()
        await self._begin(member)
        while behind := [p for p, recent in self.recent.items() if member.versions.get(p, -1) < recent[-1].version]:
            for adapter in self.current(behind[0]):
                await self._adopt(member, adapter)
        await self._serve(member)
        log.warning(
            "%s serves %s again, %.1f s after it failed",
            member.name,
            ", ".join(label(version, policy) for policy, version in member.versions.items()),
            time.monotonic() - began,
        )

    async def _give_up(self, member: Member[H], error: BaseException) -> None:
        """A member is beyond recovery: the run goes on while `minimum` others can serve."""
        log.error("%s: given up after %d restarts, the last because: %s", member.name, RESTARTS, error)
        async with self._changed:
            hopeful = [m for m in self.members if m.actor is not None or m.restarts <= RESTARTS]
            if len(hopeful) < self.minimum:
                self._fatal = RuntimeError(
                    f"{self.kind}: {len(hopeful)} members can serve, expected at least {self.minimum}: "
                    f"{member.name} was given up after {RESTARTS} restarts, the last because: {error}"
                )
            self._changed.notify_all()

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(member.actor.kill() for member in self.members if member.actor is not None))
