import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import credit
from credit.diagnostics import cancellation_residue, gini, rank_correlation, sign_flip_rate
from credit.ranks import average_ranks
from tests.credit import naive
from tests.credit.build import completions, eighths, padded, random_step, signals, trajectory, unpadded


def of(*rows):
    return credit.diagnostics(*padded(list(rows), prompt=1))


def spearman(rows_a, rows_b):
    a, mask = padded(rows_a, prompt=1)
    b, _ = padded(rows_b, prompt=1)
    return rank_correlation(average_ranks(a, mask), average_ranks(b, mask), mask)


# ---- concentration ----


def test_gini_and_ratio_by_hand():
    # (-3 x 0 - 1 x 1 + 1 x 1 + 3 x 2) / (4 x 4) = 6/16; shares 0, 1/4, 1/4, 1/2: 1 / (4 x 6/16)
    figures = of([1.0, 0.0, 2.0, 1.0])
    assert figures["gini"] == pytest.approx(0.375)
    assert figures["effective_token_ratio"] == pytest.approx(2 / 3)
    assert figures["regime_middle"] == 1.0


def test_uniform_weights_have_gini_0_and_ratio_1():
    figures = of([1.0] * 7, [1.0] * 1000)
    assert figures["gini"] == 0.0
    assert figures["effective_token_ratio"] == pytest.approx(1.0)
    assert figures["regime_uniform"] == 1.0


def test_all_weight_on_one_token_of_n_has_gini_1_minus_1_over_n():
    figures = of([0.0] * 19 + [20.0])
    assert figures["gini"] == pytest.approx(0.95)
    assert figures["effective_token_ratio"] == pytest.approx(0.05)
    assert figures["regime_concentrated"] == 1.0


def test_completions_of_one_token_are_left_out():
    assert of([1.0], [0.0, 2.0]) == of([0.0, 2.0])
    assert of([1.0]) == {
        "gini": 0.0,
        "effective_token_ratio": 1.0,
        "regime_uniform": 0.0,
        "regime_middle": 0.0,
        "regime_concentrated": 0.0,
    }


def test_regimes_are_shares_of_completions():
    figures = of([1.0, 1.0], [1.0, 3.0], [0.0] * 11 + [1.0], [2.0, 2.0])
    assert [figures[f"regime_{name}"] for name in ("uniform", "middle", "concentrated")] == [0.5, 0.25, 0.25]


@given(completions)
def test_gini_and_ratio_equal_the_naive_ones(rows):
    rows = [[x + 0.125 for x in row] for row in rows if len(row) > 1] or [[1.0, 2.0]]
    weights, mask = padded(rows, prompt=2)
    assert gini(weights, mask).tolist() == pytest.approx([naive.gini(row) for row in rows], abs=1e-5)
    ratios = [naive.effective_token_ratio(row) for row in rows]
    assert of(*rows)["effective_token_ratio"] == pytest.approx(naive.mean(ratios), rel=1e-4)


# ---- what the weights follow ----


def test_spearman_by_hand():
    # ranks 1 2 3 4 against 2 1 4 3: 1 - 6 x 4 / (4 x 15)
    assert spearman([[1.0, 2.0, 3.0, 4.0]], [[20.0, 10.0, 40.0, 30.0]]) == pytest.approx(0.6)
    assert spearman([[1.0, 5.0, 9.0]], [[3.0, 2.0, 1.0]]) == pytest.approx(-1.0)


def test_spearman_leaves_out_completions_where_it_is_undefined():
    assert spearman([[1.0, 1.0, 1.0], [1.0, 2.0, 3.0]], [[3.0, 2.0, 1.0], [1.0, 2.0, 3.0]]) == pytest.approx(1.0)
    assert spearman([[1.0, 1.0]], [[1.0, 2.0]]) == 0.0


@given(st.data())
def test_spearman_equals_the_naive_one(data):
    rows_a = data.draw(completions)
    rows_b = [data.draw(st.lists(eighths, min_size=len(row), max_size=len(row))) for row in rows_a]
    assert spearman(rows_a, rows_b) == pytest.approx(naive.spearman(rows_a, rows_b), abs=1e-4)


# ---- cancellation ----


def clip_coefficients(r):
    """d surrogate / d logp of ppo_clip at ratio r, lo .2, hi .28, for A = +1 and A = -1."""
    return [r if r <= 1.28 else 0.0, -r if r >= 0.8 else 0.0]


@pytest.mark.parametrize("r, net, residue", [(1.0, 0.0, 0.0), (0.7, 0.35, 1.0), (1.4, -0.7, 1.0), (1.1, 0.0, 0.0)])
def test_clipping_by_the_sign_of_the_advantage_does_not_cancel(r, net, residue):
    coefficients = clip_coefficients(r)
    assert sum(coefficients) / 2 == pytest.approx(net)
    tokens, mask = torch.tensor([[4], [4]]), torch.ones(2, 1, dtype=torch.bool)
    got = cancellation_residue(torch.tensor([[c] for c in coefficients]), tokens, mask, torch.tensor([0, 0]))
    assert got == pytest.approx(residue)


