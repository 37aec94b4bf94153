import random
from pathlib import Path
from typing import Any

import pytest
import torch

from actors import calls, demo
from actors.calculator import Calculator, evaluate
from actors.demo import character_tokenizer, make_model
from actors.tasks import make_task
from configs.schema import ArithmeticData


@pytest.mark.parametrize(
    ("expression", "value"),
    [("37*48", 1776), ("2+3*4", 14), ("(2+3)*4", 20), ("-5-7", -12), ("10-20-30", -40), ("8", 8)],
)
def test_whole_numbers_are_worked_out(expression: str, value: int):
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "2**9",
        "1/2",
        "1.5",
        "True",
        "__import__('os')",
        "a",
        "1;2",
        "2 if 1 else 3",
        "(" * 39,
        "1*" * 30 + "1",
        "\x00",
    ],
)
def test_all_else_is_refused(expression: str):
    with pytest.raises(ValueError, match="calculator"):
        evaluate(expression)


def test_calls_are_answered_and_the_final_answer_is_judged():
    calculator = Calculator(call_reward=0.1)
    calculator.reset(answer="1776", unused=1)
    assert calculator.step("<37*48>") == ("=1776:", 0.1, False)
    assert calculator.step("<37*>") == ("=error:", 0.0, False)
    assert calculator.step("1776") == ("", 1.0, True)
    assert calculator.step("1775") == ("", 0.0, True)


def test_transcripts_go_right_and_wrong_in_the_shares_given():
    rng = random.Random(0)
    drawn = [calls.transcript(37, 48, rng) for _ in range(4000)]
    assert sum(t == ("<37*48>", "=1776:", "1776") for t in drawn) / 4000 == pytest.approx(calls.WAYS["right"], abs=0.03)
    assert sum(not call for call, _, _ in drawn) / 4000 == pytest.approx(calls.WAYS["no call"], abs=0.02)
    added = [t for t in drawn if t[0] == "<37+48>"]
    assert added and all(t[1:] == ("=85:", "85") for t in added)
    assert all(final != "1776" for call, _, final in drawn if call != "<37*48>")


def test_the_warm_up_teaches_what_the_model_says_and_not_what_it_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(calls, "WAYS", {"right": 1.0})
    tokenizer = character_tokenizer()
    end = tokenizer.get_vocab()["<eos>"]
    tokens, labels = calls.examples([(37, 48), (12, 12)], tokenizer.get_vocab(), end, random.Random(0))
    assert tokenizer.decode(tokens[0]) == "37*48?<37*48><eos>=1776:1776<eos>"
    assert tokenizer.decode(labels[0][labels[0] != -100]) == "<37*48><eos>1776<eos>"
    assert tokenizer.decode(labels[1][labels[1] != -100]) == "<12*12><eos>144<eos>"


def test_sampled_accuracy_counts_the_right_final_answers(monkeypatch: pytest.MonkeyPatch):
    """A policy that calls rightly, and slips in every answer that is odd."""
    tokenizer = character_tokenizer()
    vocabulary = tokenizer.get_vocab()
    end = vocabulary["<eos>"]

    def policy(model, contexts, end, generator, longest):
        said = []
        for context in contexts:
            question, _, answer = str(tokenizer.decode(context)).partition("?")
            if not answer:
                said.append(f"<{question}>")
                continue
            assert answer.startswith(f"<{question}><eos>=") and answer.endswith(":")
            value = int(answer.partition("=")[2][:-1])
            said.append(str(value + value % 2))
        return [[*(vocabulary[character] for character in text), end] for text in said]

    monkeypatch.setattr(calls, "sample", policy)
    model: Any = None
    pairs = [(11, 11), (12, 12), (13, 20), (15, 15)]  # 121, 144, 260, 225
    assert calls.sampled_accuracy(model, pairs, vocabulary, end, 0) == 0.5


def test_completions_end_with_their_eos_and_keep_their_order(tmp_path: Path):
    model = make_model(tmp_path, hidden=32, intermediate=32, layers=1, heads=2, kv_heads=1)
    contexts = [[5, 6, 7], [5, 6], [8, 9, 10], [5, 6]]
    drawn = calls.sample(model, contexts, 1, torch.Generator().manual_seed(0), 12)
    alone = calls.sample(model, [[5, 6], [5, 6]], 1, torch.Generator().manual_seed(0), 12)
    assert [drawn[1], drawn[3]] == alone  # the shortest are sampled first
    assert all(1 not in ids[:-1] and (ids[-1] == 1 or len(ids) == 12) for ids in drawn)


def test_the_base_for_products_is_another_than_the_one_for_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo, "TARGET", 0.0)
    monkeypatch.setattr(demo, "CHECK_EVERY", 2)
    monkeypatch.setattr(calls, "TARGET", 0.0)
    monkeypatch.setattr(calls, "STEPS", 4)
    told: list[str] = []
    data = ArithmeticData.model_validate({"task": "arithmetic", "operation": "*"})
    product = demo.demo_base(tmp_path, data, 0, lambda share, text: told.append(text))
    assert len(told) == 3  # the fourth step is the last
    assert product != demo.demo_base(tmp_path, data.model_copy(update={"operation": "+"}), 0)
    assert product == demo.demo_base(tmp_path, data, 0)


def test_the_task_of_products_has_their_answers():
    task = make_task(ArithmeticData.model_validate({"task": "arithmetic", "operation": "*"}), 0)
    for row in [task.row(0), *task.heldout()[:5]]:
        a, b = str(row.prompt).removesuffix("?").split("*")
        assert row.columns["answer"] == str(int(a) * int(b))
