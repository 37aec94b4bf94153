"""A picture task: `red square NW, blue ring SE` is drawn as 8 rows of 8 cells, one character for a cell's colour.

A picture has one or two objects, each a shape of 3 x 3 cells in the upper left corner of a quarter of the grid, so that
a blank line lies between any two. As in GenEval (arXiv:2310.11513) a rule-based judge finds the objects of a picture
and compares shape, colour, position and count with the description.

This runs in the children of `actors.reward`: nothing heavy is imported here.
"""

import hashlib
import random
from itertools import permutations, product
from typing import Any

SIDE = 8  # cells
BLANK = "."
COLOURS = {"red": "r", "green": "g", "blue": "b", "yellow": "y"}
SHAPES = {
    "square": ("###", "###", "###"),
    "ring": ("###", "#.#", "###"),
    "plus": (".#.", "###", ".#."),
    "cross": ("#.#", ".#.", "#.#"),
}
QUARTERS = {"NW": (0, 0), "NE": (0, 4), "SE": (4, 4), "SW": (4, 0)}  # row and column of the upper left corner
HELDOUT_SHARE = 8  # one description of eight is held out
RIGHT = 0.4  # share of the warm-up's objects whose colour is right; the same for shape and position
RIGHT_COUNT = 0.7

Object = tuple[str, str, str]  # colour, shape, quarter
Cells = frozenset[tuple[int, int]]


def descriptions() -> tuple[list[str], list[str]]:
    """All descriptions: (training, held out). A hash of the set of objects decides, so that no picture is on both
    sides, whatever the order in which its objects are named."""
    objects = list(product(COLOURS, SHAPES, QUARTERS))
    pictures = [(one,) for one in objects] + [pair for pair in permutations(objects, 2) if pair[0][2] != pair[1][2]]
    train, heldout = [], []
    for picture in pictures:
        (heldout if _is_heldout(picture) else train).append(", ".join(" ".join(one) for one in picture))
    random.Random(0).shuffle(heldout)  # the first few are then no special ones
    return train, heldout


def _is_heldout(objects: tuple[Object, ...]) -> bool:
    digest = hashlib.blake2b(repr(sorted(objects)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELDOUT_SHARE == 0


def parse(description: str) -> list[Object]:
    """The objects of a description. Raises ValueError for text that is none."""
    objects: list[Object] = []
    for part in description.split(", "):
        words = part.split(" ")
        if len(words) != 3 or words[0] not in COLOURS or words[1] not in SHAPES or words[2] not in QUARTERS:
            raise ValueError(f"glyphs: got {part!r}, expected an object such as 'red square NW'")
        objects.append((words[0], words[1], words[2]))
    return objects


def draw(objects: list[Object]) -> str:
    """The picture: 8 lines of 8 characters. Of two objects in one quarter the later one is drawn."""
    grid = [[BLANK] * SIDE for _ in range(SIDE)]
    for colour, shape, quarter in {one[2]: one for one in objects}.values():
        top, left = QUARTERS[quarter]
        for row, line in enumerate(SHAPES[shape]):
            for column, cell in enumerate(line):
                if cell == "#":
                    grid[top + row][left + column] = COLOURS[colour]
    return "\n".join("".join(line) for line in grid)


def careless(objects: list[Object], rng: random.Random) -> list[Object]:
    """What the base model learns to draw instead: colour, shape and position are each right with probability RIGHT and
    the next of their list otherwise; now and then an object is left out, or drawn twice where there is only one.
    Greedy drawings are then mostly wrong, and reinforcement learning has something to find."""

    def choose(name: str, names: Any) -> str:
        names = list(names)
        return name if rng.random() < RIGHT else names[(names.index(name) + 1) % len(names)]

    drawn = [(choose(c, COLOURS), choose(s, SHAPES), choose(q, QUARTERS)) for c, s, q in objects]
    if rng.random() >= RIGHT_COUNT:
        if len(drawn) > 1:
            drawn.pop(rng.randrange(len(drawn)))
        else:
            colour, shape, quarter = drawn[0]
            drawn.append((colour, shape, rng.choice([other for other in QUARTERS if other != quarter])))
    return drawn


def rules(prompts: list[Any], completions: list[Any], description: list[str], **columns: Any) -> list[float]:
    """Share of the rules that hold in each picture; 1.0 if and only if all do."""
    return [score(text, str(picture)) for text, picture in zip(description, completions, strict=True)]


def score(description: str, picture: str) -> float:
    """Share of the description's 3n + 1 rules that hold: shape, colour and position of each object, and their count.

    Each described object is compared with one object of the picture, in the way that lets most rules hold. Text that is
    not 8 lines of 8 known characters, and a picture without objects, score 0.
    """
    wanted, found = parse(description), objects_in(picture)
    if not found:
        return 0.0
    count = len(found) == len(wanted)
    candidates = [*found, *[("", "", "")] * (len(wanted) - 1)]  # an object may be missing
    held = max(
        sum(a == b for one, other in zip(wanted, chosen, strict=True) for a, b in zip(one, other, strict=True))
        for chosen in permutations(candidates, len(wanted))
    )
    return (held + count) / (3 * len(wanted) + 1)


def objects_in(picture: str) -> list[Object]:
    """Objects of a picture: cells that touch, also by a corner. A colour or shape that is none of the known is ''.
    An object is in the quarter where the centre of its bounding box lies. [] for malformed text."""
    lines = picture.removesuffix("\n").split("\n")
    known = {BLANK, *COLOURS.values()}
    if len(lines) != SIDE or any(len(line) != SIDE or not known.issuperset(line) for line in lines):
        return []
    left = {(row, column) for row in range(SIDE) for column in range(SIDE) if lines[row][column] != BLANK}
    found = []
    while left:
        reached = [left.pop()]
        for row, column in reached:  # grows while it is gone through
            near = {(row + down, column + right) for down in (-1, 0, 1) for right in (-1, 0, 1)} & left
            left -= near
            reached += near
        found.append(_object(frozenset(reached), {lines[row][column] for row, column in reached}))
    return found


def _object(cells: Cells, colours: set[str]) -> Object:
    top, left = min(row for row, _ in cells), min(column for _, column in cells)
    bottom, right = max(row for row, _ in cells), max(column for _, column in cells)
    lines = tuple(
        "".join("#" if (row, column) in cells else BLANK for column in range(left, right + 1))
        for row in range(top, bottom + 1)
    )
    colour = next((name for name, cell in COLOURS.items() if colours == {cell}), "")
    shape = next((name for name, known in SHAPES.items() if known == lines), "")
    quarter = ("N" if top + bottom < SIDE else "S") + ("W" if left + right < SIDE else "E")
    return colour, shape, quarter
