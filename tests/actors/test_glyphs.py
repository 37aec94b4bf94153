import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors import glyphs
from actors.tasks import make_task
from configs.schema import GlyphsData, load

TRAIN, HELDOUT = glyphs.descriptions()
RED_SQUARE_AND_BLUE_RING = """\
rrr.....
rrr.....
rrr.....
........
....bbb.
....b.b.
....bbb.
........"""
TEXT = "red square NW, blue ring SE"


def test_a_picture_is_drawn_cell_by_cell():
    assert glyphs.draw(glyphs.parse(TEXT)) == RED_SQUARE_AND_BLUE_RING
    assert glyphs.draw([("yellow", "plus", "NE")]).split("\n")[:4] == [".....y..", "....yyy.", ".....y..", "........"]
    assert glyphs.draw([("green", "cross", "SW")]).split("\n")[3:7] == ["........", "g.g.....", ".g......", "g.g....."]


@given(st.sampled_from(TRAIN + HELDOUT))
def test_every_true_drawing_keeps_all_rules(text: str):
    assert glyphs.score(text, glyphs.draw(glyphs.parse(text))) == 1


@given(st.sampled_from(TRAIN + HELDOUT), st.sampled_from(TRAIN + HELDOUT))
def test_a_drawing_of_something_else_does_not_keep_all_rules(text: str, other: str):
    same = sorted(glyphs.parse(text)) == sorted(glyphs.parse(other))
    assert (glyphs.score(text, glyphs.draw(glyphs.parse(other))) == 1) == same


@pytest.mark.parametrize(
    ("drawn", "rules"),
    [
        ("blue ring SE, red square NW", 7),  # the order is free
        ("red square NW, blue ring NE", 6),  # a position
        ("red square NW, green ring SE", 6),  # a colour
        ("red plus NW, blue ring SE", 6),  # a shape
        ("red square SE, blue ring NW", 5),  # the positions swapped
        ("blue square NW, red ring SE", 5),  # the colours swapped
        ("red square NW", 3),  # no second object: its three rules and the count are lost
        ("green cross NE, yellow plus SW", 1),  # the count only
        ("red square NW, blue ring SE, green plus NE", 6),  # one too many
    ],
)
def test_each_rule_is_scored_by_itself(drawn: str, rules: int):
    assert glyphs.score(TEXT, glyphs.draw(glyphs.parse(drawn))) == pytest.approx(rules / 7)


def test_a_broken_shape_keeps_its_colour_and_position():
    broken = RED_SQUARE_AND_BLUE_RING.replace("rrr.....", "rr......", 1)
    assert glyphs.score(TEXT, broken) == pytest.approx(6 / 7)


def test_an_object_of_two_colours_has_none_of_them():
    mixed = RED_SQUARE_AND_BLUE_RING.replace("rrr.....", "rrg.....", 1)
    assert glyphs.score(TEXT, mixed) == pytest.approx(6 / 7)


@pytest.mark.parametrize(
    "picture",
    [
        "",
        "\n".join(["........"] * 8),  # nothing drawn
        RED_SQUARE_AND_BLUE_RING[:-1],  # short by a cell
        RED_SQUARE_AND_BLUE_RING[:-9],  # short by a line
        RED_SQUARE_AND_BLUE_RING + ".",
        RED_SQUARE_AND_BLUE_RING + "\n........",
        RED_SQUARE_AND_BLUE_RING.replace("r", "x"),
        RED_SQUARE_AND_BLUE_RING.replace("\n", ""),
        "a red square",
    ],
)
def test_what_is_no_picture_scores_nothing(picture: str):
    assert glyphs.rules(["ignored"], [picture], description=[TEXT]) == [0.0]


def test_a_line_end_after_the_last_line_is_allowed():
    assert glyphs.score(TEXT, RED_SQUARE_AND_BLUE_RING + "\n") == 1


@pytest.mark.parametrize("text", ["red square", "mauve square NW", "red square NW,blue ring SE", ""])
def test_text_that_describes_nothing_is_an_error(text: str):
    with pytest.raises(ValueError, match="expected an object such as"):
        glyphs.parse(text)


def test_no_picture_is_both_trained_on_and_held_out():
    train, heldout = ({frozenset(glyphs.parse(text)) for text in texts} for texts in (TRAIN, HELDOUT))
    assert not train & heldout
    assert len(train | heldout) == 64 + 6 * 16 * 16  # one of 64 objects, or two in two of four quarters


def test_careless_drawings_keep_about_four_rules_of_ten():
    rng = random.Random(0)
    drawn = [glyphs.draw(glyphs.careless(glyphs.parse(text), rng)) for text in TRAIN]
    assert 0.35 < sum(glyphs.rules(TRAIN, drawn, description=TRAIN)) / len(TRAIN) < 0.45


def test_the_task_gives_each_row_its_description():
    task = make_task(GlyphsData(task="glyphs", heldout=16), 0)
    row = task.row(0)
    assert row.prompt == f"{row.columns['description']}:"
    assert row.columns["description"] in TRAIN
    assert [row.columns["description"] for row in task.heldout()] == HELDOUT[:16]
    with pytest.raises(ValueError, match="got 1000, expected at most"):
        make_task(GlyphsData(task="glyphs", heldout=1000), 0)


def test_a_whole_picture_fits_the_configuration():
    run = load(Path(__file__).parents[2] / "configs/glyphs.yaml")
    assert run.rollout.max_new_tokens == len(RED_SQUARE_AND_BLUE_RING) + 1  # and the end


def test_the_reward_imports_nothing_heavy():
    code = "import sys, actors.glyphs; print({'torch', 'numpy', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
