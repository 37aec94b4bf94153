"""SIGKILL on the real stack: nothing is lost, nothing is trained twice, and the adapters have the same bits.

One Ray cluster of two nodes serves all of it; the second node is killed at the end.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml
from rich.console import Console
from safetensors.numpy import load_file

from benchmarks.chaos import ACTORS, descendants, equal_adapters, trained_twice, victim
from cluster.checkpoints import audit
from cluster.view import View
from configs.schema import RunConfig
from tests.cluster.test_run import config

pytestmark = pytest.mark.ray

STEPS = 12
DETECTED_S = 10.0


@pytest.fixture(scope="module")
def nodes(tiny_model: Path) -> Iterator[Any]:
    """Two raylets on this machine. Either has room for all actors, and Ray fills the first to one half."""
    import ray
    from ray.cluster_utils import Cluster

    from cluster import remote

    os.environ["RAY_raylet_start_wait_time_s"] = "120"  # noqa: SIM112 - Ray's name
    head = {"num_cpus": 1, "object_store_memory": 256 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=1, object_store_memory=256 << 20)
    os.environ["RAY_ADDRESS"] = str(cluster.address)
    remote.connect(config(tiny_model, Path("/nowhere"), "probe"), dashboard=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    del os.environ["RAY_ADDRESS"]


class Steps(View):
    """Calls `then[step]` when the step is committed."""

    def __init__(self, then: dict[int, Callable[[], None]]) -> None:
        super().__init__(Console(quiet=True))
        self.then = then

    def step(self, step: int, metrics: dict[str, float]) -> None:
        if step in self.then:
            self.then[step]()


def run_config(model: Path, out: Path, name: str, **changes: Any) -> RunConfig:
    changes = {"steps": STEPS, "keep_checkpoints": 5, **changes}
    return config(model, out, name, **changes)


def train(run: RunConfig, then: dict[int, Callable[[], None]] | None = None) -> dict[str, Any]:
    import asyncio

    from cluster.preflight import inputs
    from cluster.run import make_folder
    from cluster.run import train as train_run

    given = inputs(run, lambda share, text: None)
    make_folder(run)
    return asyncio.run(train_run(run, given, Steps(then or {})))


@pytest.fixture(scope="module")
def reference(nodes: Any, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = run_config(tiny_model, tmp_path_factory.mktemp("runs"), "reference")
    train(run)
    return run.folder


def settled(folder: Path, reference: Path) -> None:
    """Every group was trained once, and every adapter version has the bits of the run that nobody disturbed."""
    report = audit(folder)
    assert report["balanced"], report
    assert (report["trained"], report["open"], report["dropped"]) == (4 * STEPS, 0, 0), report
    assert trained_twice(folder) == 0
    assert equal_adapters(folder, reference, STEPS)


class Killer:
    """Kills one actor of a kind within 0.3 s of a step."""

    def __init__(self) -> None:
        self.killed: list[tuple[str, str, float]] = []

    def kill(self, kind: str) -> Callable[[], None]:
        def strike() -> None:
            victims = [found for process in descendants(os.getpid()) if (found := victim(process, kind))]
            process, name = random.choice(victims)
            self.killed.append((kind, name, time.time()))
            process.kill()

        return lambda: threading.Timer(random.uniform(0.0, 0.3), strike).start()


def test_a_synchronous_run_whose_actors_are_killed_gives_the_same_bits(
    reference: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture
):
    killer = Killer()
    kill, killed = killer.kill, killer.killed
    run = run_config(tiny_model, reference.parent, "killed")
    with caplog.at_level("INFO", logger="accredit"):
        train(run, {2: kill("rollout"), 4: kill("credit"), 6: kill("reward"), 8: kill("learner")})
    settled(run.folder, reference)
    assert [kind for kind, _, _ in killed] == ["rollout", "credit", "reward", "learner"]
    told = {"rollout": "quarantined", "credit": "quarantined", "learner": "all ranks start again"}
    for kind, name, at in killed:
        if kind in told:
            seconds = [r.created - at for r in caplog.records if told[kind] in r.message and r.created > at]
            assert seconds and seconds[0] < DETECTED_S, f"{name}: {seconds}"


def test_the_death_of_the_actor_that_keeps_deltas_features_changes_no_bit(nodes: Any, tiny_model: Path, tmp_path: Path):
    killer, folders = Killer(), []
    for name, then in {"alone": {}, "killed": {2: killer.kill("credit"), 4: killer.kill("credit")}}.items():
        run = run_config(tiny_model, tmp_path, name, steps=6, credit={"method": "delta"})
        train(run, then)
        folders.append(run.folder)
        report = audit(run.folder)
        assert report["balanced"] and (report["trained"], report["open"]) == (24, 0), report
    assert len(killer.killed) == 2
    assert equal_adapters(folders[1], folders[0], 6)


def accredit(run: RunConfig, *options: str, chaos: str = "") -> subprocess.Popen:
    path = run.folder.parent / f"{run.name}.yaml"
    path.write_text(yaml.safe_dump(run.model_dump(mode="json")))
    command = [sys.executable, "-m", "cluster.cli", "train", str(path), *options]
    environment = os.environ | {"ACCREDIT_CHAOS": chaos}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def end_of(process: subprocess.Popen, limit_s: float = 300.0) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=limit_s)
    finally:
        process.kill()
    return process.returncode, output


def until(condition: Callable[[], Any], limit_s: float = 300.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def test_a_driver_killed_in_mid_commit_stopped_and_robbed_of_a_checkpoint_gives_the_same_bits(
    reference: Path, tiny_model: Path
):
    run = run_config(tiny_model, reference.parent, "driver")
    code, _ = end_of(accredit(run, chaos="rename:3"))
    assert code == -signal.SIGKILL
    report = audit(run.folder)
    assert (report["last_step"], report["trained"], report["balanced"]) == (2, 8, True)
    assert (run.folder / "checkpoints" / "000003").exists(), "the kill came between rename and transaction"

    driver = accredit(run, chaos="transaction:6")
    until(lambda: f"process {driver.pid} on" in (run.folder / "lock").read_text())
    refused, output = end_of(accredit(run))
    assert refused == 2 and f"process {driver.pid} on" in output and "is training this run" in output, output
    assert end_of(driver)[0] == -signal.SIGKILL
    report = audit(run.folder)
    assert (report["last_step"], report["trained"], report["balanced"]) == (5, 20, True)

    driver = accredit(run)
    until(lambda: (audit(run.folder)["last_step"] or 0) >= 7)
    actors = [process for process in descendants(os.getpid()) if any(victim(process, kind) for kind in ACTORS)]
    driver.send_signal(signal.SIGTERM)
    code, output = end_of(driver)
    assert code == 128 + signal.SIGTERM and "stopped by SIGTERM, step" in output, output
    assert audit(run.folder)["balanced"]
    assert actors and not psutil.wait_procs(actors, timeout=20)[1], "actors outlive their driver"

    last = audit(run.folder)["last_step"]
    os.truncate(run.folder / "checkpoints" / f"{last:06d}" / "learner.safetensors", 999)
    damaged = audit(run.folder)
    assert not damaged["balanced"] and damaged["checkpoints_damaged"] == [f"{last:06d}"]
    code, output = end_of(accredit(run))
    assert code == 0, output
    assert f"the run goes on from step {last - 1}" in (run.folder / "driver.log").read_text()
    settled(run.folder, reference)


def test_a_gradient_that_is_never_finite_ends_the_run(nodes: Any, tiny_model: Path, tmp_path: Path):
    run = run_config(
        tiny_model, tmp_path, "nan", reward={"function": "tests.rewards.too_large"},
        credit={"advantage": "dr_grpo"}, learner={"max_skipped": 2},
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="not finite for 2 batches in a row"):
        train(run)
    report = audit(run.folder)
    assert (report["last_step"], report["open"], report["balanced"]) == (1, 4, True)
    record = json.loads((run.folder / "metrics.jsonl").read_text().splitlines()[1])
    assert (record["learner/skipped"], record["learner/updates"]) == (1, 0)
    first, second = (load_file(run.folder / f"adapters/v00000{i}/adapter_model.safetensors") for i in (0, 1))
    assert all(np.array_equal(first[name], second[name]) for name in first), "a skipped batch changed the policy"


def test_a_run_survives_the_loss_of_a_node(nodes: Any, reference: Path, tiny_model: Path):
    import ray

    (second,) = nodes.worker_nodes
    raylet = second.all_processes["raylet"][0].process.pid
    there: list[str] = []

    def remove() -> None:
        there.extend(
            f"{kind}" for kind in ("rollout", "credit", "learner") for p in descendants(raylet) if victim(p, kind)
        )
        nodes.remove_node(second, allow_graceful=False)

    cpus = {"cpus": 0.2}
    run = run_config(tiny_model, reference.parent, "node", rollout=cpus, credit=cpus, learner=cpus)
    train(run, {3: lambda: threading.Thread(target=remove).start()})
    assert there, "no actor was on the second node"
    until = time.monotonic() + 60  # the run may be over before Ray's health checks have given the node up
    while len(alive := [node for node in ray.nodes() if node["Alive"]]) > 1 and time.monotonic() < until:
        time.sleep(0.5)
    assert len(alive) == 1
    settled(run.folder, reference)
