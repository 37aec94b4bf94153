"""The negative prompt of contrastive methods (GCPO, arXiv:2605.29198): the question, and a wish for a wrong answer."""

import importlib
from dataclasses import replace
from typing import Any

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerBase

from actors.tasks import Row, render
from configs.schema import TaskData

WRONG_ANSWER = "{{ prompt }}\nGive a wrong answer to this question on purpose."
"""The paper's best negative prompt, in our words."""
EMPTY = "empty"
_environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, autoescape=False)


def render_negative(row: Row, tokenizer: PreTrainedTokenizerBase, data: TaskData, negative: str) -> list[int]:
    """Tokens of the row's negative prompt, at least one.

    `negative` is a jinja template over `prompt` and the row's columns (it has a `{`), "empty", or the dotted path of a
    callable f(prompt, **columns) -> str. It is rendered once, before the chat template; of chat messages the last one
    is replaced. The reference answer belongs in no negative prompt. Raises ValueError for what cannot be rendered.
    """
    question = row.prompt[-1]["content"] if isinstance(row.prompt, list) else row.prompt
    text = "" if negative == EMPTY else _text(question, row.columns, negative)
    if not text.strip() and negative != EMPTY:
        raise ValueError(f"credit.negative: {negative!r} renders empty for {question!r}: use 'empty' if that is meant")
    prompt: Any = text
    if isinstance(row.prompt, list):
        prompt = [*row.prompt[:-1], {**row.prompt[-1], "content": text}]
    tokens = render(replace(row, prompt=prompt), tokenizer, data)
    # a completion needs something before it: without a chat template the empty prompt is the end of a text before
    start: Any = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    return tokens or [start]


def _text(question: str, columns: dict[str, Any], negative: str) -> str:
    if "{" in negative or " " in negative:
        try:
            return _environment.from_string(negative).render(**{**columns, "prompt": question})
        except TemplateError as error:
            raise ValueError(
                f"credit.negative: {negative!r} cannot be rendered: {error}; it may use prompt, {', '.join(columns)}"
            ) from error
    module, _, name = negative.rpartition(".")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"credit.negative: {negative!r} is no template, not 'empty', and cannot be imported: {error}"
        ) from error
    text = function(question, **columns)
    if not isinstance(text, str):
        raise ValueError(f"credit.negative: {negative} returned {type(text).__name__}, expected a string")
    return text
