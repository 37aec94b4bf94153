"""The ledger: one row per prompt group, so that every trajectory is accounted for through any crash.

    leased -> sampled -> scored -> trained(step) | dropped(reason)

Only `trained` and `dropped` are promises; the states between are kept so that a reader sees where a group is. They are
written in batches (`flush`), because a group that was open in a crash is sampled again anyway. A step and its groups
are one transaction (`commit`), made after the step's checkpoint has its final name: the last committed step is the
truth.
"""

import json
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE steps (
    step INTEGER PRIMARY KEY,
    version INTEGER NOT NULL,
    checkpoint TEXT NOT NULL,      -- sha256 over the checkpoint's files
    committed_at REAL NOT NULL
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
    CHECK ((state = 'trained') = (step IS NOT NULL)),
    CHECK ((state = 'dropped') = (reason IS NOT NULL)),
    CHECK (state IN ('leased', 'dropped') OR (version IS NOT NULL AND digest IS NOT NULL))
);
CREATE INDEX groups_by_state ON groups (state);
CREATE TABLE failures (
    group_id INTEGER NOT NULL REFERENCES groups (id),
    sample INTEGER NOT NULL,       -- completion within the group
    reason TEXT NOT NULL,
    PRIMARY KEY (group_id, sample)
);
CREATE TRIGGER groups_end_once BEFORE UPDATE ON groups WHEN OLD.state IN ('trained', 'dropped')
BEGIN SELECT RAISE (ABORT, 'a group that was trained or dropped never changes'); END;
CREATE TRIGGER groups_stay BEFORE DELETE ON groups
BEGIN SELECT RAISE (ABORT, 'a group never leaves the ledger'); END;
CREATE TRIGGER steps_stay BEFORE DELETE ON steps
BEGIN SELECT RAISE (ABORT, 'a committed step never leaves the ledger'); END;
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The last committed step of a run."""

    step: int
    version: int
    checkpoint: str


class Ledger:
    """One writer: the run's driver. Raises RuntimeError when the file cannot be what this version writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._db = sqlite3.connect(path, isolation_level=None, timeout=10, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("PRAGMA foreign_keys = ON")
            self._prepare()
        except sqlite3.Error as error:
            raise RuntimeError(f"{path}: the ledger cannot be opened: {error}") from error
        self._pending: dict[int, tuple[Any, ...]] = {}
        self._failures: list[tuple[int, int, str]] = []
        (highest,) = self._db.execute("SELECT max(id) FROM groups").fetchone()
        self._next = 0 if highest is None else highest + 1
        # what was open when the last driver stopped is sampled again, before anything new
        self._again = self._ids("SELECT id FROM groups WHERE state NOT IN ('trained', 'dropped') ORDER BY id")

    def _prepare(self) -> None:
        (tables,) = self._db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'meta'").fetchone()
        if not tables:
            self._db.executescript(f"BEGIN; {SCHEMA} INSERT INTO meta VALUES ('schema', '{SCHEMA_VERSION}'); COMMIT;")
        (version,) = self._db.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
        if int(version) != SCHEMA_VERSION:
            raise RuntimeError(
                f"{self.path}: the ledger has schema {version}, this version of accredit writes {SCHEMA_VERSION}: "
                "continue the run with the version that began it"
            )

    def _ids(self, query: str) -> list[int]:
        return [row[0] for row in self._db.execute(query)]

    def lease(self, count: int) -> list[int]:
        """Take `count` groups: those that a crash left open first, then new ones."""
        now = time.time()
        groups, self._again = self._again[:count], self._again[count:]
        for group in groups:
            self._pending[group] = ("leased", None, None, None, now)
        fresh = range(self._next, self._next + count - len(groups))
        self._next = fresh.stop
        rows = [(group, now, now) for group in fresh]
        with self._transaction():
            self._write_pending()
            self._db.executemany("UPDATE groups SET attempts = attempts + 1 WHERE id = ?", [(g,) for g in groups])
            self._db.executemany(
                "INSERT INTO groups (id, state, issued_at, updated_at) VALUES (?, 'leased', ?, ?)", rows
            )
        return [*groups, *fresh]

    def sampled(self, group: int, version: int, digest: str) -> None:
        self._pending[group] = ("sampled", version, digest, None, time.time())

    def scored(self, group: int, version: int, digest: str) -> None:
        self._pending[group] = ("scored", version, digest, None, time.time())

    def dropped(self, group: int, reason: str) -> None:
        self._pending[group] = ("dropped", None, None, reason, time.time())

    def failed(self, group: int, sample: int, reason: str) -> None:
        """A completion without a reward: counted, and never trained."""
        self._failures.append((group, sample, reason))

    def flush(self) -> None:
        with self._transaction():
            self._write_pending()

    def commit(self, step: int, version: int, checkpoint: str, groups: list[int]) -> None:
        """Mark the step and the groups that it trained, in one transaction."""
        now = time.time()
        with self._transaction():
            self._write_pending()
            self._db.execute("INSERT INTO steps VALUES (?, ?, ?, ?)", (step, version, checkpoint, now))
            done = self._db.executemany(
                "UPDATE groups SET state = 'trained', step = ?, updated_at = ? WHERE id = ? AND state = 'scored'",
                [(step, now, group) for group in groups],
            )
            if done.rowcount != len(groups):
                raise RuntimeError(
                    f"ledger: step {step} trained {len(groups)} groups, only {done.rowcount} were scored"
                )

    def last_step(self) -> Step | None:
        row = self._db.execute("SELECT step, version, checkpoint FROM steps ORDER BY step DESC LIMIT 1").fetchone()
        return Step(step=row[0], version=row[1], checkpoint=row[2]) if row else None

    def checkpoint_of(self, step: int) -> str | None:
        row = self._db.execute("SELECT checkpoint FROM steps WHERE step = ?", (step,)).fetchone()
        return row[0] if row else None

    def counts(self) -> dict[str, int]:
        """Groups by state, as last flushed."""
        return dict(self._db.execute("SELECT state, count(*) FROM groups GROUP BY state").fetchall())

    def close(self) -> None:
        self.flush()
        self._db.close()

    def _write_pending(self) -> None:
        self._db.executemany(
            "UPDATE groups SET state = ?, version = coalesce(?, version), digest = coalesce(?, digest), reason = ?,"
            " updated_at = ? WHERE id = ?",
            [(*row, group) for group, row in self._pending.items()],
        )
        self._db.executemany("INSERT OR REPLACE INTO failures VALUES (?, ?, ?)", self._failures)
        self._pending.clear()
        self._failures.clear()

    def _transaction(self) -> "_Transaction":
        return _Transaction(self._db)


