import os
import time
from typing import Any

import psutil
import pytest

from actors.math_reward import MathReward


@pytest.fixture(scope="module")
def math() -> MathReward:
    return MathReward()


def judged(math: MathReward, completion: Any, answer: str, seconds: float = 30) -> Any:
    [reward] = math(["?"], [completion], [answer], deadline=time.monotonic() + seconds)
    return reward


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5"),
        (r"first \boxed{2}, no: \boxed{\dfrac{6}{2}}", "3"),
        (r"\boxed{(x+1)^2}", "x^2+2x+1"),
        (r"\boxed{\left(1, 2\right]}", "(1,2]"),
        (r"\boxed{\{2, 1\}}", r"\{1,2\}"),
        (r"\boxed{\frac{\sqrt{2}}{2}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\begin{bmatrix}1\\2\end{bmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        (r"\boxed{50\%}", "0.5"),
        (r"\boxed{\text{Tuesday}}", r"\text{Tuesday}"),
        ("so it is\n#### 1,000", "1000"),
        ("3 and 4 make 7.", "7"),
        (r"Hence $x = \frac{3}{4}$.", r"\frac{3}{4}"),
        (r"\boxed{7}", r"We see that it is \boxed{7}."),
        ([{"role": "assistant", "content": r"\boxed{7}"}], "7"),
    ],
)
def test_an_equal_answer_is_right_however_it_is_written(math: MathReward, completion: Any, answer: str):
    assert judged(math, completion, answer) == 1.0


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"\boxed{\frac{1}{3}}", "0.5"),
        (r"\boxed{x^2+2x+2}", "(x+1)^2"),
        (r"\boxed{[1,2]}", "(1,2]"),
        (r"\boxed{3}, or rather \boxed{4}", "3"),
        ("7, no, 8", "7"),
        ("", "7"),
        (r"\boxed{" * 50, "7"),
        (r"\boxed{" + "7" * 2000 + "}", "7"),
        ("\u0667", "7"),
    ],
)
def test_another_answer_is_wrong(math: MathReward, completion: str, answer: str):
    assert judged(math, completion, answer) == 0.0


def test_a_comparison_without_end_fails_its_own_sample_in_time():
    math = MathReward(timeout_s=1)
    start = time.monotonic()
    texts = [r"\boxed{9^{9^{9^9}}}", r"\boxed{\sqrt{49}}", r"\boxed{3^{10^{10}}}"]
    towers = math(["?"] * 3, texts, ["7"] * 3, deadline=start + 60)
    assert [type(reward) for reward in towers] == [TimeoutError, float, TimeoutError]
    assert towers[1] == 1.0
    assert psutil.Process(os.getpid()).children() == []


def test_at_the_deadline_what_is_left_is_not_compared(math: MathReward):
    texts = [rf"\boxed{{{i}^{{10^{{10}}}}}}" for i in range(2, 12)]
    rewards = math(["?"] * 10, texts, ["7"] * 10, deadline=time.monotonic() + 0.2)
    assert [type(reward) for reward in rewards] == [TimeoutError] * 10
    assert psutil.Process(os.getpid()).children() == []
