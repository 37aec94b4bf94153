"""A new version on its way: exported once, loaded and proved on every actor that needs it, kept in the run's folder."""

import asyncio
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.fleet import Fleet, Scorers
from cluster.remote import Learners
from credit.adapter import Adapter


class Publisher:
    """Sampling goes on while a version is published; new requests take it once its canary was right."""

    def __init__(self, learners: Learners, fleet: Fleet, scorers: Scorers, folder: Path, policy: str = "") -> None:
        self.policy = policy
        self.learners, self.fleet, self.scorers, self.folder = learners, fleet, scorers, folder / "adapters"
        self.newest: Adapter | None = None
        self.trained: dict[int, float] = {}  # time.time() when a version began to be published: its last update is done

    async def publish(self, version: int) -> dict[str, Any]:
        """Returns when every serving rollout replica and credit actor holds the version.

        What can only be known once a version was in use (its first token, its requests) is reported with the next.
        """
        began = time.monotonic()
        self.trained = {old: at for old, at in self.trained.items() if old == version - 1} | {version: time.time()}
        adapter, stats = await asyncio.gather(self.learners.export(version), self.fleet.stats(self.policy))
        adapter = replace(adapter, policy=self.policy)
        exported = time.monotonic()
        # a credit actor is asked about a version as soon as a replica samples under it, so it must hold it first
        scored, sampled, _ = await asyncio.gather(
            self.scorers.publish(adapter), self.fleet.publish(adapter), asyncio.to_thread(self._keep, adapter)
        )
        self.newest = adapter
        counts = Counter[str]()
        for verdict, count in self.fleet.verdicts.items():
            counts[f"swap/verdict/{verdict.split()[0]}"] += count  # without from what it cannot be told apart
        for reason, count in (self.fleet.refusals + self.scorers.refusals).items():
            counts[f"swap/refused/{reason}"] += count
        times = {"swap/export_s": exported - began, "swap/bytes": adapter.nbytes}
        return scored | sampled | times | self._in_use(version - 1, stats) | counts

    def _in_use(self, version: int, stats: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """The version before, as the replicas saw it. Seconds are the slowest replica's."""
        used = [replica["versions"][version] for replica in stats.values() if version in replica["versions"]]
        firsts = [first - self.trained[version] for _, first in used if first and version in self.trained]
        return {
            "swap/first_token_s": max(firsts, default=None),
            "swap/requests": sum(requests for requests, _ in used),
            "swap/slot_load_s": max((replica["load_s"] for replica in stats.values()), default=0.0),
            "swap/proof_s": max((replica["proof_s"] for replica in stats.values()), default=0.0),
            "swap/canary_s": max((replica["canary_s"] for replica in stats.values()), default=0.0),
            "swap/resident": max((replica["most_resident"] for replica in stats.values()), default=0),
        }

    def _keep(self, adapter: Adapter) -> None:
        adapter.save(self.folder / f"v{adapter.version:06d}")
