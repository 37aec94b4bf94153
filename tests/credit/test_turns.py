"""Masks with holes: an episode is credited as if what its environment said were not there."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from credit import METHODS, assign
from credit.ibpo import Revision
from credit.trajectory import Turn
from credit.weights import entropy_reduction
from tests.credit.build import PROMPT, random_step, signals, trajectory

OBSERVATION = [7, 8, 7]


def interrupted(row, values):
    """The same trajectory with an observation after every third token, and signals that are not 0 there."""
    completion = np.flatnonzero(row.mask)
    places = [int(t) for t in completion[2::3] if t + 1 < len(row.mask)]

    def insert(array, fill):
        return np.insert(array, [t + 1 for t in places for _ in OBSERVATION], fill * len(places), axis=0)

    rng = np.random.default_rng(0)
    noisy = {
        name: insert(array, [rng.normal()] * len(OBSERVATION) if array.ndim == 1 else [9.0] * len(OBSERVATION))
        for name, array in values.items()
        if name != "delta_feature"
    }
    feature = values["delta_feature"]
    noisy["delta_feature"] = np.insert(feature, [t + 1 for t in places for _ in OBSERVATION], 9.0, axis=0)
    return (
        replace(
            row,
            tokens=insert(row.tokens, OBSERVATION),
            mask=insert(row.mask, [False] * len(OBSERVATION)),
            logprobs=insert(row.logprobs, [0.0] * len(OBSERVATION)),
        ),
        noisy,
    )


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"entropy_reduction"}))
def test_observations_change_no_weight_and_get_none(method):
    rows, signals = random_step(seed=3)
    holed = [interrupted(row, mine) for row, mine in zip(rows, signals, strict=True)]
    assert any(len(row.tokens) > len(PROMPT) + int(row.mask.sum()) for row, _ in holed)
    revisions = None
    if method == "ibpo":
        wrong = next(row for row in rows if row.reward < 1)
        revisions = {(wrong.group, wrong.index): [Revision(np.array([1, *wrong.tokens[wrong.mask][1:]]), True)]}
    given = {"method": method, "revisions": revisions, "quadrant": None, "version": 2}
    batch, figures = assign(rows, signals, **given)
    with_holes, holed_figures = assign([row for row, _ in holed], [mine for _, mine in holed], **given)
    assert not with_holes.advantages[~with_holes.mask].any()
    for name in ("advantages", "logp_old", "logp_rollout", "tokens"):
        for plain, other, mask, holed_mask in zip(
            getattr(batch, name), getattr(with_holes, name), batch.mask, with_holes.mask, strict=True
        ):
            torch.testing.assert_close(other[holed_mask], plain[mask], rtol=1e-5, atol=1e-6)
    for name, value in figures.items():
        if "entropy_reduction" not in name:  # it looks at neighbours
            assert holed_figures[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_the_entropy_of_the_next_turn_is_no_reduction():
    entropy = torch.tensor([[0.0, 3.0, 2.0, 0.0, 1.0, 0.5]])
    mask = torch.tensor([[False, True, True, False, True, True]])
    # 3 -> 2 and 1 -> 0.5 within a turn; 2 -> (observation) is none
    assert entropy_reduction(mask, entropy=entropy).tolist() == [[0.0, 1.0, 0.0, 0.0, 0.5, 0.0]]


def episode(index, rewards):
    """Turns of two tokens, with one token of an observation between them; the prompt has two tokens."""
    tokens = [9] * (3 * len(rewards) - 1)
    row = trajectory(0, index, tokens, sum(rewards))
    mask = row.mask.copy()
    mask[4::3] = False
    turns = tuple(Turn(3 + 3 * k, reward) for k, reward in enumerate(rewards))
    return replace(row, mask=mask, logprobs=row.logprobs * mask, turns=turns), signals(logp=[-1.0] * len(tokens))


def test_a_turn_is_credited_with_what_came_after_its_beginning():
    rows, mine = zip(*(episode(i, r) for i, r in enumerate([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0, 3.0]])), strict=True)
    batch, _ = assign(rows, mine, advantage="dr_grpo", turns=True)
    # rewards to go of the first turns: 1, 1, 4, mean 2; of the second: 0, 1, 4, mean 5/3; the third is alone
    first, second = [-1.0, -1.0, 2.0], [-5 / 3, -2 / 3, 7 / 3]
    for row, (a, b) in enumerate(zip(first, second, strict=True)):
        expected = [0.0, 0.0, a, a, 0.0, b, b, 0.0, 0.0, 0.0]
        assert batch.advantages[row].tolist() == pytest.approx(expected, abs=1e-6)
    assert batch.rewards.tolist() == [1.0, 1.0, 4.0]


def test_one_turn_is_credited_like_a_completion():
    rows, mine = zip(*(episode(i, [r]) for i, r in enumerate([1.0, 0.0, 0.5])), strict=True)
    batch, _ = assign(rows, mine, turns=True)
    plain, _ = assign(rows, mine)
    torch.testing.assert_close(batch.advantages, plain.advantages)


def test_turns_without_an_environment_are_refused():
    row = trajectory(0, 0, [9, 9], 1.0)
    with pytest.raises(ValueError, match=r"credit\.turns: trajectory 0/0 has no turns: it needs an environment"):
        assign([row], [signals(logp=[-1.0, -1.0])], turns=True)
