"""Reward functions for tests: signal for a model that knows nothing."""


def digits(prompts: list[str], completions: list[str], **columns: list) -> list[float]:
    """The share of digits in a completion."""
    return [sum(character.isdigit() for character in text) / max(1, len(text)) for text in completions]
