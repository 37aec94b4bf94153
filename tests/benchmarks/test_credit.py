"""The measurement of true credit on the real stack, against V worked out from the model's own probabilities."""

import asyncio
import importlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from rich.console import Console
from transformers import AutoModelForCausalLM

from actors.demo import character_tokenizer
from benchmarks.credit import COLUMNS, METHODS, TASKS, Bench, _tens
from benchmarks.rewards import last_digit
from cluster.preflight import inputs
from cluster.run import make_folder
from cluster.view import View
from configs.schema import RunConfig

TOKENS = 2  # of the longest completion: few enough for every one of them to be enumerated
CONTINUATIONS = 128  # of each half


def test_the_last_digit_of_the_answer_decides_alone():
    texts = ["7+8=15,3+4+1=8:85", "7+8=15,3+4+1=9:95", "7+8=14,3+4+1=8:84", "", "85?"]
    assert last_digit([], texts, answer=["85"] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_the_tens_column_is_found_where_a_scratchpad_has_one():
    text = "7+8=15,3+4+1=8:85"
    assert "".join(itertools.compress(text, _tens(text, len(text) + 1))) == "8"
    assert np.flatnonzero(_tens(text, len(text) + 1)).tolist() == [13]
    for other in ("7+8=15", "", "7+8=15,3:4=7", "="):
        assert not _tens(other, 20).any()


@pytest.fixture(scope="module")
def bench(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A policy of one optimiser step, its completions and the values of their prefixes."""
    import ray

    from cluster import remote

    out = tmp_path_factory.mktemp("credit")
    run = RunConfig.model_validate(
        {
            "name": "truth",
            "out": str(out),
            "steps": 1,
            "model": {"path": str(tiny_model), "max_length": 64},
            "lora": {"r": 4, "alpha": 8},
            "data": {"task": "arithmetic", "heldout": 8},
            "reward": {"function": "tests.rewards.letters"},
            "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": TOKENS, "kv_cache_gb": 0.1,
                        "cpus": 0.1},
            "credit": {"cpus": 0.1},
            "learner": {"lr": 1e-2, "cpus": 0.1},
        }
    )  # fmt: skip
    view = View(Console(quiet=True))
    given = inputs(run, lambda share, text: None)
    remote.connect(run, dashboard=False)
    make_folder(run)
    bench = Bench(run, given, view)
    asyncio.run(bench.measure(4, CONTINUATIONS))
    yield bench
    ray.shutdown()


class Exact:
    """Mean and variance of the reward after a prefix, over every way in which it can go on."""

    def __init__(self, bench: Bench) -> None:
        base = AutoModelForCausalLM.from_pretrained(bench.given.model, dtype=torch.float32)
        self.model = PeftModel.from_pretrained(base, bench.run.folder / "adapters" / "v000001").eval()
        tokenizer = character_tokenizer()
        texts = [str(tokenizer.decode([token], skip_special_tokens=True)) for token in range(len(tokenizer))]
        self.letters = np.array([text.isalpha() for text in texts], float)
        self.shown = np.array([len(text) for text in texts], float)
        self.eos = tokenizer.eos_token_id

    @torch.no_grad()
    def probabilities(self, rows: list[list[int]]) -> np.ndarray:
        return self.model(input_ids=torch.tensor(rows)).logits[:, -1].double().softmax(-1).numpy()

    def after(self, prompt: list[int], first: int) -> tuple[float, float]:
        """E R and E R^2 after one token, or at its end."""
        if first == self.eos:
            return 0.0, 0.0
        p_V = self.probabilities([[*prompt, first]])[0]
        reward_V = (self.letters[first] + self.letters) / np.maximum(1, self.shown[first] + self.shown)
        return float(p_V @ reward_V), float(p_V @ reward_V**2)

    def before(self, prompt: list[int]) -> tuple[float, float]:
        p_V = self.probabilities([prompt])[0]
        mean, square = np.array([self.after(prompt, first) for first in range(len(p_V))]).T @ p_V
        return mean, square


@pytest.mark.ray
def test_values_from_the_rollout_actors_are_those_of_the_policys_own_probabilities(bench: Bench):
    """z has mean 0 and mean square 1. 32 values of prompts are independent, those one token on nearly."""
    exact, z = Exact(bench), []
    prompts = {row.group: row.tokens[~row.mask].tolist() for row in bench.rows}
    before = {group: exact.before(prompt) for group, prompt in prompts.items()}
    for i, row in enumerate(bench.rows):
        tokens = row.tokens[row.mask]
        expected = [before[row.group]]
        if len(tokens) == TOKENS:
            expected.append(exact.after(prompts[row.group], int(tokens[0])))
        for half in bench.values.halves:
            assert half[i][-1] == row.reward
            for value, (mean, square) in zip(half[i][:-1], expected, strict=True):
                z.append((value - mean) / np.sqrt((square - mean**2) / CONTINUATIONS))
    assert len(z) >= 48
    assert np.abs(z).max() < 4.5
    assert abs(np.mean(z)) < 4.5 / np.sqrt(32)
    assert 0.3 < np.mean(np.square(z)) < 2.2  # a chi-square of 32 has a standard deviation of .25 of its mean


@pytest.mark.ray
def test_every_method_and_its_control_is_held_against_the_truth(bench: Bench):
    report = bench.report()
    methods = report["methods"]
    assert set(methods) == {*METHODS, *(f"{name}, permuted" for name in METHODS if name != "uniform"), "oracle"}
    assert all({"spearman", "mass", "cosine"} <= set(figures) <= set(COLUMNS) for figures in methods.values())
    assert methods["uniform"]["spearman"].value == 0
    # a power keeps the order of the weights, and little else
    assert methods["arca p=1"]["spearman"] == methods["arca p=2"]["spearman"]
    cosine = {name: figures["cosine"].value for name, figures in methods.items()}
    assert cosine["arca p=1"] != cosine["arca p=2"]
    assert cosine["surprisal"] != cosine["surprisal, permuted"]
    assert cosine["gcpo k3"] != cosine["gcpo k3 empty"]
    assert report["completions"] == 16 and report["prompts"] == 4
    assert report["continuations_of_a_prefix"] == 2 * CONTINUATIONS
    rewards = [row.reward for row in bench.rows]
    dv = [(a[-1] - a[0] + b[-1] - b[0]) / 2 for a, b in zip(*bench.values.halves, strict=True)]
    assert report["reward_minus_value_of_prompt"].value == pytest.approx(np.mean(dv))
    assert report["success_rate"] == pytest.approx(np.mean(rewards))


def test_the_tasks_name_rewards_that_take_the_columns_of_the_demo():
    for path in TASKS.values():
        module, _, name = path.rpartition(".")
        function = getattr(importlib.import_module(module), name)
        assert function(["37+48?"] * 2, ["0:85", "0:86"], answer=["85", "85"]) == [1.0, 0.0]
