"""What the weights of a step look like: how concentrated they are, and what they follow.

Averages over completions leave out those for which a figure is undefined; a figure that is undefined for all of them
is 0. Dimensions: N completions, T positions, K groups.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from credit.eapo import QUADRANTS, quadrants
from credit.gcpo import capped_share
from credit.methods import METHODS, SELF_NORMALISED, WEIGHTS, needs, weights
from credit.ranks import ascending, average_ranks
from credit.trajectory import Batch, Trajectory
from credit.weights import normalise

FREQUENT = 20
"""Tokens that count as the batch's template."""


def diagnostics(weights: Tensor, mask: Tensor) -> dict[str, float]:
    """Concentration of weights [N, T] over completions of two tokens or more (arXiv:2606.00257).

    `gini`: sum (2i-n-1) w_(i) / (n sum w), ascending. `effective_token_ratio`: 1 / (n sum w^2) with w summing to one.
    `regime_*`: share of completions that are uniform (gini < .10), concentrated (gini > .80 or ratio < .10), middle.
    """
    mask = torch.as_tensor(mask, dtype=torch.bool)
    weights_NT = torch.where(mask, weights.detach().float(), 0.0)
    defined_N = (mask.sum(1) >= 2) & (weights_NT.sum(1) > 0)
    if not defined_N.any():
        return {"gini": 0.0, "effective_token_ratio": 1.0} | dict.fromkeys(
            ("regime_uniform", "regime_middle", "regime_concentrated"), 0.0
        )
    gini_N, ratio_N, uniform_N, concentrated_N = (part[defined_N] for part in concentration(weights_NT, mask))
    return {
        "gini": float(gini_N.mean()),
        "effective_token_ratio": float(ratio_N.mean()),
        "regime_uniform": float(uniform_N.float().mean()),
        "regime_middle": float((~uniform_N & ~concentrated_N).float().mean()),
        "regime_concentrated": float(concentrated_N.float().mean()),
    }


class Concentration(NamedTuple):
    """Of each completion [N]; NaN, and neither of the two regimes, for one without weight."""

    gini: Tensor
    ratio: Tensor  # effective tokens over tokens
    uniform: Tensor  # bool
    concentrated: Tensor  # bool; what is neither is in the middle


def concentration(weights_NT: Tensor, mask_NT: Tensor) -> Concentration:
    """Gini, effective-token ratio and regime (arXiv:2606.00257) of each row's masked weights."""
    gini_N = gini(weights_NT, mask_NT)
    ratio_N = weights_NT.sum(1) ** 2 / (mask_NT.sum(1) * (weights_NT**2).sum(1))
    return Concentration(gini_N, ratio_N, gini_N < 0.10, (gini_N > 0.80) | (ratio_N < 0.10))


