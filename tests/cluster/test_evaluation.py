"""Held-out evaluation: what is counted, and the same answers in a run, from its folder, and by transformers."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster import evaluation, offline
from cluster.adapters import version_folder
from cluster.estimators import Estimate, wilson
from configs.schema import RunConfig
from tests.actors.policy import Policy
from tests.cluster.test_run import config, train
from tests.rewards import letters

# Figures of rewards


def rows(*rewards: Sequence[float | str], greedy: Sequence[float | str] | None = None) -> list[dict[str, Any]]:
    return [
        {"prompt": f"q{i}", "rewards": mine, **({"greedy": greedy[i]} if greedy else {})}
        for i, mine in enumerate(rewards)
    ]


def report(prompts: list[dict[str, Any]], version: int = 0, digest: str = "d") -> evaluation.Report:
    figures = evaluation.summarise(prompts, 1.0, [2])
    lengths = {"truncated_share": 0.0, "length_mean": 1.0}
    return {"version": version, "digest": digest, "settings": {"correct": 1.0}, "prompts": prompts} | figures | lengths


def test_accuracy_is_the_mean_over_prompts_and_a_failed_sample_is_in_no_mean():
    """Prompts: 1 of 2, 1 of 1 (another failed), none of 2, and one of which every sample failed."""
    figures = evaluation.summarise(
        rows([1.0, 0.5], [1.0, "timeout"], [0.0, 0.0], ["timeout", "raised: KeyError"]), 1.0, [1, 2]
    )
    accuracy = Estimate(**figures["figures"]["accuracy"])
    assert accuracy.value == 0.5 and accuracy.prompts == 3
    # pass@2 of the first is 1, of the third 0; the second has one reward, too few
    assert figures["figures"]["pass@2"]["value"] == 0.5 and figures["figures"]["pass@2"]["prompts"] == 2
    assert figures["reward_mean"] == 0.5 and figures["samples"] == 5
    assert figures["failed"] == {"timeout": 2, "raised: KeyError": 1}
    assert set(figures["figures"]) == {"accuracy", "pass@2"}, "pass@1 is the accuracy itself"


def test_greedy_accuracy_is_its_own_figure():
    figures = evaluation.summarise(rows([0.0], [0.0], [0.0], greedy=[1.0, 0.0, "timeout"]), 1.0, [1])
    assert figures["figures"]["greedy"] == asdict(Estimate(0.5, *wilson(0.5, 2), 2))
    assert figures["greedy_failed"] == 1 and figures["failed"] == {}


def test_an_evaluation_without_any_reward_is_an_error_that_says_why():
    with pytest.raises(RuntimeError, match=r"none of 2 samples has a reward.*raised: KeyError"):
        evaluation.summarise(rows(["raised: KeyError"], ["raised: KeyError"]), 1.0, [1])


def test_two_evaluations_are_compared_prompt_by_prompt():
    one = report(rows([1.0, 1.0], [1.0, 0.0], ["timeout", "timeout"], greedy=[1.0, 1.0, 1.0]))
    other = report(rows([0.0, 0.0], [1.0, 0.0], [1.0, 1.0], greedy=[0.0, 1.0, "timeout"]))
    differences = evaluation.compare(one, other)
    assert differences["accuracy"].value == 0.5 and differences["accuracy"].prompts == 2
    assert differences["greedy"].value == 0.5 and differences["greedy"].prompts == 2
    with pytest.raises(ValueError, match="other rows"):
        evaluation.compare(one, report(rows([1.0])))


# The best adapter


def save(folder: Path, policy: Policy, version: int, accuracy: list[float]) -> None:
    adapter = policy.adapter(version)
    adapter.save(folder / "adapters" / f"v{version:06d}")
    prompts = rows(*([reward] for reward in accuracy))
    evaluation.write(evaluation.path_of(folder, version), report(prompts, version, adapter.digest))


def test_best_is_the_highest_accuracy_and_the_earliest_of_equals(tiny_model: Path, tmp_path: Path):
    policy = Policy(tiny_model)
    assert evaluation.mark_best(tmp_path) is None
    for version, accuracy in ((0, [0.0, 0.0]), (2, [1.0, 0.0]), (4, [0.0, 1.0]), (6, [0.0, 0.0])):
        save(tmp_path, policy, version, accuracy)
        evaluation.mark_best(tmp_path)
    assert version_folder(tmp_path, "best").name == "v000002"
    assert (tmp_path / "adapters" / "best").readlink() == Path("v000002"), "relative: the run may be moved"
    assert version_folder(tmp_path, "last").name == "v000006"


def test_an_evaluation_of_other_content_under_the_same_number_is_not_the_best(tiny_model: Path, tmp_path: Path):
    policy = Policy(tiny_model)
    save(tmp_path, policy, 0, [0.0])
    save(tmp_path, policy, 1, [1.0])
    policy.adapter(7).save(tmp_path / "adapters" / "v000001")  # trained again after a crash, not yet evaluated
    assert evaluation.mark_best(tmp_path) == 0


# On the real stack


@pytest.fixture(scope="module")
def trained(cluster: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Two steps of a random model, evaluated before, between and after."""
    run = config(
        tiny_model, tmp_path_factory.mktemp("runs"), "evaluated", steps=2, credit={"method": "uniform"},
        learner={"ranks": 1, "lr": 5e-2}, reward={"correct": 0.4}, eval={"every": 1, "samples": 3, "k": [1, 3]},
        rollout={"replicas": 1},
    )  # fmt: skip
    train(run)
    return run


