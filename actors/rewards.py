"""Reward functions that ship: `f(prompts, completions, **columns) -> list[float]`, TRL's signature.

They run in the children of `actors.reward`, on text that a model wrote: nothing heavy is imported here, nothing is
evaluated, and every pattern is linear in the text.
"""

import re
from fractions import Fraction
from typing import Any

# 18, -3.50, $1,000, .5, 1e3 (a two-digit exponent at most: no number is expensive), 3/4
NUMBER = re.compile(
    r"[-+]?\$?(?:(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,2})?"
    r"|[-+]?[0-9]+/0*[1-9][0-9]*"
)
NUMBER_LENGTH = 64  # characters; longer ones are text
IN_TEXT = re.compile(r"(?:(?<![0-9)])-)?\$?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+|/[0-9]+)?")


def exact_match(prompts: list[Any], completions: list[str], answer: list[Any], **columns: list[Any]) -> list[float]:
    """1 where the completion's final answer equals the column `answer`, else 0.

    The final answer of a completion is the first of these that is there: the rest of the line after the last `####`;
    the contents of the last `\\boxed{}`; what follows the last `:` on its line, if that is a number or has no digit;
    the last number; the whole text. A reference is what follows its `####`, the contents of its `\\boxed{}`, or the
    whole column. Two numbers are compared as numbers (`$1,000.00` = `1000`, `3/4` = `0.75`), anything else as text
    without the white space around it.
    """
    pairs = zip(completions, answer, strict=True)
    return [float(same(final_answer(completion), reference(str(column)))) for completion, column in pairs]


def final_answer(completion: str) -> str:
    marked = _marked(completion)
    if marked is not None:
        return marked
    after = _first_line(completion.rpartition(":")[2]) if ":" in completion else ""
    if after and (number(after) is not None or not re.search("[0-9]", after)):
        return after
    numbers = IN_TEXT.findall(completion)
    return numbers[-1] if numbers else completion.strip()


def reference(column: str) -> str:
    marked = _marked(column)
    return column.strip() if marked is None else marked


def same(left: str, right: str) -> bool:
    a, b = number(left), number(right)
    return left == right if a is None or b is None else a == b


def number(text: str) -> Fraction | None:
    """The exact value of `text`, or None if it is no number, or longer than any answer."""
    text = text.strip().removesuffix(".")
    if len(text) > NUMBER_LENGTH or not NUMBER.fullmatch(text):
        return None
    return Fraction(text.replace("$", "").replace(",", ""))


def _marked(text: str) -> str | None:
    """What the text itself marks as its answer, or None."""
    _, mark, after = text.rpartition("####")
    if mark:
        return _first_line(after)
    _, mark, after = text.rpartition("\\boxed{")
    depth = 1
    for i, character in enumerate(after if mark else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return after[:i].strip()
    return None


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0].strip()
