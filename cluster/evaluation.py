"""Held-out accuracy of one adapter version, on the rollout actors that serve it.

    held-out rows ─┬─▶ n completions of each, sampled as in training ──▶ rewards ──▶ accuracy (avg@n), pass@k
                   └─▶ one completion of each at temperature 0 ──▶ rewards ──▶ greedy accuracy

A report is plain data, as it stands in evals/v000012.json: the figures, and every prompt's rewards, so that two
evaluations of the same rows can be compared prompt by prompt. A sample without a reward is counted with its reason and
is in no mean.
"""

import asyncio
import json
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cluster.adapters import digest_on_disk
from cluster.estimators import Estimate, paired_difference, pass_at_k, proportion
from cluster.fleet import Fleet
from cluster.preflight import Inputs
from configs.schema import RunConfig
from credit.trajectory import Prompt, Sample

Rewards = list[float | str]
"""Of one prompt's completions: the reward, or the reason why there is none."""
Reward = Callable[[Prompt, list[Sample]], Awaitable[Rewards]]
Progress = Callable[[int, int], None]
"""Called with the prompts that are done and all that are to be."""
Report = dict[str, Any]


def heldout_prompts(run: RunConfig, given: Inputs, limit: int | None = None) -> list[Prompt]:
    """The held-out rows, the first `limit` of them. Groups below 0 are not the ledger's: they are never trained."""
    rows = given.task.heldout()[:limit]
    return [given.prompt(run, row, -1 - i, run.eval.samples) for i, row in enumerate(rows)]


async def evaluate(
    run: RunConfig,
    prompts: list[Prompt],
    fleet: Fleet,
    reward: Reward,
    progress: Progress = lambda done, total: None,
) -> Report:
    """Sample the prompts under the version that the fleet serves, and report. Raises RuntimeError where more than one
    version answered."""
    total, done = len(prompts) * (1 + run.eval.greedy), 0

    async def answers(asked: list[Prompt], temperature: float | None) -> dict[int, tuple[list[Sample], Rewards]]:
        by_group = {prompt.group: prompt for prompt in asked}
        finishing: list[asyncio.Task[tuple[list[Sample], Rewards]]] = []

        async def finish(samples: list[Sample]) -> tuple[list[Sample], Rewards]:
            nonlocal done
            rewards = await reward(by_group[samples[0].group], samples)
            done += 1
            progress(done, total)
            return samples, rewards

        progress(done, total)
        await fleet.sample(asked, lambda samples: finishing.append(asyncio.create_task(finish(samples))), temperature)
        return {samples[0].group: (samples, rewards) for samples, rewards in await asyncio.gather(*finishing)}

    sampled = await answers(prompts, None)
    once = [replace(prompt, seeds=prompt.seeds[:1]) for prompt in prompts]
    greedy = await answers(once, 0.0) if run.eval.greedy else {}
    samples = [sample for group, _ in sampled.values() for sample in group]
    everything = samples + [sample for group, _ in greedy.values() for sample in group]
    served = {(sample.version, sample.digest) for sample in everything}
    if len(served) != 1:
        raise RuntimeError(f"evaluation: got completions of versions {sorted(v for v, _ in served)}, expected one")
    rows = [
        {
            "prompt": prompt.prompt,
            "rewards": sampled[prompt.group][1],
            **({"greedy": greedy[prompt.group][1][0]} if greedy else {}),
        }
        for prompt in prompts
    ]
    ((version, digest),) = served
    return {
        "version": version,
        "digest": digest,
        **summarise(rows, run.reward.correct, run.eval.k),
        "truncated_share": sum(sample.finish == "length" for sample in samples) / len(samples),
        "length_mean": sum(int(sample.mask.sum()) for sample in samples) / len(samples),
        "settings": _settings(run),
        "prompts": rows,
    }


