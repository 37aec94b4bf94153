"""A wall clock that jumps: only records carry its time, every order and every deadline is the monotonic clock's."""

import json
import random
import time
from pathlib import Path

import pytest

from cluster.ledger import Ledger
from cluster.metrics import read
from tests.cluster.stages import Control, Log, closed, config, run

DAY_S = 86_400.0


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_clock_that_jumps_by_days_and_backwards_changes_nothing_but_timestamps(
    tmp_path: Path, staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, real = random.Random(0), time.time
    (tmp_path / "steady").mkdir()
    steady = Control(Ledger(tmp_path / "steady" / "ledger.sqlite"))
    run(steady, config(steps=4, staleness=staleness, prompts=3), Log())
    expected = closed(steady.ledger)

    monkeypatch.setattr(time, "time", lambda: real() + generator.choice([-400, -1, 0, 1, 400]) * DAY_S)
    (tmp_path / "jumping").mkdir()
    stages = Control(Ledger(tmp_path / "jumping" / "ledger.sqlite"))
    stages.rewards = {4: ["no", "no"]}  # a drop, too
    log = Log()
    run(stages, config(steps=4, staleness=staleness, prompts=3), log, limit_s=20)
    report = closed(stages.ledger)
    assert report["balanced"], report
    assert (report["trained"], report["dropped"], report["open"]) == (12, 1, 0)
    assert expected["trained"] == 12
    assert all(record["time/step_s"] < 20 for record in log.records), "a duration follows the wall clock"

    ledger = Ledger(tmp_path / "jumping" / "ledger.sqlite")  # opened on another day than it was written
    last = ledger.last_step()
    assert last is not None and last.step == 4
    assert ledger.lease(1) == [13]
    ledger.close()


def test_metrics_are_read_in_the_order_of_steps_whatever_their_time_says(tmp_path: Path) -> None:
    lines = [(1, 300.0, 0.1), (2, 200.0, 0.2), (2, 100.0, 0.3)]  # step 2 was run again after a crash
    records = [json.dumps({"step": step, "time": at, "reward/mean": value}) + "\n" for step, at, value in lines]
    (tmp_path / "metrics.jsonl").write_text("".join(records))
    assert [(record["step"], record["reward/mean"]) for record in read(tmp_path)] == [(1, 0.1), (2, 0.3)]
