"""What a report shows of a run's folder, or of a file of `accredit score`: trajectories, their signals, and the weights
of every method whose signals are at hand, by the functions of `credit`.

Dimensions: N completions, T positions of a padded step, P kept tokens of all completions, one after the other. Tokens
are kept from a completion's first sampled one on; in an episode some of them are not the policy's (`mask` 0).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

import credit
from cluster import metrics
from cluster.ledger import audit
from cluster.report.tokens import KINDS, describe, load_tokenizer, visible
from configs.schema import CreditConfig, RunConfig, load
from credit.diagnostics import concentration
from credit.eapo import quadrants
from credit.methods import METHODS, SELF_NORMALISED
from credit.weights import permuted

CHUNK = 512  # rows of a scored file that are weighted together
BINS = 10  # of the entropy, with about as many tokens each
FULL = ("logprobs", "signal_logp", "signal_logp_base", "signal_logp_negative")
"""Kept in float32, for their differences are looked at; all other values in float16."""

Progress = Callable[[int, int], None]
"""Called with the trajectories that are read and all that are to be."""


@dataclass(kw_only=True)
class Collected:
    """Everything on the page.

    Arrays of [P]: token (place in `vocabulary`), mask, order (the place within the completion from which `--permute`
    takes a token's weight), quadrant (1.. of QUADRANTS, 0 none), entropy_bin, the signals, and weights_* of `methods`
    (`trained`: advantages). Of [N]: group (place in `labels`), index, step, version, digest, reward, advantage,
    finish, start (of its tokens; [N + 1]), gini_*, ratio_* and regime_* (0 uniform, 1 middle, 2 concentrated).
    """

    title: str
    run: RunConfig | None  # None for a scored file
    records: list[dict[str, Any]]
    ledger: dict[str, Any]
    total: int  # trajectories on disk; the page may hold fewer
    methods: list[str]
    vocabulary: list[str]  # as shown
    kinds: list[int]  # of KINDS, of each of them
    prompts: list[str]  # of each group, as `labels`
    labels: list[str]
    digests: list[str]
    entropy_edges: list[float]
    arrays: dict[str, np.ndarray]
    warnings: list[str] = field(default_factory=list)


def collect(
    source: Path, *, limit: int = 5000, model: str | None = None, progress: Progress = lambda done, total: None
) -> Collected:
    """Read a run's folder or a scored Parquet file; of many more than `limit` trajectories, evenly spaced ones.

    model: the tokenizer's folder, if it is not that of the run's config. Raises ValueError for what is neither.
    """
    if source.is_dir():
        run = load(source / "config.yaml")
        steps, total, shown = _steps(source, limit)
    else:
        run = None
        steps, total, shown = _chunks(source, limit)
    gatherer = _Gatherer(run)
    for number, table in steps:
        gatherer.add(number, table)
        progress(gatherer.count, shown)
    tokenizer, warnings = load_tokenizer(run, model)
    texts, kinds = describe(list(gatherer.ids), tokenizer)
    if shown < total:
        warnings.append(f"{shown:,} of {total:,} trajectories, evenly spaced, are on this page: --limit shows more")
    arrays = gatherer.arrays()
    edges = np.zeros(0)
    if "signal_entropy" in arrays:
        entropy = arrays["signal_entropy"].astype(np.float32)
        edges = np.quantile(entropy[arrays["mask"] > 0], np.linspace(0, 1, BINS + 1)[1:-1])
        arrays["entropy_bin"] = np.searchsorted(edges, entropy, side="right").astype(np.uint8)
    return Collected(
        title=run.name if run else source.stem,
        run=run,
        records=metrics.read(source) if run else [],
        ledger=_ledger(source, warnings) if run else {},
        total=total,
        methods=gatherer.methods,
        vocabulary=[visible(text) for text in texts],
        kinds=[KINDS.index(name) for name in kinds],
        prompts=[
            visible(text if text is not None else "".join(texts[i] for i in tokens), lines=True)
            for text, tokens in gatherer.prompts
        ],
        labels=[str(label) for _, label in gatherer.groups],
        digests=list(gatherer.digests),
        entropy_edges=edges.tolist(),
        arrays=arrays,
        warnings=warnings,
    )


def _steps(folder: Path, limit: int) -> tuple[Iterator[tuple[int, pa.Table]], int, int]:
    """Evenly spaced steps of a run, the first and the last among them; rows on disk, and of these steps."""
    files = sorted((folder / "trajectories").glob("step-*.parquet"))
    if not files:
        raise ValueError(f"report: there is no {folder}/trajectories/step-*.parquet: has the run trained a step?")
    rows = [pq.read_metadata(file).num_rows for file in files]
    count = max(1, min(len(files), limit * len(files) // sum(rows)))
    chosen = np.unique(np.linspace(len(files) - 1, 0, count).round().astype(int))
    tables = ((int(files[i].stem.removeprefix("step-")), pq.read_table(files[i])) for i in chosen)
    return tables, sum(rows), sum(rows[i] for i in chosen)


def _chunks(file: Path, limit: int) -> tuple[Iterator[tuple[int, pa.Table]], int, int]:
    """Evenly spaced groups of a scored file, whole groups together, all as step 0; rows in the file, and of these."""
    if file.suffix != ".parquet" or not file.is_file():
        raise ValueError(f"report: got {file}, expected the folder of a run, or a file that `accredit score` wrote")
    try:
        table = pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"report: {file} cannot be read as Parquet: {' '.join(str(error).split())[:200]}") from error
    missing = {"group", "index", "reward", "advantage", "tokens", "mask", "signal_logp"} - set(table.column_names)
    if missing:
        raise ValueError(f"report: {file} has no {', '.join(sorted(missing))}: did `accredit score` write it?")
    numbers = table["group"].combine_chunks().dictionary_encode().indices.to_numpy()
    count = max(1, min(int(numbers.max()) + 1, limit * (int(numbers.max()) + 1) // len(numbers)))
    chosen = np.unique(np.linspace(0, numbers.max(), count).round().astype(int))
    table = table.append_column("number", pa.array(numbers)).filter(pa.array(np.isin(numbers, chosen)))
    kept = table["number"].to_numpy()
    starts = [0, *(np.flatnonzero(np.diff(kept)) + 1)]
    cuts = [0]
    for start, end in zip(starts, [*starts[1:], len(kept)], strict=True):
        if end - cuts[-1] > CHUNK and start > cuts[-1]:
            cuts.append(start)
    parts = ((0, table.slice(a, b - a)) for a, b in zip(cuts, [*cuts[1:], len(kept)], strict=True))
    return parts, len(numbers), len(kept)


def _ledger(folder: Path, warnings: list[str]) -> dict[str, Any]:
    try:
        return audit(folder / "ledger.sqlite")
    except (RuntimeError, FileNotFoundError) as error:  # the trajectories can be looked at without
        warnings.append(str(error))
        return {}


class _Numbers(dict[Any, int]):
    """Values in the order in which they were first asked for."""

    def __missing__(self, value: Any) -> int:
        self[value] = len(self)
        return self[value]


class _Gatherer:
    """Step by step: weights of every method, and everything flat."""

    def __init__(self, run: RunConfig | None) -> None:
        self.run, self.credit = run, run.credit if run else CreditConfig()
        self.count = 0
        self.methods: list[str] = []
        self.groups, self.ids, self.digests = _Numbers(), _Numbers(), _Numbers()
        self.prompts: list[tuple[str | None, list[int]]] = []  # as text, or as places in `ids`
        self._parts: list[dict[str, np.ndarray]] = []
        self._lengths: list[np.ndarray] = []

    def add(self, step: int, table: pa.Table) -> None:
        lengths_N = np.diff(table["tokens"].combine_chunks().offsets.to_numpy())
        within_NT = torch.arange(int(lengths_N.max())) < torch.from_numpy(lengths_N.astype(np.int64))[:, None]
        tokens_NT = _padded(table, "tokens", within_NT, torch.int64)
        mask_NT = _padded(table, "mask", within_NT, torch.bool)
        kept_NT = within_NT & (mask_NT.cumsum(1) > 0)
        names = [name for name in table.column_names if name.startswith("signal_") or name == "logprobs"]
        values = {name: _padded(table, name, within_NT, torch.float32) for name in names}
        labels = table["group"].to_pylist()
        numbers = torch.from_numpy(table["number" if "number" in table.column_names else "group"].to_numpy().copy())
        keys_N2 = torch.stack([numbers, torch.from_numpy(table["index"].to_numpy().copy())], 1).long()
        rewards_N = torch.from_numpy(table["reward"].to_numpy().astype(np.float32))
        advantages_N = self._advantages(table, rewards_N, keys_N2[:, 0])
        seed = self.run.seed + step if self.run else 0
        weights = self._weights(table, values, mask_NT, within_NT, advantages_N, keys_N2)
        if self.methods and self.methods != list(weights):
            raise ValueError(f"report: step {step} has other signals than the steps before it")
        self.methods = list(weights)
        place_NT = (kept_NT.cumsum(1) - 1).clamp(min=0)
        part = {
            "mask": mask_NT[kept_NT],
            "order": permuted(place_NT.float(), mask_NT, keys_N2, seed).int()[kept_NT],
            **{name: value_NT[kept_NT] for name, value_NT in values.items()},
            **{f"weights_{name}": value_NT[kept_NT] for name, value_NT in weights.items()},
        }
        if "signal_entropy" in values:
            four = quadrants(values["signal_entropy"], advantages_N, keys_N2[:, 0], mask_NT)
            part["quadrant"] = sum(place * quadrant.int() for place, quadrant in enumerate(four, 1))[kept_NT]  # type: ignore[index]
        part |= self._rows(step, table, labels, rewards_N, advantages_N)
        part |= _concentrations(weights, mask_NT)
        part = {name: _compact(name, value) for name, value in part.items()}
        unique, inverse = np.unique(tokens_NT[kept_NT].numpy(), return_inverse=True)
        part["token"] = np.array([self.ids[int(token)] for token in unique], np.uint32)[inverse]
        self._prompts(step, table, labels, tokens_NT, mask_NT)
        self._parts.append(part)
        self._lengths.append(kept_NT.sum(1).numpy())
        self.count += table.num_rows

    def arrays(self) -> dict[str, np.ndarray]:
        joined = {name: np.concatenate([part[name] for part in self._parts]) for name in self._parts[0]}
        joined["start"] = np.concatenate([[0], np.cumsum(np.concatenate(self._lengths))]).astype(np.uint32)
        return joined

    def _advantages(self, table: pa.Table, rewards_N: Tensor, groups_N: Tensor) -> Tensor:
        if "advantage" in table.column_names:
            return torch.from_numpy(table["advantage"].to_numpy().astype(np.float32))
        return credit.advantages(self.credit.advantage, rewards_N, groups_N, **self.credit.advantage_options)

    def _weights(
        self,
        table: pa.Table,
        values: dict[str, Tensor],
        mask_NT: Tensor,
        within_NT: Tensor,
        advantages_N: Tensor,
        keys_N2: Tensor,
    ) -> dict[str, Tensor]:
        """[N, T] of every method: as they were trained or scored, then those that the signals allow."""
        signals = {name.removeprefix("signal_"): value for name, value in values.items()}
        used = self.credit.method if self.run else None
        out: dict[str, Tensor] = {}
        if self.run:
            out["trained"] = _padded(table, "advantages", within_NT, torch.float32)
        for name in (name for name in table.column_names if name.startswith("weights_")):
            out[name.removeprefix("weights_")] = _padded(table, name, within_NT, torch.float32)
        for name in METHODS:
            options = self.credit.options if name == used else {}
            if name in out or name == "ibpo" or not credit.needs(name, **options) <= set(signals):
                continue  # ibpo: its rollouts are not in the file
            sharpening = 1.0 if name in SELF_NORMALISED else self.credit.sharpening
            out[name] = credit.weights(
                name,
                signals,
                mask_NT,
                sharpening=sharpening,
                advantages=advantages_N,
                groups=keys_N2[:, 0],
                **options,
            )
        return out

    def _rows(
        self, step: int, table: pa.Table, labels: list[Any], rewards_N: Tensor, advantages_N: Tensor
    ) -> dict[str, Any]:
        rows = table.num_rows

        def column(name: str, absent: Any) -> list[Any]:
            return table[name].to_pylist() if name in table.column_names else [absent] * rows

        return {
            "group": torch.tensor([self.groups[step, label] for label in labels]),
            "index": torch.tensor(table["index"].to_pylist()),
            "step": torch.full([rows], step),
            "version": torch.tensor(column("version", -1)),
            "digest": torch.tensor([self.digests[digest] for digest in column("digest", "")]),
            "finish": torch.tensor([finish == "length" for finish in column("finish", "")]),
            "reward": rewards_N,
            "advantage": advantages_N,
        }

    def _prompts(self, step: int, table: pa.Table, labels: list[Any], tokens_NT: Tensor, mask_NT: Tensor) -> None:
        texts = table["prompt"].to_pylist() if "prompt" in table.column_names else [None] * table.num_rows
        for row, (label, text) in enumerate(zip(labels, texts, strict=True)):
            if self.groups[step, label] == len(self.prompts):
                ids = tokens_NT[row, : int(mask_NT[row].int().argmax())].tolist() if text is None else []
                self.prompts.append((text, [self.ids[token] for token in ids]))


def _padded(table: pa.Table, name: str, within_NT: Tensor, dtype: torch.dtype) -> Tensor:
    flat = table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    if len(flat) != int(within_NT.sum()):
        raise ValueError(
            f"report: column {name!r} has {len(flat)} values, expected {int(within_NT.sum())}: one a token"
        )
    out_NT = torch.zeros(within_NT.shape, dtype=dtype)
    out_NT[within_NT] = torch.from_numpy(flat.copy()).to(dtype)
    return out_NT


def _concentrations(weights: dict[str, Tensor], mask_NT: Tensor) -> dict[str, Tensor]:
    out = {}
    for name, weights_NT in weights.items():
        figures = concentration(weights_NT.abs() * mask_NT, mask_NT)
        out[f"gini_{name}"], out[f"ratio_{name}"] = figures.gini, figures.ratio
        out[f"regime_{name}"] = 1 - figures.uniform.int() + figures.concentrated.int()
    return out


def _compact(name: str, values: Tensor) -> np.ndarray:
    """The smallest type that does: the page carries it all."""
    if values.dtype.is_floating_point:
        limit = float(np.finfo(np.float16).max)
        full = name in (*FULL, "reward", "advantage")
        return values.float().numpy() if full else values.clamp(-limit, limit).numpy().astype(np.float16)
    small = name in ("mask", "quadrant", "finish") or name.startswith("regime_")
    return values.numpy().astype(np.uint8 if small else np.int32)
