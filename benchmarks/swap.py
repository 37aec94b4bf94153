"""Adapter swaps under load, on the real stack: how long they take, what they cost, and whose tokens came out.

accredit bench swap [--replicas 2 --swaps 500 --rank 16 --shape demo|42m --model DIR --json]

Each swap is an optimiser step on a batch of eight sampled completions with advantages of both signs, export, publish,
canary and acceptance on every rollout replica and the credit actor, while streams of prompts keep the replicas busy.
Afterwards every completion is scored again under the version that it names and under the version before.
"""

import asyncio
import copy
import itertools
import json as jsonlib
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from actors.demo import make_model
from actors.scorer import Scorer
from benchmarks import machine
from benchmarks.scorer import SHAPES
from cluster import remote
from cluster.loop import sampling_seed
from cluster.publisher import Publisher
from cluster.run import actors
from configs.schema import RunConfig
from credit.adapter import Adapter
from credit.trajectory import Batch, Prompt, Sample, pad

CANARY = [3 + i % 90 for i in range(48)]
STREAMS = 4  # waves of prompts under way at any time, each over all replicas
GROUP = 4
QUIET_S = 5.0  # of load without swaps, to compare engine steps with
WARM_UP = 50  # swaps before memory is expected to be flat
BLOCK = 25  # swaps between two readings of memory that are compared
AGREE = 1e-4  # nats, and of the log-prob: one of -100 comes from logits that large, with their rounding


def main(replicas: int, swaps: int, rank: int, shape: str, model: Path | None, json: bool) -> dict[str, Any]:
    """Measure and print a table, or JSON."""
    run = _run(replicas, rank)
    with tempfile.TemporaryDirectory(prefix="swap-") as scratch, Progress(disable=json, transient=True) as progress:
        if model is None:
            model = Path(scratch) / "model"
            make_model(model, **{"demo": SHAPES["demo 0.6M"], "42m": SHAPES["42M"]}[shape])
        bench = Bench(run, str(model), Path(scratch))
        task = progress.add_task("swaps", total=swaps)
        remote.connect(run, dashboard=False)
        asyncio.run(bench.measure(swaps, lambda: progress.advance(task)))
        scored = progress.add_task("scoring again", total=len(bench.samples))
        tokens = bench.score_again(lambda count: progress.advance(scored, count))
    report = {
        "machine": machine.describe() | {"loadavg": psutil.getloadavg()[0]},
        "model": shape,
        **bench.report(),
        **tokens,
    }
    if json:
        print(jsonlib.dumps(report, indent=1))
    else:
        _print(report)
    return report


def _run(replicas: int, rank: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "swap",
            "steps": 1,
            "max_staleness": 6,  # eight slots: requests of several versions overlap
            "data": {"task": "arithmetic"},
            "lora": {"r": rank, "alpha": 2 * rank},
            "rollout": {"replicas": replicas, "min_replicas": replicas, "cpus": 0.1},
            "credit": {"cpus": 0.1},
            "learner": {"cpus": 0.1, "lr": 1e-3},
        }
    )


