"""The report's data, worked by hand, and its page: whole in itself, and safe whatever the tokens say."""

import html.parser
import re
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cluster.cli import main
from cluster.report.data import Collected, collect
from cluster.report.page import render, write
from cluster.report.tokens import kind, visible
from tests.cluster.reported import HOSTILE, make_run

HALF = np.float32(0.5**0.5)  # rewards 1 and 0: (1 - .5) / std, the sample's


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Collected:
    return collect(make_run(tmp_path_factory.mktemp("run")))


def first(collected: Collected, name: str, tokens: int = 4) -> list[float]:
    """Of the first group's two completions of two tokens."""
    return collected.arrays[name][:tokens].tolist()


def test_every_method_whose_signals_are_there_has_the_weights_that_credit_gives_it(collected: Collected):
    assert collected.methods == [
        "trained", "uniform", "surprisal", "entropy_reduction", "divergence", "arca", "forking", "eapo",
    ]  # fmt: skip
    assert first(collected, "weights_uniform") == [1, 1, 1, 1]
    # residuals 1 and 3: twice each over their sum; equal ones are uniform
    assert first(collected, "weights_arca") == pytest.approx([0.5, 1.5, 1, 1], rel=1e-3)
    # the highest fifth of two tokens is one of them
    assert first(collected, "weights_forking") == pytest.approx([0, 2, 0, 2], abs=1e-5)


def test_what_was_trained_is_shown_as_it_was_recorded(collected: Collected):
    expected = [0.5 * HALF, 1.5 * HALF, -HALF, -HALF]
    assert first(collected, "weights_trained") == pytest.approx(expected, rel=1e-3)
    assert collected.arrays["advantage"].tolist() == pytest.approx([HALF, -HALF, 0, 0])


def test_a_permuted_run_keeps_its_method_in_place_beside_what_was_trained(tmp_path: Path):
    collected = collect(make_run(tmp_path, permute=True))
    order = np.random.default_rng([4, 0, 0]).permutation(2)
    assert first(collected, "weights_arca", 2) == pytest.approx([0.5, 1.5], rel=1e-3)
    assert first(collected, "weights_trained", 2) == pytest.approx(HALF * np.array([0.5, 1.5])[order], rel=1e-3)


def test_the_control_takes_its_order_from_the_seed_the_step_and_the_trajectory(collected: Collected):
    starts = collected.arrays["start"]
    for row, key in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        order = np.random.default_rng([3 + 1, *key]).permutation(starts[row + 1] - starts[row])
        assert collected.arrays["order"][starts[row] : starts[row + 1]].tolist() == order.tolist()


def test_tokens_are_in_the_quadrant_of_their_advantage_and_their_groups_mean_entropy(collected: Collected):
    # PHR 1, PLR 2, NHR 3, NLR 4; the mean is .5. A group without signal is in none
    assert first(collected, "quadrant") == [2, 1, 4, 3]
    assert set(collected.arrays["quadrant"][4:].tolist()) == {0}


def test_concentration_is_that_of_each_completion(collected: Collected):
    # shares 1/4 and 3/4: gini (2-1)(3/4) + (-1)(1/4) over 2; 1 / (2 (1/16 + 9/16))
    assert collected.arrays["gini_arca"][:2].tolist() == pytest.approx([0.25, 0], abs=1e-3)
    assert collected.arrays["ratio_arca"][:2].tolist() == pytest.approx([0.8, 1], abs=1e-3)
    assert collected.arrays["regime_arca"][:2].tolist() == [1, 0]


def test_prompt_tokens_are_left_out_and_the_prompt_is_text(collected: Collected):
    assert [collected.vocabulary[i] for i in collected.arrays["token"][:4]] == ["1", "<eos>", "+", "<eos>"]
    assert collected.arrays["start"].tolist() == [0, 2, 4, 11, 18]
    assert collected.prompts == ["1+1?", f"{HOSTILE}\\u202e \"'"]


