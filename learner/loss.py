"""Policy losses over the per-token advantages of a step.

A surrogate says what one token contributes; `policy_loss` corrects it for the sampler-trainer mismatch, adds the KL and
entropy terms and sums over tokens. `row_scale` is the only denominator and is taken over the whole optimiser step, so
splitting a step over micro-batches and ranks cannot change its gradient.

Dimensions: B rows (sequences), T positions. Values are aligned with tokens and read only where the mask is True.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from configs.schema import LossConfig
from credit.trajectory import Batch

Surrogate = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, LossConfig], tuple[Tensor, Tensor]]
"""(logp_BT, logp_old_BT, advantages_BT, mask_BT, groups_B, config) -> objective_BT to maximise, clipped_BT (bool).

The inputs are 0 where the mask is False."""


def ppo_clip(
    logp_BT: Tensor, logp_old_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, groups_B: Tensor, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """min(r A, clip(r, 1 - low, 1 + high) A) (arXiv:1707.06347; asymmetric bounds arXiv:2503.14476).

    `dual_clip` c bounds the objective of negative advantages by c A (arXiv:1912.09729). [B, T] -> [B, T], [B, T]
    """
    ratio_BT = torch.exp(logp_BT - logp_old_BT)
    return _clip(ratio_BT, advantages_BT, config.clip_low, config.clip_high, config.dual_clip)


def policy_gradient(
    logp_BT: Tensor, logp_old_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, groups_B: Tensor, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """A log pi: REINFORCE, as the code of ARCA (arXiv:2606.00257) trains it: no ratio, no clip. [B, T] -> [B, T] x 2"""
    return advantages_BT * logp_BT, torch.zeros_like(mask_BT)


def gspo(
    logp_BT: Tensor, logp_old_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, groups_B: Tensor, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """The ratio of the sequence, s = exp(mean log r), clipped (arXiv:2507.18071).

    In the paper's token form (GSPO-token), which takes an advantage per token and has the same gradient when a row has
    only one. The paper's bounds are near 3e-4. [B, T] -> [B, T], [B, T]
    """
    sequence_B = torch.exp(_row_mean(logp_BT - logp_old_BT, mask_BT)).detach()
    ratio_BT = sequence_B[:, None] * torch.exp(logp_BT - logp_BT.detach())
    return _clip(ratio_BT, advantages_BT, config.clip_low, config.clip_high, config.dual_clip)


def cispo(
    logp_BT: Tensor, logp_old_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, groups_B: Tensor, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """sg(clip(r)) A log pi: the weight is clipped and every token keeps a gradient (arXiv:2506.13585).

    [B, T] -> [B, T], [B, T]
    """
    ratio_BT = torch.exp(logp_BT - logp_old_BT).detach()
    clipped_BT = ratio_BT.clamp(1 - config.clip_low, 1 + config.clip_high)
    return clipped_BT * advantages_BT * logp_BT, clipped_BT != ratio_BT


def symmetric_clip(
    logp_BT: Tensor, logp_old_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, groups_B: Tensor, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """r A where 1 - low <= r <= 1 + high and nothing elsewhere, whatever the sign of A ("GRPO-fix", arXiv:2604.13088).

    Tokens that a whole group shares then cancel, which they do not when clipping depends on the sign.
    [B, T] -> [B, T], [B, T]
    """
    ratio_BT = torch.exp(logp_BT - logp_old_BT)
    outside_BT = (ratio_BT < 1 - config.clip_low) | (ratio_BT > 1 + config.clip_high)
    return torch.where(outside_BT, 0.0, ratio_BT * advantages_BT), outside_BT


def dfpo(
    logp_BT: Tensor, logp_old_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, groups_B: Tensor, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """A sg(w~) log pi, unclipped, with group-coupled weights that let shared tokens cancel (arXiv:2604.13088 v1).

    w is the length-normalised sequence ratio; the advantage of a row is its mean over the row's tokens. `min_replace`:
    w~ = the smallest w of the group. `orthogonal`: w without its part along the group's advantages, clamped at 0 and
    projected again. Rows of one group must come together. On-policy both are GRPO. [B, T] -> [B, T], [B, T]
    """
    weight_B = torch.exp(_row_mean(logp_BT - logp_old_BT, mask_BT)).detach()
    advantage_B = _row_mean(advantages_BT, mask_BT)
    coupled_B = torch.empty_like(weight_B)
    for group in groups_B.unique():
        rows_B = groups_B == group
        weight_G, advantage_G = weight_B[rows_B], advantage_B[rows_B]
        if config.variant == "min_replace":
            coupled_B[rows_B] = weight_G.min()
        else:
            coupled_B[rows_B] = _orthogonal(_orthogonal(weight_G, advantage_G).clamp(min=0), advantage_G)
    return coupled_B[:, None] * advantages_BT * logp_BT, torch.zeros_like(mask_BT)


LOSSES: dict[str, Surrogate] = {
    "ppo_clip": ppo_clip,
    "policy_gradient": policy_gradient,
    "gspo": gspo,
    "cispo": cispo,
    "symmetric_clip": symmetric_clip,
    "dfpo": dfpo,
}


def row_scale(mask_NT: Tensor, aggregation: str, max_new_tokens: int) -> Tensor:
    """What one token of each row counts in the loss of an optimiser step whose rows are all given here. [N, T] -> [N]

    `token`: 1 / tokens of the step. `sequence`: 1 / (N T_i), the mean of per-sequence means. `constant`:
    1 / (N max_new_tokens) (Dr. GRPO, arXiv:2503.20783).
    """
    tokens_N = mask_NT.sum(1).float()
    ones_N, rows = torch.ones_like(tokens_N), len(tokens_N)
    match aggregation:
        case "token":
            return ones_N / tokens_N.sum()
        case "sequence":
            return ones_N / (rows * tokens_N)
        case "constant":
            return ones_N / (rows * max_new_tokens)
    raise ValueError(f"loss.aggregation: got {aggregation!r}, expected token, sequence or constant")


def mismatch_weight(logp_old_BT: Tensor, logp_rollout_BT: Tensor, mode: str, cap: float) -> tuple[Tensor, Tensor]:
    """min(pi_trainer / pi_sampler, cap), truncated importance weights of the sampler-trainer mismatch.

    `token` takes each token's own ratio, `sequence` the product over the row, `off` 1. Returns the weights [B, T] and
    where they were truncated [B, T].
    """
    log_ratio_BT = logp_old_BT - logp_rollout_BT
    if mode == "off":
        return torch.ones_like(log_ratio_BT), torch.zeros_like(log_ratio_BT, dtype=torch.bool)
    if mode == "sequence":
        log_ratio_BT = log_ratio_BT.sum(1, keepdim=True).expand_as(log_ratio_BT)
    ratio_BT = torch.exp(log_ratio_BT)
    return ratio_BT.clamp(max=cap), ratio_BT > cap


def policy_loss(
    logp_BT: Tensor, entropy_BT: Tensor, rows: Batch, scale_B: Tensor, config: LossConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of these rows and metrics, both of which add up over the micro-batches and ranks of a step.

    `logp_BT` and `entropy_BT` come from the policy in training, `scale_B` are the rows' entries of `row_scale`. KL to
    the base model (k3 estimator; needs `rows.logp_base` when `kl_beta` > 0) and entropy are not weighted by the
    advantage. Metrics are sums over tokens.
    """

    def clean(values_BT: Tensor) -> Tensor:
        return torch.where(rows.mask, values_BT, 0.0)

    rows = dataclasses.replace(
        rows,
        advantages=clean(rows.advantages),
        logp_old=clean(rows.logp_old),
        logp_rollout=clean(rows.logp_rollout),
        logp_base=None if rows.logp_base is None else clean(rows.logp_base),
    )
    logp_BT, entropy_BT = clean(logp_BT), clean(entropy_BT)
    objective_BT, clipped_BT = LOSSES[config.name](
        logp_BT, rows.logp_old, rows.advantages, rows.mask, rows.groups, config
    )
    weight_BT, truncated_BT = mismatch_weight(rows.logp_old, rows.logp_rollout, config.mismatch, config.mismatch_cap)
    loss_BT = -weight_BT * objective_BT - config.entropy_bonus * entropy_BT
    metrics = _metrics(logp_BT.detach(), rows, clipped_BT, truncated_BT) | {"entropy": entropy_BT.detach().sum()}
    if config.kl_beta:
        assert rows.logp_base is not None, "kl_beta > 0 needs logp_base"
        log_ratio_BT = rows.logp_base - logp_BT
        kl_BT = torch.exp(log_ratio_BT) - log_ratio_BT - 1
        loss_BT = loss_BT + config.kl_beta * kl_BT
        metrics["kl_base"] = kl_BT.detach().sum()
    loss = (loss_BT.sum(1) * scale_B).sum()
    return loss, metrics | {"loss": loss.detach()}


