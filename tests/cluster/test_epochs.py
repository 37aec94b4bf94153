"""Each row once in an epoch, by the audit: real tasks over real files, a real ledger, kills anywhere."""

import asyncio
import json
import random
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from actors.rows import Row
from actors.tasks import make_task
from cluster.ledger import Ledger, audit
from cluster.loop import Loop
from configs.schema import TaskData
from credit.trajectory import Prompt, Sample
from tests.cluster.stages import MEMORY, Control, Log, closed, config, ledger_in


def lines(path: Path, first: int, last: int) -> str:
    path.write_text("".join(json.dumps({"prompt": f"{path.stem} {i}", "answer": i}) + "\n" for i in range(first, last)))
    return str(path)


def task_data(folder: Path) -> dict[str, TaskData]:
    """13 rows to train on in each part."""
    whole = {"task": "dataset", "path": lines(folder / "a.jsonl", 0, 15), "heldout": 2}
    paths = [lines(folder / "b.jsonl", 0, 9), lines(folder / "c.jsonl", 9, 15)]
    stream = {"task": "dataset", "path": paths, "heldout": 2, "streaming": True, "buffer": 4}
    parts = [{"name": "whole", "weight": 2, "data": whole}, {"name": "stream", "data": stream}]
    kinds = {"whole": whole, "stream": stream, "mixture": {"task": "mixture", "parts": parts}}
    return {name: TypeAdapter(TaskData).validate_python(data) for name, data in kinds.items()}


@pytest.fixture(scope="module")
def data() -> Iterator[dict[str, TaskData]]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield task_data(Path(folder))


def check(report: dict[str, Any], kind: str) -> None:
    """Every epoch but the last of each source has all of its 13 rows, each once."""
    assert report["balanced"]
    epochs: dict[str, list[int]] = defaultdict(list)
    for name, counts in report["rows_by_epoch"].items():
        assert counts["duplicates"] == 0
        source, number = name.rsplit("epoch ")
        assert int(number) == len(epochs[source])
        epochs[source].append(counts["issued"])
    assert set(epochs) <= ({"whole ", "stream "} if kind == "mixture" else {""})
    for issued in epochs.values():
        assert issued[:-1] == [13] * (len(issued) - 1)
        assert 0 < issued[-1] <= 13


@settings(deadline=None, max_examples=30)
@given(
    kind=st.sampled_from(["whole", "stream", "mixture"]),
    seed=st.integers(0, 9),
    moves=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.booleans()), min_size=4, max_size=12),
)
def test_each_row_is_issued_once_in_an_epoch_whatever_the_interruptions(
    data: dict[str, TaskData], kind: str, seed: int, moves: list[tuple[int, int, bool]]
) -> None:
    """Lease some groups, draw the rows of some of them, end those as trained or dropped; then the driver may die."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        path, step, rows = Path(folder) / "ledger.sqlite", 0, dict[int, Row]()
        ledger, task = Ledger(path), make_task(data[kind], seed)
        for count, ended, dies in moves:
            groups = ledger.lease(count)
            for group in groups[: ended + 1]:
                row = task.row(group)
                assert rows.setdefault(group, row) == row  # a group keeps its row for ever
                ledger.drawn(group, row.source, row.epoch, row.number)
            for group in groups[:ended:2]:
                ledger.scored(group, step, "digest")
            for group in groups[1:ended:2]:
                ledger.dropped(group, "all rewards are equal")
            if dies:  # with what it had not written yet
                ledger._db.close()
                ledger._lock.close()
            else:
                if ended:
                    step += 1
                    ledger.commit(step, step, f"checkpoint {step}", groups[:ended:2])
                ledger.close()
            ledger, task = Ledger(path), make_task(data[kind], seed)
        for group in ledger.lease(audit(path)["open"]):
            row = task.row(group)
            assert rows.setdefault(group, row) == row
            ledger.drawn(group, row.source, row.epoch, row.number)
        whole = make_task(data[kind], seed)
        assert rows == {group: whole.row(group) for group in range(len(rows))}
        ledger.close()
        check(audit(path), kind)


class Killed(Exception):
    pass


class Reading(Control):
    """The loop's stages over a real task; the run ends when it asks for one more prompt or reward than `lives_for`."""

    def __init__(self, ledger: Ledger, data: TaskData, version: int = 0, lives_for: int = 1000) -> None:
        generator = random.Random(lives_for)
        super().__init__(ledger, version, latency=lambda group: 0.001 * generator.random())
        self.task, self.lives_for = make_task(data, 0), lives_for
        self.rewards = {group: [1.0, 1.0] for group in range(0, 1000, 5)}  # dropped: no signal

    def live(self) -> None:
        self.lives_for -= 1
        if self.lives_for < 0:
            raise Killed

    async def reward(self, prompt: Prompt, samples: list[Sample]) -> list[float | str]:
        self.live()
        return await super().reward(prompt, samples)

    async def prompt(self, group: int) -> Prompt | str:
        self.live()
        row = await asyncio.to_thread(self.task.row, group)
        self.ledger.drawn(group, row.source, row.epoch, row.number)
        if row.number == 3:
            return "the prompt is too long"
        return Prompt(group=group, tokens=[1], seeds=[0, 1], prompt=row.prompt, columns=row.columns)


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("kind", ["whole", "stream", "mixture"])
def test_a_run_that_is_killed_again_and_again_goes_through_its_epochs_as_one_that_is_not(
    tmp_path: Path, data: dict[str, TaskData], kind: str, staleness: int
) -> None:
    """60 groups are trained over epochs of 13 rows; each life of the driver ends in the middle of something."""
    shape = config(steps=20, staleness=staleness, prompts=3, refill=True)
    generator, lives, done = random.Random(staleness), 0, False
    trained: dict[int, list[int]] = {}
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        while not done:
            lives += 1
            ledger = ledger_in(Path(folder))
            last = ledger.last_step()
            version = last.version if last else 0
            stages = Reading(ledger, data[kind], version, generator.randrange(60))
            try:
                asyncio.run(Loop(shape, stages, ledger, version).train(Log()))
                done = True
            except Killed:
                pass
            trained |= {version + 1 + i: groups for i, groups in enumerate(stages.trained)}
            report = closed(ledger)
            assert report["balanced"], report
        check(report, kind)
        assert lives > 2
        assert report["trained"] == 60
        assert set(report["dropped_by_reason"]) <= {"all rewards are equal", "the prompt is too long", "stale"}
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        stages = Reading(ledger_in(Path(folder)), data[kind])
        asyncio.run(Loop(shape, stages, stages.ledger).train(Log()))
        whole = closed(stages.ledger)
        if staleness == 0:
            assert [trained[step] for step in sorted(trained)] == stages.trained
            assert whole["rows_by_epoch"] == report["rows_by_epoch"]


def test_data_that_changed_under_a_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    settings = {"task": "dataset", "path": lines(path, 0, 15), "heldout": 2}
    parsed = TypeAdapter(TaskData).validate_python(settings)

    first = Reading(ledger_in(tmp_path), parsed, lives_for=4)
    with pytest.raises(Killed):
        asyncio.run(Loop(config(), first, first.ledger).train(Log()))
    first.ledger.close()
    lines(path, 0, 40)
    second = Reading(ledger_in(tmp_path), parsed)
    with pytest.raises(RuntimeError, match="a group keeps its row: the data is not what it was when the run began"):
        asyncio.run(Loop(config(), second, second.ledger).train(Log()))
