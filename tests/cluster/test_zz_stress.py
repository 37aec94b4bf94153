"""The pools over actors that are plain objects: what is accepted, who gets work, how the lost come back."""

import asyncio
import random
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster import fleet as fleet_module
from cluster import pool as pool_module
from cluster.deadline import Late, within
from cluster.fleet import Fleet, Scorers, Stale
from cluster.ledger import Ledger
from cluster.loop import Group, Loop
from configs.schema import ArithmeticData, CreditConfig, RolloutConfig, RunConfig
from credit.adapter import Adapter, Canary
from credit.trajectory import Batch, Prompt, Sample, Signals, Trajectory
from tests.cluster.test_loop import MEMORY, Control, closed, ledger_in
from tests.cluster.test_loop import config as loop_config

TOKENS = [5, 6, 7, 8]
BASE = np.array([0.0, -1.0, -2.0, -3.0], np.float32)
G = 2


def adapted(version: int) -> np.ndarray:
    """A fresh adapter (B = 0) answers as the base does, each later one differently."""
    return BASE - np.float32(0.25 * version)


def adapter(version: int) -> Adapter:
    canary = Canary(tokens=TOKENS, adapted=adapted(version), base=BASE)
    return Adapter(version=version, digest=f"digest {version}", tensors={}, config={}, canary=canary)


class Dead(Exception):
    pass


class Actor:
    """A member's process. `faults` maps a method to what happens in it instead, until `mend` is called."""

    def __init__(self, name: str, faults: dict[str, Callable[..., Any]]) -> None:
        self.name, self.faults = name, faults
        self.held: dict[int, Adapter] = {}
        self.active: int | None = None
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
        self.held[adapter.version] = adapter
        return adapted(adapter.version) if answer is None else answer

    async def canary(self, tokens: list[int], version: int | None) -> np.ndarray:
        answer = await self._enter("canary", version)
        assert tokens == TOKENS
        return BASE + np.float32(1e-6) if answer is None else answer

    async def activate(self, version: int) -> None:
        await self._enter("activate", version)
        assert version in self.held
        self.active = version

    async def stats(self) -> dict[str, Any]:
        return {}

    async def kill(self) -> None:
        await asyncio.sleep(0)
        if "kill" in self.faults:
            await self.faults["kill"](self, None)
        self.killed = True

    async def sample(self, prompts: list[Prompt], temperature: float | None = None) -> AsyncIterator[list[Sample]]:
        assert self.active is not None, "work for an actor that serves the base model"
        version = self.active
        for prompt in prompts:
            await self._enter("sample", prompt.group)
            yield [sample_of(prompt, index, version) for index in range(G)]

    async def score(
        self, samples: list[Sample], needs: frozenset[str], negatives: dict[int, list[int]] | None
    ) -> list[Signals]:
        await self._enter("score", samples[0].version)
        if samples[0].version not in self.held:
            raise RuntimeError(f"v{samples[0].version} is not resident")
        return [{"logp": sample.logprobs} for sample in samples]

    async def delta_sums(self, coefficients: Any) -> Any:
        raise NotImplementedError

    async def delta_dots(self, direction: Any, keys: Any) -> Any:
        raise NotImplementedError

    async def delta_clear(self, keys: Any) -> None:
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
    )


