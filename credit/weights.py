"""Weight methods that look at one completion at a time, and the normaliser that they share.

A weight method is a plain function: `mask_NT` first, then keyword parameters. A parameter named like a signal declares
that the method needs that signal; the others are its options. It returns alpha >= 0 [N, T], which `normalise` turns
into weights with mean one over each completion.

Dimensions: N completions, T positions. Signals are float32 and 0 where the mask is False.
"""

import math

import numpy as np
import torch
from torch import Tensor

from credit.ranks import ascending

EPS = 1e-8


def uniform(mask_NT: Tensor) -> Tensor:
    """alpha = 1: every token gets the completion's advantage, as in plain GRPO."""
    return mask_NT.float()


def surprisal(mask_NT: Tensor, *, logp: Tensor) -> Tensor:
    """alpha = -log pi(y_t) (baseline of arXiv:2606.00257)."""
    return (-logp).clamp(min=0)


def entropy_reduction(mask_NT: Tensor, *, entropy: Tensor) -> Tensor:
    """alpha = max(0, H_t - H_{t+1}), 0 for the last token (baseline of arXiv:2606.00257)."""
    followed_NT = mask_NT[:, :-1] & mask_NT[:, 1:]
    drop_NT = (entropy[:, :-1] - entropy[:, 1:]).clamp(min=0) * followed_NT
    return torch.nn.functional.pad(drop_NT, (0, 1))


def divergence(mask_NT: Tensor, *, logp: Tensor, logp_base: Tensor) -> Tensor:
    """alpha = |log pi(y_t) - log pi_base(y_t)| of the sampled token (baseline of arXiv:2606.00257).

    A fresh adapter changes nothing, so at step 0 the weights are exactly uniform.
    """
    return (logp - logp_base).abs()


def arca(mask_NT: Tensor, *, residual: Tensor) -> Tensor:
    """alpha = ||h_adapted - h_base||, the adapter's change of the hidden state (arXiv:2606.00257, equation 15).

    At step 0 the weights are exactly uniform. In its paper ARCA spreads credit more evenly than the other
    non-uniform weights, and did not beat `uniform` on accuracy (greedy .590 against .620, one seed).
    """
    return residual


def forking(mask_NT: Tensor, *, entropy: Tensor, q: float = 0.2) -> Tensor:
    """alpha = 1 for the share `q` of a completion's tokens with the highest entropy, else 0 (arXiv:2506.01939).

    At least one token is chosen; tokens that tie with the last one chosen are chosen too.
    """
    if not 0 < q <= 1:
        raise ValueError(f"forking: option q: got {q!r}, expected a share in (0, 1]")
    # 1e-9: a product such as .1 * 30 must not round up to 4 tokens
    count_N = (mask_NT.sum(1).double() * q - 1e-9).ceil().clamp(min=1).long()
    # the count-th largest is the (n - count)-th in ascending order; a row without tokens has none
    position_N = (mask_NT.sum(1) - count_N).clamp(min=0)
    threshold_N1 = ascending(entropy, mask_NT).gather(1, position_N[:, None])
    return ((entropy >= threshold_N1) & mask_NT).float()


def normalise(alpha_NT: Tensor, mask_NT: Tensor, sharpening: float = 1.0) -> Tensor:
    """Weights with mean one: T s_t / sum s, s = (alpha + 1e-8)^sharpening. [N, T] float32, 0 outside the mask.

    arXiv:2606.00257, equation 8; the power is that of its code, 1 in the equation and 2 behind its tables.
    A row whose sum of s is at most 1e-8 becomes uniform, and so, exactly, does a row of equal alphas.
    """
    base_NT = torch.where(mask_NT, alpha_NT.float() + EPS, 0.0)
    # relative to the row's largest value, so that no power overflows; the sum of s is recovered as a logarithm
    top_N1 = base_NT.amax(1, keepdim=True).clamp(min=EPS)
    s_NT = torch.where(mask_NT, (base_NT / top_N1) ** sharpening, 0.0)
    total_N1 = s_NT.sum(1, keepdim=True)
    vanishing_N1 = sharpening * top_N1.log() + total_N1.log() <= math.log(EPS)
    equal_N1 = (base_NT == top_N1).sum(1, keepdim=True) == mask_NT.sum(1, keepdim=True)
    m_NT = mask_NT.sum(1, keepdim=True) * s_NT / total_N1
    return torch.where(mask_NT, torch.where(vanishing_N1 | equal_N1, 1.0, m_NT), 0.0)


def permuted(weights_NT: Tensor, mask_NT: Tensor, keys_N2: Tensor, seed: int) -> Tensor:
    """Shuffle the weights within each completion. [N, T]

    The control for location: the same Gini and effective-token ratio, on other tokens. A row's shuffle depends on the
    seed and its key (group, index) only, not on the rest of the batch.
    """
    out_NT = weights_NT.clone()
    for row, key in enumerate(keys_N2.tolist()):
        positions = mask_NT[row].nonzero()[:, 0]
        order = np.random.default_rng([seed, *key]).permutation(len(positions))
        out_NT[row, positions] = weights_NT[row, positions[torch.from_numpy(order)]]
    return out_NT
