"""Credit for trajectories that the user brings: no Ray, no cluster, no training.

    file ──read──▶ chunks of whole groups ──Scorer──▶ signals ──credit.weights──▶ Parquet, figures

Beside the input, which stays in memory as token ids, memory is bounded by a chunk; only DelTA looks at everything at
once, and keeps its features and all signals. Dimensions: N completions, T positions, V vocabulary.
"""

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

import credit
from actors.scorer import Scorer
from cluster.adapters import read_adapter, zero_adapter
from cluster.brought import Brought, Policy, read
from configs.schema import RunConfig
from credit.adapter import Adapter
from credit.delta import Feature
from credit.diagnostics import FREQUENT, rank_correlation, sign_flip_rate
from credit.methods import SELF_NORMALISED, resolve
from credit.ranks import average_ranks
from credit.trajectory import Signals, Trajectory, pad

CHUNK = 4  # forwards' worth of tokens that are scored, weighted and written together
UNIFORM_WITHOUT_ADAPTER = frozenset({"residual", "logp_base"})

Progress = Callable[[int, int], None]
"""Called with the tokens that are scored and all that are to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to score, and how; the names are those of the command line."""

    trajectories: Path
    model: str
    out: Path
    methods: list[str]
    adapter: Path | None = None
    advantage: str = "grpo"
    sharpening: float = 1.0
    negative: str | None = None
    options: dict[str, Any] = field(default_factory=dict)  # each goes to every method that has it
    permute: bool = False
    chat: bool = False
    correct: float = 1.0
    temperature: float = 1.0
    dtype: str = "float32"
    tokens_per_forward: int = 4096
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Whole groups with their signals; tensors are [N, T]."""

    first: int  # place of the first of them among all trajectories
    rows: list[Trajectory]
    signals: list[Signals]


def score(request: Request, progress: Progress = lambda done, total: None) -> dict[str, Any]:
    """Write request.out and return the figures of every method.

    Raises ValueError, with one line, for everything that is wrong with the input; nothing is written then.
    """
    options = _options(request)
    run = _run(request)
    needs = frozenset({"logp", "entropy"}).union(*(credit.needs(name, **mine) for name, mine in options.items()))
    contrast = bool(needs & {"logp_negative", "kl_negative"})
    if contrast:
        needs |= {"logp_negative"}  # the sign-flip rate is taken of it
    policy = _policy(request, contrast)
    brought = read(request.trajectories, policy)
    warnings = brought.warnings + _ignored(request, contrast)
    scorer = Scorer(run, request.model)
    if not _load(scorer, policy.adapter, brought.trajectories[0]):
        of = [name for name, mine in options.items() if credit.needs(name, **mine) & UNIFORM_WITHOUT_ADAPTER]
        cause = "no adapter is given" if policy.fresh else f"the adapter {request.adapter} changes nothing"
        warnings += [f"{cause}: {', '.join(of)} cannot be but uniform"] * bool(of)
    chunks: Iterable[Chunk] = _chunks(request, scorer, brought, needs, progress)
    judge = Judge(request, options, brought)
    if "delta_feature" in needs:
        chunks = list(chunks)
        judge.see_all(scorer, chunks)
    _write(request, brought, chunks, judge)
    return judge.report() | {"warnings": warnings}


@contextmanager
def bar(console: Console) -> Iterator[Progress]:
    """A bar with the tokens scored, on a terminal."""
    columns = (TextColumn("scoring"), BarColumn(), TextColumn("{task.completed:,.0f} of {task.total:,.0f} tokens"))
    with RichProgress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as shown:
        task = shown.add_task("scoring", total=0)
        yield lambda done, total: shown.update(task, completed=done, total=total)


def table(report: dict[str, Any]) -> Table:
    """The figures, one column for each method."""
    title = (
        f"{report['out']}: {report['trajectories']} trajectories, {report['groups']} groups, {report['tokens']} tokens"
    )
    shown = Table("", *report["methods"], title=title)
    for name in dict.fromkeys(key for figures in report["methods"].values() for key in figures):
        cells = [f"{figures[name]:.3f}" if name in figures else "-" for figures in report["methods"].values()]
        shown.add_row(name.replace("_", " "), *cells)
    return shown


def parse_options(texts: list[str]) -> dict[str, Any]:
    """key=value, the values in YAML."""
    options = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not (separator and key):
            raise ValueError(f"--option: got {text!r}, expected key=value, as in q=0.1")
        try:
            options[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"--option: {text!r} is not valid YAML: {' '.join(str(error).split())}") from error
    return options


class Judge:
    """Weights of every method, chunk by chunk, and the figures over all of them."""

    def __init__(self, request: Request, options: dict[str, dict[str, Any]], brought: Brought) -> None:
        self.request, self.options, self.trajectories = request, options, brought.trajectories
        self.groups_N = torch.tensor([row.group for row in brought.trajectories])
        rewards_N = torch.tensor([row.reward for row in brought.trajectories], dtype=torch.float32)
        self.advantages_N = credit.advantages(request.advantage, rewards_N, self.groups_N)
        self.correct_N = rewards_N >= request.correct
        self.whole: dict[str, list[np.ndarray]] = {}  # weights of the methods that look at everything at once
        self.figures: dict[str, dict[str, Mean]] = {name: defaultdict(Mean) for name in options}
        self.mismatch = {"kl": Mean(), "ratio_mean": Mean()}
        self.contrast: list[np.ndarray] = []  # of each trajectory's policy tokens
        count_V = np.bincount(np.concatenate([row.tokens[row.mask] for row in brought.trajectories]))
        self.frequent_V = torch.zeros(max(int(row.tokens.max()) for row in brought.trajectories) + 1, dtype=torch.bool)
        self.frequent_V[torch.from_numpy(count_V).argsort(descending=True, stable=True)[:FREQUENT]] = True

    def see_all(self, scorer: Scorer, chunks: list[Chunk]) -> None:
        """Weights of the methods that read DelTA's features, which `scorer` keeps, of the whole input at once."""
        mask_NT = pad([row.mask for row in self.trajectories], torch.bool)
        values = _padded([mine for chunk in chunks for mine in chunk.signals])
        values["delta_feature"] = _features(scorer, self.trajectories)
        for name, options in self.options.items():
            if "delta_feature" in credit.needs(name, **options):
                weights_NT = self._weights(name, slice(0, len(self.trajectories)), values, mask_NT)
                self.whole[name] = _rows(weights_NT, self.trajectories)

    def weigh(self, chunk: Chunk) -> dict[str, list[np.ndarray]]:
        """Weights [T] of each method and trajectory, and the chunk's part in the figures."""
        where = slice(chunk.first, chunk.first + len(chunk.rows))
        mask_NT = pad([row.mask for row in chunk.rows], torch.bool)
        values: dict[str, Any] = _padded(chunk.signals)
        tokens_NT = pad([row.tokens for row in chunk.rows], torch.int64)
        weights = {}
        for name in self.options:
            if name in self.whole:
                weights_NT = pad(self.whole[name][where], torch.float32)
            else:
                weights_NT = self._weights(name, where, values, mask_NT)
            figures = _figures(weights_NT, tokens_NT, mask_NT, values["entropy"], self.frequent_V)
            for key, (value, count) in figures.items():
                self.figures[name][key].add(value, count)
            weights[name] = _rows(weights_NT, chunk.rows)
        self._compare(chunk)
        return weights

    def report(self) -> dict[str, Any]:
        groups, inverse_N, sizes = self.groups_N.unique(return_inverse=True, return_counts=True)
        mass = torch.zeros(len(groups)).index_add(0, inverse_N, self.advantages_N.abs())
        methods = {name: {key: mean.value for key, mean in mine.items()} for name, mine in self.figures.items()}
        for name, options in self.options.items():
            if credit.needs(name, **options) & {"logp_negative", "kl_negative"}:
                methods[name]["sign_flip_rate"] = self._sign_flips()
        return {
            "trajectories": len(self.trajectories),
            "groups": len(groups),
            "tokens": sum(int(row.mask.sum()) for row in self.trajectories),
            "groups_of_one": int((sizes == 1).sum()),
            "groups_without_signal": int((mass == 0).sum()),
            "mismatch": {key: mean.value for key, mean in self.mismatch.items()} if self.mismatch["kl"].count else None,
            "methods": methods,
            "out": str(self.request.out),
        }

    def _weights(self, name: str, where: slice, values: dict[str, Any], mask_NT: Tensor) -> Tensor:
        return credit.weights(
            name,
            values,
            mask_NT,
            sharpening=1.0 if name in SELF_NORMALISED else self.request.sharpening,
            permute=self.request.permute,
            seed=self.request.seed,
            keys=torch.tensor([(row.group, row.index) for row in self.trajectories[where]]),
            advantages=self.advantages_N[where],
            groups=self.groups_N[where],
            **self.options[name],
        )

    def _compare(self, chunk: Chunk) -> None:
        """The policy against its negative prompt and against the sampler, on the policy's tokens."""
        for row, mine in zip(chunk.rows, chunk.signals, strict=True):
            if "logp_negative" in mine:
                self.contrast.append((mine["logp"] - mine["logp_negative"])[row.mask])
            if np.isfinite(row.logprobs).all():
                ratio = (mine["logp"] - row.logprobs)[row.mask].astype(np.float64)
                self.mismatch["kl"].add(float((np.expm1(ratio) - ratio).mean()), len(ratio))
                self.mismatch["ratio_mean"].add(float(np.exp(ratio).mean()), len(ratio))

    def _sign_flips(self) -> float:
        """All policy tokens as rows of one token."""
        tokens = torch.from_numpy(np.concatenate([row.tokens[row.mask] for row in self.trajectories]))[:, None]
        contrast = torch.from_numpy(np.concatenate(self.contrast))[:, None]
        lengths = torch.tensor([int(row.mask.sum()) for row in self.trajectories])
        return sign_flip_rate(
            contrast, tokens, torch.ones_like(tokens, dtype=torch.bool), self.correct_N.repeat_interleave(lengths)
        )


