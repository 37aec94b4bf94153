"""The pools over actors that are plain objects: what is accepted, who gets work, how the lost come back."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from cluster import fleet as fleet_module
from cluster import pool as pool_module
from cluster.fleet import Fleet, Scorers
from credit.trajectory import Prompt, Sample
from tests.cluster.world import (
    BASE,
    Actor,
    Dead,
    World,
    adapted,
    adapter,
    answers,
    config,
    dies,
    hangs,
    prompts,
    raises,
    run,
    sample_of,
    until,
)


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
        assert [member.versions[""] for member in fleet.members] == [2, 2]
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
        assert bad.active == {"": 1}
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
        assert again.active == fleet.members[0].versions == {"": 2}
        assert [version for call, version in again.asked if call == "load"] == [1, 2]
        await fleet.close()

    run(main())


def test_a_member_that_dies_while_nobody_calls_it_is_replaced(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "WATCH_S", 0.01)

    async def main() -> None:
        fleet = Fleet(config(), world.start)
        await fleet.start()
        await fleet.publish(adapter(0))
        world.of("rollout-0")[0].killed = True
        await until(lambda: fleet.restarts == 1 and len(fleet.serving()) == 2)
        assert fleet.refusals == {"Dead": 1}
        assert world.of("rollout-0")[1].active == {"": 0}
        await fleet.close()

    run(main())


def test_a_member_that_dies_while_it_catches_up_is_started_again_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "WATCH_S", 0.01)

    async def dies_slowly(actor: Actor, argument: Any) -> None:
        actor.killed = True
        await asyncio.sleep(0.1)  # its caller learns of it later than one who asks whether it is alive
        raise Dead(actor.name)

    async def main() -> None:
        world.faults["rollout-0"] = [{}, {"load": dies_slowly}]
        fleet = Fleet(config(), world.start)
        await fleet.start()
        await fleet.publish(adapter(0))
        fleet.quarantine(fleet.members[0], fleet.members[0].actor, Dead("gone"))
        await until(lambda: len(fleet.serving()) == 2)
        await asyncio.sleep(0.2)
        assert len(world.of("rollout-0")) == 3
        assert fleet.restarts == 2
        await fleet.close()
        assert all(actor.killed for actor in world.actors)

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


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("fault", [raises, dies, hangs])
def test_what_a_failing_replica_leaves_is_sampled_again_once_with_the_same_seeds(
    world: World, fault: Any, staleness: int
) -> None:
    async def main() -> None:
        fleet = Fleet(config(timeout_s=0.5, staleness=staleness), world.start)
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
        if staleness:
            assert sorted(asked) == [0, 1, 2, 3, 4, 4, 5, 6, 7]  # what was delivered is not asked for again
        else:  # the same companions, so that the last bits are the same
            assert sorted(asked) == [0, 0, 1, 2, 2, 3, 4, 4, 5, 6, 7]
            assert [0, 2, 4, 6] in [[g for m, g in actor.asked if m == "sample"][-4:] for actor in world.actors]
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


def test_a_synchronous_run_deals_the_same_shares_to_fewer_replicas_one_after_the_other(world: World) -> None:
    """The last bits of a log-prob depend on what else is in the batch."""

    async def main() -> None:
        fleet = Fleet(config(replicas=3), world.start)
        await fleet.start()
        await fleet.publish(adapter(0))
        world.gate = asyncio.Event()
        for member in fleet.members[1:]:
            fleet.quarantine(member, member.actor, Dead("of memory"))
        running, most = 0, 0

        async def counted(actor: Actor, group: int) -> None:
            nonlocal running, most
            running += group in (0, 1, 2)  # a share begins
            most = max(most, running)
            await asyncio.sleep(0.01)
            running -= group in (6, 4, 5)  # and ends

        world.actors[0].faults["sample"] = counted
        await asyncio.gather(fleet.sample(prompts(*range(7)), world.done))
        dealt = [group for method, group in world.actors[0].asked if method == "sample"]
        assert dealt == [0, 3, 6, 1, 4, 2, 5]
        assert most == 1
        world.gate.set()
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
