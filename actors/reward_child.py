"""The process that runs a reward function for `actors.reward`: `python -m actors.reward_child FUNCTION [COLUMNS]`.

One JSON line in, one out, over the pipes that it was started with as stdin and stdout. The reward's own prints go to
stderr. It imports the reward's module and nothing heavy.
"""

import ctypes
import importlib
import inspect
import json
import math
import os
import queue
import resource
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, BinaryIO

MEMORY_BYTES = 4 << 30  # a reward that wants more fails with MemoryError, long before the machine does
TEXT = 300  # characters of an exception that are reported


def main(path: str, columns: list[str] | None) -> None:
    _die_with_the_parent()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what the reward prints cannot reach the replies
    try:
        function = _load(path, columns)
    except (Exception, SystemExit) as error:
        _send(replies, {"error": _describe(error)})
        return
    _send(replies, {"ready": True})
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(requests, lines), daemon=True).start()
    while True:
        _send(replies, _answer(function, json.loads(lines.get())))


def _answer(function: Callable[..., Any], request: dict[str, Any]) -> dict[str, Any]:
    completions = request["completions"]
    n = len(completions)
    columns = {name: [value] * n for name, value in request["columns"].items()}
    try:
        result = function(prompts=[request["prompt"]] * n, completions=completions, **columns)
        return {"rewards": [_number(value) for value in result]}
    except (Exception, SystemExit) as error:  # a reward's exit is its failure, not ours
        return {"raised": _describe(error)}


def _number(value: Any) -> float | str:
    """A finite float, or what it is instead. numpy and torch scalars have __float__; text is no number."""
    if not isinstance(value, (str, bytes)) and hasattr(value, "__float__"):
        number = float(value)
        return number if math.isfinite(number) else str(number)
    return repr(value)[:TEXT]


def _load(path: str, columns: list[str] | None) -> Callable[..., Any]:
    module, _, name = path.rpartition(".")
    if not module:
        raise ImportError("expected package.module.function")
    function = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise TypeError(f"it is a {type(function).__name__}, not a function")
    if columns is not None:
        inspect.signature(function).bind(prompts=None, completions=None, **dict.fromkeys(columns))
    return function


def _describe(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:TEXT]


def _send(replies: BinaryIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply).encode() + b"\n")
    replies.flush()


def _receive(requests: BinaryIO, lines: "queue.SimpleQueue[bytes]") -> None:
    """Hand requests over. At their end the parent is gone, and so is everything that the reward started."""
    for line in requests:
        lines.put(line)
    os.killpg(0, signal.SIGKILL)


def _die_with_the_parent() -> None:
    """The end of stdin is not seen while a reward holds the interpreter's lock; the kernel's signal is."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
