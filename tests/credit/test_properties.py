"""What holds for every weight method (and every divergence and normaliser of gcpo)."""

import pytest
import torch

import credit
from credit.methods import SELF_NORMALISED, WEIGHTS

CASES = [
    *((name, {}) for name in WEIGHTS),
    *((name, {"sharpening": 2.0}) for name in WEIGHTS),
    *(("gcpo", {"divergence": d}) for d in ("k3", "kl", "information_gain", "abs")),
    *(("gcpo", {"normaliser": n}) for n in ("cdf", "softmax", "minmax")),
    ("delta", {}),
    ("eapo", {}),
    ("eapo", {"multiplicative": True}),
    ("ibpo", {}),
]
ALL = pytest.mark.parametrize("name, options", CASES, ids=lambda x: x if isinstance(x, str) else ",".join(map(str, x)))
PER_COMPLETION = pytest.mark.parametrize(
    "name, options",
    [case for case in CASES if case[0] not in ("delta", "eapo", "ibpo") and case[1].get("normaliser") != "cdf"],
    ids=str,
)


def step(rows=8, longest=40, seed=0):
    """Signals [N, T], mask and what the batch knows; lengths 1 to `longest`, a prompt of 3."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.empty(*shape).exponential_(generator=generator)

    lengths = torch.linspace(1, longest, rows).long()
    positions = torch.arange(3 + longest)
    mask = (positions >= 3) & (positions < 3 + lengths[:, None])
    signals = {name: -noise(*mask.shape) for name in ("logp", "logp_base", "logp_negative")}
    signals |= {name: noise(*mask.shape) for name in ("entropy", "residual", "kl_negative")}
    signals["delta_feature"] = noise(*mask.shape, 6)
    batch = {
        "advantages": torch.tensor([1.0, -1.0, 0.5, 0.0, 0.7, -0.2, 0.3, -2.0])[:rows],
        "groups": torch.arange(rows) // 4,
        "changed": noise(*mask.shape) > 0.5,
    }
    return signals, mask, batch


def weights(name, options, signals, mask, batch):
    return credit.weights(name, signals, mask, **batch, **options)


@ALL
def test_padding_and_prompt_get_nothing(name, options):
    signals, mask, batch = step()
    got = weights(name, options, signals, mask, batch)
    assert got.dtype == torch.float32
    assert not got[~mask].any()
    assert got[mask].any()


@PER_COMPLETION
def test_the_weights_of_a_completion_sum_to_its_length(name, options):
    signals, mask, batch = step()
    got = weights(name, options, signals, mask, batch)
    torch.testing.assert_close(got.sum(1), mask.sum(1).float(), rtol=1e-5, atol=1e-5)


def test_the_weights_of_delta_sum_to_the_tokens_of_the_batch():
    signals, mask, batch = step()
    assert weights("delta", {}, signals, mask, batch).sum().item() == pytest.approx(int(mask.sum()))


@PER_COMPLETION
def test_a_completion_of_one_token_gets_one(name, options):
    signals, mask, batch = step()
    assert weights(name, options, signals, mask, batch)[0].tolist() == [0.0] * 3 + [1.0] + [0.0] * 39


@ALL
def test_the_sign_of_the_advantage_is_kept(name, options):
    signals, mask, batch = step()
    assert (weights(name, options, signals, mask, batch) >= 0).all()


@ALL
def test_no_gradient_flows_through_a_weight(name, options):
    signals, mask, batch = step()
    signals = {key: value.requires_grad_() for key, value in signals.items()}
    assert not weights(name, options, signals, mask, batch).requires_grad


@ALL
def test_values_outside_the_mask_change_nothing(name, options):
    signals, mask, batch = step()
    expected = weights(name, options, signals, mask, batch)
    for bad in (float("nan"), float("inf"), 1e30):
        for value in signals.values():
            value[~mask] = bad
        assert torch.equal(weights(name, options, signals, mask, batch), expected)


@ALL
def test_the_width_of_the_padding_changes_nothing(name, options):
    signals, mask, batch = step()
    wide = {key: torch.nn.functional.pad(value, (0, 0, 0, 9) if value.ndim == 3 else (0, 9), value=7.0)
            for key, value in signals.items()}  # fmt: skip
    batch_wide = batch | {"changed": torch.nn.functional.pad(batch["changed"], (0, 9))}
    got = weights(name, options, wide, torch.nn.functional.pad(mask, (0, 9)), batch_wide)
    torch.testing.assert_close(got[:, :-9], weights(name, options, signals, mask, batch), rtol=1e-5, atol=1e-6)


@ALL
def test_the_order_of_the_batch_changes_nothing(name, options):
    signals, mask, batch = step()
    order = torch.tensor([5, 2, 7, 0, 3, 6, 1, 4])
    got = weights(
        name,
        options,
        {key: value[order] for key, value in signals.items()},
        mask[order],
        {key: value[order] for key, value in batch.items()},
    )
    torch.testing.assert_close(got, weights(name, options, signals, mask, batch)[order], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name, options", [case for case in CASES if case[0] != "delta"], ids=str)
def test_a_whole_batch_equals_its_groups_one_by_one(name, options):
    signals, mask, batch = step()
    halves = [
        weights(
            name,
            options,
            {key: value[half] for key, value in signals.items()},
            mask[half],
            {key: value[half] for key, value in batch.items()},
        )
        for half in (slice(0, 4), slice(4, 8))
    ]
    torch.testing.assert_close(torch.cat(halves), weights(name, options, signals, mask, batch), rtol=1e-5, atol=1e-6)


@ALL
def test_arithmetic_is_float32_even_for_bfloat16_signals(name, options):
    signals, mask, batch = step()
    short = {key: value.bfloat16() for key, value in signals.items()}
    expected = weights(name, options, {key: value.float() for key, value in short.items()}, mask, batch)
    assert torch.equal(weights(name, options, short, mask, batch), expected)


@pytest.mark.parametrize("name, options", [case for case in CASES if case[0] not in ("delta", "ibpo")], ids=str)
def test_signals_that_say_nothing_leave_uniform_weights(name, options):
    signals, mask, batch = step()
    flat = {key: torch.full_like(value, 0.3) for key, value in signals.items()}
    assert torch.equal(weights(name, options, flat, mask, batch), mask.float())


def test_features_that_say_nothing_leave_delta_uniform_over_the_rows_with_an_advantage():
    signals, mask, batch = step()
    flat = {"delta_feature": torch.full_like(signals["delta_feature"], 0.3)}
    got = weights("delta", {}, flat, mask, batch)
    silent = batch["advantages"] == 0
    torch.testing.assert_close(
        got[mask & silent[:, None]] * 1.25, got[mask & ~silent[:, None]][: int(mask[silent].sum())]
    )
    assert got[mask & ~silent[:, None]].unique().numel() == 1


@ALL
def test_inputs_are_left_as_they_were(name, options):
    signals, mask, batch = step()
    before = {key: value.clone() for key, value in signals.items()}, mask.clone()
    weights(name, options, signals, mask, batch)
    assert torch.equal(mask, before[1])
    assert all(torch.equal(value, before[0][key]) for key, value in signals.items())


def test_every_method_is_covered():
    assert {name for name, _ in CASES} == set(credit.METHODS) == set(WEIGHTS) | set(SELF_NORMALISED)
