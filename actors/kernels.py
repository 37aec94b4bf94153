"""LoRA on a CPU, one matrix product per adapter and slice.

vLLM's own CPU path copies the adapter's matrices once per token and contracts with einsum; it also gives tokens
without an adapter the last slot's adapter when others of the batch have one. Here the rows of a step are grouped by
adapter once, when vLLM announces the batch, and every layer multiplies group by group.

Shapes: B rows (tokens) of a step, I and O features in and out, R the slots' rank, S slots.
"""

import inspect
import logging

import numpy as np
import torch
from torch import Tensor
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms import current_platform

logger = logging.getLogger(__name__)

EXPECTED = {
    "update_metadata": ["self", "mapping", "lora_index_to_id", "max_loras", "vocab_size", "kwargs"],
    "add_lora_linear": [
        *("self", "y", "x", "lora_a_stacked", "lora_b_stacked", "scale", "output_slices", "buffer", "kwargs"),
    ],
}


class GroupedLora(PunicaWrapperCPU):
    """Adds the LoRA of linear layers; embeddings and heads with LoRA stay with vLLM's own code."""

    def update_metadata(self, mapping, lora_index_to_id, max_loras, vocab_size, **kwargs) -> None:
        super().update_metadata(mapping, lora_index_to_id, max_loras, vocab_size, **kwargs)
        self._groups = group_rows(mapping.index_mapping, lora_index_to_id)

    def add_lora_linear(
        self, y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, *, buffer=None, **kwargs
    ) -> None:
        y = y.view(-1, y.shape[-1])
        x = x.view(-1, x.shape[-1])
        for slot, rows in self._groups:
            offset = 0
            x_G = x if rows is None else x[rows]
            for a_S1RI, b_S1OR, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                hidden_GR = x_G @ a_S1RI[slot, 0].t()
                y_G = y[:, offset : offset + width]
                b_RO = b_S1OR[slot, 0].t()
                if rows is None:
                    y_G.addmm_(hidden_GR, b_RO, alpha=scale)
                else:
                    y_G.index_add_(0, rows, hidden_GR @ b_RO, alpha=scale)
                offset += width


def group_rows(ids: tuple[int, ...], slots: list[int | None]) -> list[tuple[int, Tensor | None]]:
    """Slot and rows of each adapter of a batch; rows None is the whole batch, id 0 is no adapter.

    `ids` [B] are the rows' adapter ids, `slots` [S] the adapter id in each slot.
    """
    if ids.count(ids[0]) == len(ids):
        return [] if ids[0] == 0 else [(slots.index(ids[0]), None)]
    ids_B = np.array(ids)
    return [(slots.index(i), torch.from_numpy(np.flatnonzero(ids_B == i))) for i in np.unique(ids_B) if i != 0]


def install() -> None:
    """Make vLLM choose GroupedLora, unless its interface is not the one written for."""
    for name, parameters in EXPECTED.items():
        found = list(inspect.signature(getattr(PunicaWrapperCPU, name)).parameters)
        if found != parameters:
            logger.warning(
                "kernels: this vLLM has another LoRA interface: %s takes %s, expected %s. Its own CPU kernels are "
                "used: slower, and wrong for base-model requests in a batch with others",
                name,
                found,
                parameters,
            )
            return
    path = f"{GroupedLora.__module__}.{GroupedLora.__qualname__}"
    type(current_platform).get_punica_wrapper = classmethod(lambda cls: path)
