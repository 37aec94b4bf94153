import csv
import json
import random
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from actors.rewards import exact_match, final_answer, number
from actors.tasks import (
    ARITHMETIC_PAIRS,
    Row,
    Task,
    arithmetic_pairs,
    check_prompts,
    is_heldout,
    make_prompt,
    make_task,
    render,
)
from configs.schema import ArithmeticData, DatasetData

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k" / "train-2000.jsonl"
ROWS = [{"question": f"What is {i}+{i}?", "answer": str(2 * i)} for i in range(10)]


@pytest.fixture
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model)


def write(folder: Path, rows: list[dict[str, Any]], ending: str = ".jsonl") -> str:
    path = folder / f"rows{ending}"
    if ending == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif ending == ".json":
        path.write_text(json.dumps(rows))
    elif ending == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    return str(path)


def from_file(path: str, **settings: Any) -> DatasetData:
    return DatasetData.model_validate(
        {"task": "dataset", "path": path, "prompt": "{question}", "heldout": 2, **settings}
    )


# Order


@given(rows=st.integers(1, 40), seed=st.integers(0, 2**32), epoch=st.integers(0, 3))
def test_an_epoch_has_each_row_exactly_once(rows: int, seed: int, epoch: int):
    task = Task([Row(str(i), {}) for i in range(rows)], [], seed)
    seen = [task.row(g).prompt for g in range(epoch * rows, (epoch + 1) * rows)]
    assert Counter(seen) == Counter(str(i) for i in range(rows))


def test_a_group_has_the_same_row_in_another_task_object_and_in_any_order():
    data = ArithmeticData(task="arithmetic")
    first, second = make_task(data, 3), make_task(data, 3)
    assert isinstance(first, Task)
    groups = [0, 7, len(first) - 1, len(first), 5 * len(first) + 1]
    rows = [first.row(g) for g in groups]
    assert [second.row(g) for g in reversed(groups)] == rows[::-1]


def test_seeds_and_epochs_have_orders_of_their_own_and_share_the_held_out_rows():
    data = ArithmeticData(task="arithmetic")
    task, other = make_task(data, 0), make_task(data, 1)
    assert isinstance(task, Task)
    orders = [
        [task.row(g).prompt for g in range(50)],
        [task.row(g).prompt for g in range(len(task), len(task) + 50)],
        [other.row(g).prompt for g in range(50)],
    ]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert task.heldout() == other.heldout()


# Arithmetic


def test_two_digits_have_8100_pairs_of_which_about_an_eighth_is_held_out():
    train, heldout = arithmetic_pairs(2)
    assert len(train) + len(heldout) == len({*train, *heldout}) == 8100
    assert 0.11 < len(heldout) / 8100 < 0.14
    assert {len(str(n)) for pair in train for n in pair} == {2}


@pytest.mark.parametrize("digits", [1, 2, 3, 9])
def test_no_held_out_sum_is_ever_trained_on_in_either_order(digits: int):
    train, heldout = arithmetic_pairs(digits)
    assert len(train) + len(heldout) == min((9 * 10 ** (digits - 1)) ** 2, ARITHMETIC_PAIRS)
    assert not {frozenset(pair) for pair in train} & {frozenset(pair) for pair in heldout}
    assert {len(str(n)) for pair in train for n in pair} == {digits}


@given(a=st.integers(0, 10**12), b=st.integers(0, 10**12))
def test_the_side_of_a_pair_does_not_depend_on_its_order(a: int, b: int):
    assert is_heldout(a, b) == is_heldout(b, a)


def test_an_arithmetic_row_is_a_question_and_its_answer():
    task = make_task(ArithmeticData(task="arithmetic", digits=3), 0)
    for row in [*(task.row(g) for g in range(20)), *task.heldout()]:
        a, b = row.prompt.removesuffix("?").split("+")
        assert row.columns == {"answer": str(int(a) + int(b))}
    assert len(task.heldout()) == 256


def test_more_held_out_questions_than_there_are_is_refused():
    with pytest.raises(ValueError) as refusal:
        make_task(ArithmeticData(task="arithmetic", digits=1), 0)
    held = len(arithmetic_pairs(1)[1])
    assert str(refusal.value) == (
        f"data.heldout: got 256, expected at most {held}: all that are held out of 81 questions with data.digits=1"
    )


# Files


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".parquet", ".csv"])
def test_every_kind_of_file_gives_the_same_questions(tmp_path: Path, ending: str):
    task = make_task(from_file(write(tmp_path, ROWS, ending)), 0)
    assert isinstance(task, Task)
    rows = [*(task.row(g) for g in range(8)), *task.heldout()]
    assert (len(task), len(task.heldout())) == (8, 2)
    assert sorted((row.number, row.prompt) for row in rows) == [(i, f"What is {i}+{i}?") for i in range(10)]
    for row in rows:
        assert row.columns["question"] == row.prompt
        assert str(row.columns["answer"]) == str(2 * row.number)


def test_reading_a_file_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    make_task(from_file(write(tmp_path, ROWS)), 0)
    assert capfd.readouterr() == ("", "")


