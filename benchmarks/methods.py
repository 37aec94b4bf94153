"""Every credit method on the demo task: held-out accuracy with its spread, concentration, and the permuted control.

Each entry is an ordinary run below `out`, so what is there already is not trained again.
"""

import json
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe
from cluster.metrics import read
from configs.schema import RunConfig

NEGATIVE = "{{ prompt[::-1] }}"
"""The demo's model understands no instruction; the question read backwards is another question of the same kind."""
SHARPENED = ("surprisal", "entropy_reduction", "divergence", "arca")


def entries() -> dict[str, dict[str, Any]]:
    """Name -> credit settings: each method, p = 1 and 2 where it has a p, and the permuted control of each method."""
    methods: dict[str, dict[str, Any]] = {"uniform": {}}
    for name in SHARPENED:
        methods[f"{name} p=1"] = {"method": name}
        methods[f"{name} p=2"] = {"method": name, "sharpening": 2.0}
    methods["forking"] = {"method": "forking"}
    methods["gcpo"] = {"method": "gcpo", "negative": NEGATIVE}
    methods["delta"] = {"method": "delta"}
    methods["eapo"] = {"method": "eapo"}
    methods["ibpo"] = {"method": "ibpo", "options": {"references": 1}}
    permuted = {
        f"{name}, permuted": {**credit, "permute": True}
        for name, credit in methods.items()
        if credit and "sharpening" not in credit and name != "ibpo"
    }
    return methods | permuted


def main(
    out: Path, seeds: int = 3, steps: int = 30, only: list[str] | None = None, json_output: bool = False
) -> dict[str, Any]:
    """Train each entry (or those of `only`) with `seeds` seeds for `steps` steps; print the table, or JSON."""
    from cluster.view import View

    chosen = {name: credit for name, credit in entries().items() if only is None or name in only}
    with View(Console(stderr=True)).making("credit methods") as progress:
        for number, (seed, name) in enumerate((seed, name) for seed in range(seeds) for name in chosen):
            progress(number / (seeds * len(chosen)), f"{name}, seed {seed}")
            _train(_config(out, name, chosen[name], seed, steps))
        progress(1.0, "done")
    results = {
        "machine": describe(),
        "steps": steps,
        "seeds": seeds,
        "methods": {name: _summary([_figures(_config(out, name, credit, seed, steps)) for seed in range(seeds)])
                    for name, credit in chosen.items()},
    }  # fmt: skip
    if json_output:
        print(json.dumps(results, indent=1))
    else:
        _print(results)
    return results


def _config(out: Path, name: str, credit: dict[str, Any], seed: int, steps: int) -> RunConfig:
    folder = name.replace(" ", "_").replace(",", "").replace("=", "")
    return RunConfig.model_validate(
        {
            "name": f"{folder}-{steps}-seed{seed}",
            "out": str(out),
            "steps": steps,
            "seed": seed,
            "keep_checkpoints": 2,
            "data": {"task": "arithmetic", "heldout": 512},
            "rollout": {"replicas": 1, "prompts_per_step": 16, "group_size": 8, "max_new_tokens": 32, "cpus": 0.5},
            "credit": credit,
            "learner": {"lr": 3e-3, "schedule": "linear"},
            "eval": {"samples": 2},
        }
    )


def _train(run: RunConfig) -> None:
    """Train unless the run is there and complete. Ray stays up between the runs, the actors do not."""
    if "after" in _evaluations(run):
        return
    import asyncio

    from cluster import remote
    from cluster.preflight import inputs
    from cluster.run import check_folder, make_folder, train
    from cluster.view import View

    given = inputs(run, lambda share, text: None)
    check_folder(run)
    remote.connect(run, dashboard=False)
    make_folder(run)
    asyncio.run(train(run, given, View(Console(quiet=True))))


def _evaluations(run: RunConfig) -> dict[str, float]:
    found = {record["step"]: record["eval/accuracy"] for record in read(run.folder) if "eval/accuracy" in record}
    return {name: found[step] for name, step in (("before", 0), ("after", run.steps)) if step in found}


def _figures(run: RunConfig) -> dict[str, float]:
    steps = [record for record in read(run.folder) if "reward/mean" in record]
    late = steps[len(steps) // 2 :]
    return {
        **_evaluations(run),
        "reward": statistics.mean(step["reward/mean"] for step in steps),
        "gini": statistics.mean(step["credit/gini"] for step in late),
        "ratio": statistics.mean(step["credit/effective_token_ratio"] for step in late),
    }


def _summary(runs: list[dict[str, float]]) -> dict[str, Any]:
    values = {name: [run[name] for run in runs] for name in runs[0]}
    spread = lambda numbers: statistics.stdev(numbers) if len(numbers) > 1 else 0.0  # noqa: E731
    return {name: {"mean": statistics.mean(v), "sd": spread(v), "values": v} for name, v in values.items()}


def _print(results: dict[str, Any]) -> None:
    table = Table(title=f"{results['steps']} steps of the demo, {results['seeds']} seeds: mean (standard deviation)")
    for column in ("method", "held-out before", "held-out after", "mean train reward", "Gini", "effective tokens"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for name, summary in results["methods"].items():
        cells = [f"{summary[key]['mean']:.3f} ({summary[key]['sd']:.3f})" for key in ("before", "after", "reward")]
        table.add_row(name, *cells, f"{summary['gini']['mean']:.3f}", f"{summary['ratio']['mean']:.3f}")
    console = Console()
    console.print(table)
    console.print(results["machine"], style="dim")
