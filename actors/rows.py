"""Rows of datasets: files, folders and hub datasets through the `datasets` library, whole or as a stream.

Whole datasets are memory-mapped Arrow files: a row is read when it is asked for. A stream reads blocks of `data.buffer`
rows in the order of its files; block b of epoch e has a permutation of its own, from (seed, e, b). So the row of a
group is a pure function of (seed, group) for both, with no shuffle buffer whose contents a crash could lose.
"""

import atexit
import glob
import re
import string
import threading
from bisect import bisect_right
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from configs.schema import DatasetData

READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
RESERVED = ("prompts", "completions")  # what a reward receives from the run
BLOCKS = 2  # of a stream that are kept: a batch may lie on the border of two


@dataclass(frozen=True, slots=True)
class Row:
    """One question of a task."""

    prompt: Any  # text, or a list of {"role", "content"} messages; None where the record gives none
    columns: dict[str, Any]  # what the reward receives beside prompts and completions
    number: int = 0  # the row of the source, from 0
    epoch: int = 0  # how often its source was gone through before
    source: str = ""  # the part of a mixture


class Table:
    """Some rows of a dataset, made when they are asked for. `first` is the number of the dataset's first row."""

    def __init__(self, data: DatasetData, dataset: Any, numbers: np.ndarray, first: int = 0) -> None:
        self._data, self._dataset, self.numbers, self._first = data, dataset, numbers, first

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, i: int) -> Row:
        number = int(self.numbers[i])
        return _row(self._data, number, self._dataset[number - self._first])


def whole(data: DatasetData, split: str) -> Table:
    """The rows of a split that pass data.filter, in the order of their files. Raises ValueError."""
    dataset = _load(data, split)
    check_columns(data, dataset.column_names)
    table = Table(data, dataset, _kept(data, dataset, 0))
    if not len(table):
        raise ValueError(f"data.filter: no row of {data.path} passes {data.filter}" if data.filter else _empty(data))
    return table


class Stream:
    """Training rows that are read as they are needed, at most BLOCKS * data.buffer of them in memory.

    The first data.heldout rows are held out, unless data.heldout_split is given. To come to group g again after a
    crash, the source is read again from its beginning, without looking into the rows. Raises ValueError for a source
    that cannot be used; reading errors later are those of the library.
    """

    def __init__(self, data: DatasetData, seed: int) -> None:
        self._data, self._seed = data, seed
        self._dataset = _load(data, data.split)
        self._starts = [0]  # training rows before each block, and behind the last one that was read
        self._length: int | None = None  # training rows of an epoch, known once its end was seen
        self._last_heldout = -1
        self._blocks: dict[int, Table] = {}
        self._reader = self._read(self._dataset)
        self._next = 0  # the block that the reader gives next
        self._lock = threading.Lock()
        self._heldout = self._hold_out()
        self._rewind()
        self.row(0)
        atexit.register(self._close)  # Arrow's reading threads and the interpreter's end wait for one another

    def _hold_out(self) -> list[Row]:
        data, rows = self._data, list[Row]()
        for block in self._read(_load(data, data.heldout_split) if data.heldout_split else self._dataset):
            rows += [block[i] for i in range(min(len(block), data.heldout - len(rows)))]
            if len(rows) == data.heldout:
                break
        if len(rows) < data.heldout:
            raise ValueError(
                f"data.heldout: got {data.heldout}, expected at most the {len(rows)} rows of {data.path}"
                if rows
                else _empty(data)
            )
        if not data.heldout_split:
            self._last_heldout = rows[-1].number
        return rows

    def heldout(self) -> list[Row]:
        return self._heldout

    def row(self, g: int) -> Row:
        """The row of group `g`. Safe to call from several threads."""
        with self._lock:
            while self._length is None and g >= self._starts[-1]:
                self._advance()
            epoch, place = divmod(g, self._length) if self._length else (0, g)
            b = bisect_right(self._starts, place) - 1
            if b not in self._blocks and b < self._next:
                self._rewind()
            while b not in self._blocks:
                self._advance()
            block = self._blocks[b]
            order = _block_order(len(block), self._seed, epoch, b)
            return replace(block[order[place - self._starts[b]]], epoch=epoch)

    def _close(self) -> None:
        self._reader.close()

    def _rewind(self) -> None:
        self._reader, self._next = self._read(self._dataset), 0

    def _advance(self) -> None:
        block = next(self._reader, None)
        if block is None:
            if self._length is not None:
                raise RuntimeError(f"data.path: {self._data.path} has fewer rows than when it was read before")
            self._length = self._starts[-1]
            if not self._length:
                raise ValueError(
                    f"data.heldout: got {self._data.heldout}, expected less than the rows of {self._data.path} "
                    f"that pass data.filter: no row is left to train on"
                )
            return
        if self._next + 1 == len(self._starts):
            self._starts.append(self._starts[-1] + len(block))
        if len(block):
            self._blocks[self._next] = block
        if len(self._blocks) > BLOCKS:
            del self._blocks[next(iter(self._blocks))]
        self._next += 1

    def _read(self, dataset: Any) -> Generator[Table, None, None]:
        """Blocks of data.buffer rows of the source; those that are filtered or held out are left out."""
        from datasets import Dataset, DatasetInfo

        first = 0
        info = DatasetInfo(features=dataset.features)
        with _named(self._data):
            for table in dataset.with_format("arrow").iter(batch_size=self._data.buffer):
                if not first:
                    check_columns(self._data, table.column_names)
                block = Dataset(table, info=info, fingerprint="block")  # decodes as a whole dataset does
                numbers = _kept(self._data, block, first)
                yield Table(self._data, block, numbers[numbers > self._last_heldout], first)
                first += len(block)


