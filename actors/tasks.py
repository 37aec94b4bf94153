"""Tasks: where prompts come from, and the columns that their reward needs.

A task has no position: group number g names its row by (seed, epoch g // n, place g % n in that epoch's permutation),
so a resumed run asks for the same groups again.
"""

import hashlib
import random
import string
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from configs.schema import ArithmeticData, FileData
from credit.trajectory import Prompt

ARITHMETIC_PAIRS = 65_536  # at most so many pairs are listed: all of them up to two digits, a fixed sample beyond
HELDOUT_SHARE = 8  # one pair of eight is held out
CHECKED_PROMPTS = 10_000  # `check_prompts` renders the longest ones of a larger file
SPLIT_SEED = 0  # the held-out rows of a file are the same for every run seed


@dataclass(frozen=True, slots=True)
class Row:
    """One question of a task."""

    prompt: Any  # text, or a list of {"role", "content"} messages
    columns: dict[str, Any]  # what the reward receives beside prompts and completions
    number: int = 0  # the row of the file, from 0


class Task:
    """Training rows, addressed by group number, and held-out rows."""

    def __init__(self, train: list[Row], heldout: list[Row], seed: int) -> None:
        self._train, self._heldout, self._seed = train, heldout, seed

    def __len__(self) -> int:
        """Training rows: the groups of one epoch."""
        return len(self._train)

    def row(self, g: int) -> Row:
        """The row of group `g`; every epoch of len(self) groups has each row once, in an order of its own."""
        epoch, place = divmod(g, len(self._train))
        return self._train[_permutation(len(self._train), self._seed, epoch)[place]]

    def heldout(self) -> list[Row]:
        return self._heldout


@lru_cache(maxsize=4)
def _permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(n)


def make_task(data: ArithmeticData | FileData, seed: int) -> Task:
    """Raises ValueError for data that cannot be used: nothing has started yet then."""
    if isinstance(data, ArithmeticData):
        train, heldout = arithmetic_pairs(data.digits)
        if len(heldout) < data.heldout:
            raise ValueError(
                f"data.heldout: got {data.heldout}, expected at most {len(heldout)}: all that are held out of "
                f"{len(train) + len(heldout)} questions with data.digits={data.digits}"
            )
        return Task([_question(*pair) for pair in train], [_question(*pair) for pair in heldout[: data.heldout]], seed)
    rows = _file_rows(data)
    if len(rows) <= data.heldout:
        raise ValueError(
            f"data.heldout: got {data.heldout}, expected less than the {len(rows)} rows of {data.path}: "
            f"no row is left to train on"
        )
    random.Random(SPLIT_SEED).shuffle(rows)
    return Task(rows[: -data.heldout], rows[-data.heldout :], seed)


# Arithmetic


