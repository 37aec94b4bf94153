"""Losses against hand-worked numbers and against an implementation in plain Python, row by row."""

import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from configs.schema import LossConfig
from credit.trajectory import Batch
from learner.loss import LOSSES, policy_loss, row_scale


def rows(seed: int, groups: int = 2, size: int = 3, width: int = 6) -> dict[str, Tensor]:
    """Random rows with prompts, padding and one advantage per row, spread over its tokens."""
    random = torch.Generator().manual_seed(seed)
    count = groups * size
    first = torch.randint(1, 3, (count, 1), generator=random)
    last = torch.randint(3, width + 1, (count, 1), generator=random)
    position = torch.arange(width)[None]
    mask = (position >= first) & (position < last)
    noise = torch.randn(4, count, width, generator=random)
    logp_old = -1 - noise[0].abs()
    return {
        "logp_BT": (logp_old + 0.5 * noise[1]) * mask,
        "entropy_BT": noise[2].abs() * mask,
        "logp_old_BT": logp_old * mask,
        "logp_rollout_BT": (logp_old + 0.7 * noise[2]) * mask,
        "logp_base_BT": (logp_old + 0.3 * noise[3]) * mask,
        "advantages_BT": torch.randn(count, 1, generator=random) * (1 + 0.5 * noise[3].tanh()) * mask,
        "mask_BT": mask,
        "groups_B": torch.arange(groups).repeat_interleave(size),
    }


def gradient(data: dict[str, Tensor], scale_B: Tensor, config: LossConfig) -> tuple[float, Tensor]:
    """The loss and d loss / d logp."""
    logp_BT = data["logp_BT"].clone().requires_grad_()
    loss, _ = policy_loss(logp_BT, data["entropy_BT"], as_batch(data), scale_B, config)
    loss.backward()
    assert logp_BT.grad is not None
    return loss.item(), logp_BT.grad


def as_batch(data: dict[str, Tensor]) -> Batch:
    return Batch(
        tokens=torch.zeros_like(data["mask_BT"], dtype=torch.int64),
        lengths=torch.full_like(data["groups_B"], data["mask_BT"].shape[1]),
        mask=data["mask_BT"],
        advantages=data["advantages_BT"],
        logp_old=data["logp_old_BT"],
        logp_rollout=data["logp_rollout_BT"],
        logp_base=data["logp_base_BT"],
        groups=data["groups_B"],
        rewards=torch.zeros(len(data["groups_B"])),
    )


def plain(data: dict[str, Tensor], config: LossConfig, max_new_tokens: int) -> tuple[float, list[list[float]]]:
    """Loss and gradient from the formulas, in Python floats."""
    values = {name: tensor.tolist() for name, tensor in data.items()}
    indices = [[t for t, kept in enumerate(row) if kept] for row in values["mask_BT"]]
    total, count = sum(map(len, indices)), len(indices)
    sequence_ratio, row_advantage = [], []
    for i, tokens in enumerate(indices):
        logs = [values["logp_BT"][i][t] - values["logp_old_BT"][i][t] for t in tokens]
        sequence_ratio.append(math.exp(sum(logs) / len(logs)))
        row_advantage.append(sum(values["advantages_BT"][i][t] for t in tokens) / len(tokens))
    loss, slopes = 0.0, [[0.0] * len(row) for row in values["mask_BT"]]
    for i, tokens in enumerate(indices):
        scale = {"token": 1 / total, "sequence": 1 / count / len(tokens), "constant": 1 / count / max_new_tokens}
        gaps = {t: values["logp_old_BT"][i][t] - values["logp_rollout_BT"][i][t] for t in tokens}
        for t in tokens:
            log_weight = {"off": 0.0, "token": gaps[t], "sequence": sum(gaps.values())}[config.mismatch]
            weight = min(math.exp(log_weight), config.mismatch_cap) if config.mismatch != "off" else 1.0
            siblings = [j for j, group in enumerate(values["groups_B"]) if group == values["groups_B"][i]]
            objective, slope = plain_token(
                config,
                values["logp_BT"][i][t],
                values["logp_old_BT"][i][t],
                values["advantages_BT"][i][t],
                sequence_ratio[i],
                ([sequence_ratio[j] for j in siblings], [row_advantage[j] for j in siblings], siblings.index(i)),
            )
            gap = values["logp_base_BT"][i][t] - values["logp_BT"][i][t]
            kl = math.exp(gap) - gap - 1
            entropy = values["entropy_BT"][i][t]
            loss += scale[config.aggregation] * (
                -weight * objective + config.kl_beta * kl - config.entropy_bonus * entropy
            )
            slopes[i][t] = scale[config.aggregation] * (-weight * slope + config.kl_beta * (1 - math.exp(gap)))
    return loss, slopes