class Bench:
    """One measurement."""

    def __init__(self, run: RunConfig, model: str, folder: Path) -> None:
        self.run, self.model = run, model
        self.fleet, self.scorers = actors(run, model)
        self.learners = remote.Learners(run, model, CANARY)
        self.publisher = Publisher(self.learners, self.fleet, self.scorers, folder)
        self.adapters: dict[int, Adapter] = {}
        self.samples: list[Sample] = []
        self.swaps: list[dict[str, Any]] = []  # one record for each
        self.quiet: list[dict[str, Any]] = []  # stats of replicas between swaps
        self._groups = itertools.count()

    async def measure(self, swaps: int, done: Any) -> None:
        try:
            await asyncio.gather(self.fleet.start(), self.scorers.start(), self.learners.start())
            await self._publish(0)
            streams = [asyncio.create_task(self._stream()) for _ in range(STREAMS)]
            await self._watch_without_swaps()
            for version in range(1, swaps + 1):
                self.swaps.append(await self._swap(version))
                done()
                if broken := [stream for stream in streams if stream.done()]:
                    await broken[0]
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
        finally:
            await asyncio.gather(self.fleet.close(), self.scorers.close(), self.learners.kill())

    async def _stream(self) -> None:
        while True:
            await self._wave()

    async def _wave(self) -> None:
        """One prompt for each replica."""
        prompts = [self._prompt(next(self._groups)) for _ in self.fleet.members]
        await self.fleet.sample(prompts, self.samples.extend)

    def _prompt(self, group: int) -> Prompt:
        tokens = [3 + (31 * group + 7 * i) % 90 for i in range(12)]
        seeds = [sampling_seed(0, group, index) for index in range(GROUP)]
        return Prompt(group=group, tokens=tokens, seeds=seeds, prompt="", columns={})

    async def _watch_without_swaps(self) -> None:
        await asyncio.sleep(2)  # the first steps warm caches up
        await self.fleet.stats()
        until = time.monotonic() + QUIET_S
        while time.monotonic() < until:
            await asyncio.sleep(0.2)
            self.quiet += (await self.fleet.stats()).values()

    async def _publish(self, version: int) -> dict[str, Any]:
        metrics = await self.publisher.publish(version)
        assert self.publisher.newest is not None
        # copied: what is kept to score again at the end must not hold pages of Ray's object store
        self.adapters[version] = copy.deepcopy(self.publisher.newest)
        return metrics

    async def _swap(self, version: int) -> dict[str, Any]:
        batch = _batch(self.samples[-8:])
        began = time.monotonic()
        await self.learners.step(batch)
        stepped, ended = time.monotonic(), time.time()
        metrics = await self._publish(version)
        published = time.monotonic()
        await self._wave()  # as the loop does: what waits for the version is submitted at once
        stats = await self.fleet.stats()
        held: dict[str, Any] = {m.name: m.actor for m in (*self.fleet.members, *self.scorers.members)}
        handles = {name: actor.handle for name, actor in held.items()} | {"learner": self.learners.ranks[0]}
        memory = await asyncio.gather(*(remote.answer(h.__ray_call__.remote(_memory)) for h in handles.values()))
        return {
            "step_s": stepped - began,
            "publish_s": published - stepped,
            "first_token_s": {name: replica["versions"][version][1] - ended for name, replica in stats.items()},
            "metrics": metrics,
            "replicas": stats,
            "memory": {
                f"{name} {kind}": parts[kind]
                for name, parts in zip(handles, memory, strict=True)
                for kind in ("own", "object store")
            },
        }

    def report(self) -> dict[str, Any]:
        fleet, last = self.fleet, self.swaps[-1]
        replicas = [replica for swap in self.swaps for replica in swap["replicas"].values()]
        used = Counter(sample.version for sample in self.samples)
        return {
            "replicas": len(fleet.members),
            "rank": self.run.lora.r,
            "swaps": len(self.swaps),
            "bytes": last["metrics"]["swap/bytes"],
            "seconds": {
                "step end -> first token": _spread([t for s in self.swaps for t in s["first_token_s"].values()]),
                "step end -> slowest replica's first token": _spread(
                    [max(s["first_token_s"].values()) for s in self.swaps]
                ),
                "publish": _spread([s["publish_s"] for s in self.swaps]),
                "export": _spread([s["metrics"]["swap/export_s"] for s in self.swaps]),
                "rollout load + canary": _spread([s["metrics"]["swap/rollout_load_s"] for s in self.swaps]),
                "credit load + canary": _spread([s["metrics"]["swap/credit_load_s"] for s in self.swaps]),
                "load into the slot": _spread([r["load_s"] for r in replicas]),
                "of it reading back": _spread([r["proof_s"] for r in replicas]),
                "canary": _spread([r["canary_s"] for r in replicas]),
                "optimiser step": _spread([s["step_s"] for s in self.swaps]),
            },
            "pauses": {
                "longest between two engine steps, with a swap": _spread([r["longest_pause_s"] for r in replicas]),
                "longest between two engine steps, without": _spread([r["longest_pause_s"] for r in self.quiet]),
                "longest engine step, with a swap": _spread([r["longest_step_s"] for r in replicas]),
                "longest engine step, without": _spread([r["longest_step_s"] for r in self.quiet]),
            },
            "aborted": sum(replica["aborted"] for replica in last["replicas"].values()),
            "resident_max": max(r["most_resident"] for r in replicas),
            "requests_per_version": _spread(list(used.values())),
            "refused": dict(fleet.refusals + self.scorers.refusals),
            "verdicts": {v: c for v, c in fleet.verdicts.items() if v == "proved"}
            | {"indistinguishable": sum(c for v, c in fleet.verdicts.items() if v != "proved")},
            "restarts": fleet.restarts + self.scorers.restarts + self.learners.restarts,
            "memory": {name: _growth([s["memory"][name] for s in self.swaps]) for name in last["memory"]},
        }

    def score_again(self, done: Any) -> dict[str, Any]:
        """Compare every completion with its named version and with the version before, in this process."""
        torch.set_num_threads(1)  # threads that wait for each other crawl on a busy machine
        scorer = Scorer(self.run, self.model)
        worst, wrong, alike, tokens = 0.0, 0, 0, 0
        scorer.load(self.adapters[0])
        for version in self.adapters:
            if version:
                scorer.load(self.adapters[version])
            samples = [s for s in self.samples if s.version == version]
            for some in (samples[i : i + 256] for i in range(0, len(samples), 256)):
                own = _differences(scorer, some, self.adapters[version])
                worst, tokens = max([worst, *map(max, own)]), tokens + sum(map(len, own))
                wrong += sum(_disagree(s, d) for s, d in zip(some, own, strict=True))
                if version:
                    before = _differences(scorer, some, self.adapters[version - 1])
                    alike += sum(_disagree(s, d) == 0 for s, d in zip(some, before, strict=True))
                done(len(some))
            if version:
                scorer.unload(version - 1)
        return {
            "completions": len(self.samples),
            "tokens": tokens,
            "tokens_from_a_wrong_adapter": wrong,
            "largest_difference_nats": float(worst),
            "completions_like_the_version_before": int(alike),
        }


