"""EAPO and the four quadrants (arXiv:2604.11056): the sign of the outcome against the entropy of the token.

Dimensions: N completions, T positions, K groups.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

QUADRANTS = ("PHR", "PLR", "NHR", "NLR")
"""Positive or negative advantage, high (H_t >= the group's mean) or low entropy."""


def eapo(
    mask_NT: Tensor,
    *,
    entropy: Tensor,
    advantages_N: Tensor,
    groups_N: Tensor,
    strength: float = 0.2,
    phi: float = 2.0,
    multiplicative: bool = False,
) -> Tensor:
    """Entropy-aware advantages as weights m, A_{i,t} = A_i m_{i,t} (arXiv:2604.11056). [N, T], 0 outside the mask.

    Additive, the paper's: A_i + a sign(A_i) clip(z, -|A_i|/phi, |A_i|/phi), z the entropy standardised over the
    group's tokens, a = `strength`. `multiplicative`: A_i (1 + (a/phi) clip(z, -1, 1)), in which the weight does not
    depend on A_i, so that tokens which a group shares still cancel. The mean is near one, not one.
    """
    if not (phi > 0 and 0 <= strength <= phi):
        raise ValueError(
            f"eapo: got strength={strength!r}, phi={phi!r}, expected 0 <= strength <= phi: "
            "anything larger could flip the sign of an advantage"
        )
    deviation_NT, std_N1 = _deviation(entropy, mask_NT, groups_N)
    z_NT = deviation_NT / std_N1.clamp(min=1e-8)
    if multiplicative:
        bonus_NT = z_NT.clamp(-1, 1) / phi
    else:
        size_N1 = advantages_N.float().abs()[:, None]
        # |clip| <= |A|/phi, so the quotient is bounded; where A is 0 nothing is added
        bonus_NT = torch.where(size_N1 > 0, z_NT.clamp(-size_N1 / phi, size_N1 / phi) / size_N1, 0.0)
    return torch.where(mask_NT, 1 + strength * bonus_NT, 0.0)


class Quadrants(NamedTuple):
    """[N, T] bool for each quadrant; tokens of completions without advantage are in none."""

    PHR: Tensor
    PLR: Tensor
    NHR: Tensor
    NLR: Tensor


def quadrants(entropy: Tensor, advantages_N: Tensor, groups_N: Tensor, mask_NT: Tensor) -> Quadrants:
    """Sign of the advantage x entropy at or above the mean over the group's tokens (arXiv:2604.11056).

    The paper splits by the sign of the reward; with rewards of 0 and 1 that is the sign of the group advantage.
    """
    high_NT = _deviation(entropy, mask_NT, groups_N)[0] >= 0
    positive_NT = mask_NT & (advantages_N > 0)[:, None]
    negative_NT = mask_NT & (advantages_N < 0)[:, None]
    return Quadrants(positive_NT & high_NT, positive_NT & ~high_NT, negative_NT & high_NT, negative_NT & ~high_NT)


def quadrant_mask(
    name: str, signals: Mapping[str, Any], advantages_N: Tensor, groups_N: Tensor, mask_NT: Tensor
) -> Tensor:
    """True on the tokens of one quadrant: the only ones that are trained. [N, T] bool"""
    if name not in QUADRANTS:
        raise ValueError(f"credit.quadrant: got {name!r}, expected one of {', '.join(QUADRANTS)}")
    if "entropy" not in signals:
        raise ValueError(f"credit.quadrant: {name} needs the signal 'entropy', got {', '.join(sorted(signals))}")
    return getattr(quadrants(signals["entropy"], advantages_N, groups_N, mask_NT), name)


def _deviation(values_NT: Tensor, mask_NT: Tensor, groups_N: Tensor) -> tuple[Tensor, Tensor]:
    """Values minus the mean over their group's tokens [N, T], and the group's standard deviation [N, 1]."""
    uniques_K, inverse_N = groups_N.unique(return_inverse=True)
    zeros_K = torch.zeros(len(uniques_K))

    def over_group(rows_N: Tensor) -> Tensor:
        return zeros_K.index_add(0, inverse_N, rows_N)

    lowest_N = values_NT.masked_fill(~mask_NT, torch.inf).amin(1)
    lowest_K = zeros_K.scatter_reduce(0, inverse_N, lowest_N, "amin", include_self=False)
    # measured from the group's smallest value, equal values are exactly 0: no rounding is blown up by a tiny std
    shifted_NT = torch.where(mask_NT, values_NT - lowest_K[inverse_N][:, None], 0.0)
    count_K = over_group(mask_NT.sum(1).float()).clamp(min=1)
    mean_K = over_group(shifted_NT.sum(1)) / count_K
    deviation_NT = torch.where(mask_NT, shifted_NT - mean_K[inverse_N][:, None], 0.0)
    std_K = (over_group((deviation_NT**2).sum(1)) / count_K).sqrt()
    return deviation_NT, std_K[inverse_N][:, None]
