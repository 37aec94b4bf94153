"""`accredit bench rewards`: completions that try to hang, crash, fill, deceive or leave the rewards that judge them.

Groups of eight hostile completions and an honest one go through pools of `text` rewards (exact, gsm8k, format), `math`
and `code`. What has to hold: every group is answered in time, no hostile completion is right, every honest one is, the
children's memory stays flat, and afterwards no process, file or connection is left of them.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import track
from rich.table import Table

from actors.reward import RewardPool
from benchmarks.attacks import ANSWER, hostile
from benchmarks.machine import describe
from configs.schema import RewardConfig, RewardPart

GROUP = 8  # hostile completions of a group
TIMEOUT_S = 20.0  # of a group
KILL_S = 5.0  # to kill a child that is late, and what it started
PROGRAM_S = 0.5  # of a program, of a comparison
PR_SET_CHILD_SUBREAPER = 36

REWARDS = {
    "text": RewardConfig(
        parts=[
            RewardPart(function="exact"),
            RewardPart(function="gsm8k"),
            RewardPart(function="format", weight=0.1),
        ],
        timeout_s=TIMEOUT_S,
    ),
    "math": RewardConfig(function="math", options={"timeout_s": PROGRAM_S}, timeout_s=TIMEOUT_S),
    "code": RewardConfig(function="code", options={"timeout_s": PROGRAM_S, "parallel": 2}, timeout_s=TIMEOUT_S),
}
SHARES = {"text": 0.4, "math": 0.25, "code": 0.35}
COLUMNS = {
    "text": {"answer": ANSWER},
    "math": {"answer": ANSWER},
    "code": {"tests": [f"assert solve(3) == {ANSWER}", "assert solve(4) == 8"]},
}
HONEST = {
    "text": f"<think>3 + 4</think> #### {ANSWER}",
    "math": r"So it is \boxed{\sqrt{49}}",
    "code": "```python\ndef solve(x):\n    return x + 4 if x == 3 else 2 * x\n```",
}


@dataclass
class Found:
    """What the benchmark saw of one family of rewards."""

    groups: int = 0
    completions: int = 0
    late: int = 0  # groups
    slowest_s: float = 0.0
    hostile_right: Counter[str] = field(default_factory=Counter)  # by kind
    honest_wrong: int = 0
    zero: int = 0  # hostile completions with a reward below 1
    failed: Counter[str] = field(default_factory=Counter)  # by reason
    children: int = 0  # that the pool started
    memory_mb: list[float] = field(default_factory=list)  # largest child: after the first group, at most, at the end
    seconds: float = 0.0


async def judge(family: str, count: int, names: dict[str, str], progress: bool) -> Found:
    """Send `count` hostile completions of one family through its pool."""
    found, pids, began = Found(), set[int](), time.monotonic()
    everything = list(hostile(family, count, names))
    groups = [everything[i : i + GROUP] for i in range(0, len(everything), GROUP)]
    pool = RewardPool(REWARDS[family])
    await pool.start(list(COLUMNS[family]))
    try:
        for group in track(groups, family, disable=not progress, console=Console(stderr=True)):
            start = time.monotonic()
            rewards = await pool.score("?", [text for _, text in group] + [HONEST[family]], COLUMNS[family])
            took = time.monotonic() - start
            found.groups, found.completions = found.groups + 1, found.completions + len(group)
            found.late += took > TIMEOUT_S + KILL_S
            found.slowest_s = max(found.slowest_s, took)
            _count(found, [kind for kind, _ in group], rewards)
            pids |= set(pool.pids())
            memory = max((_resident_mb(pid) for pid in pool.pids()), default=0.0)
            first, most, _ = found.memory_mb or (memory, memory, memory)
            found.memory_mb = [first, max(most, memory), memory]
    finally:
        await pool.close()
    found.children, found.seconds = len(pids), time.monotonic() - began
    return found


def _count(found: Found, kinds: list[str], rewards: list[float | str]) -> None:
    *hostile_ones, honest = rewards
    found.honest_wrong += isinstance(honest, str) or honest < 1
    for kind, reward in zip(kinds, hostile_ones, strict=True):
        if isinstance(reward, str):
            found.failed[reward.partition(":")[0]] += 1
        elif reward >= 1:
            found.hostile_right[kind] += 1
        else:
            found.zero += 1


def _resident_mb(pid: int) -> float:
    try:
        return psutil.Process(pid).memory_info().rss / 2**20
    except psutil.NoSuchProcess:
        return 0.0


@contextlib.contextmanager
def _reaper() -> Iterator[None]:
    """Orphans of our children become ours, where they can be counted."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0)


