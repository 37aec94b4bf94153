"""Estimates and their intervals, against numbers worked by hand, published ones and simulated truth."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.estimators import Z, paired_difference, pass_at_k, proportion, wilson


@pytest.mark.parametrize(("n", "c", "k"), [(1, 0, 1), (1, 1, 1), (4, 1, 2), (5, 2, 3), (6, 0, 4), (6, 5, 2), (6, 6, 6)])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_completion(n: int, c: int, k: int):
    subsets = list(itertools.combinations(range(n), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(min(subset) < c for subset in subsets) / len(subsets))


def test_pass_at_k_by_hand():
    assert pass_at_k(4, 1, 1) == 0.25
    assert pass_at_k(4, 1, 2) == 0.5  # 3 of the 6 pairs have the one that is right
    assert pass_at_k(10, 3, 5) == pytest.approx(11 / 12)  # 1 - C(7,5) / C(10,5) = 1 - 21/252


@given(st.integers(1, 12), st.integers(0, 12), st.integers(1, 12))
def test_pass_at_k_is_unbiased(n: int, tenths: int, k: int):
    """Its mean over binomial outcomes is 1 - (1 - p)^k."""
    p, k = tenths / 12, min(k, n)
    mean = sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
    assert mean == pytest.approx(1 - (1 - p) ** k)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [  # Newcombe (1998), table I, method 3: 81/263, 15/148, 0/20, 1/29
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_gives_published_intervals(successes: int, trials: int, low: float, high: float):
    assert wilson(successes / trials, trials) == pytest.approx((low, high), abs=5e-5)


def test_one_completion_a_prompt_has_wilsons_own_interval():
    estimate = proportion([1.0] * 81 + [0.0] * 182, most=263)
    assert (estimate.low, estimate.high) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert estimate.value == 81 / 263 and estimate.prompts == 263


def test_completions_that_are_all_alike_are_one_trial_a_prompt():
    """Eight identical completions say as much as one."""
    assert proportion([1.0] * 6 + [0.0] * 14, most=160) == pytest.approx(proportion([1.0] * 6 + [0.0] * 14, most=20))


def test_completions_that_differ_within_prompts_are_worth_more_than_one_trial():
    """Values .25 and .75, ten each: standard error .25 / sqrt(20), as .25 / .003125 = 80 trials have."""
    estimate = proportion([0.25, 0.75] * 10, most=200)
    assert (estimate.low, estimate.high) == pytest.approx(wilson(0.5, 80))
    assert proportion([0.5] * 20, most=80) == estimate, "never more trials than completions"


def test_all_right_is_no_certainty():
    estimate = proportion([1.0] * 20, most=80)
    assert estimate.value == estimate.high == 1.0
    assert estimate.low == pytest.approx(20 / (20 + Z**2))


@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0), (0.3, 0.1), (8.0, 2.0), (50.0, 2.0)])
def test_intervals_cover_the_truth_nineteen_times_in_twenty(a: float, b: float):
    """64 prompts whose own accuracies are Beta(a, b), 4 completions each, 1000 held-out sets."""
    rng = np.random.default_rng(0)
    counts = rng.binomial(4, rng.beta(a, b, (1000, 64)))
    covered = 0
    for row in counts:
        estimate = proportion((row / 4).tolist(), most=256)
        covered += estimate.low <= a / (a + b) <= estimate.high
    assert 0.93 <= covered / 1000 <= 0.98


def test_a_paired_difference_has_bonett_and_prices_interval():
    """60 prompts: 10 won, 3 lost. Their p12 = 11/62, p21 = 4/62; d = 7/62, s^2 = 15/62 - d^2."""
    one, other = [1.0] * 10 + [0.0] * 3 + [1.0] * 47, [0.0] * 10 + [1.0] * 3 + [1.0] * 47
    estimate = paired_difference(one, other)
    half = Z * math.sqrt((15 / 62 - (7 / 62) ** 2) / 62)
    assert estimate.value == pytest.approx(7 / 60)
    assert (estimate.low, estimate.high) == pytest.approx((7 / 62 - half, 7 / 62 + half))


def test_equal_answers_are_no_certainty_of_no_difference():
    estimate = paired_difference([1.0, 0.0] * 30, [1.0, 0.0] * 30)
    assert estimate.value == 0 and estimate.low == pytest.approx(-estimate.high) and 0.03 < estimate.high < 0.06


def test_pairing_is_narrower_than_two_separate_intervals():
    """The prompts differ much in how hard they are, the policies do not."""
    rng = np.random.default_rng(1)
    hard = rng.beta(0.3, 0.3, 200)
    one, other = (rng.binomial(8, np.clip(hard + shift, 0, 1)) / 8 for shift in (0.05, 0.0))
    paired = paired_difference(one.tolist(), other.tolist())
    alone = proportion(one.tolist(), most=1600)
    assert paired.high - paired.low < 0.6 * (alone.high - alone.low)