def arithmetic_pairs(digits: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Pairs of operands with exactly `digits` digits: (training, held out).

    A hash of the unordered pair decides, so the two sides are disjoint for any number of digits, seed and sample, and
    48+37 never gives 37+48 away.
    """
    low, span = 10 ** (digits - 1), 9 * 10 ** (digits - 1)
    numbers = range(span * span)
    chosen = numbers if len(numbers) <= ARITHMETIC_PAIRS else random.Random(digits).sample(numbers, ARITHMETIC_PAIRS)
    train, heldout = [], []
    for number in chosen:
        a, b = low + number // span, low + number % span
        (heldout if is_heldout(a, b) else train).append((a, b))
    random.Random(SPLIT_SEED).shuffle(heldout)  # the first few are then no special ones
    return train, heldout


def is_heldout(a: int, b: int) -> bool:
    digest = hashlib.blake2b(f"{min(a, b)}+{max(a, b)}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELDOUT_SHARE == 0


def _question(a: int, b: int) -> Row:
    return Row(prompt=f"{a}+{b}?", columns={"answer": str(a + b)})


# Files


def _file_rows(data: FileData) -> list[Row]:
    records = _read(Path(data.path))
    names = {column: new for new, column in data.columns.items()}
    missing = [column for column in names if column not in records[0]]
    if missing:
        raise ValueError(
            f"data.columns: {data.path} has no column {missing[0]!r}, expected one of: {', '.join(records[0])}"
        )
    taken = set(data.columns)
    renamed = [
        {names.get(column, column): value for column, value in record.items() if column in names or column not in taken}
        for record in records
    ]
    for name in ("prompts", "completions"):
        if name in renamed[0]:
            raise ValueError(
                f"data.columns: a column of {data.path} is called {name!r}, which rewards receive from the run; "
                f"give it another name"
            )
    fields = _fields(data.prompt, renamed[0])
    return [_row(data, fields, number, record) for number, record in enumerate(renamed)]


def _read(path: Path) -> list[dict[str, Any]]:
    # pandas and pyarrow come with it: seconds that a run on generated data need not spend
    from datasets import Dataset, disable_progress_bars
    from datasets.exceptions import DatasetGenerationError

    readers = {
        ".jsonl": Dataset.from_json,
        ".json": Dataset.from_json,
        ".parquet": Dataset.from_parquet,
        ".csv": Dataset.from_csv,
    }
    if path.suffix not in readers:
        raise ValueError(f"data.path: {path}: got ending {path.suffix!r}, expected one of: {', '.join(readers)}")
    if not path.is_file():
        raise ValueError(f"data.path: {path}: there is no such file (looked from {Path.cwd()})")
    if path.stat().st_size == 0:
        raise ValueError(f"data.path: {path}: the file is empty")
    disable_progress_bars()
    with tempfile.TemporaryDirectory() as cache:
        try:
            dataset: Any = readers[path.suffix](str(path), cache_dir=cache, keep_in_memory=True)
            records = dataset.to_list()
        except (DatasetGenerationError, ValueError, OSError) as error:
            cause = " ".join(str(error.__cause__ or error).split())
            raise ValueError(
                f"data.path: {path}: has no rows, or cannot be read as {path.suffix[1:]}: {cause[:300]}"
            ) from error
    if not records:
        raise ValueError(f"data.path: {path}: has no rows")
    return records


def _fields(template: str, record: dict[str, Any]) -> list[str]:
    """The columns that the template names."""
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
    except ValueError as error:
        raise ValueError(
            f"data.prompt: {template!r} is not a template: {error}; a literal brace is written twice"
        ) from None
    for field in fields:
        if field not in record:
            raise ValueError(f"data.prompt: unknown column {field!r}, expected one of: {', '.join(record)}")
    return fields


def _row(data: FileData, fields: list[str], number: int, record: dict[str, Any]) -> Row:
    for field in fields:
        if record[field] is None:
            raise ValueError(f"data.path: row {number} of {data.path}: column {field!r} is empty")
    prompt: Any = record[fields[0]] if data.prompt in [f"{{{field}}}" for field in fields] else None
    if not _is_chat(prompt):
        prompt = data.prompt.format(**record)
    return Row(prompt, {name: value for name, value in record.items() if name != "prompt"}, number)


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(
        isinstance(turn, dict) and {"role", "content"} <= set(turn) for turn in prompt
    )


# Prompts


def render(row: Row, tokenizer: PreTrainedTokenizerBase, data: ArithmeticData | FileData) -> list[int]:
    """Tokens [P] of the row's prompt: through the chat template where `data` and the tokenizer have one, plain
    otherwise. Raises ValueError for chat messages that no template can render."""
    chat = isinstance(data, FileData) and data.chat and bool(tokenizer.chat_template)
    if not chat and _is_chat(row.prompt):
        raise ValueError(
            f"data.prompt: row {row.number} is a list of chat messages, but "
            f"{'the tokenizer has no chat template' if not tokenizer.chat_template else 'data.chat is off'}; "
            f"give prompts as text"
        )
    if not chat:
        return tokenizer(row.prompt)["input_ids"]  # pyright: ignore[reportReturnType] one text gives one list
    assert isinstance(data, FileData)
    messages = row.prompt if _is_chat(row.prompt) else [{"role": "user", "content": row.prompt}]
    if data.system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": data.system}, *messages]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]  # pyright: ignore[reportArgumentType, reportReturnType]


def make_prompt(row: Row, group: int, tokens: list[int], seeds: list[int]) -> Prompt:
    return Prompt(group=group, tokens=tokens, seeds=seeds, prompt=row.prompt, columns=row.columns)


def check_prompts(task: Task, tokenizer: PreTrainedTokenizerBase, data: ArithmeticData | FileData, limit: int) -> None:
    """Raise ValueError for a prompt of more than `limit` tokens (model.max_length - rollout.max_new_tokens), training
    and held-out rows alike."""
    if isinstance(data, FileData) and data.system and not (data.chat and tokenizer.chat_template):
        warnings.warn("data.system is not used: prompts do not go through a chat template", stacklevel=2)
    rows = sorted(_rows(task), key=lambda row: -len(str(row.prompt)))
    for row in rows[:CHECKED_PROMPTS] if isinstance(data, FileData) else rows[:1]:
        length = len(render(row, tokenizer, data))
        if length > limit:
            where = f"row {row.number} of {data.path}" if isinstance(data, FileData) else repr(row.prompt)
            raise ValueError(
                f"data: the prompt of {where} has {length} tokens, expected at most {limit} = model.max_length - "
                f"rollout.max_new_tokens: shorten it, or change one of the two"
            )


def _rows(task: Task) -> Iterator[Row]:
    yield from (task.row(g) for g in range(len(task)))
    yield from task.heldout()
