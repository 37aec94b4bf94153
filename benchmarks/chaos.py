"""SIGKILL at random moments, on the real command line: what is lost, what is trained twice, how long it takes.

accredit bench chaos [--kills 20 --steps 150 --minutes 90 --out DIR --json]

Small runs of the demo (synchronous, two rollout replicas, two learner ranks) are killed piece by piece until each kind
has had its share: a rollout actor, the credit actor, the reward's child, a learner rank, the driver, and the driver in
mid-commit (between rename and transaction; inside the transaction). After each end of the driver the run is audited
and goes on; at its end every adapter version is compared bit by bit with that of a run that nobody disturbed.
"""

import json as jsonlib
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file

from benchmarks import machine
from cluster.checkpoints import audit
from cluster.preflight import inputs
from configs.schema import load

ACTORS: tuple[str, ...] = ("rollout", "credit", "reward", "learner")
DRIVERS: tuple[str, ...] = ("driver", "rename", "transaction")
ACTOR_KILLS = 6  # in the life of one driver
LIMIT_S = 300.0  # without a committed step
GONE_S = 20.0  # for all that a dead driver started
PROMPTS_PER_STEP = 4
SETTINGS = (
    f"rollout.prompts_per_step={PROMPTS_PER_STEP} rollout.group_size=4 rollout.cpus=0.2 rollout.kv_cache_gb=0.1 "
    "credit.method=arca credit.cpus=0.2 learner.cpus=0.2 learner.ranks=2 learner.lr=1e-3 learner.schedule=constant "
    "data.heldout=16"
).split()
DETECTED = {
    "rollout": "{} quarantined",
    "credit": "{} quarantined",
    "reward": "reward: a child died",
    "learner": "all ranks start again from",
}
BACK = {"rollout": "{} serves v", "credit": "{} serves v", "learner": "learner: all ranks are back"}


@dataclass(slots=True)
class Kill:
    kind: str
    run: str
    at: float  # time.time()
    victim: str = ""  # as the log names it
    detected_s: float | None = None
    back_s: float | None = None


@dataclass(slots=True)
class Outcome:
    """Of one run, however often its driver was killed."""

    audits: list[bool] = field(default_factory=list)
    lost: int = 0  # groups that should have been trained
    twice: int = 0  # groups in more than one step
    bit_equal: bool = False
    left_behind: int = 0  # processes that outlived their driver
    errors: list[str] = field(default_factory=list)  # ends of the driver that nobody asked for


def main(kills: int, steps: int, minutes: float, out: Path, seed: int, json: bool) -> dict[str, Any]:
    """Kill until each kind had `kills`, or until the time is over; print a table, or JSON."""
    chaos = Chaos(out, steps, random.Random(seed))
    # before the deadline of a first step begins: it takes minutes on a busy machine
    inputs(load("configs/demo.yaml", [f"out={out}"]), lambda share, text: print(f"base model: {text}", file=sys.stderr))
    reference = chaos.undisturbed()
    chaos.end = time.monotonic() + 60 * minutes
    chaos.actors = chaos.rng.sample(ACTORS * kills, len(ACTORS) * kills)
    chaos.drivers = chaos.rng.sample(DRIVERS * kills, len(DRIVERS) * kills)
    while chaos.unfinished():
        chaos.disturbed(f"run-{len(chaos.outcomes)}", reference)
    report = {"machine": machine.describe(), "steps": steps, "seed": seed, "kinds": chaos.by_kind()}
    report["runs"] = {name: asdict(outcome) for name, outcome in chaos.outcomes.items()}
    if json:
        print(jsonlib.dumps(report, indent=1))
    else:
        _print(report)
    return report


