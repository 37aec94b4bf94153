"""Reward functions for tests: signal for a model that knows nothing."""


def letters(prompts: list[str], completions: list[str], **columns: list) -> list[float]:
    """The share of letters in a completion."""
    return [sum(character.isalpha() for character in text) / max(1, len(text)) for text in completions]


def too_large(prompts: list[str], completions: list[str], **columns: list) -> list[float]:
    """Finite as float32, but not the square of a gradient that it scales."""
    return [1e37 * reward for reward in letters(prompts, completions)]
