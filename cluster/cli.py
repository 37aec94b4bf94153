"""The command line. Exit code 0 means that it worked; 2 that the input was wrong and nothing was started."""

import asyncio
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from configs.schema import ConfigError, load

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    help="Train LoRA adapters by reinforcement learning, with credit assigned token by token.",
)

bench = typer.Typer(no_args_is_help=True, help="Measure this machine.")
app.add_typer(bench, name="bench")


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="A YAML file, as those in configs/.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings to change: credit.method=arca steps=20")
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(help="A setting that may differ from those the run began with: steps. May be repeated."),
    ] = None,
) -> None:
    """Train, or go on training where the run's folder already holds this configuration."""
    quiet()
    began = time.monotonic()
    run = load(config, overrides)
    # torch, Ray and transformers take seconds to import: a typing error in the config should not wait for them
    from cluster import remote
    from cluster.preflight import inputs
    from cluster.run import Interrupted, check_folder, make_folder
    from cluster.run import train as train_run
    from cluster.view import View

    view = View()
    with view.making("demo base model") as progress:
        given = inputs(run, progress)
    check_folder(run, allow or [])
    with view.waiting("starting Ray"):
        address = remote.connect(run)
    make_folder(run)
    if address:
        view.note(f"Ray dashboard: http://{address}")
    log_to(run.folder / "driver.log")
    try:
        result = asyncio.run(train_run(run, given, view))
    except Interrupted as end:
        print(f"accredit: {end}; the same command goes on from there", file=sys.stderr)
        raise typer.Exit(end.args[1]) from None
    except Exception as error:
        logging.getLogger("accredit").exception("the run ended with an error")
        print(
            f"accredit: {type(error).__name__}: {error}\n  details: {run.folder}/driver.log and {run.folder}/logs",
            file=sys.stderr,
        )
        raise typer.Exit(1) from None
    view.summary(run, result, time.monotonic() - began)


@app.command()
def score(
    trajectories: Annotated[Path, typer.Argument(help="JSONL or Parquet: prompt, completion (or token ids), reward.")],
    model: Annotated[str, typer.Option(help="Folder of the base model.")],
    method: Annotated[str, typer.Option(help="Methods, with commas between them: uniform,arca,gcpo")],
    out: Annotated[Path, typer.Option(help="Parquet file to write.")],
    adapter: Annotated[
        Path | None, typer.Option(help="Folder of a PEFT LoRA; without, the base is the policy.")
    ] = None,
    advantage: Annotated[str, typer.Option(help="grpo, dr_grpo, rloo or reinforce_pp.")] = "grpo",
    sharpening: Annotated[float, typer.Option(help="Power p of the shared normaliser.")] = 1.0,
    negative: Annotated[str | None, typer.Option(help="Template, 'empty' or dotted path; for gcpo.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="Option of a method: q=0.1. May be repeated.")] = None,
    permute: Annotated[bool, typer.Option("--permute", help="Control: shuffle weights within completions.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Text prompts, too, go through the chat template.")] = False,
    correct: Annotated[float, typer.Option(help="A reward of at least this is correct.")] = 1.0,
    temperature: Annotated[float, typer.Option(help="That the completions were sampled at.")] = 1.0,
    dtype: Annotated[str, typer.Option(help="Of the base model: float32 or bfloat16.")] = "float32",
    tokens_per_forward: Annotated[int, typer.Option(help="Less of them need less memory.")] = 4096,
    seed: Annotated[int, typer.Option(help="Of --permute.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Assign credit to trajectories that you bring: no training, no cluster."""
    quiet()
    from cluster import score as scoring

    console = Console(stderr=True)
    try:
        request = scoring.Request(
            trajectories=trajectories,
            model=model,
            out=out,
            methods=[name.strip() for name in method.split(",")],
            adapter=adapter,
            advantage=advantage,
            sharpening=sharpening,
            negative=negative,
            options=scoring.parse_options(option or []),
            permute=permute,
            chat=chat,
            correct=correct,
            temperature=temperature,
            dtype=dtype,
            tokens_per_forward=tokens_per_forward,
            seed=seed,
        )
        with scoring.bar(console) as progress:
            report = scoring.score(request, progress)
    except (ValueError, OSError) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    except (RuntimeError, FloatingPointError) as error:
        print(f"accredit: {' '.join(str(error).split())}", file=sys.stderr)
        raise typer.Exit(1) from None
    for warning in report["warnings"]:
        console.print(f"accredit: warning: {warning}", highlight=False, markup=False, soft_wrap=True)
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        Console().print(scoring.table(report))


@app.command()
def audit(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Account for every prompt group: issued = trained + dropped + open; check checkpoints and adapters on disk.

    Exit code 1 when it does not balance.
    """
    from cluster.checkpoints import audit as audit_run

    report = audit_run(run)
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        table = Table(title=str(run), show_header=False)
        for name, value in report.items():
            table.add_row(name.replace("_", " "), json.dumps(value) if isinstance(value, dict) else str(value))
        Console().print(table)
    raise typer.Exit(0 if report["balanced"] else 1)


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
    quiet()
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
    quiet()
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
    quiet()
    from benchmarks import methods as benchmark

    known = benchmark.entries()
    if unknown := sorted(set(only or []) - set(known)):
        raise ConfigError(f"--only: got {unknown}, expected some of: {'; '.join(known)}")
    benchmark.main(out, seeds, steps, only, as_json)


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
    quiet()
    if (out / "reference").exists():
        raise ConfigError(f"--out: {out} holds the runs of an earlier benchmark: choose another folder")
    from benchmarks import chaos as benchmark

    benchmark.main(kills, steps, minutes, out, seed, as_json)


def quiet() -> None:
    """The view owns the terminal: what libraries say at import goes to log files or nowhere."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not Path("/dev/nvidiactl").exists():  # else DeepSpeed warns that it found no accelerator
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


def log_to(path: Path) -> None:
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger("accredit").addHandler(handler)
    logging.getLogger("accredit").setLevel(logging.INFO)
    logging.raiseExceptions = False  # a full disk is told once, by the error that ends the run


def main() -> None:
    try:
        app()
    except (ConfigError, FileNotFoundError) as error:
        print(f"accredit: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
