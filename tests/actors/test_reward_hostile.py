"""A few hundred hostile completions of every kind; `accredit bench rewards` sends ten thousand."""

import sys
import warnings

import pytest

from actors.code_reward import CodeReward
from benchmarks.attacks import ATTACKS, MATH, PROGRAMS, TEXT
from benchmarks.hostile import SHARES, measure

COMPLETIONS = 280


def test_hostile_completions_of_every_kind_are_answered_and_leave_nothing_behind():
    kinds = {"text": len(TEXT), "math": len(MATH), "code": len(ATTACKS) + len(PROGRAMS)}
    assert all(round(SHARES[family] * COMPLETIONS) >= n for family, n in kinds.items())
    if sys.platform != "linux":
        pytest.skip("nobody counts the orphans here")
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        code = CodeReward()
    if notes:
        pytest.skip(str(notes[0].message))
    del code
    result = measure(COMPLETIONS)
    assert result["problems"] == []
    judged = result["families"].values()
    assert sum(found["completions"] for found in judged) == COMPLETIONS
    assert result["families"]["code"]["zero"] > 0  # wrong programs are wrong, they do not fail
    assert all(found["memory_mb"][1] < 512 for found in judged)
