"""The configuration of a sweep: variants x ranks x seeds of one base configuration, as runs that share their actors."""

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveInt

from configs.schema import Config, ConfigError, LoraConfig, RunConfig, override, put, read, validate

OWN = {"prompts_per_step", "group_size", "refill"}
"""Settings of `rollout` that the actors do not see."""
SCORER = {"residual_layer", "residual_norm", "residual_relative", "noise_floor", "tokens_per_forward", "timeout_s",
          "replicas", "cpus", "gpus"}  # fmt: skip
"""Settings of `credit` that belong to the credit actors, not to the method."""


class SweepConfig(Config):
    name: str
    out: str = "runs"
    base: str | dict[str, Any]
    """A run's settings, or the file with them, relative to this one."""
    set: dict[str, Any] = Field(default_factory=dict)
    """What all runs change of the base, under dotted keys."""
    variants: Annotated[dict[str, dict[str, Any]], Field(min_length=1)]
    """Name -> what differs from the base, under dotted keys: {credit.method: arca, credit.sharpening: 2}."""
    ranks: list[PositiveInt] = Field(default_factory=list)
    """Of the LoRA; alpha / r stays the base's. Empty: the base's rank."""
    seeds: list[NonNegativeInt] = Field(default_factory=lambda: [0], min_length=1)
    at_once: PositiveInt = 8
    """Runs that train at the same time; each has a learner of its own."""

    @property
    def folder(self) -> Path:
        return Path(self.out) / self.name


@dataclass(frozen=True, slots=True)
class Entry:
    """One run of a sweep."""

    variant: str
    run: RunConfig


class SharedConfig(RunConfig):
    """What actors are started with that several runs share: what is common to all runs, and room for `at_once`."""

    at_once: PositiveInt
    loras: dict[str, LoraConfig]
    """By policy, which is the name of the run."""

    @property
    def adapter_slots(self) -> int:
        return self.at_once * (self.max_staleness + 2)

    def lora_of(self, policy: str) -> LoraConfig:
        return self.loras[policy]


def load(path: str | Path, overrides: list[str] | None = None) -> tuple[SweepConfig, list[Entry]]:
    """Read `path` and make its runs, in order of variant, rank, seed. Raises ConfigError.

    `name`, `out`, `seeds`, ... of `overrides` are the sweep's, all others every run's.
    """
    tree = read(path)
    of_runs = []
    for text in overrides or []:
        if text.partition("=")[0] in SweepConfig.model_fields:
            override(tree, text)
        else:
            of_runs.append(text)
    sweep = validate(SweepConfig, tree, str(path))
    base = read(Path(path).parent / sweep.base) if isinstance(sweep.base, str) else sweep.base
    entries = [
        Entry(variant, _run(path, sweep, base, of_runs, variant, rank, seed))
        for variant in sweep.variants
        for rank in sweep.ranks or [None]
        for seed in sweep.seeds
    ]
    names = [entry.run.name for entry in entries]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{path}: got two runs called {twice[0]}, expected different variants, ranks and seeds")
    for entry in entries[1:]:
        _check_shared(path, entries[0], entry)
    return sweep, entries


def _run(
    path: str | Path,
    sweep: SweepConfig,
    base: dict[str, Any],
    overrides: list[str],
    variant: str,
    rank: int | None,
    seed: int,
) -> RunConfig:
    tree = deepcopy(base) | {"name": "run", "out": str(sweep.folder), "seed": seed}
    for key, value in (*sweep.set.items(), *sweep.variants[variant].items()):
        put(tree, key, deepcopy(value))
    for text in overrides:
        override(tree, text)
    where = f"{path}: variants.{variant}"
    run = validate(RunConfig, tree, where)
    r = rank or run.lora.r
    tree["lora"] = {**tree.get("lora", {}), "r": r, "alpha": run.lora.alpha * r / run.lora.r}
    slug = "".join(letter if letter.isalnum() or letter in "._" else "_" for letter in variant)
    tree["name"] = f"{slug}-r{r}-seed{seed}"
    return validate(RunConfig, tree, where)


def shared(sweep: SweepConfig, entries: list[Entry]) -> SharedConfig:
    """What the actors of these runs are started with, and what the cluster must have room for."""
    at_once = min(sweep.at_once, len(entries))
    tree = entries[0].run.model_dump(mode="json")
    tree["name"] = sweep.name
    tree["lora"] |= {"r": max(entry.run.lora.r for entry in entries)}
    tree["learner"] |= {"ranks": at_once * max(entry.run.learner.ranks for entry in entries)}
    loras = {entry.run.name: entry.run.lora.model_dump() for entry in entries}
    return SharedConfig.model_validate({**tree, "at_once": at_once, "loras": loras})


def _check_shared(path: str | Path, first: Entry, other: Entry) -> None:
    """Raises ConfigError for a setting of the shared actors in which the two runs differ."""
    mine, theirs = _of_actors(first.run), _of_actors(other.run)
    for key in mine:
        if mine[key] != theirs[key]:
            raise ConfigError(
                f"{path}: {key}: got {mine[key]!r} in {first.run.name} and {theirs[key]!r} in {other.run.name}, "
                f"expected one value: the runs of a sweep share their rollout replicas and credit actors"
            )


def _of_actors(run: RunConfig) -> dict[str, Any]:
    """The settings that the shared actors see, by dotted key."""
    rollout = {f"rollout.{key}": value for key, value in run.rollout if key not in OWN}
    credit = {f"credit.{key}": value for key, value in run.credit if key in SCORER}
    model = {f"model.{key}": value for key, value in run.model}
    one = {"max_staleness": run.max_staleness, "environment": run.environment, "lora.targets": run.lora.targets}
    return model | rollout | credit | one
