import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import credit
from credit.delta import Feature
from tests.credit import naive
from tests.credit.build import random_step


def weights(rows, advantages, prompt=0):
    """Rows of tokens of features -> rows of weights."""
    hidden, width = len(rows[0][0]), prompt + max(map(len, rows))
    feature = torch.full((len(rows), width, hidden), float("nan"))
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        feature[i, prompt : prompt + len(row)] = torch.tensor(row)
        mask[i, prompt : prompt + len(row)] = True
    got = credit.weights("delta", {"delta_feature": feature}, mask, advantages=torch.tensor(advantages))
    assert not got[~mask].any()
    return [row[keep].tolist() for row, keep in zip(got, mask, strict=True)]


def test_delta_by_hand():
    """One feature. Positive tokens 3 and 1, negative ones -1 and -1, |A| = 1.

    mu+ = 2, mu- = -1: the margins (v+1)^2 - (v-2)^2 are 15 and 3, gamma 6, so q = sigmoid(2.5), sigmoid(.5).
    The negative margins are equal: q = 1/2 for both.
    mu+ = (3 x .924142 + .622459) / 1.546601 = 2.195062, mu- = -1. Margins (v+1)^2 - (v-2.195062)^2: 15.352075 and
    2.571827, gamma 6.390124, scaled 2.402469 and .402469. lambda = .8 + .4 sigmoid: 1.166820, 1.039711, 1, 1;
    times 4 / 4.206531.
    """
    got = weights([[[3.0], [1.0]], [[-1.0], [-1.0]]], [1.0, -1.0])
    assert got[0] == pytest.approx([1.166820 / 1.051633, 1.039711 / 1.051633], rel=1e-4)
    assert got[1] == pytest.approx([1 / 1.051633] * 2, rel=1e-4)


def test_rows_without_advantage_take_the_lowest_weight():
    rows = [[[3.0], [1.0]], [[-1.0], [-2.0]], [[5.0], [-5.0], [0.0]]]
    got = weights(rows, [1.0, -1.0, 0.0])
    assert got[2][0] == got[2][1] == got[2][2] < min(got[0] + got[1])


def test_a_batch_without_both_sides_is_uniform():
    assert weights([[[3.0], [1.0]], [[-1.0]]], [1.0, 0.5]) == [[1.0, 1.0], [1.0]]
    assert weights([[[3.0], [1.0]], [[-1.0]]], [0.0, 0.0]) == [[1.0, 1.0], [1.0]]


numbers = st.integers(-16, 16).map(lambda i: i / 8)


@given(data=st.data())
@settings(max_examples=60)
def test_delta_equals_the_naive_one(data):
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=5))
    rows = [data.draw(st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=n, max_size=n)) for n in lengths]
    advantages = [1.0, -0.5, *data.draw(st.lists(numbers, min_size=len(rows) - 2, max_size=len(rows) - 2))]
    got, expected = weights(rows, advantages, prompt=1), naive.delta(rows, advantages)
    # equal margins differ by rounding: relative to the largest, it is no order
    assert sum(map(sum, got)) == pytest.approx(sum(lengths), rel=1e-5)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine == pytest.approx(theirs, abs=2e-3)


def test_features_spread_over_actors_give_the_weights_of_features_in_memory():
    trajectories, signals = random_step(seed=3)
    whole, _ = credit.assign(trajectories, signals, method="delta")
    features = [row["delta_feature"] for row in signals]  # random_step makes them in the order of (group, index)
    without = [{name: x for name, x in row.items() if name != "delta_feature"} for row in signals]
    actors = [range(0, 3), range(3, 11), range(11, len(features))]

    def sums(coefficients_NT):
        parts = []
        for rows in actors:  # each actor sees its own rows only
            c = [coefficients_NT[i].numpy() for i in rows]
            positive = sum(np.clip(x[: len(features[i])], 0, None) @ features[i] for i, x in zip(rows, c, strict=True))
            negative = sum(np.clip(-x[: len(features[i])], 0, None) @ features[i] for i, x in zip(rows, c, strict=True))
            parts.append((positive, negative))
        positive, negative = (torch.from_numpy(np.sum(side, axis=0)) for side in zip(*parts, strict=True))
        return positive, negative

    def dots(direction_H):
        out = torch.zeros(whole.mask.shape)
        for rows in actors:
            for i in rows:
                out[i, : len(features[i])] = torch.from_numpy(features[i] @ direction_H.numpy())
        return out

    spread, _ = credit.assign(trajectories, without, method="delta", delta=Feature(sums, dots))
    assert whole.advantages.abs().sum() > 1
    torch.testing.assert_close(spread.advantages, whole.advantages, rtol=1e-4, atol=1e-5)


def test_a_missing_feature_is_named():
    trajectories, signals = random_step(seed=3)
    without = [{"logp": row["logp"]} for row in signals]
    with pytest.raises(ValueError, match="signal 'delta_feature': missing, method 'delta' needs it; got logp"):
        credit.assign(trajectories, without, method="delta")
