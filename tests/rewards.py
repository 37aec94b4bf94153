"""Reward functions for tests: signal for a model that knows nothing."""


def letters(prompts: list[str], completions: list[str], **columns: list) -> list[float]:
    """The share of letters in a completion."""
    return [sum(character.isalpha() for character in text) / max(1, len(text)) for text in completions]
