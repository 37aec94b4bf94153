"""The ledger through any history, against a model of it in plain Python."""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.ledger import Ledger, audit
from tests.cluster.test_ledger import rows

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # fsync is what costs time


class Histories(RuleBasedStateMachine):
    """Interleavings of everything that can be said to a ledger, with crashes between any two of them.

    `model` is what was said, `durable` what of it must survive a crash: the state at the last transaction.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="ledger-", dir=MEMORY))
        self.lives = 0

    @initialize()
    def begin(self) -> None:
        self._path().parent.mkdir()
        self.ledger = Ledger(self._path())
        self.model: dict[int, str] = {}
        self.durable: dict[int, str] = {}
        self.step_of: dict[int, int] = {}
        self.steps = 0
        self.voided: list[str] = []
        self.leased: set[int] = set()  # by this life of the driver
        self.again: list[int] = []

    def _path(self) -> Path:
        return self.folder / str(self.lives) / "ledger.sqlite"

    def _open(self, *states: str) -> list[int]:
        return sorted(group for group in self.leased if self.model[group] in states)

    @rule(count=st.integers(1, 5))
    def lease(self, count: int) -> None:
        groups = self.ledger.lease(count)
        fresh = count - len(self.again[:count])
        assert groups == self.again[:count] + list(range(len(self.model), len(self.model) + fresh))
        self.again = self.again[count:]
        self.model |= dict.fromkeys(groups, "leased")
        self.leased |= set(groups)
        self.durable = dict(self.model)

    @precondition(lambda self: self._open("leased"))
    @rule(data=st.data())
    def sampled(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self._open("leased")))
        self.ledger.drawn(group, "", group // 7, group % 7)
        self.ledger.sampled(group, self.steps, "digest")
        self.model[group] = "sampled"

    @precondition(lambda self: self._open("sampled"))
    @rule(data=st.data())
    def scored(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self._open("sampled")))
        self.ledger.scored(group, self.steps, "digest")
        self.model[group] = "scored"

    @precondition(lambda self: self._open("leased", "sampled", "scored"))
    @rule(data=st.data(), reason=st.sampled_from(["stale", "no reward"]))
    def dropped(self, data: st.DataObject, reason: str) -> None:
        group = data.draw(st.sampled_from(self._open("leased", "sampled", "scored")))
        self.ledger.dropped(group, reason)
        self.model[group] = "dropped"

    @precondition(lambda self: self._open("sampled"))
    @rule(data=st.data())
    def failed(self, data: st.DataObject) -> None:
        self.ledger.failed(data.draw(st.sampled_from(self._open("sampled"))), 0, "timed out")

    @rule()
    def flush(self) -> None:
        self.ledger.flush()
        self.durable = dict(self.model)

    @precondition(lambda self: self._open("scored"))
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        groups = data.draw(st.lists(st.sampled_from(self._open("scored")), min_size=1, unique=True))
        self.steps += 1
        self.ledger.commit(self.steps, self.steps, f"checkpoint {self.steps}", groups)
        self.model |= dict.fromkeys(groups, "trained")
        self.step_of |= dict.fromkeys(groups, self.steps)
        self.durable = dict(self.model)

    @precondition(lambda self: any(state != "scored" for state in self.model.values()))
    @rule(data=st.data())
    def commit_of_what_was_not_scored(self, data: st.DataObject) -> None:
        others = sorted(group for group, state in self.model.items() if state != "scored")
        with pytest.raises(RuntimeError):
            self.ledger.commit(self.steps + 1, 0, "wrong", [*self._open("scored"), data.draw(st.sampled_from(others))])

    def _reopened(self) -> None:
        self.model = {
            group: state if state in ("trained", "dropped") else "leased" for group, state in self.durable.items()
        }
        self.leased = set()
        self.again = sorted(group for group, state in self.model.items() if state == "leased")

    @rule()
    def crash(self) -> None:
        """As the disk is after kill -9: the files as they are, the connection never closed."""
        before = self._path().parent
        self.lives += 1
        shutil.copytree(before, self._path().parent)
        self.ledger._db.close()
        self.ledger._lock.close()
        self.ledger = Ledger(self._path())
        self._reopened()

    @rule()
    def restart(self) -> None:
        self.ledger.close()
        self.durable = dict(self.model)
        self.ledger = Ledger(self._path())
        self._reopened()

    @precondition(lambda self: self.steps > 0 and not self.leased)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        """When a driver begins, before it leases."""
        step = data.draw(st.integers(0, self.steps - 1))
        self.ledger.rewind(step, "lost")
        self.voided += [f"{void}: lost" for void in range(self.steps, step, -1)]
        self.steps = step
        for group in [group for group, last in self.step_of.items() if last > step]:
            del self.step_of[group]
            self.durable[group] = "leased"
        self._reopened()

    @invariant()
    def agrees_with_the_model(self) -> None:
        path = self._path()
        report = audit(path)
        states = list(self.durable.values())
        assert report["balanced"]
        assert (report["issued"], report["steps"]) == (len(states), self.steps)
        assert (report["trained"], report["dropped"]) == (states.count("trained"), states.count("dropped"))
        assert report["voided_steps"] == self.voided
        on_disk = rows(path)
        assert {group: step for group, _, step, *_ in on_disk if step} == self.step_of
        for group, state, *_ in on_disk:
            ended = "trained", "dropped"
            assert state == self.durable[group] or (state not in ended and self.durable[group] not in ended)

    def teardown(self) -> None:
        self.ledger._db.close()
        self.ledger._lock.close()
        shutil.rmtree(self.folder)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