def test_columns_are_renamed_and_the_template_uses_the_new_names(tmp_path: Path):
    path = write(tmp_path, [{"problem": "1+1", "solution": "2", "level": 1, "answer": "old"}] * 3)
    task = make_task(from_file(path, columns={"q": "problem", "answer": "solution"}, prompt="{q} {{level {level}}}"), 0)
    assert task.row(0).prompt == "1+1 {level 1}"
    assert task.row(0).columns == {"q": "1+1", "answer": "2", "level": 1}


def test_a_prompt_column_is_not_passed_to_the_reward_twice(tmp_path: Path):
    path = write(tmp_path, [{"prompt": "1+1", "answer": "2"}] * 3)
    row = make_task(from_file(path, prompt="{prompt}"), 0).row(0)
    assert (row.prompt, row.columns) == ("1+1", {"answer": "2"})


def test_chat_messages_stay_messages(tmp_path: Path, tokenizer: PreTrainedTokenizerBase):
    messages = [{"role": "user", "content": "1+1"}]
    data = from_file(write(tmp_path, [{"prompt": messages}] * 3), prompt="{prompt}", system="Add.")
    row = make_task(data, 0).row(0)
    assert row.prompt == messages
    assert tokenizer.decode(render(row, tokenizer, data)) == "Add.\n1+1\n"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "absent.jsonl"}, "data.path: absent.jsonl: there is no such file (looked from "),
        (
            {"path": "rows.txt"},
            "data.path: rows.txt: got ending '.txt', expected one of: .jsonl, .json, .parquet, .csv",
        ),
        ({"columns": {"a": "solution"}}, "has no column 'solution', expected one of: question, answer"),
        ({"columns": {"prompts": "question"}}, "is called 'prompts', which rewards receive from the run"),
        ({"prompt": "{problem}"}, "data.prompt: unknown column 'problem', expected one of: question, answer"),
        ({"prompt": "{question.x}"}, "data.prompt: unknown column 'question.x'"),
        ({"prompt": "\\boxed{}"}, "data.prompt: unknown column ''"),
        ({"prompt": "{question"}, "is not a template: expected '}' before end of string"),
        ({"heldout": 10}, "data.heldout: got 10, expected less than the 10 rows of "),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_the_reason(tmp_path: Path, settings: dict, message: str):
    path = write(tmp_path, ROWS)
    with pytest.raises(ValueError) as refusal:
        make_task(from_file(**{"path": path, **settings}), 0)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", "", "the file is empty"),
        ("a.json", "[]", "has no rows"),
        ("a.csv", "question,answer\n", "has no rows"),
        ("a.jsonl", '{"question": ', "cannot be read: "),
        ("a.parquet", "no parquet", "cannot be read: "),
    ],
)
def test_a_broken_or_empty_file_is_refused_with_the_reason(tmp_path: Path, name: str, text: str, message: str):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        make_task(from_file(str(tmp_path / name)), 0)


# Prompts


def test_a_prompt_goes_through_the_chat_template_where_there_is_one(tokenizer: PreTrainedTokenizerBase):
    row, chat = Row("1+1", {}), from_file("rows.jsonl", system="Add.")
    assert tokenizer.decode(render(row, tokenizer, chat)) == "Add.\n1+1\n"
    assert tokenizer.decode(render(row, tokenizer, from_file("rows.jsonl", chat=False))) == "1+1"
    assert tokenizer.decode(render(row, tokenizer, ArithmeticData(task="arithmetic"))) == "1+1"


def test_a_system_message_of_the_row_is_kept(tokenizer: PreTrainedTokenizerBase):
    row = Row([{"role": "system", "content": "Own."}, {"role": "user", "content": "1+1"}], {})
    assert tokenizer.decode(render(row, tokenizer, from_file("rows.jsonl", system="Add."))) == "Own.\n1+1\n"


def test_the_generation_prompt_is_added(tokenizer: PreTrainedTokenizerBase):
    tokenizer.chat_template = "{{ messages[0]['content'] }}{% if add_generation_prompt %}>>{% endif %}"
    assert tokenizer.decode(render(Row("1+1", {}), tokenizer, from_file("rows.jsonl"))) == "1+1>>"


def test_messages_without_a_chat_template_are_refused(tokenizer: PreTrainedTokenizerBase):
    row = Row([{"role": "user", "content": "1+1"}], {}, 4)
    with pytest.raises(ValueError, match=r"row 4 is a list of chat messages, but data\.chat is off"):
        render(row, tokenizer, from_file("rows.jsonl", chat=False))
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="row 4 is a list of chat messages, but the tokenizer has no chat template"):
        render(row, tokenizer, from_file("rows.jsonl"))


def test_a_prompt_carries_what_was_rendered():
    prompt = make_prompt(Row("1+1", {"answer": "2"}), 5, [1, 2], [8, 9])
    assert (prompt.group, prompt.tokens, prompt.seeds, prompt.prompt) == (5, [1, 2], [8, 9], "1+1")
    assert prompt.columns == {"answer": "2"}