def gini(weights_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """Gini coefficient of each row's masked weights. [N], NaN for a row without weight"""
    n_N1 = mask_NT.sum(1, keepdim=True)
    i_T = torch.arange(1, mask_NT.shape[1] + 1)
    ascending_NT = torch.where(i_T <= n_N1, ascending(weights_NT, mask_NT), 0.0)
    return ((2 * i_T - n_N1 - 1) * ascending_NT).sum(1) / (n_N1[:, 0] * ascending_NT.sum(1))


def rank_correlation(a_NT: Tensor, b_NT: Tensor, mask_NT: Tensor) -> float:
    """Spearman's correlation of two `average_ranks` within each completion, averaged over completions."""
    n_N1 = mask_NT.sum(1, keepdim=True)
    a_NT = torch.where(mask_NT, a_NT - (n_N1 + 1) / 2, 0.0)  # ranks, ties or not, have mean (n + 1) / 2
    b_NT = torch.where(mask_NT, b_NT - (n_N1 + 1) / 2, 0.0)
    scale_N = ((a_NT**2).sum(1) * (b_NT**2).sum(1)).sqrt()
    return _mean((a_NT * b_NT).sum(1) / scale_N, scale_N > 0)


def cancellation_residue(coefficients_NT: Tensor, tokens_NT: Tensor, mask_NT: Tensor, groups_N: Tensor) -> float:
    """|sum_i A_i c_i| / sum_i |A_i c_i| over the tokens that all completions of a group begin with; 0 is cancelled.

    coefficients_NT is A_i c_i. Averaged over all those tokens, by mass (arXiv:2604.13088). Groups of one are left out.
    """
    uniques_K, inverse_N = groups_N.unique(return_inverse=True)
    rows_N, zeros_KT = torch.arange(len(groups_N)), coefficients_NT.new_zeros(len(uniques_K), mask_NT.shape[1])
    size_K = torch.zeros(len(uniques_K)).index_add(0, inverse_N, torch.ones(len(groups_N)))
    first_K = torch.zeros(len(uniques_K), dtype=torch.long).scatter_reduce(
        0, inverse_N, rows_N, "amin", include_self=False
    )
    first_N = first_K[inverse_N]
    agrees_NT = (tokens_NT == tokens_NT[first_N]) & (mask_NT == mask_NT[first_N])
    agreeing_KT = zeros_KT.index_add(0, inverse_N, agrees_NT.float())
    common_KT = ((agreeing_KT == size_K[:, None]).cumprod(1) > 0) & mask_NT[first_K] & (size_K > 1)[:, None]
    net_KT = zeros_KT.index_add(0, inverse_N, coefficients_NT).abs()
    gross_KT = zeros_KT.index_add(0, inverse_N, coefficients_NT.abs())
    gross = gross_KT[common_KT].sum()
    return float(net_KT[common_KT].sum() / gross) if gross > 0 else 0.0


def sign_flip_rate(contrast_NT: Tensor, tokens_NT: Tensor, mask_NT: Tensor, correct_N: Tensor) -> float:
    """Share of vocabulary tokens whose mean contrast in correct completions has the opposite sign in wrong ones.

    Over the tokens that are seen in both. contrast is logp - logp_negative; a rate near 0 means that it follows the
    surface form and not the outcome (after arXiv:2607.27888).
    """
    tokens = tokens_NT[mask_NT]
    contrast, correct = contrast_NT[mask_NT], correct_N[:, None].expand_as(mask_NT)[mask_NT]
    zeros_V = contrast.new_zeros(int(tokens.max()) + 1)

    def sums(values: Tensor) -> Tensor:
        return zeros_V.index_add(0, tokens, values)

    both_V = (sums(correct.float()) > 0) & (sums((~correct).float()) > 0)
    # a mean has the sign of its sum
    flipped_V = sums(contrast * correct).sign() * sums(contrast * ~correct).sign() < 0
    return _mean(flipped_V.float(), both_V)


def step_diagnostics(
    rows: Sequence[Trajectory],
    batch: Batch,
    values: Mapping[str, Any],
    weights_NT: Tensor,
    advantages_N: Tensor,
    *,
    method: str,
    options: Mapping[str, Any],
    sharpening: float,
    correct: float,
    version: int | None,
) -> dict[str, float]:
    """Every figure that a step's batch and signals allow.

    rows: the trajectories in the batch's order. weights_NT: the method's, before a quadrant mask. correct: a reward of
    at least this counts as correct. version: the current adapter version, or None.
    """
    mask_NT = batch.mask
    signals = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    stopped_N = torch.tensor([row.finish == "stop" for row in rows])
    return {
        **{f"credit/{key}": value for key, value in diagnostics(weights_NT, mask_NT).items()},
        **_sharpened(method, options, sharpening, batch, signals, advantages_N),
        **_location(batch, weights_NT, signals.get("entropy"), stopped_N),
        **_other_methods(method, signals, mask_NT, sharpening),
        **_quadrants(batch, weights_NT, signals.get("entropy"), advantages_N),
        **_contrast(batch, signals, batch.rewards >= correct),
        **_policy(batch, signals),
        **_staleness(rows, version),
        "credit/cancellation_residue": cancellation_residue(batch.advantages, batch.tokens, mask_NT, batch.groups),
        "groups/no_signal": _groups_without_signal(advantages_N, batch.groups),
    }


def _sharpened(
    method: str,
    options: Mapping[str, Any],
    sharpening: float,
    batch: Batch,
    signals: Mapping[str, Tensor],
    advantages_N: Tensor,
) -> dict[str, float]:
    """The same method under both published powers: a Gini means little without its p."""
    out = {"credit/sharpening": float(sharpening)}
    if method not in SELF_NORMALISED:
        for p in (1, 2):
            m_NT = weights(
                method, signals, batch.mask, sharpening=p, advantages=advantages_N, groups=batch.groups, **options
            )
            out[f"credit/gini_p{p}"] = diagnostics(m_NT, batch.mask)["gini"]
    return out


def _location(batch: Batch, weights_NT: Tensor, entropy_NT: Tensor | None, stopped_N: Tensor) -> dict[str, float]:
    mask_NT, total_N = batch.mask, weights_NT.sum(1)
    order_NT = mask_NT.cumsum(1)
    share_NT = weights_NT / total_N[:, None]
    first_N = torch.where(mask_NT & (order_NT == 1), share_NT, 0.0).sum(1)
    last_N = torch.where(mask_NT & (order_NT == order_NT[:, -1:]), share_NT, 0.0).sum(1)
    count_V = batch.tokens[mask_NT].bincount(minlength=int(batch.tokens.max()) + 1)
    frequent_V = torch.zeros(len(count_V), dtype=torch.bool)
    frequent_V[count_V.argsort(descending=True, stable=True)[:FREQUENT]] = True
    template_N = torch.where(mask_NT & frequent_V[batch.tokens], share_NT, 0.0).sum(1)
    ranks_NT = average_ranks(weights_NT, mask_NT)
    out = {
        "credit/position_spearman": rank_correlation(ranks_NT, order_NT.float(), mask_NT),
        "credit/first_token_share": _mean(first_N, total_N > 0),
        "credit/eos_share": _mean(last_N, (total_N > 0) & stopped_N),
        "credit/template_share": _mean(template_N, total_N > 0),
    }
    if entropy_NT is not None:
        out["credit/entropy_spearman"] = rank_correlation(ranks_NT, average_ranks(entropy_NT, mask_NT), mask_NT)
    return out


def _other_methods(used: str, signals: Mapping[str, Tensor], mask_NT: Tensor, sharpening: float) -> dict[str, float]:
    out = {}
    for name in (*WEIGHTS, "gcpo"):
        if name != used and needs(name) <= set(signals):
            m_NT = METHODS[name](mask_NT, **{signal: signals[signal] for signal in needs(name)})
            figures = diagnostics(normalise(m_NT, mask_NT, sharpening) if name in WEIGHTS else m_NT, mask_NT)
            for key in ("gini", "effective_token_ratio"):
                out[f"credit_other/{name}/{key}"] = figures[key]
    return out


def _quadrants(batch: Batch, weights_NT: Tensor, entropy_NT: Tensor | None, advantages_N: Tensor) -> dict[str, float]:
    """Share of the tokens of completions with an advantage, and of sum |A_{i,t}|, in each quadrant."""
    if entropy_NT is None:
        return {}
    parts = quadrants(entropy_NT, advantages_N, batch.groups, batch.mask)
    count = max(sum(int(part.sum()) for part in parts), 1)
    mass = [float((part * weights_NT * advantages_N.abs()[:, None]).sum()) for part in parts]
    out = {}
    for name, part, part_mass in zip(QUADRANTS, parts, mass, strict=True):
        out[f"quadrant/{name.lower()}_tokens"] = int(part.sum()) / count
        out[f"quadrant/{name.lower()}_mass"] = part_mass / sum(mass) if sum(mass) else 0.0
    return out


def _contrast(batch: Batch, signals: Mapping[str, Tensor], correct_N: Tensor) -> dict[str, float]:
    if "logp_negative" not in signals:
        return {}
    logp, logp_negative = batch.logp_old, signals["logp_negative"]
    return {
        "credit/sign_flip_rate": sign_flip_rate(logp - logp_negative, batch.tokens, batch.mask, correct_N),
        "credit/gcpo_capped_share": capped_share(batch.mask, logp=logp, logp_negative=logp_negative),
    }


def _policy(batch: Batch, signals: Mapping[str, Tensor]) -> dict[str, float]:
    """Means over the step's tokens. Both KL are the k3 estimator, from samples of the first distribution."""
    mask_NT = batch.mask
    log_ratio = (batch.logp_old - batch.logp_rollout)[mask_NT]
    out = {
        "mismatch/kl": float((log_ratio.expm1() - log_ratio).mean()),  # KL(sampler || trainer)
        "mismatch/ratio_mean": float(log_ratio.exp().mean()),
    }
    if "entropy" in signals:
        out["policy/entropy"] = float(signals["entropy"][mask_NT].mean())
    if "logp_base" in signals:
        log_ratio = (signals["logp_base"] - batch.logp_old)[mask_NT]
        out["policy/kl_base"] = float((log_ratio.expm1() - log_ratio).mean())  # KL(policy || base)
    if "residual" in signals:
        residual = signals["residual"][mask_NT]
        out |= {"residual/mean": float(residual.mean()), "residual/max": float(residual.max())}
    if "residual_noise" in signals:
        out["residual/noise_floor"] = float(signals["residual_noise"][mask_NT].mean())
    return out


def _staleness(rows: Sequence[Trajectory], version: int | None) -> dict[str, float]:
    """Histogram of how many versions old the trajectories are, in shares."""
    if version is None:
        return {}
    ages = Counter(version - row.version for row in rows)
    return {f"staleness/share_{age}": count / len(rows) for age, count in sorted(ages.items())}


def _groups_without_signal(advantages_N: Tensor, groups_N: Tensor) -> float:
    uniques_K, inverse_N = groups_N.unique(return_inverse=True)
    mass_K = torch.zeros(len(uniques_K)).index_add(0, inverse_N, advantages_N.abs())
    return float((mass_K == 0).float().mean())


def _mean(values_N: Tensor, defined_N: Tensor) -> float:
    return float(values_N[defined_N].mean()) if defined_N.any() else 0.0
