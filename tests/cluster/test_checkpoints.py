"""Checkpoints: sealed durably, and what a crash or a bad disk leaves behind."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from cluster import checkpoints as checkpoints_module
from cluster.checkpoints import Checkpoints, content_digest
from cluster.ledger import Ledger, audit


def write(checkpoints: Checkpoints, step: int) -> str:
    folder = checkpoints.temporary(step)
    (folder / "adapter.safetensors").write_bytes(bytes([step]) * 1000)
    (folder / "state.json").write_text(f"step {step}")
    return checkpoints.seal(step)


def commit(checkpoints: Checkpoints, ledger: Ledger, step: int) -> None:
    groups = ledger.lease(2)
    for group in groups:
        ledger.drawn(group, "", 0, group)
        ledger.scored(group, step - 1, "digest")
    ledger.commit(step, step, write(checkpoints, step), groups)


def a_run(folder: Path, steps: int, keep: int = 3) -> tuple[Checkpoints, Ledger]:
    checkpoints, ledger = Checkpoints(folder, keep), Ledger(folder / "ledger.sqlite")
    for step in range(1, steps + 1):
        commit(checkpoints, ledger, step)
        checkpoints.prune()
    return checkpoints, ledger


def names(checkpoints: Checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.folder.iterdir())


def test_a_seal_is_a_rename_after_the_files_and_the_folder_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def seen_fsync(descriptor: int) -> None:
        events.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def seen_rename(source: Any, target: Any) -> None:
        events.append(f"rename {Path(source).name} {Path(target).name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "rename", seen_rename)
    digest = write(checkpoints, 7)
    assert sorted(events[:2]) == ["fsync adapter.safetensors", "fsync state.json"]
    assert events[2:] == ["fsync .writing-000007", "rename .writing-000007 000007", "fsync checkpoints"]
    assert digest == content_digest(checkpoints.path(7))


def test_a_run_without_commits_restores_nothing(tmp_path: Path) -> None:
    checkpoints, ledger = a_run(tmp_path, 0)
    assert checkpoints.restore(ledger) is None
    write(checkpoints, 1)  # the crash came before the transaction
    assert checkpoints.restore(ledger) is None
    assert names(checkpoints) == []


def test_the_last_committed_step_is_restored(tmp_path: Path) -> None:
    checkpoints, ledger = a_run(tmp_path, 5)
    assert names(checkpoints) == ["000003", "000004", "000005"]
    restored = checkpoints.restore(ledger)
    assert restored is not None
    step, path = restored
    assert (step.step, path.name, (path / "state.json").read_text()) == (5, "000005", "step 5")
    assert audit(ledger.path)["voided_steps"] == []


def test_what_a_crash_left_behind_is_removed(tmp_path: Path) -> None:
    checkpoints, ledger = a_run(tmp_path, 2)
    (checkpoints.temporary(4) / "adapter.safetensors").write_bytes(b"half")  # between open and fsync
    write(checkpoints, 3)  # between rename and transaction
    restored = checkpoints.restore(ledger)
    assert restored is not None
    assert restored[0].step == 2
    assert names(checkpoints) == ["000001", "000002"]
    commit(checkpoints, ledger, 3)
    assert names(checkpoints) == ["000001", "000002", "000003"]


def test_a_temporary_folder_is_empty_whatever_was_there(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    (checkpoints.temporary(1) / "half").write_text("x")
    assert list(checkpoints.temporary(1).iterdir()) == []


def truncated(path: Path) -> None:
    os.truncate(path / "adapter.safetensors", 999)


def one_bit(path: Path) -> None:
    data = bytearray((path / "adapter.safetensors").read_bytes())
    data[500] ^= 1
    (path / "adapter.safetensors").write_bytes(data)


def swapped(path: Path) -> None:
    (path / "state.json").rename(path / "moved")
    (path / "adapter.safetensors").rename(path / "state.json")
    (path / "moved").rename(path / "adapter.safetensors")


DAMAGE = {
    "truncated": truncated,
    "one bit": one_bit,
    "swapped": swapped,
    "a file less": lambda path: (path / "state.json").unlink(),
    "a file more": lambda path: (path / "more").write_text(""),
    "gone": shutil.rmtree,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_falls_back_to_the_one_before_and_says_so(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints, ledger = a_run(tmp_path, 4)
    DAMAGE[damage](checkpoints.path(4))
    restored = checkpoints.restore(ledger)
    assert restored is not None
    assert (restored[0].step, restored[1].name) == (3, "000003")
    assert "000004: missing or changed after the commit: the run goes on from step 3" in caplog.text
    report = audit(ledger.path)
    assert (report["trained"], report["open"], report["balanced"]) == (6, 2, True)
    assert report["voided_steps"] == ["4: the checkpoint is missing or was changed"]
    commit(checkpoints, ledger, 4)  # leases the groups of the void step first
    ledger.close()
    report = audit(ledger.path)
    assert (report["issued"], report["trained"], report["sampled_again"]) == (8, 8, 2)
    ledger = Ledger(tmp_path / "ledger.sqlite")
    again = checkpoints.restore(ledger)
    assert again is not None
    assert again[0].step == 4
    assert audit(ledger.path)["voided_steps"] == report["voided_steps"]


def test_two_damaged_checkpoints_fall_back_by_two(tmp_path: Path) -> None:
    checkpoints, ledger = a_run(tmp_path, 4)
    truncated(checkpoints.path(4))
    one_bit(checkpoints.path(3))
    restored = checkpoints.restore(ledger)
    assert restored is not None
    assert restored[0].step == 2
    assert names(checkpoints) == ["000002"]
    assert [void[0] for void in audit(ledger.path)["voided_steps"]] == ["4", "3"]


def test_without_any_intact_checkpoint_nothing_is_removed(tmp_path: Path) -> None:
    checkpoints, ledger = a_run(tmp_path, 4, keep=2)
    truncated(checkpoints.path(4))
    one_bit(checkpoints.path(3))
    with pytest.raises(RuntimeError, match="no committed checkpoint is intact"):
        checkpoints.restore(ledger)
    assert names(checkpoints) == ["000003", "000004"]
    report = audit(ledger.path)
    assert (report["trained"], report["voided_steps"]) == (8, [])


def test_a_fall_back_that_was_interrupted_is_finished_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, ledger = a_run(tmp_path, 4)
    for step in (4, 3):
        truncated(checkpoints.path(step))

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ledger, "rewind", killed)
        checkpoints.restore(ledger)
    restored = checkpoints.restore(ledger)
    assert restored is not None
    assert restored[0].step == 2
    assert audit(ledger.path)["balanced"]


def test_a_lost_ledger_does_not_cost_the_checkpoints(tmp_path: Path) -> None:
    checkpoints, ledger = a_run(tmp_path, 4)
    ledger.close()
    ledger.path.unlink()
    with pytest.raises(RuntimeError, match="the ledger knows 0 steps, expected a checkpoint of step 1 at most"):
        checkpoints.restore(Ledger(tmp_path / "ledger.sqlite"))
    assert names(checkpoints) == ["000002", "000003", "000004"]


def audited(folder: Path, adapters: int) -> dict[str, Any]:
    """The whole audit of a run with the first `adapters` adapters on disk."""
    for step in range(adapters + 1):
        adapter = folder / "adapters" / f"v{step:06d}"
        adapter.mkdir(parents=True, exist_ok=True)
        (adapter / "adapter_model.safetensors").touch()
    return checkpoints_module.audit(folder)


def test_the_audit_checks_checkpoints_and_adapters_on_disk(tmp_path: Path) -> None:
    checkpoints, ledger = a_run(tmp_path, 5)
    ledger.close()
    report = audited(tmp_path, adapters=4)  # the last is exported again when the run goes on
    assert (report["balanced"], report["checkpoints_checked"], report["adapters_missing"]) == (True, 3, [])
    write(checkpoints, 6)  # a crash between rename and transaction
    assert audited(tmp_path, adapters=4)["balanced"]
    one_bit(checkpoints.path(4))
    report = audited(tmp_path, adapters=4)
    assert (report["balanced"], report["checkpoints_damaged"]) == (False, ["000004"])


def test_the_audit_misses_an_adapter_and_the_last_checkpoint(tmp_path: Path) -> None:
    checkpoints, ledger = a_run(tmp_path, 5)
    ledger.close()
    report = audited(tmp_path, adapters=3)
    assert (report["balanced"], report["adapters_missing"]) == (False, [4])
    shutil.rmtree(checkpoints.path(5))
    report = audited(tmp_path, adapters=5)
    assert (report["balanced"], report["adapters_missing"], report["checkpoint_of_last_step"]) == (False, [], False)
