"""The ledger: one row per prompt group, so that every trajectory is accounted for through any crash.

    leased -> sampled -> scored -> trained(step) | dropped(reason)
       ^                              |
       +------- rewind(reason) -------+      only when the step's checkpoint was lost

Only `trained` and `dropped` are promises; the states between are kept so that a reader sees where a group is. They are
written in batches (`flush`), because a group that was open in a crash is sampled again anyway. A step and its groups
are one transaction (`commit`), made after the step's checkpoint has its final name: the last committed step is the
truth.
"""

import fcntl
import os
import signal
import socket
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

SCHEMA_VERSION = 2
SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE steps (
    step INTEGER PRIMARY KEY,
    version INTEGER NOT NULL,
    checkpoint TEXT NOT NULL,      -- sha256 over the checkpoint's files
    committed_at REAL NOT NULL,
    attempt INTEGER NOT NULL       -- 1, and one more each time that the step was void
);
CREATE TABLE voided (              -- steps that were committed, and undone because their checkpoint was lost
    step INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    reason TEXT NOT NULL,
    voided_at REAL NOT NULL,
    PRIMARY KEY (step, attempt)
);
CREATE TABLE groups (
    id INTEGER PRIMARY KEY,        -- position in the task's stream
    state TEXT NOT NULL CHECK (state IN ('leased', 'sampled', 'scored', 'trained', 'dropped')),
    attempts INTEGER NOT NULL DEFAULT 1 CHECK (attempts >= 1),
    version INTEGER,               -- behaviour policy that sampled it
    digest TEXT,
    step INTEGER REFERENCES steps (step),
    reason TEXT,
    issued_at REAL NOT NULL,
    updated_at REAL NOT NULL,
    source TEXT,                   -- the part of a mixture that its row is from
    epoch INTEGER,                 -- of that source
    row INTEGER,                   -- the row's number there
    CHECK ((state = 'trained') = (step IS NOT NULL)),
    CHECK ((state = 'dropped') = (reason IS NOT NULL)),
    CHECK (state IN ('leased', 'dropped') OR (version IS NOT NULL AND digest IS NOT NULL AND row IS NOT NULL)),
    CHECK ((source IS NULL) = (row IS NULL) AND (epoch IS NULL) = (row IS NULL))
);
CREATE INDEX groups_by_state ON groups (state);
CREATE UNIQUE INDEX groups_by_row ON groups (source, epoch, row);  -- a row is issued once in an epoch
CREATE TABLE failures (
    group_id INTEGER NOT NULL REFERENCES groups (id),
    sample INTEGER NOT NULL,       -- completion within the group
    reason TEXT NOT NULL,
    PRIMARY KEY (group_id, sample)
);
CREATE TABLE revisions (           -- extra rollouts of IBPO: judged, counted, never trained
    group_id INTEGER NOT NULL REFERENCES groups (id),
    sample INTEGER NOT NULL,       -- the wrong completion
    reference INTEGER NOT NULL,    -- the sibling that it was compared with
    outcome TEXT NOT NULL,
    PRIMARY KEY (group_id, sample, reference)
);
CREATE TRIGGER groups_begin BEFORE INSERT ON groups WHEN NEW.state <> 'leased'
BEGIN SELECT RAISE (ABORT, 'a group begins as leased'); END;
CREATE TRIGGER groups_train BEFORE UPDATE ON groups WHEN NEW.state = 'trained' AND OLD.state <> 'scored'
BEGIN SELECT RAISE (ABORT, 'only a scored group is trained, and only once'); END;
CREATE TRIGGER groups_end_once BEFORE UPDATE ON groups
WHEN OLD.state = 'dropped' OR OLD.state = 'trained' AND NOT (
    NEW.state = 'leased' AND EXISTS (SELECT 1 FROM steps JOIN voided USING (step, attempt) WHERE step = OLD.step))
