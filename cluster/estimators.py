"""What a held-out set says about a policy, with 95 % intervals. Pure functions of numbers.

The prompts are the sample: another held-out set would have other questions. Completions of one prompt are alike, so
they are no independent trials; prompts are the clusters, and every interval is over prompts (2411.00640, section 2.2).

Dimensions: M prompts, n completions of a prompt, c of them correct.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z = 1.959963984540054  # 97.5 % of the standard normal


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts and its 95 % interval."""

    value: float
    low: float
    high: float
    prompts: int  # M: those that it is a mean of

    def __format__(self, sign: str) -> str:
        """`0.750 [0.644, 0.833]`; with `+` for differences."""
        return f"{self.value:{sign}.3f} [{self.low:{sign}.3f}, {self.high:{sign}.3f}]"


def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased estimate of the probability that one of k completions is correct (2107.03374, eq. 1).

    1 - C(n - c, k) / C(n, k): the share of the k-subsets of the n completions with a correct one in them.
    """
    assert 0 <= c <= n and 1 <= k <= n
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def wilson(share: float, trials: float) -> tuple[float, float]:
    """Wilson's score interval of a share of `trials` (Wilson 1927); it keeps its width at shares of 0 and 1."""
    centre = share + Z**2 / (2 * trials)
    half = Z * math.sqrt(share * (1 - share) / trials + Z**2 / (4 * trials**2))
    scale = 1 + Z**2 / trials
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def proportion(values_M: Sequence[float], most: int) -> Estimate:
    """The mean of one number in [0, 1] for each prompt; at least one prompt.

    Wilson's interval for as many trials as have the clustered standard error s / sqrt(M) of these values: for one
    completion a prompt these are the M prompts, and the interval is Wilson's own. `most` bounds them: they are no more
    than the completions, however even the prompts came out. The normal interval would have no width where every
    prompt has the same value, a bootstrap over prompts neither.
    """
    count = len(values_M)
    share = math.fsum(values_M) / count
    variance = math.fsum((value - share) ** 2 for value in values_M) / count**2  # of the mean
    if share in (0.0, 1.0):
        trials = float(count)
    else:
        trials = min(float(most), share * (1 - share) / variance) if variance > 0 else float(most)
    return Estimate(share, *wilson(share, trials), count)


def paired_difference(one_M: Sequence[float], other_M: Sequence[float]) -> Estimate:
    """The mean of one - other over the same prompts, values in [0, 1]; at least one prompt.

    The interval is Bonett and Price's (2012, adjusted Wald for paired proportions): that of the mean after two more
    prompts, one won and one lost, so that equal answers everywhere do not claim a difference of exactly zero.
    """
    differences_M = [mine - theirs for mine, theirs in zip(one_M, other_M, strict=True)]
    adjusted = [*differences_M, 1.0, -1.0]
    centre = math.fsum(adjusted) / len(adjusted)
    variance = math.fsum((value - centre) ** 2 for value in adjusted) / len(adjusted)
    half = Z * math.sqrt(variance / len(adjusted))
    value = math.fsum(differences_M) / len(differences_M)
    return Estimate(value, max(-1.0, centre - half), min(1.0, centre + half), len(differences_M))