@lru_cache(maxsize=4)
def _block_order(n: int, seed: int, epoch: int, block: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch, block]).permutation(n)


# Reading


def _load(data: DatasetData, split: str) -> Any:
    """A split, memory-mapped from the library's cache or as an iterable. Raises ValueError, in one line."""
    # pandas and pyarrow come with it: seconds that a run on generated data need not spend
    from datasets import disable_progress_bars, load_dataset

    source = _source(data)
    disable_progress_bars()
    with _named(data):
        return load_dataset(**source, name=data.name, revision=data.revision, split=split, streaming=data.streaming)


def _source(data: DatasetData) -> dict[str, Any]:
    """What to ask `load_dataset` for: files of one kind, a folder, or a hub id."""
    paths = [data.path] if isinstance(data.path, str) else data.path
    endings = sorted({Path(path).suffix for path in paths})
    if len(endings) == 1 and endings[0] in READERS:
        return {"path": READERS[endings[0]], "data_files": [file for path in paths for file in _files(path)]}
    if isinstance(data.path, str) and Path(data.path).is_dir():
        return {"path": data.path}
    if isinstance(data.path, str) and not Path(data.path).exists() and re.fullmatch(r"\w[\w.-]*/[\w.-]+", data.path):
        return {"path": data.path}
    raise ValueError(
        f"data.path: {data.path}: got ending {', '.join(map(repr, endings))}, expected one of: {', '.join(READERS)}; "
        f"a folder; or a hub id (owner/name)"
    )


def _files(path: str) -> list[str]:
    files = sorted(glob.glob(path, recursive=True)) if glob.has_magic(path) else [path]
    if not files or not all(Path(file).is_file() for file in files):
        raise ValueError(f"data.path: {path}: there is no such file (looked from {Path.cwd()})")
    for file in files:
        if Path(file).stat().st_size == 0:
            raise ValueError(f"data.path: {file}: the file is empty")
    return files


