"""What each token was really worth, from continuations of every prefix, and how well weights agree with that.

V(prefix) is the mean reward of the policy's own continuations. The true credit of token t is dV_t = V(y_1..y_t) -
V(y_1..y_t-1): the advantage of that token under the policy that sampled it. Over a completion it sums to R - V(prompt).

Dimensions: N completions, T tokens of one completion (no prompt, no padding).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from credit.ranks import average_ranks

HALVES = 2
FIGURES = ("spearman", "spearman_product", "auroc", "mass", "signed", "cosine")
"""What `agreement` says of one completion."""


class Wanted(NamedTuple):
    """What is missing: `draws` continuations after the first `position` tokens of a completion."""

    completion: int
    half: int
    position: int
    draws: int


class Values:
    """V of every prefix of every completion, twice, from two independent sets of continuations.

    Each estimate is the mean of exactly `continuations` independent draws from the policy after that prefix. Draws of
    the position before that took the completion's own next token *are* such draws: they stay, the others are replaced.
    So V is unbiased everywhere, and the noise of dV is that of the replaced draws only: sd <= sqrt((1 - pi_t) / M),
    none at all for a token of which the policy is certain, whose dV is 0. The whole completion is worth its own reward.

        while asked := values.wanted(): values.add(one, draws) for each of them
    """

    def __init__(self, completions: Sequence[np.ndarray], rewards: Sequence[float], continuations: int) -> None:
        if continuations < 1:
            raise ValueError(f"truth: got {continuations} continuations of a prefix, expected at least 1")
        self.completions, self.continuations = completions, continuations
        self.position = 0
        self.drawn = 0
        self.halves = [
            [np.append(np.zeros(len(tokens)), reward) for tokens, reward in zip(completions, rewards, strict=True)]
            for _ in range(HALVES)
        ]  # [T + 1] each; the value at t is that of the first t tokens
        self._pools: dict[tuple[int, int], list[tuple[np.ndarray, float]]] = {
            (i, half): [] for i in range(len(completions)) for half in range(HALVES)
        }

    def wanted(self) -> list[Wanted]:
        """What is to be drawn next; empty when every prefix has its value."""
        while self._pools:
            missing = [
                Wanted(i, half, self.position, self.continuations - len(pool))
                for (i, half), pool in self._pools.items()
                if len(pool) < self.continuations
            ]
            if missing:
                return missing
            self._advance()
        return []

    def add(self, wanted: Wanted, draws: Sequence[tuple[np.ndarray, float]]) -> None:
        """Draws that were asked for: the whole completion (the prefix and how it went on), and its reward."""
        assert len(draws) == wanted.draws and wanted.position == self.position, wanted
        self._pools[wanted.completion, wanted.half] += draws
        self.drawn += len(draws)

    def _advance(self) -> None:
        t = self.position
        for (i, half), pool in list(self._pools.items()):
            tokens = self.completions[i]
            self.halves[half][i][t] = np.mean([reward for _, reward in pool])
            self._pools[i, half] = [draw for draw in pool if draw[0][t] == tokens[t]]
            if t + 1 == len(tokens):
                del self._pools[i, half]
        self.position += 1


def least_threshold(continuations: int) -> float:
    """Three standard errors of dV at the most, whatever the policy; `continuations` in both halves together.

    The variance of dV is largest for a token that is never drawn, when V is 1/2 before and after it: 2 x 1/4 over n.
    """
    return 3 * math.sqrt(0.5 / continuations)


def spearman(a_T: np.ndarray, b_T: np.ndarray) -> float:
    """Rank correlation with average ranks. A constant `a` orders nothing: 0. NaN where `b` is constant."""
    if len(b_T) < 2 or (b_T == b_T[0]).all():
        return math.nan
    if (a_T == a_T[0]).all():
        return 0.0
    return float(np.corrcoef(_ranks(a_T), _ranks(b_T))[0, 1])


def auroc(scores_T: np.ndarray, positive_T: np.ndarray) -> float:
    """Probability that a positive has a higher score than a negative, ties counting half. NaN without both."""
    positives = int(positive_T.sum())
    negatives = len(positive_T) - positives
    if not positives or not negatives:
        return math.nan
    wins = _ranks(scores_T)[positive_T].sum() - positives * (positives + 1) / 2
    return float(wins / (positives * negatives))


def _ranks(values_T: np.ndarray) -> np.ndarray:
    values_1T = torch.from_numpy(np.ascontiguousarray(values_T, np.float32))[None]
    return average_ranks(values_1T, torch.ones_like(values_1T, dtype=torch.bool))[0].double().numpy()


def agreement(
    weights_T: np.ndarray, halves: tuple[np.ndarray, np.ndarray], advantage: float, threshold: float
) -> dict[str, float]:
    """How well one completion's weights agree with the two estimates of dV [T]; NaN for what is not defined.

    A token is decisive when |dV|, the mean of both halves, is above `threshold`.
    spearman, auroc: weights against |dV|, and as a score for decisive tokens.
    spearman_product: against dV of one half times dV of the other, whose mean is dV^2 whatever the noise: noise in
        |dV| that grows with a method's own signal raises `spearman` and not this.
    mass: share of the weight on decisive tokens. signed: of that weight, the share where dV has the advantage's sign.
    cosine: between advantage times weight, as it is trained on, and dV.
    """
    dv_T = (halves[0] + halves[1]) / 2
    decisive_T = np.abs(dv_T) > threshold
    mass_T = weights_T / weights_T.sum()
    decisive_mass = mass_T[decisive_T].sum()
    right_T = decisive_T & (np.sign(dv_T) == np.sign(advantage))
    norm = np.linalg.norm(weights_T) * np.linalg.norm(dv_T)
    return {
        "spearman": spearman(weights_T, np.abs(dv_T)),
        "spearman_product": spearman(weights_T, halves[0] * halves[1]),
        "auroc": auroc(weights_T, decisive_T),
        "mass": float(decisive_mass) if decisive_T.any() else math.nan,
        "signed": float(mass_T[right_T].sum() / decisive_mass) if advantage and decisive_mass > 0 else math.nan,
        "cosine": float(np.sign(advantage) * (weights_T @ dv_T) / norm) if advantage and norm > 0 else math.nan,
    }


def spearman_brown(half: float) -> float:
    """Reliability of the mean of two estimates, from the correlation of one with the other (Spearman, Brown, 1910).

    Its square root is the correlation with the truth, which bounds what any weights can reach against the estimate.
    """
    return max(0.0, 2 * half / (1 + half)) if half > -1 else 0.0


class Estimate(NamedTuple):
    """A mean over completions with its 95 % interval."""

    value: float
    low: float
    high: float


def bootstrap(values_N: np.ndarray, groups_N: np.ndarray, *, rounds: int = 2000, seed: int = 0) -> Estimate:
    """Mean of the values that are not NaN, with a percentile interval.

    Groups are resampled with all their completions, never tokens, which depend on each other, nor completions of one
    prompt, which are alike. NaN where nothing is defined.
    """
    uniques_K, inverse_N = np.unique(groups_N, return_inverse=True)
    defined_N = np.isfinite(values_N)
    sums_K = np.bincount(inverse_N, np.where(defined_N, values_N, 0.0), len(uniques_K))
    counts_K = np.bincount(inverse_N, defined_N, len(uniques_K))
    if not counts_K.sum():
        return Estimate(math.nan, math.nan, math.nan)
    times_RK = np.random.default_rng(seed).multinomial(
        len(uniques_K), np.full(len(uniques_K), 1 / len(uniques_K)), rounds
    )
    counts_R = times_RK @ counts_K
    means_R = (times_RK @ sums_K)[counts_R > 0] / counts_R[counts_R > 0]
    low, high = np.quantile(means_R, [0.025, 0.975])
    return Estimate(float(sums_K.sum() / counts_K.sum()), float(low), float(high))
