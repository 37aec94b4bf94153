"""The ledger against direct SQL and against kill -9."""

import multiprocessing
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cluster import ledger as ledger_module
from cluster.ledger import Ledger, audit

PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


def rows(path: Path, query: str = "SELECT id, state, step, reason, attempts FROM groups ORDER BY id") -> list[Any]:
    db = sqlite3.connect(path)
    try:
        return db.execute(query).fetchall()
    finally:
        db.close()


def trained(ledger: Ledger, step: int, groups: list[int]) -> None:
    for group in groups:
        ledger.drawn(group, "", 0, group)
        ledger.sampled(group, step - 1, f"digest {step - 1}")
        ledger.scored(group, step - 1, f"digest {step - 1}")
    ledger.commit(step, step, f"checkpoint {step}", groups)


# ---- one run ----


def test_groups_are_leased_in_order_and_each_once(path: Path) -> None:
    ledger = Ledger(path)
    assert ledger.lease(3) == [0, 1, 2]
    assert ledger.lease(2) == [3, 4]
    ledger.close()
    report = audit(path)
    assert (report["issued"], report["open"], report["balanced"]) == (5, 5, True)


def test_what_was_open_is_leased_again_before_anything_new(path: Path) -> None:
    ledger = Ledger(path)
    ledger.lease(6)
    trained(ledger, 1, [0, 2])
    ledger.dropped(3, "stale")
    ledger.drawn(4, "", 0, 4)
    ledger.sampled(4, 1, "digest 1")
    ledger.close()
    ledger = Ledger(path)
    assert ledger.lease(2) == [1, 4]
    assert ledger.lease(2) == [5, 6]
    ledger.close()
    assert [(group, attempts) for group, *_, attempts in rows(path)] == [
        (0, 1), (1, 2), (2, 1), (3, 1), (4, 2), (5, 2), (6, 1)
    ]  # fmt: skip
    report = audit(path)
    assert report["sampled_again"] == 3
    assert report["dropped_by_reason"] == {"stale": 1}


def test_a_failed_sample_is_counted_for_the_attempt_that_counts(path: Path) -> None:
    ledger = Ledger(path)
    ledger.lease(2)
    ledger.failed(0, 1, "timed out")
    ledger.failed(1, 0, "raised")
    ledger.dropped(1, "fewer than two completions have a reward")
    ledger.close()
    assert audit(path)["failed_samples_by_reason"] == {"timed out": 1, "raised": 1}
    ledger = Ledger(path)
    assert ledger.lease(1) == [0]
    ledger.close()
    assert audit(path)["failed_samples_by_reason"] == {"raised": 1}


def test_a_step_that_names_a_group_that_was_not_scored_commits_nothing(path: Path) -> None:
    ledger = Ledger(path)
    ledger.lease(3)
    ledger.drawn(0, "", 0, 0)
    ledger.scored(0, 0, "digest")
    ledger.dropped(2, "stale")
    with pytest.raises(RuntimeError, match="step 1 trained 2 groups, only 1 were scored"):
        ledger.commit(1, 1, "checkpoint", [0, 1])
    assert ledger.last_step() is None
    ledger.close()
    # what was said before the commit that failed is not lost with it
    assert [state for _, state, *_ in rows(path)] == ["scored", "leased", "dropped"]


def test_a_dropped_group_cannot_come_back(path: Path) -> None:
    ledger = Ledger(path)
    ledger.lease(1)
    ledger.dropped(0, "stale")
    with pytest.raises(RuntimeError, match="group 0 was dropped, it cannot become scored"):
        ledger.scored(0, 0, "digest")
    ledger.flush()
    ledger.scored(0, 0, "digest")
    with pytest.raises(RuntimeError, match="a group that was trained or dropped never changes"):
        ledger.flush()


