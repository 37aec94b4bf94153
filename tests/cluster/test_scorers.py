"""The pool of credit actors: every version that may still be trained, and no other."""

import asyncio

import pytest

from cluster import fleet as fleet_module
from cluster.fleet import Scorers, Stale
from credit.trajectory import Signals
from tests.cluster.world import (
    Dead,
    G,
    World,
    adapter,
    config,
    dies,
    hangs,
    prompts,
    run,
    sample_of,
    until,
)


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
        signals = await asyncio.gather(*(score(scorers, 0, group) for group in range(6)))
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