def test_of_more_steps_than_the_limit_allows_evenly_spaced_ones_are_read(tmp_path: Path):
    collected = collect(make_run(tmp_path, steps=5), limit=12)
    assert sorted(set(collected.arrays["step"].tolist())) == [1, 3, 5]
    assert collected.total == 20
    assert any("12 of 20 trajectories" in warning for warning in collected.warnings)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the", "word"), (" don't", "word"), ("42", "number"), ("²", "number"), ("+=", "operator"), ("≤", "operator"),
        ("),", "punctuation"), ("\n ", "whitespace"), ("x1", "mixed"), ("é", "word"),
    ],
)  # fmt: skip
def test_a_token_is_of_one_kind(text: str, expected: str):
    assert kind(text) == expected
    assert kind(text, special=True) == "special"


def test_nothing_in_a_token_is_invisible():
    assert visible(" a\n\x00\u202e\ud800") == "·a⏎\\u0000\\u202e\\ud800"
    assert visible(" a\n\x1b", lines=True) == " a\n\\u001b"


class Loads(html.parser.HTMLParser):
    """Scripts, and everything that would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[str | None] = []
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "script":
            self.scripts.append(dict(attrs).get("id"))
        self.urls += [value or "" for name, value in attrs if name in ("src", "href", "action", "data", "poster")]


def test_the_page_is_whole_in_itself_whatever_the_tokens_say(collected: Collected):
    page = render(collected)
    loads = Loads()
    loads.feed(page)
    assert loads.scripts == [None, "facts", "items", None, "data", "plotting"]  # none of the hostile token's
    assert all(url.startswith(("#", "data:")) for url in loads.urls)
    assert "default-src 'none'" in page
    assert HOSTILE not in page and "\u202e" not in page and "\x00" not in page
    style = page.split("<style>")[1].split("</style>")[0]
    assert not re.search(r"@import|url\(", style)


def test_a_scored_file_is_shown_with_the_weights_that_it_holds(tmp_path: Path):
    table = pa.table(
        {
            "group": ["a", "a", "b"], "index": [0, 1, 0], "row": [0, 1, 2], "reward": [1.0, 0.0, 1.0],
            "advantage": pa.array([0.7, -0.7, 0.0], pa.float32()),
            "tokens": [[5, 6, 7], [5, 8], [5, 6]], "mask": [[False, True, True], [False, True], [False, True]],
            "logprobs": [[0, -1.0, -1.0], [0, -1.0], [0, -1.0]], "signal_logp": [[0, -1.0, -3.0], [0, -1.0], [0, -1.0]],
            "weights_mine": [[0, 0.25, 1.75], [0, 1.0], [0, 1.0]],
        }
    )  # fmt: skip
    path = tmp_path / "scored.parquet"
    pq.write_table(table, path)
    collected = collect(path)
    assert collected.methods == ["mine", "uniform", "surprisal"]
    assert collected.arrays["weights_mine"].tolist() == [0.25, 1.75, 1, 1]
    assert collected.arrays["weights_surprisal"].tolist() == pytest.approx([0.5, 1.5, 1, 1], rel=1e-3)
    assert [collected.vocabulary[i] for i in collected.arrays["token"]] == ["⟨6⟩", "⟨7⟩", "⟨8⟩", "⟨6⟩"]
    assert (collected.labels, collected.prompts) == (["a", "b"], ["⟨5⟩", "⟨5⟩"])
    assert write(path, None, 5000, None, lambda done, total: None).path == tmp_path / "scored.html"


def test_the_command_says_where_the_page_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    run = make_run(tmp_path)
    monkeypatch.setattr(sys, "argv", ["accredit", "report", str(run)])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert capsys.readouterr().out.startswith(f"{run}/report.html: 4 trajectories")
    assert (run / "report.html").stat().st_size > 100_000


def test_what_is_no_run_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    (tmp_path / "x.parquet").write_bytes(b"no")
    for source in (tmp_path, tmp_path / "x.parquet", tmp_path / "nothing"):
        monkeypatch.setattr(sys, "argv", ["accredit", "report", str(source)])
        with pytest.raises(SystemExit, match="2"):
            main()
        error = capsys.readouterr().err
        assert str(source) in error and error.count("\n") == 1
