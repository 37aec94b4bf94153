"""What `accredit score` is given: trajectories of the user's in JSONL or Parquet. Read and checked.

Every problem is a ValueError that names the file, the line (JSONL, from 1) or row (Parquet, from 0), and the field.
Dimensions: T tokens of a sequence.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from actors.negatives import EMPTY, render_negative
from actors.tasks import Row, render
from configs.schema import DatasetData
from credit.adapter import Adapter
from credit.trajectory import Trajectory

FIELDS = {
    *("prompt", "completion", "tokens", "mask", "prompt_tokens", "completion_tokens", "reward", "group", "index"),
    *("logprobs", "finish", "version", "digest", "step", "advantages"),
}
"""Columns with a meaning; the others are there for the negative prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the trajectories have to fit."""

    tokenizer: PreTrainedTokenizerBase
    vocabulary: int
    context: int  # tokens
    adapter: Adapter
    fresh: bool  # no adapter was given: the base model is the policy
    chat: bool  # text prompts go through the chat template too
    negative: str | None  # None where no method needs a negative prompt


@dataclass(slots=True)
class Brought:
    """All trajectories, the rows of a group together, groups in their order of appearance."""

    trajectories: list[Trajectory]
    rows: list[int]  # where each of them was in the file, from 0
    labels: dict[int, int | str]  # group number -> group as the file names it
    negatives: dict[int, list[int]]  # group number -> tokens of its negative prompt
    warnings: list[str] = field(default_factory=list)


def read(path: Path, policy: Policy) -> Brought:
    """Trajectories of `path`. Sampler log-probs that are not given are NaN. Raises ValueError."""
    reader = _Reader(policy)
    for number, where, record in _records(path):
        try:
            reader.add(number, record)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    if not reader.rows:
        raise ValueError(f"{path}: has no rows")
    return reader.finish(path)


def _records(path: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Row number, place for messages, and the fields that are not null."""
    if path.suffix not in (".jsonl", ".parquet"):
        raise ValueError(f"{path}: got ending {path.suffix!r}, expected .jsonl or .parquet")
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file (looked from {Path.cwd()})")
    rows = _parquet(path) if path.suffix == ".parquet" else _lines(path)
    for number, (where, record) in enumerate(rows):
        yield number, where, {name: value for name, value in record.items() if value is not None}


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}: line {number}"
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where}: no JSON: {error}") from error
            if not isinstance(record, dict):
                raise ValueError(f"{where}: got {type(record).__name__}, expected an object with the row's fields")
            yield where, record


def _parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: cannot be read as Parquet: {' '.join(str(error).split())[:200]}") from error
    columns = [name for name in file.schema_arrow.names if not name.startswith("signal_")]
    number = 0
    for batch in file.iter_batches(batch_size=256, columns=columns):
        for record in batch.to_pylist():
            yield f"{path}: row {number}", record
            number += 1