def test_a_row_is_issued_once_in_an_epoch_of_its_source(path: Path) -> None:
    ledger = Ledger(path)
    ledger.lease(6)
    for group, row in enumerate([("", 0, 7), ("", 1, 7), ("sums", 0, 7), ("", 0, 8)]):
        ledger.drawn(group, *row)
    ledger.dropped(3, "the prompt is too long")
    ledger.flush()
    ledger.drawn(4, "", 0, 8)
    with pytest.raises(RuntimeError, match="UNIQUE constraint failed"):
        ledger.flush()
    ledger._rows.clear()
    ledger.close()
    report = audit(path)
    assert report["rows_by_epoch"] == {
        "epoch 0": {"issued": 2, "duplicates": 0},
        "epoch 1": {"issued": 1, "duplicates": 0},
        "sums epoch 0": {"issued": 1, "duplicates": 0},
    }
    assert report["balanced"]


def test_a_group_that_is_leased_again_keeps_its_row(path: Path) -> None:
    ledger = Ledger(path)
    ledger.lease(2)
    ledger.drawn(0, "", 0, 5)
    ledger.close()
    ledger = Ledger(path)
    assert ledger.lease(1) == [0]
    ledger.drawn(0, "", 0, 5)
    ledger.flush()
    ledger.drawn(0, "", 0, 6)
    with pytest.raises(RuntimeError, match="a group keeps its row: the data is not what it was when the run began"):
        ledger.flush()


def test_an_audit_says_when_a_row_was_issued_twice(path: Path) -> None:
    ledger = Ledger(path)
    ledger.lease(3)
    trained(ledger, 1, [0, 1])
    ledger.close()
    db = sqlite3.connect(path)
    db.executescript("DROP INDEX groups_by_row; UPDATE groups SET source = '', epoch = 0, row = 1 WHERE id = 2;")
    db.close()
    report = audit(path)
    assert report["rows_by_epoch"] == {"epoch 0": {"issued": 3, "duplicates": 1}}
    assert not report["balanced"]


def test_a_clock_that_jumps_backwards_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 2e9

    def backwards() -> float:
        nonlocal now
        now -= 1e8
        return now

    monkeypatch.setattr(ledger_module.time, "time", backwards)
    ledger = Ledger(path)
    ledger.lease(4)
    trained(ledger, 1, [0, 1])
    trained(ledger, 2, [2])
    ledger.close()
    ledger = Ledger(path)
    last = ledger.last_step()
    assert last is not None
    assert (last.step, last.checkpoint) == (2, "checkpoint 2")
    assert ledger.lease(2) == [3, 4]
    ledger.rewind(1, "lost")
    assert ledger.lease(1) == [2]
    ledger.close()
    assert audit(path)["balanced"]


def test_an_audit_of_a_run_in_progress_sees_one_moment(path: Path) -> None:
    """Counts of different moments would not add up: every audit while a run is writing must balance."""
    ledger = Ledger(path)
    script = f"""
from pathlib import Path
from cluster.ledger import audit
print(sum(not audit(Path({str(path)!r}))["balanced"] for _ in range(300)))
"""
    reader = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=PROJECT)
    step = 0
    while reader.poll() is None:
        step += 1
        trained(ledger, step, ledger.lease(2))
    ledger.close()
    assert reader.stdout is not None
    assert reader.stdout.read().strip() == "0"
    assert audit(path)["trained"] == 2 * step


# ---- rewind ----


def test_a_rewind_opens_the_groups_of_the_void_steps_and_keeps_the_reason(path: Path) -> None:
    ledger = Ledger(path)
    ledger.lease(6)
    for step in (1, 2, 3):
        trained(ledger, step, [2 * step - 2, 2 * step - 1])
    ledger.rewind(1, "the disk lost it")
    last = ledger.last_step()
    assert last is not None
    assert last.step == 1
    report = audit(path)
    assert (report["issued"], report["trained"], report["open"], report["balanced"]) == (6, 2, 4, True)
    assert report["voided_steps"] == ["3: the disk lost it", "2: the disk lost it"]
    assert ledger.lease(4) == [2, 3, 4, 5]
    trained(ledger, 2, [2, 5])
    trained(ledger, 3, [3, 4])
    ledger.rewind(2, "and again")
    assert ledger.lease(2) == [3, 4]
    trained(ledger, 3, [3, 4])
    ledger.close()
    report = audit(path)
    assert (report["trained"], report["open"], report["balanced"]) == (6, 0, True)
    assert report["voided_steps"] == ["3: the disk lost it", "2: the disk lost it", "3: and again"]
    assert [(group, step, attempts) for group, _, step, _, attempts in rows(path)] == [
        (0, 1, 1), (1, 1, 1), (2, 2, 2), (3, 3, 3), (4, 3, 3), (5, 2, 2)
    ]  # fmt: skip


