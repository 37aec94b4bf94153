"""Checkpoints on disk: written under a temporary name, made durable, renamed, and only then committed to the ledger."""

import hashlib
import os
import shutil
from pathlib import Path

from cluster.ledger import Ledger, Step


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
        _sync(written)
        shutil.rmtree(final, ignore_errors=True)  # newer than the last commit: a crash came between rename and commit
        os.rename(written, final)
        _sync(self.folder)
        return digest

    def _writing(self, step: int) -> Path:
        return self.folder / f".writing-{step:06d}"

    def prune(self) -> None:
        for path in sorted(self.folder.glob("[0-9]*"))[: -self.keep]:
            shutil.rmtree(path)

    def restore(self, ledger: Ledger) -> tuple[Step, Path] | None:
        """The last committed step and its checkpoint; what is newer is removed. None for a run without commits.

        Raises RuntimeError when the checkpoint is missing or is not what was committed.
        """
        for path in self.folder.glob(".writing-*"):
            shutil.rmtree(path)
        last = ledger.last_step()
        for path in self.folder.glob("[0-9]*"):
            if last is None or int(path.name) > last.step:
                shutil.rmtree(path)
        if last is None:
            return None
        path = self.path(last.step)
        if not path.exists() or content_digest(path) != last.checkpoint:
            raise RuntimeError(f"{path}: the checkpoint of the last committed step is missing or was changed")
        return last, path


def content_digest(folder: Path) -> str:
    """sha256 over the names and bytes of a folder's files."""
    sha = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        sha.update(f"{path.name}\n{path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                sha.update(block)
    return sha.hexdigest()


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
