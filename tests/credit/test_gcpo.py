import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import credit
from credit.gcpo import NORMALISERS, SIGNALS_OF, capped_share
from tests.credit import naive
from tests.credit.build import eighths, padded, unpadded


def row(kl, normaliser):
    mask = torch.ones(1, len(kl), dtype=torch.bool)
    options = {"divergence": "kl", "normaliser": normaliser}
    return credit.weights("gcpo", {"kl_negative": torch.tensor([kl])}, mask, **options)[0].tolist()


def test_rank_power_gives_the_top_40_percent_of_the_tokens_80_percent_of_the_mass():
    weights = sorted(row([float(t) for t in range(1000)], "rank_power"))
    assert sum(weights[600:]) / 1000 == pytest.approx(0.8, abs=2e-3)
    # a = 2.1507: the first of 1000 against the last is 1000^-a
    assert weights[0] / weights[-1] == pytest.approx(1000**-2.1507, rel=1e-2)


def test_rank_power_depends_on_ranks_only():
    # (1/3, 2/3, 1)^2.1507 = .094155, .418117, 1; sum 1.512272
    expected = [3 * x / 1.512272 for x in (0.418117, 1.0, 0.094155)]
    assert row([0.2, 7.0, 0.1], "rank_power") == pytest.approx(expected, rel=1e-4)


def test_other_shares_change_the_power():
    # top 50 % with 75 %: a = ln(.25)/ln(.5) - 1 = 1, so weights are the ranks
    mask = torch.ones(1, 3, dtype=torch.bool)
    signals = {"kl_negative": torch.tensor([[0.2, 7.0, 0.1]])}
    got = credit.weights("gcpo", signals, mask, divergence="kl", top_share=0.5, top_mass=0.75)
    assert got[0].tolist() == pytest.approx([1.0, 1.5, 0.5])


def test_ties_share_their_average_rank():
    weights = row([1.0, 5.0, 1.0, 0.0], "rank_power")
    assert weights[0] == weights[2]
    powers = [(rank / 4) ** 2.15069 for rank in (2.5, 4, 2.5, 1)]
    assert weights == pytest.approx([4 * x / sum(powers) for x in powers], rel=1e-4)


def test_cdf_is_the_share_of_tokens_with_a_smaller_divergence_and_is_not_renormalised():
    assert row([0.2, 7.0, 0.1, 0.2], "cdf") == [0.25, 0.75, 0.0, 0.25]


def test_softmax_of_the_divergence():
    # e^0, e^ln3: 1/4 and 3/4, times 2
    assert row([0.0, math.log(3)], "softmax") == pytest.approx([0.5, 1.5])


def test_minmax_of_the_divergence():
    # 0, 1/4, 1 of 5/4, times 3
    assert row([1.0, 2.0, 5.0], "minmax") == pytest.approx([0.0, 0.6, 2.4])


@pytest.mark.parametrize(
    "divergence, order",
    [
        # d = logp_negative - logp = -1, 1, 2, -2: e^d - d - 1 is .368, .718, 4.39, 1.135
        ("k3", [1, 2, 4, 3]),
        # gains 1, -1, -2, 2
        ("information_gain", [3, 1.5, 1.5, 4]),
        ("abs", [1.5, 1.5, 3.5, 3.5]),
    ],
)
def test_each_divergence_orders_the_tokens_in_its_own_way(divergence, order):
    signals = {"logp": torch.tensor([[-1.0, -2.0, -3.0, -1.0]]), "logp_negative": torch.tensor([[-2.0, -1, -1, -3]])}
    mask = torch.ones(1, 4, dtype=torch.bool)
    # with the power 1 the weights are the ranks over their mean, 2.5
    got = credit.weights("gcpo", signals, mask, divergence=divergence, top_share=0.5, top_mass=0.75)
    assert got[0].tolist() == pytest.approx([rank / 2.5 for rank in order])


@pytest.mark.parametrize("normaliser", NORMALISERS)
@pytest.mark.parametrize("divergence", sorted(SIGNALS_OF))
def test_a_negative_prompt_that_changes_nothing_gives_plain_grpo(divergence, normaliser):
    logp = -torch.rand(3, 50)
    mask = torch.arange(50) < torch.tensor([[50], [1], [17]])
    signals = {"logp": logp, "logp_negative": logp.clone(), "kl_negative": torch.zeros(3, 50)}
    weights = credit.weights("gcpo", signals, mask, divergence=divergence, normaliser=normaliser)
    assert torch.equal(weights, mask.float())


@pytest.mark.parametrize("normaliser", NORMALISERS)
@pytest.mark.parametrize("divergence", sorted(SIGNALS_OF))
@given(data=st.data())
@settings(max_examples=15)
def test_gcpo_equals_the_naive_one(divergence, normaliser, data):
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    rows = {
        signal: [data.draw(st.lists(eighths, min_size=n, max_size=n)) for n in lengths]
        for signal in ("logp", "logp_negative", "kl_negative")
    }
    _, mask = padded(rows["logp"], prompt=1)
    signals = {signal: padded(values, prompt=1)[0] for signal, values in rows.items()}
    got = credit.weights("gcpo", signals, mask, divergence=divergence, normaliser=normaliser)
    for i, weights in enumerate(unpadded(got, mask)):
        mine = {signal: values[i] for signal, values in rows.items()}
        assert weights == pytest.approx(naive.gcpo(mine, divergence, normaliser), rel=2e-3, abs=1e-4)


def test_extreme_contrasts_are_clamped_and_capped():
    # d = 100 and 30 are both capped at 10, d = -5 gives 4.0067, d = 0 gives 0
    logp = torch.tensor([[-100.0, -30.0, 0.0, -1.0]])
    logp_negative = torch.tensor([[0.0, 0.0, -5.0, -1.0]])
    mask = torch.ones(1, 4, dtype=torch.bool)
    signals = {"logp": logp, "logp_negative": logp_negative}
    weights = credit.weights("gcpo", signals, mask, normaliser="minmax")
    assert weights[0].tolist() == pytest.approx([4 * x / 24.0067 for x in (10, 10, 4.0067, 0)], rel=1e-4)
    assert capped_share(mask, logp=logp, logp_negative=logp_negative) == 0.5


@pytest.mark.parametrize(
    "options, message",
    [
        ({"divergence": "js"}, "option divergence: got 'js', expected one of k3, kl, information_gain, abs"),
        ({"normaliser": "l2"}, "option normaliser: got 'l2', expected one of rank_power, cdf, softmax, minmax"),
        ({"top_share": 0.9}, "top_share=0.9, top_mass=0.8"),
    ],
)
def test_bad_options_are_refused(options, message):
    signals = {"logp": torch.zeros(1, 2), "logp_negative": torch.zeros(1, 2)}
    with pytest.raises(ValueError, match=message):
        credit.weights("gcpo", signals, torch.ones(1, 2, dtype=torch.bool), **options)
