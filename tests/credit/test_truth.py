"""The true credit of a token: estimators against planted truths, statistics against numbers worked by hand."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from credit.truth import FIGURES, Values, agreement, auroc, bootstrap, least_threshold, spearman, spearman_brown

EOS, WRONG, RIGHT, FILLERS = 0, 1, 2, (3, 4, 5, 6)
COPIES = 100  # of the completion that is measured: 200 independent estimates of every value


class Planted:
    """A policy whose completions are decided at known positions: `chances` holds the probability of RIGHT there.

    Everywhere else it writes a filler, drawn from four; the last token is always EOS. The reward is that of the number
    of RIGHT tokens.
    """

    def __init__(self, length: int, chances: dict[int, float], rewards: list[float]) -> None:
        self.length, self.chances, self.rewards = length, chances, rewards

    def draw(self, prefix: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, float]:
        """A completion that begins with `prefix`, and its reward."""
        tokens = list(prefix)
        for position in range(len(prefix), self.length):
            if position in self.chances:
                tokens.append(RIGHT if rng.random() < self.chances[position] else WRONG)
            else:
                tokens.append(rng.choice(FILLERS) if position < self.length - 1 else EOS)
        return np.array(tokens), self.rewards[tokens.count(RIGHT)]

    def value(self, prefix: np.ndarray) -> float:
        """Exact V, by enumeration of what is still to be decided."""
        have = int((prefix == RIGHT).sum())
        open_chances = [chance for position, chance in self.chances.items() if position >= len(prefix)]
        total = 0.0
        for outcome in itertools.product((0, 1), repeat=len(open_chances)):
            p = math.prod(c if right else 1 - c for c, right in zip(open_chances, outcome, strict=True))
            total += p * self.rewards[have + sum(outcome)]
        return total


# two of three are needed: both signs of dV, and a last decision that may come too late to matter
TWO_OF_THREE = Planted(length=9, chances={1: 0.6, 4: 0.3, 6: 0.8}, rewards=[0.0, 0.0, 1.0, 1.0])
COMPLETION = np.array([3, RIGHT, 5, 4, WRONG, 6, RIGHT, 3, EOS])


def test_the_planted_values_are_those_worked_by_hand():
    v = [TWO_OF_THREE.value(COMPLETION[:t]) for t in range(10)]
    # before: .6*.3*.8 + .6*.3*.2 + .6*.7*.8 + .4*.3*.8 = .612; after a right one: 1 - .7*.2; after the wrong one: .8
    assert v == pytest.approx([0.612, 0.612, 0.86, 0.86, 0.86, 0.8, 0.8, 1, 1, 1])


def estimated(planted: Planted, completion: np.ndarray, continuations: int, seed: int, kind: type[Values]) -> Values:
    rng = np.random.default_rng(seed)
    reward = planted.draw(completion, rng)[1]
    values = kind([completion] * COPIES, [reward] * COPIES, continuations)
    while asked := values.wanted():
        for one in asked:
            values.add(one, [planted.draw(completion[: one.position], rng) for _ in range(one.draws)])
    return values


def deviation(planted: Planted, completion: np.ndarray, values: Values) -> tuple[float, float]:
    """Largest |z| of the mean estimate over positions, and the squared error over what 1/n sampling must have.

    The 200 estimates of a position are independent. Positions are not: at the worst all move together, the sum of
    squares over them is then a chi-square of one degree of freedom for each estimate, and the ratio has mean 1 and a
    standard deviation of sqrt(2 / 200) = .1.
    """
    exact_T = np.array([planted.value(completion[:t]) for t in range(len(completion))])
    errors_UT = np.array([v[:-1] - exact_T for half in values.halves for v in half])
    variance_T = exact_T * (1 - exact_T) / values.continuations  # of a mean of rewards that are 0 or 1
    varies_T = variance_T > 0
    z_T = errors_UT[:, varies_T].mean(0) / np.sqrt(variance_T[varies_T] / len(errors_UT))
    return float(np.abs(z_T).max()), float((errors_UT**2).sum(1).mean() / variance_T.sum())


@pytest.mark.parametrize("continuations", [8, 32, 128])
def test_values_converge_to_the_planted_truth_with_the_root_of_the_continuations(continuations: int):
    values = estimated(TWO_OF_THREE, COMPLETION, continuations, seed=continuations, kind=Values)
    z, ratio = deviation(TWO_OF_THREE, COMPLETION, values)
    assert z < 4.5  # one of nine positions: false once in 16,000 seeds
    assert 0.6 < ratio < 1.5  # four and five standard deviations


class KeepsAll(Values):
    """Wrong: draws that chose another token than the completion stay."""

    def _advance(self) -> None:
        pools = {key: list(pool) for key, pool in self._pools.items()}
        super()._advance()
        self._pools = {key: pools[key] for key in self._pools}


class Early(Values):
    """Wrong: only draws that took the completion's token count, so that the value is that of the token after."""

    def _advance(self) -> None:
        t = self.position
        for (i, half), pool in self._pools.items():
            agreeing = [draw for draw in pool if draw[0][t] == self.completions[i][t]]
            self._pools[i, half] = agreeing or pool
        super()._advance()