def test_a_rewind_leaves_dropped_groups_alone(path: Path) -> None:
    ledger = Ledger(path)
    ledger.lease(3)
    ledger.dropped(1, "stale")
    trained(ledger, 1, [0])
    ledger.rewind(0, "lost")
    assert ledger.last_step() is None
    assert ledger.lease(3) == [0, 2, 3]
    ledger.close()
    assert rows(path)[1] == (1, "dropped", None, "stale", 1)


# ---- what the schema refuses ----

ILLEGAL = {
    "a trained group leased again": "UPDATE groups SET state = 'leased', step = NULL WHERE id = 0",
    "a trained group in another step": "UPDATE groups SET step = 2 WHERE id = 0",
    "a trained group dropped": "UPDATE groups SET state = 'dropped', step = NULL, reason = 'x' WHERE id = 0",
    "a trained group touched": "UPDATE groups SET updated_at = 0 WHERE id = 0",
    "a dropped group scored": "UPDATE groups SET state = 'scored', reason = NULL WHERE id = 4",
    "a dropped group with another reason": "UPDATE groups SET reason = 'y' WHERE id = 4",
    "a group trained before it was scored": "UPDATE groups SET state = 'trained', step = 1 WHERE id = 5",
    "a group trained in no step": "UPDATE groups SET state = 'trained' WHERE id = 6",
    "a group trained in a step that is not there": "UPDATE groups SET state = 'trained', step = 9 WHERE id = 6",
    "an open group with a step": "UPDATE groups SET step = 1 WHERE id = 6",
    "an open group with a reason": "UPDATE groups SET reason = 'x' WHERE id = 6",
    "a drop without a reason": "UPDATE groups SET state = 'dropped' WHERE id = 6",
    "an unknown state": "UPDATE groups SET state = 'lost' WHERE id = 6",
    "a sampled group without a version": "UPDATE groups SET version = NULL WHERE id = 6",
    "a group that never was attempted": "UPDATE groups SET attempts = 0 WHERE id = 6",
    "a row issued twice in an epoch": "UPDATE groups SET source = '', epoch = 0, row = 6 WHERE id = 5",
    "a group with another row": "UPDATE groups SET row = 7 WHERE id = 6",
    "a group whose row is of another epoch": "UPDATE groups SET epoch = 1 WHERE id = 6",
    "a group that loses its row": "UPDATE groups SET source = NULL, epoch = NULL, row = NULL WHERE id = 6",
    "a group with half a row": "UPDATE groups SET row = 5 WHERE id = 5",
    "a group sampled without a row": "UPDATE groups SET state = 'sampled', version = 2, digest = 'd' WHERE id = 5",
    "a group that vanishes": "DELETE FROM groups WHERE id = 6",
    "a group issued twice": "INSERT INTO groups (id, state, issued_at, updated_at) VALUES (6, 'leased', 0, 0)",
    "a group that begins trained": "INSERT INTO groups VALUES (7, 'trained', 1, 0, 'd', 1, NULL, 0, 0, '', 0, 7)",
    "a group that begins dropped": "INSERT INTO groups VALUES (7, 'dropped', 1, 0, 'd', NULL, 'x', 0, 0, '', 0, 7)",
    "a failure of no group": "INSERT INTO failures VALUES (99, 0, 'x')",
    "a step that vanishes": "DELETE FROM steps WHERE step = 2",
    "a step that changes": "UPDATE steps SET checkpoint = 'other' WHERE step = 2",
    "a step committed twice": "INSERT INTO steps VALUES (2, 2, 'x', 0, 1)",
    "a step left out": "INSERT INTO steps VALUES (4, 4, 'x', 0, 1)",
    "a step in the middle that is void": "INSERT INTO voided VALUES (1, 1, 'x', 0)",
    "a step that is void before it was committed": "INSERT INTO voided VALUES (3, 1, 'x', 0)",
    "an attempt that is void before it was made": "INSERT INTO voided VALUES (2, 2, 'x', 0)",
    "a step that is void without a reason": "INSERT INTO voided VALUES (2, 1, NULL, 0)",
}