def _batch(samples: list[Sample]) -> Batch:
    """Every other completion was good."""
    samples = sorted(samples, key=lambda sample: (sample.group, sample.index))
    signs = [1.0 if i % 2 else -1.0 for i in range(len(samples))]
    logp = pad([sample.logprobs for sample in samples], torch.float32)
    return Batch(
        tokens=pad([sample.tokens for sample in samples], torch.int64),
        lengths=torch.tensor([len(sample.tokens) for sample in samples]),
        mask=pad([sample.mask for sample in samples], torch.bool),
        advantages=pad([sign * sample.mask for sign, sample in zip(signs, samples, strict=True)], torch.float32),
        logp_old=logp,
        logp_rollout=logp,
        logp_base=None,
        groups=torch.tensor([sample.group for sample in samples]),
        rewards=torch.tensor(signs),
    )


def _differences(scorer: Scorer, samples: list[Sample], adapter: Adapter) -> list[np.ndarray]:
    """|sampler's log-prob - that of `adapter`| of each completion's tokens."""
    renamed = [replace(sample, version=adapter.version, digest=adapter.digest) for sample in samples]
    signals = scorer.score(renamed, frozenset({"logp"}))
    return [np.abs(s.logprobs - values["logp"])[s.mask] for s, values in zip(samples, signals, strict=True)]


def _disagree(sample: Sample, differences: np.ndarray) -> int:
    """Tokens whose log-probs differ by more than rounding."""
    return int((differences > AGREE * (1 + np.abs(sample.logprobs[sample.mask]))).sum())


def _memory(_: Any) -> dict[str, int]:
    """Resident bytes: the process's own, and pages of Ray's object store, which all actors share and Ray bounds."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    own, shared = (int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))
    return {"own": own, "object store": shared}


def _spread(values: list[float]) -> dict[str, float]:
    p50, p95 = np.quantile(values, [0.5, 0.95])
    return {"p50": float(p50), "p95": float(p95), "max": float(max(values))}


def _growth(rss: list[int]) -> dict[str, Any]:
    """Bytes a swap after the warm-up, with the 95 % interval: Student's, of the mean change from block to block.

    Of the changes, not a line through the levels: an allocator moves in rare jumps that stay, so that levels depend on
    each other and a line looks surer than it is. A leak changes every block alike, and is found even where it is small.
    """
    changes = np.diff(rss[WARM_UP - 1 :: BLOCK]) / BLOCK
    result: dict[str, Any] = {"first_bytes": rss[0], "last_bytes": rss[-1]}
    if len(changes) < 5:
        return result | {"bytes_per_swap": None, "interval": None, "flat": None}
    slope, free = float(changes.mean()), len(changes) - 1
    t = 1.96 + 2.372 / free + 2.823 / free**2  # 97.5 %: Cornish-Fisher expansion in 1 / degrees of freedom
    error = t * float(changes.std(ddof=1)) / len(changes) ** 0.5
    return result | {
        "bytes_per_swap": slope,
        "interval": [slope - error, slope + error],
        "flat": slope - error <= 0 <= slope + error,
    }


def _print(report: dict[str, Any]) -> None:
    console, host = Console(), report["machine"]
    title = f"{report['swaps']} swaps on {report['replicas']} replicas, {report['model']}, r={report['rank']}"
    times = Table(title=f"{title}, {report['bytes'] / 2**20:.2f} MiB (ms)")
    for column in ("", "p50", "p95", "max"):
        times.add_column(column, justify="right" if column else "left")
    for name, values in (report["seconds"] | report["pauses"]).items():
        times.add_row(name, *(f"{1000 * values[q]:.1f}" for q in ("p50", "p95", "max")))
    console.print(times)
    memory = Table(title="memory (MiB; bytes a swap after the first 50, 95 % interval)")
    for column in ("", "first", "last", "slope", "interval", "flat"):
        memory.add_column(column, justify="right" if column else "left")
    for name, grown in report["memory"].items():
        ends = (f"{grown[key] / 2**20:.1f}" for key in ("first_bytes", "last_bytes"))
        slope = "" if grown["bytes_per_swap"] is None else f"{grown['bytes_per_swap']:,.0f}"
        interval = "" if grown["interval"] is None else "{:,.0f} .. {:,.0f}".format(*grown["interval"])
        memory.add_row(name, *ends, slope, interval, {True: "yes", False: "no", None: ""}[grown["flat"]])
    console.print(memory)
    facts = Table(show_header=False)
    for name in ("completions", "tokens", "tokens_from_a_wrong_adapter", "largest_difference_nats",
                 "completions_like_the_version_before", "aborted", "resident_max", "requests_per_version", "refused",
                 "verdicts", "restarts"):  # fmt: skip
        facts.add_row(name.replace("_", " "), str(report[name]))
    console.print(facts)
    console.print(f"{host['cpu']}, {host['cores']} cores, torch {host['torch']}, {host['date']}")