BEGIN SELECT RAISE (ABORT, 'a group that was trained or dropped never changes'); END;
CREATE TRIGGER groups_keep_row BEFORE UPDATE OF source, epoch, row ON groups
WHEN OLD.row IS NOT NULL AND (OLD.source, OLD.epoch, OLD.row) IS NOT (NEW.source, NEW.epoch, NEW.row)
BEGIN SELECT RAISE (ABORT, 'a group keeps its row: the data is not what it was when the run began'); END;
CREATE TRIGGER groups_stay BEFORE DELETE ON groups
BEGIN SELECT RAISE (ABORT, 'a group never leaves the ledger'); END;
CREATE TRIGGER steps_in_order BEFORE INSERT ON steps WHEN NEW.step <> (SELECT coalesce(max(step), 0) + 1 FROM steps)
BEGIN SELECT RAISE (ABORT, 'a step follows the one before'); END;
CREATE TRIGGER steps_keep BEFORE UPDATE ON steps
BEGIN SELECT RAISE (ABORT, 'a committed step never changes'); END;
CREATE TRIGGER steps_stay BEFORE DELETE ON steps
WHEN NOT EXISTS (SELECT 1 FROM voided WHERE step = OLD.step AND attempt = OLD.attempt)
BEGIN SELECT RAISE (ABORT, 'a committed step never leaves the ledger, unless it is void'); END;
CREATE TRIGGER voided_last BEFORE INSERT ON voided
WHEN NOT EXISTS (SELECT 1 FROM steps WHERE step = NEW.step AND attempt = NEW.attempt)
    OR NEW.step < (SELECT max(step) FROM steps)
BEGIN SELECT RAISE (ABORT, 'only the last committed step can be void'); END;
CREATE TRIGGER voided_undo AFTER INSERT ON voided
BEGIN
    UPDATE groups SET state = 'leased', step = NULL, updated_at = NEW.voided_at WHERE step = NEW.step;
    DELETE FROM steps WHERE step = NEW.step;