@pytest.mark.parametrize("what", ILLEGAL)
def test_the_schema_refuses(path: Path, what: str) -> None:
    ledger = Ledger(path)
    ledger.lease(7)
    trained(ledger, 1, [0, 1])
    trained(ledger, 2, [2, 3])
    ledger.dropped(4, "stale")
    ledger.drawn(6, "", 0, 6)
    ledger.scored(6, 2, "digest 2")
    ledger.close()
    before = rows(path)
    db = sqlite3.connect(path)
    db.execute("PRAGMA foreign_keys = ON")
    with pytest.raises(sqlite3.IntegrityError), db:
        db.execute(ILLEGAL[what])
    db.close()
    assert rows(path) == before
    assert audit(path)["balanced"]


def test_what_was_void_stays_on_record(path: Path) -> None:
    ledger = Ledger(path)
    ledger.lease(2)
    trained(ledger, 1, [0, 1])
    ledger.rewind(0, "lost")
    ledger.close()
    db = sqlite3.connect(path)
    for change in ("UPDATE voided SET reason = 'x'", "DELETE FROM voided"):
        with pytest.raises(sqlite3.IntegrityError, match="what was void stays on record"), db:
            db.execute(change)
    db.close()


def test_an_audit_says_when_a_group_is_missing(path: Path) -> None:
    ledger = Ledger(path)
    ledger.lease(3)
    ledger.close()
    db = sqlite3.connect(path)
    db.executescript("DROP TRIGGER groups_stay; DELETE FROM groups WHERE id = 1;")
    db.close()
    report = audit(path)
    assert (report["issued"], report["open"], report["balanced"]) == (3, 2, False)


def test_an_audit_says_when_a_step_is_missing_or_has_no_groups(path: Path) -> None:
    ledger = Ledger(path)
    ledger.lease(2)
    trained(ledger, 1, [0])
    trained(ledger, 2, [1])
    ledger.close()
    db = sqlite3.connect(path)
    db.executescript("DROP TRIGGER steps_stay; DELETE FROM steps WHERE step = 1;")
    db.close()
    report = audit(path)
    assert (report["missing_steps"], report["orphans"], report["balanced"]) == (1, 1, False)


# ---- files that cannot be used ----


def test_a_ledger_of_a_newer_version_is_refused(path: Path) -> None:
    Ledger(path).close()
    db = sqlite3.connect(path)
    db.execute("UPDATE meta SET value = '99' WHERE key = 'schema'")
    db.commit()
    db.close()
    for opens in (audit, Ledger):
        with pytest.raises(RuntimeError, match="has schema 99, this version of accredit writes 2"):
            opens(path)


