"""Reward functions that ship: `f(prompts, completions, **columns) -> list[float]`, TRL's signature.

They run in the children of `actors.reward`, on text that a model wrote: nothing heavy is imported here, nothing is
evaluated, and every pattern is linear in the text.
"""

import re
from fractions import Fraction
from typing import Any

# 18, -3.50, $1,000, 3/4, 1e3; at most 64 characters and a two-digit exponent, so that no number is expensive
NUMBER = re.compile(r"([-+]?)\$?([0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)?(\.[0-9]*)?(/0*[1-9][0-9]*|[eE][-+]?[0-9]{1,2})?")
LAST_NUMBER = re.compile(r"(?:(?<![0-9)])-)?\$?[0-9][0-9,]*(?:\.[0-9]+)?")


def exact_match(prompts: list[Any], completions: list[str], answer: list[Any], **columns: list[Any]) -> list[float]:
    """1 where the completion's final answer equals the column `answer`, else 0.

    The final answer of a completion is the first of these that is there: the rest of the line after the last `####`;
    the contents of the last `\\boxed{}`; what follows the last `:` on its line, if that is a number or has no digit;
    the last number; the whole text. A reference is what follows its `####`, the contents of its `\\boxed{}`, or the
    whole column. Two numbers are compared as numbers (`$1,000.00` = `1000`, `3/4` = `0.75`), anything else as text
    without surrounding white space.
    """
    return [
        float(equal(final_answer(text), reference(str(wanted))))
        for text, wanted in zip(completions, answer, strict=True)
    ]


def final_answer(completion: str) -> str:
    marked = _marked(completion)
    if marked is not None:
        return marked
    _, colon, after = completion.rpartition(":")
    after = after.strip().partition("\n")[0].strip()
    if colon and after and (number(after) is not None or not any(character.isdigit() for character in after)):
        return after
    numbers = LAST_NUMBER.findall(completion)
    return numbers[-1] if numbers else completion.strip()


def reference(column: str) -> str:
    marked = _marked(column)
    return column.strip() if marked is None else marked


def equal(left: str, right: str) -> bool:
    numbers = number(left), number(right)
    return left == right if None in numbers else numbers[0] == numbers[1]


def number(text: str) -> Fraction | None:
    """The exact value of `text`, or None if it is no number, or a longer one than any answer has."""
    text = text.strip().removesuffix(".")
    match = NUMBER.fullmatch(text) if len(text) <= 64 else None
    if match is None or not any(character in "0123456789" for character in (match[2] or "") + (match[3] or "")):
        return None
    return (
        Fraction(text.replace("$", "").replace(",", ""))
        if not (match[3] and (match[4] or "").startswith("/"))
        else None
    )


def _marked(text: str) -> str | None:
    """What the text itself marks as its answer."""
    _, mark, after = text.rpartition("####")
    if mark:
        return after.strip().partition("\n")[0].strip()
    _, mark, after = text.rpartition("\\boxed{")
    if not mark:
        return None
    depth = 1
    for i, character in enumerate(after):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return after[:i].strip()
    return None
