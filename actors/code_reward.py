"""`code`: run the program in a completion against the row's tests, in `actors/sandbox.py`.

Every program gets a process and a scratch folder of its own. A program that fails, does not end or wants too much is a
wrong program and gets 0; only what is the machine's doing (no time left, no process to be had) fails a sample.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from actors.children import Effort
from actors.rewards import text_of
from actors.sandbox import FILE_BYTES

SANDBOX = Path(__file__).with_name("sandbox.py")
FENCED = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
SCRATCH_BYTES, SCRATCH_FILES = 64 << 20, 1000  # a program with more is stopped
WATCH_S = 0.05  # between two looks at a program at work
LEAST_MEMORY_MB = 64
START_S = 30.0  # for the first, empty program


@dataclass(frozen=True, slots=True)
class Ended:
    """What a program left: its report, None without one; what it printed, None unless it came to its end; and what it
    took of its time."""

    report: dict[str, Any] | None
    output: str | None
    seconds: float


class CodeReward:
    """1 for a program that passes every test of the column `tests`, else 0; with `partial` the share that it passes.

    The program is the last ```python block of the completion, or its last ``` block, or the whole text. `tests` is
    Python source that runs after it (it has to raise to fail), or a list of such sources, or a list of
    {"input": text for stdin, "output": what has to be printed, but for white space at the ends of lines}. A program has
    `timeout_s` seconds for all of its tests, not counting those in which it waits for a core, and `memory_mb` MiB.
    `parallel` programs of a group run at a time.
    """

    def __init__(
        self, timeout_s: float = 2.0, memory_mb: int = 512, partial: bool = False, parallel: int | None = None
    ) -> None:
        """Tries the sandbox. Warns of what this kernel cannot withhold; RuntimeError when nothing runs at all."""
        if sys.platform != "linux":
            raise RuntimeError(f"programs are run on Linux only, this is {sys.platform}")
        if timeout_s <= 0 or memory_mb < LEAST_MEMORY_MB:
            raise ValueError(
                f"got timeout_s={timeout_s} and memory_mb={memory_mb}, expected more than 0 and {LEAST_MEMORY_MB}"
            )
        self.timeout_s, self.memory_mb, self.partial = timeout_s, memory_mb, partial
        self.parallel = parallel or os.cpu_count() or 1
        self._folder = tempfile.TemporaryDirectory(prefix="accredit-code-")  # of the scratch folders
        report = self._run("import fractions", ["assert fractions"], START_S, time.monotonic() + START_S).report
        if not report or report["passed"] != [True]:
            raise RuntimeError(f"the sandbox does not run a program here, it reported {report}")
        if report["missing"]:
            warnings.warn(f"code: programs run here without: {'; '.join(report['missing'])}", stacklevel=2)

    def __call__(
        self, prompts: list[Any], completions: list[Any], tests: list[Any], deadline: float, **columns: Any
    ) -> list[float | Exception]:
        with ThreadPoolExecutor(self.parallel) as threads:
            rows = zip(completions, tests, strict=True)
            futures = [threads.submit(self._score, text_of(text), test, deadline) for text, test in rows]
            return [future.exception() or future.result() for future in futures]  # pyright: ignore[reportReturnType]

    def _score(self, text: str, tests: Any, deadline: float) -> float:
        tests = [tests] if isinstance(tests, str) else tests
        if not tests:
            raise ValueError("the column tests has no test")
        if time.monotonic() + self.timeout_s > deadline:
            raise TimeoutError(f"reward.timeout_s leaves no {self.timeout_s:g} s for the program")
        code, left, passed = program(text), self.timeout_s, []
        if isinstance(tests[0], dict):
            for test in tests:
                ended = self._run(code, None, left, deadline, test["input"])
                passed.append(_same_output(ended.output, test["output"]))
                left -= ended.seconds
        else:
            report = self._run(code, tests, self.timeout_s, deadline).report
            passed = report["passed"] if report else [False]
        return sum(passed) / len(tests) if self.partial else float(all(passed) and len(passed) == len(tests))

    def _run(self, code: str, tests: list[str] | None, seconds: float, deadline: float, stdin: str = "") -> Ended:
        """One program in the sandbox, gone on return. Raises OSError when no process is to be had, TimeoutError when
        `deadline` comes before it had its `seconds`."""
        word = secrets.token_hex()
        request = {"code": code, "tests": tests, "word": word, "timeout_s": self.timeout_s}
        request |= {"memory_bytes": self.memory_mb << 20}
        scratch = Path(tempfile.mkdtemp(dir=self._folder.name))
        try:
            with _file(json.dumps(request)) as asked, _file(stdin) as given, _file() as printed, _file() as reported:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", SANDBOX, str(asked.fileno()), str(reported.fileno())],
                    cwd=scratch,
                    stdin=given,
                    stdout=printed,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(asked.fileno(), reported.fileno()),
                    env={"LANG": "C.UTF-8", "TMPDIR": ".", "PYTHONHASHSEED": "0"},
                )
                try:
                    took = _watch(process, scratch, seconds, deadline)
                finally:
                    process.kill()
                    process.wait()
                return Ended(_report(reported, word), _read(printed) if process.returncode == 0 else None, took)
        finally:
            shutil.rmtree(scratch)


def program(text: str) -> str:
    blocks = FENCED.findall(text)
    python = [code for language, code in blocks if language.lower() in ("python", "py", "python3")]
    return (python or [code for _, code in blocks] or [text])[-1]


def _watch(process: subprocess.Popen, scratch: Path, seconds: float, deadline: float) -> float:
    """Return, with its seconds, when the program has ended, has had its `seconds`, or fills the disk."""
    effort = Effort(process.pid)
    while True:
        took = effort.seconds()
        if took >= seconds:
            return took
        if time.monotonic() >= deadline:
            raise TimeoutError(f"the machine was too busy to give the program its {seconds:.1f} s")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(min(seconds - took, WATCH_S))
            return took
        sizes = []
        with contextlib.suppress(FileNotFoundError):  # it removes files as we look at them
            for entry in os.scandir(scratch):
                sizes.append(entry.stat(follow_symlinks=False).st_size)
        if sum(sizes) > SCRATCH_BYTES or len(sizes) > SCRATCH_FILES:
            return took


def _file(text: str = "") -> IO[bytes]:
    """A nameless file."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 the caller closes it
    file.write(text.encode(errors="surrogatepass"))
    file.seek(0)
    return file


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(FILE_BYTES).decode(errors="replace")


def _report(file: IO[bytes], word: str) -> dict[str, Any] | None:
    """The sandbox's report; what has not its word is the program's own writing."""
    try:
        report = json.loads(_read(file))
        return report if report["word"] == word else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _same_output(output: str | None, expected: str) -> bool:
    return output is not None and _lines(output) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