@contextmanager
def _named(data: DatasetData) -> Iterator[None]:
    """Errors of the library, in one line that names the data."""
    from datasets.exceptions import DatasetGenerationError

    try:
        yield
    except (DatasetGenerationError, ValueError, OSError) as error:
        cause = " ".join(str(error.__cause__ or error).split())
        if cause.startswith("data."):
            raise
        raise ValueError(f"data.path: {data.path}: has no rows, or cannot be read: {cause[:300]}") from error


def _empty(data: DatasetData) -> str:
    return f"data.path: {data.path}: has no rows"


# Columns


def check_columns(data: DatasetData, names: list[str]) -> None:
    """Raise ValueError where the settings name columns that the dataset lacks, or hand the reward one that it has."""
    wanted = {"data.columns": data.columns.values(), "data.filter": [data.columns.get(c, c) for c in data.filter]}
    for setting, columns in wanted.items():
        for column in columns:
            if column not in names:
                raise ValueError(
                    f"{setting}: {data.path} has no column {column!r}, expected one of: {', '.join(names)}"
                )
    renamed = _renamed(data, dict.fromkeys(names))
    for name in RESERVED:
        if name in renamed:
            raise ValueError(
                f"data.columns: a column of {data.path} is called {name!r}, which rewards receive from the run; "
                f"give it another name"
            )
    try:
        fields = _fields(data.prompt)
    except ValueError as error:
        raise ValueError(
            f"data.prompt: {data.prompt!r} is not a template: {error}; a literal brace is written twice"
        ) from None
    for field in fields:
        if field not in renamed:
            raise ValueError(f"data.prompt: unknown column {field!r}, expected one of: {', '.join(renamed)}")


def _renamed(data: DatasetData, record: dict[str, Any]) -> dict[str, Any]:
    """The record under its new names; a column that is in the way of a new name goes."""
    names = {column: new for new, column in data.columns.items()}
    return {
        names.get(column, column): value
        for column, value in record.items()
        if column in names or column not in data.columns
    }


def _fields(template: str) -> list[str]:
    """The columns that the template names. Raises ValueError."""
    return [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]


def _kept(data: DatasetData, dataset: Any, first: int) -> np.ndarray:
    """Numbers of the rows that pass data.filter."""
    import pyarrow as pa
    import pyarrow.compute as pc

    keep = np.ones(len(dataset), bool)
    for name, allowed in data.filter.items():
        column = dataset.data.column(data.columns.get(name, name))
        values = allowed if isinstance(allowed, list) else [allowed]
        try:
            allowed_set = pa.array(values, type=column.type)
            keep &= pc.call_function("is_in", [column], pc.SetLookupOptions(allowed_set)).to_numpy()
        except (pa.ArrowException, TypeError):
            raise ValueError(
                f"data.filter: {name}: got {values}, expected values of the column's type: {column.type}"
            ) from None
    return np.flatnonzero(keep) + first


def _row(data: DatasetData, number: int, record: dict[str, Any]) -> Row:
    record = _renamed(data, record)
    fields = _fields(data.prompt)
    prompt: Any = None
    if data.prompt in [f"{{{field}}}" for field in fields] and is_chat(record[fields[0]]):
        prompt = _without_none(record[fields[0]])
    elif all(record[field] is not None for field in fields):
        try:
            prompt = data.prompt.format(**record)
        except (ValueError, TypeError):  # a format that does not suit the value: told where the prompt is rendered
            prompt = None
    columns = {name: value for name, value in record.items() if name != "prompt"}
    if isinstance(columns.get("tools"), list):
        columns["tools"] = _without_none(columns["tools"])
    return Row(prompt, columns, number)


def is_chat(prompt: Any) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(prompt, list) and all(
        isinstance(turn, dict) and {"role", "content"} <= set(turn) for turn in prompt
    )


def _without_none(value: Any) -> Any:
    """Without the keys that a table fills in, so that all its rows have the same; chat templates look for keys."""
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None or key == "content"}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value
