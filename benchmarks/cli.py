"""`accredit bench NAME`: one command for each benchmark. Imports are inside: each takes seconds."""

from pathlib import Path
from typing import Annotated

import typer

from configs.schema import ConfigError

bench = typer.Typer(no_args_is_help=True, help="Measure this machine.")


@bench.command()
def swap(
    replicas: Annotated[int, typer.Option(help="Rollout replicas.")] = 2,
    swaps: Annotated[int, typer.Option(help="Adapter versions to publish.")] = 100,
    rank: Annotated[int, typer.Option(help="Of the LoRA.")] = 16,
    shape: Annotated[str, typer.Option(help="Random weights of this size: demo or 42m.")] = "demo",
    model: Annotated[Path | None, typer.Option(help="Folder of a model, in place of a shape.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Swap adapters under load: how long it takes, what it costs, and whether one token came from a wrong adapter."""
    if shape not in ("demo", "42m"):
        raise ConfigError(f"--shape: got {shape!r}, expected demo or 42m")
    from benchmarks import swap as benchmark

    benchmark.main(replicas, swaps, rank, shape, model, as_json)


@bench.command()
def scorer(
    repeats: Annotated[int, typer.Option(help="Measurements of each speed.")] = 5,
    sequences: Annotated[int, typer.Option(help="Completions scored at a time.")] = 128,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What credit signals cost, against two plain forward passes."""
    from benchmarks import scorer as benchmark

    benchmark.main(as_json, repeats, sequences)


@bench.command()
def methods(
    out: Annotated[Path, typer.Option(help="Folder for the runs; those that are there are not trained again.")] = Path(
        "runs/methods"
    ),
    seeds: Annotated[int, typer.Option(help="Runs of each method.")] = 3,
    steps: Annotated[int, typer.Option(help="Of each run.")] = 24,
    only: Annotated[list[str] | None, typer.Option(help="A row of the table. May be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train the demo with every credit method and its permuted control: accuracy with its spread, concentration."""
    from benchmarks import methods as benchmark

    known = benchmark.entries()
    if unknown := sorted(set(only or []) - set(known)):
        raise ConfigError(f"--only: got {unknown}, expected some of: {'; '.join(known)}")
    benchmark.main(out, seeds, steps, only, as_json)


@bench.command()
def credit(
    completions: Annotated[int, typer.Option(help="Completions, four of each prompt.", min=8)] = 128,
    continuations: Annotated[int, typer.Option(help="Of every prefix, in two independent halves.", min=2)] = 512,
    seed: Annotated[int, typer.Option(help="Of the run and of every draw.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the runs; those that are there are not trained again.")] = Path(
        "runs/credit"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Is token credit right? Every method's weights against the true credit of each token, on two tasks."""
    from benchmarks import credit as benchmark

    benchmark.main(completions, continuations, seed, out, as_json)


@bench.command()
def chaos(
    kills: Annotated[int, typer.Option(help="SIGKILLs of each kind.")] = 20,
    steps: Annotated[int, typer.Option(help="Of each run that is killed.")] = 150,
    minutes: Annotated[float, typer.Option(help="Begin no kill after that.")] = 90.0,
    out: Annotated[Path, typer.Option(help="Folder for the runs, a new one.")] = Path("runs/chaos"),
    seed: Annotated[int, typer.Option(help="Of the moments and the victims.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Kill every kind of process at random moments, and count what is lost: nothing."""
    if (out / "reference").exists():
        raise ConfigError(f"--out: {out} holds the runs of an earlier benchmark: choose another folder")
    from benchmarks import chaos as benchmark

    benchmark.main(kills, steps, minutes, out, seed, as_json)


@bench.command()
def sweep(
    config: Annotated[Path, typer.Argument(help="A sweep.")] = Path("configs/sweep-demo.yaml"),
    out: Annotated[Path, typer.Option(help="Folder for the runs, a new one.")] = Path("runs/bench-sweep"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """A sweep as one job against its runs one after another: wall time, memory, and what each run learns."""
    from benchmarks import sweep as benchmark

    benchmark.main(config, out, as_json)


@bench.command()
def rewards(
    completions: Annotated[int, typer.Option(help="Hostile completions, of every kind.", min=100)] = 10_000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Judge completions that hang, crash, fill, deceive or try to get out: what they cost, and what is left of them."""
    from benchmarks import hostile

    hostile.main(completions, as_json)


@bench.command()
def control(
    replicas: Annotated[str, typer.Option(help="Numbers of rollout replicas, with commas between them.")] = (
        "10,100,1000"
    ),
    trajectories: Annotated[int, typer.Option(help="Trained with each of them.")] = 200_000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """How many trajectories a second the loop, the ledger and the publisher can take: only the models are simulated."""
    try:
        counts = [int(count) for count in replicas.split(",")]
    except ValueError:
        raise ConfigError(f"--replicas: got {replicas!r}, expected numbers with commas between them") from None
    from benchmarks import control as benchmark

    benchmark.main(counts, trajectories, as_json)