class _Reader:
    """Rows to trajectories, one at a time."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.rows: list[int] = []
        self.trajectories: list[Trajectory] = []
        self.numbers: dict[Any, int] = {}  # group as given, or the bytes of its prompt -> number
        self.prompts: dict[int, bytes] = {}  # of the group's first row
        self.negatives: dict[int, list[int]] = {}
        self.sizes: Counter[int] = Counter()
        self.indices: set[tuple[int, int]] = set()
        self.given: dict[str, type] = {}  # how the first row says which group it is in, and which of the group it is
        self.elsewhere = self.without_logprobs = self.other_prompt = 0

    def add(self, number: int, record: dict[str, Any]) -> None:
        tokens, mask, source = _sequence(record, self.policy)
        self._check(tokens, mask, source)
        reward = _need(record, "reward")
        # float32 holds no more; a comparison with NaN is false
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) < 3e38:
            raise ValueError(f"reward: got {reward!r}, expected a finite number")
        prompt = tokens[: int(mask.argmax())]
        group = self._group(record, prompt.tobytes())
        index = self._index(record, group)
        self.without_logprobs += "logprobs" not in record
        if self.policy.negative is not None:
            self._negate(record, group, tokens, mask)
        started_as_base = self.policy.fresh and record.get("version") == 0
        self.elsewhere += record.get("digest", self.policy.adapter.digest) != self.policy.adapter.digest and (
            not started_as_base
        )
        self.rows.append(number)
        self.trajectories.append(
            Trajectory(
                group=group,
                index=index,
                tokens=tokens,
                mask=mask,
                logprobs=_logprobs(record, mask),
                text="",
                finish=str(record.get("finish", "stop")),
                version=self.policy.adapter.version,
                digest=self.policy.adapter.digest,
                reward=float(reward),
            )
        )

    def finish(self, path: Path) -> Brought:
        place = {group: i for i, group in enumerate(self.sizes)}
        order = sorted(range(len(self.rows)), key=lambda i: (place[self.trajectories[i].group], i))
        labels = {number: key for key, number in self.numbers.items() if not isinstance(key, bytes)}
        warnings = [
            (sum(size == 1 for size in self.sizes.values()), "groups of one: their advantage is 0"),
            (self.elsewhere, "rows were sampled under another adapter than the one given, by their digest"),
            (self.without_logprobs, "rows without logprobs: the sampler's log-probs are taken equal to logp"),
            (
                self.other_prompt,
                "rows whose prompt, rendered, has other tokens than those given: their negative prompt has another "
                "form than their prompt (--chat and a prompt of messages change the form)",
            ),
        ]
        return Brought(
            trajectories=[self.trajectories[i] for i in order],
            rows=[self.rows[i] for i in order],
            labels={group: labels.get(group, group) for group in self.sizes},
            negatives=self.negatives,
            warnings=[f"{path}: {count} {text}" for count, text in warnings if count],
        )

    def _check(self, tokens: np.ndarray, mask: np.ndarray, source: str) -> None:
        if not mask.any():
            raise ValueError(f"{source}: the completion has zero tokens, expected at least one")
        if mask[0]:
            raise ValueError(f"{source}: the first token is the policy's, expected a prompt of one token or more")
        outside = (tokens < 0) | (tokens >= self.policy.vocabulary)
        if outside.any():
            raise ValueError(
                f"{source}: got token {int(tokens[outside.argmax()])} at position {int(outside.argmax())}, expected "
                f"0 to {self.policy.vocabulary - 1}: the model's vocabulary"
            )
        self._fits(source, len(tokens))

    def _fits(self, source: str, length: int) -> None:
        if length > self.policy.context:
            raise ValueError(
                f"{source}: got {length} tokens, expected at most {self.policy.context}: the model's context"
            )

    def _form(self, record: dict[str, Any], name: str, kind: type | None) -> None:
        """A field is in every row or in none, and of one type."""
        first = self.given.setdefault(name, kind or type(None))
        if first is not (kind or type(None)):
            raise ValueError(
                f"{name}: got {record.get(name)!r}, expected {'nothing' if first is type(None) else first.__name__} "
                "as in the first row"
            )

    def _group(self, record: dict[str, Any], prompt: bytes) -> int:
        key = record.get("group")
        if type(key) not in (int, str, type(None)) or (isinstance(key, int) and not 0 <= key < 2**63):
            raise ValueError(f"group: got {key!r}, expected a text or an integer of 0 or more")
        self._form(record, "group", None if key is None else type(key))
        number = key if isinstance(key, int) else self.numbers.get(prompt if key is None else key, len(self.numbers))
        self.numbers[prompt if key is None else key] = number
        first = self.prompts.setdefault(number, prompt)
        if self.policy.negative is not None and first != prompt:
            raise ValueError(f"prompt: another than in the first row of group {key!r}: they have one negative prompt")
        self.sizes[number] += 1
        return number

    def _index(self, record: dict[str, Any], group: int) -> int:
        index = record.get("index")
        if index is not None and not (type(index) is int and 0 <= index < 2**63):
            raise ValueError(f"index: got {index!r}, expected an integer of 0 or more")
        self._form(record, "index", None if index is None else int)
        index = self.sizes[group] - 1 if index is None else index
        if (group, index) in self.indices:
            raise ValueError(f"index: {index} is there twice in group {record.get('group', group)!r}")
        self.indices.add((group, index))
        return index

    def _negate(self, record: dict[str, Any], group: int, tokens: np.ndarray, mask: np.ndarray) -> None:
        """Render the group's negative prompt at its first row, while its text is at hand."""
        assert self.policy.negative is not None
        start = int(mask.argmax())
        row = _row(record, default="" if self.policy.negative == EMPTY else None)
        data = _data(row.prompt, self.policy)
        if "prompt" in record and ("tokens" in record or "prompt_tokens" in record):
            self.other_prompt += render(row, self.policy.tokenizer, data) != tokens[:start].tolist()
        if group not in self.negatives:
            self.negatives[group] = render_negative(row, self.policy.tokenizer, data, self.policy.negative)
        self._fits("negative prompt and completion", len(self.negatives[group]) + len(tokens) - start)


