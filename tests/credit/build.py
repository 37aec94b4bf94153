"""Batches for the tests, from lists of different lengths."""

import numpy as np
import torch
from hypothesis import strategies as st

from credit import Signals, Trajectory

PROMPT = [5, 6]


def padded(rows, prompt=0, extra=0, fill=0.0):
    """Lists -> ([N, T] values, [N, T] mask), `prompt` positions before each and at least `extra` after."""
    width = prompt + max(map(len, rows)) + extra
    values = torch.full((len(rows), width), fill)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        values[i, prompt : prompt + len(row)] = torch.tensor(row, dtype=torch.float32)
        mask[i, prompt : prompt + len(row)] = True
    return values, mask


def unpadded(values, mask):
    return [row[keep].tolist() for row, keep in zip(values, mask, strict=True)]


def trajectory(group, index, completion, reward, *, logprobs=None, version=0, finish="stop") -> Trajectory:
    mask = np.array([False] * len(PROMPT) + [True] * len(completion))
    values = np.zeros(len(mask), dtype=np.float32)
    values[mask] = -1.0 if logprobs is None else logprobs
    return Trajectory(
        group=group,
        index=index,
        tokens=np.array(PROMPT + list(completion)),
        mask=mask,
        logprobs=values,
        text="",
        finish=finish,
        version=version,
        digest="",
        reward=reward,
    )


def signals(**rows) -> Signals:
    """Completion values -> [T] with zeros on the prompt."""
    return {name: np.array([0.0] * len(PROMPT) + list(row), dtype=np.float32) for name, row in rows.items()}


def random_step(seed=0, groups=4, size=4, longest=12, vocabulary=9):
    """Trajectories and signals of every kind."""
    rng = np.random.default_rng(seed)
    trajectories, all_signals = [], []
    for group in range(groups):
        for index in range(size):
            n = int(rng.integers(1, longest + 1))
            trajectories.append(
                trajectory(
                    group,
                    index,
                    rng.integers(1, vocabulary, n).tolist(),
                    float(rng.integers(0, 2)) if group else 1.0,
                    logprobs=-rng.exponential(1, n),
                    version=int(rng.integers(0, 3)),
                    finish=str(rng.choice(["stop", "length"])),
                )
            )
            row = {name: -rng.exponential(1, n) for name in ("logp", "logp_base", "logp_negative")}
            row |= {name: rng.exponential(1, n) for name in ("entropy", "residual", "kl_negative")}
            mine = signals(**row)
            feature = rng.normal(size=(n + len(PROMPT), 5)).astype(np.float32)
            all_signals.append(mine | {"delta_feature": feature})
    return trajectories, all_signals


# multiples of 1/8: many ties, and no two numbers that differ by less than float32 resolves
eighths = st.integers(0, 40).map(lambda i: i / 8)
completions = st.lists(st.lists(eighths, min_size=1, max_size=12), min_size=1, max_size=5)
