"""Datasets as sources of rows: files, folders, hub ids; filters, tools; streams; mixtures."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from actors import rows as rows_module
from actors.rows import Row, Stream
from actors.tasks import Mixture, Task, check_prompts, longest, make_task, render
from configs.schema import DatasetData, MixtureData


@pytest.fixture
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model)


def lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def questions(first: int, last: int) -> list[dict[str, Any]]:
    return [{"question": f"q{i}", "answer": str(i), "level": i % 3} for i in range(first, last)]


def dataset(path: Any, **more: Any) -> DatasetData:
    wanted = {"task": "dataset", "path": path, "prompt": "{question}", "heldout": 2}
    return DatasetData.model_validate(wanted | more)


def epoch_of(task: Any, n: int, epoch: int = 0) -> list[Row]:
    return [task.row(g) for g in range(epoch * n, (epoch + 1) * n)]


def prompts(rows: list[Row]) -> list[str]:
    return sorted(row.prompt for row in rows)


# Sources


@pytest.mark.parametrize("streaming", [False, True])
def test_globs_and_lists_of_files_are_one_dataset(tmp_path: Path, streaming: bool):
    for i in range(3):
        lines(tmp_path / f"part-{i}.jsonl", questions(4 * i, 4 * i + 4))
    whole = {f"q{i}" for i in range(12)}
    for path in (str(tmp_path / "*.jsonl"), [str(tmp_path / f"part-{i}.jsonl") for i in range(3)]):
        task = make_task(dataset(path, streaming=streaming), 0)
        assert {row.prompt for row in [*epoch_of(task, 10), *task.heldout()]} == whole


@pytest.mark.parametrize("streaming", [False, True])
def test_a_folder_has_the_splits_that_its_files_are_named_after(tmp_path: Path, streaming: bool):
    lines(tmp_path / "train.jsonl", questions(0, 8))
    lines(tmp_path / "test.jsonl", questions(100, 104))
    task = make_task(dataset(str(tmp_path), heldout_split="test", streaming=streaming, buffer=3), 0)
    assert prompts(epoch_of(task, 8)) == [f"q{i}" for i in range(8)]
    assert {row.prompt for row in task.heldout()} < {f"q{i}" for i in range(100, 104)}
    with pytest.raises(ValueError, match=r"data\.heldout: got 9, expected at most the 4 rows"):
        make_task(dataset(str(tmp_path), heldout_split="test", streaming=streaming, heldout=9), 0)
    with pytest.raises(ValueError, match=r"cannot be read: (Unknown|Bad) split"):
        make_task(dataset(str(tmp_path), split="dev", streaming=streaming), 0)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_hub_that_cannot_be_reached_is_one_line(streaming: bool):
    with pytest.raises(ValueError, match=r"someone/something: .*cannot be read: Couldn't reach") as refusal:
        make_task(dataset("someone/something", streaming=streaming), 0)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_filter_keeps_the_rows_with_the_values_that_it_names(tmp_path: Path, streaming: bool):
    path = str(lines(tmp_path / "a.jsonl", questions(0, 30)))

    def kept(n: int, **wanted: Any) -> list[str]:
        task = make_task(dataset(path, streaming=streaming, buffer=4, heldout=1, filter=wanted), 0)
        return prompts([*epoch_of(task, n - 1), *task.heldout()])

    assert kept(10, level=1) == sorted(f"q{i}" for i in range(1, 30, 3))
    assert kept(5, level=[0, 2], answer=["0", "1", "2", "3", "5", "6"]) == ["q0", "q2", "q3", "q5", "q6"]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_filter_sees_the_new_names(tmp_path: Path, streaming: bool):
    path = str(lines(tmp_path / "a.jsonl", questions(0, 9)))
    more = {"streaming": streaming, "columns": {"hard": "level"}, "heldout": 1, "filter": {"hard": 2}}
    task = make_task(dataset(path, **more), 0)
    assert [row.columns["hard"] for row in [*epoch_of(task, 2), *task.heldout()]] == [2, 2, 2]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"grade": 1}, "data.filter: .* has no column 'grade', expected one of: question, answer, level"),
        ({"level": "hard"}, r"data.filter: level: got \['hard'\], expected values of the column's type: int64"),
        ({"level": 7}, "data.filter: no row of|has no rows"),
    ],
)
def test_a_filter_that_cannot_be_used_is_refused(tmp_path: Path, wanted: dict, message: str, streaming: bool):
    path = str(lines(tmp_path / "a.jsonl", questions(0, 9)))
    with pytest.raises(ValueError, match=message):
        make_task(dataset(path, filter=wanted, streaming=streaming), 0)


def test_a_large_file_is_not_read_row_by_row_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made: list[int] = []
    true_row = rows_module._row

    def counted(data: DatasetData, number: int, record: dict[str, Any]) -> Row:
        made.append(number)
        return true_row(data, number, record)

    monkeypatch.setattr(rows_module, "_row", counted)
    path = str(lines(tmp_path / "a.jsonl", questions(0, 5000)))
    make_task(dataset(path), 0)
    assert len(made) == 2  # those that are held out
    make_task(dataset(path, streaming=True, buffer=100), 0)
    assert len(made) == 2 + 3


# Chat


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "number"}}}}
OTHER = {"type": "function", "function": {"name": "now", "parameters": {"zone": {"type": "string"}}}}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("as_text", [False, True])
def test_a_dataset_as_trl_has_it_works_unchanged(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, as_text: bool, streaming: bool
):
    """Messages, further columns for the reward, tools of different shapes, arguments of the template."""
    records = [
        {
            "prompt": [{"role": "user", "content": f"{i}+{i}"}],
            "answer": str(2 * i),
            "tools": json.dumps([TOOL]) if as_text else [TOOL if i % 2 else OTHER],
            "chat_template_kwargs": {"shout": i % 2 == 0},
        }
        for i in range(6)
    ]
    data = dataset(str(lines(tmp_path / "a.jsonl", records)), prompt="{prompt}", streaming=streaming)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{{ m.name }}{% endfor %}{% if shout %}!{% endif %}"
        "{% for tool in tools %}{{ tool.function.parameters | tojson }}{% endfor %}"
    )
    for row in epoch_of(make_task(data, 0), 4):
        i = row.number
        parameters = TOOL if as_text or i % 2 else OTHER
        text = f"{i}+{i}{'!' * (i % 2 == 0)}{json.dumps(parameters['function']['parameters'])}"
        assert row.columns["answer"] == str(2 * i)
        assert render(row, tokenizer, data) == tokenizer(text)["input_ids"]


def test_arguments_go_to_the_chat_template(tokenizer: PreTrainedTokenizerBase):
    tokenizer.chat_template = "{{ messages[0].content }}{% if not enable_thinking %}:{% endif %}"
    for thinking, text in ((False, "1+1:"), (True, "1+1")):
        data = dataset("rows.jsonl", chat_kwargs={"enable_thinking": thinking})
        assert tokenizer.decode(render(Row("1+1", {}), tokenizer, data)) == text


def test_what_the_chat_template_refuses_names_its_row(tokenizer: PreTrainedTokenizerBase):
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match=r"row 7 of rows\.jsonl does not go through the chat template: roles must"):
        render(Row("1+1", {}, 7), tokenizer, dataset("rows.jsonl"))


@pytest.mark.parametrize(("record", "prompt"), [({"x": None}, "{x}"), ({"x": "text"}, "{x:d}")])
def test_a_row_that_makes_no_prompt_is_named_when_it_is_rendered(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, record: dict[str, Any], prompt: str
):
    data = dataset(str(lines(tmp_path / "a.jsonl", [{"x": "1"}, record, {"x": "3"}])), prompt=prompt, heldout=1)
    task = make_task(data, 0)
    (row,) = [row for row in [*epoch_of(task, 2), *task.heldout()] if row.number == 1]
    with pytest.raises(ValueError, match=r"row 1 of .*: a column of '\{x(:d)?\}' is empty, or has another type"):
        render(row, tokenizer, data)


# Prompts that are too long


@pytest.mark.parametrize("streaming", [False, True])
def test_long_prompts_are_counted_at_the_start_and_leave_the_held_out_rows(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, streaming: bool
):
    rows = [{"question": "1" * (20 if i % 4 > 1 else 40)} for i in range(40)]
    data = dataset(str(lines(tmp_path / "a.jsonl", rows)), heldout=8, max_prompt_tokens=25, streaming=streaming)
    task = make_task(data, 0)
    long = sum(len(row.prompt) == 40 for row in task.heldout())
    assert long > 0
    notes = check_prompts(task, tokenizer, data, 100)
    assert notes == [
        f"{20 - long} of 32 training prompts that were looked at are longer than data.max_prompt_tokens: dropped",
        f"{long} of 8 held-out prompts that were looked at are longer than data.max_prompt_tokens: dropped",
    ]
    assert [len(row.prompt) for row in task.heldout()] == [20] * (8 - long)
    assert len(epoch_of(task, 32)) == 32  # the rows of the groups stay as they are
    assert [longest(task.row(0), data, limit) for limit in (100, 10)] == [25, 10]


def test_no_prompt_that_is_short_enough_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerBase):
    data = dataset(str(lines(tmp_path / "a.jsonl", questions(0, 9))), max_prompt_tokens=1)
    with pytest.raises(ValueError, match="none of the first 7 training prompts is short enough"):
        check_prompts(make_task(data, 0), tokenizer, data, 100)


# Streams


@settings(deadline=None, max_examples=30)
@given(
    n=st.integers(3, 40),
    files=st.integers(1, 3),
    heldout=st.integers(1, 2),
    buffer=st.integers(1, 50),
    level=st.sampled_from([None, 0, [0, 1]]),
    seed=st.integers(0, 99),
    jumps=st.lists(st.integers(0, 100), max_size=8),
)
def test_a_stream_has_each_row_once_in_an_epoch_and_comes_back_to_any_group(
    tmp_path_factory: pytest.TempPathFactory,
    n: int,
    files: int,
    heldout: int,
    buffer: int,
    level: Any,
    seed: int,
    jumps: Any,
):
    folder = tmp_path_factory.mktemp("stream")
    cuts = [n * i // files for i in range(files + 1)]
    paths = [
        str(lines(folder / f"{i}.jsonl", questions(cuts[i], cuts[i + 1])))
        for i in range(files)
        if cuts[i] < cuts[i + 1]
    ]
    passing = [i for i in range(n) if level is None or i % 3 in ([level] if level == 0 else level)]
    data = dataset(
        paths, streaming=True, heldout=heldout, buffer=buffer, filter={} if level is None else {"level": level}
    )
    if len(passing) <= heldout:
        with pytest.raises(ValueError, match=r"data\.heldout"):
            make_task(data, seed)
        return
    stream = make_task(data, seed)
    assert isinstance(stream, Stream)
    trained = passing[heldout:]
    size = len(trained)
    drawn = [stream.row(g) for g in range(3 * size)]
    assert [row.number for row in stream.heldout()] == passing[:heldout]
    assert [row.prompt for row in drawn] == [f"q{row.number}" for row in drawn]
    assert [row.epoch for row in drawn] == [g // size for g in range(3 * size)]
    for epoch in range(3):
        assert sorted(row.number for row in drawn[epoch * size : (epoch + 1) * size]) == trained
    again = make_task(data, seed)
    for g in jumps:
        assert stream.row(g % (3 * size)) == again.row(g % (3 * size)) == drawn[g % (3 * size)]
    assert len(stream._blocks) <= 2


def test_a_stream_is_shuffled_anew_in_each_epoch_within_its_blocks(tmp_path: Path):
    path = str(lines(tmp_path / "a.jsonl", questions(0, 102)))
    numbers = {
        seed: [
            [row.number for row in epoch_of(make_task(dataset(path, streaming=True, buffer=51), seed), 100, e)]
            for e in (0, 1)
        ]
        for seed in (0, 1)
    }
    orders = [order for pair in numbers.values() for order in pair]
    assert len({tuple(order) for order in orders}) == 4
    for order in orders:
        assert sorted(order[:49]) == list(range(2, 51))  # the first block, less the two that are held out
        assert order != sorted(order)


def test_a_stream_decodes_rows_as_a_whole_dataset_does(tmp_path: Path):
    """Objects of different shapes in a list are JSON text inside of Arrow."""
    records = [{"question": str(i), "tests": [{"x": {"a": i}} if i % 2 else {"x": {"b": [i]}}]} for i in range(9)]
    path = str(lines(tmp_path / "a.jsonl", records))
    for streaming in (False, True):
        task = make_task(dataset(path, streaming=streaming), 0)
        for row in epoch_of(task, 7):
            assert row.columns["tests"] == records[row.number]["tests"]


def test_a_file_that_shrinks_under_a_stream_is_an_error_and_no_endless_search(tmp_path: Path):
    path = lines(tmp_path / "a.jsonl", questions(0, 40))
    stream = make_task(dataset(str(path), streaming=True, buffer=5), 0)
    for g in range(40):
        stream.row(g)
    lines(path, questions(0, 10))
    with pytest.raises(RuntimeError, match="has fewer rows than when it was read before"):
        for g in range(40, 160):
            stream.row(g)


# Mixtures


def mixture(tmp_path: Path, weights: dict[str, float], **more: Any) -> MixtureData:
    parts = []
    for place, (name, weight) in enumerate(weights.items()):
        records = [{"question": f"{name}{i}", name: i} for i in range(10 + 3 * place)]
        data = {
            "task": "dataset",
            "path": str(lines(tmp_path / f"{name}.jsonl", records)),
            "prompt": "{question}",
            "heldout": 2,
        }
        parts.append({"name": name, "weight": weight, "data": data | more})
    return MixtureData.model_validate({"task": "mixture", "parts": parts})


@settings(deadline=None, max_examples=20)
@given(
    weights=st.lists(st.floats(0.1, 1), min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 30), min_size=4, max_size=4),
    seed=st.integers(0, 2**32),
    start=st.integers(0, 5000),
)
def test_each_part_of_a_mixture_gets_its_share_and_its_own_epochs(
    weights: list[float], sizes: list[int], seed: int, start: int
):
    parts: dict[str, Any] = {
        str(i): Task([Row(f"{i}/{j}", {}, j) for j in range(sizes[i])], [], seed) for i in range(len(weights))
    }
    drawn = [Mixture(parts, weights, seed).row(g) for g in range(2000)]
    counts = Counter(row.source for row in drawn[:1000])
    assert counts == Counter(row.source for row in drawn[1000:])
    for i, weight in enumerate(weights):
        assert abs(counts[str(i)] - 1000 * weight / sum(weights)) <= 1
        mine = [row for row in drawn if row.source == str(i)]
        assert [(row.epoch, row.number) for row in mine] == [
            (parts[str(i)].row(k).epoch, parts[str(i)].row(k).number) for k in range(len(mine))
        ]
    assert Mixture(parts, weights, seed).row(start) == Mixture(parts, weights, seed).row(start)


def test_a_reward_sees_the_columns_of_every_part_and_the_parts_name(tmp_path: Path):
    task = make_task(mixture(tmp_path, {"sums": 3, "logic": 1}), 0)
    drawn = [task.row(g) for g in range(400)]
    assert 0.6 < sum(row.source == "sums" for row in drawn) / 400 < 0.9
    for row in [*drawn, *task.heldout()]:
        other = {"sums": "logic", "logic": "sums"}[row.source]
        assert row.columns == {"question": row.prompt, row.source: row.number, other: None, "part": row.source}
    assert Counter(row.source for row in task.heldout()) == {"sums": 2, "logic": 2}


def test_the_prompts_of_a_part_are_made_as_the_part_says(tmp_path: Path, tokenizer: PreTrainedTokenizerBase):
    plain = {"name": "plain", "data": {"task": "arithmetic", "digits": 1, "heldout": 1}}
    path = str(lines(tmp_path / "a.jsonl", questions(0, 9)))
    chat = {"name": "chat", "data": dataset(path, system="Be 1.", max_prompt_tokens=5).model_dump()}
    data = MixtureData.model_validate({"task": "mixture", "parts": [plain, chat]})
    for row in [make_task(data, 0).row(g) for g in range(20)]:
        text = tokenizer.decode(render(Row(row.prompt, row.columns), tokenizer, data))
        assert text == (row.prompt if row.source == "plain" else f"Be 1.\n{row.prompt}\n")
        assert longest(row, data, 50) == (50 if row.source == "plain" else 5)


def test_a_mixture_that_cannot_be_used_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"part tiny has weight 0\.1 of 100\.1, expected at least 1 %"):
        make_task(mixture(tmp_path, {"sums": 100, "tiny": 0.1}), 0)
    with pytest.raises(ValueError, match=r"data\.parts: part sums: data\.filter: "):
        make_task(mixture(tmp_path, {"sums": 1, "logic": 1}, filter={"nothing": 1}), 0)
    with pytest.raises(ValueError, match="part part has a column 'part'"):
        make_task(mixture(tmp_path, {"part": 1}), 0)
    with pytest.raises(ValueError, match="got the names 1, 1, expected a different one for each part"):
        part = mixture(tmp_path, {"sums": 1}).parts[0].model_dump()
        MixtureData.model_validate({"task": "mixture", "parts": [part | {"name": "1"}, part | {"name": None}]})
