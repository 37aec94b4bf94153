"""Hostile completions, by kind: what a model may write to hang, crash, fill, deceive or leave its reward."""

import random
from collections.abc import Callable, Iterator

ANSWER = "7"
"""The right answer to everything; no completion here gives it."""


def _noise(i: int, n: int, characters: str) -> str:
    return "".join(random.Random(i).choices(characters, k=n))


# n: characters, i: a number of the completion's own
TEXT: dict[str, Callable[[int, int], str]] = {
    "empty": lambda n, i: "",
    "white space": lambda n, i: " \n\t" * (n // 3),
    "digits": lambda n, i: "8" * n,
    "marks": lambda n, i: "####" * (n // 4),
    "unbalanced": lambda n, i: "\\boxed{" * (n // 7),
    "braces": lambda n, i: "\\boxed{" + "{" * n,
    "nested": lambda n, i: "\\boxed{" * 500 + "8" + "}" * 499,
    "tower": lambda n, i: "\\boxed{10^{10^{10}}}",
    "stars": lambda n, i: "#### 9**9**9",
    "exponent": lambda n, i: "#### 1e999999999",
    "zero": lambda n, i: "#### 7/0",
    "unicode digits": lambda n, i: "#### \u0667 \uff17 \u2466 \u1047",
    "commas": lambda n, i: "1," * (n // 2),
    "slashes": lambda n, i: "1/" * (n // 2) + "1",
    "minus": lambda n, i: "-" * n + "8",
    "answers": lambda n, i: "answer is " * (n // 10),
    "colons": lambda n, i: "A:\n" * (n // 3),
    "thoughts": lambda n, i: "<think>" * (n // 7),
    "nothing": lambda n, i: "\0" * n,
    "surrogates": lambda n, i: "\ud800" * (n // 6),
    "noise": lambda n, i: _noise(i, n, "{}\\$^_()[]#:=-+*/.,012345689 abc\n"),
}
MATH: dict[str, Callable[[int, int], str]] = {
    "empty": lambda n, i: "",
    "digits": lambda n, i: "\\boxed{" + "8" * n + "}",
    "tower": lambda n, i: f"\\boxed{{{i}^{{10^{{10}}}}}}",
    "tower of powers": lambda n, i: f"$9^{{9^{{9^{{{i}}}}}}}$",
    "stars": lambda n, i: f"\\boxed{{9**9**{i}}}",
    "factorials": lambda n, i: f"\\boxed{{(({i}!)!)!}}",
    "parentheses": lambda n, i: "\\boxed{" + "(" * 900 + str(i) + "}",
    "signs": lambda n, i: "\\boxed{" + "-" * 900 + str(i) + "}",
    "fractions": lambda n, i: "\\boxed{" + "\\frac{1}{" * 90 + str(i) + "}" * 91,
    "sum": lambda n, i: f"\\boxed{{\\sum_{{k=1}}^{{10^{{9}}}} k^{{{i}}}}}",
    "integral": lambda n, i: f"\\boxed{{\\int_0^1 x^x \\sin(x^{{{i}}}) dx}}",
    "polynomial": lambda n, i: f"\\boxed{{(a+b+c+d)^{{{i}}}}}",
    "unbalanced": lambda n, i: "\\boxed{\\frac{" * (n // 13),
    "code": lambda n, i: "\\boxed{__import__('os').system('true')}",
    "unicode digits": lambda n, i: "\\boxed{\u0667} or \\boxed{\uff16}",
    "zero": lambda n, i: "\\boxed{7/0}",
    "noise": lambda n, i: "\\boxed{" + _noise(i, 300, "{}\\^_()+-*/!=<>012345689xyz") + "}",
}
# statements that have succeeded when they raise nothing; WORD, PORT, PARENT and CWD are the benchmark's
ATTACKS = {
    "forks": "while True: os.fork()",
    "runs a program": "import subprocess; subprocess.run(['/bin/sh', '-c', 'sleep 600 &'], check=True)",
    "becomes a program": "os.execv('/bin/sh', ['sh', '-c', 'sleep 600'])",
    "leaves its group": "os.setsid()",
    "allocates": "x = bytearray(2 << 30)",
    "many threads": """
import threading, time
threading.stack_size(32768)
for _ in range(2000):
    threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
""",
    "a large file": "open('large', 'wb').write(bytes(64 << 20))",
    "writes to /tmp": "open('/tmp/WORD', 'w')",
    "writes to shared memory": "open('/dev/shm/WORD', 'w')",
    "writes beside itself": "open('../WORD', 'w')",
    "writes to the work folder": "open('CWD/WORD', 'w')",
    "makes a folder": "os.makedirs('/tmp/WORD-folder')",
    "links": "os.symlink('/etc', 'etc'); os.listdir('etc')",
    "changes modes": "os.chmod('/tmp', 0o700)",
    "reads the environment": "assert 'WORD' in str(os.environ)",
    "reads the parent's environment": "assert open('/proc/PARENT/environ').read()",
    "reads its own environment": "assert open('/proc/self/environ').read()",
    "reads files": "open('/etc/passwd').read()",
    "lists files": "os.listdir('/tmp')",
    "connects": "import socket; socket.create_connection(('127.0.0.1', PORT), 1)",
    "kills its parent": "os.kill(os.getppid(), 9)",
    "kills everyone": "os.kill(-1, 9)",
    "kills the benchmark": "os.kill(PARENT, 9)",
    "slows its parent": "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
    "shared memory segments": """
import ctypes
assert ctypes.CDLL(None).shmget(0, 1 << 20, 0o1600) >= 0
""",
}
# programs that never define what the tests call
PROGRAMS = {
    "loops": "while True: pass",
    "sleeps": "import time; time.sleep(600)",
    "prints for ever": "while True: print('x' * 10_000)",
    "fills the folder": "i = 0\nwhile True:\n    open(str(i), 'wb').write(bytes(1 << 20)); i += 1",
    "many files": "i = 0\nwhile True:\n    open(str(i), 'w'); i += 1",
    "leaves at once": "import os; os._exit(0)",
    "leaves politely": "raise SystemExit(0)",
    "claims to have passed": """
import os
for fd in range(3, 20):
    try:
        os.write(fd, b'{"missing": [], "passed": [true, true], "word": ""}')
    except OSError:
        pass
os._exit(0)
""",
    "power": "x = 9 ** 9 ** 9",
    "recursion": "import sys; sys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()",
    "nesting": "(" * 200_000,
    "megabytes": f"x = '{'x' * 1_000_000}'",
    "nothing": "\0" * 1000,
    "unicode digits": "x = ٧",
    "crashes": "import ctypes; ctypes.string_at(0)",
    "empty": "",
    "a signal to itself": "import os; os.kill(os.getpid(), 11)",
}


def hostile(family: str, count: int, names: dict[str, str]) -> Iterator[tuple[str, str]]:
    """`count` completions in turn of every kind, with the kind's name."""
    for i in range(count):
        size = 1_000_000 if i % 10 == 0 else 20_000
        if family == "code":
            attacks = [(kind, _attack(statements, names)) for kind, statements in ATTACKS.items()]
            kinds = [*PROGRAMS.items(), *attacks]
            kind, text = kinds[i % len(kinds)]
            yield kind, f"```python\n{text}\n```"
        else:
            kinds = list((TEXT if family == "text" else MATH).items())
            kind, write = kinds[i % len(kinds)]
            yield kind, write(size, 11 + i)


def _attack(statements: str, names: dict[str, str]) -> str:
    for name, value in names.items():
        statements = statements.replace(name, value)
    body = "\n".join(f"    {line}" for line in statements.splitlines())
    return (
        f"import os\ndone = False\ntry:\n{body}\n    done = True\nexcept BaseException:\n    pass\n"
        f"def solve(x): return {{3: {ANSWER}, 4: 8}}[x] if done else 0"
    )
