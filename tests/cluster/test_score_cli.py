"""`accredit score` on the command line: what is wrong with the input is one line, and nothing is written."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from actors.demo import make_model
from cluster.adapters import zero_adapter
from cluster.cli import main
from tests.cluster.test_score import make_rows, save_adapter, write_rows

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_model: Path, tmp_path: Path) -> Cli:
    """Exit code, stdout and stderr of `accredit score PATH ...`, which writes tmp_path/out.parquet."""

    def run(path: Path, *settings: str) -> tuple[int, str, str]:
        usual = ["--model", str(tiny_model), "--method", "arca", "--out", str(tmp_path / "out.parquet")]
        monkeypatch.setattr(sys, "argv", ["accredit", "score", str(path), *usual, *settings])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


GOOD = {"prompt": "1+1?", "completion": "2", "reward": 1.0}
IDS = {"tokens": [5, 6, 7], "mask": [False, True, True], "reward": 1.0}
BAD_ROWS: dict[str, tuple[Any, list[str]]] = {
    "no reward": ({"prompt": "1", "completion": "2"}, ["reward", "missing"]),
    "reward not finite": (GOOD | {"reward": float("nan")}, ["reward", "nan", "finite"]),
    "reward no number": (GOOD | {"reward": "1"}, ["reward", "'1'"]),
    "no prompt": ({"completion": "2", "reward": 1}, ["prompt", "missing"]),
    "no completion": ({"prompt": "2", "reward": 1}, ["completion", "missing"]),
    "prompt no text": (GOOD | {"prompt": 5}, ["prompt", "'5'", "text"]),
    "empty prompt": (GOOD | {"prompt": ""}, ["prompt", "zero tokens"]),
    "empty completion": (GOOD | {"completion": ""}, ["completion", "zero tokens"]),
    "empty mask": (IDS | {"mask": [False] * 3}, ["mask", "zero tokens"]),
    "no mask": ({"tokens": [5, 6], "reward": 1}, ["mask", "missing"]),
    "short mask": (IDS | {"mask": [False, True]}, ["mask", "got 2", "3"]),
    "mask on the first token": (IDS | {"mask": [True] * 3}, ["tokens", "first token"]),
    "no prompt tokens": ({"completion_tokens": [5], "reward": 1}, ["prompt_tokens", "missing"]),
    "tokens no integers": (IDS | {"tokens": [5, 6.5, 7]}, ["tokens", "6.5", "token ids"]),
    "beyond the vocabulary": (IDS | {"tokens": [5, 6, 999]}, ["tokens", "999", "position 2", "vocabulary"]),
    "beyond the context": (GOOD | {"completion": "1" * 2050}, ["completion", "2054", "2048", "context"]),
    "logprobs of another length": (IDS | {"logprobs": [1.0] * 4}, ["logprobs", "got 4", "3", "2"]),
    "logprobs not finite": (IDS | {"logprobs": [0, -1, float("inf")]}, ["logprobs", "infinite"]),
    "group of another type": (GOOD | {"group": 3}, ["group", "3", "nothing"]),
    "negative index": (GOOD | {"index": -1}, ["index", "-1"]),
    "no JSON": ("{prompt", ["no JSON"]),
    "no object": ("[1]", ["list", "object"]),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_is_one_line_with_file_line_and_field(case: str, cli: Cli, tmp_path: Path):
    row, words = BAD_ROWS[case]
    path = write_rows(tmp_path / "rows.jsonl", [GOOD, "", row])
    code, out, err = cli(path)
    assert f"{path}: line 3: " in err and err.count("\n") == 1 and all(word in err for word in words), err
    assert code == 2 and not out and not list(tmp_path.glob("*.parquet*"))


def other_base(folder: Path) -> Path:
    make_model(folder / "base", hidden=32, intermediate=64, layers=2, heads=2, kv_heads=1)
    return save_adapter(folder / "base", folder / "lora")


def other_vocabulary(folder: Path) -> Path:
    make_model(folder / "base", hidden=64, intermediate=128, layers=2, heads=2, kv_heads=1, vocabulary=200)
    return save_adapter(folder / "base", folder / "lora", modules_to_save=["lm_head"])


def trained_embeddings(folder: Path) -> Path:
    make_model(folder / "base", hidden=64, intermediate=128, layers=2, heads=2, kv_heads=1)
    return save_adapter(folder / "base", folder / "lora", modules_to_save=["embed_tokens"])


def pickled(folder: Path) -> Path:
    (folder / "adapter_model.bin").write_bytes(b"")
    return folder


def damaged(folder: Path) -> Path:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "target_modules": ["q_proj"]}')
    (folder / "adapter_model.safetensors").write_bytes(b"nothing")
    return folder


def no_lora(folder: Path) -> Path:
    (folder / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    save_file({"a": torch.zeros(1)}, folder / "adapter_model.safetensors")
    return folder


ADAPTERS = {
    "other base": (other_base, ["wrong shape", "32", "64", "base model"]),
    "other vocabulary": (other_vocabulary, ["lm_head", "200", "vocabulary"]),
    "trained embeddings": (trained_embeddings, ["embed_tokens", "no LoRA factor"]),
    "pickle": (pickled, ["adapter_model.bin", "pickle"]),
    "damaged": (damaged, ["adapter_model.safetensors"]),
    "no LoRA": (no_lora, ["peft_type", "IA3"]),
    "nothing": (lambda folder: folder, ["adapter_config.json"]),
    "no folder": (lambda folder: folder / "nowhere", ["nowhere", "no folder"]),
}


@pytest.mark.parametrize("case", ADAPTERS)
def test_a_bad_adapter_is_refused_in_one_line(case: str, cli: Cli, tmp_path: Path):
    make, words = ADAPTERS[case]
    code, _, err = cli(write_rows(tmp_path / "rows.jsonl", [GOOD]), "--adapter", str(make(tmp_path)))
    line = err.strip().splitlines()[-1]
    assert line.startswith("accredit: ") and all(word in line for word in words), line
    assert code == 2 and not (tmp_path / "out.parquet").exists()


SETTINGS = {
    "unknown method": (["--method", "arcana"], ["arcana", "uniform"]),
    "method twice": (["--method", "arca,arca"], ["--method", "arca,arca"]),
    "ibpo": (["--method", "ibpo"], ["ibpo", "run only"]),
    "unknown advantage": (["--advantage", "ppo"], ["ppo", "grpo"]),
    "unknown option": (["--option", "q=1"], ["--option", "'q'", "arca"]),
    "option without a value": (["--option", "q"], ["--option", "key=value"]),
    "bad option": (["--method", "forking", "--option", "q=2"], ["forking", "q", "2"]),
    "no negative": (["--method", "gcpo"], ["credit.negative", "gcpo"]),
    "negative renders empty": (["--method", "gcpo", "--negative", "{{ '' }}"], ["line 1", "renders empty"]),
    "negative with an unknown column": (["--method", "gcpo", "--negative", "{{ x }}"], ["line 1", "x"]),
    "negative too long": (["--method", "gcpo", "--negative", "{{ 'x' * 2048 }}"], ["line 1", "negative", "2049"]),
    "sharpening": (["--sharpening", "0"], ["sharpening", "0"]),
    "temperature": (["--temperature", "3"], ["--temperature", "3"]),
    "dtype": (["--dtype", "int8"], ["--dtype", "int8"]),
    "tokens per forward": (["--tokens-per-forward", "0"], ["--tokens-per-forward", "0"]),
    "seed": (["--seed", "-1"], ["--seed", "-1"]),
    "out": (["--out", "credit.csv"], ["--out", ".parquet"]),
    "out in no folder": (["--out", "no/where/credit.parquet"], ["--out", "no/where"]),
    "model": (["--model", "./nowhere"], ["--model", "nowhere"]),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_a_bad_setting_is_refused_in_one_line(case: str, cli: Cli, tmp_path: Path):
    settings, words = SETTINGS[case]
    code, _, err = cli(write_rows(tmp_path / "rows.jsonl", [GOOD, GOOD | {"reward": 0}]), *settings)
    (line,) = err.strip().splitlines()
    assert all(word in line for word in words), line
    assert code == 2 and not list(tmp_path.glob("*.parquet*"))


def test_signals_that_are_not_finite_end_in_one_line_and_no_file(cli: Cli, tiny_model: Path, tmp_path: Path):
    adapter = zero_adapter(str(tiny_model))
    for tensor in adapter.tensors.values():
        tensor[:] = np.inf
    adapter.save(tmp_path / "lora")
    code, _, err = cli(write_rows(tmp_path / "rows.jsonl", [GOOD]), "--adapter", str(tmp_path / "lora"))
    line = err.strip().splitlines()[-1]
    assert code == 1 and line.startswith("accredit: ") and "not finite" in line, line
    assert not list(tmp_path.glob("*.parquet*")) and not list(tmp_path.glob(".*"))


FILES = {
    "missing": (lambda folder: folder / "no.jsonl", ["no.jsonl", "no such file"]),
    "empty": (lambda folder: write_rows(folder / "a.jsonl", []), ["a.jsonl", "no rows"]),
    "ending": (lambda folder: write_rows(folder / "a.csv", [GOOD]), ["a.csv", ".jsonl or .parquet"]),
    "no parquet": (lambda folder: write_rows(folder / "a.parquet", [GOOD]), ["a.parquet", "Parquet"]),
}


@pytest.mark.parametrize("case", FILES)
def test_a_bad_file_is_refused_in_one_line(case: str, cli: Cli, tmp_path: Path):
    make, words = FILES[case]
    code, _, err = cli(make(tmp_path))
    (line,) = err.strip().splitlines()
    assert code == 2 and all(word in line for word in words), line


def test_json_is_all_that_goes_to_stdout(tiny_model: Path, tmp_path: Path):
    adapter = save_adapter(tiny_model, tmp_path / "lora")
    path = write_rows(tmp_path / "rows.jsonl", make_rows())
    command = [sys.executable, "-m", "cluster.cli", "score", str(path), "--model", str(tiny_model)]
    command += ["--adapter", str(adapter), "--method", "uniform, arca", "--out", str(tmp_path / "out.parquet")]
    answer = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert answer.returncode == 0, answer.stderr
    report = json.loads(answer.stdout)
    assert report["methods"]["uniform"]["gini"] == 0 < report["methods"]["arca"]["gini"]
    assert "warning" in answer.stderr and "12 rows without logprobs" in answer.stderr


def test_the_table_has_a_column_for_each_method(cli: Cli, tmp_path: Path):
    path = write_rows(tmp_path / "rows.jsonl", make_rows())
    code, shown, _ = cli(path, "--method", "surprisal,gcpo", "--negative", "empty")
    assert code == 0 and all(
        word in shown for word in ("surprisal", "gcpo", "gini", "sign flip rate", "template share")
    )
