"""Negative prompts of contrastive methods."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from actors.negatives import render_negative
from actors.tasks import Row, render
from configs.schema import ArithmeticData, DatasetData

ARITHMETIC = ArithmeticData(task="arithmetic")
CHAT = DatasetData(task="dataset", path="questions.jsonl")
ROW = Row("3+4?", {"answer": "7", "topic": "sums"})


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model)


def text(tokens: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(tokens))


def shout(prompt: str, topic: str, **columns: str) -> str:
    return f"{prompt.upper()} about {topic}, wrongly"


def silent(prompt: str, **columns: str) -> None:
    return None


def test_a_template_sees_the_prompt_and_the_columns(tokenizer):
    tokens = render_negative(ROW, tokenizer, ARITHMETIC, "{{ prompt }} {{ topic }}: answer wrongly")
    assert text(tokens, tokenizer) == "3+4? sums: answer wrongly"


def test_a_template_is_rendered_before_the_chat_template_and_once(tokenizer):
    row = Row("{{ answer }}", {"answer": "7"})
    tokens = render_negative(row, tokenizer, CHAT, "no: {{ prompt }}")
    assert text(tokens, tokenizer) == "no: {{ answer }}\n", "the question's own braces are text, not a template"


def test_of_chat_messages_the_last_one_is_replaced(tokenizer):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "3+4?"}]
    tokens = render_negative(Row(messages, {}), tokenizer, CHAT, "wrong: {{ prompt }}")
    assert text(tokens, tokenizer) == "be brief\nwrong: 3+4?\n"
    assert messages[1]["content"] == "3+4?"


def test_the_prompt_itself_as_a_template_gives_the_prompt(tokenizer):
    assert render_negative(ROW, tokenizer, ARITHMETIC, "{{ prompt }}") == render(ROW, tokenizer, ARITHMETIC)


def test_empty_is_the_empty_prompt_and_still_has_a_token(tokenizer):
    assert render_negative(ROW, tokenizer, ARITHMETIC, "empty") == [tokenizer.eos_token_id]
    assert text(render_negative(ROW, tokenizer, CHAT, "empty"), tokenizer) == "\n"


def test_a_callable_by_dotted_path(tokenizer):
    tokens = render_negative(ROW, tokenizer, ARITHMETIC, "tests.actors.test_negatives.shout")
    assert text(tokens, tokenizer) == "3+4? about sums, wrongly"


@pytest.mark.parametrize(
    ("negative", "words"),
    [
        ("{{ question }}", ["cannot be rendered", "question", "prompt, answer, topic"]),
        ("{% if %}", ["cannot be rendered"]),
        ("{{ prompt.__class__.__mro__ }}", ["cannot be rendered"]),
        ("{{ '' }}", ["renders empty", "use 'empty'"]),
        ("nowhere.at.all", ["cannot be imported", "nowhere"]),
        ("tests.actors.test_negatives.silent", ["returned NoneType"]),
    ],
)
def test_what_cannot_be_rendered_says_why(negative: str, words: list[str], tokenizer):
    with pytest.raises(ValueError) as failure:
        render_negative(ROW, tokenizer, ARITHMETIC, negative)
    assert all(word in str(failure.value) for word in words), failure.value