class Chaos:
    def __init__(self, out: Path, steps: int, rng: random.Random) -> None:
        self.out, self.steps, self.rng = out, steps, rng
        self.actors: list[str] = []  # kinds still to be killed
        self.drivers: list[str] = []
        self.end = 0.0
        self.kills: list[Kill] = []
        self.outcomes: dict[str, Outcome] = {}

    def unfinished(self) -> bool:
        return bool(self.actors or self.drivers) and time.monotonic() < self.end

    def undisturbed(self) -> Path:
        folder = self.out / "reference"
        driver = self._start(folder)
        self._until(lambda: driver.poll() is not None, folder)
        if driver.returncode:
            raise RuntimeError(f"chaos: the run that nobody disturbs failed: see {folder}.log")
        return folder

    def disturbed(self, name: str, reference: Path) -> None:
        """One run from its beginning to its end, killed on the way."""
        folder, outcome = self.out / name, Outcome()
        self.outcomes[name] = outcome
        code = None
        while code != 0 and len(outcome.errors) < 3:
            ending = self.drivers.pop() if self.drivers and self.unfinished() else ""
            code = self._drive(folder, ending, outcome)
            if ending and code == 0:
                self.drivers.append(ending)  # the run was over first
            elif code not in (0, -9):
                outcome.errors.append((self.out / f"{name}.log").read_text().strip()[-500:])
            if (folder / "ledger.sqlite").exists():  # else killed before it began
                outcome.audits.append(audit(folder)["balanced"])
            print(f"{name}: {ending or 'end'}, exit code {code}, step {committed(folder)}", file=sys.stderr)
        outcome.lost = self.steps * PROMPTS_PER_STEP - audit(folder)["trained"]
        outcome.twice = trained_twice(folder)
        outcome.bit_equal = equal_adapters(folder, reference, self.steps)
        self._read_log(folder)

    def _drive(self, folder: Path, ending: str, outcome: Outcome) -> int:
        """The life of one driver; kills actors, then itself where `ending` says so. Returns the exit code."""
        before = committed(folder)
        last = before + self.rng.randint(5, 60)
        driver = self._start(folder, f"{ending}:{last}" if ending in ("rename", "transaction") else "")
        over = lambda: driver.poll() is not None  # noqa: E731
        if early := ending == "driver" and self.rng.random() < 0.3:
            self._pause(over, 30.0)  # while it starts
        else:
            self._until(lambda: over() or committed(folder) > before, folder)
        family: list[psutil.Process] = []
        for _ in range(0 if early else ACTOR_KILLS):
            self._pause(over, 3.0)
            family = descendants(driver.pid) or family
            if over() or not self.actors or not self.unfinished():
                break
            self._kill_actor(driver.pid, folder.name)
        if ending == "driver":
            self._pause(over, 3.0)
            family = descendants(driver.pid) or family
            driver.kill()
        self._until(over, folder)
        if driver.returncode == -9:
            self.kills.append(Kill(ending, folder.name, time.time()))
        outcome.left_behind += len(psutil.wait_procs(family, timeout=GONE_S)[1])
        return driver.returncode

    def _kill_actor(self, driver: int, run: str) -> None:
        kind = self.actors.pop()
        victims = [found for process in descendants(driver) if (found := victim(process, kind))]
        if not victims:
            self.actors.insert(0, kind)  # it is just being started
            return
        process, name = self.rng.choice(victims)
        try:
            self.kills.append(Kill(kind, run, time.time(), name))
            process.kill()
        except psutil.NoSuchProcess:
            self.kills.pop()
            self.actors.insert(0, kind)

    def _start(self, folder: Path, chaos: str = "") -> subprocess.Popen:
        folder.parent.mkdir(parents=True, exist_ok=True)
        accredit = [sys.executable, "-m", "cluster.cli", "train", "configs/demo.yaml"]
        settings = [f"out={folder.parent}", f"name={folder.name}", f"steps={self.steps}", *SETTINGS]
        with open(f"{folder}.log", "a") as log:
            return subprocess.Popen(
                accredit + settings, env=os.environ | {"ACCREDIT_CHAOS": chaos}, stdout=log, stderr=log
            )

    def _until(self, condition: Callable[[], bool], folder: Path) -> None:
        """Wait; raise RuntimeError where no step is committed for too long: a run must never hang."""
        step, since = committed(folder), time.monotonic()
        while not condition():
            time.sleep(0.05)
            if (now := committed(folder)) != step:
                step, since = now, time.monotonic()
            elif time.monotonic() - since > LIMIT_S:
                raise RuntimeError(f"chaos: {folder}: no step after {step} within {LIMIT_S:g} s: the run hangs")

    def _pause(self, over: Callable[[], bool], at_most: float) -> None:
        until = time.monotonic() + self.rng.uniform(0.0, at_most)
        while time.monotonic() < until and not over():
            time.sleep(0.01)

    def _read_log(self, folder: Path) -> None:
        """When a kill was noticed, and when the victim's place was filled again: as the driver's log says."""
        lines = [
            (datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp(), line)
            for line in (folder / "driver.log").read_text().splitlines()
            if re.match(r"\d{4}-\d\d-\d\d ", line)
        ]
        kills = [kill for kill in self.kills if kill.run == folder.name]
        ends = [kill.at for kill in kills if kill.kind in DRIVERS] + [float("inf")]
        for kill in kills:
            end = min(at for at in ends if at >= kill.at)  # the driver's log says nothing after its death

            def after(texts: dict[str, str], kill: Kill = kill, end: float = end) -> float | None:
                text = texts.get(kill.kind, "\n").format(kill.victim)
                return next((at - kill.at for at, line in lines if kill.at - 0.001 <= at < end and text in line), None)

            kill.detected_s, kill.back_s = after(DETECTED), after(BACK)

    def by_kind(self) -> dict[str, dict[str, Any]]:
        found = {}
        for kind in (*ACTORS, *DRIVERS):
            kills = [kill for kill in self.kills if kill.kind == kind]
            runs = [self.outcomes[run] for run in {kill.run for kill in kills}]
            found[kind] = {
                "kills": len(kills),
                "runs": len(runs),
                "lost": sum(run.lost for run in runs),
                "trained_twice": sum(run.twice for run in runs),
                "audits": sum(len(run.audits) for run in runs),
                "audits_balanced": sum(sum(run.audits) for run in runs),
                "runs_bit_equal": sum(run.bit_equal for run in runs),
                "detected": sum(kill.detected_s is not None for kill in kills),
                "detected_max_s": max((kill.detected_s for kill in kills if kill.detected_s is not None), default=None),
                "back_in_service_max_s": max((kill.back_s for kill in kills if kill.back_s is not None), default=None),
            }
        return found


