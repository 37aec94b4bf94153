"""Programs in the sandbox. What they try is in benchmarks/attacks.py; here is what has to work, and a few by hand."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from actors.code_reward import CodeReward, program

SQUARE = "```python\ndef square(x):\n    return x * x\n```"


@pytest.fixture(scope="module")
def code() -> CodeReward:
    return CodeReward(timeout_s=5)


def judged(code: CodeReward, completion: str, tests: Any, seconds: float = 60) -> Any:
    [reward] = code(["?"], [completion], [tests], deadline=time.monotonic() + seconds)
    return reward


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1", "x = 1"),
        ("First:\n```\na\n```\nthen\n```python\nb\n```\nand\n```text\nc\n```", "b\n"),
        ("```\na\n```\n```\nb\n```", "b\n"),
        ("```py\nb\n```", "b\n"),
        ("```python\nb", "```python\nb"),
    ],
)
def test_the_program_is_the_last_python_block(text: str, expected: str):
    assert program(text) == expected


@pytest.mark.parametrize(
    ("tests", "reward"),
    [
        ("assert square(3) == 9", 1.0),
        (["assert square(3) == 9", "assert square(-2) == 4"], 1.0),
        (["assert square(3) == 9", "assert square(3) == 6"], 0.0),
        ("def check(f):\n    assert f(2) == 4\ncheck(square)", 1.0),
        ("assert cube(3) == 27", 0.0),
    ],
)
def test_tests_are_statements_that_run_after_the_program(code: CodeReward, tests: Any, reward: float):
    assert judged(code, SQUARE, tests) == reward


def test_tests_may_be_what_is_read_and_printed(code: CodeReward):
    program = "import sys\nfor line in sys.stdin:\n    print(int(line) * 2, end=' \\n')"
    good, bad = {"input": "3\n4\n", "output": "6\n8"}, {"input": "3\n", "output": "7\n"}
    assert judged(code, program, [good]) == 1.0
    assert judged(code, program, [good, bad]) == 0.0
    assert judged(code, program + "\nraise ValueError", [good]) == 0.0


def test_partial_credit_is_the_share_of_tests_that_pass():
    code = CodeReward(timeout_s=5, partial=True)
    assert judged(code, SQUARE, ["assert square(3) == 9", "assert square(3) == 6"]) == 0.5
    assert judged(code, "def square(x): return 1 / 0", ["square(3)"] * 2) == 0.0


@pytest.mark.parametrize(
    "body",
    [
        "import collections, dataclasses, decimal, heapq, itertools, json, math, random, re, statistics, typing",
        "import asyncio; asyncio.run(asyncio.sleep(0))",
        "import threading; t = threading.Thread(target=print); t.start(); t.join()",
        "import sys; sys.setrecursionlimit(5000)\ndef f(n): return n and f(n - 1)\nf(3000)",
        "open('notes', 'w').write('a'); assert open('notes').read() == 'a'",
        "import tempfile\nwith tempfile.TemporaryFile() as f: f.write(b'a')",
        "import os; assert os.listdir('.') == []",
        "if __name__ == '__main__': raise ValueError",
        "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int",
    ],
)
def test_an_ordinary_program_works(code: CodeReward, body: str):
    assert judged(code, body, "pass") == 1.0


@pytest.mark.parametrize(
    "body",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import os; os._exit(0)",
        "raise ValueError",
        "x = bytearray(1 << 30)",
        "while True: print('x' * 100_000)",
        "i = 0\nwhile True:\n    open(str(i), 'wb').write(bytes(1 << 22)); i += 1",
        "(" * 10_000,
        "\0",
        "\ud800",
    ],
)
def test_a_program_that_does_not_come_to_its_end_is_wrong(body: str):
    assert judged(CodeReward(timeout_s=1), body, "pass") == 0.0


def test_a_program_that_exits_has_passed_only_what_passes(code: CodeReward):
    assert judged(code, "import sys\ndef f(): return 1\nsys.exit(0)", "assert f() == 1") == 1.0
    assert judged(code, "import sys\ndef f(): sys.exit(0)", "assert f() == 1") == 0.0


def test_a_report_of_the_programs_own_is_none(code: CodeReward):
    forged = json.dumps({"missing": [], "passed": [True], "word": ""})
    body = f"import os\nfor fd in range(3, 20):\n    try: os.write(fd, {forged.encode()!r})\n    except OSError: pass\n"
    assert judged(code, body + "os._exit(0)", "pass") == 0.0


def test_a_program_for_which_no_time_is_left_is_not_judged(code: CodeReward):
    rewards = code(["?"], [SQUARE], ["pass"], deadline=time.monotonic() + 1)
    assert [str(reward) for reward in rewards] == ["reward.timeout_s leaves no 5 s for the program"]


def test_a_row_without_tests_fails_its_samples(code: CodeReward):
    [reward] = code(["?"], [SQUARE], [[]], deadline=time.monotonic() + 60)
    assert isinstance(reward, ValueError)


SYSTEM_PYTHON = Path("/usr/bin/python3")


@pytest.mark.skipif(os.getuid() != 0 or not SYSTEM_PYTHON.exists(), reason="needs root, to become somebody else")
def test_the_sandbox_holds_for_an_ordinary_user_too(tmp_path_factory: pytest.TempPathFactory):
    """As nobody, with the system's interpreter: the tests' own may lie in a folder of root's."""
    script = """
import sys, time, warnings
sys.path[:0] = [sys.argv[1]]
from actors.code_reward import CodeReward
with warnings.catch_warnings(record=True) as notes:
    warnings.simplefilter("always")
    code = CodeReward(timeout_s=5)
if notes:
    sys.exit(f"skip: {notes[0].message}")
attacks = ["import os; os.fork()", "import socket; socket.socket()", "open('/etc/passwd')", "open('/tmp/x', 'w')",
           "import os; os.kill(os.getppid(), 0)", "import os; os.chmod('/tmp', 0o777)"]
bodies = ["pass", *attacks]
print(code(["?"] * 7, bodies, ["pass"] * 7, deadline=time.monotonic() + 60))
"""
    ended = subprocess.run(
        [SYSTEM_PYTHON, "-B", "-c", script, str(Path(__file__).parents[2])],
        user=65534,
        group=65534,
        extra_groups=[],
        cwd="/",
        env={},
        capture_output=True,
        text=True,
        timeout=120,
    )
    if ended.stderr.startswith("skip: "):
        pytest.skip(ended.stderr)
    assert ended.stdout.strip() == str([1.0, *[0.0] * 6]), ended.stderr


def test_nothing_of_the_sandbox_needs_more_than_the_standard_library():
    script = "import sys; import actors.sandbox; print(sorted({'numpy', 'torch', 'pydantic'} & set(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ended.stdout.strip() == "[]"