def measure(completions: int, progress: bool = False) -> dict[str, Any]:
    """Run it all. Linux only: elsewhere nobody counts the orphans."""
    word = f"hostile-{secrets.token_hex(8)}"
    os.environ["ACCREDIT_BENCH_WORD"] = word
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with socket.create_server(("127.0.0.1", 0)) as listener, _reaper():
        listener.setblocking(False)
        port = listener.getsockname()[1]
        names = {"WORD": word, "PORT": str(port), "PARENT": str(os.getpid()), "CWD": str(Path.cwd())}
        families = {
            family: asyncio.run(judge(family, round(share * completions), names, progress))
            for family, share in SHARES.items()
        }
        connections = 0
        with contextlib.suppress(BlockingIOError):
            listener.accept()
            connections = 1
        left = _left_running(before)
    del os.environ["ACCREDIT_BENCH_WORD"]
    places = {Path("/tmp"), Path("/dev/shm"), Path.cwd(), Path(tempfile.gettempdir()), Path.home()}
    files = [str(path) for place in places for path in place.glob(f"{word}*")]
    return {
        "families": {family: vars(found) for family, found in families.items()},
        "left_running": left,
        "files_outside": files,
        "connections": connections,
        "problems": _problems(families, left, files, connections),
    }


def _left_running(before: set[int]) -> list[str]:
    """Names of the processes that are still there; zombies that fell to us are reaped."""
    left = []
    for child in psutil.Process().children(recursive=True):
        if child.pid in before:
            continue
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:
                left.append(" ".join(child.cmdline())[:100])
                child.send_signal(signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child.pid, 0)
    return left


def _problems(families: dict[str, Found], left: list[str], files: list[str], connections: int) -> list[str]:
    problems = [f"processes left running: {left}"] if left else []
    problems += [f"files outside the scratch folders: {files}"] if files else []
    problems += ["a program reached the network"] if connections else []
    for family, found in families.items():
        problems += [f"{family}: {found.late} groups were late"] if found.late else []
        problems += [f"{family}: hostile completions were right: {found.hostile_right}"] if found.hostile_right else []
        problems += [f"{family}: {found.honest_wrong} honest completions were not"] if found.honest_wrong else []
    return problems


def main(completions: int, as_json: bool) -> None:
    """Exits with 1, after the figures, when something did not hold."""
    result = measure(completions, progress=not as_json) | {"machine": describe()}
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        table = Table(title=f"{completions} hostile completions, and an honest one in every group of {GROUP + 1}")
        rows = {"": list(result["families"])}
        for name in ("completions", "groups", "late", "honest_wrong", "zero", "children"):
            rows[name] = [str(found[name]) for found in result["families"].values()]
        rows["hostile_right"] = [str(sum(f["hostile_right"].values())) for f in result["families"].values()]
        rows["failed"] = [str(dict(f["failed"])) for f in result["families"].values()]
        rows["slowest_s"] = [f"{f['slowest_s']:.1f}" for f in result["families"].values()]
        rows["memory_mb first, most, last"] = [
            ", ".join(f"{mb:.0f}" for mb in f["memory_mb"]) for f in result["families"].values()
        ]
        rows["seconds"] = [f"{f['seconds']:.0f}" for f in result["families"].values()]
        for heading in ("", *rows.pop("")):
            table.add_column(heading)
        for name, cells in rows.items():
            table.add_row(name, *cells)
        Console().print(table)
    for problem in result["problems"]:
        print(f"accredit: bench rewards: {problem}", file=sys.stderr)
    if result["problems"]:
        sys.exit(1)
