"""The text rewards that ship, against labelled solutions and numbers worked by hand."""

import json
from pathlib import Path

import pytest

from actors.rewards import exact_match, format_match, gsm8k, last_number, length_penalty, soft_overlong

DATA = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data/gsm8k")
MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


@needs_data
def test_gsm8k_agrees_with_every_label_of_2400_solutions():
    """Were there disagreements, they would be listed and explained here: there is none."""
    disagreements, right = [], 0
    for number, row in enumerate(rows("model-solutions-600.jsonl")):
        for model in MODELS:
            [reward] = gsm8k(["?"], [row[model]["solution"]], [row["ground_truth"]])
            right += row[model]["is_correct"]
            if reward != float(row[model]["is_correct"]):
                disagreements.append((number, model))
    assert disagreements == []
    assert 0 < right < 2400


@needs_data
@pytest.mark.parametrize("reward", [gsm8k, exact_match])
def test_every_reference_answer_is_right(reward):
    answers = [row["answer"] for row in rows("train-2000.jsonl")]
    assert reward(["?"] * len(answers), answers, answers) == [1.0] * 2000


@needs_data
def test_a_reference_answer_of_another_question_is_wrong_unless_it_is_the_same_number():
    answers = [row["answer"] for row in rows("train-2000.jsonl")]
    numbers = [answer.rpartition("####")[2].strip().replace(",", "") for answer in answers]
    others = answers[1:] + answers[:1]
    expected = [float(a == b) for a, b in zip(numbers, numbers[1:] + numbers[:1], strict=True)]
    assert gsm8k(["?"] * len(answers), answers, others) == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("so 3 + 4 = 7\n#### 7", 7),
        ("#### 1,234.50", 1234.5),
        ("#### 3 + 4 = 7", 7),
        (r"first \boxed{3}, then \boxed{\$12}", 12),
        ("A: -5\nQ: 6 again?", -5),
        ("The answer is $18 for 3 days.", 18),
        ("from 10 to 12", 12),
        ("costs $.50", 0.5),
        ("it is 3/4 of them", 0.75),
        ("I do not know", None),
        ("", None),
        ("\u0667 \uff17", None),
        ("#### 7/0", None),
        ("8" * 100, None),
    ],
)
def test_the_number_that_a_text_ends_with(text: str, value: float | None):
    assert last_number(text) == value


def test_a_row_whose_reference_has_no_number_fails_its_samples():
    [reward] = gsm8k(["?"], ["7"], ["many"])
    assert isinstance(reward, ValueError)


def test_messages_are_judged_by_their_last_content():
    completion = [{"role": "assistant", "content": "3"}, {"role": "assistant", "content": "#### 7"}]
    assert gsm8k(["?"], [completion], ["7"]) == exact_match(["?"], [completion], ["7"]) == [1.0]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>a\nb</think> 7", 1.0),
        ("<think></think>7\n", 1.0),
        ("<think>a</think> ", 0.0),
        ("<think>a<think>b</think> 7", 0.0),
        ("so <think>a</think> 7", 0.0),
        ("<think>a 7", 0.0),
    ],
)
def test_the_default_format_is_one_block_of_thought_and_an_answer(text: str, reward: float):
    assert format_match(["?"], [text]) == [reward]


def test_a_format_is_any_regular_expression_for_the_whole_text():
    assert format_match(["?"] * 3, ["ab", "abc", "a\nb"], pattern="a.?b") == [1.0, 0.0, 1.0]


def test_the_soft_overlong_punishment_is_that_of_the_paper():
    """Eq. 13 with L_max 20, L_cache 4: 0 up to 16; (16 - L) / 4; -1 from 20 on."""
    lengths = [0, 16, 17, 19, 20, 100]
    ids = [[0] * length for length in lengths]
    assert soft_overlong(ids, max_length=20, buffer=4) == [0, 0, -0.25, -0.75, -1, -1]


def test_the_length_penalty_is_the_share_of_the_longest_length():
    assert length_penalty([[], [1] * 5, [1] * 30], max_length=20) == [0, -0.25, -1]
