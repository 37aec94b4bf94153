"""Splitting a step: optimiser updates of whole groups, and micro-batches balanced over the ranks.

Every rank makes the same plan from the same batch, so nothing is communicated.
"""

import dataclasses
import math

import torch
from torch import Tensor

from credit.trajectory import Batch

PER_ROW = ("lengths", "groups", "rewards")


def select(batch: Batch, rows: list[int], device: torch.device) -> Batch:
    """The given rows, cut to the longest of them; without rows, one row of padding, which trains nothing."""
    width = int(batch.lengths[rows].max()) if rows else 1

    def part(name: str) -> Tensor | None:
        values = getattr(batch, name)
        if values is None:
            return None
        if not rows:
            shape = (1,) if name in PER_ROW else (1, 1)
            return torch.full(shape, name == "lengths", dtype=values.dtype, device=device)
        return (values[rows] if name in PER_ROW else values[rows, :width]).to(device)

    return Batch(**{field.name: part(field.name) for field in dataclasses.fields(batch)})  # pyright: ignore


def updates(groups_N: Tensor, count: int) -> list[list[int]]:
    """Rows of each of `count` optimiser updates (fewer if groups are few): whole groups, in order, of even number."""
    parts = torch.tensor_split(groups_N.unique_consecutive(), count)
    return [torch.isin(groups_N, part).nonzero().squeeze(1).tolist() for part in parts if len(part)]


def units(batch: Batch, rows: list[int], *, whole_groups: bool, keep_all: bool) -> list[list[int]]:
    """The rows to compute, as units that must share a micro-batch: single rows, or all rows of a group.

    A unit without any advantage has no gradient and is left out, unless `keep_all` (terms that every row has).
    """
    advantages_NT = torch.where(batch.mask, batch.advantages, 0.0)
    has_gradient_N = (advantages_NT != 0).any(1).tolist()  # NaN != 0: a broken advantage must be seen, not dropped
    found: dict[int, list[int]] = {}
    for row in rows:
        found.setdefault(int(batch.groups[row]) if whole_groups else row, []).append(row)
    return [unit for unit in found.values() if keep_all or any(has_gradient_N[row] for row in unit)]


def micro_batches(
    units: list[list[int]], lengths_N: Tensor, *, budget: int, ranks: int, packing: bool
) -> list[list[list[int]]]:
    """[rank][micro-batch] -> rows: the same number for every rank, at most `budget` tokens unless one unit has more.

    Rows of similar length come together, and all micro-batches hold about the same number of tokens.
    """
    lengths = lengths_N.tolist()

    def cost(rows: list[int]) -> int:
        return sum(lengths[row] for row in rows) if packing else len(rows) * max(lengths[row] for row in rows)

    units = sorted(units, key=lambda unit: (-max(lengths[row] for row in unit), unit[0]))
    costs = [cost(unit) for unit in units]
    total = sum(costs)
    for count in range(ranks * max(1, math.ceil(total / (budget * ranks))), len(units) + ranks, ranks):
        bins: list[list[list[int]]] = [[] for _ in range(count)]
        done = 0
        for unit, size in zip(units, costs, strict=True):
            bins[int((done + size / 2) * count / total)].append(unit)
            done += size
        rows = [[row for unit in chosen for row in unit] for chosen in bins]
        if all(len(chosen) <= 1 or cost(flat) <= budget for chosen, flat in zip(bins, rows, strict=True)):
            return [rows[rank::ranks] for rank in range(ranks)]
    # one unit each, the last resort when large units keep falling together
    alone = units + [[]] * (-len(units) % ranks)
    return [alone[rank::ranks] for rank in range(ranks)]