def stored(run: RunConfig, version: int) -> evaluation.Report:
    return evaluation.read(evaluation.path_of(run.folder, version))


def again(**request: Any) -> evaluation.Report:
    return offline.evaluate(offline.Request(**request), Console(quiet=True))


@pytest.mark.ray
def test_a_run_evaluates_every_version_it_was_asked_for(trained: RunConfig):
    records = [json.loads(line) for line in (trained.folder / "metrics.jsonl").read_text().splitlines()]
    evaluated = [record for record in records if "eval/accuracy" in record]
    assert [record["eval/version"] for record in evaluated] == [record["step"] for record in evaluated] == [0, 1, 2]
    for record in evaluated:
        kept = stored(trained, record["eval/version"])
        assert record["eval/samples"] == 24 and len(kept["prompts"]) == 8 and kept["digest"] == record["eval/digest"]
        accuracy = sum(r >= 0.4 for row in kept["prompts"] for r in row["rewards"]) / 24
        assert record["eval/accuracy"] == pytest.approx(accuracy)
        assert record["eval/accuracy_low"] < accuracy < record["eval/accuracy_high"]
    best = max(evaluated, key=lambda record: (record["eval/accuracy"], -record["step"]))
    assert version_folder(trained.folder, "best").name == f"v{best['step']:06d}"


@pytest.mark.ray
@pytest.mark.parametrize(("version", "base"), [(2, False), (0, True)])
def test_an_evaluation_from_the_folder_gives_the_run_s_own_answers(trained: RunConfig, version: int, base: bool):
    """The base model is the adapter with B = 0."""
    mine, expected = again(target=trained.folder, base=base), stored(trained, version)
    assert mine["prompts"] == expected["prompts"] and mine["figures"] == expected["figures"]
    assert base or mine["digest"] == expected["digest"]
    assert sum(mine["proof"].values()) == 1 and not mine["refused"], "the replica proved it"


