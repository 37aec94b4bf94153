"""The loop over stages that are plain coroutines: order, staleness, drops, errors, resume."""

import asyncio
import random
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster import loop as loop_module
from cluster.fleet import Stale
from cluster.ledger import Ledger
from cluster.loop import Group, Loop
from credit.trajectory import Batch, Prompt, Sample, Signals, Trajectory
from tests.cluster import stages as stages_module
from tests.cluster.stages import MEMORY, Control, Log, closed, config, ledger_in, run


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield Path(folder)


def test_a_synchronous_run_trains_the_groups_in_order_under_the_version_just_published(tmp_path: Path) -> None:
    stages = Control(ledger_in(tmp_path), latency=lambda group: 0.002 * (7 * group % 5))
    log = Log()
    run(stages, config(steps=4, prompts=3), log)
    assert stages.trained == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert stages.versions == [[step] * 3 for step in range(4)]
    assert stages.most_open == 3
    report = closed(stages.ledger)
    assert report["balanced"]
    assert (report["issued"], report["trained"], report["open"]) == (12, 12, 0)
    assert [record["staleness/max"] for record in log.records] == [0, 0, 0, 0]
    assert [record["rollout/tokens"] for record in log.records] == [3 * stages_module.G * 2] * 4


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32))
def test_a_synchronous_batch_does_not_depend_on_the_order_of_completion(
    seed: int,
) -> None:
    generator = random.Random(seed)
    folder = tempfile.TemporaryDirectory(dir=MEMORY)
    stages = Control(ledger_in(Path(folder.name)), latency=lambda group: 0.003 * generator.random())
    dropped = {4: ["no", "no"], 7: ["no", 1.0]}
    stages.rewards = {group: list(rewards) for group, rewards in dropped.items()}
    run(stages, config(steps=3, prompts=3))
    assert stages.trained == [[0, 1, 2], [3, 5, 6], [8, 9, 10]]  # 6 replaces 4; 7 is dropped, 10 replaces it
    assert closed(stages.ledger)["open"] == 0
    folder.cleanup()


@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_an_asynchronous_run_keeps_its_bounds(tmp_path: Path, staleness: int, seed: int) -> None:
    generator = random.Random(seed)
    stages = Control(ledger_in(tmp_path), latency=lambda group: 0.01 * generator.random() ** 4)
    log = Log()
    run(stages, config(steps=8, staleness=staleness, prompts=3), log)
    # an open group that was dropped as stale is seen here until the step after; the ledger has the exact bound
    report = closed(stages.ledger)
    assert report["balanced"]
    assert report["open"] == 0
    assert report["trained"] == 8 * 3
    assert report["issued"] == report["trained"] + report["dropped"]
    trained = [group for step in stages.trained for group in step]
    assert len(set(trained)) == len(trained)
    for step, versions in enumerate(stages.versions):
        assert all(0 <= step - version <= staleness for version in versions)
    assert stages.most_open <= (staleness + 1) * 3 + report["dropped"]


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_no_more_than_k_plus_one_batches_are_in_flight(tmp_path: Path, staleness: int) -> None:
    prompts = 4
    stages = Control(ledger_in(tmp_path))

    async def slow_learn(batch: Batch) -> dict[str, float]:
        await asyncio.sleep(0.01)  # the rollouts run ahead as far as they may
        return {}

    stages.learn = slow_learn  # pyright: ignore[reportAttributeAccessIssue]
    run(stages, config(steps=7, staleness=staleness, prompts=prompts))
    assert stages.most_open == (staleness + 1) * prompts
    assert closed(stages.ledger)["dropped"] == 0


