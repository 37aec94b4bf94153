"""`accredit eval`: held-out accuracy of an adapter without a run. Only the rollout actors start; nothing is written but
what is asked for.

The adapter is proved as in a run: read back from vLLM's memory, and a canary; what is right is said by transformers and
PEFT on the CPU, where in a run the learner says it.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from transformers import AutoConfig

from actors.environment import EpisodeRewards
from actors.reward import RewardPool
from cluster import evaluation, remote
from cluster.adapters import SETTINGS, read_adapter, read_version, version_folder, with_canary, zero_adapter
from cluster.canary import tokens_of
from cluster.fleet import Fleet
from cluster.preflight import Inputs, inputs
from configs.schema import ConfigError, EvalConfig, LoraConfig, RunConfig, load
from credit.adapter import Adapter
from credit.trajectory import Prompt, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to evaluate, and how; the names are those of the command line."""

    target: Path  # a run's folder, or that of a PEFT adapter
    config: Path | None = None  # of a PEFT adapter: which model, data and reward
    version: str = "last"
    base: bool = False
    samples: int | None = None
    k: list[int] | None = None
    greedy: bool | None = None
    limit: int | None = None
    compare: Path | None = None  # another evaluation's file
    out: Path | None = None


def numbers(text: str) -> list[int]:
    """1,4,8"""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"--k: got {text!r}, expected numbers with commas between them: 1,4,8")
    return [int(part) for part in parts]


def run_of(request: Request) -> RunConfig:
    """The configuration to evaluate with: as in the run, without learner and credit actors. Raises ConfigError."""
    folder = request.target
    if (folder / "config.yaml").is_file():
        run = load(request.config or folder / "config.yaml")
        run = run.model_copy(update={"name": folder.resolve().name, "out": str(folder.resolve().parent)})
    elif request.config is None:
        raise ConfigError(f"{folder}: is no run's folder (it has no config.yaml): name one with --config")
    elif request.base or (folder / SETTINGS).is_file():
        run = load(request.config)
    else:
        raise ConfigError(f"{folder}: has neither config.yaml nor {SETTINGS}, expected a run or a PEFT adapter")
    given = {"samples": request.samples, "k": request.k, "greedy": request.greedy}
    asked = run.eval.model_dump() | {name: value for name, value in given.items() if value is not None}
    if request.k is None:
        asked["k"] = [k for k in asked["k"] if k <= asked["samples"]]
    try:
        eval_config = EvalConfig.model_validate(asked)
    except ValidationError as error:
        problem = error.errors()[0]
        field = f"--{problem['loc'][0]}: got {problem['input']!r}, expected: " if problem["loc"] else ""
        raise ConfigError(field + problem["msg"].removeprefix("Value error, ")) from None
    # synchronous: the same completions each time; what does not start needs no resources
    idle = {"cpus": 0.0, "gpus": 0.0}
    changes = {"eval": eval_config, "max_staleness": 0}
    changes |= {"learner": run.learner.model_copy(update=idle), "credit": run.credit.model_copy(update=idle)}
    return run.model_copy(update=changes)


def chosen_adapter(request: Request, run: RunConfig, given: Inputs, prompts: list[Prompt]) -> tuple[Adapter, RunConfig]:
    """The adapter with its canary, and the run with the adapter's own LoRA settings. Raises ValueError."""
    trust = run.model.trust_remote_code
    if request.base:
        folder, adapter = None, zero_adapter(given.model, run.lora.targets, trust_remote_code=trust)
    else:
        vocabulary = AutoConfig.from_pretrained(given.model, trust_remote_code=trust).get_text_config().vocab_size
        if (request.target / SETTINGS).is_file():
            folder = request.target
            adapter = read_adapter(folder, vocabulary)
        else:
            folder = version_folder(request.target, request.version)
            adapter = read_version(folder, vocabulary)
        settings = adapter.config
        if other := [name for name in ("use_rslora", "rank_pattern", "alpha_pattern") if settings.get(name)]:
            raise ValueError(
                f"adapter: {folder} has {other[0]}, expected one rank, scaled by alpha / r: it cannot be proved"
            )
        lora = LoraConfig(r=settings["r"], alpha=settings["lora_alpha"], targets=settings["target_modules"])
        run = run.model_copy(update={"lora": lora})
    adapter.verify()
    tokens = tokens_of((prompt.tokens for prompt in prompts), run.model.max_length - 1)
    return with_canary(adapter, folder, given.model, run.model, tokens), run