def plain_token(
    config: LossConfig, logp: float, old: float, advantage: float, sequence: float, group: Any
) -> tuple[float, float]:
    """The surrogate of one token and its derivative by the token's log-prob."""
    ratio = math.exp(logp - old)
    low, high = 1 - config.clip_low, 1 + config.clip_high
    if config.name == "policy_gradient":
        return advantage * logp, advantage
    if config.name == "cispo":
        clipped = min(max(ratio, low), high)
        return clipped * advantage * logp, clipped * advantage
    if config.name == "symmetric_clip":
        return (ratio * advantage, ratio * advantage) if low <= ratio <= high else (0.0, 0.0)
    if config.name == "dfpo":
        weights, advantages, own = group

        def project(values: list[float]) -> list[float]:
            along = sum(a * w for a, w in zip(advantages, values, strict=True)) / sum(a * a for a in advantages)
            return [w - along * a for a, w in zip(advantages, values, strict=True)]

        coupled = [min(weights)] * len(weights)
        if config.variant == "orthogonal":
            coupled = project([max(w, 0.0) for w in project(weights)])
        return coupled[own] * advantage * logp, coupled[own] * advantage
    if config.name == "gspo":
        ratio = sequence
    if advantage >= 0:
        return (ratio * advantage, ratio * advantage) if ratio <= high else (high * advantage, 0.0)
    if ratio < low:
        return low * advantage, 0.0
    if config.dual_clip is not None and ratio > config.dual_clip:
        return config.dual_clip * advantage, 0.0
    return ratio * advantage, ratio * advantage


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("mismatch", ["off", "token", "sequence"])
@pytest.mark.parametrize("name", [*LOSSES, "dfpo/orthogonal", "ppo_clip/dual"])
def test_every_loss_and_its_gradient_follow_the_formulas(name: str, mismatch: Any, aggregation: Any) -> None:
    name, _, option = name.partition("/")
    config = LossConfig(
        name=name,
        variant="orthogonal" if option == "orthogonal" else "min_replace",
        dual_clip=1.3 if option == "dual" else None,
        mismatch=mismatch,
        aggregation=aggregation,
        mismatch_cap=1.5,
        kl_beta=0.1,
        entropy_bonus=0.05,
    )
    for seed in range(3):
        data = rows(seed)
        loss, slopes = gradient(data, row_scale(data["mask_BT"], aggregation, 7), config)
        expected_loss, expected_slopes = plain(data, config, max_new_tokens=7)
        assert loss == pytest.approx(expected_loss, rel=1e-4, abs=1e-6)
        torch.testing.assert_close(slopes, torch.tensor(expected_slopes), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "ratio", "net"),
    [
        ("ppo_clip", 1.0, 0.0),
        ("ppo_clip", 0.7, 0.35),
        ("ppo_clip", 1.4, -0.70),
        ("symmetric_clip", 1.0, 0.0),
        ("symmetric_clip", 0.7, 0.0),
        ("symmetric_clip", 1.4, 0.0),
    ],
)
def test_the_net_coefficient_of_a_shared_token_is_the_published_one(name: str, ratio: float, net: float) -> None:
    """A = (+1, -1) on the same token. At .7 only A = +1 keeps its .7, at 1.4 only A = -1 its -1.4; each counts 1/2."""
    mask = torch.tensor([[False, True]] * 2)
    zeros = torch.zeros(2, 2)
    data = {
        "logp_BT": torch.log(torch.tensor([[1.0, ratio]] * 2)),
        "entropy_BT": zeros,
        "logp_old_BT": zeros,
        "logp_rollout_BT": zeros,
        "logp_base_BT": zeros,
        "advantages_BT": torch.tensor([[0.0, 1.0], [0.0, -1.0]]),
        "mask_BT": mask,
        "groups_B": torch.zeros(2, dtype=torch.int64),
    }
    _, slopes = gradient(data, row_scale(mask, "token", 1), LossConfig(name=name, clip_low=0.2, clip_high=0.28))
    assert -slopes[:, 1].sum().item() == pytest.approx(net, abs=1e-6)


@pytest.mark.parametrize("variant", ["min_replace", "orthogonal"])
def test_on_policy_dfpo_is_grpo(variant: Any) -> None:
    data = rows(5)
    advantage_B = torch.tensor([1.0, -0.25, -0.75, 0.5, 0.5, -1.0])  # each group sums to 0
    data |= {"logp_BT": data["logp_old_BT"], "advantages_BT": advantage_B[:, None] * data["mask_BT"]}
    scale_B = row_scale(data["mask_BT"], "token", 1)
    _, dfpo = gradient(data, scale_B, LossConfig(name="dfpo", variant=variant))
    _, grpo = gradient(data, scale_B, LossConfig(name="ppo_clip"))
    torch.testing.assert_close(dfpo, grpo, rtol=1e-5, atol=1e-7)


