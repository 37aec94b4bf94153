"""The inside of a killable child process (actors/children.py): one JSON line in, one out.

It talks over the pipes that it was started with as stdin and stdout; what the user's code prints goes to stderr. It
ends with its parent, and everything that it started ends with it.
"""

import ctypes
import json
import os
import queue
import resource
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

MEMORY_BYTES = 4 << 30  # user code that wants more fails with MemoryError, long before the machine does

Reply = dict[str, Any]


def serve(prepare: Callable[[Any], Callable[[Any], Reply]]) -> None:
    """Give the first line to `prepare`, and answer each further line with the function that it returned.

    The first answer is {"ready": true, "notes": [...]} with the UserWarnings of `prepare`, or {"error": ...} with its
    ValueError, and the process ends. Every answer has the `memory` of the process, in bytes.
    """
    _die_with_the_parent()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # prints cannot reach the replies
    with warnings.catch_warnings(record=True) as notes:
        try:
            answer = prepare(json.loads(requests.readline()))
        except ValueError as error:
            _send(replies, {"error": str(error)})
            return
    texts = [str(note.message) for note in notes if note.category is UserWarning]
    _send(replies, {"ready": True, "notes": texts, "memory": _memory()})
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(requests, lines), daemon=True).start()
    while True:
        _send(replies, {**answer(json.loads(lines.get())), "memory": _memory()})


def _memory() -> int:
    """Resident bytes; 0 where the platform does not say."""
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[1]) * resource.getpagesize() if path.exists() else 0


def _send(replies: BinaryIO, reply: Reply) -> None:
    replies.write(json.dumps(reply).encode() + b"\n")
    replies.flush()


def _receive(requests: BinaryIO, lines: "queue.SimpleQueue[bytes]") -> None:
    """Hand requests over. At their end the parent is gone, and so is everything that the user's code started."""
    for line in requests:
        lines.put(line)
    os.killpg(0, signal.SIGKILL)


def _die_with_the_parent() -> None:
    """The end of stdin is not seen while user code holds the interpreter's lock; the kernel's signal is."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