def test_a_straggler_is_dropped_as_stale_counted_and_replaced(tmp_path: Path) -> None:
    class Straggling(Control):
        async def sample_one(self, prompt: Prompt, version: int, done: Callable[[list[Sample]], None]) -> None:
            while prompt.group == 1 and self.version < 3:
                await asyncio.sleep(0.001)
            await super().sample_one(prompt, version, done)

    stages = Straggling(ledger_in(tmp_path))
    log = Log()
    run(stages, config(steps=6, staleness=1, prompts=2), log)
    report = closed(stages.ledger)
    assert report["dropped_by_reason"] == {"stale": 1}
    assert (report["issued"], report["trained"], report["open"]) == (13, 12, 0)
    assert 1 not in [group for step in stages.trained for group in step]
    assert sum(record["groups/dropped"] for record in log.records) == 1


def test_a_group_that_goes_stale_while_a_batch_is_trained_is_not_sent_to_the_credit_actors(tmp_path: Path) -> None:
    """They have unloaded its version by the time that the step is published."""

    class Late(Control):
        def __init__(self, ledger: Ledger) -> None:
            super().__init__(ledger)
            self.learning = asyncio.Event()
            self.asked: list[tuple[int, int]] = []
            self.held = 0  # oldest version that a credit actor holds

        async def sample_one(self, prompt: Prompt, version: int, done: Callable[[list[Sample]], None]) -> None:
            if prompt.group == 1:
                await self.learning.wait()
            await super().sample_one(prompt, version, done)

        async def learn(self, batch: Batch) -> dict[str, float]:
            if self.version == 1:  # the second step: group 1 cannot be in any batch but this one
                self.learning.set()
            return await super().learn(batch)

        async def publish(self, version: int) -> dict[str, float]:
            self.held = version - 1
            await asyncio.sleep(0.01)
            return await super().publish(version)

        async def signals(self, prompt: Prompt, trajectories: list[Trajectory]) -> list[Signals]:
            assert trajectories[0].version >= self.held
            return await super().signals(prompt, trajectories)

    stages = Late(ledger_in(tmp_path))
    run(stages, config(steps=4, staleness=1, prompts=2))
    assert closed(stages.ledger)["dropped_by_reason"] == {"stale": 1}


def test_a_group_whose_version_the_credit_actors_have_lost_is_dropped_as_stale(tmp_path: Path) -> None:
    class Forgetful(Control):
        async def signals(self, prompt: Prompt, trajectories: list[Trajectory]) -> list[Signals]:
            if prompt.group == 2:
                raise Stale("v0 is no longer held")
            return await super().signals(prompt, trajectories)

    stages = Forgetful(ledger_in(tmp_path))
    run(stages, config(steps=2, prompts=3))
    assert stages.trained == [[0, 1, 3], [4, 5, 6]]
    assert closed(stages.ledger)["dropped_by_reason"] == {"stale": 1}


def test_a_failed_reward_is_a_failed_sample_and_a_group_of_one_is_dropped(tmp_path: Path) -> None:
    stages = Control(ledger_in(tmp_path))
    stages.rewards = {1: ["timed out", 1.0], 3: ["raised", "timed out"]}
    log = Log()
    run(stages, config(steps=2, prompts=3), log)
    report = closed(stages.ledger)
    assert stages.trained == [[0, 2, 4], [5, 6, 7]]  # 3 replaced 1, and 4 replaced 3
    assert report["failed_samples_by_reason"] == {"timed out": 2, "raised": 1}
    assert report["dropped_by_reason"] == {"fewer than two completions have a reward": 2}
    assert [record["samples/failed"] for record in log.records] == [3, 0]
    assert [record["groups/dropped"] for record in log.records] == [2, 0]