@given(seed=st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_the_weights_of_dfpo_cancel_on_tokens_that_a_group_shares(seed: int) -> None:
    """Sum A_i w~_i = 0 over a group whose advantages sum to zero, for any ratios."""
    data = rows(seed)
    advantage_B = torch.randn(6, generator=torch.Generator().manual_seed(seed))
    advantage_B = (advantage_B.view(2, 3) - advantage_B.view(2, 3).mean(1, keepdim=True)).flatten()
    data["advantages_BT"] = advantage_B[:, None] * data["mask_BT"]
    for variant in ("min_replace", "orthogonal"):
        config = LossConfig(name="dfpo", variant=variant, mismatch="off")
        _, slopes = gradient(data, torch.ones(6), config)
        first = data["mask_BT"].int().argmax(1)
        assert slopes[torch.arange(6), first].view(2, 3).sum(1).abs().max() < 1e-4


@given(seed=st.integers(0, 10_000), name=st.sampled_from(sorted(LOSSES)), cut=st.integers(1, 2))
@settings(max_examples=40, deadline=None)
def test_the_whole_batch_equals_its_micro_batches(seed: int, name: str, cut: int) -> None:
    """Split between groups, which is where the rows of `dfpo` may be split."""
    data = rows(seed, groups=3)
    config = LossConfig(name=name, kl_beta=0.1, entropy_bonus=0.1)
    for aggregation in ("token", "sequence", "constant"):
        scale_B = row_scale(data["mask_BT"], aggregation, 9)
        whole, slopes = gradient(data, scale_B, config)
        parts = [slice(0, 3 * cut), slice(3 * cut, 9)]
        halves = [gradient({k: v[part] for k, v in data.items()}, scale_B[part], config) for part in parts]
        assert sum(loss for loss, _ in halves) == pytest.approx(whole, rel=1e-4, abs=1e-6)
        torch.testing.assert_close(torch.cat([slope for _, slope in halves]), slopes)


@pytest.mark.parametrize("name", LOSSES)
def test_nan_under_the_mask_and_wider_padding_change_nothing(name: str) -> None:
    data = rows(1)
    config = LossConfig(name=name, kl_beta=0.1, entropy_bonus=0.1)
    scale_B = row_scale(data["mask_BT"], "token", 1)
    loss, slopes = gradient(data, scale_B, config)
    hidden = ~data["mask_BT"]
    broken = {
        key: torch.nn.functional.pad(value.masked_fill(hidden, math.nan), (0, 3), value=math.nan)
        for key, value in data.items()
        if value.is_floating_point()
    }
    mask_BT = torch.nn.functional.pad(data["mask_BT"], (0, 3))
    broken_loss, broken_slopes = gradient({**data, **broken, "mask_BT": mask_BT}, scale_B, config)
    assert broken_loss == pytest.approx(loss, rel=1e-6)  # a wider row is summed in another order
    assert torch.equal(broken_slopes[:, :-3], slopes)
    assert not broken_slopes[:, -3:].any()


def test_metrics_count_clipped_and_truncated_tokens() -> None:
    """One token each: r = 1.5 with A = 1 is clipped, r = 1.5 with A = -1 is not; the second is truncated (e > 2)."""
    zeros = torch.zeros(2, 1)
    data = {
        "logp_old_BT": zeros,
        "logp_rollout_BT": torch.tensor([[0.0], [-1.0]]),
        "logp_base_BT": zeros,
        "advantages_BT": torch.tensor([[1.0], [-1.0]]),
        "mask_BT": torch.ones(2, 1, dtype=torch.bool),
        "groups_B": torch.zeros(2, dtype=torch.int64),
    }
    logp_BT = torch.log(torch.full((2, 1), 1.5))
    _, metrics = policy_loss(logp_BT, zeros, as_batch(data), torch.full((2,), 0.5), LossConfig())
    counts = {name: round(value.item(), 4) for name, value in metrics.items()}
    assert counts == {
        "tokens": 2,
        "ratio": 3.0,
        "positive": 1,
        "negative": 1,
        "clipped_positive": 1,
        "clipped_negative": 0,
        "mismatch_truncated": 1,
        "mismatch_ratio": round(1 + math.e, 4),
        "mismatch_kl": -1.0,
        "entropy": 0.0,
        "loss": 0.86,  # (-1.28 + 2 * 1.5) / 2
    }


def test_an_aggregation_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match="got 'mean', expected token, sequence or constant"):
        row_scale(torch.ones(1, 1, dtype=torch.bool), "mean", 1)


def test_the_configuration_offers_what_the_losses_take() -> None:
    assert LossConfig().name in LOSSES
    for aggregation in get_args(LossConfig.model_fields["aggregation"].annotation):
        assert row_scale(torch.ones(2, 2, dtype=torch.bool), aggregation, 4).isfinite().all()
