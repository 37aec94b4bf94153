"""The forward pass of the learner: rows of tokens in, log-prob and entropy of the policy's tokens out.

Linear layers see the tokens packed without padding; attention unpacks them to one row per sequence, so it is causal
without a mask, never crosses sequences and costs what padded attention costs. The LM head runs on chunks of the
positions that predict a policy token, and leaves log-probs and their gradients, never [tokens, vocabulary].

Dimensions: B rows, T positions, S packed tokens, M policy tokens, H hidden, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

HEAD_CHUNK = 1024  # positions; 1024 x 152k vocabulary in float32 is 0.6 GB


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the packed tokens belong in the padded rows."""

    rows: int
    width: int
    index_S: Tensor  # row * width + position


class Policy(nn.Module):
    """A causal LM that answers with the log-probs of the given tokens. Replaces the model's LM head by `Head`."""

    def __init__(self, model: nn.Module, *, packing: bool) -> None:
        super().__init__()
        self.model = model
        self.packing = packing

    def forward(
        self,
        tokens_BT: Tensor,
        lengths_B: Tensor,
        mask_BT: Tensor,
        entropy_gradient: bool = False,
        temperature: float = 1.0,
    ) -> Any:
        """Log-prob of each token where the mask is True, and the entropy of the distribution it was drawn from.

        [B, T], [B], [B, T] -> [B, T], [B, T] float32, 0 where the mask is False. The mask leaves out position 0.
        The entropy is detached unless `entropy_gradient`. Logits are divided by `temperature`, as the sampler's are.
        """
        causal = _causal_lm(self.model)
        rows, width = tokens_BT.shape
        target_M = mask_BT.flatten().nonzero().squeeze(1)
        if self.packing:
            real_BT = torch.arange(width, device=tokens_BT.device) < lengths_B[:, None]
            layout = Layout(rows, width, real_BT.flatten().nonzero().squeeze(1))
            input_ids = tokens_BT.flatten()[layout.index_S][None]
            predictor_M = real_BT.flatten().cumsum(0)[target_M] - 2  # a token's packed index, and one back
            position_ids = (layout.index_S % width)[None]
        else:
            layout, input_ids, predictor_M = None, tokens_BT, target_M - 1
            position_ids = torch.arange(width, device=tokens_BT.device)[None]
        states = causal.get_decoder()(input_ids=input_ids, position_ids=position_ids, use_cache=False, layout=layout)
        hidden_MH = states.last_hidden_state.flatten(0, 1)[predictor_M]
        head = causal.get_output_embeddings()
        # the head is linear: scaling its input scales the logits
        logp_M, entropy_M = head(hidden_MH / temperature, tokens_BT.flatten()[target_M], entropy_gradient)
        zeros = torch.zeros(rows * width, device=tokens_BT.device)
        return (
            zeros.index_copy(0, target_M, logp_M).view(rows, width),
            zeros.index_copy(0, target_M, entropy_M).view(rows, width),
        )


class Head(nn.Module):
    """A frozen LM head that gives the log-probs of chosen tokens."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight  # shared with the embedding where the model ties them

    def forward(self, hidden_MH: Tensor, target_M: Tensor, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        return _TokenLogProbs.apply(hidden_MH, self.weight, target_M, entropy_gradient)  # pyright: ignore[reportReturnType]


class _TokenLogProbs(torch.autograd.Function):
    """log softmax(h W')[y] and the entropy, chunk by chunk.

    The head is frozen, so all that backward needs is d logp / d h = W_y - p W, one vector per token (and for the
    entropy dH / d h = -(p (log p + H)) W). They are computed while the chunk's probabilities are at hand: no
    recomputation and no [M, V].
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_MH: Tensor, weight_VH: Tensor, target_M: Tensor, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        logp_M = hidden_MH.new_empty(len(hidden_MH), dtype=torch.float32)
        entropy_M = torch.empty_like(logp_M)
        needed = ctx.needs_input_grad[0]
        logp_gradient_MH = torch.empty_like(hidden_MH) if needed else None
        entropy_gradient_MH = torch.empty_like(hidden_MH) if needed and entropy_gradient else None
        for start in range(0, len(hidden_MH), HEAD_CHUNK):
            chunk = slice(start, start + HEAD_CHUNK)
            logps_CV = F.log_softmax(F.linear(hidden_MH[chunk], weight_VH).float(), dim=-1)
            probs_CV = logps_CV.exp()
            target_C1 = target_M[chunk, None]
            logp_M[chunk] = logps_CV.gather(1, target_C1).squeeze(1)
            entropy_M[chunk] = -(probs_CV * logps_CV).sum(1)
            if entropy_gradient_MH is not None:
                slope_CV = -probs_CV * (logps_CV + entropy_M[chunk, None])
                entropy_gradient_MH[chunk] = slope_CV.to(weight_VH.dtype) @ weight_VH
            if logp_gradient_MH is not None:
                slope_CV = probs_CV.neg_().scatter_add_(1, target_C1, torch.ones_like(target_C1, dtype=torch.float32))
                logp_gradient_MH[chunk] = slope_CV.to(weight_VH.dtype) @ weight_VH
        ctx.gradients = logp_gradient_MH, entropy_gradient_MH
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_M)
        return logp_M, entropy_M

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None]:
        logp_gradient_MH, entropy_gradient_MH = ctx.gradients
        gradient_MH = upstream[0][:, None] * logp_gradient_MH
        if entropy_gradient_MH is not None:
            gradient_MH = gradient_MH + upstream[1][:, None] * entropy_gradient_MH
        return gradient_MH.to(logp_gradient_MH.dtype), None, None, None


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    layout: Layout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence, in the signature of transformers' AttentionInterface.

    Takes [1, heads, S, D] packed by `layout`, or [B, heads, T, D] padded on the right when `layout` is None (a real
    token never sees the padding after it). Dropout is not applied.
    """
    if layout is not None:
        query, key, value = (_unpack(states, layout) for states in (query, key, value))
    width = query.shape[2]
    mask = None
    if sliding_window is not None and width > sliding_window:
        distance_TT = torch.arange(width, device=query.device)[:, None] - torch.arange(width, device=query.device)
        mask = ((distance_TT >= 0) & (distance_TT < sliding_window))[None, None]
    output, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling)
    if layout is not None:
        output = output.flatten(0, 1)[layout.index_S][None]
    return output, None


AttentionInterface.register("packed", packed_attention)


def _unpack(states_1hSD: Tensor, layout: Layout) -> Tensor:
    """[1, heads, S, D] -> [B, heads, T, D]"""
    states_ShD = states_1hSD[0].transpose(0, 1)
    padded = states_ShD.new_zeros(layout.rows * layout.width, *states_ShD.shape[1:])
    padded = padded.index_copy(0, layout.index_S, states_ShD)
    return padded.unflatten(0, (layout.rows, layout.width)).transpose(1, 2)


def _causal_lm(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model
