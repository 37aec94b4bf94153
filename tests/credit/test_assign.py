import dataclasses

import numpy as np
import pytest
import torch

import credit
from credit.ibpo import Revision
from tests.credit import naive
from tests.credit.build import random_step, signals, trajectory, unpadded

METHODS = sorted(credit.METHODS)


def tensors(batch):
    return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}


def test_a_batch_by_hand():
    """Rewards 1 and 0: A = +-.707107. Residuals 1 3 0 4 give weights .5 1.5 0 2."""
    trajectories = [trajectory(5, 1, [7], 0.0, logprobs=[-0.5]), trajectory(5, 0, [7, 8, 9, 1], 1.0)]
    rows = [signals(logp=[-0.25], residual=[2.0]), signals(logp=[-1.0, -2, -3, -4], residual=[1.0, 3.0, 0.0, 4.0])]
    batch, _ = credit.assign(trajectories, rows, method="arca")
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9, 1], [5, 6, 7, 0, 0, 0]]
    assert batch.lengths.tolist() == [6, 3]
    assert batch.mask.tolist() == [[False] * 2 + [True] * 4, [False] * 2 + [True] + [False] * 3]
    a = 0.5**0.5
    expected = torch.tensor([[0, 0, 0.5 * a, 1.5 * a, 0, 2 * a], [0, 0, -a, 0, 0, 0]])
    torch.testing.assert_close(batch.advantages, expected)
    assert batch.logp_old.tolist() == [[0, 0, -1, -2, -3, -4], [0, 0, -0.25, 0, 0, 0]]
    assert batch.logp_rollout.tolist() == [[0, 0, -1, -1, -1, -1], [0, 0, -0.5, 0, 0, 0]]
    assert batch.logp_base is None
    assert batch.groups.tolist() == [5, 5]
    assert batch.rewards.tolist() == [1.0, 0.0]


def test_logp_base_is_kept_when_it_is_there():
    trajectories, rows = random_step()
    batch, _ = credit.assign(trajectories, rows)
    assert batch.logp_base is not None
    expected = np.concatenate([row["logp_base"][t.mask] for row, t in zip(rows, trajectories, strict=True)])
    assert np.array_equal(batch.logp_base[batch.mask].numpy(), expected)


@pytest.mark.parametrize("permute", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_the_order_of_arrival_changes_no_bit(method, permute):
    trajectories, rows = random_step(seed=1)
    wrong = min((t.group, t.index) for t in trajectories if t.reward < 1)
    revisions = {wrong: [Revision(np.array([1, 2]), True)]} if method == "ibpo" else None
    settings = {"method": method, "permute": permute, "quadrant": "PHR", "version": 3, "revisions": revisions}
    expected, figures = credit.assign(trajectories, rows, **settings)
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(rows))
        shuffled = [trajectories[i] for i in order], [rows[i] for i in order]
        batch, again = credit.assign(*shuffled, **settings)
        assert again == figures
        for name, value in tensors(expected).items():
            assert torch.equal(getattr(batch, name), value), name


@pytest.mark.parametrize("advantage", sorted(credit.ADVANTAGES))
@pytest.mark.parametrize("method", ["arca", "gcpo", "eapo", "delta"])
def test_token_advantages_equal_the_naive_ones(method, advantage):
    trajectories, rows = random_step(seed=2)
    batch, _ = credit.assign(trajectories, rows, method=method, advantage=advantage)
    a = naive.advantages(advantage, [t.reward for t in trajectories], [t.group for t in trajectories])
    values = [{k: v[t.mask].tolist() for k, v in row.items()} for row, t in zip(rows, trajectories, strict=True)]
    if method == "eapo":
        expected = naive.eapo([row["entropy"] for row in values], a, [t.group for t in trajectories])
    else:
        if method == "delta":
            weights = naive.delta([row["delta_feature"] for row in values], a)
        elif method == "gcpo":
            weights = [naive.gcpo(row) for row in values]
        else:
            weights = [naive.normalise(row["residual"]) for row in values]
        expected = [[x * m for m in row] for x, row in zip(a, weights, strict=True)]
    for mine, theirs in zip(unpadded(batch.advantages, batch.mask), expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-4)
    assert not batch.advantages[~batch.mask].any()


@pytest.mark.parametrize(
    "quadrant, high, sign", [("PHR", True, 1), ("PLR", False, 1), ("NHR", True, -1), ("NLR", False, -1)]
)
def test_a_quadrant_trains_only_its_tokens(quadrant, high, sign):
    trajectories, rows = random_step(seed=4)
    whole, _ = credit.assign(trajectories, rows, method="arca")
    part, _ = credit.assign(trajectories, rows, method="arca", quadrant=quadrant)
    for i, t in enumerate(trajectories):
        pool = [
            h for u, row in zip(trajectories, rows, strict=True) if u.group == t.group for h in row["entropy"][u.mask]
        ]
        for position in t.mask.nonzero()[0]:
            keep = (rows[i]["entropy"][position] >= np.mean(pool)) == high and (
                whole.advantages[i, position].item() * sign > 0
            )
            assert part.advantages[i, position] == (whole.advantages[i, position] if keep else 0.0)
    assert part.advantages.any()