@pytest.mark.parametrize("r", [1.0, 0.7, 1.4])
def test_clipping_by_the_ratio_alone_cancels(r):
    kept = 0.8 <= r <= 1.28
    tokens, mask = torch.tensor([[4], [4]]), torch.ones(2, 1, dtype=torch.bool)
    coefficients = torch.tensor([[r * kept], [-r * kept]])
    assert cancellation_residue(coefficients, tokens, mask, torch.tensor([0, 0])) == 0.0


def test_the_residue_looks_at_the_common_prefix_only():
    tokens, mask = padded([[1, 2, 3], [1, 2, 4], [1, 9, 3]])
    # only the first token is shared by all three: |2 - 1 - 0.5| / 3.5
    coefficients = torch.tensor([[2.0, 9.0, 9.0], [-1.0, 9.0, 9.0], [-0.5, 9.0, 9.0]])
    assert cancellation_residue(coefficients, tokens.long(), mask, torch.zeros(3)) == pytest.approx(0.5 / 3.5)


def test_what_follows_a_difference_is_no_longer_shared():
    tokens, mask = padded([[1, 2, 3], [1, 9, 3]])
    coefficients = torch.tensor([[1.0, 0.0, 5.0], [-1.0, 0.0, 5.0]])
    assert cancellation_residue(coefficients, tokens.long(), mask, torch.zeros(2)) == 0.0


def test_groups_do_not_cancel_one_another_and_a_group_of_one_is_left_out():
    tokens, mask = padded([[1], [1], [1], [1], [1]])
    coefficients = torch.tensor([[1.0], [1.0], [-1.0], [-1.0], [7.0]])
    assert cancellation_residue(coefficients, tokens.long(), mask, torch.tensor([0, 0, 1, 1, 2])) == 1.0


@given(st.data())
def test_the_residue_equals_the_naive_one(data):
    words = st.lists(st.integers(1, 2), min_size=1, max_size=5)
    rows = data.draw(st.lists(words, min_size=1, max_size=6))
    groups = data.draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows)))
    signed = st.integers(-8, 8).map(lambda i: i / 8)
    coefficients = [data.draw(st.lists(signed, min_size=len(row), max_size=len(row))) for row in rows]
    tokens, mask = padded(rows, prompt=2)
    got = cancellation_residue(padded(coefficients, prompt=2)[0], tokens.long(), mask, torch.tensor(groups))
    assert got == pytest.approx(naive.cancellation_residue(coefficients, rows, groups), abs=1e-5)


# ---- the contrast ----


def test_sign_flip_rate_by_hand():
    # token 1: +1 when right, -1 when wrong: flips. token 2: means 1 and 2: no. token 3: seen in wrong ones only
    tokens, mask = padded([[1, 2, 2], [1, 2, 3]])
    contrast = torch.tensor([[1.0, 3.0, -1.0], [-1.0, 2.0, -5.0]])
    assert sign_flip_rate(contrast, tokens.long(), mask, torch.tensor([True, False])) == 0.5
    assert sign_flip_rate(contrast, tokens.long(), mask, torch.tensor([True, True])) == 0.0


@given(st.data())
def test_sign_flip_rate_equals_the_naive_one(data):
    rows = data.draw(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=6), min_size=1, max_size=5))
    correct = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    signed = st.integers(-8, 8).map(float)
    contrast = [data.draw(st.lists(signed, min_size=len(row), max_size=len(row))) for row in rows]
    tokens, mask = padded(rows, prompt=1)
    got = sign_flip_rate(padded(contrast, prompt=1)[0], tokens.long(), mask, torch.tensor(correct))
    assert got == pytest.approx(naive.sign_flip_rate(contrast, rows, correct))


# ---- the record of a step ----


def two_completions(**options):
    """Residuals 1 3 0 4 (weights .5 1.5 0 2) with A = .5, and 1 1 (weights 1 1) with A = -.5."""
    trajectories = [
        trajectory(3, 0, [7, 8, 7, 1], 1.0, logprobs=[-1.0, -1.0, -2.0, -1.0], version=4),
        trajectory(3, 1, [7, 9], 0.0, logprobs=[-1.0, -3.0], version=2, finish="length"),
    ]
    rows = [
        signals(
            logp=[-1.0, -1.0, -1.0, -1.0],
            logp_base=[-1.0, -1.0, -2.0, -1.0],
            logp_negative=[-2.0, -1.0, -31.0, -1.0],
            entropy=[0.0, 3.0, 1.0, 2.0],
            residual=[1.0, 3.0, 0.0, 4.0],
            residual_noise=[0.1] * 4,
        ),
        signals(
            logp=[-1.0, -3.0],
            logp_base=[-1.0, -3.0],
            logp_negative=[0.0, -3.0],
            entropy=[1.0, 5.0],
            residual=[1.0, 1.0],
            residual_noise=[0.4] * 2,
        ),
    ]
    return credit.assign(trajectories, rows, method="arca", advantage="dr_grpo", version=5, **options)


