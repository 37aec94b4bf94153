"""Whole runs on the real stack: Ray, vLLM, PEFT, DeepSpeed. Nothing is replaced."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from peft import PeftModel
from rich.console import Console
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from configs.schema import RunConfig, load

pytestmark = pytest.mark.ray


def config(base: Path, out: Path, name: str, **changes) -> RunConfig:
    settings = {
        "name": name,
        "out": str(out),
        "steps": 4,
        "model": {"path": str(base), "max_length": 64},
        "lora": {"r": 4, "alpha": 8},
        "data": {"task": "arithmetic", "heldout": 8},
        "reward": {"function": "tests.rewards.letters"},
        "rollout": {"replicas": 2, "prompts_per_step": 4, "group_size": 4, "max_new_tokens": 12, "kv_cache_gb": 0.1,
                    "cpus": 0.1},
        "credit": {"method": "arca", "cpus": 0.1},
        "learner": {"ranks": 2, "zero_stage": 2, "lr": 1e-2, "tokens_per_micro_batch": 128, "cpus": 0.1},
    }  # fmt: skip
    for section, values in changes.items():
        settings[section] = {**settings.get(section, {}), **values} if isinstance(values, dict) else values
    return RunConfig.model_validate(settings)


def train(run: RunConfig) -> dict:
    from cluster.preflight import inputs
    from cluster.run import make_folder
    from cluster.run import train as train_run
    from cluster.view import View

    given = inputs(run, lambda share, text: None)
    make_folder(run)
    return asyncio.run(train_run(run, given, View(Console(quiet=True))))


def records(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "reward/mean" in line]


def trajectories(folder: Path) -> list[dict]:
    return [
        row for path in sorted((folder / "trajectories").glob("*.parquet")) for row in pq.read_table(path).to_pylist()
    ]


def adapter(folder: Path, version: int) -> dict[str, np.ndarray]:
    return load_file(folder / "adapters" / f"v{version:06d}" / "adapter_model.safetensors")


def policy(model: Path, folder: Path, version: int) -> torch.nn.Module:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return PeftModel.from_pretrained(base, folder / "adapters" / f"v{version:06d}").eval()


@torch.no_grad()
def logprobs(model: torch.nn.Module, row: dict) -> np.ndarray:
    """Log-probs of the completion tokens by one plain forward pass."""
    tokens = torch.tensor([row["tokens"]])
    logp = model(input_ids=tokens).logits[0, :-1].float().log_softmax(-1)
    return logp.gather(1, tokens[0, 1:, None])[:, 0].numpy()[np.array(row["mask"])[1:]]


def of_completion(row: dict, column: str) -> np.ndarray:
    return np.array(row[column])[np.array(row["mask"])]


@pytest.fixture(scope="module")
def synchronous(cluster: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = config(tiny_model, tmp_path_factory.mktemp("runs"), "sync")
    train(run)
    return run.folder


def test_a_synchronous_run_trains_each_group_once(synchronous: Path):
    from cluster.ledger import audit

    report = audit(synchronous / "ledger.sqlite")
    assert report["balanced"] and report["trained"] == 16 and report["open"] == report["dropped"] == 0
    steps = records(synchronous)
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    assert all(record["staleness/max"] == 0 for record in steps)
    assert steps[0]["credit/gini"] == 0, "at B = 0 arca is uniform"
    assert steps[-1]["credit/gini"] > 0


def test_the_exported_adapter_loads_with_peft_and_gives_the_log_probs_of_sampler_and_scorer(
    synchronous: Path, tiny_model: Path
):
    rows = trajectories(synchronous)
    assert len(rows) == 64
    for version in (0, 3):
        model = policy(tiny_model, synchronous, version)
        mine = [row for row in rows if row["version"] == version]
        assert len(mine) == 16
        for row in mine:
            own = logprobs(model, row)
            np.testing.assert_allclose(of_completion(row, "logprobs"), own, atol=1e-4)
            np.testing.assert_allclose(of_completion(row, "signal_logp"), own, atol=1e-4)


def test_two_synchronous_runs_with_one_seed_give_bit_equal_adapters(synchronous: Path, tiny_model: Path):
    run = config(tiny_model, synchronous.parent, "again")
    train(run)
    for version in range(5):
        one, other = adapter(synchronous, version), adapter(run.folder, version)
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[name], other[name]) for name in one), f"version {version}"


def test_every_trajectory_of_an_asynchronous_run_was_sampled_under_the_version_it_names(
    cluster: None, tiny_model: Path, tmp_path: Path
):
    """22 swaps under load; staleness never above the bound; each log-prob is its own version's and no neighbour's.

    The reward goes up meanwhile.
    """
    run = config(
        tiny_model, tmp_path, "async", steps=22, max_staleness=2, learner={"lr": 2e-2, "ranks": 1},
        rollout={"group_size": 8},
    )  # fmt: skip
    train(run)
    steps = records(run.folder)
    assert max(record["staleness/max"] for record in steps) in (1, 2)
    rewards = [record["reward/mean"] for record in steps]
    assert np.mean(rewards[-6:]) > np.mean(rewards[:6]) + 0.03
    rows = trajectories(run.folder)
    policies = [policy(tiny_model, run.folder, version) for version in range(23)]
    told_apart = 0
    for row in rows:
        assert row["step"] - 1 - row["version"] <= 2
        sampled = of_completion(row, "logprobs")
        np.testing.assert_allclose(sampled, logprobs(policies[row["version"]], row), atol=1e-4)
        neighbour = logprobs(policies[row["version"] + 1], row)
        told_apart += np.abs(sampled - neighbour).max() > 1e-3
    assert len(rows) == 22 * 32
    assert told_apart > 0.95 * len(rows)


GSM8K = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "gsm8k" / "train-2000.jsonl"


@pytest.mark.skipif(not GSM8K.exists(), reason=f"the GSM8K questions are not beside the project: no {GSM8K.name}")
def test_groups_without_signal_on_real_questions_are_counted_and_not_an_error(
    cluster: None, tiny_model: Path, tmp_path: Path
):
    """A random model hardly ever answers a GSM8K question: most groups have equal rewards."""
    overrides = [f"model.path={tiny_model}", f"data.path={GSM8K}", f"out={tmp_path}", "steps=2"]
    run = load("configs/gsm8k.yaml", overrides)
    train(run)
    rows = trajectories(run.folder)
    assert all("Think step by step" in row["prompt"] for row in rows)
    for record in records(run.folder):
        groups: dict[int, set[float]] = {}
        for row in rows:
            if row["step"] == record["step"]:
                groups.setdefault(row["group"], set()).add(row["reward"])
        without_signal = sum(len(rewards) == 1 for rewards in groups.values())
        assert without_signal > 0
        assert record["groups/no_signal"] == without_signal / len(groups) == without_signal / 4
    assert adapter(run.folder, 2).keys() == adapter(run.folder, 0).keys()
