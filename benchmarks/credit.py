"""Is token credit right? Every method's weights against the true credit of each token, on the demo task.

accredit bench credit [--completions 128 --continuations 512 --seed 0 --json]

A short run trains an adapter, so that adapted and base model differ. Its policy then samples completions and, on the
same rollout actors, continuations of every prefix of each of them: V, and with it what each token changed (dV). The
signals are the credit actor's, the weights those of `credit.weights`. ibpo is left out: the demo's model repairs none
of its wrong answers, so its weights are uniform.

Once for the reward of the demo, and once for a reward that looks at the last digit of the answer only: then the sum of
the tens column, as uncertain as before, is filler by construction.
"""

import asyncio
import itertools
import json as jsonlib
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import credit
from actors.negatives import EMPTY, render_negative
from actors.reward import RewardPool
from actors.scorer import Scorer
from actors.tasks import make_prompt, render
from benchmarks import machine
from cluster import remote
from cluster.loop import sampling_seed
from cluster.preflight import Inputs, inputs
from cluster.run import Run, check_folder, make_folder
from cluster.view import View
from configs.schema import RunConfig
from credit.adapter import Adapter
from credit.trajectory import Prompt, Sample, Signals, Trajectory, pad
from credit.truth import Estimate, Values, Wanted, agreement, auroc, bootstrap, least_threshold, spearman
from credit.truth import spearman_brown as reliability_of
from credit.weights import EPS

Pair = tuple[np.ndarray, np.ndarray]
"""The two estimates of dV of one completion, [T] each."""

GROUP = 4  # completions of one prompt
DECISIVE = 0.1  # |dV| above it, or above three standard errors where that is more
TASKS = {"sum": "actors.rewards.exact_match", "units": "benchmarks.rewards.last_digit"}
OTHER_QUESTION = "{{ prompt[:-1][::-1] }}?"
"""The demo's model follows no instruction; the operands read backwards are another question of the same kind."""
COLUMNS = {
    "spearman": "ρ |dV|",
    "spearman_product": "ρ dV·dV'",
    "auroc": "AUROC",
    "mass": "on decisive",
    "tens": "on tens",
    "signed": "right sign",
    "cosine": "cosine",
}
NEGATIVE = {"logp", "logp_negative", "kl_negative"}
METHODS: dict[str, dict[str, Any]] = {
    "uniform": {"name": "uniform"},
    "surprisal": {"name": "surprisal"},
    "entropy_reduction": {"name": "entropy_reduction"},
    "divergence": {"name": "divergence"},
    "arca p=1": {"name": "arca"},
    "arca p=2": {"name": "arca", "sharpening": 2.0},
    "forking": {"name": "forking"},
    "gcpo k3": {"name": "gcpo"},
    "gcpo kl": {"name": "gcpo", "divergence": "kl"},
    "gcpo k3 empty": {"name": "gcpo"},
    "delta": {"name": "delta"},
    "eapo": {"name": "eapo"},
}