def test_the_record_of_a_step_by_hand():
    _, figures = two_completions()
    e = math.e
    expected = {
        # (-3 x 0 - .5 + 1.5 + 6) / 16 = 7/16 and 0; 16 / (4 x 6.5) and 1
        "credit/gini": 7 / 32,
        "credit/effective_token_ratio": (16 / 26 + 1) / 2,
        "credit/regime_uniform": 0.5,
        "credit/regime_middle": 0.5,
        "credit/regime_concentrated": 0.0,
        "credit/sharpening": 1.0,
        "credit/gini_p1": 7 / 32,
        # squares 0 1 9 16: (-1 + 9 + 48) / (4 x 26)
        "credit/gini_p2": 56 / 104 / 2,
        # ranks 2 3 1 4 against 1 2 3 4: 1 - 6 x 6 / 60; the second is undefined
        "credit/position_spearman": 0.4,
        # against the ranks 1 4 2 3 of the entropies: 1 - 6 x (1 + 1 + 1 + 1) / 60
        "credit/entropy_spearman": 0.6,
        "credit/first_token_share": (0.125 + 0.5) / 2,
        "credit/eos_share": 0.5,  # of the one that stopped
        "credit/template_share": 1.0,  # four kinds of tokens are fewer than 20
        # token 7 is shared: .5 x .5 against -.5 x 1
        "credit/cancellation_residue": 0.25 / 0.75,
        # of 7, the only token in both: (1 + 30) / 2 against -1
        "credit/sign_flip_rate": 1.0,
        "credit/gcpo_capped_share": 1 / 6,
        # group mean 2: high are 3, 2 and 5
        "quadrant/phr_tokens": 2 / 6,
        "quadrant/plr_tokens": 2 / 6,
        "quadrant/nhr_tokens": 1 / 6,
        "quadrant/nlr_tokens": 1 / 6,
        "quadrant/phr_mass": 3.5 / 6,
        "quadrant/plr_mass": 0.5 / 6,
        "quadrant/nhr_mass": 1 / 6,
        "quadrant/nlr_mass": 1 / 6,
        "policy/entropy": 2.0,
        # one token with log-ratio -1: e^-1 + 1 - 1
        "policy/kl_base": 1 / e / 6,
        # one token with log-ratio +1: e - 1 - 1
        "mismatch/kl": (e - 2) / 6,
        "mismatch/ratio_mean": (5 + e) / 6,
        "residual/mean": 10 / 6,
        "residual/max": 4.0,
        "residual/noise_floor": 0.2,
        "groups/no_signal": 0.0,
        "staleness/share_1": 0.5,
        "staleness/share_3": 0.5,
        "credit_other/uniform/gini": 0.0,
        "credit_other/uniform/effective_token_ratio": 1.0,
        # -logp is equal in the first, 1 and 3 in the second: (-1 + 3) / (2 x 4)
        "credit_other/surprisal/gini": 0.25 / 2,
        # the entropy falls once in the first, and never in the second
        "credit_other/entropy_reduction/effective_token_ratio": (0.25 + 1) / 2,
    }
    for name, value in expected.items():
        assert figures[name] == pytest.approx(value, abs=1e-5), name
    others = {"uniform", "surprisal", "entropy_reduction", "divergence", "forking", "gcpo"}
    assert {name.split("/")[1] for name in figures if name.startswith("credit_other/")} == others
    ours = {name for name in figures if not name.startswith("credit_other/")}
    assert ours == {name for name in expected if not name.startswith("credit_other/")}


def test_figures_of_the_method_do_not_depend_on_the_quadrant_that_is_trained():
    _, whole = two_completions()
    _, part = two_completions(quadrant="PHR")
    assert {name for name in whole if whole[name] != part[name]} == {"credit/cancellation_residue"}


def test_without_optional_signals_their_figures_are_absent():
    trajectories = [trajectory(0, 0, [1, 2], 1.0), trajectory(0, 1, [1], 1.0)]
    _, figures = credit.assign(trajectories, [signals(logp=[-1.0, -2.0]), signals(logp=[-1.0])])
    assert figures["groups/no_signal"] == 1.0
    areas = ("quadrant/", "residual/", "policy/", "staleness/")
    assert not [name for name in figures if name.startswith(areas) or "sign_flip" in name]
    assert all(isinstance(value, float) and math.isfinite(value) for value in figures.values())


def test_template_mass_is_that_of_the_20_most_frequent_tokens():
    trajectories, rows = random_step(groups=6, size=6, longest=30, vocabulary=60)
    batch, figures = credit.assign(trajectories, rows, method="arca")
    weights = unpadded(credit.weights("arca", {"residual": stacked(rows, batch)}, batch.mask), batch.mask)
    expected = naive.template_share(weights, unpadded(batch.tokens, batch.mask))
    assert 0.1 < expected < 0.9
    assert figures["credit/template_share"] == pytest.approx(expected, abs=1e-5)


def stacked(rows, batch):
    out = torch.zeros(batch.mask.shape)
    for i, row in enumerate(rows):
        out[i, : len(row["residual"])] = torch.from_numpy(row["residual"])
    return out
