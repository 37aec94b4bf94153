"""The join: the trajectories of a step and their signals become the batch that the learner trains on.

Dimensions: N trajectories, T positions.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from credit import ibpo
from credit.delta import Feature
from credit.diagnostics import step_diagnostics
from credit.eapo import quadrant_mask
from credit.methods import advantages, check_options, resolve, signal_of, weights
from credit.trajectory import Batch, Signals, Trajectory, pad
from credit.turns import turn_advantages


@torch.no_grad()
def assign(
    trajectories: Sequence[Trajectory],
    signals: Sequence[Signals],
    *,
    method: str = "uniform",
    advantage: str = "grpo",
    turns: bool = False,
    sharpening: float = 1.0,
    permute: bool = False,
    quadrant: str | None = None,
    options: Mapping[str, Any] | None = None,
    advantage_options: Mapping[str, Any] | None = None,
    seed: int = 0,
    delta: Feature | None = None,
    revisions: ibpo.Revisions | None = None,
    version: int | None = None,
    correct: float = 1.0,
) -> tuple[Batch, dict[str, float]]:
    """Turn one reward per trajectory into one advantage per token. Returns the batch and the step's diagnostics.

    Rows are sorted by (group, index), so the result does not depend, to the bit, on the order of arrival.
    signals: one per trajectory, [T] each (`delta_feature`: [T, H]); `logp` is required, the others as `needs` says, and
    every further one is measured. delta: for method `delta` when the features stay on their actors; its callables see
    [N, T] in the sorted order. turns: the weights spread each turn's own advantage (credit/turns.py); they are still
    those of the whole episode's. revisions: for method `ibpo`. version: the current adapter version, for the staleness.
    correct: a reward of at least this counts as correct. Raises ValueError for what cannot be assigned.
    """
    options = dict(options or {})
    check_options(method, resolve(method), options)
    rows, row_signals = _sorted(trajectories, signals)
    mask_NT = pad([row.mask for row in rows], torch.bool)
    values = _padded(rows, row_signals, mask_NT) | ({"delta_feature": delta} if delta else {})
    groups_N = torch.tensor([row.group for row in rows])
    rewards_N, changed_NT = _rewards(rows, method, revisions, correct, options)
    advantages_N = advantages(advantage, rewards_N, groups_N, **(advantage_options or {}))
    weights_NT = weights(
        method,
        values,
        mask_NT,
        sharpening=sharpening,
        permute=permute,
        seed=seed,
        keys=torch.tensor([(row.group, row.index) for row in rows]),
        advantages=advantages_N,
        groups=groups_N,
        changed=changed_NT,
        **options,
    )
    spread_NT = advantages_N[:, None]
    if turns:
        spread_NT = turn_advantages(advantage, rows, mask_NT, **(advantage_options or {}))
    trained_NT = mask_NT if quadrant is None else quadrant_mask(quadrant, values, advantages_N, groups_N, mask_NT)
    batch = _batch(rows, values, mask_NT, spread_NT * weights_NT * trained_NT)
    return batch, step_diagnostics(
        rows,
        batch,
        values,
        weights_NT,
        advantages_N,
        method=method,
        options=options,
        sharpening=sharpening,
        correct=correct,
        version=version,
    )


def _batch(rows: list[Trajectory], values: Mapping[str, Any], mask_NT: Tensor, advantages_NT: Tensor) -> Batch:
    return Batch(
        tokens=pad([row.tokens for row in rows], torch.int64),
        lengths=torch.tensor([len(row.tokens) for row in rows]),
        mask=mask_NT,
        advantages=advantages_NT,
        logp_old=values["logp"],
        logp_rollout=values["logprobs"],
        logp_base=values.get("logp_base"),
        groups=torch.tensor([row.group for row in rows]),
        rewards=torch.tensor([row.reward for row in rows], dtype=torch.float32),
    )


def _rewards(
    rows: list[Trajectory],
    method: str,
    revisions: ibpo.Revisions | None,
    correct: float,
    options: Mapping[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """The rewards that advantages are taken of [N]; for `ibpo` shaped, and with them where tokens carry gradient."""
    if method != "ibpo":
        return torch.tensor([row.reward for row in rows], dtype=torch.float32), None
    if revisions is None:
        raise ValueError(
            "credit.assign: method 'ibpo' needs revisions=, got None; an empty mapping says that none were sampled"
        )
    shaped_N, changed = ibpo.revise(rows, revisions, correct=correct, **options)
    return shaped_N, pad(changed, torch.bool)


def _sorted(trajectories: Sequence[Trajectory], signals: Sequence[Signals]) -> tuple[list[Trajectory], list[Signals]]:
    """Both in the order of (group, index)."""
    if not trajectories or len(trajectories) != len(signals):
        raise ValueError(
            f"credit.assign: got {len(trajectories)} trajectories and {len(signals)} signals, "
            "expected as many of one as of the other, and at least one"
        )
    order = sorted(range(len(trajectories)), key=lambda i: (trajectories[i].group, trajectories[i].index))
    rows, row_signals = [trajectories[i] for i in order], [signals[i] for i in order]
    key, count = Counter((row.group, row.index) for row in rows).most_common(1)[0]
    if count > 1:
        raise ValueError(f"credit.assign: trajectory {key[0]}/{key[1]} is there {count} times, expected once")
    return rows, row_signals


def _padded(rows: list[Trajectory], row_signals: list[Signals], mask_NT: Tensor) -> dict[str, Any]:
    """Every signal, and the sampler's log-probs as `logprobs`, padded, checked and 0 outside the mask."""
    labels = [f"trajectory {row.group}/{row.index}" for row in rows]
    names = {"logp"}.union(*row_signals)
    for label, row, mine in zip(labels, rows, row_signals, strict=True):
        for name in sorted(names):
            if name not in mine or len(mine[name]) != len(row.tokens):
                got = f"{len(mine[name])} values" if name in mine else "nothing"
                raise ValueError(f"signal {name!r}: got {got} for {label}, expected {len(row.tokens)} values")
    raw = {"logprobs": pad([row.logprobs for row in rows], torch.float32)}
    for name in names - {"delta_feature"}:
        raw[name] = pad([mine[name] for mine in row_signals], torch.float32)
    if "delta_feature" in names:
        features = [torch.as_tensor(mine["delta_feature"]).float() for mine in row_signals]
        raw["delta_feature"] = pad_sequence(features, batch_first=True)
    return {name: signal_of(raw, name, mask_NT, "credit.assign", labels) for name in sorted(raw)}