@dataclass(slots=True)
class Mean:
    """A mean over the parts of a whole; where nothing counts, it has the value that the figure then has."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float, count: int) -> None:
        if count or not self.count:
            self.value += (value - self.value) * (count / (self.count + count) if count else 1.0)
        self.count += count


def _figures(
    weights_NT: Tensor, tokens_NT: Tensor, mask_NT: Tensor, entropy_NT: Tensor, frequent_V: Tensor
) -> dict[str, tuple[float, int]]:
    """Each figure of a chunk, and the completions that it is a mean of: those for which it is defined."""
    total_N, order_NT = weights_NT.sum(1), mask_NT.cumsum(1).float()
    ranks_NT, entropy_ranks_NT = average_ranks(weights_NT, mask_NT), average_ranks(entropy_NT, mask_NT)

    def varies(values_NT: Tensor) -> Tensor:
        lowest_N = values_NT.masked_fill(~mask_NT, torch.inf).amin(1)
        return lowest_N < values_NT.masked_fill(~mask_NT, -torch.inf).amax(1)

    concentration = credit.diagnostics(weights_NT, mask_NT)
    defined = int(((mask_NT.sum(1) >= 2) & (total_N > 0)).sum())
    figures = {name: (value, defined) for name, value in concentration.items()}
    for name, other_NT in (("position_spearman", order_NT), ("entropy_spearman", entropy_ranks_NT)):
        count = int((varies(ranks_NT) & varies(other_NT)).sum())
        figures[name] = rank_correlation(ranks_NT, other_NT, mask_NT), count
    share_N = (weights_NT * (mask_NT & frequent_V[tokens_NT])).sum(1)[total_N > 0] / total_N[total_N > 0]
    figures["template_share"] = float(share_N.mean()) if len(share_N) else 0.0, len(share_N)
    return figures


def _options(request: Request) -> dict[str, dict[str, Any]]:
    """Each method with the options that it takes, all checked on a toy batch."""
    if not request.methods or len(set(request.methods)) < len(request.methods):
        raise ValueError(f"--method: got {','.join(request.methods)!r}, expected methods by name, each once")
    chosen = {}
    for name in request.methods:
        if name == "ibpo":
            raise ValueError("--method: 'ibpo' needs revisions that the policy samples: it works in a run only")
        parameters = inspect.signature(resolve(name)).parameters
        chosen[name] = {key: value for key, value in request.options.items() if key in parameters}
        sharpening = 1.0 if name in SELF_NORMALISED else request.sharpening
        credit.check(name, request.advantage, sharpening=sharpening, options=chosen[name], negative=request.negative)
    for key in request.options:
        if not any(key in mine for mine in chosen.values()):
            raise ValueError(f"--option: got {key!r}, which none of {', '.join(chosen)} takes")
    return chosen


def _ignored(request: Request, contrast: bool) -> list[str]:
    warnings = []
    own = [name for name in request.methods if name in SELF_NORMALISED]
    if request.sharpening != 1 and own:
        warnings.append(f"--sharpening is not for {', '.join(own)}: they normalise their own weights")
    if request.negative is not None and not contrast:
        warnings.append(f"--negative is not used: {', '.join(request.methods)} need no negative prompt")
    return warnings


def _run(request: Request) -> RunConfig:
    if not (math.isfinite(request.sharpening) and request.sharpening > 0):
        raise ValueError(f"--sharpening: got {request.sharpening}, expected a number above 0")
    if request.out.suffix != ".parquet" or request.out.resolve() == request.trajectories.resolve():
        raise ValueError(f"--out: got {request.out}, expected another file, that ends in .parquet")
    if not request.out.parent.is_dir():
        raise ValueError(f"--out: there is no folder {request.out.parent} to write in")
    settings = {
        "name": "score",
        "steps": 1,
        "seed": request.seed,
        "model": {"path": request.model, "dtype": request.dtype},
        "data": {"task": "dataset", "path": str(request.trajectories)},
        "rollout": {"temperature": request.temperature},
        "credit": {"tokens_per_forward": request.tokens_per_forward},
    }
    try:
        return RunConfig.model_validate(settings)
    except ValidationError as error:
        problem = error.errors()[0]
        option = str(problem["loc"][-1]).replace("_", "-")
        raise ValueError(f"--{option}: got {problem['input']!r}, expected: {problem['msg']}") from None


def _policy(request: Request, contrast: bool) -> Policy:
    try:
        config: Any = AutoConfig.from_pretrained(request.model).get_text_config()
        tokenizer = AutoTokenizer.from_pretrained(request.model)
    except (OSError, ValueError) as error:
        raise ValueError(f"--model: {request.model!r} cannot be loaded: {str(error)[:300]}") from error
    return Policy(
        tokenizer=tokenizer,
        vocabulary=config.vocab_size,
        context=config.max_position_embeddings,
        adapter=read_adapter(request.adapter, config.vocab_size) if request.adapter else zero_adapter(request.model),
        fresh=request.adapter is None,
        chat=request.chat,
        negative=request.negative if contrast else None,
    )


def _load(scorer: Scorer, adapter: Adapter, sample: Trajectory) -> bool:
    """Whether the adapter, loaded, changes any log-prob of `sample`."""
    scorer.load(adapter)
    tokens = sample.tokens.tolist()
    return not np.array_equal(scorer.canary(tokens, adapter.version), scorer.canary(tokens, None))


def _chunks(
    request: Request, scorer: Scorer, brought: Brought, needs: frozenset[str], progress: Progress
) -> Iterator[Chunk]:
    """Whole groups, scored, as many at a time as fill some forwards."""
    rows, total, done = brought.trajectories, sum(len(row.tokens) for row in brought.trajectories), 0
    first = tokens = 0
    progress(0, total)
    for i, row in enumerate(rows):
        tokens += len(row.tokens)
        last_of_group = i + 1 == len(rows) or rows[i + 1].group != row.group
        if last_of_group and (tokens >= CHUNK * request.tokens_per_forward or i + 1 == len(rows)):
            chunk = rows[first : i + 1]
            signals = scorer.score(list(chunk), needs, brought.negatives)
            done += tokens
            progress(done, total)
            yield Chunk(first=first, rows=chunk, signals=signals)
            first, tokens = i + 1, 0


def _features(scorer: Scorer, rows: list[Trajectory]) -> Feature:
    """DelTA's two views of the features that the scorer keeps of `rows`."""
    keys, lengths = [(row.group, row.index) for row in rows], [len(row.tokens) for row in rows]

    def sums(coefficients_NT: Tensor) -> tuple[Tensor, Tensor]:
        parts = [values[:length].numpy() for values, length in zip(coefficients_NT, lengths, strict=True)]
        positive_H, negative_H = scorer.delta_sums(dict(zip(keys, parts, strict=True)))
        return torch.from_numpy(positive_H), torch.from_numpy(negative_H)

    def dots(direction_H: Tensor) -> Tensor:
        answers = scorer.delta_dots(direction_H.numpy(), keys)
        return pad([answers[key] for key in keys], torch.float32)

    return Feature(sums, dots)


