"""Where plain classes become Ray actors: connecting, resources, and one thin wrapper for each kind of actor.

`ray` is imported in cluster/ only. Calls are coroutines that raise when the actor is dead; deadlines are the callers'.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

from actors.rollout import RolloutWorker
from actors.scorer import Scorer
from cluster.deadline import Late, within
from cluster.fleet import Key
from cluster.pool import WATCH_S
from configs.schema import ConfigError, RunConfig
from credit.adapter import Adapter
from credit.trajectory import Batch, Prompt, Sample, Signals
from learner.learner import Learner

log = logging.getLogger("accredit.remote")

GONE_TIMEOUT_S = 30.0
DEATHS = (RayActorError, ObjectLostError)  # of an actor, or of the node that holds its answer
DEATH_KNOWN_S = 10.0  # until Ray tells of a rank that died
RESTARTS = 3
"""Restarts of the learner within one call before its error ends the run."""
PROJECT = Path(__file__).resolve().parent.parent

# Any: Ray adds `.remote` to every method at run time, which no type checker sees
RolloutActor: Any = ray.remote(RolloutWorker)
CreditActor: Any = ray.remote(Scorer)
LearnerActor: Any = ray.remote(Learner)


def connect(run: RunConfig, dashboard: bool = True) -> str:
    """Join the cluster that RAY_ADDRESS or `ray job submit` names, else start one on this machine.

    Returns the dashboard's address ("" for none). Raises ConfigError when the cluster lacks what the run asks for.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # by default 30, too few for a loaded machine
    # by default 60: so long is a process that dies before it has registered not missed
    os.environ.setdefault("RAY_worker_register_timeout_seconds", "30")
    path = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")]))
    local = not os.environ.get("RAY_ADDRESS")
    # "local": without it Ray would join whatever cluster was last started on this machine
    own = {"address": "local", "include_dashboard": dashboard, "object_store_memory": 512 << 20}
    here: dict[str, Any] = own if local else {}
    if not ray.is_initialized():
        context = ray.init(
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": {"PYTHONPATH": path, "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "0")}},
            **here,
        )
        address = context.dashboard_url or ""
    else:
        address = ""
    _check_resources(run)
    return address


def _check_resources(run: RunConfig) -> None:
    have = ray.cluster_resources()
    for name in ("CPU", "GPU"):
        each = {
            "rollout.replicas": (run.rollout.replicas, getattr(run.rollout, f"{name.lower()}s")),
            "credit.replicas": (run.credit.replicas, getattr(run.credit, f"{name.lower()}s")),
            "learner.ranks": (run.learner.ranks, getattr(run.learner, f"{name.lower()}s")),
        }
        need = sum(count * share for count, share in each.values())
        if need > have.get(name, 0) + 1e-6:
            parts = ", ".join(f"{field}={count} x {share:g}" for field, (count, share) in each.items() if share)
            raise ConfigError(
                f"resources: the run needs {need:g} {name} ({parts}), the cluster has {have.get(name, 0):g}: "
                "use fewer actors or a larger cluster"
            )


def session_logs() -> Path:
    """Ray's log folder of this session: what actors, vLLM and DeepSpeed print."""
    return Path(ray._private.worker._global_node.get_logs_dir_path())  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]


class Objects:
    """One object-store put for each adapter, however many actors load it."""

    def __init__(self) -> None:
        self._refs: dict[tuple[str, int, str], ray.ObjectRef] = {}

    def ref(self, adapter: Adapter) -> ray.ObjectRef:
        # the digest alone would not do: a step without signal gives a new version of the same content
        key = adapter.policy, adapter.version, adapter.digest
        if key not in self._refs:
            while len(self._refs) > 8:
                self._refs.pop(next(iter(self._refs)))
            self._refs[key] = ray.put(adapter)
        return self._refs[key]


async def answer(reference: Any) -> Any:
    """The value of an object reference; what the actor's method raised is raised as it was, with its traceback."""
    try:
        return await reference
    except RayTaskError as error:
        error.cause.add_note(str(error))
        raise error.cause from None


