"""IBPO (arXiv:2605.16302): a wrong completion that its own policy can repair is worth more, and only there.

For each wrong completion the policy compares it with siblings and writes a correction. The share of successful
corrections shapes the reward; a successful correction also shows which tokens were wrong. The corrections are extra
rollouts: they are sampled and rewarded elsewhere, and never trained on. Everything here is pure.

Dimensions: N completions, T positions.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from credit.trajectory import Trajectory

PROMPT = """Here is a problem and two attempts at solving it. They may contain mistakes.

Problem:
{prompt}

First attempt:
{attempt}

Second attempt:
{reference}

Compare the two attempts, find where the first one goes wrong, and write a corrected version of the first attempt. \
Keep what is right in it. Answer with the corrected solution only, in the form that the problem asks for.
"""


class Revision(NamedTuple):
    """One correction of a completion."""

    tokens: np.ndarray  # [R] int64, the completion tokens of the correction
    correct: bool


Revisions = Mapping[tuple[int, int], Sequence[Revision]]
"""(group, index) of a wrong completion -> its corrections, one per reference."""


def ibpo(
    mask_NT: Tensor, *, changed_NT: Tensor, references: int = 3, rho: float = 0.5, strength: float = 0.6
) -> Tensor:
    """1 on the tokens that carry gradient, else 0 (arXiv:2605.16302). [N, T]

    references: siblings that each wrong completion is compared with, K - 1 in the paper; 0 is plain GRPO.
    rho: credit for one successful correction. strength: of the shaping, lambda in the paper.
    """
    if references < 0 or not 0 <= rho <= 1 or strength < 0:
        raise ValueError(
            f"ibpo: got references={references!r}, rho={rho!r}, strength={strength!r}, "
            "expected references >= 0, rho in [0, 1], strength >= 0"
        )
    return changed_NT.float() * mask_NT


def pairs(rewards: Sequence[float], *, references: int = 3, correct: float = 1.0) -> list[tuple[int, int]]:
    """Of one group: (wrong completion, sibling to compare it with); at most `references` each, correct ones first."""
    siblings = sorted(range(len(rewards)), key=lambda i: (rewards[i] < correct, i))
    return [
        (wrong, reference)
        for wrong in range(len(rewards))
        if rewards[wrong] < correct
        for reference in [i for i in siblings if i != wrong][:references]
    ]


def prompt(problem: str, attempt: str, reference: str) -> str:
    """The instruction to compare an attempt with a reference and to correct it."""
    return PROMPT.format(prompt=problem, attempt=attempt, reference=reference)


def revise(
    trajectories: Sequence[Trajectory],
    revisions: Revisions,
    *,
    correct: float = 1.0,
    references: int = 3,
    rho: float = 0.5,
    strength: float = 0.6,
) -> tuple[Tensor, list[np.ndarray]]:
    """Shaped rewards [N], and for each trajectory where its tokens carry gradient, [T] bool.

    R' = R + strength * s, s = rho * share of successful corrections, 0 for correct completions. Repaired completions
    carry gradient where the repair changed them, the others everywhere.
    """
    rewards, masks = [], []
    for trajectory in trajectories:
        mine = list(revisions.get((trajectory.group, trajectory.index), ()))[:references]
        reward, mask = trajectory.reward, trajectory.mask
        if mine and reward < correct:
            reward += strength * rho * sum(revision.correct for revision in mine) / len(mine)
            mask = mask.copy()
            mask[trajectory.mask] = changed(trajectory.tokens[trajectory.mask], mine)
        rewards.append(reward)
        masks.append(mask)
    return torch.tensor(rewards, dtype=torch.float32), masks


def changed(tokens: np.ndarray, revisions: Sequence[Revision]) -> np.ndarray:
    """The completion's tokens that its successful correction with the fewest edits changed. [T] bool

    All True when no correction succeeded. Where a correction only inserts tokens, the completion's next token is the
    one that was wrongly chosen instead; at the very end it is the last token.
    """
    alignments = [_edits(tokens, revision.tokens) for revision in revisions if revision.correct]
    if not alignments:
        return np.ones(len(tokens), dtype=bool)
    return min(alignments, key=lambda alignment: alignment[0])[1]


def _edits(a: np.ndarray, b: np.ndarray) -> tuple[int, np.ndarray]:
    """Levenshtein distance, and the tokens of `a` that one shortest alignment replaces, deletes or inserts before."""
    cost = np.empty((len(a) + 1, len(b) + 1), dtype=np.int32)
    columns = np.arange(len(b) + 1)
    cost[0] = columns
    for i in range(1, len(a) + 1):
        row = cost[i - 1] + 1
        row[1:] = np.minimum(row[1:], cost[i - 1, :-1] + (a[i - 1] != b))
        # a run of insertions costs one each: the running minimum of (cost - column) finds where it starts
        cost[i] = np.minimum.accumulate(row - columns) + columns
    touched = np.zeros(len(a), dtype=bool)
    i, j = len(a), len(b)
    while i or j:
        if i and j and cost[i, j] == cost[i - 1, j - 1] + (a[i - 1] != b[j - 1]):
            touched[i - 1] |= a[i - 1] != b[j - 1]
            i, j = i - 1, j - 1
        elif i and cost[i, j] == cost[i - 1, j] + 1:
            touched[i - 1] = True
            i -= 1
        else:
            touched[min(i, len(a) - 1)] = True
            j -= 1
    return int(cost[-1, -1]), touched