def main(completions: int, continuations: int, seed: int, out: Path, json: bool) -> dict[str, Any]:
    """Measure and print tables, or JSON."""
    view, began = View(Console(stderr=True)), time.monotonic()
    report: dict[str, Any] = {"machine": machine.describe() | {"loadavg": psutil.getloadavg()[0]}, "seed": seed}
    tasks: dict[str, Any] = {}
    for task in TASKS:
        run = _run(out, task, seed)
        with view.making("demo model") as progress:
            given = inputs(run, progress)
        check_folder(run)
        remote.connect(run, dashboard=False)
        make_folder(run)
        bench = Bench(run, given, view)
        asyncio.run(bench.measure(completions // GROUP, continuations // 2))
        tasks[task] = bench.report()
    report |= {"tasks": tasks, "seconds": time.monotonic() - began}
    if json:
        print(jsonlib.dumps(report, indent=1))
    else:
        _print(report)
    return report


def _run(out: Path, task: str, seed: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": f"credit-{task}-seed{seed}",
            "out": str(out),
            "steps": 10,
            "seed": seed,
            "data": {"task": "arithmetic"},
            "reward": {"function": TASKS[task]},
            "rollout": {"prompts_per_step": 16, "group_size": 8, "max_new_tokens": 32},
            "learner": {"lr": 3e-3},
        }
    )


class Bench:
    """One measurement."""

    def __init__(self, run: RunConfig, given: Inputs, view: View) -> None:
        self.run, self.given, self.view = run, given, view
        self.rows: list[Trajectory] = []

    async def measure(self, prompts: int, continuations: int) -> None:
        """Train, unless that is done, then sample completions and the values of their prefixes."""
        job = Run(self.run, self.given, View(Console(quiet=True)))
        try:
            with self.view.waiting(f"{self.run.name}: training"):
                await job.train(await job.start())
            assert job.publisher.newest is not None
            self.adapter: Adapter = job.publisher.newest
            # behind those that were trained on; not in the ledger, since nothing here is trained on
            first = self.run.steps * self.run.rollout.prompts_per_step
            asked = {group: self._prompt(group) for group in range(first, first + prompts)}
            await self._sample(job, asked)
            self.numbers = itertools.count(first + prompts)
            tokens = [row.tokens[row.mask] for row in self.rows]
            self.values = Values(tokens, [row.reward for row in self.rows], continuations)
            with self.view.making(f"{self.run.name}: continuations") as progress:
                while wanted := self.values.wanted():
                    progress(
                        self.values.position / max(map(len, tokens)),
                        f"after {self.values.position} tokens, {self.values.drawn:,} drawn",
                    )
                    await self._draw(job, asked, wanted)
                progress(1.0, f"{self.values.drawn:,} drawn")
        finally:
            await job.close()

    def _prompt(self, group: int) -> Prompt:
        row = self.given.task.row(group)
        seeds = [sampling_seed(self.run.seed, group, index) for index in range(GROUP)]
        return make_prompt(row, group, render(row, self.given.tokenizer, self.run.data), seeds)

    async def _sample(self, job: Run, asked: dict[int, Prompt]) -> None:
        samples: list[Sample] = []
        await job.fleet.sample(list(asked.values()), samples.extend)
        for sample in sorted(samples, key=lambda sample: (sample.group, sample.index)):
            (reward,) = await _rewards(job, asked[sample.group], [sample.text])
            self.rows.append(Trajectory.of(sample, reward))
        rate = np.mean([row.reward for row in self.rows])
        if not 0 < rate < 1:
            raise RuntimeError(f"credit: {rate:.0%} of the completions are right: no token can be told from another")

    async def _draw(self, job: Run, asked: dict[int, Prompt], wanted: list[Wanted]) -> None:
        """Continuations of prefixes, each with the tokens that are left to its completion, and their rewards."""
        of: dict[int, Wanted] = {next(self.numbers): one for one in wanted}
        prompts, rewards = [], []
        for number, one in of.items():
            row = self.rows[one.completion]
            start = len(asked[row.group].tokens) + one.position
            seeds = [sampling_seed(self.run.seed, number, index) for index in range(one.draws)]
            prompts.append(replace(asked[row.group], group=number, tokens=row.tokens[:start].tolist(), seeds=seeds))

        async def reward(one: Wanted, samples: list[Sample]) -> None:
            prompt = asked[self.rows[one.completion].group]
            end = len(prompt.tokens) + self.run.rollout.max_new_tokens
            draws = [sample.tokens[len(prompt.tokens) : end] for sample in samples]
            texts = self.given.tokenizer.batch_decode([draw.tolist() for draw in draws], skip_special_tokens=True)
            self.values.add(one, list(zip(draws, await _rewards(job, prompt, texts), strict=True)))

        await job.fleet.sample(
            prompts, lambda samples: rewards.append(asyncio.create_task(reward(of[samples[0].group], samples)))
        )
        await asyncio.gather(*rewards)

    def report(self) -> dict[str, Any]:
        """Every figure, with intervals over prompts."""
        groups_N = np.array([row.group for row in self.rows])
        pairs = [(np.diff(a), np.diff(b)) for a, b in zip(*self.values.halves, strict=True)]
        dv = [(a + b) / 2 for a, b in pairs]
        tens = [_tens(row.text, len(d)) for row, d in zip(self.rows, dv, strict=True)]
        threshold = max(DECISIVE, least_threshold(2 * self.values.continuations))
        over = lambda values: bootstrap(np.array(values), groups_N, seed=self.run.seed)  # noqa: E731
        return {
            "completions": len(self.rows),
            "prompts": len(set(groups_N.tolist())),
            "continuations_of_a_prefix": 2 * self.values.continuations,
            "continuations": self.values.drawn,
            "success_rate": float(np.mean([row.reward for row in self.rows])),
            "reward_minus_value_of_prompt": over([d.sum() for d in dv]),
            "tokens": sum(map(len, dv)),
            "threshold": threshold,
            "decisive_share_of_tokens": over([np.mean(np.abs(d) > threshold) for d in dv]),
            "decisive_share_of_|dV|": over([_share(np.abs(d), np.abs(d) > threshold) for d in dv]),
            "tens_share_of_|dV|": over([_share(np.abs(d), t) for d, t in zip(dv, tens, strict=True)]),
            **self._noise(pairs, threshold, over),
            "methods": self._methods(pairs, tens, threshold, over),
        }

    def _noise(self, pairs: list[Pair], threshold: float, over: Any) -> dict[str, Any]:
        """How well dV is known, from its two halves."""
        a, b = (np.concatenate(half) for half in zip(*pairs, strict=True))
        dv, squared_error = (a + b) / 2, (a - b) ** 2 / 4
        half = over([spearman(np.abs(a), np.abs(b)) for a, b in pairs])
        reliability = reliability_of(half.value)
        return {
            "noise_of_dV": math.sqrt(squared_error.mean()),
            "noise_of_decisive_dV": math.sqrt(squared_error[np.abs(dv) > threshold].mean()),
            # the halves' product has the mean dV^2; the square of their mean has that of the noise in addition
            "share_of_dV^2_that_is_not_noise": float((a * b).sum() / (dv**2).sum()),
            "half_against_half_spearman": half,
            "half_against_half_auroc": over([auroc(np.abs(a), np.abs(b) > threshold) for a, b in pairs]),
            "reliability": reliability,
            "ceiling_of_spearman": math.sqrt(reliability),
        }

    def _methods(
        self, pairs: list[Pair], tens: list[np.ndarray], threshold: float, over: Any
    ) -> dict[str, dict[str, Estimate]]:
        """The figures of every method and its control; `oracle` is |dV| of one half, held against the other."""
        advantages_N, weights = self._weights()
        weights["oracle"] = [np.abs(a) + EPS for a, _ in pairs]
        methods = {}
        for name, rows in weights.items():
            truth = [(b, b) if name == "oracle" else (a, b) for a, b in pairs]
            figures = [
                agreement(w, t, float(advantage), threshold) | {"tens": _share(w, where)}
                for w, t, advantage, where in zip(rows, truth, advantages_N, tens, strict=True)
            ]
            found = {figure: over([one[figure] for one in figures]) for figure in COLUMNS}
            methods[name] = {figure: e for figure, e in found.items() if not math.isnan(e.value)}
        methods["oracle"].pop("spearman_product", None)  # it would take a third estimate
        return methods

    def _weights(self) -> tuple[torch.Tensor, dict[str, list[np.ndarray]]]:
        """Group advantages, and each method's and control's weights on the tokens of every completion."""
        mask_NT = pad([row.mask for row in self.rows], torch.bool)
        groups_N = torch.tensor([row.group for row in self.rows])
        keys_N2 = torch.tensor([(row.group, row.index) for row in self.rows])
        advantages_N = credit.advantages("grpo", torch.tensor([row.reward for row in self.rows]), groups_N)
        signals, empty = self._signals(mask_NT)
        weights: dict[str, list[np.ndarray]] = {}
        for name, permute in itertools.product(METHODS, (False, True)):
            m_NT = credit.weights(
                signals=empty if "empty" in name else signals,
                mask=mask_NT,
                permute=permute,
                seed=self.run.seed,
                keys=keys_N2,
                advantages=advantages_N,
                groups=groups_N,
                **METHODS[name],
            )
            label = f"{name}, permuted" if permute else name
            weights[label] = [m_T[mask_T].double().numpy() for m_T, mask_T in zip(m_NT, mask_NT, strict=True)]
        weights.pop("uniform, permuted")
        return advantages_N, weights

    def _signals(self, mask_NT: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """What the credit actor says, [N, T] each; and the same with the empty negative prompt."""
        scorer = Scorer(self.run, self.given.model)
        scorer.load(self.adapter)
        needs = frozenset().union(*(_needs(settings) for settings in METHODS.values()))
        signals = _padded(scorer.score(list(self.rows), needs, self._negatives(OTHER_QUESTION)))
        features = [scorer.features["", row.group, row.index] for row in self.rows]
        signals["delta_feature"] = torch.zeros(*mask_NT.shape, scorer.hidden_size)
        for row, feature in zip(signals["delta_feature"], features, strict=True):
            row[: len(feature.mask)][torch.from_numpy(feature.mask)] = feature.surprise[:, None] * feature.hidden
        return signals, _padded(scorer.score(list(self.rows), frozenset(NEGATIVE), self._negatives(EMPTY)))

    def _negatives(self, template: str) -> dict[int, list[int]]:
        task, data = self.given.task, self.run.data
        return {
            row.group: render_negative(task.row(row.group), self.given.tokenizer, data, template) for row in self.rows
        }


async def _rewards(job: Run, prompt: Prompt, texts: list[str]) -> list[float]:
    assert isinstance(job.rewards, RewardPool)
    rewards = await job.rewards.score(prompt.prompt, texts, prompt.columns)
    if failed := [reward for reward in rewards if isinstance(reward, str)]:
        raise RuntimeError(f"credit: {len(failed)} rewards failed, the first because: {failed[0]}")
    return [float(reward) for reward in rewards]


def _needs(settings: dict[str, Any]) -> frozenset[str]:
    return credit.needs(**{key: value for key, value in settings.items() if key != "sharpening"})


def _padded(signals: list[Signals]) -> dict[str, torch.Tensor]:
    return {name: pad([one[name] for one in signals], torch.float32) for name in signals[0]}


def _share(values_T: np.ndarray, where_T: np.ndarray) -> float:
    return float(values_T[where_T].sum() / values_T.sum()) if values_T.sum() else math.nan


def _tens(text: str, length: int) -> np.ndarray:
    """Where a scratchpad, a token for each character, writes the sum of its tens column. [T] bool"""
    column = text.find(",")
    begin, end = text.find("=", column) + 1, text.find(":")
    position_T = np.arange(length)
    return (position_T >= begin) & (position_T < end) if 0 < column < begin < end else np.zeros(length, dtype=bool)


def _print(report: dict[str, Any]) -> None:
    console = Console()
    for task, found in report["tasks"].items():
        title = f"{task}: {found['completions']} completions of {found['prompts']} prompts, mean [95 % interval]"
        for columns in (list(COLUMNS)[:3], list(COLUMNS)[3:]):
            table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
            for column in ("method", *(COLUMNS[figure] for figure in columns)):
                table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
            for name, figures in found["methods"].items():
                control = name.endswith(", permuted")
                cells = (_shown(figures[figure]) if figure in figures else "" for figure in columns)
                table.add_row("  permuted" if control else name, *cells, style="dim" if control else None)
            console.print(table)
        facts = Table(show_header=False, box=SIMPLE_HEAD)
        for name, value in found.items():
            if name != "methods":
                facts.add_row(name.replace("_", " "), _shown(value))
        console.print(facts)
    console.print(report["machine"] | {"seed": report["seed"], "seconds": round(report["seconds"])}, style="dim")


def _shown(value: Any) -> str:
    if isinstance(value, Estimate):
        short = [f"{number:.2f}".replace("0.", ".") for number in value]
        return f"{short[0]} [{short[1]} {short[2]}]"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