def test_a_permutation_keeps_what_each_completion_gets_and_depends_on_the_seed():
    trajectories, rows = random_step(seed=5)
    plain, figures = credit.assign(trajectories, rows, method="arca")
    shuffled, control = credit.assign(trajectories, rows, method="arca", permute=True, seed=1)
    torch.testing.assert_close(shuffled.advantages.sort(1).values, plain.advantages.sort(1).values)
    assert control["credit/gini"] == pytest.approx(figures["credit/gini"])
    other, _ = credit.assign(trajectories, rows, method="arca", permute=True, seed=2)
    assert not torch.equal(shuffled.advantages, plain.advantages)
    assert not torch.equal(shuffled.advantages, other.advantages)


def test_options_reach_the_method_and_the_advantage():
    trajectories = [trajectory(0, 0, [1, 2, 3, 4], 1.0), trajectory(0, 1, [1], 0.0)]
    rows = [signals(logp=[-1.0] * 4, entropy=[1.0, 4.0, 3.0, 2.0]), signals(logp=[-1.0], entropy=[1.0])]
    batch, _ = credit.assign(
        trajectories, rows, method="forking", options={"q": 0.5}, advantage_options={"ddof": 0, "eps": 0.5}
    )
    # std .5 with ddof 0: A = .5 / (.5 + .5); two tokens of four with weight 2
    assert batch.advantages[0, 2:].tolist() == pytest.approx([0.0, 1.0, 1.0, 0.0], abs=1e-6)


def test_what_a_signal_holds_outside_the_mask_changes_nothing():
    trajectories, rows = random_step(seed=6)
    expected, figures = credit.assign(trajectories, rows, method="gcpo")
    for row, t in zip(rows, trajectories, strict=True):
        for values in row.values():
            values[~t.mask] = np.nan
    batch, again = credit.assign(trajectories, rows, method="gcpo")
    assert again == figures
    for name, value in tensors(expected).items():
        assert torch.equal(getattr(batch, name), value), name


def test_tensors_have_the_types_that_the_batch_promises():
    batch, _ = credit.assign(*random_step())
    types = {name: value.dtype for name, value in tensors(batch).items()}
    integers, floats = (
        {"tokens", "lengths", "groups"},
        {"advantages", "logp_old", "logp_rollout", "logp_base", "rewards"},
    )
    assert types == {
        "mask": torch.bool, **dict.fromkeys(integers, torch.int64), **dict.fromkeys(floats, torch.float32)
    }  # fmt: skip


# ---- what is refused ----


def refused(message, change):
    trajectories, rows = random_step()
    arguments = change(trajectories, rows) or {}
    with pytest.raises(ValueError, match=message):
        credit.assign(trajectories, rows, **arguments)


def test_a_nan_is_refused_with_its_signal_and_trajectory():
    def change(trajectories, rows):
        rows[5]["entropy"][2] = np.nan

    refused("signal 'entropy': NaN or infinite at trajectory 1/1, position 2", change)


def test_a_nan_of_the_sampler_is_refused():
    refused("signal 'logprobs': NaN or infinite at trajectory 0/2", lambda t, rows: t[2].logprobs.fill(np.inf))


def test_a_signal_that_one_trajectory_lacks_is_refused():
    refused(
        "signal 'residual': got nothing for trajectory 0/3, expected", lambda t, rows: rows[3].__delitem__("residual")
    )


def test_a_signal_of_the_wrong_length_is_refused():
    def change(trajectories, rows):
        rows[4]["logp"] = rows[4]["logp"][:-1]

    refused("signal 'logp': got .* values for trajectory 1/0, expected", change)


def test_missing_logp_is_refused():
    refused("signal 'logp': got nothing", lambda t, rows: [row.pop("logp") for row in rows] and {})


def test_a_trajectory_that_comes_twice_is_refused():
    def change(trajectories, rows):
        trajectories.append(trajectories[6])
        rows.append(rows[6])

    refused("trajectory 1/2 is there 2 times", change)


def test_an_empty_or_uneven_step_is_refused():
    with pytest.raises(ValueError, match="got 0 trajectories and 0 signals"):
        credit.assign([], [])
    refused("got 16 trajectories and 15 signals", lambda t, rows: rows.pop() and {})


def test_a_reward_that_is_nan_is_refused():
    def change(trajectories, rows):
        trajectories[0] = dataclasses.replace(trajectories[0], reward=float("nan"))

    refused("reward of row 0 is nan", change)


def test_a_quadrant_needs_entropy():
    refused(
        "PHR needs the signal 'entropy'", lambda t, rows: [row.pop("entropy") for row in rows] and {"quadrant": "PHR"}
    )


def test_an_unknown_option_is_refused():
    for method in ("arca", "ibpo"):
        refused(
            f"got 'x', but the options of '{method}' are", lambda t, rows, m=method: {"method": m, "options": {"x": 1}}
        )


def test_ibpo_without_revisions_is_refused_and_not_silently_something_else():
    refused("method 'ibpo' needs revisions=, got None", lambda t, rows: {"method": "ibpo"})


def test_an_unknown_quadrant_is_refused():
    refused("got 'XX', expected one of PHR", lambda t, rows: {"quadrant": "XX"})