class Remote:
    """What every actor handle offers."""

    def __init__(self, handle: Any, objects: Objects) -> None:
        self.handle, self._objects = handle, objects

    async def load(self, adapter: Adapter) -> np.ndarray:
        return await answer(self.handle.load.remote(self._objects.ref(adapter)))

    async def canary(self, tokens: list[int], version: int | None) -> np.ndarray:
        return await answer(self.handle.canary.remote(tokens, version))

    async def stats(self, policy: str = "") -> dict[str, Any]:
        return await answer(self.handle.stats.remote(policy))

    async def forget(self, policy: str) -> None:
        await answer(self.handle.forget.remote(policy))

    async def alive(self) -> None:
        await answer(self.handle.__ray_ready__.remote())

    async def kill(self) -> None:
        await kill(self.handle)


async def kill(handle: Any) -> None:
    """SIGKILL the actor and wait until Ray says that it is gone."""
    ray.kill(handle, no_restart=True)
    try:
        await within(GONE_TIMEOUT_S, "a killed actor's end", handle.__ray_ready__.remote())
    except RayActorError:
        return


class RemoteReplica(Remote):
    """A rollout worker in an actor of its own."""

    @classmethod
    async def start(cls, run: RunConfig, model: str, objects: Objects, name: str) -> "RemoteReplica":
        resources = {"num_cpus": run.rollout.cpus, "num_gpus": run.rollout.gpus * run.rollout.tensor_parallel}
        handle = RolloutActor.options(**_options(name, resources)).remote(run, model)
        await answer(handle.__ray_ready__.remote())
        return cls(handle, objects)

    async def activate(self, version: int, policy: str = "") -> None:
        await answer(self.handle.activate.remote(version, policy))

    async def sample(self, prompts: list[Prompt], temperature: float | None = None) -> AsyncIterator[list[Sample]]:
        async for reference in self.handle.sample.remote(prompts, temperature):
            yield await answer(reference)


class RemoteScorer(Remote):
    """A credit actor. It keeps the newest `depth` versions of each policy; older ones leave when one is accepted."""

    def __init__(self, handle: Any, objects: Objects, depth: int) -> None:
        super().__init__(handle, objects)
        self._held: dict[str, list[int]] = {}
        self._depth = depth

    @classmethod
    async def start(cls, run: RunConfig, model: str, objects: Objects, name: str) -> "RemoteScorer":
        resources = {"num_cpus": run.credit.cpus, "num_gpus": run.credit.gpus}
        handle = CreditActor.options(**_options(name, resources)).remote(run, model)
        await answer(handle.__ray_ready__.remote())
        return cls(handle, objects, run.max_staleness + 1)

    async def activate(self, version: int, policy: str = "") -> None:
        held = self._held.setdefault(policy, [])
        held.append(version)
        while len(held) > self._depth:
            await answer(self.handle.unload.remote(held.pop(0), policy))

    async def forget(self, policy: str) -> None:
        self._held.pop(policy, None)
        await super().forget(policy)

    async def score(
        self, samples: list[Sample], needs: frozenset[str], negatives: dict[int, list[int]] | None
    ) -> list[Signals]:
        return await answer(self.handle.score.remote(samples, needs, negatives))

    async def delta_sums(self, coefficients: dict[Key, np.ndarray], policy: str) -> tuple[np.ndarray, np.ndarray]:
        return await answer(self.handle.delta_sums.remote(coefficients, policy))

    async def delta_dots(self, direction: np.ndarray, keys: list[Key], policy: str) -> dict[Key, np.ndarray]:
        return await answer(self.handle.delta_dots.remote(direction, keys, policy))

    async def delta_clear(self, keys: list[Key], policy: str) -> None:
        await answer(self.handle.delta_clear.remote(keys, policy))