def prompts(*groups: int) -> list[Prompt]:
    return [
        Prompt(group=group, tokens=[1], seeds=[10 * group + i for i in range(G)], prompt="", columns={})
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


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(pool_module, "LOAD_TIMEOUT_S", 0.3)
    monkeypatch.setattr(pool_module, "START_TIMEOUT_S", 3.0)
    return World()


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


def serving(fleet: Any) -> list[str]:
    return [member.name for member in fleet.serving()]


# ---- publishing ----


def test_every_member_that_answers_right_serves_and_its_version_is_activated_only_then(world: World) -> None:
    async def main() -> None:
        fleet = Fleet(config(), world.start)
        await fleet.start()
        assert serving(fleet) == []
        for version in (0, 1, 2):
            metrics = await fleet.publish(adapter(version))
            assert metrics["swap/rollout_serving"] == 2
        assert [member.version for member in fleet.members] == [2, 2]
        for actor in world.actors:
            assert actor.asked == [
                ("canary", None),
                *[(call, version) for version in (0, 1, 2) for call in ("load", "activate")],
            ]
        # B = 0: the base model would have answered the same, and the record says so
        assert fleet.verdicts == {"indistinguishable from the base model": 2, "proved": 4}
        assert fleet.refusals == {}
        await fleet.close()
        assert all(actor.killed for actor in world.actors)

    run(main())


WRONG = {
    "base served": (answers(lambda version: BASE), "Refused", "is that of the base model"),
    "previous version served": (answers(lambda v: adapted(v - 1), since=2), "Refused", "is that of the version 1"),
    "garbage": (answers(lambda version: np.array([0.0, -9.0, -0.1, -4.0])), "Refused", "off by"),
    "nan": (answers(lambda version: BASE * np.nan), "Refused", "off by inf"),
    "wrong length": (answers(lambda version: BASE[:3]), "Refused", "off by inf"),
    "raises": (raises, "ValueError", "does not match its digest"),
    "hangs": (hangs, "Late", "load: no answer within 0.3 s"),
    "dies": (dies, "Dead", "rollout-0"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_member_that_answers_wrong_is_quarantined_restarted_and_caught_up(
    world: World, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    fault, reason, says = WRONG[what]

    async def main() -> None:
        world.gate = asyncio.Event()
        fleet = Fleet(config(), world.start)
        await fleet.start()
        for version in (0, 1):
            await fleet.publish(adapter(version))
        bad = world.of("rollout-0")[0]
        bad.faults["load"] = fault
        metrics = await fleet.publish(adapter(2))
        assert metrics["swap/rollout_serving"] == 1
        assert serving(fleet) == ["rollout-1"]  # which did not wait for the other
        assert bad.active == 1
        assert fleet.refusals == {reason: 1}
        assert says in caplog.text
        await fleet.sample(prompts(0, 1, 2), world.done)
        assert {sample.version for samples in world.delivered for sample in samples} == {2}
        assert not [call for call in bad.asked if call[0] == "sample"]
        world.gate.set()
        await until(lambda: len(fleet.serving()) == 2)
        again = world.of("rollout-0")[1]
        assert bad.killed
        assert again.asked == [("canary", None), ("load", 2), ("activate", 2)]
        assert fleet.restarts == 1
        await fleet.sample(prompts(3, 4), world.done)
        assert ("sample", 3) in again.asked
        assert world.groups() == [0, 1, 2, 3, 4]
        await fleet.close()

    run(main())


@pytest.mark.parametrize("fault", [hangs, raises, dies])
@pytest.mark.parametrize("method", ["canary", "activate", "kill"])
def test_a_member_that_fails_elsewhere_in_the_swap_comes_back(world: World, method: str, fault: Any) -> None:
    async def main() -> None:
        # what fails at the kill is tried again: nothing takes the place of an actor that may still be alive
        world.faults["rollout-0"] = [{method: fault} if method != "kill" else {"load": raises, "kill": once(fault)}]
        fleet = Fleet(config(), world.start)
        await fleet.start()
        await fleet.publish(adapter(0))
        await until(lambda: len(fleet.serving()) == 2)
        assert world.of("rollout-0")[0].killed
        assert len(world.of("rollout-0")) == 2
        await fleet.close()

    def once(fault: Any) -> Any:
        async def first(actor: Actor, argument: Any) -> None:
            del actor.faults["kill"]
            await fault(actor, argument)

        return first

    run(main())


def test_an_actor_of_another_base_model_never_serves(world: World) -> None:
    async def main() -> None:
        other = {"canary": answers_base}
        world.faults["rollout-0"] = [other] * 9
        fleet = Fleet(config(minimum=2), world.start)
        await fleet.start()
        with pytest.raises(RuntimeError, match="another base model"):
            await fleet.publish(adapter(0))
        assert not [call for actor in world.of("rollout-0") for call in actor.asked if call[0] == "activate"]
        await fleet.close()

    async def answers_base(actor: Actor, version: int | None) -> np.ndarray:
        return BASE - np.float32(1.0)

    run(main())


def test_a_publish_during_a_recovery_is_caught_up_before_any_work(world: World) -> None:
    async def main() -> None:
        world.gate, loading = asyncio.Event(), asyncio.Event()

        async def slowly(actor: Actor, version: int) -> None:
            if not loading.is_set():
                loading.set()
                await asyncio.sleep(0.05)

        world.faults["rollout-0"] = [{}, {"load": slowly}]
        fleet = Fleet(config(), world.start)
        await fleet.start()
        await fleet.publish(adapter(0))
        fleet.quarantine(fleet.members[0], fleet.members[0].actor, Dead("of memory"))
        await fleet.publish(adapter(1))
        world.gate.set()
        await loading.wait()
        await fleet.publish(adapter(2))  # arrives while the new actor loads v1
        assert serving(fleet) == ["rollout-1"]
        await until(lambda: len(fleet.serving()) == 2)
        again = world.of("rollout-0")[1]
        assert again.active == fleet.members[0].version == 2
        assert [version for call, version in again.asked if call == "load"] == [1, 2]
        await fleet.close()

    run(main())


def test_two_members_that_fail_at_once_both_come_back(world: World) -> None:
    async def main() -> None:
        for name in ("rollout-0", "rollout-1"):
            world.faults[name] = [{"load": raises}]
        fleet = Fleet(config(replicas=3, minimum=2), world.start)
        await fleet.start()
        metrics = await fleet.publish(adapter(0))  # waits for the second
        assert metrics["swap/rollout_serving"] >= 2
        await until(lambda: len(fleet.serving()) == 3)
        assert fleet.restarts == 2
        assert fleet.refusals == {"ValueError": 2}
        await fleet.close()

    run(main())


def test_one_failure_that_is_seen_twice_is_one_restart(world: World) -> None:
    async def main() -> None:
        fleet = Fleet(config(), world.start)
        await fleet.start()
        await fleet.publish(adapter(0))
        member, actor = fleet.members[0], fleet.members[0].actor
        for _ in range(2):
            fleet.quarantine(member, actor, Dead("seen by two callers"))
        await until(lambda: member.serving)
        fleet.quarantine(member, actor, Dead("seen late, the actor was replaced already"))
        assert member.serving
        assert (fleet.restarts, len(world.of("rollout-0"))) == (1, 2)
        await fleet.close()

    run(main())


# ---- the end of hope ----


def test_a_member_is_given_up_after_its_restarts_and_the_others_go_on(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        world.faults["rollout-0"] = [{"load": raises}] * 99
        fleet = Fleet(config(), world.start)
        await fleet.start()
        await fleet.publish(adapter(0))
        await until(lambda: "given up" in caplog.text)
        assert len(world.of("rollout-0")) == 1 + pool_module.RESTARTS
        assert all(actor.killed for actor in world.of("rollout-0"))
        await fleet.publish(adapter(1))
        await fleet.sample(prompts(0, 1), world.done)
        assert world.groups() == [0, 1]
        assert fleet.refusals == {"ValueError": 1 + pool_module.RESTARTS}
        await fleet.close()

    run(main())


def test_a_member_that_loads_the_older_version_and_never_the_newer_is_given_up_too(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Each new actor accepts something: that must not count as recovery."""

    async def main() -> None:
        scorers = Scorers(config(staleness=1), world.start)
        await scorers.start()
        for version in (0, 1, 2):
            await scorers.publish(adapter(version))
        world.faults["credit-0"] = [{"load": answers(lambda version: BASE, since=2)} for _ in range(99)]
        scorers.quarantine(scorers.members[0], scorers.members[0].actor, Dead("of memory"))
        await until(lambda: "given up" in caplog.text)
        assert len(world.of("credit-0")) == 1 + pool_module.RESTARTS
        await scorers.close()

    run(main())


def test_a_start_that_fails_is_tried_again_and_counted(world: World) -> None:
    async def main() -> None:
        fleet = Fleet(config(), world.start)
        await fleet.start()
        await fleet.publish(adapter(0))
        world.start_faults["rollout-0"] = [OSError("no memory"), OSError("no memory"), None]
        fleet.quarantine(fleet.members[0], fleet.members[0].actor, Dead("gone"))
        await until(lambda: len(fleet.serving()) == 2)
        assert fleet.refusals == {"Dead": 1, "OSError": 2}
        assert fleet.restarts == 3
        await fleet.close()

    run(main())


@pytest.mark.parametrize("minimum", [1, 2])
def test_below_the_minimum_the_run_ends_with_the_reason_instead_of_waiting(world: World, minimum: int) -> None:
    async def main() -> None:
        for name in ("rollout-0", "rollout-1")[: 3 - minimum]:
            world.faults[name] = [{"load": raises}] * 99
        fleet = Fleet(config(minimum=minimum, timeout_s=1e3), world.start)
        await fleet.start()
        async with asyncio.timeout(2):
            with pytest.raises(RuntimeError, match=rf"expected at least {minimum}: rollout-\d was given up.*digest"):
                await fleet.publish(adapter(0))
            with pytest.raises(RuntimeError, match="was given up"):
                await fleet.sample(prompts(0), world.done)
        await fleet.close()

    run(main())


def test_a_publish_that_never_reaches_the_minimum_ends_by_deadline(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "START_TIMEOUT_S", 0.1)

    async def main() -> None:
        world.gate = asyncio.Event()  # never set
        world.faults["rollout-0"] = [{"load": raises}]
        fleet = Fleet(config(minimum=2), world.start)
        await fleet.start()
        with pytest.raises(RuntimeError, match=r"no answer within 0\.1 s"):
            await fleet.publish(adapter(0))
        await fleet.close()

    run(main())


def test_close_ends_the_recoveries_and_kills_every_actor(world: World) -> None:
    async def main() -> None:
        world.gate = asyncio.Event()
        fleet = Fleet(config(), world.start)
        await fleet.start()
        await fleet.publish(adapter(0))
        fleet.quarantine(fleet.members[0], fleet.members[0].actor, Dead("gone"))
        await asyncio.sleep(0.01)
        await fleet.close()
        world.gate.set()
        await asyncio.sleep(0.01)
        assert len(world.actors) == 2
        assert all(actor.killed for actor in world.actors)

    run(main())


# ---- sampling ----


@pytest.mark.parametrize("fault", [raises, dies, hangs])
def test_what_a_failing_replica_leaves_is_sampled_again_once_with_the_same_seeds(world: World, fault: Any) -> None:
    async def main() -> None:
        fleet = Fleet(config(timeout_s=0.5), world.start)
        await fleet.start()
        await fleet.publish(adapter(0))

        async def at_group_4(actor: Actor, group: int) -> None:
            if group == 4:
                await fault(actor, group)

        world.of("rollout-0")[0].faults["sample"] = at_group_4  # it is dealt 0, 2, 4, 6
        await fleet.sample(prompts(*range(8)), world.done)
        assert world.groups() == list(range(8))
        for samples in world.delivered:
            group = samples[0].group
            assert [int(sample.tokens[1]) for sample in samples] == [10 * group, 10 * group + 1]
        asked = [group for actor in world.actors for method, group in actor.asked if method == "sample"]
        assert sorted(asked) == [0, 1, 2, 3, 4, 4, 5, 6, 7]  # what was delivered is not asked for again
        await until(lambda: len(fleet.serving()) == 2)
        assert [member.outstanding for member in fleet.members] == [0, 0]
        await fleet.close()

    run(main())


def test_a_stream_that_ends_early_or_answers_for_another_group_is_a_failure(world: World) -> None:
    async def main() -> None:
        fleet = Fleet(config(), world.start)
        await fleet.start()
        await fleet.publish(adapter(0))
        for name, odd in (("rollout-0", empty), ("rollout-1", another)):
            world.of(name)[0].sample = odd  # pyright: ignore[reportAttributeAccessIssue]
        await fleet.sample(prompts(0, 1), world.done)
        assert world.groups() == [0, 1]
        assert fleet.refusals == {"RuntimeError": 1, "KeyError": 1}
        await fleet.close()

    async def empty(prompts: list[Prompt], temperature: float | None = None) -> AsyncIterator[list[Sample]]:
        for prompt in prompts[:0]:
            yield [sample_of(prompt, 0, 0)]

    async def another(_: list[Prompt], temperature: float | None = None) -> AsyncIterator[list[Sample]]:
        yield [sample_of(prompts(99)[0], 0, 0)]

    run(main())


def test_work_that_kills_every_replica_ends_the_run(world: World) -> None:
    async def main() -> None:
        world.faults = {name: [{"sample": dies} for _ in range(99)] for name in ("rollout-0", "rollout-1")}
        fleet = Fleet(config(), world.start)
        await fleet.start()
        await fleet.publish(adapter(0))
        with pytest.raises(ExceptionGroup) as raised:
            await fleet.sample(prompts(7), world.done)
        assert f"groups [7] failed on {fleet_module.ATTEMPTS} replicas" in str(raised.value.exceptions[0])
        assert world.delivered == []
        await fleet.close()

    run(main())


def test_an_error_of_the_receiver_is_not_blamed_on_the_replica(world: World) -> None:
    async def main() -> None:
        fleet = Fleet(config(), world.start)
        await fleet.start()
        await fleet.publish(adapter(0))

        def full(samples: list[Sample]) -> None:
            raise ZeroDivisionError

        with pytest.raises(ExceptionGroup) as raised:
            await fleet.sample(prompts(0, 1), full)
        assert isinstance(raised.value.exceptions[0], ZeroDivisionError)
        assert len(fleet.serving()) == 2
        assert fleet.refusals == {}
        await fleet.close()

    run(main())


def test_prompts_are_dealt_in_order_and_alike_every_time(world: World) -> None:
    async def main() -> None:
        fleet = Fleet(config(replicas=3), world.start)
        await fleet.start()
        await fleet.publish(adapter(0))
        for first in (0, 7):
            await fleet.sample(prompts(*range(first, first + 7)), world.done)
        for number, actor in enumerate(world.actors):
            dealt = [group for method, group in actor.asked if method == "sample"]
            assert dealt == [*range(number, 7, 3), *range(7 + number, 14, 3)]
        await fleet.close()

    run(main())


# ---- credit actors ----


async def score(scorers: Scorers, version: int, group: int = 0) -> list[Signals]:
    return await scorers.score([sample_of(prompts(group)[0], index, version) for index in range(G)], frozenset())


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_a_credit_actor_catches_up_on_every_version_that_may_still_be_trained(world: World, staleness: int) -> None:
    async def main() -> None:
        scorers = Scorers(config(replicas=1, staleness=staleness), world.start)
        await scorers.start()
        for version in range(6):
            await scorers.publish(adapter(version))
        scorers.quarantine(scorers.members[0], scorers.members[0].actor, Dead("of memory"))
        needed = list(range(5 - staleness, 6))
        for version in needed:
            assert len(await score(scorers, version)) == G
        again = world.of("credit-0")[1]
        assert sorted(again.held) == needed
        assert again.active == 5
        await scorers.close()

    run(main())


def test_a_score_that_fails_is_tried_on_another_actor(world: World) -> None:
    async def main() -> None:
        scorers = Scorers(config(), world.start)
        await scorers.start()
        await scorers.publish(adapter(0))
        world.of("credit-0")[0].faults["score"] = dies
        signals = await asyncio.gather(*(score(scorers, 0, group) for group in range(100, 160)))
        assert [len(rows) for rows in signals] == [G] * 6
        await until(lambda: len(scorers.serving()) == 2)
        assert scorers.restarts == 1  # six callers, one death
        assert [member.outstanding for member in scorers.members] == [0, 0]
        await scorers.close()

    run(main())


def test_a_group_that_kills_every_credit_actor_ends_the_run(world: World) -> None:
    async def main() -> None:
        world.faults = {name: [{"score": dies} for _ in range(99)] for name in ("credit-0", "credit-1")}
        scorers = Scorers(config(), world.start)
        await scorers.start()
        await scorers.publish(adapter(0))
        with pytest.raises(RuntimeError, match=f"group 3 failed on {fleet_module.ATTEMPTS} actors"):
            await score(scorers, 0, group=3)
        await scorers.close()

    run(main())


def test_a_score_waits_for_an_actor_that_has_accepted_its_version(world: World) -> None:
    """The fleet may be faster: a group of a version can be there before a credit actor has accepted it."""

    async def main() -> None:
        scorers = Scorers(config(staleness=1), world.start)
        await scorers.start()
        await scorers.publish(adapter(0))
        early = asyncio.create_task(score(scorers, 1))
        await asyncio.sleep(0.01)
        assert not early.done()
        world.of("credit-0")[0].faults["load"] = hangs
        await scorers.publish(adapter(1))
        assert len(await early) == G
        assert [call for call in world.of("credit-0")[0].asked if call[0] == "score"] == []
        assert scorers.refusals == {"Late": 1}
        await scorers.close()

    run(main())


def test_a_group_whose_version_is_no_longer_held_is_stale_and_no_actor_is_blamed(world: World) -> None:
    async def main() -> None:
        scorers = Scorers(config(staleness=1), world.start)
        await scorers.start()
        for version in range(4):
            await scorers.publish(adapter(version))
        with pytest.raises(Stale, match="was sampled under v1, which is no longer held"):
            await score(scorers, 1)
        assert len(await score(scorers, 2)) == G
        assert scorers.refusals == {}
        await scorers.close()

    run(main())


# ---- together ----


class Joined(Control):
    """The loop's stages over both pools."""

    def __init__(self, ledger: Ledger, run: RunConfig, world: World) -> None:
        super().__init__(ledger)
        self.fleet, self.scorers = Fleet(run, world.start), Scorers(run, world.start)

    def prompt(self, group: int) -> Prompt:
        return prompts(group)[0]

    async def sample(self, prompts: list[Prompt], done: Callable[[list[Sample]], None]) -> None:
        await self.fleet.sample(prompts, done)

    async def signals(self, prompt: Prompt, trajectories: list[Trajectory]) -> list[Signals]:
        return await self.scorers.score(list(trajectories), frozenset())

    async def publish(self, version: int) -> dict[str, float]:
        await asyncio.gather(self.fleet.publish(adapter(version)), self.scorers.publish(adapter(version)))
        return {}


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("seed", range(100, 160))
def test_a_run_whose_actors_die_hang_and_lie_trains_every_group_once(
    world: World, monkeypatch: pytest.MonkeyPatch, staleness: int, seed: int
) -> None:
    generator = random.Random(f"{seed}/{staleness}")
    for module, name, value in (
        (pool_module, "LOAD_TIMEOUT_S", 0.1),
        (pool_module, "RESTARTS", 50),
        (fleet_module, "ATTEMPTS", 50),
    ):
        monkeypatch.setattr(module, name, value)

    async def sometimes(actor: Actor, version: int) -> Any:
        await asyncio.sleep(0.002 * generator.random())
        if generator.random() < 0.07:
            injected.append(actor.name)
            return await generator.choice([raises, dies, hangs])(actor, version)
        return None

    async def lies(actor: Actor, version: int) -> Any:
        return BASE - np.float32(0.1) if generator.random() < 0.1 else await sometimes(actor, version)

    injected: list[str] = []
    run_config = loop_config(steps=8, staleness=staleness, prompts=4, timeout_s=0.15)
    faults = {"sample": sometimes, "score": sometimes, "load": lies, "activate": sometimes}
    for kind in ("rollout-0", "rollout-1", "credit-0"):
        world.faults[kind] = [dict(faults) for _ in range(200)]

    async def log(step: int, metrics: dict[str, float], groups: list[Group], batch: Batch) -> None:
        for group in groups:
            assert 0 <= step - 1 - group.version <= staleness
            for row in group.trajectories:
                assert (row.version, row.digest) == (group.version, f"digest {group.version}")
                assert int(row.tokens[1]) == 10 * row.group + row.index

    async def main() -> None:
        await asyncio.gather(stages.fleet.start(), stages.scorers.start())
        await stages.publish(0)
        await Loop(run_config, stages, stages.ledger).train(log)
        await asyncio.gather(stages.fleet.close(), stages.scorers.close())

    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        stages = Joined(ledger_in(Path(folder)), run_config, world)
        run(main())
        report = closed(stages.ledger)
    assert injected
    assert (report["trained"], report["open"], report["balanced"]) == (32, 0, True)
    assert report["dropped_by_reason"].keys() <= {"stale"}
    if staleness == 0:
        assert stages.trained == [list(range(4 * step, 4 * step + 4)) for step in range(8)]


# ---- deadlines ----


def test_a_deadline_names_what_was_waited_for_and_leaves_other_timeouts_alone() -> None:
    async def itself() -> None:
        raise TimeoutError("of the thing itself")

    async def main() -> None:
        assert await within(1, "an answer", asyncio.sleep(0, "yes")) == "yes"
        with pytest.raises(Late, match=r"an answer: no answer within 0\.01 s"):
            await within(0.01, "an answer", asyncio.sleep(9))
        with pytest.raises(TimeoutError, match="of the thing itself"):
            await within(1, "an answer", itself())
        waiting = asyncio.create_task(within(9, "an answer", asyncio.sleep(9)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    run(main())
