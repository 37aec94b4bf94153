"""Reward functions that go wrong, for test_reward.py: named by dotted path, run in the pool's children."""

import os
import re
import subprocess
import sys
import time
import warnings


def good(prompts, completions, **columns):
    return [float(len(text)) for text in completions]


def columns_back(prompts, completions, answer, **columns):
    """1 where the function gets lists of equal length with the group's own values."""
    rows = zip(prompts, completions, answer, columns["when"], strict=True)
    return [(prompt, answer, when) == (["q"], 7, "2020-01-02") for prompt, _, answer, when in rows]


def raises(prompts, completions, **columns):
    raise ValueError("no\nway")


def exits(prompts, completions, **columns):
    sys.exit(3)


def exits_hard(prompts, completions, **columns):
    os._exit(3)


def slow_on_request(prompts, completions, **columns):
    time.sleep(60 if "slow" in completions else 0)
    return [float(len(text)) for text in completions]


def holds_the_lock(prompts, completions, **columns):
    """A pattern of exponential time, which keeps the interpreter's lock."""
    re.match(r"(a+)+$", "a" * 60 + "b")


def starts_a_child_and_hangs(prompts, completions, **columns):
    child = subprocess.Popen(["sleep", "600"])
    with open(completions[0], "w") as file:
        file.write(str(child.pid))
    time.sleep(60)


def hangs_once(prompts, completions, **columns):
    if not os.path.exists(completions[0]):
        open(completions[0], "w").close()
        time.sleep(60)
    return [1.0 for _ in completions]


def too_short(prompts, completions, **columns):
    return [1.0]


def no_list(prompts, completions, **columns):
    return None


def no_numbers(prompts, completions, **columns):
    return [1, None, float("nan"), float("inf"), "1", True]


def prints(prompts, completions, **columns):
    print('{"rewards": [0.0]}')
    os.write(1, b'{"rewards": [0.0]}\n')
    subprocess.run(["echo", "garbage"], check=True)
    sys.stdin.read()
    return [1.0] * len(completions)


def takes_all_memory(prompts, completions, **columns):
    return [bytearray(64 << 30)]


def pid(prompts, completions, **columns):
    time.sleep(0.02)
    return [float(os.getpid())] * len(completions)


def moment(prompts, completions, **columns):
    return [time.monotonic()] * len(completions)


def surroundings(prompts, completions, **columns):
    """1 for each of: no secret in the environment, a home of its own, no heavy module."""
    import actors.rewards  # noqa: F401  the functions that ship must be as light

    heavy = {"torch", "numpy", "transformers", "ray", "pydantic"} & set(sys.modules)
    return ["SECRET_TOKEN" not in os.environ, "accredit-reward-" in os.environ["HOME"], not heavy]


kept = []


def keeps_memory(prompts, completions, **columns):
    kept.extend(b"x" * (300 << 20) for text in completions if text == "large")
    return [float(len(text)) for text in completions]


def sees(prompts, completions, **columns):
    return [float(name in os.environ) for name in completions]


class Warns:
    def __init__(self):
        warnings.warn("no network is withheld", stacklevel=2)

    def __call__(self, completions, **columns):
        return [1.0 for _ in completions]


not_a_function = 3
