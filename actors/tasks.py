"""Tasks: where prompts come from, and the columns that their reward needs.

A task has no position: the row of group g is a pure function of (seed, g), so a resumed run gets the same rows again.
Its training rows go round in epochs, each with an order of its own. What all tasks have in common:

    row(g)      the row of group g, with its source, epoch and number there
    heldout()   rows that are never trained on
"""

import hashlib
import json
import random
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from actors import glyphs
from actors.rows import Row, Stream, Table, is_chat, whole
from configs.schema import ArithmeticData, DatasetData, GlyphsData, MixtureData, TaskData
from credit.trajectory import Prompt

ARITHMETIC_PAIRS = 65_536  # at most so many pairs are listed: all of them up to two digits, a fixed sample beyond
HELDOUT_SHARE = 8  # one pair of eight is held out
SPLIT_SEED = 0  # the held-out rows of a dataset are the same for every run seed
CHECKED_ROWS = 2000  # training rows that are rendered before anything starts; the others as they are met
ROUND = 1000  # groups of a mixture in which each part has exactly its share


class Task:
    """Training rows that are listed, in a new order in each epoch, and held-out rows."""

    def __init__(self, train: "list[Row] | Table", heldout: list[Row], seed: int) -> None:
        self._train, self._heldout, self._seed = train, heldout, seed
        self._order = -1, np.empty(0, int)  # of the epoch that was asked for last

    def __len__(self) -> int:
        """Training rows: the groups of one epoch."""
        return len(self._train)

    def row(self, g: int) -> Row:
        """The row of group `g`; every epoch of len(self) groups has each row once, in an order of its own."""
        epoch, place = divmod(g, len(self._train))
        known, order = self._order
        if known != epoch:
            order = np.random.default_rng([self._seed, epoch]).permutation(len(self._train))
            self._order = epoch, order
        return replace(self._train[order[place]], epoch=epoch)

    def heldout(self) -> list[Row]:
        return self._heldout


class Mixture:
    """Several tasks. Of every ROUND groups each part has its share exactly, in an order from (seed, round), and the
    k-th group of a part has the part's own row k. Rows have the columns of all parts, None where their part has none,
    and `part`, the part's name.
    """

    def __init__(self, parts: "dict[str, Task | Stream]", weights: list[float], seed: int) -> None:
        self._names, self._tasks, self._seed = list(parts), list(parts.values()), seed
        # cut where the sums of the weights fall: rounding never adds up to more or fewer groups than there are
        cuts = np.round(np.cumsum([0.0, *weights]) / sum(weights) * ROUND).astype(int)
        self._shares = tuple(np.diff(cuts).tolist())
        columns = [column for task in self._tasks for column in task.row(0).columns]
        self._columns = dict.fromkeys([*columns, "part"])
        self._heldout = [self._of(part, row) for part, task in enumerate(self._tasks) for row in task.heldout()]

    def row(self, g: int) -> Row:
        number, place = divmod(g, ROUND)
        order = _round(self._shares, self._seed, number)
        part = order[place]
        return self._of(part, self._tasks[part].row(number * self._shares[part] + order[:place].count(part)))

    def _of(self, part: int, row: Row) -> Row:
        name = self._names[part]
        return replace(row, source=name, columns={**self._columns, **row.columns, "part": name})

    def heldout(self) -> list[Row]:
        return self._heldout


@lru_cache(maxsize=4)
def _round(shares: tuple[int, ...], seed: int, number: int) -> list[int]:
    return np.random.default_rng([seed, number]).permutation(np.repeat(range(len(shares)), shares)).tolist()


AnyTask = Task | Stream | Mixture


def make_task(data: TaskData, seed: int) -> AnyTask:
    """Raises ValueError for data that cannot be used: nothing has started yet then."""
    if isinstance(data, MixtureData):
        return _mixture(data, seed)
    if isinstance(data, GlyphsData):
        return _glyphs(data, seed)
    return _arithmetic(data, seed) if isinstance(data, ArithmeticData) else _dataset(data, seed)


