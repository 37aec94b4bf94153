"""A new version on its way: exported once, loaded and proved on every actor that needs it, kept in the run's folder."""

import asyncio
import time
from pathlib import Path

from cluster.fleet import Fleet, Scorers
from cluster.remote import Learners
from credit.adapter import Adapter


class Publisher:
    """Sampling goes on while a version is published; new requests take it once its canary was right."""

    def __init__(self, learners: Learners, fleet: Fleet, scorers: Scorers, folder: Path) -> None:
        self.learners, self.fleet, self.scorers, self.folder = learners, fleet, scorers, folder / "adapters"
        self.newest: Adapter | None = None

    async def publish(self, version: int) -> dict[str, float]:
        """Returns when every serving rollout replica and credit actor holds the version."""
        began = time.monotonic()
        adapter = await self.learners.export(version)
        exported = time.monotonic()
        # a credit actor is asked about a version as soon as a replica samples under it, so it must hold it first
        scored, sampled, _ = await asyncio.gather(
            self.scorers.publish(adapter), self.fleet.publish(adapter), asyncio.to_thread(self._keep, adapter)
        )
        self.newest = adapter
        return scored | sampled | {"swap/export_s": exported - began, "swap/bytes": adapter.nbytes}

    def _keep(self, adapter: Adapter) -> None:
        adapter.save(self.folder / f"v{adapter.version:06d}")
