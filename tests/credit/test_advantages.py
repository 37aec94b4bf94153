import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import credit
from tests.credit import naive

NAMES = sorted(credit.ADVANTAGES)


def of(name, rewards, groups, **options):
    return credit.advantages(name, torch.tensor(rewards), torch.tensor(groups), **options)


def test_grpo_divides_by_the_sample_deviation():
    # mean 1/4, squares 9/16 + 3/16 = 3/4, over 3: std 1/2
    assert of("grpo", [1.0, 0.0, 0.0, 0.0], [7] * 4).tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5])


def test_grpo_with_ddof_0_divides_by_the_population_deviation():
    # 3/4 over 4: std sqrt(3)/4
    third = 3**-0.5
    expected = [3 * third, -third, -third, -third]
    assert of("grpo", [1.0, 0.0, 0.0, 0.0], [7] * 4, ddof=0).tolist() == pytest.approx(expected)


def test_eps_is_added_to_the_deviation():
    assert of("grpo", [1.0, 0.0, 0.0, 0.0], [0] * 4, eps=0.5).tolist() == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_dr_grpo_subtracts_the_mean_of_each_group():
    assert of("dr_grpo", [1.0, 5.0, 0.0, 9.0], [3, -2, 3, -2]).tolist() == [0.5, -2.0, -0.5, 2.0]


def test_rloo_subtracts_the_mean_of_the_others():
    # 4 - (1+1)/2 = 3; 1 - (4+1)/2 = -1.5
    assert of("rloo", [4.0, 1.0, 1.0], [0, 0, 0]).tolist() == pytest.approx([3.0, -1.5, -1.5])


def test_reinforce_pp_divides_by_the_deviation_of_the_batch():
    # centred: 1, -1, 0, 0, 2, -2; squares 10, over 5: std sqrt(2)
    expected = [x / 2**0.5 for x in (1, -1, 0, 0, 2, -2)]
    assert of("reinforce_pp", [2.0, 0.0, 3.0, 3.0, 4.0, 0.0], [0, 0, 1, 1, 2, 2]).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("name", NAMES)
@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 9))
def test_a_group_with_equal_rewards_has_no_advantage(name, reward, size):
    got = of(name, [reward] * size + [0.0, 1.0], [0] * size + [1, 1])
    assert got[:size].tolist() == [0.0] * size
    assert got[size:].tolist() != [0.0, 0.0]


@pytest.mark.parametrize("name", NAMES)
@given(st.lists(st.tuples(st.integers(-8, 8), st.integers(-2, 2)), min_size=1, max_size=20))
def test_advantages_equal_the_naive_ones_in_any_order(name, rows):
    rewards, groups = [r / 4 for r, _ in rows], [g for _, g in rows]
    got = of(name, rewards, groups)
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx(naive.advantages(name, rewards, groups), abs=1e-5)
    backwards = of(name, rewards[::-1], groups[::-1])
    assert backwards.tolist()[::-1] == pytest.approx(got.tolist(), abs=1e-5)


@pytest.mark.parametrize("name", NAMES)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 3)), min_size=2, max_size=20))
def test_advantages_of_a_group_sum_to_zero(name, rows):
    groups = torch.tensor([g for _, g in rows])
    got = of(name, [float(r) for r, _ in rows], groups.tolist())
    for group in groups.unique():
        assert got[groups == group].sum().item() == pytest.approx(0, abs=1e-5)


def test_a_reward_that_is_nan_is_refused_with_its_row():
    with pytest.raises(ValueError, match="row 1 is nan"):
        of("grpo", [1.0, float("nan")], [0, 0])


def test_misshapen_groups_are_refused():
    with pytest.raises(ValueError, match=r"rewards of shape \[2\] and groups of shape \[3\]"):
        of("rloo", [1.0, 0.0], [0, 0, 0])


def test_an_unknown_advantage_names_the_known_ones():
    with pytest.raises(ValueError, match="got 'gae', expected one of grpo, dr_grpo, rloo, reinforce_pp"):
        of("gae", [1.0], [0])


def test_an_unknown_option_names_the_known_ones():
    with pytest.raises(ValueError, match="got 'std', but the options of 'grpo' are: one of ddof, eps"):
        of("grpo", [1.0], [0], std=1)
    with pytest.raises(ValueError, match="the options of 'rloo' are: none"):
        of("rloo", [1.0], [0], ddof=1)


@pytest.mark.parametrize("options", [{"ddof": 2}, {"eps": -1.0}])
def test_a_bad_value_of_an_option_is_refused(options):
    with pytest.raises(ValueError, match=f"option {next(iter(options))}"):
        of("grpo", [1.0, 0.0], [0, 0], **options)
