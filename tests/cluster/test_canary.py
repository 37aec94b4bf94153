"""What a canary's answer proves, by hand."""

import numpy as np
import pytest

from cluster.canary import FLOOR, MARGIN, Refused, distance, judge, tolerance

LIMIT = 0.01
ADAPTED = np.array([0.0, -1.0, -2.0, -3.0], np.float32)
BASE = ADAPTED - np.float32(0.5)
BEFORE = ADAPTED - np.float32(0.1)
OTHERS = {"base model": BASE, "version 6": BEFORE}


def test_the_distance_is_the_root_mean_square() -> None:
    assert distance(np.array([0.0, 3.0, 0.0, 4.0]), np.zeros(4)) == pytest.approx(2.5)  # sqrt((9 + 16) / 4)
    assert distance(np.zeros(3), np.zeros(4)) == float("inf")
    assert distance(np.array([0.0, np.nan]), np.zeros(2)) == float("inf")
    assert distance(np.zeros(2), np.array([0.0, -np.inf])) == float("inf")
    assert distance(np.zeros(1, np.float32), np.full(1, 1e30, np.float32)) == pytest.approx(1e30)


@pytest.mark.parametrize("off", [0.0, 0.009, -0.009])
def test_the_adapters_answer_is_proved(off: float) -> None:
    assert judge(ADAPTED + off, ADAPTED, OTHERS, LIMIT) == "proved"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (BASE, "is that of the base model: off by 0.5 nats, expected at most 0.01"),
        (BASE + 0.009, "is that of the base model: off by 0.491 nats"),
        (BEFORE, "is that of the version 6: off by 0.1 nats"),
        (ADAPTED + 0.011, "is off by 0.011 nats, expected at most 0.01"),
        (BASE - 0.1, "is off by 0.6 nats"),
        (ADAPTED[:3], "is off by inf nats"),
        (np.zeros(0, np.float32), "is off by inf nats"),
        (np.full(4, np.nan, np.float32), "is off by inf nats"),
        (np.array([0.0, -1.0, -2.0, -np.inf]), "is off by inf nats"),
        (np.zeros(4, np.float32), "is off by 1.87 nats"),  # sqrt(14 / 4)
        (ADAPTED[None], "is off by inf nats"),
    ],
)
def test_any_other_answer_is_refused_and_named(answer: np.ndarray, says: str) -> None:
    with pytest.raises(Refused) as refused:
        judge(answer, ADAPTED, OTHERS, LIMIT)
    assert says in str(refused.value)


def test_a_fresh_adapter_is_recorded_as_indistinguishable_from_the_base_model() -> None:
    assert judge(ADAPTED, ADAPTED, {"base model": ADAPTED.copy()}, LIMIT) == "indistinguishable from the base model"


@pytest.mark.parametrize(("apart", "verdict"), [(0.019, "indistinguishable from the version 6"), (0.021, "proved")])
def test_two_versions_are_told_apart_when_they_differ_by_more_than_two_limits(apart: float, verdict: str) -> None:
    others = {"base model": BASE, "version 6": ADAPTED - apart}
    assert judge(ADAPTED, ADAPTED, others, LIMIT) == verdict


def test_an_answer_that_is_wrong_is_refused_even_where_the_versions_are_alike() -> None:
    with pytest.raises(Refused, match="off by 0\\.5 nats"):
        judge(BASE, ADAPTED, {"version 6": ADAPTED.copy()}, LIMIT)


def test_the_tolerance_comes_from_the_measured_noise() -> None:
    assert tolerance(BASE, BASE) == FLOOR
    assert tolerance(BASE + 1e-6, BASE) == FLOOR
    assert tolerance(BASE + 0.01, BASE) == pytest.approx(MARGIN * 0.01, rel=1e-4)


@pytest.mark.parametrize("answer", [BASE + 0.5, BASE[:2], np.full(4, np.nan), np.full(4, np.inf)])
def test_another_base_model_is_refused(answer: np.ndarray) -> None:
    with pytest.raises(Refused, match="the actor serves another base model"):
        tolerance(answer, BASE)