@pytest.mark.parametrize("long_row", range(10))
def test_a_prompt_that_is_too_long_is_named_wherever_it_is(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, long_row: int
):
    rows = [{**row, "question": "1" * (50 if i == long_row else 20)} for i, row in enumerate(ROWS)]
    data = from_file(write(tmp_path, rows))
    task = make_task(data, 0)
    check_prompts(task, tokenizer, data, 51)
    with pytest.raises(ValueError) as refusal:
        check_prompts(task, tokenizer, data, 50)
    assert f"row {long_row} of {data.path} has 51 tokens, expected at most 50 = model.max_length" in str(refusal.value)


def test_arithmetic_prompts_are_checked_too(tokenizer: PreTrainedTokenizerBase):
    data = ArithmeticData(task="arithmetic", digits=2)
    check_prompts(make_task(data, 0), tokenizer, data, 6)
    with pytest.raises(ValueError, match="has 6 tokens, expected at most 5"):
        check_prompts(make_task(data, 0), tokenizer, data, 5)


def test_a_system_message_that_goes_nowhere_is_warned_of(tmp_path: Path, tokenizer: PreTrainedTokenizerBase):
    path = write(tmp_path, ROWS)
    used, unused = from_file(path, system="Add."), from_file(path, system="Add.", chat=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_prompts(make_task(used, 0), tokenizer, used, 100)
    with pytest.warns(UserWarning, match=r"data\.system is not used"):
        check_prompts(make_task(unused, 0), tokenizer, unused, 100)


# Exact match


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("7+8=15,3+4+1=8:85", "85", 1),
        ("7+8=15,3+4+1=8:86", "85", 0),
        ("7+8=15,3+4+1=8:", "85", 0),
        ("so it is\n#### 72", "half ... <<48/2=24>>24\n#### 72", 1),
        ("#### 72\nor rather\n#### 71", "#### 72", 0),
        ("#### $1,000.00", "1000", 1),
        ("#### -3", "3", 0),
        ("Thus A: 18", "18", 1),
        ("A: 18 dollars", "18", 1),
        ("Step 2: 5+3=8", "8", 1),
        ("Of 3 choices, the answer is: Paris", "Paris", 1),
        (r"so \boxed{\frac{1}{2}}", r"thus $\boxed{\frac{1}{2}}$", 1),
        (r"so \boxed{3/4}", "0.75", 1),
        (r"so \boxed{3", "3", 1),
        ("It costs 5, or 6.", "6", 1),
        ("10-3", "3", 1),
        ("it fell by -3", "-3", 1),
        ("Paris", " Paris ", 1),
        ("Paris", "London", 0),
        ("", "5", 0),
        ("#### ", "5", 0),
        ("#### 1e9", "1000000000", 1),
        ("#### 1e999999999", "1e999999999", 1),
        ("#### 1/0", "1/0", 1),
        ("#### 1/0", "2/0", 0),
        ("#### 1,2", "12", 0),
    ],
)
def test_a_completion_is_right_when_its_final_answer_is(completion: str, answer: str, reward: float):
    assert exact_match(["q"], [completion], answer=[answer], other=[None]) == [reward]


def test_numbers_in_the_answer_column_may_be_numbers():
    assert exact_match(["q"] * 3, ["#### 5", "5.0", "6"], answer=[5, 5, 5.5]) == [1.0, 1.0, 0.0]


@given(st.text(alphabet="0123456789.,-$/:#\\{}e \nboxed", max_size=200), st.text(max_size=50))
def test_no_text_breaks_exact_match(completion: str, answer: str):
    assert exact_match(["q"], [completion], answer=[answer])[0] in (0.0, 1.0)


@given(st.integers(-(10**15), 10**15))
def test_a_whole_number_equals_itself_in_every_spelling(n: int):
    for text in (str(n), f"{n:,}", f"{n}.0", f"{n:,}.00", f" {n}. "):
        assert number(text) == n
    assert number(final_answer(f"I think that it is {n:,}.")) == n


@pytest.mark.parametrize("part", ["1", "-", ",", ":", "#", "{", "\\boxed{", "1,", "1:", "1/", "$-", " "])
def test_a_long_hostile_text_takes_no_time(part: str):
    # a quadratic pattern would need hours
    assert exact_match(["q"], [part * (1_000_000 // len(part))], answer=["5"]) == [0.0]


def test_every_gsm8k_reference_matches_its_own_column():
    if not GSM8K.exists():
        pytest.skip("the GSM8K sample is not beside the repository (../shared/data/gsm8k/train-2000.jsonl)")
    data = DatasetData(task="dataset", path=str(GSM8K), prompt="{question}")
    task = make_task(data, 0)
    assert isinstance(task, Task)
    rows = [*(task.row(g) for g in range(len(task))), *task.heldout()]
    answers = [row.columns["answer"] for row in rows]
    assert len(rows) == 2000
    assert exact_match([row.prompt for row in rows], answers, answer=answers) == [1.0] * 2000
    random.Random(0).shuffle(shuffled := list(answers))
    assert sum(exact_match([""] * 2000, answers, answer=shuffled)) < 200