class Greedy(Values):
    """Wrong: of the draws only the better half counts."""

    def add(self, wanted, draws) -> None:
        best = sorted(draws, key=lambda draw: -draw[1])[: (len(draws) + 1) // 2]
        super().add(wanted, (best + best)[: len(draws)])


@pytest.mark.parametrize("wrong", [KeepsAll, Early, Greedy])
def test_the_bounds_reject_estimators_that_are_wrong(wrong: type[Values]):
    values = estimated(TWO_OF_THREE, COMPLETION, 32, seed=0, kind=wrong)
    z, ratio = deviation(TWO_OF_THREE, COMPLETION, values)
    assert z > 4.5
    assert not 0.6 < ratio < 1.5


def test_dv_is_noisy_only_as_far_as_the_policy_was_undecided():
    values = estimated(TWO_OF_THREE, COMPLETION, 32, seed=5, kind=Values)
    dv_UT = np.array([np.diff(v) for half in values.halves for v in half])
    sampled_T = np.array([1 / 4, 0.6, 1 / 4, 1 / 4, 0.7, 1 / 4, 0.8, 1 / 4, 1.0])
    assert (dv_UT.std(0) <= 1.2 * np.sqrt((1 - sampled_T) / 32)).all()
    assert (dv_UT[:, 8] == 0).all()  # EOS is certain: exactly nothing, not little
    assert dv_UT.mean(0) == pytest.approx([0, 0.248, 0, 0, -0.06, 0, 0.2, 0, 0], abs=0.03)
    # 9 positions of 32 draws, where each keeps those that took the completion's token
    expected = 32 + 32 * (1 - sampled_T[:-1]).sum()
    assert values.drawn / (2 * COPIES) == pytest.approx(expected, rel=0.03)


def test_a_completion_sums_to_its_reward_minus_the_value_of_its_prompt():
    values = estimated(TWO_OF_THREE, COMPLETION, 8, seed=1, kind=Values)
    for half in values.halves:
        for v in half:
            assert np.diff(v).sum() == pytest.approx(1.0 - v[0])


def test_the_largest_noise_of_dv_stays_below_a_third_of_the_least_threshold():
    """var dV <= max over q = 1 - pi, V and W of (q (V + W - 2 V W) - q^2 (V - W)^2) / n."""
    grid = np.linspace(0, 1, 41)
    q, v, w = np.meshgrid(grid, grid, grid)
    largest = (q * (v + w - 2 * v * w) - q**2 * (v - w) ** 2).max()
    assert 3 * math.sqrt(largest / 200) == pytest.approx(least_threshold(200)) == pytest.approx(0.15)


def test_no_continuations_are_refused():
    with pytest.raises(ValueError, match="got 0 continuations of a prefix, expected at least 1"):
        Values([COMPLETION], [1.0], 0)


# statistics


def test_rank_correlation_by_hand():
    assert spearman(np.array([1, 2, 3, 4]), np.array([1, 3, 2, 4])) == pytest.approx(0.8)  # 1 - 6 x 2 / 60
    assert spearman(np.array([1, 1, 2]), np.array([1, 2, 3])) == pytest.approx(1.5 / math.sqrt(3))
    assert spearman(np.array([2, 2, 2]), np.array([1, 2, 3])) == 0
    assert math.isnan(spearman(np.array([1, 2, 3]), np.array([2, 2, 2])))


def test_auroc_by_hand():
    decisive = np.array([False, False, True, True])
    assert auroc(np.array([0.1, 0.4, 0.35, 0.8]), decisive) == 0.75
    assert auroc(np.array([1.0, 1.0, 1.0, 1.0]), decisive) == 0.5
    assert math.isnan(auroc(np.array([1.0, 2.0]), np.array([True, True])))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-2, 2)), min_size=3, max_size=20))
