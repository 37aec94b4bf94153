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
IN_TEXT = re.compile(r"(?:(?<![0-9)])-)?\$?(?:[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+|/[0-9]+)?|(?<![\w.])\.[0-9]+)")
SAID = re.compile(r"(?:^|\n)A:|\banswer(?: is)?:?", re.IGNORECASE)
THINK = r"<think>(?:(?!<think>).)*?</think>\s*\S.*"


def exact_match(prompts: list[Any], completions: list[Any], answer: list[Any], **columns: Any) -> list[float]:
    """1 where the completion's final answer equals the column `answer`, else 0.

    The final answer of a completion is the first of these that is there: the rest of the line after the last `####`;
    the contents of the last `\\boxed{}`; what follows the last `:` on its line, if that is a number or has no digit;
    the last number; the whole text. A reference is what follows its `####`, the contents of its `\\boxed{}`, or the
    whole column. Two numbers are compared as numbers (`$1,000.00` = `1000`, `3/4` = `0.75`), anything else as text
    without the white space around it.
    """
    pairs = zip(completions, answer, strict=True)
    return [float(same(final_answer(text_of(completion)), reference(str(column)))) for completion, column in pairs]


def gsm8k(prompts: list[Any], completions: list[Any], answer: list[Any], **columns: Any) -> list[float | Exception]:
    """1 where the number that the completion ends with is the number that the column `answer` ends with, else 0.

    Both are looked for in the same way: after the last `####`, in the last `\\boxed{}`, after the last `A:` at the
    start of a line or the last `answer is`, else the last number of the text. A row whose `answer` has no number fails.
    """
    pairs = zip(completions, answer, strict=True)
    return [_gsm8k(text_of(completion), str(column)) for completion, column in pairs]


def format_match(prompts: list[Any], completions: list[Any], pattern: str = THINK, **columns: Any) -> list[float]:
    """1 where the whole completion matches the regular expression `pattern` (`.` matches line ends, too), else 0.

    The default is one `<think>` block, then an answer.
    """
    compiled = re.compile(pattern, re.DOTALL)
    return [float(bool(compiled.fullmatch(text_of(completion)))) for completion in completions]


def length_penalty(completion_ids: list[list[int]], max_length: int, **columns: Any) -> list[float]:
    """Minus the share of `max_length` tokens that the completion has, at least -1."""
    return [-min(1.0, len(ids) / max_length) for ids in completion_ids]


def soft_overlong(completion_ids: list[list[int]], max_length: int, buffer: int, **columns: Any) -> list[float]:
    """DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13), in tokens: 0 up to `max_length` - `buffer`, from
    there falling by 1/`buffer` a token, -1 from `max_length` on."""
    return [max(-1.0, min(0.0, (max_length - buffer - len(ids)) / buffer)) for ids in completion_ids]


def text_of(completion: Any) -> str:
    """The text of a completion: itself, or the content of its last message."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"] or "")


def final_answer(completion: str) -> str:
    chosen = marked(completion)
    if chosen is not None:
        return chosen
    after = _first_line(completion.rpartition(":")[2]) if ":" in completion else ""
    if after and (number(after) is not None or not re.search("[0-9]", after)):
        return after
    numbers = IN_TEXT.findall(completion)
    return numbers[-1] if numbers else completion.strip()


def _gsm8k(completion: str, column: str) -> float | Exception:
    wanted = last_number(column)
    if wanted is None:
        return ValueError("the column answer has no number")
    return float(last_number(completion) == wanted)


def last_number(text: str) -> Fraction | None:
    """The number that a text gives as its answer, or None."""
    line = marked(text)
    said = list(SAID.finditer(text)) if line is None else []
    if said:
        line = _first_line(text[said[-1].end() :])
    numbers = IN_TEXT.findall((line or "").rpartition("=")[2])
    if numbers:
        return number(numbers[0])
    numbers = IN_TEXT.findall(text)
    return number(numbers[-1]) if numbers else None


def reference(column: str) -> str:
    chosen = marked(column)
    return column.strip() if chosen is None else chosen


def same(left: str, right: str) -> bool:
    a, b = number(left), number(right)
    return left == right if a is None or b is None else a == b


def number(text: str) -> Fraction | None:
    """The exact value of `text`, or None if it is no number, or longer than any answer."""
    text = text.strip().removesuffix(".")
    if len(text) > NUMBER_LENGTH or not NUMBER.fullmatch(text):
        return None
    return Fraction(text.replace("$", "").replace(",", ""))


def marked(text: str) -> str | None:
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