END;
CREATE TRIGGER voided_keep BEFORE UPDATE ON voided
BEGIN SELECT RAISE (ABORT, 'what was void stays on record'); END;
CREATE TRIGGER voided_stay BEFORE DELETE ON voided
BEGIN SELECT RAISE (ABORT, 'what was void stays on record'); END;
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The last committed step of a run."""

    step: int
    version: int
    checkpoint: str


class Ledger:
    """One writer: the run's driver, which holds `lock` beside the file until it closes the ledger or dies.

    Raises RuntimeError when another process holds the lock, when the file cannot be what this version writes, and from
    every method that cannot write.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = _locked(path.with_name("lock"))
        self._pending: dict[int, tuple[Any, ...]] = {}
        self._failures: list[tuple[int, int, str]] = []
        self._revisions: list[tuple[int, int, int, str]] = []
        self._rows: list[tuple[str, int, int, int]] = []
        try:
            self._db = sqlite3.connect(path, isolation_level=None, timeout=10, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")  # survives a kill; `commit` survives a power failure too
            self._db.execute("PRAGMA foreign_keys = ON")
            (tables,) = self._db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'meta'").fetchone()
            if not tables:
                self._db.executescript(
                    f"BEGIN; {SCHEMA} INSERT INTO meta VALUES ('schema', '{SCHEMA_VERSION}'); COMMIT;"
                )
            _check(self._db, path)
            # what the last driver had in hand is gone with it
            self._db.execute("UPDATE groups SET state = 'leased' WHERE state IN ('sampled', 'scored')")
            (highest,) = self._db.execute("SELECT max(id) FROM groups").fetchone()
            self._next = 0 if highest is None else highest + 1
            self._again = self._open()
        except sqlite3.Error as error:
            raise RuntimeError(f"{path}: the ledger cannot be opened: {error}") from error

    def _open(self) -> list[int]:
        """What was open when the last driver stopped: sampled again, before anything new."""
        query = "SELECT id FROM groups WHERE state NOT IN ('trained', 'dropped') ORDER BY id"
        return [group for (group,) in self._db.execute(query)]

    def lease(self, count: int) -> list[int]:
        """Take `count` groups: those that a crash left open first, then new ones."""
        now = time.time()
        again = self._again[:count]
        fresh = range(self._next, self._next + count - len(again))
        with self._transaction():
            self._db.executemany(
                "UPDATE groups SET state = 'leased', attempts = attempts + 1, updated_at = ? WHERE id = ?",
                [(now, group) for group in again],
            )
            # they belong to completions that are sampled again
            self._db.executemany("DELETE FROM failures WHERE group_id = ?", [(group,) for group in again])
            self._db.executemany("DELETE FROM revisions WHERE group_id = ?", [(group,) for group in again])
            self._db.executemany(
                "INSERT INTO groups (id, state, issued_at, updated_at) VALUES (?, 'leased', ?, ?)",
                [(group, now, now) for group in fresh],
            )
        self._again, self._next = self._again[count:], fresh.stop
        return [*again, *fresh]

    def drawn(self, group: int, source: str, epoch: int, row: int) -> None:
        """The row of a leased group: before it is sampled, and the same each time that the group is leased."""
        self._rows.append((source, epoch, row, group))

    def sampled(self, group: int, version: int, digest: str) -> None:
        self._mark(group, "sampled", version, digest, None)

    def scored(self, group: int, version: int, digest: str) -> None:
        self._mark(group, "scored", version, digest, None)

    def dropped(self, group: int, reason: str) -> None:
        self._mark(group, "dropped", None, None, reason)

    def _mark(self, group: int, state: str, *row: Any) -> None:
        if group in self._pending and self._pending[group][0] == "dropped":
            raise RuntimeError(f"ledger: group {group} was dropped, it cannot become {state}")
        self._pending[group] = (state, *row, time.time())

    def failed(self, group: int, sample: int, reason: str) -> None:
        """A completion without a reward: counted, and never trained."""
        self._failures.append((group, sample, reason))

    def revised(self, group: int, sample: int, reference: int, outcome: str) -> None:
        """An extra rollout that corrected a completion, and what came of it."""
        self._revisions.append((group, sample, reference, outcome))

    def flush(self) -> None:
        with self._transaction():
            pass

    def commit(self, step: int, version: int, checkpoint: str, groups: list[int]) -> None:
        """Mark the step and the groups that it trained, in one transaction."""
        now = time.time()
        self._db.execute("PRAGMA synchronous = FULL")
        with self._transaction():
            self._db.execute(
                "INSERT INTO steps SELECT ?, ?, ?, ?, 1 + count(*) FROM voided WHERE step = ?",
                (step, version, checkpoint, now, step),
            )
            done = self._db.executemany(
                "UPDATE groups SET state = 'trained', step = ?, updated_at = ? WHERE id = ? AND state = 'scored'",
                [(step, now, group) for group in groups],
            )
            if done.rowcount != len(groups):
                raise RuntimeError(
                    f"ledger: step {step} trained {len(groups)} groups, only {done.rowcount} were scored"
                )
            die_at("transaction", step)
        self._db.execute("PRAGMA synchronous = NORMAL")

    def rewind(self, step: int, reason: str) -> None:
        """Go back to the end of `step`: later steps are void, and the groups that they trained are open again.

        For a checkpoint that was lost. The steps stay on record with the reason.
        """
        with self._transaction():
            later = self._db.execute("SELECT step, attempt FROM steps WHERE step > ? ORDER BY step DESC", (step,))
            self._db.executemany(
                "INSERT INTO voided VALUES (?, ?, ?, ?)", [(*row, reason, time.time()) for row in later.fetchall()]
            )
        self._again = self._open()

    def last_step(self) -> Step | None:
        row = self._db.execute("SELECT step, version, checkpoint FROM steps ORDER BY step DESC LIMIT 1").fetchone()
        return Step(step=row[0], version=row[1], checkpoint=row[2]) if row else None

    def checkpoint_of(self, step: int) -> str | None:
        row = self._db.execute("SELECT checkpoint FROM steps WHERE step = ?", (step,)).fetchone()
        return row[0] if row else None

    @property
    def issued(self) -> int:
        """Groups leased so far, over all drivers."""
        return self._next

    def counts(self) -> dict[str, int]:
        """Groups by state, as last flushed."""
        return dict(self._db.execute("SELECT state, count(*) FROM groups GROUP BY state").fetchall())

    def drops(self) -> dict[str, int]:
        """Dropped groups by reason, as last flushed."""
        return dict(self._db.execute("SELECT reason, count(*) FROM groups WHERE state = 'dropped' GROUP BY 1"))

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._db.close()
            self._lock.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """What is pending and what the caller adds, together or not at all."""
        try:
            with self._db:  # COMMIT, or ROLLBACK on any exception
                self._db.execute("BEGIN IMMEDIATE")
                self._db.executemany("UPDATE groups SET source = ?, epoch = ?, row = ? WHERE id = ?", self._rows)
                done = self._db.executemany(
                    "UPDATE groups SET state = ?, version = coalesce(?, version), digest = coalesce(?, digest),"
                    " reason = ?, updated_at = ? WHERE id = ?",
                    [(*row, group) for group, row in self._pending.items()],
                )
                assert done.rowcount in (-1, len(self._pending)), "a group that was never leased"
                self._db.executemany("INSERT OR REPLACE INTO failures VALUES (?, ?, ?)", self._failures)
                self._db.executemany("INSERT OR REPLACE INTO revisions VALUES (?, ?, ?, ?)", self._revisions)
                yield
        except sqlite3.Error as error:
            raise RuntimeError(f"{self.path}: the ledger cannot be written: {error}") from error
        self._pending.clear()
        self._rows.clear()
        self._failures.clear()
        self._revisions.clear()


def check_free(folder: Path) -> None:
    """Raise RuntimeError when another process is training the run in `folder`."""
    _locked(folder / "lock").close()


def die_at(point: str, step: int) -> None:
    """The fault injector's way into the middle of a commit: ACCREDIT_CHAOS=rename:12 kills the process there."""
    if os.environ.get("ACCREDIT_CHAOS") == f"{point}:{step}":
        os.kill(os.getpid(), signal.SIGKILL)


def _locked(path: Path) -> IO[str]:
    """An open file with an exclusive lock, which the kernel takes back when the process ends, however it ends."""
    try:
        file = path.open("a+")
    except OSError as error:
        raise RuntimeError(f"{path}: cannot be written: {error.strerror}: a run writes into its folder") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with file:
            file.seek(0)
            raise RuntimeError(
                f"{path.parent}: {file.read() or 'another process'} is training this run: "
                "wait until it ends, or stop it first"
            ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


def _check(db: sqlite3.Connection, path: Path) -> None:
    """Raise RuntimeError, or sqlite3.Error, when the file is damaged or of another version."""
    (version,) = db.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone() or ("nothing",)
    if version != str(SCHEMA_VERSION):
        raise RuntimeError(
            f"{path}: the ledger has schema {version}, this version of accredit writes {SCHEMA_VERSION}: "
            "use the version that began the run"
        )
    (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise RuntimeError(f"{path}: the ledger is damaged: {verdict}")


def audit(path: Path) -> dict[str, Any]:
    """What the ledger of a finished, running or crashed run says. `balanced` is issued = trained + dropped + open.

    Opens the file read-only. Raises FileNotFoundError when there is none, RuntimeError when it cannot be read.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: no ledger there: is this the folder of a run?")
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None, timeout=10)) as db:
            db.execute("BEGIN")  # one snapshot: the run may be in progress
            _check(db, path)
            return _report(db)
    except sqlite3.Error as error:
        raise RuntimeError(f"{path}: the ledger cannot be read: {error}") from error


def _report(db: sqlite3.Connection) -> dict[str, Any]:
    one = lambda query: db.execute(query).fetchone()[0]  # noqa: E731
    states = dict(db.execute("SELECT state, count(*) FROM groups GROUP BY state").fetchall())
    issued = one("SELECT coalesce(max(id), -1) + 1 FROM groups")
    trained, dropped = states.get("trained", 0), states.get("dropped", 0)
    opened = sum(states.get(state, 0) for state in ("leased", "sampled", "scored"))
    report = {
        "issued": issued,
        "trained": trained,
        "dropped": dropped,
        "open": opened,
        "steps": one("SELECT count(*) FROM steps"),
        "last_step": one("SELECT max(step) FROM steps"),
        "dropped_by_reason": dict(db.execute("SELECT reason, count(*) FROM groups WHERE state = 'dropped' GROUP BY 1")),
        "failed_samples_by_reason": dict(db.execute("SELECT reason, count(*) FROM failures GROUP BY 1")),
        "rows_by_epoch": {
            f"{source} epoch {epoch}".strip(): {"issued": issued, "duplicates": issued - rows}
            for source, epoch, issued, rows in db.execute(
                "SELECT source, epoch, count(*), count(DISTINCT row) FROM groups WHERE row IS NOT NULL GROUP BY 1, 2"
            )
        },
        "sampled_again": one("SELECT coalesce(sum(attempts - 1), 0) FROM groups"),
        "voided_steps": [f"{row[0]}: {row[1]}" for row in db.execute("SELECT step, reason FROM voided ORDER BY rowid")],
        "steps_without_groups": one(
            "SELECT count(*) FROM steps WHERE step NOT IN (SELECT step FROM groups WHERE step IS NOT NULL)"
        ),
        "missing_steps": one("SELECT coalesce(max(step), 0) - count(*) FROM steps"),
        "orphans": one("SELECT count(*) FROM groups WHERE step IS NOT NULL AND step NOT IN (SELECT step FROM steps)"),
        "integrity": one("PRAGMA integrity_check"),
        "checkpoints": dict(db.execute("SELECT step, checkpoint FROM steps")),
    }
    report["balanced"] = (
        issued == trained + dropped + opened
        and report["orphans"] == report["steps_without_groups"] == report["missing_steps"] == 0
        and not any(epoch["duplicates"] for epoch in report["rows_by_epoch"].values())
        and report["integrity"] == "ok"
    )
    return report
