"""Reward functions for tests: signal for a model that knows nothing."""


def letters(prompts: list[str], completions: list[str], **columns: list) -> list[float]:
    """The share of letters in a completion."""
    return [sum(character.isalpha() for character in text) / max(1, len(text)) for text in completions]


def too_large(prompts: list[str], completions: list[str], **columns: list) -> list[float]:
    """Finite, but not as float32."""
    return [1e300 * (1 + len(text)) for text in completions]