@pytest.mark.ray
def test_a_bare_adapter_folder_gives_the_same_answers_and_can_be_compared(trained: RunConfig, tmp_path: Path):
    shutil.copytree(version_folder(trained.folder, "last"), tmp_path / "lora")
    before, out = evaluation.path_of(trained.folder, 0), tmp_path / "evals.json"
    mine = again(
        target=tmp_path / "lora", config=trained.folder / "config.yaml", limit=8, compare=before, out=out, greedy=False
    )
    assert [row["rewards"] for row in mine["prompts"]] == [row["rewards"] for row in stored(trained, 2)["prompts"]]
    assert "greedy" not in mine["figures"]
    change = stored(trained, 2)["figures"]["accuracy"]["value"] - stored(trained, 0)["figures"]["accuracy"]["value"]
    assert mine["differences"]["accuracy"]["value"] == pytest.approx(change)
    assert evaluation.read(out)["figures"] == mine["figures"]


@pytest.mark.ray
def test_the_greedy_answers_are_those_of_transformers(trained: RunConfig, tiny_model: Path):
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_model)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model: Any = PeftModel.from_pretrained(base, str(version_folder(trained.folder, "2"))).eval()
    for row in stored(trained, 2)["prompts"]:
        tokens = torch.tensor([tokenizer(row["prompt"])["input_ids"]])
        answer = model.generate(input_ids=tokens, do_sample=False, max_new_tokens=12)[0, tokens.shape[1] :]
        assert row["greedy"] == letters([row["prompt"]], [tokenizer.decode(answer, skip_special_tokens=True)])[0]


# What is wrong with the input


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with two adapters, none of them trained."""
    from cluster.run import make_folder

    run = config(tiny_model, tmp_path_factory.mktemp("made"), "made")
    make_folder(run)
    for version in (0, 1):
        save(run.folder, Policy(tiny_model), version, [float(version)])
    other = Policy(tiny_model).adapter(1)
    replace(other, config=other.config | {"use_rslora": True}).save(run.folder / "rs")
    changed = run.folder / "adapters" / "v000002"
    Policy(tiny_model).adapter(2).save(changed)
    tensors = changed / "adapter_model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"\x01")
    return run.folder


BAD = {
    "no run": (["/nowhere"], ["/nowhere", "config.yaml", "--config"]),
    "no adapter": (["/nowhere", "--config", "{folder}/config.yaml"], ["/nowhere", "adapter_config.json"]),
    "unknown version": (["{folder}", "--version", "9"], ["'9'", "v0 to v2", "last"]),
    "changed on disk": (["{folder}", "--version", "2"], ["v000002", "digest", "changed"]),
    "another scaling": (["{folder}/rs", "--config", "{folder}/config.yaml"], ["rs", "use_rslora", "alpha / r"]),
    "k above samples": (["{folder}", "--samples", "2", "--k", "1,4"], ["eval.k", "4", "eval.samples=2"]),
    "k no number": (["{folder}", "--k", "all"], ["--k", "'all'", "1,4,8"]),
    "k zero": (["{folder}", "--k", "0"], ["--k", "0"]),
    "compared with nothing": (["{folder}", "--compare", "/nowhere.json"], ["/nowhere.json"]),
    "compared with no evaluation": (
        ["{folder}", "--compare", "{folder}/ledger.json"],
        ["ledger.json", "no evaluation"],
    ),
    "compared with other rows": (["{folder}", "--compare", "{folder}/evals/v000000.json"], ["--compare", "other rows"]),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_one_line_and_nothing_starts(
    case: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from cluster.cli import main

    (folder / "ledger.json").write_text("{}")
    arguments, words = BAD[case]
    monkeypatch.setattr(sys, "argv", ["accredit", "eval", *(text.format(folder=folder) for text in arguments)])
    monkeypatch.setattr(offline.remote, "connect", lambda *_, **__: pytest.fail("Ray was to start"))
    with pytest.raises(SystemExit) as end:
        main()
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert end.value.code == 2 and line.startswith("accredit: ") and all(word in line for word in words), line


def test_help_answers_without_the_stack():
    shown = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "cluster.cli", "eval", "--help"], capture_output=True, text=True
    )
    assert shown.returncode == 0 and "--compare" in shown.stdout
    assert not any(line.endswith((" torch", " ray", " transformers")) for line in shown.stderr.splitlines())
