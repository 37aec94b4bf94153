"""The pool of credit actors: every version that may still be trained, and no other."""

import asyncio
from typing import Any

import numpy as np
import pytest

from cluster import fleet as fleet_module
from cluster.assigner import Assigner
from cluster.fleet import Key, Lost, Scorers, Stale
from configs.schema import CreditConfig
from credit.trajectory import Signals, Trajectory
from tests.cluster.world import (
    Actor,
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
        assert sorted(version for _, version in again.held) == needed
        assert again.active == {"": 5}
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


# ---- DelTA: features that stay on the actor that computed them ----

FEATURE = frozenset({"delta_feature"})


class Sums:
    """An actor's DelTA features: the number of keys that it was asked for, in both sums."""

    def __init__(self, actor: Actor) -> None:
        self.actor, self.cleared = actor, list[Key]()
        for name in ("delta_sums", "delta_clear"):
            setattr(actor, name, getattr(self, name))

    async def delta_sums(self, coefficients: dict[Key, np.ndarray], policy: str) -> tuple[np.ndarray, np.ndarray]:
        await self.actor._enter("delta_sums", sorted(coefficients))
        return np.ones(1) * len(coefficients), np.zeros(1)

    async def delta_clear(self, keys: list[Key], policy: str) -> None:
        self.cleared += keys


def keys(*groups: int) -> list[Key]:
    return [(group, index) for group in groups for index in range(G)]


def test_features_that_died_with_their_keeper_are_lost_and_can_be_computed_again(world: World) -> None:
    async def main() -> None:
        scorers = Scorers(config(), world.start)
        await scorers.start()
        await scorers.publish(adapter(0))
        for actor in world.actors:
            Sums(actor)
        samples = [[sample_of(prompts(group)[0], index, 0) for index in range(G)] for group in range(4)]
        await asyncio.gather(*(scorers.score(rows, FEATURE) for rows in samples))
        assert scorers.keeps(keys(0, 1, 2, 3))
        coefficients = {key: np.ones(1) for key in keys(0, 1, 2, 3)}
        assert (await scorers.delta_sums(coefficients))[0] == 4 * G
        dead = next(actor for actor in world.actors if actor is scorers._keeper["", 0, 0])
        dead.faults["delta_sums"] = dies
        with pytest.raises(Lost, match="DelTA sums"):
            await scorers.delta_sums(coefficients)
        assert not scorers.keeps(keys(0)) and scorers.refusals == {"Dead": 1}
        lost = [group for group in range(4) if not scorers.keeps(keys(group))]
        assert 0 < len(lost) < 4
        await until(lambda: len(scorers.serving()) == 2)
        Sums(world.actors[-1])
        await asyncio.gather(*(scorers.score(samples[group], FEATURE) for group in lost))
        assert (await scorers.delta_sums(coefficients))[0] == 4 * G
        await scorers.close()

    run(main())


def test_clearing_what_died_with_its_keeper_is_no_error(world: World) -> None:
    async def main() -> None:
        scorers = Scorers(config(replicas=1), world.start)
        await scorers.start()
        await scorers.publish(adapter(0))
        Sums(world.actors[0])
        await scorers.score([sample_of(prompts(0)[0], index, 0) for index in range(G)], FEATURE)
        scorers.quarantine(scorers.members[0], scorers.members[0].actor, Dead("of memory"))
        await until(lambda: len(scorers.serving()) == 1)
        kept = Sums(world.actors[-1])
        await scorers.score([sample_of(prompts(1)[0], index, 0) for index in range(G)], FEATURE)
        await scorers.delta_clear([*keys(0, 1), (99, 0)])
        assert kept.cleared == keys(1)
        assert not scorers.keeps(keys(1))
        await scorers.close()

    run(main())


def test_what_is_kept_for_a_dropped_group_is_forgotten_once_it_is_too_old(world: World) -> None:
    async def main() -> None:
        scorers = Scorers(settings, world.start)
        await scorers.start()
        for version in range(3):
            await scorers.publish(adapter(version))
        kept = Sums(world.actors[0])
        assigner = Assigner(settings, None, scorers, Any, Any, Any)  # pyright: ignore[reportArgumentType]
        for group, version in ((0, 1), (1, 2)):
            rows = [Trajectory.of(sample_of(prompts(group)[0], index, version), 0.0) for index in range(G)]
            await assigner.signals(prompts(group)[0], rows)
        assigner._revisions = {(0, 0): [], (1, 0): []}
        await assigner._forget([], step=2)  # for step 3, version 1 is not too old
        assert kept.cleared == []
        await assigner._forget([], step=3)
        assert kept.cleared == keys(0)
        assert assigner._revisions.keys() == {(1, 0)} and assigner._versions.keys() == set(keys(1))
        await scorers.close()

    settings = config(replicas=1, staleness=1).model_copy(
        update={"credit": CreditConfig(method="delta", timeout_s=3.0)}
    )
    run(main())
