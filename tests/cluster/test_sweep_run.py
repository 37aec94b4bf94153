"""A sweep on the real stack: Ray, vLLM, PEFT, DeepSpeed. Nothing is replaced."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rich.console import Console
from safetensors.numpy import load_file

from cluster.ledger import audit
from configs.sweep import Entry, SweepConfig, load

pytestmark = pytest.mark.ray


def sweep_of(model: Path, folder: Path, **changes: Any) -> tuple[SweepConfig, list[Entry]]:
    base = {
        "steps": 2,
        "model": {"path": str(model), "max_length": 64},
        "data": {"task": "arithmetic", "heldout": 4},
        "reward": {"function": "tests.rewards.letters"},
        "rollout": {"replicas": 1, "prompts_per_step": 2, "group_size": 4, "max_new_tokens": 8, "kv_cache_gb": 0.1,
                    "cpus": 0.1},
        "credit": {"cpus": 0.1},
        "learner": {"lr": 1e-2, "cpus": 0.1},
    }  # fmt: skip
    tree = {"name": "sweep", "out": str(folder), "base": base, **changes}
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return load(path)


def train(sweep: SweepConfig, entries: list[Entry]) -> tuple[dict[str, str], str]:
    from cluster import sweep as job
    from cluster.preflight import inputs
    from cluster.run import make_folder
    from cluster.sweep_view import SweepView

    said = io.StringIO()
    given = {entry.run.name: inputs(entry.run, lambda share, text: None) for entry in entries}
    for entry in entries:
        make_folder(entry.run)
    failed = asyncio.run(job.train(sweep, entries, given, SweepView(entries, Console(file=said, width=200))))
    return failed, said.getvalue()


def test_runs_of_two_ranks_share_the_actors_one_fails_alone_and_only_it_is_tried_again(
    cluster: None, tiny_model: Path, tmp_path: Path
) -> None:
    from cluster import sweep_table
    from cluster.sweep import finished

    variants = {
        "uniform": {"lora.r": 2, "lora.alpha": 4},
        "arca": {"credit.method": "arca", "lora.r": 6, "lora.alpha": 12},
        "broken": {"learner.lr": 1e30},
    }
    sweep, entries = sweep_of(tiny_model, tmp_path, variants=variants)
    failed, said = train(sweep, entries)
    assert failed.keys() == {"broken-r16-seed0"}, said
    well = [entry.run for entry in entries[:2]]
    for run, rank in zip(well, (2, 6), strict=True):
        assert audit(run.folder / "ledger.sqlite")["balanced"]
        tensors = load_file(run.folder / "adapters" / "v000002" / "adapter_model.safetensors")
        assert {t.shape[0] for name, t in tensors.items() if "lora_A" in name} == {rank}
        steps = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
        gaps = [step["mismatch/kl"] for step in steps if "mismatch/kl" in step]
        assert np.abs(gaps).max(initial=0) < 1e-4, "sampler and credit actor had the same adapter of the same run"
    table = sweep_table.results(entries, failed, {run.name for run in well})
    assert [(row["rank"], row["runs"], len(row["failed"])) for row in table] == [(2, 1, 0), (6, 1, 0), (16, 0, 1)]
    assert all(finished(run) for run in well)
    before = (well[0].folder / "metrics.jsonl").read_text()
    sweep, entries = sweep_of(tiny_model, tmp_path, variants=variants)
    failed, said = train(sweep, entries[:2])
    assert not failed and said.count("finished") == 2
    assert (well[0].folder / "metrics.jsonl").read_text() == before, "what is finished is not trained again"
