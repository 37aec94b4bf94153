"""GCPO (arXiv:2605.29198): credit where the right and the wrong prompt disagree about a token.

The same completion is scored under its own prompt and under a negative one; a token's divergence eta becomes a weight
by its rank within the completion. The weight is never negative, so it never flips the sign of the advantage.
Tokens of equal eta share their average rank (the authors' order of ties is arbitrary), so that a negative prompt that
changes nothing gives plain GRPO.

Dimensions: N completions, T positions.
"""

import math

import torch
from torch import Tensor

from credit.ranks import ascending, average_ranks

CLAMP = 20.0
"""Of the log-ratio, before it is exponentiated (the authors' code)."""
CAP = 10.0
"""Of eta under `k3` (the authors' code)."""

SIGNALS_OF = {
    "k3": frozenset({"logp", "logp_negative"}),
    "kl": frozenset({"kl_negative"}),
    "information_gain": frozenset({"logp", "logp_negative"}),
    "abs": frozenset({"logp", "logp_negative"}),
}
"""The signals that each divergence needs."""
NORMALISERS = ("rank_power", "cdf", "softmax", "minmax")


def gcpo(
    mask_NT: Tensor,
    *,
    logp: Tensor | None = None,
    logp_negative: Tensor | None = None,
    kl_negative: Tensor | None = None,
    divergence: str = "k3",
    normaliser: str = "rank_power",
    top_share: float = 0.4,
    top_mass: float = 0.8,
) -> Tensor:
    """Weights from the divergence between two prompts (arXiv:2605.29198). [N, T], 0 outside the mask.

    divergence: `k3`, the authors' code; `kl`, full-vocabulary KL, the paper's equation 4; `information_gain`,
        max(0, logp - logp_negative); `abs`.
    normaliser: `rank_power`, the authors' code: (rank/T)^a with the a for which the top `top_share` of the tokens hold
        `top_mass` of the mass; `cdf`, the paper's equation 5: the share of tokens with a smaller eta, not renormalised;
        `softmax`; `minmax`. All but `cdf` have mean one.
    A completion whose eta are all equal gets uniform weights under every normaliser.
    """
    if divergence not in SIGNALS_OF:
        raise ValueError(f"gcpo: option divergence: got {divergence!r}, expected one of {', '.join(SIGNALS_OF)}")
    if normaliser not in NORMALISERS:
        raise ValueError(f"gcpo: option normaliser: got {normaliser!r}, expected one of {', '.join(NORMALISERS)}")
    if not 0 < top_share <= top_mass < 1:
        raise ValueError(f"gcpo: got top_share={top_share!r}, top_mass={top_mass!r}, expected 0 < share <= mass < 1")
    if divergence == "kl":
        assert kl_negative is not None
        eta_NT = kl_negative.clamp(min=0)
    else:
        assert logp is not None and logp_negative is not None
        eta_NT = _eta(logp, logp_negative, divergence)
    power = math.log(1 - top_mass) / math.log(1 - top_share) - 1
    weights_NT = _normalised(eta_NT, mask_NT, normaliser, power)
    highest_N1 = eta_NT.masked_fill(~mask_NT, -torch.inf).amax(1, keepdim=True)
    equal_N1 = ((eta_NT == highest_N1) | ~mask_NT).all(1, keepdim=True)
    return torch.where(mask_NT, torch.where(equal_N1, 1.0, weights_NT), 0.0)


def capped_share(mask_NT: Tensor, *, logp: Tensor, logp_negative: Tensor) -> float:
    """Share of tokens whose `k3` eta reaches its cap; such tokens tie, however different they are."""
    return float((_eta(logp, logp_negative, "k3") >= CAP)[mask_NT].float().mean())


def _eta(logp: Tensor, logp_negative: Tensor, divergence: str) -> Tensor:
    gain_NT = logp - logp_negative
    if divergence == "information_gain":
        return gain_NT.clamp(min=0)
    if divergence == "abs":
        return gain_NT.abs()
    d_NT = (-gain_NT).clamp(-CLAMP, CLAMP)
    return (d_NT.expm1() - d_NT).clamp(0, CAP)


def _normalised(eta_NT: Tensor, mask_NT: Tensor, normaliser: str, power: float) -> Tensor:
    length_N1 = mask_NT.sum(1, keepdim=True)
    if normaliser == "cdf":
        return torch.searchsorted(ascending(eta_NT, mask_NT), eta_NT).float() / length_N1
    if normaliser == "softmax":
        return length_N1 * eta_NT.masked_fill(~mask_NT, -torch.inf).softmax(1)
    if normaliser == "minmax":
        w_NT = (eta_NT - eta_NT.masked_fill(~mask_NT, torch.inf).amin(1, keepdim=True)) * mask_NT
    else:
        w_NT = (average_ranks(eta_NT, mask_NT) / length_N1) ** power * mask_NT
    return length_N1 * w_NT / w_NT.sum(1, keepdim=True)
