"""The command line. Exit code 0 means that it worked; 2 that the input was wrong and nothing was started."""

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.cli import bench
from configs.schema import ConfigError, load

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    help="Train LoRA adapters by reinforcement learning, with credit assigned token by token.",
)

app.add_typer(bench, name="bench")


@app.callback()
def quiet() -> None:
    """The view owns the terminal: what libraries say at import goes to log files or nowhere."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not Path("/dev/nvidiactl").exists():  # else DeepSpeed warns that it found no accelerator
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of every retry; the error at the end stays


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
    began = time.monotonic()
    run = load(config, overrides)
    # torch, Ray and transformers take seconds to import: a typing error in the config should not wait for them
    from cluster import remote
    from cluster.preflight import inputs
    from cluster.run import Interrupted, check_folder, log_to, make_folder
    from cluster.run import train as train_run
    from cluster.view import View

    view = View()
    with view.making("demo base model") as progress:
        given = inputs(run, progress)
    for line in given.notes:
        view.note(line)
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
        print(f"accredit: {end.args[0]}; the same command goes on from there", file=sys.stderr)
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
def sweep(
    config: Annotated[Path, typer.Argument(help="A YAML file, as configs/sweep-demo.yaml.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings to change, of the sweep or of every run: at_once=2 steps=20")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train variants x ranks x seeds as one job on shared actors, or go on with it; write a table of results.

    Exit code 1 when a run failed; the others are not disturbed, and the same command tries it again.
    """
    from configs.sweep import load as load_sweep

    chosen, entries = load_sweep(config, overrides)
    from cluster import sweep as job

    raise typer.Exit(job.main(chosen, entries, as_json))


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
    from cluster import score as scoring

    console = Console(stderr=True)
    with told_in_one_line():
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
    for warning in report["warnings"]:
        console.print(f"accredit: warning: {warning}", highlight=False, markup=False, soft_wrap=True)
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        Console().print(scoring.table(report))


@app.command("eval")
def evaluate(
    target: Annotated[Path, typer.Argument(help="A run's folder, or that of a PEFT adapter.")],
    config: Annotated[Path | None, typer.Option(help="Model, data and reward; of a run: its own.")] = None,
    version: Annotated[str, typer.Option(help="Of a run: a number, best or last.")] = "last",
    base: Annotated[bool, typer.Option("--base", help="The base model, without any adapter.")] = False,
    samples: Annotated[int | None, typer.Option(help="Completions per prompt; the config's by default.")] = None,
    k: Annotated[str | None, typer.Option(help="pass@k to estimate, with commas: 1,4,8")] = None,
    greedy: Annotated[bool | None, typer.Option(help="Also one completion at temperature 0.")] = None,
    limit: Annotated[int | None, typer.Option(help="The first held-out rows only.", min=1)] = None,
    compare: Annotated[Path | None, typer.Option(help="Another evaluation's JSON: the paired change.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write, with every prompt's rewards.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Held-out accuracy of an adapter or of the base model, with 95 % intervals: sampled, greedy, pass@k."""
    from cluster import offline

    with told_in_one_line():
        request = offline.Request(
            target=target,
            config=config,
            version=version,
            base=base,
            samples=samples,
            k=None if k is None else offline.numbers(k),
            greedy=greedy,
            limit=limit,
            compare=compare,
            out=out,
        )
        report = offline.evaluate(request, Console(stderr=True))
    if as_json:
        print(json.dumps(report, indent=1, default=str))
    else:
        Console().print(offline.table(report))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    out: Annotated[Path, typer.Option(help="Folder to write: new, or empty.")],
    version: Annotated[str, typer.Option(help="A number, best or last.")] = "last",
    merge: Annotated[bool, typer.Option("--merge", help="The whole model with the adapter in it.")] = False,
) -> None:
    """Write an adapter for others to load: PEFT folder or merged model, checked, with a model card."""
    from cluster import export as exporting

    with told_in_one_line():
        done = exporting.export(run, version, merge, out)
    print(f"{done.folder}: v{done.adapter.version}, digest {done.adapter.digest}; {done.proof}")


@app.command()
def report(
    source: Annotated[Path, typer.Argument(help="A run's folder, or a Parquet file of `accredit score`.")],
    out: Annotated[Path | None, typer.Option(help="HTML file to write; report.html in the run's folder.")] = None,
    limit: Annotated[
        int, typer.Option(help="Trajectories on the page, about; evenly spaced ones of more.", min=1)
    ] = 5000,
    model: Annotated[str | None, typer.Option(help="Folder of the model whose tokenizer it was, if not known.")] = None,
) -> None:
    """Write one HTML page, for a browser without network, that shows where the credit went, token by token."""
    from cluster.report import page

    console = Console(stderr=True)
    with told_in_one_line(), page.bar(console) as progress:
        written = page.write(source, out, limit, model, progress)
    for warning in written.warnings:
        console.print(f"accredit: warning: {warning}", highlight=False, markup=False, soft_wrap=True)
    print(f"{written.path}: {written.trajectories:,} trajectories, {written.bytes / 1e6:.1f} MB")


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


@app.command()
def doctor() -> None:
    """Is the stack installed as it should be? Exit code 1 when a package does not work."""
    from cluster import doctor as checks

    raise typer.Exit(min(1, checks.main()))


@contextmanager
def told_in_one_line() -> Iterator[None]:
    """Wrong input: exit code 2; anything that fails afterwards: 1."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    except (RuntimeError, FloatingPointError, ExceptionGroup) as error:
        first: BaseException = error
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        print(f"accredit: {' '.join(str(first).split())}", file=sys.stderr)
        raise typer.Exit(1) from None


def main() -> None:
    try:
        app()
    except (ConfigError, FileNotFoundError) as error:
        print(f"accredit: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
