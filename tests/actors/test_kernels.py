import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors import engine, kernels  # the engine first: it sets the environment that vLLM reads

pytestmark = pytest.mark.skipif(engine.ON_GPU, reason="CPU kernels")

SLOTS, RANK, INPUTS, WIDTHS = 3, 8, 24, (16, 8, 8)
SLOT_IDS = [7, None, 4]  # adapter 7 in slot 0, adapter 4 in slot 2


def batch_of(ids: list[int]) -> kernels.GroupedLora:
    from vllm.lora.layers import LoRAMapping

    wrapper = kernels.GroupedLora(max_num_batched_tokens=64, max_batches=64, device="cpu")
    mapping = LoRAMapping(index_mapping=tuple(ids), prompt_mapping=tuple(ids), is_prefill=True)
    wrapper.update_metadata(mapping, SLOT_IDS, SLOTS + 1, 100)
    return wrapper


def tensors(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, tuple, tuple]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, INPUTS, generator=generator).to(dtype)
    y = torch.randn(rows, sum(WIDTHS), generator=generator).to(dtype)
    a = tuple(torch.randn(SLOTS, 1, RANK, INPUTS, generator=generator).to(dtype) for _ in WIDTHS)
    b = tuple(torch.randn(SLOTS, 1, width, RANK, generator=generator).to(dtype) for width in WIDTHS)
    return x, y, a, b


def by_row(ids: list[int], x: torch.Tensor, y: torch.Tensor, a: tuple, b: tuple) -> np.ndarray:
    """y + B A x, a row and a slice at a time, in float64."""
    rows = []
    for i, adapter in enumerate(ids):
        row = y[i].double().numpy()
        if adapter != 0:
            slot = SLOT_IDS.index(adapter)
            x_I = x[i].double().numpy()
            parts = [
                b_S[slot, 0].double().numpy() @ (a_S[slot, 0].double().numpy() @ x_I)
                for a_S, b_S in zip(a, b, strict=True)
            ]
            row = row + np.concatenate(parts)
        rows.append(row)
    return np.stack(rows)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0, 4, 7]), min_size=1, max_size=12))
def test_every_row_gets_its_own_adapter_and_rows_without_one_stay(ids):
    x, y, a, b = tensors(len(ids), torch.float32)
    expected = by_row(ids, x, y, a, b)
    batch_of(ids).add_lora_linear(y, x, a, b, 1.0, WIDTHS)
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("ids", [[4] * 6, [7, 7, 4, 4, 4], [4, 7, 0, 4, 7], [0, 0, 7], [0, 0]])
def test_bfloat16_is_as_near_as_its_rounding(ids):
    x, y, a, b = tensors(len(ids), torch.bfloat16)
    expected = by_row(ids, x, y, a, b)
    batch_of(ids).add_lora_linear(y, x, a, b, 1.0, WIDTHS)
    np.testing.assert_allclose(y.float().numpy(), expected, rtol=2e-2, atol=0.5)


def test_the_scale_multiplies_the_update_only():
    ids = [4, 0, 7, 4]
    x, y, a, b = tensors(len(ids), torch.float32)
    expected = y.numpy() + 0.5 * (by_row(ids, x, y, a, b) - y.double().numpy())
    batch_of(ids).add_lora_linear(y, x, a, b, 0.5, WIDTHS)
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-5, atol=1e-4)


def test_neighbouring_rows_are_a_slice_and_scattered_rows_are_indices():
    assert kernels.group_rows((4, 4, 4), SLOT_IDS) == [(2, slice(0, 3))]
    assert kernels.group_rows((0, 7, 7, 0), SLOT_IDS) == [(0, slice(1, 3))]
    ((slot, rows),) = kernels.group_rows((7, 0, 7), SLOT_IDS)
    assert isinstance(rows, torch.Tensor)
    assert (slot, rows.tolist()) == (0, [0, 2])
    assert kernels.group_rows((0, 0), SLOT_IDS) == []


def test_vllm_is_told_to_use_the_grouped_kernels():
    from vllm.platforms import current_platform

    kernels.install()
    assert current_platform.get_punica_wrapper() == "actors.kernels.GroupedLora"


def test_another_interface_is_left_to_vllms_own_kernels(monkeypatch, caplog):
    from vllm.platforms import current_platform

    monkeypatch.setattr(current_platform, "get_punica_wrapper", lambda: "vllm's own")
    monkeypatch.setitem(kernels.EXPECTED, "add_lora_linear", ["self", "y", "other"])
    kernels.install()
    assert current_platform.get_punica_wrapper() == "vllm's own"
    assert "another LoRA interface: add_lora_linear" in caplog.text