def summarise(rows: list[dict[str, Any]], correct: float, ks: list[int]) -> Report:
    """The figures of every prompt's rewards. Raises RuntimeError when no sample has a reward.

    `accuracy` is avg@n, which is also the unbiased estimate of pass@1. A prompt of which fewer than k samples have a
    reward says nothing of pass@k, and is left out of it.
    """
    rewards = [reward for row in rows for reward in row["rewards"]]
    scores = [reward for reward in rewards if not isinstance(reward, str)]
    failed = Counter(reward for reward in rewards if isinstance(reward, str))
    if not scores:
        raise RuntimeError(f"evaluation: none of {len(rewards)} samples has a reward: {dict(failed.most_common(3))}")
    counts = [(len(kept), sum(r >= correct for r in kept)) for row in rows if (kept := _kept(row["rewards"]))]
    figures = {"accuracy": proportion([c / n for n, c in counts], most=len(scores))}
    for k in sorted(set(ks) - {1}):
        if enough := [(n, c) for n, c in counts if n >= k]:
            most = sum(n // k for n, _ in enough)
            figures[f"pass@{k}"] = proportion([pass_at_k(n, c, k) for n, c in enough], most)
    greedy = _kept([row["greedy"] for row in rows if "greedy" in row])
    if greedy:
        figures["greedy"] = proportion([float(reward >= correct) for reward in greedy], most=len(greedy))
    return {
        "figures": {name: asdict(estimate) for name, estimate in figures.items()},
        "reward_mean": sum(scores) / len(scores),
        "samples": len(scores),
        "failed": dict(failed),
        "greedy_failed": sum(isinstance(row.get("greedy"), str) for row in rows),
    }


def compare(report: Report, other: Report) -> dict[str, Estimate]:
    """The paired difference of each accuracy that both have, `report` minus `other`.

    Raises ValueError when they are not of the same rows.
    """
    if not same_rows(report, other):
        raise ValueError(
            f"compare: got evaluations of other rows ({len(report['prompts'])} and {len(other['prompts'])}), expected "
            "the same rows in the same order: evaluate both with the same data, seed and --limit"
        )
    differences = {}
    for name in report["figures"].keys() & other["figures"].keys() & {"accuracy", "greedy"}:
        values = [(_accuracy(report, i, name), _accuracy(other, i, name)) for i in range(len(report["prompts"]))]
        pairs = [(mine, theirs) for mine, theirs in values if mine is not None and theirs is not None]
        if pairs:
            differences[name] = paired_difference([mine for mine, _ in pairs], [theirs for _, theirs in pairs])
    return differences


def same_rows(report: Report, other: Report) -> bool:
    return [row["prompt"] for row in report["prompts"]] == [row["prompt"] for row in other["prompts"]]


def figure(report: Report, name: str = "accuracy") -> Estimate:
    return Estimate(**report["figures"][name])


def record(report: Report) -> dict[str, Any]:
    """The report as one record of metrics.jsonl."""
    values: dict[str, Any] = {}
    for name, estimate in report["figures"].items():
        ends = {"": estimate["value"], "_low": estimate["low"], "_high": estimate["high"]}
        values |= {f"eval/{name}{end}": value for end, value in ends.items()}
    values |= {f"eval/{name}": report[name] for name in ("reward_mean", "samples", "truncated_share", "length_mean")}
    return values | {
        "eval/failed": sum(report["failed"].values()) + report["greedy_failed"],
        "eval/version": report["version"],
        "eval/digest": report["digest"],
    }


def path_of(folder: Path, version: int) -> Path:
    return folder / "evals" / f"v{version:06d}.json"


def write(path: Path, report: Report) -> None:
    """The file is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.unfinished")
    temporary.write_text(json.dumps(report, indent=1, default=str) + "\n")
    os.replace(temporary, path)


def read(path: Path) -> Report:
    """Raises ValueError for what is no report."""
    try:
        report = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: is no JSON: {error}") from error
    if not isinstance(report, dict) or {"version", "digest", "figures", "settings", "prompts"} - report.keys():
        raise ValueError(f"{path}: is no evaluation, expected what accredit eval --out writes")
    return report


def mark_best(folder: Path) -> int | None:
    """Point adapters/best at the version with the highest held-out accuracy, the earliest of equals.

    An evaluation of another adapter than lies under its version counts for nothing. None where there is no evaluation.
    """
    best: tuple[float, int] | None = None
    for path in sorted((folder / "evals").glob("v*.json")):
        report = read(path)
        if report["digest"] == digest_on_disk(folder / "adapters" / path.stem):
            best = max(best or (-1.0, 0), (report["figures"]["accuracy"]["value"], -report["version"]))
    if best is None:
        return None
    link = folder / "adapters" / "best"
    temporary = link.with_name(".best.unfinished")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(path_of(folder, -best[1]).stem)
    os.replace(temporary, link)
    return -best[1]


def _kept(rewards: Rewards) -> list[float]:
    return [reward for reward in rewards if not isinstance(reward, str)]


def _accuracy(report: Report, place: int, name: str) -> float | None:
    """Of one prompt; None where nothing has a reward."""
    row = report["prompts"][place]
    kept = _kept(row["rewards"] if name == "accuracy" else [row["greedy"]])
    return sum(r >= report["settings"]["correct"] for r in kept) / len(kept) if kept else None


def _settings(run: RunConfig) -> dict[str, Any]:
    """What another evaluation needs to be comparable."""
    rollout = {name: getattr(run.rollout, name) for name in ("temperature", "top_p", "max_new_tokens", "stop")}
    reward = run.reward.model_dump(mode="json", include={"function", "options", "parts"})
    named = {"model": run.model.path, "dtype": run.model.dtype, "data": run.data.model_dump(mode="json")}
    asked = {"seed": run.seed, "samples": run.eval.samples, "k": run.eval.k}
    return {**named, **asked, **rollout, "reward": reward, "correct": run.reward.correct}
