from typing import Any

import numpy as np
import pytest
import torch

import credit
from credit.methods import SIGNALS

NOT_A_FUNCTION = 3


def by_surprise_and_entropy(mask_NT, *, logp, entropy, share=0.5):
    return share * -logp + (1 - share) * entropy


def by_advantage(mask_NT, *, entropy, advantages_N):
    return entropy * (advantages_N > 0)[:, None]


def of_an_unknown_signal(mask_NT, *, curvature):
    return curvature


def of_the_wrong_shape(mask_NT):
    return mask_NT.sum(1)


def negative(mask_NT):
    return -mask_NT.float()


def failing(mask_NT, *, logp):
    return {}[0]


HERE = __name__
MASK = torch.tensor([[False, True, True], [False, True, False]])


@pytest.mark.parametrize(
    "name, expected",
    [
        ("uniform", set()),
        ("surprisal", {"logp"}),
        ("entropy_reduction", {"entropy"}),
        ("divergence", {"logp", "logp_base"}),
        ("arca", {"residual"}),
        ("forking", {"entropy"}),
        ("gcpo", {"logp", "logp_negative"}),
        ("delta", {"delta_feature"}),
        ("eapo", {"entropy"}),
        ("ibpo", set()),
        (f"{HERE}.by_surprise_and_entropy", {"logp", "entropy"}),
    ],
)
def test_a_method_declares_its_signals_by_its_parameters(name, expected):
    assert credit.needs(name) == expected


def test_options_and_quadrants_change_what_is_needed():
    assert credit.needs("gcpo", divergence="kl") == {"kl_negative"}
    assert credit.needs("gcpo", divergence="abs") == {"logp", "logp_negative"}
    assert credit.needs("arca", quadrant="PHR") == {"residual", "entropy"}


def test_a_user_method_by_dotted_path_is_normalised_like_the_others():
    signals = {"logp": torch.tensor([[0.0, -1.0, -2.0], [0.0, -1.0, 0.0]]), "entropy": torch.zeros(2, 3)}
    signals["entropy"][0, 1] = 8.0
    got = credit.weights(f"{HERE}.by_surprise_and_entropy", signals, MASK, share=0.75)
    # .75 x 1 + .25 x 8 = 2.75 and .75 x 2 = 1.5, times 2 / 4.25
    assert got[0].tolist() == pytest.approx([0.0, 5.5 / 4.25, 3 / 4.25])
    assert got[1].tolist() == [0.0, 1.0, 0.0]


def test_a_user_method_may_look_at_the_advantages():
    got = credit.weights(
        f"{HERE}.by_advantage",
        {"entropy": torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 0.0]])},
        MASK,
        advantages=torch.tensor([1.0, -1.0]),
    )
    assert got[0].tolist() == pytest.approx([0.0, 1.5, 0.5])


@pytest.mark.parametrize(
    "name, message",
    [
        ("arcane", "got 'arcane', expected one of uniform, surprisal, .*, or the dotted path"),
        ("no_such_module.f", "'no_such_module.f' cannot be imported: ModuleNotFoundError"),
        (f"{HERE}.absent", "cannot be imported: AttributeError: .*absent"),
        (f"{HERE}.NOT_A_FUNCTION", "is int, expected a function of signals"),
        (f"{HERE}.of_an_unknown_signal", "needs 'curvature', which is no signal and has no default; the signals are"),
        (f"{HERE}.of_the_wrong_shape", r"returned \[2\], expected a tensor of shape \[2, 3\]"),
        (f"{HERE}.negative", r"gave -1\.0 at row 0, position 0, expected finite weights >= 0"),
        (f"{HERE}.failing", "fails on a toy batch: KeyError: 0"),
    ],
)
def test_a_method_that_cannot_work_is_refused_before_anything_starts(name, message):
    with pytest.raises(ValueError, match=message) as caught:
        credit.check(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"advantage": "gae"}, r"credit\.advantage: got 'gae', expected one of grpo"),
        ({"options": {"power": 2}}, r"credit\.options: got 'power', but the options of 'arca' are: none"),
        ({"advantage_options": {"power": 2}}, r"credit\.advantage_options: got 'power', but the options of 'grpo'"),
        ({"advantage_options": {"ddof": 7}}, "advantage option ddof: got 7"),
        ({"method": "forking", "options": {"q": 2}}, "forking: option q: got 2"),
        ({"method": "forking", "options": {"q": "high"}}, "with options {'q': 'high'}.* fails on a toy batch: TypeErr"),
        ({"method": "eapo", "options": {"phi": 0}}, "eapo: got strength=0.2, phi=0"),
        ({"quadrant": "HHR"}, r"credit\.quadrant: got 'HHR', expected one of PHR, PLR, NHR, NLR"),
        ({"sharpening": 0.0}, r"credit\.sharpening: got 0\.0, expected more than 0"),
        ({"method": "eapo", "sharpening": 2.0}, r"credit\.sharpening: got 2\.0, expected 1: 'eapo' normalises its own"),
        ({"method": "gcpo"}, r"credit\.negative: got None, but credit\.method='gcpo' needs logp_negative"),
        ({"method": "gcpo", "options": {"divergence": "kl"}}, "needs kl_negative"),
        ({"method": "gcpo", "negative": "empty", "options": {"normaliser": "x"}}, "gcpo: option normaliser: got 'x'"),
    ],
)
def test_a_bad_setting_is_refused_with_one_line(arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        credit.check(**{"method": "arca", **arguments})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("advantage", sorted(credit.ADVANTAGES))
@pytest.mark.parametrize("method", sorted(credit.METHODS))
def test_every_method_passes_the_check_with_every_advantage(method, advantage):
    credit.check(method, advantage, quadrant="PHR", negative="empty")


def test_a_missing_signal_is_named_with_those_that_are_there():
    with pytest.raises(ValueError, match="signal 'residual': missing, method 'arca' needs it; got entropy, logp"):
        credit.weights("arca", {"logp": torch.zeros(2, 3), "entropy": torch.zeros(2, 3)}, MASK)


def test_a_misshapen_signal_is_refused():
    with pytest.raises(ValueError, match=r"signal 'residual': got shape \[2, 4\], expected \[2, 3\]"):
        credit.weights("arca", {"residual": torch.zeros(2, 4)}, MASK)


@pytest.mark.parametrize("name", [name for name in SIGNALS if name != "delta_feature"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_under_the_mask_that_is_not_finite_is_refused_with_signal_and_row(name, bad):
    method = {"residual": "arca", "entropy": "forking", "logp_base": "divergence", "logp": "surprisal"}.get(
        name, "gcpo"
    )
    options: dict[str, Any] = {"divergence": "kl"} if name == "kl_negative" else {}
    signals = {key: -torch.ones(2, 3) for key in SIGNALS if key != "delta_feature"}
    signals[name][1, 1] = bad
    with pytest.raises(ValueError, match=f"signal '{name}': NaN or infinite at row 1, position 1"):
        credit.weights(method, signals, MASK, **options)


def test_signals_may_be_numpy_arrays():
    residual = np.array([[0.0, 1.0, 3.0], [0.0, 1.0, 0.0]], dtype=np.float16)
    assert credit.weights("arca", {"residual": residual}, MASK)[0].tolist() == pytest.approx([0, 0.5, 1.5])
