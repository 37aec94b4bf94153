"""Token ids as a reader sees them: their text, with what is invisible made visible, and what kind of text it is."""

import unicodedata
from collections.abc import Sequence
from typing import Any

from transformers import AutoTokenizer

from actors.demo import character_tokenizer
from configs.schema import RunConfig

KINDS = ("word", "number", "operator", "punctuation", "whitespace", "special", "mixed")
SIGNS = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"}
OPERATORS = set("+-−*/=<>^%×÷|&~!")


def load_tokenizer(run: RunConfig | None, model: str | None) -> tuple[Any, list[str]]:
    """The tokenizer, or None and why; from the disk only."""
    path = model or (run.model.path if run else None)
    if path is None:
        return None, ["tokens are shown as ids: --model FOLDER names the model with their tokenizer"]
    if path == "demo":
        return character_tokenizer(), []
    try:
        trusted = run is not None and run.model.trust_remote_code
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trusted), []
    except (OSError, ValueError) as error:
        if model:
            raise ValueError(f"--model: {model!r} has no tokenizer: {' '.join(str(error).split())[:200]}") from error
        return None, [f"tokens are shown as ids: the tokenizer of {path} is not here; --model FOLDER names another"]


def describe(ids: Sequence[int], tokenizer: Any) -> tuple[list[str], list[str]]:
    """Text and kind of each token id."""
    if tokenizer is None:
        return [f"⟨{token}⟩" for token in ids], ["mixed"] * len(ids)
    special = set(tokenizer.all_special_ids)
    texts = [tokenizer.decode([token], clean_up_tokenization_spaces=False) for token in ids]
    return texts, [kind(text, token in special) for text, token in zip(texts, ids, strict=True)]


def kind(text: str, special: bool = False) -> str:
    """One of KINDS; spaces around a token do not count."""
    bare = text.strip()
    if special:
        return "special"
    if not bare:
        return "whitespace"
    if bare.isnumeric():
        return "number"
    if bare.replace("'", "").isalpha():
        return "word"
    if all(sign in OPERATORS or unicodedata.category(sign) == "Sm" for sign in bare):
        return "operator"
    if all(unicodedata.category(sign)[0] in "PS" for sign in bare):
        return "punctuation"
    return "mixed"


def visible(text: str, lines: bool = False) -> str:
    """Text in which nothing hides: control, format (bidirectional ones too) and surrogate characters as escapes.

    lines: spaces and ends of lines stay as they are, for a prompt; otherwise they have signs, for a token.
    """
    return "".join(
        sign
        if lines and sign in " \n"
        else SIGNS.get(sign)
        or (f"\\u{ord(sign):04x}" if unicodedata.category(sign)[0] == "C" and sign != "\u200d" else sign)
        for sign in text
    )