class Learners:
    """The learner's ranks: they start together, step together, and are replaced together.

    When a rank dies or hangs, all of them start again from the last committed checkpoint, take the batch that was
    trained since (`pending`) once more, and go on: the same bits as if nothing had happened. A rank that fails while
    they start again counts as another failure.
    """

    def __init__(self, run: RunConfig, model: str, canary: list[int]) -> None:
        self.run, self.model, self.canary = run, model, canary
        self.ranks: list[Any] = []
        self.restarts = 0
        self._checkpoint: Path | None = None
        self._pending: ray.ObjectRef | None = None
        self._turn = asyncio.Lock()
        self._failed = False  # the ranks are to be replaced before the next call
        self._watches: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        world = self.run.learner.ranks
        resources = {"num_cpus": self.run.learner.cpus, "num_gpus": self.run.learner.gpus}
        master = f"127.0.0.1:{_free_port()}"
        self.ranks = [
            LearnerActor.options(**_options(f"learner-{rank}", resources)).remote(
                self.run, self.model, self.canary, rank, world, master
            )
            for rank in range(world)
        ]
        await self._each("start", lambda rank: rank.__ray_ready__.remote())
        for rank in self.ranks:
            watch = asyncio.get_running_loop().create_task(self._watch(rank))
            self._watches.add(watch)
            watch.add_done_callback(self._watches.discard)

    async def _watch(self, rank: Any) -> None:
        """Notice a death of which no call would tell, because none is under way."""
        while rank in self.ranks:
            try:
                await answer(rank.__ray_ready__.remote())
            except DEATHS as error:
                if rank in self.ranks and not self._failed:
                    self._fail("waiting", error)
                return
            await asyncio.sleep(WATCH_S)

    def _fail(self, what: str, error: BaseException) -> None:
        log.error("learner: %s failed, all ranks start again from %s: %s", what, self._checkpoint, error)
        self._failed = True

    async def step(self, batch: Batch) -> dict[str, float]:
        reference = ray.put(batch)
        metrics = (await self._guarded("step", lambda rank: rank.step.remote(reference)))[0]
        self._pending = reference
        return metrics

    async def export(self, version: int) -> Adapter:
        return (await self._guarded("export", lambda rank: rank.export.remote(version)))[0]

    async def save(self, folder: Path) -> None:
        await self._guarded("save", lambda rank: rank.save.remote(folder))

    async def load(self, folder: Path) -> None:
        await self._guarded("load", lambda rank: rank.load.remote(folder))
        self.committed(folder)

    def committed(self, folder: Path) -> None:
        """`folder` is the checkpoint to come back to."""
        self._checkpoint, self._pending = folder, None

    async def kill(self) -> None:
        ranks, self.ranks = self.ranks, []
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*(kill(rank) for rank in ranks))

    async def _guarded(self, what: str, call: Any) -> list[Any]:
        for attempt in range(RESTARTS + 1):
            ranks = self.ranks
            try:
                async with self._turn:
                    if self._failed:
                        await self._restart()
                    ranks = self.ranks
                return await self._each(what, call)
            except (*DEATHS, Late) as error:
                if attempt == RESTARTS:
                    raise RuntimeError(
                        f"learner: {what}: failed {attempt + 1} times in a row, though all ranks were started again, "
                        f"the last time because: {' '.join(str(error).split())}"
                    ) from error
                if self.ranks is ranks or self._failed:  # else another call that failed with them has replaced them
                    self._fail(what, error)
        raise AssertionError("not reached")

    async def _restart(self) -> None:
        began = time.monotonic()
        await self.kill()
        self.restarts += 1
        await self.start()
        if self._checkpoint:
            await self._each("load", lambda rank: rank.load.remote(self._checkpoint))
        if self._pending:
            await self._each("step", lambda rank: rank.step.remote(self._pending))
        self._failed = False
        log.warning("learner: all ranks are back, %.1f s after the failure", time.monotonic() - began)

    async def _each(self, what: str, call: Any) -> list[Any]:
        """Every rank at once: one that dies ends the call, the others would wait in a collective for ever.

        Those see a broken connection, which may arrive before Ray's word of the death: the death is what is raised.
        """
        calls = [asyncio.ensure_future(answer(call(rank))) for rank in self.ranks]
        try:
            return await within(self.run.learner.timeout_s, f"learner: {what}", asyncio.gather(*calls))
        except (*DEATHS, Late):
            raise
        except Exception:
            await asyncio.wait(calls, timeout=DEATH_KNOWN_S, return_when=asyncio.ALL_COMPLETED)
            for one in calls:
                if one.done() and isinstance(error := one.exception(), RayActorError):
                    raise error from None
            raise
        finally:
            for one in calls:
                one.cancel()
            await asyncio.gather(*calls, return_exceptions=True)


def _options(name: str, resources: dict[str, float]) -> dict[str, Any]:
    threads = str(max(1, int(resources["num_cpus"])))
    return {
        **resources,
        "name": f"{name}-{os.urandom(3).hex()}",
        "max_restarts": 0,  # a restarted actor would serve the base model: the pool starts and proves a new one
        # Ray shows a process under its class; by ACCREDIT_ACTOR, tools outside Ray can tell which one it is
        "runtime_env": {"env_vars": {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "ACCREDIT_ACTOR": name}},
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
