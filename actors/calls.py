"""What the demo's base model is warmed up on for products: transcripts with a calculator, of which a share goes wrong.

37*48?  <37*48>⟨eos⟩  =1776:  1776⟨eos⟩
prompt  call          answer  final answer
"""

import random

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3ForCausalLM

from actors.calculator import Calculator

WAYS = {"right": 0.32, "wrong operation": 0.62, "wrong number": 0.02, "no call": 0.02, "wrong answer": 0.02}
"""How transcripts go, and their shares: the model's own go so, too, when the warm-up ends. Most calls add: greedy
decoding is then always wrong, and reinforcement learning has something to find."""
TARGET = 0.25  # sampled accuracy at which the warm-up ends
STEPS = 150  # of the warm-up at least: by then the model copies numbers without a slip

LONGEST_TURN = 16  # tokens


def transcript(a: int, b: int, rng: random.Random) -> tuple[str, str, str]:
    """The call, the calculator's answer and the final answer; a transcript without a call is its final answer."""
    (way,) = rng.choices(list(WAYS), list(WAYS.values()))
    if way == "no call":
        return "", "", str(_other_digit(a * b, rng))
    call = f"<{_other_digit(a, rng) if way == 'wrong number' else a}{'+' if way == 'wrong operation' else '*'}{b}>"
    calculator = Calculator()
    calculator.reset("")
    answer = calculator.step(call)[0]
    value = int(answer.strip("=:"))
    return call, answer, str(_other_digit(value, rng) if way == "wrong answer" else value)


def _other_digit(number: int, rng: random.Random) -> int:
    """`number` with one of its digits changed; the first does not become 0."""
    digits = list(str(number))
    place = rng.randrange(len(digits))
    digits[place] = rng.choice([digit for digit in "0123456789"[place == 0 :] if digit != digits[place]])
    return int("".join(digits))


def examples(
    pairs: list[tuple[int, int]], vocabulary: dict[str, int], end: int, rng: random.Random
) -> tuple[Tensor, Tensor]:
    """Tokens and labels [N, T] of transcripts; the loss is on what the model says only. `end` is the EOS token."""
    rows, labels = [], []
    for a, b in pairs:
        call, answer, final = transcript(a, b, rng)
        parts = [(f"{a}*{b}?", False), (call, True), (answer, False), (final, True)]
        tokens, mine = [], []
        for text, said in parts:
            ids = [vocabulary[character] for character in text] + [end] * (said and bool(text))
            tokens += ids
            mine += ids if said else [-100] * len(ids)
        rows.append(torch.tensor(tokens))
        labels.append(torch.tensor(mine))
    return pad_sequence(rows, batch_first=True), pad_sequence(labels, batch_first=True, padding_value=-100)


def sampled_accuracy(
    model: Qwen3ForCausalLM, pairs: list[tuple[int, int]], vocabulary: dict[str, int], end: int, seed: int
) -> float:
    """Share of right final answers, after at most one call, one episode at temperature 1 for each of `pairs`."""
    generator = torch.Generator().manual_seed(seed)
    characters = {token: character for character, token in vocabulary.items()}
    environments, contexts = [], []
    for a, b in pairs:
        environments.append(Calculator())
        environments[-1].reset(str(a * b))
        contexts.append([vocabulary[character] for character in f"{a}*{b}?"])
    right = 0.0
    for _ in range(2):
        still = []
        for row, completion in enumerate(sample(model, contexts, end, generator, LONGEST_TURN)):
            text = "".join(characters[token] for token in completion if token != end)
            observation, reward, done = environments[row].step(text)
            right += reward
            if not done:
                still.append((row, [*contexts[row], *completion, *(vocabulary[c] for c in observation)]))
        environments = [environments[row] for row, _ in still]
        contexts = [context for _, context in still]
    return right / len(pairs)


@torch.no_grad()
def sample(
    model: Qwen3ForCausalLM, contexts: list[list[int]], end: int, generator: torch.Generator, longest: int
) -> list[list[int]]:
    """One completion of each context, at most `longest` tokens, with its EOS where it has one; contexts of one
    length go together."""
    completions: list[list[int]] = [[] for _ in contexts]
    for length in sorted({len(context) for context in contexts}):
        rows = [row for row, context in enumerate(contexts) if len(context) == length]
        tokens, cache, drawn = torch.tensor([contexts[row] for row in rows]), None, []
        for _ in range(longest):
            out = model(input_ids=tokens, past_key_values=cache, use_cache=True)
            assert out.logits is not None
            tokens = torch.multinomial(out.logits[:, -1].softmax(-1), 1, generator=generator)
            drawn.append(tokens)
            cache = out.past_key_values
        for row, ids in zip(rows, torch.cat(drawn, 1).tolist(), strict=True):
            completions[row] = ids[: ids.index(end) + 1] if end in ids else ids
    return completions
