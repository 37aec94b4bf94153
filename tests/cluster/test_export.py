"""Exported adapters and merged models, loaded as others load them."""

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster import evaluation
from cluster.adapters import digest_on_disk, version_folder
from cluster.export import export
from cluster.run import make_folder
from configs.schema import RunConfig
from tests.actors.policy import Policy
from tests.cluster.test_evaluation import report, rows
from tests.cluster.test_run import config

TOKENS = list(range(5, 25))


def save(run: RunConfig, policy: Policy, version: int, accuracy: float) -> None:
    adapter = policy.adapter(version, scale=0.1 if version else 0.0)
    adapter.save(run.folder / "adapters" / f"v{version:06d}")
    prompts = rows([1.0] * 3, [accuracy, 0.0, 0.0], greedy=[1.0, accuracy])
    settings = {"settings": {"correct": 1.0, "samples": 3}}
    written = report(prompts, version, adapter.digest) | settings
    evaluation.write(evaluation.path_of(run.folder, version), written)


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder: v0 changes nothing, v1 is the best, v2 was not evaluated."""
    run = config(tiny_model, tmp_path_factory.mktemp("runs"), "exported", lora={"r": 12, "alpha": 24})
    make_folder(run)
    policy = Policy(tiny_model)
    save(run, policy, 0, 0.0)
    save(run, policy, 1, 1.0)
    policy.adapter(2).save(run.folder / "adapters" / "v000002")
    evaluation.mark_best(run.folder)
    return run.folder


@torch.no_grad()
def logprobs(model: Any) -> np.ndarray:
    tokens = torch.tensor([TOKENS])
    return model.eval()(tokens).logits[0, :-1].float().log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0].numpy()


def of_version(model: Path, folder: Path, version: str) -> np.ndarray:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return logprobs(PeftModel.from_pretrained(base, str(version_folder(folder, version))))


def card(folder: Path) -> tuple[dict[str, Any], str]:
    """Front matter and text."""
    empty, front, text = (folder / "README.md").read_text().split("---\n", 2)
    assert not empty
    return yaml.safe_load(front), text


def test_the_best_adapter_is_exported_as_it_was_saved(folder: Path, tiny_model: Path, tmp_path: Path):
    done = export(folder, "best", False, tmp_path / "mine")
    assert done.adapter.version == 1 and done.adapter.digest == digest_on_disk(tmp_path / "mine")
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {
        *("adapter_model.safetensors", "adapter_config.json", "README.md")
    }
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    mine = logprobs(PeftModel.from_pretrained(base, str(tmp_path / "mine")))
    np.testing.assert_array_equal(mine, of_version(tiny_model, folder, "1"))


def test_the_card_tells_what_was_measured_and_what_was_not(folder: Path, tmp_path: Path):
    export(folder, "1", False, tmp_path / "mine")
    front, text = card(tmp_path / "mine")
    assert front["library_name"] == "peft" and front["pipeline_tag"] == "text-generation" and "lora" in front["tags"]
    assert "base_model" not in front, "a folder is no hub id"
    before, after = (evaluation.read(evaluation.path_of(folder, version)) for version in (0, 1))
    line = next(line for line in text.splitlines() if line.startswith("| accuracy"))
    for measured in (before, after):
        assert f"{evaluation.figure(measured)}" in line
    assert f"{evaluation.compare(after, before)['accuracy']:+}" in line and "+0.167 [" in line
    for word in ("`arca`", "permuted control", "vllm serve", "--max-lora-rank 16", "PeftModel", "transformers "):
        assert word in text, word
    export(folder, "2", False, tmp_path / "other")
    assert "Not measured" in card(tmp_path / "other")[1]


def test_a_hub_model_is_named_as_hubs_expect(folder: Path):
    from cluster.adapters import read_version
    from cluster.card import card as write_card

    run = config(Path("x"), Path("y"), "z", model={"path": "Qwen/Qwen3-0.6B", "max_length": 64})
    text = write_card(run, read_version(version_folder(folder, "1"), 300), {}, True, "mine")
    front = yaml.safe_load(text.split("---\n")[1])
    assert front["base_model"] == "Qwen/Qwen3-0.6B" and front["base_model_relation"] == "finetune"
    assert front["library_name"] == "transformers"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_merged_model_answers_like_the_adapted_one(dtype: str, folder: Path, tiny_model: Path, tmp_path: Path):
    mine = tmp_path / "run"
    shutil.copytree(folder, mine, symlinks=True)
    settings = yaml.safe_load((mine / "config.yaml").read_text())
    settings["model"]["dtype"] = dtype
    (mine / "config.yaml").write_text(yaml.safe_dump(settings))
    done = export(mine, "1", True, tmp_path / "merged")
    assert done.proof == "log-probs of the merged model: proved"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert model.dtype == getattr(torch, dtype) and not list((tmp_path / "merged").glob("adapter*"))
    expected = of_version(tiny_model, folder, "1")
    np.testing.assert_allclose(logprobs(model), expected, atol=1e-4 if dtype == "float32" else 0.05)
    base = logprobs(AutoModelForCausalLM.from_pretrained(tiny_model))
    assert np.abs(expected - base).max() > 0.3, "the adapter matters"
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert tokenizer("1+1?")["input_ids"] == AutoTokenizer.from_pretrained(tiny_model)("1+1?")["input_ids"]
    assert "vllm serve ./merged" in card(tmp_path / "merged")[1]


def test_a_merge_that_lost_the_adapter_is_refused_and_nothing_is_left(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """PEFT gives back the base model without having merged anything."""
    monkeypatch.setattr(PeftModel, "merge_and_unload", lambda lora, **_: lora.unload(), raising=False)
    with pytest.raises(RuntimeError, match="is that of the base model"):
        export(folder, "1", True, tmp_path / "merged")
    assert not list(tmp_path.iterdir())


BAD = {
    "not empty": (["{folder}", "--out", "{folder}"], ["--out", "not empty"]),
    "no run": (["/nowhere", "--out", "{out}"], ["/nowhere", "config.yaml"]),
    "unknown version": (["{folder}", "--version", "7", "--out", "{out}"], ["'7'", "v0 to v2", "best"]),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_one_line_and_nothing_is_written(
    case: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from cluster.cli import main

    arguments, words = BAD[case]
    filled = [text.format(folder=folder, out=tmp_path / "out") for text in arguments]
    monkeypatch.setattr(sys, "argv", ["accredit", "export", *filled])
    with pytest.raises(SystemExit) as end:
        main()
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert end.value.code == 2 and line.startswith("accredit: ") and all(word in line for word in words), line
    assert not list(tmp_path.iterdir())


def test_an_adapter_that_was_changed_on_disk_is_not_exported(folder: Path, tmp_path: Path):
    run = tmp_path / "run"
    shutil.copytree(folder, run, symlinks=True)
    tensors = run / "adapters" / "v000001" / "adapter_model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"\x01")
    with pytest.raises(ValueError, match=r"v000001.*changed"):
        export(run, "1", False, tmp_path / "out")
    assert not (tmp_path / "out").exists()
