from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import credit
from credit.methods import WEIGHTS
from credit.ranks import average_ranks
from credit.weights import normalise
from tests.credit import naive
from tests.credit.build import completions, eighths, padded, unpadded

MASK = torch.ones(1, 4, dtype=torch.bool)
close = partial(pytest.approx, abs=1e-6)  # eps = 1e-8 keeps zeros from being quite zero


def row(name, sharpening=1.0, **signals):
    signals = {key: torch.tensor([value]) for key, value in signals.items()}
    mask = torch.ones(1, next(iter(signals.values())).shape[1], dtype=torch.bool) if signals else MASK
    return credit.weights(name, signals, mask, sharpening=sharpening)[0].tolist()


def test_uniform_gives_every_token_one():
    assert row("uniform") == [1.0] * 4


def test_surprisal_follows_minus_logp():
    # 1, 2, 5, 0 of 8, times 4
    assert row("surprisal", logp=[-1.0, -2.0, -5.0, 0.0]) == close([0.5, 1.0, 2.5, 0.0])


def test_entropy_reduction_counts_falls_only_and_not_the_last_token():
    # falls 2, 0 (a rise), 1, last 0; of 3, times 4
    assert row("entropy_reduction", entropy=[3.0, 1.0, 2.0, 1.0]) == close([8 / 3, 0, 4 / 3, 0])


def test_divergence_is_the_distance_to_the_base_model():
    got = row("divergence", logp=[-1.0, -2.0, -3.0, -1.0], logp_base=[-2.0, -1.0, -3.0, -3.0])
    assert got == close([1, 1, 0, 2])


def test_arca_follows_the_residual():
    assert row("arca", residual=[1.0, 3.0, 0.0, 4.0]) == close([0.5, 1.5, 0.0, 2.0])


def test_sharpening_is_a_power():
    # squares 1, 9, 0, 16 of 26, times 4
    assert row("arca", 2.0, residual=[1.0, 3.0, 0.0, 4.0]) == close([4 / 26, 36 / 26, 0, 64 / 26])


def test_forking_takes_the_top_share_by_entropy():
    # 20 % of 10 tokens are 2
    got = row("forking", entropy=[0.0, 9.0, 1.0, 2.0, 3.0, 8.0, 4.0, 5.0, 6.0, 7.0])
    assert got == close([0, 5, 0, 0, 0, 5, 0, 0, 0, 0])


def test_forking_takes_what_ties_with_the_last_token_taken():
    assert row("forking", entropy=[1.0, 1.0, 1.0, 0.0]) == close([4 / 3, 4 / 3, 4 / 3, 0])


@pytest.mark.parametrize("share, tokens, taken", [(0.1, 30, 3), (0.3, 10, 3), (0.2, 1, 1), (0.25, 6, 2), (1.0, 5, 5)])
def test_forking_rounds_the_number_of_tokens_up(share, tokens, taken):
    entropy = torch.arange(tokens, dtype=torch.float32)[None]
    weights = credit.weights("forking", {"entropy": entropy}, torch.ones(1, tokens, dtype=torch.bool), q=share)
    assert int((weights > 0.5).sum()) == taken


@pytest.mark.parametrize("q", [0.0, 1.5])
def test_forking_refuses_a_share_outside_0_to_1(q):
    with pytest.raises(ValueError, match="forking: option q"):
        credit.weights("forking", {"entropy": torch.ones(1, 4)}, MASK, q=q)


@pytest.mark.parametrize("name", ["arca", "divergence"])
@pytest.mark.parametrize("sharpening", [1.0, 2.0, 5.0])
def test_a_fresh_adapter_gives_exactly_uniform_weights(name, sharpening):
    mask = torch.arange(700) < torch.tensor([[700], [3], [1], [97]])
    logp = -torch.rand(4, 700)
    signals = {"residual": torch.zeros(4, 700), "logp": logp, "logp_base": logp.clone()}
    assert torch.equal(credit.weights(name, signals, mask, sharpening=sharpening), mask.float())