def test_a_failed_sample_is_left_out_of_a_group_that_still_has_two(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(stages_module, "G", 3)
    stages = Control(ledger_in(tmp_path))
    stages.rewards = {0: [1.0, "raised", 0.0]}
    kept: list[list[int]] = []

    async def log(step: int, metrics: dict[str, float], groups: list[Group], batch: Batch) -> None:
        kept.extend([row.index for row in group.trajectories] for group in groups)

    asyncio.run(Loop(config(steps=1, prompts=2), stages, stages.ledger).train(log))
    assert kept == [[0, 2], [0, 1, 2]]
    assert closed(stages.ledger)["failed_samples_by_reason"] == {"raised": 1}


class Broken(Exception):
    pass


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("at", [0, 1, 5])
@pytest.mark.parametrize("stage", ["prompt", "sample", "reward", "signals", "assign", "learn", "commit", "publish"])
def test_a_stage_that_raises_ends_the_run_with_that_very_error(
    tmp_path: Path, stage: str, at: int, staleness: int
) -> None:
    stages = Control(ledger_in(tmp_path))
    stage_itself: Any = getattr(stages, stage)
    error = Broken(stage)
    calls = 0

    def breaks() -> None:
        nonlocal calls
        calls += 1
        if calls == at + 1:
            raise error

    async def broken(*arguments: Any) -> Any:
        await asyncio.sleep(0)
        breaks()
        return await stage_itself(*arguments)

    setattr(stages, stage, broken)
    with pytest.raises(Broken) as raised:
        run(stages, config(steps=12, staleness=staleness, prompts=3), limit_s=2)
    assert raised.value is error
    report = closed(stages.ledger)
    assert report["balanced"]
    assert report["trained"] == 3 * report["steps"]


def test_an_error_of_the_log_ends_the_run_after_the_commit(tmp_path: Path) -> None:
    stages = Control(ledger_in(tmp_path))

    async def log(*_: Any) -> None:
        raise Broken

    with pytest.raises(Broken):
        asyncio.run(Loop(config(), stages, stages.ledger).train(log))
    assert closed(stages.ledger)["steps"] == 1


def test_a_stage_that_fails_again_while_it_is_cancelled_does_not_hide_the_first_error(tmp_path: Path) -> None:
    class Fragile(Control):
        async def sample_one(self, prompt: Prompt, version: int, done: Callable[[list[Sample]], None]) -> None:
            try:
                await super().sample_one(prompt, version, done)
            except asyncio.CancelledError:
                raise RuntimeError("cancelled in the middle") from None

        async def learn(self, batch: Batch) -> dict[str, float]:
            raise Broken

    stages = Fragile(ledger_in(tmp_path), latency=lambda group: 0.0 if group < 3 else 10.0)
    with pytest.raises(Broken):
        run(stages, config(staleness=1, prompts=3))
    stages.ledger.close()


def test_a_commit_does_not_go_on_after_the_publish_beside_it_failed(tmp_path: Path) -> None:
    class Half(Control):
        async def publish(self, version: int) -> dict[str, float]:
            raise Broken

        async def commit(self, step: int, groups: list[Group]) -> dict[str, float]:
            await asyncio.sleep(0.05)
            return await super().commit(step, groups)

    stages = Half(ledger_in(tmp_path))
    with pytest.raises(Broken):
        run(stages, config())
    report = closed(stages.ledger)
    assert (report["steps"], report["open"], report["balanced"]) == (0, 3, True)


def test_a_sample_stage_that_never_answers_ends_the_run_by_deadline(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(loop_module, "PATIENCE", 1)
    monkeypatch.setattr(loop_module, "START_TIMEOUT_S", 0.0)
    stages = Control(ledger_in(tmp_path), latency=lambda group: 1e6 if group == 4 else 0.0)
    with pytest.raises(RuntimeError, match="loop: the next scored group: no answer within"):
        run(stages, config(timeout_s=0.05), limit_s=2)
    report = closed(stages.ledger)
    assert (report["steps"], report["balanced"]) == (1, True)


def test_a_sample_stage_that_leaves_a_group_out_ends_the_run(tmp_path: Path) -> None:
    class Losing(Control):
        async def sample(self, prompts: list[Prompt], done: Callable[[list[Sample]], None]) -> None:
            await super().sample(prompts[1:], done)

    stages = Losing(ledger_in(tmp_path))
    with pytest.raises(RuntimeError, match=r"3 groups were to be sampled, got 2: \[0, 1, 2\]"):
        run(stages, config(), limit_s=2)
    stages.ledger.close()


def test_a_group_that_is_delivered_twice_is_never_trained_twice(tmp_path: Path) -> None:
    class Twice(Control):
        async def sample_one(self, prompt: Prompt, version: int, done: Callable[[list[Sample]], None]) -> None:
            await super().sample_one(prompt, version, done)
            if prompt.group == 4:
                await super().sample_one(prompt, version, done)

    stages = Twice(ledger_in(tmp_path))
    with pytest.raises(RuntimeError):
        run(stages, config(), limit_s=2)
    report = closed(stages.ledger)
    assert report["balanced"]
    assert report["trained"] == 3 * report["steps"]


def test_endless_drops_end_the_run_with_their_reasons(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(loop_module, "MAX_DROPS", 3)

    class Hopeless(Control):
        async def reward(self, prompt: Prompt, samples: list[Sample]) -> list[float | str]:
            return ["verifier is down"] * len(samples)

    stages = Hopeless(ledger_in(tmp_path))
    with pytest.raises(RuntimeError, match=r"10 groups in a row were dropped.*verifier is down"):
        run(stages, config(prompts=3), limit_s=5)
    report = closed(stages.ledger)
    assert report["balanced"]
    assert report["dropped"] >= 10  # the others of the last wave are dropped in the same moment


def test_groups_without_a_signal_are_replaced_where_it_is_asked_for(tmp_path: Path) -> None:
    stages = Control(ledger_in(tmp_path))
    stages.rewards = {1: [1.0, 1.0], 3: [0.0, 0.0], 5: [0.5, 0.5]}
    log = Log()
    run(stages, config(steps=2, prompts=3, refill=True), log)
    assert stages.trained == [[0, 2, 4], [6, 7, 8]]  # 3 replaced 1, and 4 replaced 3; 8 replaced 5
    report = closed(stages.ledger)
    assert report["dropped_by_reason"] == {"all rewards are equal": 3}
    assert (report["issued"], report["open"], report["balanced"]) == (9, 0, True)
    assert [record["groups/dropped"] for record in log.records] == [2, 1]


def test_groups_without_a_signal_are_trained_by_default(tmp_path: Path) -> None:
    stages = Control(ledger_in(tmp_path))
    stages.rewards = {1: [1.0, 1.0]}
    run(stages, config(steps=1, prompts=3))
    assert stages.trained == [[0, 1, 2]]
    assert closed(stages.ledger)["dropped"] == 0


@pytest.mark.parametrize("staleness", [0, 2])
@settings(deadline=None, max_examples=15)
@given(equal=st.sets(st.integers(0, 30)), seed=st.integers(0, 2**32))
def test_refilled_batches_are_full_and_the_same_for_any_order_of_completion(
    staleness: int, equal: set[int], seed: int
) -> None:
    generator = random.Random(seed)
    folder = tempfile.TemporaryDirectory(dir=MEMORY)
    stages = Control(ledger_in(Path(folder.name)), latency=lambda group: 0.002 * generator.random())
    stages.rewards = {group: [1.0, 1.0] for group in equal}
    run(stages, config(steps=3, staleness=staleness, prompts=2, refill=True))
    report = closed(stages.ledger)
    assert (report["trained"], report["open"], report["balanced"]) == (6, 0, True)
    assert not equal & {group for step in stages.trained for group in step}
    if staleness == 0:
        waves = [[group for group in wave if group not in equal] for wave in stages.waves]
        assert [group for step in stages.trained for group in step] == [group for wave in waves for group in wave]
    folder.cleanup()


def test_a_run_that_only_gets_equal_rewards_gives_up_and_says_why(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(loop_module, "MAX_DROPS", 3)
    stages = Control(ledger_in(tmp_path))
    stages.rewards = {group: [0.0, 0.0] for group in range(100)}
    message = r"10 groups in a row were dropped, expected at most 9 \(3 batches\).*'all rewards are equal': 10"
    with pytest.raises(RuntimeError, match=message):
        run(stages, config(prompts=3, refill=True), limit_s=5)
    stages.ledger.close()


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_group_without_a_prompt_is_dropped_with_the_reason_and_replaced(tmp_path: Path, staleness: int) -> None:
    class Long(Control):
        async def prompt(self, group: int) -> Prompt | str:
            prompt = await super().prompt(group)
            return loop_module.TOO_LONG if group in (0, 1, 2, 5) else prompt

    stages = Long(ledger_in(tmp_path))
    log = Log()
    run(stages, config(steps=2, staleness=staleness, prompts=3), log)
    assert stages.trained == [[3, 4, 6], [7, 8, 9]]
    report = closed(stages.ledger)
    assert report["dropped_by_reason"] == {"the prompt is too long": 4}
    assert report["rows_by_epoch"] == {"epoch 0": {"issued": 10, "duplicates": 0}}
    assert sum(record["groups/too_long"] for record in log.records) == 4


def test_a_resumed_run_leases_what_was_open_first(tmp_path: Path) -> None:
    ledger = ledger_in(tmp_path)
    stages = Control(ledger)
    stages.latency = lambda group: 1e6 if group == 4 else 0.0

    async def killed() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await Loop(config(steps=5, staleness=1, prompts=3), stages, ledger).train(Log())

    asyncio.run(killed())
    before = closed(ledger)
    assert before["open"] > 0
    assert before["balanced"]
    ledger = ledger_in(tmp_path)
    last = ledger.last_step()
    assert last is not None
    resumed = Control(ledger, version=last.version)
    run(resumed, config(steps=5, staleness=1, prompts=3))
    assert resumed.waves[0][: before["open"]] == sorted(resumed.waves[0][: before["open"]])
    assert 4 in resumed.waves[0]
    report = closed(ledger)
    assert (report["trained"], report["open"], report["balanced"]) == (15, 0, True)
    assert report["issued"] == 15 + report["dropped"]
    assert report["sampled_again"] == before["open"]


def test_a_run_that_is_finished_trains_nothing_more(tmp_path: Path) -> None:
    stages = Control(ledger_in(tmp_path))
    run(stages, config(steps=2))
    again = Control(stages.ledger, version=2)
    run(again, config(steps=2))
    assert again.trained == again.waves == []
    assert closed(stages.ledger)["issued"] == 6


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_a_cancelled_run_leaves_a_consistent_ledger_and_no_task(tmp_path: Path, staleness: int, seed: int) -> None:
    """SIGINT cancels the main task; whenever it comes, the next run goes on from there."""
    generator = random.Random(seed)
    shape = config(steps=4, staleness=staleness, prompts=2)
    version, report = 0, {}
    for _ in range(200):
        ledger = ledger_in(tmp_path)
        last = ledger.last_step()
        version = last.version if last else 0
        stages = Control(ledger, version, latency=lambda group: 0.001 * generator.random())

        async def interrupted(stages: Control = stages, version: int = version) -> bool:
            training = asyncio.create_task(Loop(shape, stages, stages.ledger, version).train(Log()))
            for _ in range(generator.randrange(150)):
                await asyncio.sleep(0)
            training.cancel()
            try:
                await training
            except asyncio.CancelledError:
                return True
            finally:
                assert asyncio.all_tasks() == {asyncio.current_task()}
            return False

        cancelled = asyncio.run(interrupted())
        report = closed(ledger)
        assert report["balanced"]
        assert report["trained"] == 2 * report["steps"]
        if not cancelled:
            break
    assert (report["trained"], report["open"], report["steps"]) == (8, 0, 4)


def test_the_log_is_awaited_before_the_next_step(tmp_path: Path) -> None:
    stages = Control(ledger_in(tmp_path))
    seen: list[tuple[int, int]] = []

    async def log(step: int, metrics: dict[str, float], groups: list[Group], batch: Batch) -> None:
        await asyncio.sleep(0.005)
        seen.append((step, len(stages.trained)))

    train: Awaitable[None] = Loop(config(steps=3), stages, stages.ledger).train(log)
    asyncio.run(asyncio.wait_for(train, 5))  # pyright: ignore[reportArgumentType]
    assert seen == [(1, 1), (2, 2), (3, 3)]
    stages.ledger.close()
