"""LoRA on a CPU, one matrix product per adapter and slice.

vLLM's own CPU path copies the adapter's matrices once per token and contracts with einsum; it also gives tokens
without an adapter the last slot's adapter when others of the batch have one. Here the rows of a step are grouped by
adapter once, when vLLM announces the batch, and every layer multiplies group by group.

Shapes: B rows (tokens) of a step, G rows of one adapter, I and O features in and out, R the slots' rank, S slots.
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
        y_BO = y.view(-1, y.shape[-1])
        x_BI = x.view(-1, x.shape[-1])
        for slot, rows in self._groups:
            x_GI = x_BI[rows]
            offset = 0
            for a_S1RI, b_S1OR, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                hidden_GR = x_GI @ a_S1RI[slot, 0].t()
                b_RO = b_S1OR[slot, 0].t()
                columns = slice(offset, offset + width)
                if isinstance(rows, slice):
                    y_BO[rows, columns].addmm_(hidden_GR, b_RO, alpha=scale)
                else:
                    y_BO[:, columns].index_add_(0, rows, hidden_GR @ b_RO, alpha=scale)
                offset += width


def group_rows(ids: tuple[int, ...], slots: list[int | None]) -> list[tuple[int, slice | Tensor]]:
    """Slot and rows of each adapter of a batch: a slice where they are neighbours, indices otherwise.

    `ids` [B] are the rows' adapter ids, 0 for none; `slots` [S] is the adapter id in each slot.
    """
    ids_B = np.array(ids)
    groups = []
    for adapter in np.unique(ids_B):
        if adapter != 0:
            rows = np.flatnonzero(ids_B == adapter)
            start, stop = int(rows[0]), int(rows[-1]) + 1
            neighbours = stop - start == len(rows)
            groups.append((slots.index(int(adapter)), slice(start, stop) if neighbours else torch.from_numpy(rows)))
    return groups


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
    current_platform.get_punica_wrapper = lambda: path
