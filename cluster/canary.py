"""What a canary's answer proves."""

from collections.abc import Iterable
from itertools import chain, islice

import numpy as np

TOKENS = 48
FLOOR = 1e-4
"""Smallest tolerance, in nats: fp32 log-probs of two implementations agree to about 1e-5."""
MARGIN = 4.0
"""Tolerance over the measured noise of the base model's answer."""


class Refused(RuntimeError):
    """What an actor answers is not what the adapter would."""


def tokens_of(prompts: Iterable[list[int]], longest: int) -> list[int]:
    """The first prompts, end to end: tokens that the model will meet."""
    return list(islice(chain.from_iterable(prompts), min(TOKENS, longest)))


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Root mean square difference of two answers [T], in nats; inf for different lengths or anything not finite."""
    if one.shape != other.shape or not (np.isfinite(one).all() and np.isfinite(other).all()):
        return float("inf")
    return float(np.sqrt(np.mean((one.astype(np.float64) - other) ** 2)))


def tolerance(base: np.ndarray, expected_base: np.ndarray) -> float:
    """What an actor's numerics are worth: its base model's answer against the learner's, with a margin.

    Raises Refused when the two are further apart than rounding explains: another base model.
    """
    noise = distance(base, expected_base)
    if not noise < 0.5:
        raise Refused(
            f"canary: the base model's log-probs differ from the learner's by {noise:.3g} nats, expected rounding: "
            "the actor serves another base model"
        )
    return max(FLOOR, MARGIN * noise)


def judge(answer: np.ndarray, adapted: np.ndarray, others: dict[str, np.ndarray], limit: float) -> str:
    """Accept or refuse an answer: "proved", or "indistinguishable from X" where X would answer the same within `limit`.

    answer, adapted: [T] log-probs; others: what the base and the versions before would answer. Raises Refused, saying
    which of them was served, when the answer is not the adapter's.
    """
    off = distance(answer, adapted)
    if not off <= limit:
        served = [name for name, other in others.items() if distance(answer, other) <= limit]
        is_that_of = f"is that of the {served[0]}: " if served else "is "
        raise Refused(f"canary: the answer {is_that_of}off by {off:.3g} nats, expected at most {limit:.3g}")
    # what is further than two limits from the adapter cannot be within one limit of the answer
    alike = [name for name, other in others.items() if distance(adapted, other) <= 2 * limit]
    return f"indistinguishable from the {alike[0]}" if alike else "proved"
