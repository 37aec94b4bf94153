import random
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from actors import demo
from actors.demo import character_tokenizer, demo_base, make_model, sampled_accuracy, scratchpad, warm_up
from actors.tasks import arithmetic_pairs, is_heldout
from configs.schema import ArithmeticData

DATA = ArithmeticData(task="arithmetic")


def small(folder: Path) -> Qwen3ForCausalLM:
    return make_model(folder, hidden=64, intermediate=128, layers=2, seed=3)


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(
    ("a", "b", "digits", "text"),
    [
        (37, 48, 2, "7+8=15,3+4+1=8:85"),
        (12, 34, 2, "2+4=6,1+3=4:46"),
        (57, 68, 2, "7+8=15,5+6+1=12:125"),
        (10, 90, 2, "0+0=0,1+9=10:100"),
        (3, 4, 1, "3+4=7:7"),
        (999, 999, 3, "9+9=18,9+9+1=19,9+9+1=19:1998"),
    ],
)
def test_a_scratchpad_works_from_the_units_up(a: int, b: int, digits: int, text: str):
    assert scratchpad(a, b, digits, 0, random.Random(0)) == text


def test_a_wrong_scratchpad_slips_in_its_sums_and_carries_on_from_there():
    rng = random.Random(0)
    right = 0
    for _ in range(2000):
        text = scratchpad(37, 48, 2, 0.3, rng)
        match = re.fullmatch(r"7\+8=(\d+),3\+4(?:\+1)?=(\d+):(\d+)", text)
        assert match
        units, tens = int(match[1]), int(match[2])
        assert match[3] == f"{tens}{units % 10}"
        assert ("3+4+1" in text) == (units >= 10)
        right += text == "7+8=15,3+4+1=8:85"
    assert 0.45 < right / 2000 < 0.53  # 0.7 ** 2


def test_characters_come_back_as_they_were():
    tokenizer = character_tokenizer()
    text = "37+48?7+8=15,3+4+1=8:85\n{A b}"
    tokens = tokenizer(text).input_ids
    assert len(tokens) == len(text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer("\u00e9").input_ids == [tokenizer.unk_token_id]


def test_the_default_model_has_about_0_6_million_parameters_and_loads(tmp_path: Path):
    made = make_model(tmp_path)
    assert 0.55e6 < made.num_parameters() < 0.65e6
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert equal(weights(loaded), weights(made))
    assert loaded.generation_config.eos_token_id == AutoTokenizer.from_pretrained(tmp_path).eos_token_id


def test_examples_teach_the_scratchpad_and_its_end_but_not_the_question():
    tokenizer = character_tokenizer()
    tokens, labels = demo._examples([(12, 34), (57, 68)], 2, 0.0, tokenizer.get_vocab(), random.Random(0))
    assert tokenizer.decode(tokens[1]) == "57+68?7+8=15,5+6+1=12:125<eos>"
    for row, text in zip(labels, ("2+4=6,1+3=4:46<eos>", "7+8=15,5+6+1=12:125<eos>"), strict=True):
        assert tokenizer.decode(row[row != -100]) == text
    assert labels[:, :6].eq(-100).all()


def test_warm_up_learns_to_answer_questions_that_it_has_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The small model is never right at first, and passes 5 % in about 100 steps."""
    monkeypatch.setattr(demo, "TARGET", 0.05)
    heldout = arithmetic_pairs(2)[1]
    model = small(tmp_path)
    assert sampled_accuracy(model, heldout, 2, 1) == 0
    told: list[tuple[float, str]] = []
    assert warm_up(model, 2, 0, lambda share, text: told.append((share, text))) >= 0.05
    assert sampled_accuracy(model, heldout, 2, 1) > 0.02
    shares = [share for share, _ in told]
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[-1] < 1


def test_warm_up_sees_no_held_out_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: set[tuple[int, int]] = set()
    examples = demo._examples

    def spy(pairs, *rest):
        seen.update(pairs)
        return examples(pairs, *rest)

    monkeypatch.setattr(demo, "_examples", spy)
    monkeypatch.setattr(demo, "TARGET", 0.0)
    warm_up(small(tmp_path), 2, 0, lambda share, text: None)
    assert len(seen) > 500
    assert not any(is_heldout(a, b) for a, b in seen)


def test_a_warm_up_that_does_not_get_there_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo, "MAX_STEPS", 3)
    with pytest.raises(RuntimeError, match=r"after 3 steps of warm-up, expected 43% with data\.digits=2"):
        warm_up(small(tmp_path), 2, 0, lambda share, text: None)


def test_the_base_is_made_once_for_its_settings_and_leaves_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(demo, "TARGET", 0.0)
    monkeypatch.setattr(demo, "CHECK_EVERY", 5)
    random_state, threads = torch.get_rng_state(), torch.get_num_threads()
    first = demo_base(tmp_path / "models", DATA, 0)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.get_num_threads() == threads
    assert capfd.readouterr() == ("", "")

    monkeypatch.setattr(demo, "warm_up", None)  # a second making would fail
    assert demo_base(tmp_path / "models", DATA, 0) == first
    assert list((tmp_path / "models").iterdir()) == [first]
    assert AutoTokenizer.from_pretrained(first).eos_token == "<eos>"

    monkeypatch.setattr(demo, "warm_up", warm_up)
    assert demo_base(tmp_path / "models", DATA, 1) != first
    again = demo_base(tmp_path / "elsewhere", DATA, 0)
    assert again.name == first.name
    assert equal(load_file(again / "model.safetensors"), load_file(first / "model.safetensors"))


def test_a_base_that_was_not_finished_is_never_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*arguments) -> float:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(demo, "warm_up", fail)
        with pytest.raises(KeyboardInterrupt):
            demo_base(tmp_path, DATA, 0)
    assert list(tmp_path.iterdir()) == []