def test_a_row_whose_powers_sum_to_1e_8_or_less_is_uniform():
    # (6e-5)^2 + (8e-5)^2 = 1.00e-8 is just above with eps; half of each is below
    assert row("arca", 2.0, residual=[3e-5, 4e-5]) == [1.0, 1.0]
    assert row("arca", 2.0, residual=[6e-5, 9e-5]) == pytest.approx([2 * 36 / 117, 2 * 81 / 117], rel=1e-3)
    assert row("arca", 1.0, residual=[3e-5, 4e-5]) == pytest.approx([6 / 7, 8 / 7], rel=1e-3)


def test_no_power_overflows():
    assert row("arca", 50.0, residual=[1e3, 1e3, 1.0]) == close([1.5, 1.5, 0.0])


@pytest.mark.parametrize("name", sorted(WEIGHTS))
@pytest.mark.parametrize("sharpening", [1.0, 2.0])
@given(data=st.data())
@settings(max_examples=40)
def test_weights_equal_the_naive_ones(name, sharpening, data):
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))
    rows = {
        signal: [data.draw(st.lists(eighths, min_size=n, max_size=n)) for n in lengths]
        for signal in ("logp", "logp_base", "entropy", "residual")
    }
    rows["logp"] = [[-x for x in row] for row in rows["logp"]]
    _, mask = padded(rows["logp"], prompt=2)
    signals = {signal: padded(values, prompt=2)[0] for signal, values in rows.items()}
    got = unpadded(credit.weights(name, signals, mask, sharpening=sharpening), mask)
    for i, weights in enumerate(got):
        expected = naive.normalise(naive.alpha(name, {key: values[i] for key, values in rows.items()}), sharpening)
        assert weights == pytest.approx(expected, rel=1e-4, abs=1e-5)


@given(completions)
def test_ranks_share_the_average_among_ties(rows):
    values, mask = padded(rows, prompt=1, fill=float("nan"))
    got = average_ranks(values, mask)
    assert unpadded(got, mask) == [naive.ranks(row) for row in rows]
    assert not got[~mask].any()


@given(completions, st.sampled_from([0.5, 1.0, 2.0, 3.0]))
def test_normalised_weights_sum_to_the_number_of_tokens(rows, sharpening):
    alpha, mask = padded(rows, fill=99.0)
    weights = normalise(alpha, mask, sharpening)
    assert weights.sum(1).tolist() == pytest.approx(mask.sum(1).tolist(), rel=1e-5)
    assert not weights[~mask].any()


# ---- the permutation control ----


def permuted(seed=0, rows=slice(None), keys=((4, 0), (4, 1), (9, 0))):
    values, mask = padded([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], [1.0, 2.0, 4.0, 8.0, 16.0], [3.0]], prompt=1)
    return credit.weights(
        "arca", {"residual": values[rows]}, mask[rows], permute=True, seed=seed, keys=torch.tensor(keys)[rows]
    ), mask[rows]


def test_a_permutation_keeps_the_weights_of_each_completion_and_moves_them():
    got, mask = permuted()
    expected = [[x / 4.5 for x in range(1, 9)], [x / 6.2 for x in (1, 2, 4, 8, 16)], [1.0]]
    assert [sorted(row) for row in unpadded(got, mask)] == [pytest.approx(row) for row in expected]
    assert unpadded(got, mask)[0] != pytest.approx(expected[0])
    assert not got[~mask].any()


def test_a_permutation_depends_on_the_seed_and_the_completion_only():
    got, _ = permuted()
    assert torch.equal(got, permuted()[0])
    assert torch.equal(got[1:], permuted(rows=slice(1, None))[0])
    assert not torch.equal(got, permuted(seed=1)[0])


def test_permutations_are_uniform_over_places():
    """The largest of 4 weights lands on each place a quarter of the time: 400 +- 5 standard deviations of 17.3."""
    mask = torch.ones(1600, 4, dtype=torch.bool)
    residual = torch.tensor([[0.0, 0.0, 0.0, 1.0]]).repeat(1600, 1)
    places = credit.weights("arca", {"residual": residual}, mask, permute=True).argmax(1)
    assert np.bincount(places, minlength=4) == pytest.approx([400] * 4, abs=87)