def committed(folder: Path) -> int:
    """The newest adapter on disk: written with each commit, and cheap to ask for."""
    return max((int(path.name[1:]) for path in folder.glob("adapters/v*")), default=-1)


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def victim(process: psutil.Process, kind: str) -> tuple[psutil.Process, str] | None:
    """The process and its name in the log, if it is of this kind."""
    try:
        if kind == "reward":
            return (process, "") if "actors.reward_child" in process.cmdline() else None
        name = process.environ().get("ACCREDIT_ACTOR", "")
    except psutil.Error:
        return None
    return (process, name) if name.startswith(f"{kind}-") else None


def trained_twice(folder: Path) -> int:
    """Groups that are in the trajectories of two steps: independent of the ledger."""
    groups: list[int] = []
    for path in (folder / "trajectories").glob("*.parquet"):
        groups += set(pq.read_table(path, columns=["group"])["group"].to_pylist())
    return len(groups) - len(set(groups))


def equal_adapters(one: Path, other: Path, steps: int) -> bool:
    """Whether every version has the same bits."""
    for version in range(steps + 1):
        name = f"adapters/v{version:06d}/adapter_model.safetensors"
        if not (one / name).exists():
            return False
        mine, theirs = load_file(one / name), load_file(other / name)
        if mine.keys() != theirs.keys() or not all(np.array_equal(mine[key], theirs[key]) for key in mine):
            return False
    return True


def _print(report: dict[str, Any]) -> None:
    table = Table(title=f"SIGKILLs in runs of {report['steps']} steps")
    names = "killed,kills,lost,trained twice,audits balanced,runs bit-equal,detected max s,back max s"
    for column in names.split(","):
        table.add_column(column, justify="left" if column == "killed" else "right")
    seconds = lambda value: "" if value is None else f"{value:.1f}"  # noqa: E731
    for kind, found in report["kinds"].items():
        name = {"rename": "driver, after the rename", "transaction": "driver, in the transaction"}.get(kind, kind)
        counts = (found["kills"], found["lost"], found["trained_twice"])
        balanced = f"{found['audits_balanced']} of {found['audits']}"
        equal = f"{found['runs_bit_equal']} of {found['runs']}"
        times = (seconds(found["detected_max_s"]), seconds(found["back_in_service_max_s"]))
        table.add_row(name, *map(str, counts), balanced, equal, *times)
    console, host, runs = Console(), report["machine"], report["runs"].values()
    console.print(table)
    console.print(
        f"processes left behind: {sum(run['left_behind'] for run in runs)}; "
        f"unexpected ends: {sum(len(run['errors']) for run in runs)}"
    )
    console.print(f"{host['cpu']}, {host['cores']} cores, torch {host['torch']}, {host['date']}")