class _Transaction:
    """BEGIN IMMEDIATE ... COMMIT, or ROLLBACK on any exception."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db

    def __enter__(self) -> None:
        self.db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, *_: object) -> None:
        self.db.execute("COMMIT" if kind is None else "ROLLBACK")


def audit(path: Path) -> dict[str, Any]:
    """What the ledger of a finished, running or crashed run says. `balanced` is issued = trained + dropped + open.

    Opens the file read-only. Raises FileNotFoundError when there is none.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: no ledger there: is this the folder of a run?")
    db = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10)
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
        "sampled_again": one("SELECT coalesce(sum(attempts - 1), 0) FROM groups"),
        "steps_without_groups": one(
            "SELECT count(*) FROM steps WHERE step NOT IN (SELECT step FROM groups WHERE step IS NOT NULL)"
        ),
        "missing_steps": one("SELECT coalesce(max(step), 0) - count(*) FROM steps"),
        "orphans": one("SELECT count(*) FROM groups WHERE step IS NOT NULL AND step NOT IN (SELECT step FROM steps)"),
        "integrity": one("PRAGMA integrity_check"),
    }
    report["balanced"] = (
        issued == trained + dropped + opened
        and report["orphans"] == report["steps_without_groups"] == report["missing_steps"] == 0
        and report["integrity"] == "ok"
    )
    db.close()
    return json.loads(json.dumps(report))
