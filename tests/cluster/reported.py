"""A run's folder that is small enough to work its figures by hand, for the tests of the report."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from cluster import trajectories
from cluster.loop import Group
from credit import assign
from credit.trajectory import Prompt, Trajectory

HOSTILE = "</script><script>window.hit=1</script>"
VOCABULARY = ["<eos>", "1", "+", "\n", HOSTILE, "\"'&`${hit}", "\u202e", "\x00", "é😀", "go"]
REWARDS = (1.0, 0.0)
RESIDUAL = ([1.0, 3.0], [2.0, 2.0])  # of the completions' two tokens
ENTROPY = ([0.1, 0.9], [0.2, 0.8])  # mean over the group: .5


def tokenizer(folder: Path) -> Path:
    ids = {text: place for place, text in enumerate(VOCABULARY)}
    backend = Tokenizer(models.WordLevel(ids, unk_token="<eos>"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(folder)
    return folder


def make_run(folder: Path, steps: int = 1, **credit: Any) -> Path:
    """`steps` steps of two groups: 0, with REWARDS, RESIDUAL and ENTROPY, and 1, of hostile tokens, without signal."""
    settings = {
        "name": "hostile </script>",
        "out": str(folder),
        "steps": steps,
        "seed": 3,
        "model": {"path": str(tokenizer(folder / "tokenizer"))},
        "data": {"task": "arithmetic"},
        "credit": {"method": "arca", **credit},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    records = []
    for step in range(1, steps + 1):
        groups = [_group(2 * step - 2, "1+1?", [[1, 0], [2, 0]]), _hostile(2 * step - 1)]
        rows = [row for group in groups for row in group.trajectories]
        signals = [mine for group in groups for mine in group.signals]
        batch, figures = assign(rows, signals, method="arca", permute=credit.get("permute", False), seed=3 + step)
        trajectories.write(folder, step, groups, batch)
        records.append({"step": step, "time": 0.0, "reward/mean": 0.5, **figures})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def _hostile(number: int) -> Group:
    return _group(number, f"{HOSTILE}\u202e \"'", [list(range(3, len(VOCABULARY)))] * 2, rewards=(0.0, 0.0))


def _group(number: int, prompt: str, completions: list[list[int]], rewards: tuple[float, ...] = REWARDS) -> Group:
    rows, signals = [], []
    for index, (tokens, reward) in enumerate(zip(completions, rewards, strict=True)):
        long = len(tokens)
        logprobs = np.array([0.0, *[-0.5] * long], np.float32)
        rows.append(
            Trajectory(
                group=number, index=index, tokens=np.array([9, *tokens]), mask=np.array([False] + [True] * long),
                logprobs=logprobs, text="", finish="stop", version=2, digest="ab" * 32, reward=reward,
            )
        )  # fmt: skip
        signals.append(
            {
                "logp": logprobs,
                "logp_base": logprobs * 2,
                "entropy": np.array([0, *(ENTROPY[index] * long)[:long]], np.float32),
                "residual": np.array([0, *(RESIDUAL[index] * long)[:long]], np.float32),
            }
        )
    asked = Prompt(group=number, tokens=[9], seeds=[0, 1], prompt=prompt, columns={})
    return Group(prompt=asked, trajectories=rows, signals=signals, rewarded_at=0.0)
