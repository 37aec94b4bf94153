"""Credit assignment: from one reward per completion to one advantage per token."""

from credit.advantages import ADVANTAGES
from credit.assign import assign
from credit.diagnostics import diagnostics
from credit.methods import METHODS, SIGNALS, advantages, check, needs, weights
from credit.trajectory import Batch, Prompt, Sample, Signals, Trajectory

__all__ = [
    "ADVANTAGES",
    "METHODS",
    "SIGNALS",
    "Batch",
    "Prompt",
    "Sample",
    "Signals",
    "Trajectory",
    "advantages",
    "assign",
    "check",
    "diagnostics",
    "needs",
    "weights",
]
