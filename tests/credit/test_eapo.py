import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import credit
from credit.eapo import quadrants
from tests.credit import naive
from tests.credit.build import eighths, padded, unpadded


def advantages_of(rows, advantages, groups, **options):
    entropy, mask = padded(rows, prompt=1, fill=float("nan"))
    advantages, groups = torch.tensor(advantages), torch.tensor(groups)
    weights = credit.weights("eapo", {"entropy": entropy}, mask, advantages=advantages, groups=groups, **options)
    assert not weights[~mask].any()
    return unpadded(weights * advantages[:, None], mask)


# entropies 0, 1, 2, 3 in one group: mean 1.5, deviation sqrt(5)/2 = 1.118034, z = -+1.341641, -+.447214
ROWS = [[0.0, 3.0], [1.0, 2.0]]


def test_the_additive_bonus_is_clipped_by_the_advantage():
    # |A|/phi = .5 clips 1.34 and not .447; times a = .2
    got = advantages_of(ROWS, [1.0, -1.0], [0, 0])
    assert got[0] == pytest.approx([0.9, 1.1])
    assert got[1] == pytest.approx([-1 + 0.0894427, -1 - 0.0894427])


def test_the_additive_bonus_does_not_scale_with_a_large_advantage():
    # |A|/phi = 5 clips nothing: 10 -+ .2 x 1.341641
    assert advantages_of(ROWS, [10.0, -10.0], [0, 0])[0] == pytest.approx([9.7316718, 10.2683282])


def test_the_multiplicative_form_scales_with_the_advantage():
    # clip(z, -1, 1) = -1, 1 and -+.447214; times a/phi = .1
    got = advantages_of(ROWS, [10.0, -10.0], [0, 0], multiplicative=True)
    assert got[0] == pytest.approx([9.0, 11.0])
    assert got[1] == pytest.approx([-10 + 0.447214, -10 - 0.447214])


def test_a_completion_without_advantage_stays_without():
    assert advantages_of(ROWS, [0.0, 0.0], [0, 0]) == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("multiplicative", [False, True])
def test_equal_entropies_give_plain_grpo_exactly(multiplicative):
    got = advantages_of([[0.1] * 7, [0.1] * 3], [1.0, -1.0], [0, 0], multiplicative=multiplicative)
    assert got == [[1.0] * 7, [-1.0] * 3]


@pytest.mark.parametrize("multiplicative", [False, True])
@given(data=st.data())
def test_eapo_equals_the_naive_one(multiplicative, data):
    rows = data.draw(st.lists(st.lists(eighths, min_size=1, max_size=6), min_size=1, max_size=5))
    signed = st.integers(-16, 16).map(lambda i: i / 8)
    advantages = data.draw(st.lists(signed, min_size=len(rows), max_size=len(rows)))
    groups = data.draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows)))
    got = advantages_of(rows, advantages, groups, multiplicative=multiplicative)
    expected = naive.eapo(rows, advantages, groups, multiplicative=multiplicative)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)


def test_a_strength_that_could_flip_a_sign_is_refused():
    with pytest.raises(ValueError, match=r"strength=3\.0, phi=2\.0, expected 0 <= strength <= phi"):
        advantages_of(ROWS, [1.0, -1.0], [0, 0], strength=3.0)


def test_eapo_says_which_batch_facts_it_misses():
    with pytest.raises(ValueError, match="method 'eapo' needs advantages=, got None"):
        credit.weights("eapo", {"entropy": torch.ones(1, 2)}, torch.ones(1, 2, dtype=torch.bool))


def test_quadrants_split_by_advantage_and_by_the_mean_entropy_of_the_group():
    # group 0: mean 1.5; group 1: mean 10, at which a token is high; the last completion has no advantage
    entropy, mask = padded([[0.0, 3.0], [1.0, 2.0], [10.0, 10.0], [10.0]])
    got = quadrants(entropy, torch.tensor([1.0, -1.0, 2.0, 0.0]), torch.tensor([0, 0, 1, 1]), mask)
    assert got.PHR.tolist() == [[False, True], [False, False], [True, True], [False, False]]
    assert got.PLR.tolist() == [[True, False], [False, False], [False, False], [False, False]]
    assert got.NHR.tolist() == [[False, False], [False, True], [False, False], [False, False]]
    assert got.NLR.tolist() == [[False, False], [True, False], [False, False], [False, False]]
