"""Advantages of turns: each turn of an episode answers for what came after its beginning, not for what came before.

Dimensions: N episodes, T positions, M turns of all episodes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from credit.methods import advantages
from credit.trajectory import Trajectory


def turn_advantages(advantage: str, rows: Sequence[Trajectory], mask_NT: Tensor, **options: Any) -> Tensor:
    """The group advantage of each turn's reward-to-go, on the turn's tokens. [N, T], 0 outside the mask.

    A turn is compared with the turns of the same number in its group; one that no other episode reached gets 0. Raises
    ValueError for a trajectory without turns.
    """
    numbers, to_go, spans = [], [], []
    for i, row in enumerate(rows):
        if not row.turns:
            raise ValueError(f"credit.turns: trajectory {row.group}/{row.index} has no turns: it needs an environment")
        start, rest = 0, sum(turn.reward for turn in row.turns)
        for number, turn in enumerate(row.turns):
            numbers.append((row.group, number))
            to_go.append(rest)
            spans.append((i, start, turn.end + 1))
            start, rest = turn.end + 1, rest - turn.reward
    groups_M = torch.tensor(numbers).unique(dim=0, return_inverse=True)[1]
    advantages_M = advantages(advantage, torch.tensor(to_go, dtype=torch.float32), groups_M, **options)
    out_NT = torch.zeros(mask_NT.shape)
    for value, (i, start, end) in zip(advantages_M, spans, strict=True):
        out_NT[i, start:end] = value
    return out_NT * mask_NT
