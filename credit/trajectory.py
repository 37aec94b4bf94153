"""The types that flow: Prompt -> Sample -> Trajectory -> Batch.

    Prompt ──rollout──▶ Sample ──reward──▶ Trajectory ──credit──▶ Batch ──▶ learner

Every per-token array covers the whole sequence (prompt and completion) and is aligned with `tokens`: the value at
position t belongs to token t, whichever position predicted it. Nothing downstream re-derives a mask or a log-prob.

Dimensions: N trajectories of a step, T positions (longest sequence of the step, or one sequence's own length).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Signals = dict[str, np.ndarray]
"""Per-token signals of one trajectory: name -> [T] float32, 0 where the mask is False."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """One prompt group to sample: G completions of the same prompt."""

    group: int  # position in the task's stream; identifies the group for ever
    tokens: list[int]  # [P] the rendered prompt
    seeds: list[int]  # [G] one sampling seed per completion
    prompt: Any  # as the task gave it (text or chat messages): what a reward function receives
    columns: dict[str, Any]  # the other columns of the task's row, for the reward
    policy: str = ""  # of a sweep: the run that asks, under whose adapters it is sampled


@dataclass(frozen=True, slots=True)
class Turn:
    """One completion within an episode, as the environment judged it."""

    end: int  # position of its last token
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One sampled completion, or the turns of one episode, under exactly one adapter version.

    Arrays have the same length T. In an episode, the mask has holes: what the environment said is False.
    """

    group: int
    index: int  # 0 .. G-1 within the group
    tokens: np.ndarray  # [T] int64, prompt + completion (+ observation + completion ...), EOS included
    mask: np.ndarray  # [T] bool, True where the policy sampled the token
    logprobs: np.ndarray  # [T] float32, the sampler's log-probs, 0 where mask is False
    text: str  # the completion as text, without special tokens; of an episode, all after the prompt
    finish: str  # "stop" (EOS or stop string; the environment was done) or "length" (a limit of tokens or turns)
    version: int  # the behaviour policy: adapter version ...
    digest: str  # ... and its content digest
    policy: str = ""  # of a sweep: the run whose adapter it is
    turns: tuple[Turn, ...] = ()  # of an episode; empty without an environment
    failure: str | None = None  # why the environment gave no reward

    def __post_init__(self) -> None:
        lengths = {name: len(getattr(self, name)) for name in ("tokens", "mask", "logprobs")}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"sample {self.group}/{self.index}: per-token lengths differ: {lengths}")
        if self.failure is None and (self.mask[0] or not self.mask.any()):
            raise ValueError(
                f"sample {self.group}/{self.index}: the mask must leave out the first token and keep at least one, "
                f"got {int(self.mask.sum())} of {len(self.mask)} tokens"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory(Sample):
    """A sample with its reward: what credit is assigned to."""

    reward: float

    @classmethod
    def of(cls, sample: Sample, reward: float) -> "Trajectory":
        fields = {name: getattr(sample, name) for name in Sample.__slots__}
        return cls(**fields, reward=reward)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """One step for the learner: tensors padded on the right, rows sorted by (group, index).

    Credit ends here: `advantages` is all that the learner knows about how the reward was spread over the tokens.
    """

    tokens: Tensor  # [N, T] int64, 0 on padding
    lengths: Tensor  # [N] int64, real tokens of each row
    mask: Tensor  # [N, T] bool, True on policy tokens
    advantages: Tensor  # [N, T] float32, 0 where mask is False
    logp_old: Tensor  # [N, T] float32, training-side log-probs of the behaviour policy (signal `logp`)
    logp_rollout: Tensor  # [N, T] float32, the sampler's log-probs
    logp_base: Tensor | None  # [N, T] float32; None unless a KL to the base model is asked for
    groups: Tensor  # [N] int64
    rewards: Tensor  # [N] float32


def pad(rows: list[np.ndarray], dtype: torch.dtype) -> Tensor:
    """Stack rows of different lengths into [N, T], zeros (False) on the right."""
    out = torch.zeros(len(rows), max(len(row) for row in rows), dtype=dtype)
    view = out.numpy()  # the same memory: NumPy's row assignment is several times faster, and takes read-only rows
    for i, row in enumerate(rows):
        view[i, : len(row)] = row
    return out