def test_ranks_agree_with_scipy(pairs: list[tuple[int, int]]):
    stats = pytest.importorskip("scipy.stats")
    a, b = (np.array(column, float) for column in zip(*pairs, strict=True))
    if len(set(a)) > 1 and len(set(b)) > 1:
        assert spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-9)
    positive = b > 0
    if positive.any() and not positive.all():
        u = stats.mannwhitneyu(a[positive], a[~positive]).statistic
        assert auroc(a, positive) == pytest.approx(u / (positive.sum() * (~positive).sum()))


def test_agreement_by_hand():
    halves = np.array([0.5, -0.3, 0, 0]), np.array([0.3, -0.1, 0, 0])  # dV = .4, -.2, 0, 0
    got = agreement(np.array([2.0, 1.0, 1.0, 0.0]), halves, 1.0, threshold=0.1)
    assert set(got) == set(FIGURES)
    assert got["spearman"] == got["spearman_product"] == pytest.approx(3.75 / 4.5)
    assert got["auroc"] == 3.5 / 4
    assert got["mass"] == 0.75
    assert got["signed"] == pytest.approx(2 / 3)
    assert got["cosine"] == pytest.approx(0.6 / math.sqrt(6 * 0.2))
    wrong = agreement(np.array([2.0, 1.0, 1.0, 0.0]), halves, -1.0, threshold=0.1)
    assert wrong["signed"] == pytest.approx(1 / 3)
    assert wrong["cosine"] == -got["cosine"]


def test_a_completion_without_advantage_has_no_sign_and_one_without_decisive_tokens_no_share():
    halves = np.array([0.5, 0.0]), np.array([0.3, 0.0])
    got = agreement(np.array([1.0, 1.0]), halves, 0.0, threshold=0.1)
    assert math.isnan(got["signed"]) and math.isnan(got["cosine"]) and got["mass"] == 0.5
    got = agreement(np.array([1.0, 1.0]), halves, 1.0, threshold=0.9)
    assert all(math.isnan(got[name]) for name in ("auroc", "mass", "signed"))


def test_noise_that_grows_with_a_signal_deceives_the_correlation_with_dv_and_not_that_with_the_product():
    """Every dV is 0; the two estimates of it are the noisier, the larger the weight."""
    rng = np.random.default_rng(0)
    weights = np.linspace(1, 2, 30)
    figures = []
    for _ in range(300):
        a, b = rng.normal(size=(2, 30)) * weights**4
        figures.append(agreement(weights, (a, b), 1.0, threshold=9.0))
    assert np.mean([one["spearman"] for one in figures]) > 0.4
    assert abs(np.mean([one["spearman_product"] for one in figures])) < 4 * 0.19 / math.sqrt(300)  # 1 / sqrt(29)


def test_the_mean_of_two_halves_is_more_reliable_than_either():
    assert spearman_brown(0.5) == pytest.approx(2 / 3)
    assert spearman_brown(1.0) == 1
    assert spearman_brown(-0.2) == 0
    rng = np.random.default_rng(1)
    truth = rng.normal(size=20_000)
    a, b = truth + rng.normal(size=(2, 20_000))  # as much noise as truth
    ceiling = math.sqrt(spearman_brown(float(np.corrcoef(a, b)[0, 1])))
    assert ceiling == pytest.approx(np.corrcoef(truth, (a + b) / 2)[0, 1], abs=0.01)


def test_the_interval_is_over_groups_and_leaves_out_what_is_not_defined():
    rng = np.random.default_rng(2)
    once = rng.normal(size=100)
    alone = bootstrap(once, np.arange(100))
    assert alone.value == pytest.approx(once.mean())
    assert alone.high - alone.low == pytest.approx(2 * 1.96 * once.std() / 10, rel=0.1)
    # four equal completions of each group tell no more than one
    fourfold = bootstrap(np.repeat(once, 4), np.repeat(np.arange(100), 4))
    assert fourfold == pytest.approx(alone)
    missing = bootstrap(np.array([1.0, math.nan, 3.0]), np.array([0, 0, 0]))
    assert missing == (2.0, 2.0, 2.0)
    assert math.isnan(bootstrap(np.array([math.nan]), np.array([0])).value)