def _mixture(data: MixtureData, seed: int) -> Mixture:
    total = sum(part.weight for part in data.parts)
    for name, part in data.named.items():
        if part.weight < total / 100:
            raise ValueError(f"data.parts: part {name} has weight {part.weight:g} of {total:g}, expected at least 1 %")
    parts: dict[str, Task | Stream] = {}
    for name, part in data.named.items():
        try:
            parts[name] = (
                _arithmetic(part.data, seed) if isinstance(part.data, ArithmeticData) else _dataset(part.data, seed)
            )
        except ValueError as error:
            raise ValueError(f"data.parts: part {name}: {error}") from error
        if "part" in parts[name].row(0).columns:
            raise ValueError(
                f"data.parts: part {name} has a column 'part', which is the part's name here; give it another name"
            )
    return Mixture(parts, [part.weight for part in data.parts], seed)


def _dataset(data: DatasetData, seed: int) -> Task | Stream:
    if data.streaming:
        return Stream(data, seed)
    table = whole(data, data.split)
    heldout = whole(data, data.heldout_split) if data.heldout_split else table
    own = heldout is table  # a row is to be left for training then
    if len(heldout) < data.heldout + own:
        expected = f"{'less than' if own else 'at most'} the {len(heldout)} rows of {data.path}"
        raise ValueError(
            f"data.heldout: got {data.heldout}, expected {expected}"
            + (": no row is left to train on" if own else f", split {data.heldout_split}")
        )
    order = np.random.default_rng(SPLIT_SEED).permutation(len(heldout))
    held = [heldout[i] for i in order[-data.heldout :]]
    if own:
        table.numbers = table.numbers[order[: -data.heldout]]
    return Task(table, held, seed)


# Arithmetic


def _arithmetic(data: ArithmeticData, seed: int) -> Task:
    train, heldout = arithmetic_pairs(data.digits)
    if len(heldout) < data.heldout:
        raise ValueError(
            f"data.heldout: got {data.heldout}, expected at most {len(heldout)}: all that are held out of "
            f"{len(train) + len(heldout)} questions with data.digits={data.digits}"
        )
    pairs = [*train, *heldout[: data.heldout]]
    rows = [_question(number, *pair, data.operation) for number, pair in enumerate(pairs)]
    return Task(rows[: len(train)], rows[len(train) :], seed)


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


def _question(number: int, a: int, b: int, operation: str) -> Row:
    return Row(f"{a}{operation}{b}?", {"answer": str(a + b if operation == "+" else a * b)}, number)


def _glyphs(data: GlyphsData, seed: int) -> Task:
    train, heldout = glyphs.descriptions()
    if len(heldout) < data.heldout:
        raise ValueError(f"data.heldout: got {data.heldout}, expected at most {len(heldout)}: all that are held out")
    rows = [Row(f"{text}:", {"description": text}, number) for number, text in enumerate([*train, *heldout])]
    return Task(rows[: len(train)], rows[len(train) :][: data.heldout], seed)


# Prompts


def render(row: Row, tokenizer: PreTrainedTokenizerBase, data: TaskData) -> list[int]:
    """Tokens [P] of the row's prompt: through the chat template where `data` and the tokenizer have one, plain
    otherwise. Raises ValueError for a row without a prompt, and for chat messages that no template can render."""
    data = _part(row, data)
    if row.prompt is None and isinstance(data, DatasetData):
        raise ValueError(
            f"data.prompt: row {row.number} of {data.path}: a column of {data.prompt!r} is empty, or has another type "
            f"than its format"
        )
    chat = isinstance(data, DatasetData) and data.chat and bool(tokenizer.chat_template)
    if not chat and is_chat(row.prompt):
        raise ValueError(
            f"data.prompt: row {row.number} is a list of chat messages, but "
            f"{'the tokenizer has no chat template' if not tokenizer.chat_template else 'data.chat is off'}; "
            f"give prompts as text"
        )
    if not chat:
        return tokenizer(row.prompt)["input_ids"]  # pyright: ignore[reportReturnType] one text gives one list
    assert isinstance(data, DatasetData)
    messages = row.prompt if is_chat(row.prompt) else [{"role": "user", "content": row.prompt}]
    if data.system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": data.system}, *messages]
    tools = row.columns.get("tools")
    own = row.columns.get("chat_template_kwargs") or {}  # as TRL's datasets have it
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tools=json.loads(tools) if isinstance(tools, str) else tools,
            add_generation_prompt=True,
            tokenize=False,
            **{**data.chat_kwargs, **own},
        )
    except (TemplateError, ValueError, TypeError) as error:
        raise ValueError(
            f"data: row {row.number} of {data.path} does not go through the chat template: {error}"
        ) from error
    return tokenizer(text, add_special_tokens=False)["input_ids"]  # pyright: ignore[reportArgumentType, reportReturnType]


