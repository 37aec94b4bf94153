"""One job against one after another: a sweep's wall time and memory, and whether each run learns as it does alone."""

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
import torch
import yaml
from peft import PeftModel
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from benchmarks.machine import describe
from cluster import evaluation
from cluster.metrics import read
from cluster.preflight import inputs
from cluster.view import View
from configs.schema import ConfigError, RunConfig
from configs.sweep import load

INTERVAL_S = 1.0
ROWS = 32  # completions whose log-probs are computed again


@dataclass(frozen=True, slots=True)
class Cost:
    seconds: float
    peak_bytes: int  # PSS over the process tree


def main(config: Path, out: Path, as_json: bool) -> dict[str, Any]:
    """The sweep of `config`, then each of its runs alone, both below `out`; what is there already is an error."""
    overrides = [f"out={out}", "name=together"]
    _, entries = load(config, overrides)
    if (out / "together.log").exists():
        raise ConfigError(f"--out: {out} holds an earlier benchmark: choose another folder")
    with View(Console(stderr=True)).making("sweep against single runs") as progress:
        given = inputs(entries[0].run, lambda share, text: None)  # makes the demo's base model, for both
        out.mkdir(parents=True, exist_ok=True)
        progress(0.0, "the sweep")
        together = _measure(["sweep", str(config), *overrides], out / "together.log")
        alone: dict[str, Cost] = {}
        for number, entry in enumerate(entries):
            progress((number + 1) / (len(entries) + 1), f"{entry.run.name} alone")
            path = out / f"{entry.run.name}.yaml"
            path.write_text(yaml.safe_dump(_alone(entry.run, out, given.model).model_dump(mode="json")))
            alone[entry.run.name] = _measure(["train", str(path)], out / f"{entry.run.name}.log")
    seconds = sum(cost.seconds for cost in alone.values())
    results = {
        "machine": describe(),
        "together": asdict(together),
        "alone": {name: asdict(cost) for name, cost in alone.items()},
        "wall_ratio": together.seconds / seconds,
        "memory_ratio": together.peak_bytes / sum(cost.peak_bytes for cost in alone.values()),
        "memory_over_one": together.peak_bytes / max(cost.peak_bytes for cost in alone.values()),
        "runs": {e.run.name: _compare(e.run, _alone(e.run, out, given.model), given.model) for e in entries},
    }
    if as_json:
        print(json.dumps(results, indent=1))
    else:
        _print(results)
    return results


def _alone(run: RunConfig, out: Path, model: str) -> RunConfig:
    """On the same base model, which a demo would make again in another folder."""
    base = run.model.model_copy(update={"path": model})
    return run.model_copy(update={"out": str(out / "alone"), "model": base})


def _measure(arguments: list[str], log: Path) -> Cost:
    """Run the command; raises RuntimeError when it fails."""
    began, peak = time.monotonic(), 0
    with log.open("w") as file:
        command = [sys.executable, "-m", "cluster.cli", *arguments]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=dict(os.environ))
        try:
            while process.poll() is None:
                peak = max(peak, _pss(process.pid))
                time.sleep(INTERVAL_S)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: ended with exit code {process.returncode}: see {log}")
    return Cost(time.monotonic() - began, peak)


def _pss(pid: int) -> int:
    """Memory of the process and all below it, in bytes; what several share is counted once."""
    total = 0
    try:
        tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for process in tree:
        try:
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended
            continue
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def _compare(together: RunConfig, alone: RunConfig, model: str) -> dict[str, Any]:
    """Held-out accuracy and train reward of the same run both ways, and its log-probs against a plain forward pass."""
    both: dict[str, Any] = {}
    for name, run in (("together", together), ("alone", alone)):
        report = evaluation.read(evaluation.path_of(run.folder, run.steps))
        rewards = [record["reward/mean"] for record in read(run.folder) if "reward/mean" in record]
        both[name] = {
            "accuracy": asdict(evaluation.figure(report)),
            "greedy": asdict(evaluation.figure(report, "greedy")) if "greedy" in report["figures"] else None,
            "rewards": rewards,
            "reward": sum(rewards) / len(rewards),
        }
    pairs = list(zip(both["together"]["rewards"], both["alone"]["rewards"], strict=True))
    equal = next((i for i, (one, other) in enumerate(pairs) if not math.isclose(one, other)), len(pairs))
    return both | {"equal_steps": equal, "logprob_error": _logprob_error(together, model)}


@torch.no_grad()
def _logprob_error(run: RunConfig, model: str) -> float:
    """The largest difference of the sampler's log-probs, under load of all runs, to those of the adapter alone."""
    version = run.steps - 1 - run.max_staleness
    base = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, run.model.dtype))
    policy = PeftModel.from_pretrained(base, run.folder / "adapters" / f"v{version:06d}").eval()
    paths = sorted((run.folder / "trajectories").glob("*.parquet"))
    rows = [row for row in pq.read_table(paths[-1]).to_pylist() if row["version"] == version][:ROWS]
    worst = 0.0
    for row in rows:
        tokens_1T = torch.tensor([row["tokens"]])
        logits = policy(input_ids=tokens_1T).logits[0, :-1].float() / run.rollout.temperature
        logp = logits.log_softmax(-1).gather(1, tokens_1T[0, 1:, None])[:, 0].numpy()
        mask = np.array(row["mask"])[1:]
        worst = max(worst, float(np.abs(logp - np.array(row["logprobs"])[1:])[mask].max()))
    return worst


def _print(results: dict[str, Any]) -> None:
    table = Table(title="each run in the sweep and alone")
    titles = ("run", "accuracy together", "accuracy alone", "reward together", "alone", "equal steps", "log-probs")
    for column in titles:
        table.add_column(column, justify="left" if column == "run" else "right")
    for name, run in results["runs"].items():
        ends = [run[way]["accuracy"] for way in ("together", "alone")]
        accuracies = [f"{end['value']:.3f} \\[{end['low']:.3f}, {end['high']:.3f}]" for end in ends]
        rewards = [f"{run[way]['reward']:.3f}" for way in ("together", "alone")]
        table.add_row(name, *accuracies, *rewards, str(run["equal_steps"]), f"{run['logprob_error']:.1e}")
    console = Console()
    console.print(table)
    alone = results["alone"].values()
    seconds, together = sum(cost["seconds"] for cost in alone), results["together"]
    gib = 2**30
    console.print(
        f"wall time: {together['seconds']:.0f} s together, {seconds:.0f} s one after another: "
        f"{results['wall_ratio']:.2f}\n"
        f"peak memory: {together['peak_bytes'] / gib:.2f} GiB together, "
        f"{sum(cost['peak_bytes'] for cost in alone) / gib:.2f} GiB side by side: {results['memory_ratio']:.2f}; "
        f"{max(cost['peak_bytes'] for cost in alone) / gib:.2f} GiB for one at a time",
        highlight=False,
    )
    console.print(results["machine"], style="dim")
