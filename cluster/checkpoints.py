"""Checkpoints on disk: written under a temporary name, made durable, renamed, and only then committed to the ledger."""

import hashlib
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from cluster.ledger import Ledger, Step
from cluster.ledger import audit as audit_ledger

log = logging.getLogger("accredit.checkpoints")


class Checkpoints:
    """checkpoints/000012/ below a run's folder; the newest `keep` stay."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder / "checkpoints", keep
        self.folder.mkdir(exist_ok=True)

    def path(self, step: int) -> Path:
        return self.folder / f"{step:06d}"

    def temporary(self, step: int) -> Path:
        """An empty folder to write into; what a crash left there goes."""
        path = self._writing(step)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return path

    def seal(self, step: int) -> str:
        """Rename the temporary folder to its final name, durably. Returns its digest."""
        written, final = self._writing(step), self.path(step)
        digest = content_digest(written)
        for path in (*written.iterdir(), written):
            _sync(path)
        shutil.rmtree(final, ignore_errors=True)  # newer than the last commit: a crash came between rename and commit
        os.rename(written, final)
        _sync(self.folder)
        return digest

    def _writing(self, step: int) -> Path:
        return self.folder / f".writing-{step:06d}"

    def prune(self) -> None:
        for path in self._sealed()[: -self.keep]:
            shutil.rmtree(path)

    def restore(self, ledger: Ledger) -> tuple[Step, Path] | None:
        """The last committed step and its checkpoint. None for a run without commits.

        What a crash left without a commit is removed. A checkpoint that is missing or is not what was committed is
        removed too, and the ledger rewound to the newest step that can be restored. Raises RuntimeError when there is
        none, and when there are checkpoints that the ledger cannot have seen.
        """
        last = ledger.last_step()
        self._remove_uncommitted(last.step if last else 0)
        if last is None:
            return None
        lost = []
        for step in range(last.step, 0, -1):
            path = self.path(step)
            if path.exists() and content_digest(path) == ledger.checkpoint_of(step):
                break
            lost.append(path)
        else:
            raise RuntimeError(f"{self.folder}: no committed checkpoint is intact: train under another name")
        if lost:
            log.error("%s: missing or changed after the commit: the run goes on from step %d", lost[0], step)
            for damaged in lost:
                shutil.rmtree(damaged, ignore_errors=True)
            ledger.rewind(step, "the checkpoint is missing or was changed")
            last = ledger.last_step()
            assert last is not None
        return last, path

    def _remove_uncommitted(self, committed: int) -> None:
        for path in self.folder.glob(".writing-*"):
            shutil.rmtree(path)
        for path in self._sealed()[::-1]:
            if int(path.name) > committed + 1:
                raise RuntimeError(
                    f"{path}: the ledger knows {committed} steps, expected a checkpoint of step {committed + 1} at "
                    "most: the ledger of this run was lost or replaced; put it back, or train under another name"
                )
            if int(path.name) > committed:
                shutil.rmtree(path)

    def _sealed(self) -> list[Path]:
        return sorted(self.folder.glob("[0-9]*"))


def audit(run: Path) -> dict[str, Any]:
    """The ledger's audit, and whether the checkpoints and adapters on disk are what it says.

    Every committed step has an adapter, but the last may lack it: it is exported again when the run goes on. A
    checkpoint newer than the last step is no fault: a crash left it between the rename and the transaction. Raises as
    `ledger.audit`.
    """
    report = audit_ledger(run / "ledger.sqlite")
    committed = report.pop("checkpoints")
    steps = sorted(committed)
    on_disk = {path.name: path for path in (run / "checkpoints").glob("[0-9]*") if int(path.name) in committed}
    damaged = [name for name, path in sorted(on_disk.items()) if content_digest(path) != committed[int(name)]]
    missing = [step for step in steps[:-1] if not (run / f"adapters/v{step:06d}/adapter_model.safetensors").exists()]
    report |= {
        "checkpoints_checked": len(on_disk),
        "checkpoints_damaged": damaged,
        "checkpoint_of_last_step": not steps or f"{steps[-1]:06d}" in on_disk,
        "adapters_missing": missing,
    }
    report["balanced"] &= not damaged and not missing and report["checkpoint_of_last_step"]
    return report


def content_digest(folder: Path) -> str:
    """sha256 over the names and bytes of a folder's files."""
    sha = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        sha.update(f"{path.name}\n{path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                sha.update(block)
    return sha.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