def _sequence(record: dict[str, Any], policy: Policy) -> tuple[np.ndarray, np.ndarray, str]:
    """Tokens [T], mask [T], and the field that they come from."""
    if "tokens" in record:
        tokens, mask = _integers(record, "tokens"), np.asarray(_need(record, "mask", " beside tokens"))
        if mask.shape != tokens.shape or not np.isin(mask, (0, 1)).all():
            raise ValueError(
                f"mask: got {mask.size} values, expected {len(tokens)} of true or false, one for each token"
            )
        return tokens, mask.astype(bool), "tokens" if mask.any() else "mask"
    if "prompt_tokens" in record or "completion_tokens" in record:
        prompt, completion = _integers(record, "prompt_tokens"), _integers(record, "completion_tokens")
        source = "completion_tokens"
    else:
        row, source = _row(record), "completion"
        text = _need(record, "completion", ", or tokens and mask, or prompt_tokens and completion_tokens")
        if not isinstance(text, str):
            raise ValueError(f"completion: got {type(text).__name__}, expected text")
        prompt = np.array(render(row, policy.tokenizer, _data(row.prompt, policy)), np.int64)
        ids: Any = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
        completion = np.array(ids + [policy.tokenizer.eos_token_id] * (record.get("finish") == "stop"), np.int64)
    if not len(prompt):
        raise ValueError("prompt: has zero tokens, expected at least one")
    tokens = np.concatenate([prompt, completion])
    return tokens, np.arange(len(tokens)) >= len(prompt), source


def _need(record: dict[str, Any], name: str, otherwise: str = "") -> Any:
    if name not in record:
        raise ValueError(
            f"{name}: missing, expected{otherwise or ' in every row'}; got {', '.join(record) or 'nothing'}"
        )
    return record[name]


def _integers(record: dict[str, Any], name: str) -> np.ndarray:
    values = _need(record, name, " beside prompt_tokens or completion_tokens")
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise ValueError(f"{name}: got {str(values)[:60]}, expected a list of token ids")
    try:
        return np.array(values, np.int64)
    except OverflowError:
        raise ValueError(f"{name}: got {max(values, key=abs)}, expected token ids") from None


def _row(record: dict[str, Any], default: str | None = None) -> Row:
    prompt = record.get("prompt", default)
    if prompt is None:
        raise ValueError(
            f"prompt: missing, expected text or chat messages (or token ids, where no negative prompt is rendered); "
            f"got {', '.join(record) or 'nothing'}"
        )
    chat = isinstance(prompt, list) and prompt
    if not isinstance(prompt, str) and not (
        chat and all(isinstance(turn, dict) and {"role", "content"} <= set(turn) for turn in prompt)
    ):
        raise ValueError(f"prompt: got {str(prompt)[:60]!r}, expected text or a list of {{role, content}} messages")
    return Row(prompt, {name: value for name, value in record.items() if name not in FIELDS})


def _data(prompt: Any, policy: Policy) -> DatasetData:
    return DatasetData(task="dataset", path="", chat=policy.chat or isinstance(prompt, list))


def _logprobs(record: dict[str, Any], mask: np.ndarray) -> np.ndarray:
    """[T] float32, from T values or from those of the policy's tokens; NaN on these where the row has none."""
    out = np.zeros(len(mask), np.float32)
    values = record.get("logprobs")
    if values is None:
        out[mask] = np.nan
        return out
    try:
        values = np.array(values, np.float32)
    except (TypeError, ValueError):
        raise ValueError(f"logprobs: got {str(values)[:60]}, expected a list of numbers") from None
    if values.shape not in ((len(mask),), (int(mask.sum()),)):
        raise ValueError(
            f"logprobs: got {values.size} values, expected {len(mask)}, one for each token, or {int(mask.sum())}, one "
            "for each of the completion's"
        )
    out[mask] = values[mask] if len(values) == len(mask) else values
    if not np.isfinite(out).all():
        raise ValueError("logprobs: NaN or infinite, expected finite values")
    return out
