"""Sorting within a completion. NumPy's vectorised sort is an order of magnitude faster here than torch's on a CPU."""

import numpy as np
import torch
from torch import Tensor


def ascending(values_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """The masked values of each row in ascending order, then +inf. [N, T]"""
    return torch.from_numpy(np.sort(values_NT.masked_fill(~mask_NT, torch.inf).numpy(), axis=1))


def average_ranks(values_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """Ascending rank 1..n among each row's masked values, ties sharing their average. [N, T] float32, 0 outside."""
    values = values_NT.masked_fill(~mask_NT, torch.inf).numpy()
    order = np.argsort(values, axis=1)
    values = np.take_along_axis(values, order, axis=1)
    last = np.ones(values.shape, dtype=bool)  # of a run of ties
    last[:, :-1] = values[:, 1:] != values[:, :-1]
    first = np.ones_like(last)
    first[:, 1:] = last[:, :-1]
    i_T = np.arange(values.shape[1], dtype=np.int32)
    start = np.maximum.accumulate(np.where(first, i_T, 0), axis=1)
    end = np.minimum.accumulate(np.where(last, i_T, len(i_T))[:, ::-1], axis=1)[:, ::-1]
    ranks = np.empty_like(values)
    np.put_along_axis(ranks, order, ((start + end) * 0.5 + 1).astype(np.float32), axis=1)
    return torch.from_numpy(ranks).masked_fill(~mask_NT, 0.0)
