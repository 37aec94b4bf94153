"""Rewards of benchmarks. Nothing heavy is imported: they run in the reward's children."""

from typing import Any


def last_digit(prompts: list[Any], completions: list[str], answer: list[Any], **columns: list[Any]) -> list[float]:
    """1 where a completion ends with the last digit of the column `answer`, else 0."""
    return [float(text.strip()[-1:] == str(a)[-1]) for text, a in zip(completions, answer, strict=True)]