async def serve_and_evaluate(
    run: RunConfig, given: Inputs, adapter: Adapter, prompts: list[Prompt], progress: evaluation.Progress
) -> evaluation.Report:
    """Start the rollout actors, prove the adapter on each, evaluate, and end them."""
    rewards = RewardPool(run.reward) if run.environment is None else EpisodeRewards()
    fleet = Fleet(run, partial(remote.RemoteReplica.start, run, given.model, remote.Objects()))

    async def reward(prompt: Prompt, samples: list[Sample]) -> evaluation.Rewards:
        return await rewards.score_samples(prompt, samples, run.steps)

    try:
        await asyncio.gather(rewards.start(list(prompts[0].columns)), fleet.start())
        await fleet.publish(adapter)
        report = await evaluation.evaluate(run, prompts, fleet, reward, progress)
        return report | {"proof": dict(fleet.verdicts), "refused": dict(fleet.refusals)}
    finally:
        await asyncio.gather(rewards.close(), fleet.close())


def evaluate(request: Request, console: Console) -> evaluation.Report:
    """Everything that is wrong with the input raises ValueError, before an actor starts."""
    other = evaluation.read(request.compare) if request.compare else None
    run = run_of(request)
    given = inputs(run, lambda share, text: None)
    prompts = evaluation.heldout_prompts(run, given, request.limit)
    if other and not evaluation.same_rows({"prompts": [{"prompt": prompt.prompt} for prompt in prompts]}, other):
        raise ValueError(f"--compare: {request.compare} is of other rows: evaluate both with the same data and --limit")
    adapter, run = chosen_adapter(request, run, given, prompts)
    remote.connect(run, dashboard=False)
    with bar(console) as progress:
        report = asyncio.run(serve_and_evaluate(run, given, adapter, prompts, progress))
    report = {"target": str(request.target), "base": request.base} | report
    if other:
        report["differences"] = {name: asdict(change) for name, change in evaluation.compare(report, other).items()}
    if request.out:
        evaluation.write(request.out, report)
    return report


@contextmanager
def bar(console: Console) -> Iterator[evaluation.Progress]:
    """A bar with the prompts that are done, on a terminal."""
    columns = (TextColumn("evaluating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with RichProgress(*columns, console=console, disable=not console.is_terminal, transient=True) as shown:
        task = shown.add_task("", total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


def table(report: evaluation.Report) -> Table:
    """The figures, one row each."""
    policy = "the base model" if report["base"] else f"v{report['version']}, digest {report['digest'][:12]}"
    shown = Table("", "value", "95 % interval", "prompts", title=f"{report['target']}: {policy}")
    names = {"accuracy": f"accuracy (avg@{report['settings']['samples']})", "greedy": "greedy accuracy"}
    for name in report["figures"]:
        estimate = evaluation.figure(report, name)
        ends = f"{estimate.low:.3f} to {estimate.high:.3f}"
        shown.add_row(names.get(name, name), f"{estimate.value:.3f}", ends, str(estimate.prompts))
    for name, change in report.get("differences", {}).items():
        ends = f"{change['low']:+.3f} to {change['high']:+.3f}"
        shown.add_row(f"{names[name]}, change", f"{change['value']:+.3f}", ends, str(change["prompts"]))
    shown.add_section()
    rows: dict[str, Any] = {
        "mean reward": f"{report['reward_mean']:.3f}",
        "samples with a reward": report["samples"],
        "truncated": f"{report['truncated_share']:.1%}",
        "mean length": f"{report['length_mean']:.1f}",
        **{f"failed: {reason[:60]}": count for reason, count in report["failed"].items()},
    }
    if report["greedy_failed"]:
        rows["failed, greedy"] = report["greedy_failed"]
    for name, value in rows.items():
        shown.add_row(name, str(value))
    return shown