def _padded(signals: list[Signals]) -> dict[str, Any]:
    return {name: pad([mine[name] for mine in signals], torch.float32) for name in signals[0]}


def _rows(values_NT: Tensor, rows: list[Trajectory]) -> list[np.ndarray]:
    return [values[: len(row.tokens)].numpy() for values, row in zip(values_NT, rows, strict=True)]


def _write(request: Request, brought: Brought, chunks: Iterable[Chunk], judge: Judge) -> None:
    """One row per trajectory. The file is there whole or not at all."""
    unfinished = request.out.with_name(f".{request.out.name}.unfinished")
    writer: pq.ParquetWriter | None = None
    try:
        for chunk in chunks:
            table = _table(chunk, judge.weigh(chunk), brought, judge.advantages_N)
            writer = writer or pq.ParquetWriter(unfinished, table.schema, compression="zstd")
            writer.write_table(table)
        assert writer is not None, "at least one trajectory"
        writer.close()
        unfinished.replace(request.out)
    finally:
        unfinished.unlink(missing_ok=True)


def _table(chunk: Chunk, weights: dict[str, list[np.ndarray]], brought: Brought, advantages_N: Tensor) -> pa.Table:
    where = slice(chunk.first, chunk.first + len(chunk.rows))
    advantages = advantages_N[where].numpy()
    sampler = [
        np.where(np.isnan(row.logprobs), mine["logp"], row.logprobs)
        for row, mine in zip(chunk.rows, chunk.signals, strict=True)
    ]
    columns: dict[str, Any] = {
        "group": [brought.labels[row.group] for row in chunk.rows],
        "index": [row.index for row in chunk.rows],
        "row": brought.rows[where],
        "reward": [row.reward for row in chunk.rows],
        "advantage": advantages,
        "tokens": [row.tokens for row in chunk.rows],
        "mask": [row.mask for row in chunk.rows],
        "logprobs": sampler,
    }
    for name in chunk.signals[0]:
        columns[f"signal_{name}"] = [mine[name] for mine in chunk.signals]
    for name, mine in weights.items():
        columns[f"weights_{name}"] = mine
        columns[f"advantages_{name}"] = [a * row for a, row in zip(advantages, mine, strict=True)]
    return pa.table(columns)
