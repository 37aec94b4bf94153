import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import credit
from credit.ibpo import Revision, changed, pairs, prompt, revise
from tests.credit import naive
from tests.credit.build import signals, trajectory


def revision(tokens, correct=True):
    return Revision(np.array(tokens), correct)


def touched(tokens, *revisions):
    return changed(np.array(tokens), revisions).nonzero()[0].tolist()


def test_each_wrong_completion_is_compared_with_its_siblings_correct_ones_first():
    assert pairs([0.0, 1.0, 0.0, 1.0], references=2) == [(0, 1), (0, 3), (2, 1), (2, 3)]
    assert pairs([0.0, 0.0, 1.0], references=2) == [(0, 2), (0, 1), (1, 2), (1, 0)]


def test_without_references_nothing_is_compared():
    assert pairs([0.0, 1.0], references=0) == []
    assert pairs([1.0, 1.0], references=3) == []


def test_the_prompt_holds_problem_and_attempts_in_order_even_with_braces():
    text = prompt("what is {x}?", "one {", "two }")
    assert text.index("what is {x}?") < text.index("one {") < text.index("two }")


def test_a_substitution_a_deletion_and_an_insertion_mark_their_tokens():
    assert touched([1, 2, 3, 4], revision([1, 9, 3, 4])) == [1]
    assert touched([1, 2, 3, 4], revision([1, 3, 4])) == [1]
    assert touched([1, 3, 4], revision([1, 2, 3, 4])) == [1]  # 3 was chosen where 2 belongs
    assert touched([1, 2], revision([1, 2, 3])) == [1]  # nothing follows: the last token


def test_the_successful_correction_with_the_fewest_edits_is_taken():
    near, nearer_but_wrong, far = revision([1, 2, 9, 9]), revision([1, 2, 3, 9], False), revision([7, 7, 7, 7])
    assert touched([1, 2, 3, 4], far, nearer_but_wrong, near) == [2, 3]


def test_without_a_successful_correction_every_token_carries_gradient():
    assert touched([1, 2, 3], revision([1], False)) == [0, 1, 2]


words = st.lists(st.integers(0, 3), min_size=1, max_size=9)


@given(words, st.lists(st.integers(0, 3), max_size=9))
def test_an_alignment_marks_no_more_tokens_than_the_edit_distance(a, b):
    marked = touched(a, revision(b))
    distance = naive.levenshtein(a, b)
    assert len(marked) <= distance
    assert (len(marked) == 0) == (a == b)
    # what is not marked survives, in order
    kept = iter(b)
    assert all(token in kept for i, token in enumerate(a) if i not in marked)


@given(words, words, words)
def test_the_taken_correction_has_the_smallest_edit_distance(a, b, c):
    near, far = sorted((b, c), key=lambda x: naive.levenshtein(a, x))
    if naive.levenshtein(a, near) < naive.levenshtein(a, far):
        assert touched(a, revision(far), revision(near)) == touched(a, revision(near))


GROUP = [trajectory(4, 0, [1, 2, 3], 0.0), trajectory(4, 1, [1, 9, 3], 1.0), trajectory(4, 2, [8], 0.0)]
REVISIONS = {(4, 0): [revision([1, 9, 3]), revision([5], False)], (4, 2): [revision([7], False)]}


def test_repairable_completions_are_worth_more():
    # rho x 1/2 x lambda = .5 x .5 x .6
    shaped, masks = revise(GROUP, REVISIONS)
    assert shaped.tolist() == pytest.approx([0.15, 1.0, 0.0])
    prompt_part = [False, False]
    expected = [[False, True, False], [True, True, True], [True]]
    assert [mask.tolist() for mask in masks] == [prompt_part + mask for mask in expected]


def test_at_most_the_asked_number_of_corrections_counts():
    shaped, _ = revise(GROUP, REVISIONS, references=1)
    assert shaped.tolist() == pytest.approx([0.3, 1.0, 0.0])


def test_a_correct_completion_is_never_shaped():
    shaped, masks = revise(GROUP, {(4, 1): [revision([1])]})
    assert shaped.tolist() == [0.0, 1.0, 0.0]
    assert masks[1].sum() == 3


def test_assign_takes_advantages_of_the_shaped_rewards_and_masks_the_tokens():
    """R' = .15, 1, 0, mean .383333: A = -.233333, .616667, -.383333 on the tokens that carry gradient."""
    logp = [signals(logp=[-1.0] * n) for n in (3, 3, 1)]
    batch, _ = credit.assign(GROUP, logp, method="ibpo", advantage="dr_grpo", revisions=REVISIONS)
    a, b, c = -0.2333333, 0.6166667, -0.3833333
    expected = torch.tensor([[0, 0, 0, a, 0], [0, 0, b, b, b], [0, 0, c, 0, 0]])
    torch.testing.assert_close(batch.advantages, expected)
    assert batch.rewards.tolist() == [0.0, 1.0, 0.0]


def test_without_revisions_it_is_plain_grpo():
    logp = [signals(logp=[-1.0] * n) for n in (3, 3, 1)]
    ibpo, _ = credit.assign(GROUP, logp, method="ibpo", revisions={})
    grpo, _ = credit.assign(GROUP, logp)
    assert torch.equal(ibpo.advantages, grpo.advantages)


@pytest.mark.parametrize("options", [{"references": -1}, {"rho": 1.5}, {"strength": -1.0}])
def test_bad_options_are_refused(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}={next(iter(options.values()))}"):
        credit.check("ibpo", options=options)