def _part(row: Row, data: TaskData) -> ArithmeticData | GlyphsData | DatasetData:
    return data.named[row.columns["part"]].data if isinstance(data, MixtureData) else data


def make_prompt(row: Row, group: int, tokens: list[int], seeds: list[int]) -> Prompt:
    return Prompt(group=group, tokens=tokens, seeds=seeds, prompt=row.prompt, columns=row.columns)


def longest(row: Row, data: TaskData, limit: int) -> int:
    """Tokens that the row's prompt may have: data.max_prompt_tokens, and never more than `limit`."""
    part = _part(row, data)
    most = part.max_prompt_tokens if isinstance(part, DatasetData) else None
    return min(limit, most or limit)


def first_rows(task: AnyTask, count: int) -> Iterator[Row]:
    """The rows of the first `count` groups, each once."""
    yield from (row for row in map(task.row, range(count)) if not row.epoch)


def check_prompts(task: AnyTask, tokenizer: PreTrainedTokenizerBase, data: TaskData, limit: int) -> list[str]:
    """Render the held-out rows and the first CHECKED_ROWS training rows; what a user should know of them, line by line.

    `limit` is model.max_length - rollout.max_new_tokens. Held-out rows that are too long are taken out of the task;
    training rows are dropped when they are met. Raises ValueError where a prompt is too long and data.max_prompt_tokens
    is not set, where no prompt is left, and for a prompt that cannot be rendered.
    """
    for part in [part.data for part in data.parts] if isinstance(data, MixtureData) else [data]:
        if isinstance(part, DatasetData) and part.system and not (part.chat and tokenizer.chat_template):
            warnings.warn("data.system is not used: prompts do not go through a chat template", stacklevel=2)
    train, heldout = list(first_rows(task, CHECKED_ROWS)), task.heldout()
    notes = []
    for rows, what in ((train, "training"), (heldout, "held-out")):
        short = [row for row in rows if _fits(row, tokenizer, data, limit)]
        if not short:
            raise ValueError(f"data.max_prompt_tokens: none of the first {len(rows)} {what} prompts is short enough")
        if len(short) < len(rows):
            notes.append(
                f"{len(rows) - len(short)} of {len(rows)} {what} prompts that were looked at are longer than "
                f"data.max_prompt_tokens: dropped"
            )
        rows[:] = short
    return notes


def _fits(row: Row, tokenizer: PreTrainedTokenizerBase, data: TaskData, limit: int) -> bool:
    """Raises ValueError for a row that does not fit the model and that nobody said to drop."""
    length, part = len(render(row, tokenizer, data)), _part(row, data)
    where = f"row {row.number} of {part.path}" if isinstance(part, DatasetData) else repr(row.prompt)
    if length > limit and not (isinstance(part, DatasetData) and part.max_prompt_tokens):
        raise ValueError(
            f"data: the prompt of {where} has {length} tokens, expected at most {limit} = model.max_length - "
            f"rollout.max_new_tokens: shorten it, change one of the two, or drop such rows with data.max_prompt_tokens"
        )
    return length <= longest(row, data, limit)
