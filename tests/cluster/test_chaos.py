"""The loop, the ledger and both pools together, while actors die, hang and lie."""

import asyncio
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster import fleet as fleet_module
from cluster import pool as pool_module
from cluster.fleet import Fleet, Scorers
from cluster.ledger import Ledger
from cluster.loop import Group, Loop
from configs.schema import RunConfig
from credit.trajectory import Batch, Prompt, Sample, Signals, Trajectory
from tests.cluster.stages import MEMORY, Control, closed, ledger_in
from tests.cluster.stages import config as loop_config
from tests.cluster.world import BASE, Actor, World, adapter, dies, hangs, prompts, raises, run


class Joined(Control):
    """The loop's stages over both pools."""

    def __init__(self, ledger: Ledger, run: RunConfig, world: World) -> None:
        super().__init__(ledger)
        self.fleet, self.scorers = Fleet(run, world.start), Scorers(run, world.start)

    async def prompt(self, group: int) -> Prompt | str:
        self.ledger.drawn(group, "", 0, group)
        return prompts(group)[0]

    async def sample(self, prompts: list[Prompt], done: Callable[[list[Sample]], None]) -> None:
        await self.fleet.sample(prompts, done)

    async def signals(self, prompt: Prompt, trajectories: list[Trajectory]) -> list[Signals]:
        return await self.scorers.score(list(trajectories), frozenset())

    async def publish(self, version: int) -> dict[str, float]:
        await asyncio.gather(self.fleet.publish(adapter(version)), self.scorers.publish(adapter(version)))
        return {}


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("seed", range(6))
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