def test_a_damaged_ledger_is_refused(path: Path) -> None:
    ledger = Ledger(path)
    ledger.lease(2000)
    ledger.close()
    whole = path.read_bytes()
    db = sqlite3.connect(path)
    (page,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'groups'").fetchone()
    (size,) = db.execute("PRAGMA page_size").fetchone()
    db.close()
    root = whole[: (page - 1) * size] + os.urandom(size) + whole[page * size :]
    for damage in (b"not a database" * 500, root, whole[: len(whole) // 2]):
        path.write_bytes(damage)
        for opens in (audit, Ledger):
            with pytest.raises(RuntimeError, match=r"ledger\.sqlite: the ledger "):
                opens(path)
        for beside in path.parent.glob("ledger.sqlite-*"):
            beside.unlink()
        (path.parent / "lock").unlink()


def test_a_full_disk_is_a_clear_error_and_loses_nothing(path: Path) -> None:
    ledger = Ledger(path)
    ledger.lease(4)
    ledger.dropped(3, "stale")
    (pages,) = ledger._db.execute("PRAGMA page_count").fetchone()
    ledger._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(RuntimeError, match=r"ledger\.sqlite: the ledger cannot be written: database or disk is full"):
        ledger.lease(5000)
    ledger._db.execute(f"PRAGMA max_page_count = {100 * pages}")
    assert ledger.lease(2) == [4, 5]
    trained(ledger, 1, [0, 1])
    ledger.close()
    report = audit(path)
    assert (report["issued"], report["trained"], report["dropped"], report["balanced"]) == (6, 2, 1, True)


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()  # for root no folder is read-only
    with pytest.raises(RuntimeError, match="lock: cannot be written: Is a directory"):
        Ledger(tmp_path / "ledger.sqlite")


# ---- two processes ----


def test_a_second_process_on_the_same_run_is_refused_and_told_which_holds_it(path: Path) -> None:
    ledger = Ledger(path)
    ledger.lease(1)
    script = f"from pathlib import Path; from cluster.ledger import Ledger; Ledger(Path({str(path)!r}))"
    second = [sys.executable, "-c", script]
    refused = subprocess.run(second, capture_output=True, text=True, cwd=PROJECT)
    assert refused.returncode != 0
    assert f"RuntimeError: {path.parent}: process {os.getpid()} on " in refused.stderr
    assert audit(path)["open"] == 1  # reading needs no lock
    ledger.close()
    assert subprocess.run(second, cwd=PROJECT).returncode == 0


def _write_for_ever(path: str, ready: Any) -> None:
    ledger = Ledger(Path(path))
    last = ledger.last_step()
    step = last.step if last else 0
    while True:
        step += 1
        groups = ledger.lease(4)
        ready.set()
        for group in groups[:3]:
            ledger.drawn(group, "", 0, group)
            ledger.sampled(group, step - 1, "digest")
            ledger.scored(group, step - 1, "digest")
        ledger.failed(groups[3], 0, "timed out")
        ledger.dropped(groups[3], "fewer than two completions have a reward")
        ledger.commit(step, step, f"checkpoint {step}", groups[:3])
        with Path(path).with_name("acknowledged").open("w") as file:
            file.write(str(step))


def test_sigkill_in_the_middle_of_writing_leaves_what_was_committed(path: Path) -> None:
    """A real process, killed 40 times at random moments; the lock goes with it."""
    context = multiprocessing.get_context("fork")  # starts in milliseconds; it touches nothing but the ledger
    generator = random.Random(0)
    acknowledged, report = path.with_name("acknowledged"), {}
    for _ in range(40):
        ready = context.Event()
        writer = context.Process(target=_write_for_ever, args=(str(path), ready))
        writer.start()
        assert ready.wait(20)
        time.sleep(0.02 * generator.random())
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        report = audit(path)
        assert report["balanced"], report
        assert report["trained"] == 3 * report["steps"]
        assert report["dropped"] == report["steps"]
        assert report["open"] <= 4
        told = acknowledged.read_text() if acknowledged.exists() else ""
        assert report["steps"] >= int(told or 0), "a commit that returned was lost"
    ledger = Ledger(path)
    assert ledger.lease(report["open"]) == [group for group, state, *_ in rows(path) if state == "leased"]
    ledger.close()


def test_the_cost_of_a_trajectory_is_small(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Printed, not asserted: the machine may be busy."""
    ledger = Ledger(path)
    began, steps, prompts, size = time.perf_counter(), 30, 32, 8
    for step in range(1, steps + 1):
        trained(ledger, step, ledger.lease(prompts))
    seconds = time.perf_counter() - began
    ledger.close()
    with capsys.disabled():
        print(f" {1e6 * seconds / (steps * prompts * size):.1f} us per trajectory", end="")
    assert audit(path)["trained"] == steps * prompts
