"""DelTA (arXiv:2605.21467): credit to the tokens whose gradient direction tells good completions from bad ones.

The feature of a token is v = (1 - pi(y_t)) h_t, with h the input of the LM head. It never leaves the actor that
computed it: the arithmetic here sees v only through weighted sums over tokens and through dot products with one
direction, so a batch may be spread over any number of actors.

Dimensions: N completions, T positions, H hidden size. A side is the tokens of positive or of negative advantage.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Feature(NamedTuple):
    """The two views of v [N, T, H] that the method needs; tokens outside the mask must not contribute."""

    sums: Callable[[Tensor], tuple[Tensor, Tensor]]
    """Coefficients c [N, T] -> (sum of c v over c > 0, sum of -c v over c < 0), each [H]."""
    dots: Callable[[Tensor], Tensor]
    """Direction [H] -> v . direction [N, T]."""


def in_memory(feature_NTH: Tensor, mask_NT: Tensor) -> Feature:
    """Both views of a feature that is at hand."""
    feature_NTH = torch.where(mask_NT[..., None], feature_NTH.detach().float(), 0.0)

    def sums(coefficients_NT: Tensor) -> tuple[Tensor, Tensor]:
        positive_NT, negative_NT = coefficients_NT.clamp(min=0), (-coefficients_NT).clamp(min=0)
        return (
            torch.einsum("nt,nth->h", positive_NT, feature_NTH),
            torch.einsum("nt,nth->h", negative_NT, feature_NTH),
        )

    return Feature(sums, lambda direction_H: feature_NTH @ direction_H)


def delta(mask_NT: Tensor, *, delta_feature: Feature, advantages_N: Tensor) -> Tensor:
    """lambda [N, T] with mean one over the whole batch, 0 outside the mask (arXiv:2605.21467, the authors' code).

    margin = ||v - mu_other||^2 - ||v - mu_own||^2 with |A|-weighted centroids mu, gamma = std of a side's margins,
    one refinement of the centroids with sigmoid(margin / gamma), lambda = .8 + .4 sigmoid(margin / gamma), and .8 in
    rows of zero advantage. Centroids and mean are those of the whole batch (in the authors' code, of each rank).
    A batch without both sides has nothing to tell apart and gets uniform weights.
    """
    advantages_NT = torch.where(mask_NT, advantages_N.float()[:, None], 0.0)
    if not ((advantages_NT > 0).any() and (advantages_NT < 0).any()):
        return mask_NT.float()
    q_NT = _scaled_margins(delta_feature, advantages_NT, advantages_NT).sigmoid()
    scaled_NT = _scaled_margins(delta_feature, q_NT * advantages_NT, advantages_NT)
    lambda_NT = 0.8 + 0.4 * torch.where(advantages_NT == 0, 0.0, scaled_NT.sigmoid())
    lambda_NT = torch.where(mask_NT, lambda_NT, 0.0)
    return lambda_NT * (mask_NT.sum() / lambda_NT.sum())


def _scaled_margins(feature: Feature, coefficients_NT: Tensor, advantages_NT: Tensor) -> Tensor:
    """margin / gamma under the centroids of these coefficients, whose signs are the sides. [N, T]"""
    positive_H, negative_H = feature.sums(coefficients_NT)
    mu_positive_H = positive_H / coefficients_NT.clamp(min=0).sum()
    mu_negative_H = negative_H / (-coefficients_NT).clamp(min=0).sum()
    # the squares of v cancel in the margin: what is left is linear in v
    offset = mu_positive_H @ mu_positive_H - mu_negative_H @ mu_negative_H
    dots_NT = 2 * feature.dots(mu_positive_H - mu_negative_H)
    margin_NT = (dots_NT - offset) * advantages_NT.sign()
    scaled_NT = torch.zeros_like(margin_NT)
    for side_NT in (advantages_NT > 0, advantages_NT < 0):
        margins = margin_NT[side_NT]
        gamma = margins.std(correction=0)
        # equal margins order nothing: they count as 0, not as rounding divided by rounding
        if gamma > 1e-6 * (dots_NT[side_NT].abs().max() + offset.abs()):
            scaled_NT[side_NT] = margins / gamma
    return scaled_NT
