"""Killable child processes that answer lines with lines: for work that may hang, crash or be killed.

Child.start(module, spec) ──▶ python -m module: reads spec, says {"ready": true} ──▶ ask(line) ──▶ its answer, a line
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPLY_BYTES = 64 << 20  # the longest answer that is read
START_TIMEOUT_S = 60.0  # to import what the child needs
EXIT_TIMEOUT_S = 5.0  # for a process to be gone after it was killed or closed its pipes


class Child:
    """One process, its own process group. Its environment is PATH, PYTHONPATH, LANG, HOME, TMPDIR and what `env`
    names."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.pid = process.pid
        self.hello: dict[str, Any] = {}  # what it said first; nothing when it ended at once

    @classmethod
    async def start(cls, module: str, spec: Any, home: str, env: Sequence[str] = ()) -> "Child":
        """`python -m module`, given `spec` as a line of JSON on stdin (never as an argument: those are public).

        `hello` is its first line, or {"error": ...} when none came within START_TIMEOUT_S. A child that ended at once
        raises nothing here: its `hello` is empty.
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", module),
            stdin=PIPE,
            stdout=PIPE,
            limit=REPLY_BYTES,
            start_new_session=True,  # a process group of its own: killed as a whole
            env={
                "PATH": os.environ.get("PATH", os.defpath),
                "PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder),
                "HOME": home,
                "TMPDIR": home,
                "LANG": os.environ.get("LANG", "C.UTF-8"),
                **{name: os.environ[name] for name in env},
            },
        )
        child = cls(process)
        try:
            child.hello = json.loads(await child.ask(json.dumps(spec).encode() + b"\n", START_TIMEOUT_S) or "{}")
        except TimeoutError:
            child.hello = {"error": f"its import took longer than {START_TIMEOUT_S:g} s"}
        except BaseException:
            await child.kill()
            raise
        return child

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def ask(self, line: bytes, timeout_s: float) -> bytes:
        """The child's answer to `line`, both ending in a newline; b"" from a child that died or broke its answer off.

        Raises TimeoutError after `timeout_s`; the child is then at work still: kill it.
        """
        assert self._process.stdin and self._process.stdout
        reply = b""
        async with asyncio.timeout(timeout_s):
            with contextlib.suppress(ConnectionError, ValueError):  # the pipe is closed; the reply is too long
                self._process.stdin.write(line)
                await self._process.stdin.drain()
                reply = await self._process.stdout.readline()
        return reply if reply.endswith(b"\n") else b""

    async def last_words(self) -> str:
        """How the child ended."""
        try:
            async with asyncio.timeout(EXIT_TIMEOUT_S):
                code = await self._process.wait()
        except TimeoutError:
            return "it broke off its reply"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    async def kill(self) -> None:
        """SIGKILL to the child's whole group, also when the child itself is gone already."""
        with contextlib.suppress(ProcessLookupError):  # nobody is left in the group
            os.killpg(self.pid, signal.SIGKILL)
        async with asyncio.timeout(EXIT_TIMEOUT_S):
            await self._process.wait()


class Effort:
    """The time that a process has had: on a processor, or asleep whenever `seconds` looks, which has to be often.

    Time in which it waits for a core is no fault of its own, and does not count.
    """

    def __init__(self, pid: int) -> None:
        self._stat = Path(f"/proc/{pid}/stat")
        self._asleep, self._looked = 0.0, time.monotonic()

    def seconds(self) -> float:
        try:
            state, *numbers = self._stat.read_text().rpartition(")")[2].split()
            on_processor = (int(numbers[10]) + int(numbers[11])) / os.sysconf("SC_CLK_TCK")  # user and system
        except (OSError, IndexError):  # not to be seen here: all of its time counts
            state, on_processor = "S", 0.0
        now = time.monotonic()
        if state != "R":
            self._asleep += now - self._looked
        self._looked = now
        return on_processor + self._asleep
