"""Group advantages: one number per completion, from the rewards of its group.

Dimensions: N completions, K groups. Groups are arbitrary integers. A group of equal rewards gets exactly 0.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def grpo(rewards_N: Tensor, groups_N: Tensor, *, ddof: int = 1, eps: float = 0.0) -> Tensor:
    """(R - mean) / (max(std, 1e-8) + eps) within the group (arXiv:2402.03300). [N], [N] -> [N]

    The defaults, `ddof=1` and a clamp instead of an eps, are those of ARCA's code (arXiv:2606.00257).
    """
    _reject(ddof not in (0, 1), "ddof", ddof, "0 or 1")
    _reject(eps < 0, "eps", eps, "0 or more")
    centered_N, inverse_N, sizes_K = _centered(rewards_N, groups_N)
    squares_K = torch.zeros_like(sizes_K).index_add(0, inverse_N, centered_N**2)
    std_K = (squares_K / (sizes_K - ddof).clamp(min=1)).sqrt()
    return centered_N / (std_K.clamp(min=1e-8) + eps)[inverse_N]


def dr_grpo(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """R - mean of the group (arXiv:2503.20783). [N], [N] -> [N]"""
    return _centered(rewards_N, groups_N)[0]


def rloo(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """R - mean of the *other* completions of the group (arXiv:2402.14740); 0 for a group of one. [N], [N] -> [N]"""
    centered_N, inverse_N, sizes_K = _centered(rewards_N, groups_N)
    return centered_N * (sizes_K / (sizes_K - 1).clamp(min=1))[inverse_N]


def reinforce_pp(rewards_N: Tensor, groups_N: Tensor, *, ddof: int = 1, eps: float = 0.0) -> Tensor:
    """R - group mean, divided by the standard deviation over the whole batch (arXiv:2501.03262). [N], [N] -> [N]

    The batch mean of group-centred rewards is 0, so it is not subtracted again: groups of equal rewards stay at 0.
    """
    _reject(ddof not in (0, 1), "ddof", ddof, "0 or 1")
    _reject(eps < 0, "eps", eps, "0 or more")
    centered_N = _centered(rewards_N, groups_N)[0]
    std = ((centered_N**2).sum() / max(len(centered_N) - ddof, 1)).sqrt()
    return centered_N / (std.clamp(min=1e-8) + eps)


ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
}


def _centered(rewards_N: Tensor, groups_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards minus their group's mean [N], the group of each completion as 0..K-1 [N], group sizes [K]."""
    rewards_N, groups_N = torch.as_tensor(rewards_N).detach().float(), torch.as_tensor(groups_N)
    if rewards_N.ndim != 1 or rewards_N.shape != groups_N.shape:
        raise ValueError(
            f"advantages: got rewards of shape {list(rewards_N.shape)} and groups of shape {list(groups_N.shape)}, "
            "expected two vectors of one length"
        )
    if not rewards_N.isfinite().all():
        row = int((~rewards_N.isfinite()).nonzero()[0])
        raise ValueError(f"advantages: reward of row {row} is {rewards_N[row].item()}, expected a finite number")
    uniques_K, inverse_N = groups_N.unique(return_inverse=True)
    zeros_K = rewards_N.new_zeros(len(uniques_K))
    sizes_K = zeros_K.index_add(0, inverse_N, torch.ones_like(rewards_N))
    # measured from the group's smallest reward, equal rewards are exactly 0 before any rounding can happen
    lowest_K = zeros_K.scatter_reduce(0, inverse_N, rewards_N, "amin", include_self=False)
    shifted_N = rewards_N - lowest_K[inverse_N]
    means_K = zeros_K.index_add(0, inverse_N, shifted_N) / sizes_K
    return shifted_N - means_K[inverse_N], inverse_N, sizes_K


def _reject(wrong: bool, option: str, value: object, expected: str) -> None:
    if wrong:
        raise ValueError(f"advantage option {option}: got {value!r}, expected {expected}")
