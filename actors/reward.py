"""Rewards in killable children: a reward function may raise, hang, exit or be killed, and costs its own samples only.

score(prompt, completions, columns) ──▶ a free child ──▶ [0.0, 1.0, ...] or ["raised: ValueError: ...", ...]
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import Sequence
from typing import Any

log = logging.getLogger("accredit.reward")

ATTEMPTS = (
    2  # children that one group may cost: what kills the child (memory, a crash) may have been the machine's doing
)
KINDS = ("raised", "timeout", "wrong length", "not a number", "died")
START_TIMEOUT_S = 60.0  # to import the reward's module
EXIT_TIMEOUT_S = 5.0  # for a process to be gone after it was killed or closed its pipes
REPLY_BYTES = 16 << 20  # the longest reply that is read


class RewardPool:
    """At most `workers` child processes that run the reward function `function` (a dotted path), first come first
    served.

    Each call has `timeout_s` seconds from the moment that a child takes it. A child that is late or dead is killed with
    all that it started, and replaced; the group of one that died is asked once more. Children have an empty home folder
    and of the environment only PATH, PYTHONPATH and LANG. Belongs to the event loop that it was started in.
    """

    def __init__(self, function: str, workers: int, timeout_s: float) -> None:
        self.counts: Counter[str] = Counter()  # failed samples, by the kind of failure (KINDS)
        self._function, self._workers, self._timeout_s = function, workers, timeout_s
        self._columns: list[str] | None = None
        self._free: asyncio.Queue[Process | None] = asyncio.Queue()  # None: this worker's child is yet to be started
        self._children: set[Process] = set()
        self._home = tempfile.TemporaryDirectory(prefix="accredit-reward-")
        self._closed = False

    async def start(self, columns: Sequence[str] | None = None) -> None:
        """Start every child. Raises ValueError if the function cannot be imported or does not take `columns`."""
        self._columns = None if columns is None else list(columns)
        try:
            for _ in range(self._workers):
                self._free.put_nowait(await self._spawn())
        except BaseException:
            await self.close()
            raise

    async def score(self, prompt: Any, completions: list[str], columns: dict[str, Any]) -> list[float | str]:
        """One group: for each completion its reward, or the reason why it has none; a failed reward raises nothing.

        Columns that JSON does not know (dates, ...) reach the reward as text. Raises RuntimeError once closed.
        """
        request = {"prompt": prompt, "completions": completions, "columns": columns}
        line = json.dumps(request, default=str).encode() + b"\n"
        child = await self._free.get()
        answered = False
        rewards: list[float | str] = []
        try:
            for _ in range(ATTEMPTS):
                if self._closed:
                    raise RuntimeError("reward pool: closed, got a group to score")
                if child is None or child.returncode is not None:  # killed, or dead since its last answer
                    child = await self._spawn()
                rewards = await self._ask(child, line, len(completions))
                answered = child.returncode is None and not self._closed
                if self._closed or not str(rewards[0]).startswith("died"):
                    break
                log.warning("reward: a child %s, its group goes to another", rewards[0])
                await self._kill(child)
        finally:  # a cancelled call, too, leaves a reply behind that is not for the next group
            if child and not answered:
                await self._kill(child)
            self._free.put_nowait(child if answered else None)
        for reward in rewards:
            if isinstance(reward, str):
                self.counts[next(kind for kind in KINDS if reward.startswith(kind))] += 1
        return rewards

    def pids(self) -> list[int]:
        """The children's process ids."""
        return [child.pid for child in self._children]

    async def close(self) -> None:
        """Kill every child and what it started. Groups that are being scored fail as `died`."""
        self._closed = True
        for child in list(self._children):
            await self._kill(child)
        self._home.cleanup()

    async def _ask(self, child: Process, line: bytes, n: int) -> list[float | str]:
        assert child.stdin and child.stdout
        try:
            async with asyncio.timeout(self._timeout_s):
                child.stdin.write(line)
                await child.stdin.drain()
                reply = await child.stdout.readline()
        except TimeoutError:
            await self._kill(child)
            return [f"timeout after {self._timeout_s:g} s"] * n
        except (ConnectionError, ValueError):  # the pipe is closed; the reply is too long
            reply = b""
        if not reply.endswith(b"\n"):
            return [f"died: {await self._last_words(child)}"] * n
        return _rewards(json.loads(reply), n)

    async def _last_words(self, child: Process) -> str:
        try:
            async with asyncio.timeout(EXIT_TIMEOUT_S):
                code = await child.wait()
        except TimeoutError:
            return "it broke off its reply"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    async def _spawn(self) -> Process:
        why = ""
        for _ in range(ATTEMPTS):
            child, reply = await self._begin()
            if "ready" in reply:
                return child
            why = reply.get("error") or f"the process ended at once: {await self._last_words(child)}"
            await self._kill(child)
            if "error" in reply or self._closed:
                break
        raise ValueError(
            f"reward.function: {self._function!r} cannot be used: {why}; expected the dotted path of "
            f"f(prompts, completions, **columns) that takes the task's columns"
        )

    async def _begin(self) -> tuple[Process, dict[str, Any]]:
        """A new child and what it says first: nothing when it ended at once."""
        arguments = ["-m", "actors.reward_child", self._function, json.dumps(self._columns)]
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            stdin=PIPE,
            stdout=PIPE,
            limit=REPLY_BYTES,
            start_new_session=True,  # a process group of its own: killed as a whole
            env={
                "PATH": os.environ.get("PATH", os.defpath),
                "PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder),
                "HOME": self._home.name,
                "LANG": os.environ.get("LANG", "C.UTF-8"),
            },
        )
        self._children.add(child)
        assert child.stdout
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                reply = json.loads(await child.stdout.readline() or "{}")
        except TimeoutError:
            reply = {"error": f"its import took longer than {START_TIMEOUT_S:g} s"}
        return child, reply

    async def _kill(self, child: Process) -> None:
        """SIGKILL to the child's whole group, also when the child itself is gone already."""
        self._children.discard(child)
        with contextlib.suppress(ProcessLookupError):  # nobody is left in the group
            os.killpg(child.pid, signal.SIGKILL)
        async with asyncio.timeout(EXIT_TIMEOUT_S):
            await child.wait()


def _rewards(reply: dict[str, Any], n: int) -> list[float | str]:
    if "raised" in reply:
        return [f"raised: {reply['raised']}"] * n
    values = reply["rewards"]
    if len(values) != n:
        return [f"wrong length: got {len(values)}, expected {n}"] * n
    return [value if isinstance(value, float) else f"not a number: {value}" for value in values]
