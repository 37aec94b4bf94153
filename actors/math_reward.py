"""`math`: does the final answer equal the reference, as mathematics? math-verify, in processes that can be killed.

Sympy may work for ever on 9**9**9, and keeps what it has seen. So a comparison that neither text nor exact numbers
decide happens in a fork with limits on time and memory; the process that forks stays as small as it began.
"""

import logging
import os
import resource
import selectors
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from math_verify import parse, verify

from actors.children import Effort
from actors.rewards import last_number, marked, number, text_of

ANSWER_LENGTH = 1000  # characters: a longer answer is wrong, and of a text without a marked answer the end is looked at
SIDE_BY_SIDE = 4  # forks at a time
WATCH_S = 0.05  # between two looks at them
FORK_BYTES = 1 << 30  # beyond what the process has when it is forked
WARM = (r"\frac{1}{2}", r"x^2+2x+1", r"(1,2]", r"\{1,\sqrt{2}\}", r"\begin{pmatrix}1\\2\end{pmatrix}", "x=3", "y>3")


class MathReward:
    """1 where the final answer of the completion equals the column `answer` as mathematics, else 0.

    The final answer is what follows the last `####`, or the contents of the last `\\boxed{}`; of a text without either,
    its last number, or what math-verify finds in its LaTeX. A comparison that takes longer than `timeout_s` seconds
    (not counting those in which it waits for a core), or more than FORK_BYTES, fails its sample.
    """

    def __init__(self, timeout_s: float = 2.0) -> None:
        self.timeout_s = timeout_s
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that we bring our own deadline
        for answer in WARM:  # the parser builds its tables as it goes, which forks would do again each time
            _equal(answer, answer)

    def __call__(
        self, prompts: list[Any], completions: list[Any], answer: list[Any], deadline: float, **columns: Any
    ) -> list[float | Exception]:
        pairs = [(text_of(completion), str(column)) for completion, column in zip(completions, answer, strict=True)]
        plain = [_plainly_equal(*pair) for pair in pairs]
        hard = {pair for pair, verdict in zip(pairs, plain, strict=True) if verdict is None}  # siblings often agree
        found = _in_forks(sorted(hard), self.timeout_s, deadline)
        return [found[pair] if verdict is None else float(verdict) for pair, verdict in zip(pairs, plain, strict=True)]


def _plainly_equal(text: str, column: str) -> bool | None:
    """Whether text and numbers alone decide it; None if they do not."""
    wanted = _bare(marked(column) or column)
    given = marked(text)
    if given is None:
        end = text[-ANSWER_LENGTH:]
        if "$" in end or "\\" in end:
            return None
        value = number(wanted)
        return None if value is None else last_number(end) == value
    if len(given) > ANSWER_LENGTH:
        return False
    a, b = number(_bare(given)), number(wanted)
    if a is not None and b is not None:
        return a == b
    return True if _bare(given) == wanted else None


def _bare(answer: str) -> str:
    return answer.strip().strip("$").removesuffix(".").strip()


def _equal(text: str, column: str) -> bool:
    wanted = parse(f"${_bare(marked(column) or column)}$", parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    given = marked(text)
    source = text[-ANSWER_LENGTH:] if given is None else f"${_bare(given)}$"
    found = parse(source, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    return verify(wanted, found, timeout_seconds=None)


# ---- forks ----


@dataclass(frozen=True, slots=True)
class Fork:
    pid: int
    pair: tuple[str, str]
    effort: Effort


def _in_forks(
    pairs: list[tuple[str, str]], timeout_s: float, deadline: float
) -> dict[tuple[str, str], float | Exception]:
    """Each pair's verdict, or why it has none. Every fork is gone on return."""
    late = TimeoutError(f"the comparison took longer than {timeout_s:g} s")
    found: dict[tuple[str, str], float | Exception] = {}
    waiting = list(reversed(pairs))
    with selectors.DefaultSelector() as running:
        while waiting or running.get_map():
            while waiting and len(running.get_map()) < SIDE_BY_SIDE:
                pair = waiting.pop()
                reader, pid = _fork(lambda pair=pair: _equal(*pair))
                running.register(reader, selectors.EVENT_READ, Fork(pid, pair, Effort(pid)))
            ready = {key.fd for key, _ in running.select(WATCH_S)}
            now = time.monotonic()
            for key in list(running.get_map().values()):
                if key.fd in ready:
                    found[key.data.pair] = _verdict(os.read(key.fd, 1000))
                elif now >= deadline or key.data.effort.seconds() >= timeout_s:
                    found[key.data.pair] = late
                else:
                    continue
                running.unregister(key.fd)
                os.close(key.fd)
                os.kill(key.data.pid, signal.SIGKILL)
                os.waitpid(key.data.pid, 0)
            if now >= deadline:
                found |= dict.fromkeys(waiting, TimeoutError("no time was left to compare"))
                waiting = []
    return found


def _fork(work: Callable[[], bool]) -> tuple[int, int]:
    """Start `work` in a fork: the end of a pipe to read its verdict from, and the fork's process id."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return reader, pid
    verdict = b"the process ended"
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
        limit = pages * resource.getpagesize() + FORK_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        verdict = b"1" if work() else b"0"
    except BaseException as error:
        verdict = type(error).__name__.encode()
    finally:
        os.write(writer, verdict)
        os._exit(0)  # none of the parent's clean-up is ours


def _verdict(said: bytes) -> float | Exception:
    if said in (b"0", b"1"):
        return float(said)
    return RuntimeError(f"the comparison ended with {said.decode() or 'a crash'}")