def _metrics(logp_BT: Tensor, rows: Batch, clipped_BT: Tensor, truncated_BT: Tensor) -> dict[str, Tensor]:
    mismatch_BT = rows.logp_old - rows.logp_rollout
    positive_BT, negative_BT = rows.advantages > 0, rows.advantages < 0
    sums = {
        "tokens": rows.mask,
        "ratio": torch.exp(logp_BT - rows.logp_old) * rows.mask,
        "positive": positive_BT,
        "negative": negative_BT,
        "clipped_positive": clipped_BT & positive_BT,
        "clipped_negative": clipped_BT & negative_BT,
        "mismatch_truncated": truncated_BT & rows.mask,
        "mismatch_ratio": torch.exp(mismatch_BT) * rows.mask,
        "mismatch_kl": -mismatch_BT,  # log(sampler / trainer) of the sampler's own tokens: the k1 estimator
    }
    return {name: values_BT.sum() for name, values_BT in sums.items()}


def _clip(
    ratio_BT: Tensor, advantages_BT: Tensor, low: float, high: float, dual_clip: float | None
) -> tuple[Tensor, Tensor]:
    plain_BT = ratio_BT * advantages_BT
    clipped_BT = ratio_BT.clamp(1 - low, 1 + high) * advantages_BT
    objective_BT = torch.minimum(plain_BT, clipped_BT)
    cut_BT = clipped_BT < plain_BT
    if dual_clip is not None:
        floor_BT = dual_clip * advantages_BT
        below_BT = (advantages_BT < 0) & (objective_BT < floor_BT)
        objective_BT, cut_BT = torch.where(below_BT, floor_BT, objective_BT), cut_BT | below_BT
    return objective_BT, cut_BT


def _row_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return values_BT.sum(1) / mask_BT.sum(1).clamp(min=1)


def _orthogonal(weight_G: Tensor, advantage_G: Tensor) -> Tensor:
    """`weight` without its component along `advantage`."""
    square = advantage_G.dot(advantage_G)
    return weight_G if square == 0 else weight_G - weight_G.dot(advantage_G) / square * advantage_G
