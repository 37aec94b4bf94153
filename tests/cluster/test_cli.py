"""The command line: bad input is one clear line and a non-zero exit code, before anything starts."""

import json
import os
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from cluster.cli import main
from cluster.ledger import Ledger
from cluster.run import check_folder, make_folder
from configs.schema import ConfigError, load


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["accredit", *arguments])
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def config(folder: Path, model: Path | str, **sections: object) -> Path:
    """A YAML file with these sections over a small run."""
    settings = {
        "name": "bad",
        "out": str(folder / "runs"),
        "steps": 1,
        "model": {"path": str(model), "max_length": 64},
        "data": {"task": "arithmetic", "heldout": 8},
        "rollout": {"max_new_tokens": 16},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**settings, **sections}))
    return path


def questions(folder: Path, rows: list[dict[str, str]]) -> str:
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


ROWS = [{"question": f"what is {i}?", "answer": str(i)} for i in range(20)]
BAD = {
    "unknown key": (["credit.metod=arca"], ["credit.metod", "unknown key", "method"]),
    "wrong type": (["steps=many"], ["steps", "'many'", "integer"]),
    "override without a value": (["steps"], ["'steps'", "key=value"]),
    "missing model": (["model.path=./no/such/model"], ["model.path", "no/such/model", "folder"]),
    "group size 1": (["rollout.group_size=1"], ["rollout.group_size", "got 1", "at least 2"]),
    "context": (["model.max_length=9999"], ["model.max_length", "9999", "2048"]),
    "prompt too long": (["model.max_length=20"], ["6 tokens", "at most 4", "model.max_length"]),
    "lora target": (["lora.targets=[q_projection]"], ["lora.targets", "q_projection", "q_proj"]),
    "unknown method": (["credit.method=arcana"], ["credit.method", "arcana", "uniform"]),
    "unknown option": (["credit.options={q: 1}"], ["credit.options", "'q'"]),
    "unknown advantage": (["credit.advantage=ppo"], ["ppo", "grpo"]),
    "gcpo without a negative prompt": (["credit.method=gcpo"], ["credit.negative", "gcpo"]),
    "empty negative prompt": (
        ["credit.method=gcpo", "credit.negative={{ prompt[:0] }}"],
        ["credit.negative", "renders empty", "'empty'"],
    ),
    "unknown column in the negative prompt": (
        ["credit.method=gcpo", "credit.negative={{ solution }} no"],
        ["credit.negative", "solution", "answer"],
    ),
    "unknown loss": (["learner.loss.name=pg"], ["learner.loss.name", "'pg'", "ppo_clip"]),
    "pass@k of too few samples": (["eval.k=[4]"], ["eval.k", "got 4", "eval.samples=1"]),
    "too few slots": (["rollout.min_replicas=9"], ["rollout.min_replicas", "9"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_are_refused_in_one_line(
    case: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    overrides, words = BAD[case]
    assert run(monkeypatch, "train", str(config(tmp_path, tiny_model)), *overrides) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert all(word in line for word in words), line
    assert not (tmp_path / "runs").exists(), "nothing was started"


DATA = {
    "missing file": ({"path": "nowhere.jsonl"}, ["nowhere.jsonl", "no such file"]),
    "missing column": ({"columns": {"prompt": "query"}}, ["query", "question, answer"]),
    "unknown column in the template": ({"prompt": "{problem}"}, ["data.prompt", "problem", "question"]),
    "no row left to train on": ({"prompt": "{question}", "heldout": 20}, ["data.heldout", "20"]),
}


@pytest.mark.parametrize("case", DATA)
def test_bad_data_is_refused_in_one_line(
    case: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    changes, words = DATA[case]
    data = {"task": "dataset", "path": questions(tmp_path, ROWS), "heldout": 2, **changes}
    assert run(monkeypatch, "train", str(config(tmp_path, tiny_model, data=data))) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert all(word in line for word in words), line


def test_an_empty_dataset_is_refused(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    data = {"task": "dataset", "path": questions(tmp_path, [])}
    assert run(monkeypatch, "train", str(config(tmp_path, tiny_model, data=data))) == 2
    assert "the file is empty" in capsys.readouterr().err


def test_a_prompt_longer_than_the_context_names_its_row(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    rows = [*ROWS, {"question": "x" * 60, "answer": "0"}]
    data = {"task": "dataset", "path": questions(tmp_path, rows), "prompt": "{question}", "heldout": 2}
    assert run(monkeypatch, "train", str(config(tmp_path, tiny_model, data=data))) == 2
    error = capsys.readouterr().err
    assert "row 20" in error and "48" in error, error


@pytest.mark.ray
def test_resources_that_the_cluster_does_not_have_are_named(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    import ray

    path = config(tmp_path, tiny_model, rollout={"max_new_tokens": 16, "replicas": 3, "gpus": 2})
    try:
        assert run(monkeypatch, "train", str(path)) == 2
    finally:
        ray.shutdown()
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "6 GPU" in line and "rollout.replicas=3 x 2" in line
    assert not (tmp_path / "runs").exists()


def test_a_run_with_other_settings_is_not_continued(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path = config(tmp_path, tiny_model)
    make_folder(load(path, ["credit.method=uniform"]))
    assert run(monkeypatch, "train", str(path), "credit.method=arca", "seed=3") == 2
    error = capsys.readouterr().err
    assert "credit.method: was 'uniform', now 'arca'" in error and "seed: was 0, now 3" in error


def test_settings_that_may_change_are_named_and_recorded(tiny_model: Path, tmp_path: Path):
    path = config(tmp_path, tiny_model)
    make_folder(load(path, []))
    changed = load(path, ["steps=7", "learner.lr=0.1"])
    with pytest.raises(ConfigError, match=r"learner.lr: was 0.001, now 0.1.*--allow learner.lr --allow steps"):
        check_folder(changed)
    with pytest.raises(ConfigError, match="steps: was 1, now 7") as refusal:
        check_folder(changed, ["learner"])
    assert "learner.lr" not in str(refusal.value)
    check_folder(changed, ["learner", "steps"])
    make_folder(changed)
    assert yaml.safe_load((changed.folder / "config.yaml").read_text())["steps"] == 7
    check_folder(changed)


def test_a_run_that_another_process_trains_is_refused(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path = config(tmp_path, tiny_model)
    folder = load(path, []).folder
    make_folder(load(path, []))
    with closing(Ledger(folder / "ledger.sqlite")):
        assert run(monkeypatch, "train", str(path)) == 2
    assert f"process {os.getpid()} on" in (error := capsys.readouterr().err) and "is training this run" in error


def test_a_folder_that_cannot_be_written_is_refused(tiny_model: Path, tmp_path: Path):
    run = load(config(tmp_path, tiny_model), ["out=/proc/nowhere"])  # not even root can write there
    with pytest.raises(ConfigError, match=r"/proc/nowhere/bad: cannot be written: .*choose another out="):
        make_folder(run)


def test_an_audit_that_does_not_balance_says_so_with_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.lease(3)
    ledger.dropped(1, "stale")
    ledger.dropped(2, "a signal is not finite")
    ledger.close()
    assert run(monkeypatch, "audit", str(tmp_path), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["issued"], report["open"], report["dropped"]) == (3, 1, 2)
    assert report["dropped_by_reason"] == {"stale": 1, "a signal is not finite": 1}
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db:
        db.execute("DROP TRIGGER groups_stay")
        db.execute("DELETE FROM groups WHERE id = 1")
        db.commit()
    assert run(monkeypatch, "audit", str(tmp_path), "--json") == 1
    assert not json.loads(capsys.readouterr().out)["balanced"]


def test_audit_of_a_folder_without_a_run_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert run(monkeypatch, "audit", str(tmp_path)) == 2
    assert "no ledger there" in capsys.readouterr().err


def test_a_forgotten_argument_is_a_usage_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert run(monkeypatch, "train") == 2
    assert "Missing argument" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["train"], ["audit"]])
def test_every_command_has_help(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert run(monkeypatch, *command, "--help") == 0
    assert "Usage" in capsys.readouterr().out
