"""The demo's base model: a small Qwen3-shaped model with a character tokenizer, made and warmed up on the spot.

The warm-up is supervised, on scratchpads of which a share is wrong: the model learns to add and to err, so that a
sampled answer is right 35-50 % of the time and reinforcement learning has something to find.
"""

import hashlib
import json
import random
import string
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from actors import calls, glyphs
from actors.tasks import arithmetic_pairs
from configs.schema import ArithmeticData, GlyphsData

SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
MATRIX_RATE, RATE = 0.005, 3e-3  # learning rates: Muon's, of the layers' matrices, and AdamW's, of the rest
BATCH = 64  # questions of a warm-up step
RIGHT = 0.5  # share of the examples whose every column sum is right: what sampled accuracy tends to
TARGET = 0.43  # sampled accuracy at which the warm-up ends
CHECK_EVERY = 25  # steps between looks at it, on CHECKED held-out questions
CHECKED = 512
USUAL_STEPS, MAX_STEPS = 300, 2000
GLYPHS_BATCH, GLYPHS_CHECKED = 32, 64
LONGEST_PICTURE = glyphs.SIDE * (glyphs.SIDE + 1)  # tokens: the lines, and EOS
GLYPHS_TARGET = 0.36  # sampled share of rules at which the warm-up on pictures ends
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character; anything else is `<unk>`."""
    characters = sorted(set(string.printable) - set("\t\r\x0b\x0c"))
    vocabulary = {token: i for i, token in enumerate([*SPECIAL.values(), *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE, **SPECIAL)


def make_model(
    folder: Path,
    *,
    hidden: int = 128,
    intermediate: int = 256,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    max_length: int = 2048,
    vocabulary: int | None = None,
    seed: int = 0,
) -> Qwen3ForCausalLM:
    """Save a randomly initialised Qwen3 model and the character tokenizer to `folder`; the default has 0.6M parameters.

    `vocabulary` pads the embedding to that many rows.
    """
    tokenizer = character_tokenizer()
    ids = tokenizer.get_vocab()
    config = Qwen3Config(
        vocab_size=vocabulary or len(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=ids[SPECIAL["eos_token"]],
        pad_token_id=ids[SPECIAL["pad_token"]],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    _save(model, folder)
    tokenizer.save_pretrained(folder)
    return model


def _save(model: Qwen3ForCausalLM, folder: Path) -> None:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # one file of a few MB
    model.save_pretrained(folder)
    if shown:
        logging.enable_progress_bar()


def demo_base(
    folder: Path, data: ArithmeticData | GlyphsData, seed: int, progress: Callable[[float, str], None] | None = None
) -> Path:
    """The warmed-up base model for `data`, made at most once: a folder below `folder`, named by a hash of what made it.

    `progress` is called with the share that is done and a line of text. Equal seeds give equal weights on one kind of
    processor. Raises RuntimeError if the model does not learn to add so many digits.
    """
    pictures = isinstance(data, GlyphsData)
    what = {"task": "glyphs"} if pictures else {"task": data.operation, "digits": data.digits}
    recipe = json.dumps({**what, "seed": seed, "torch": torch.__version__})
    more = {"glyphs": [glyphs.__file__], "*": [calls.__file__]}
    sources = [__file__, *more.get(str(what["task"]), [])]
    digest = hashlib.sha256(recipe.encode() + b"".join(Path(path).read_bytes() for path in sources)).hexdigest()
    final = folder / f"demo-{digest[:12]}"
    if final.exists():
        return final
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".demo-") as scratch:
        made = Path(scratch) / "model"
        model = make_model(made, seed=seed)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the same weights whatever the number of threads, and quick beside other work
        try:
            told = progress or (lambda share, text: None)
            if isinstance(data, GlyphsData):
                warm_up_on_glyphs(model, seed, told)
            else:
                warm_up(model, data.digits, seed, told, data.operation)
        finally:
            torch.set_num_threads(threads)
        _save(model, made)
        try:
            made.rename(final)  # whole or not at all
        except OSError:
            if not final.exists():  # else another process was quicker
                raise
    return final


def warm_up(
    model: Qwen3ForCausalLM, digits: int, seed: int, progress: Callable[[float, str], None], operation: str = "+"
) -> float:
    """Train `model` in place, on training questions, until a target share of the held-out answers that it samples is
    right; returns the share. Products are worked out with a calculator."""
    train, heldout = arithmetic_pairs(digits)
    checked = heldout[:CHECKED] if digits > 1 else train  # sums of single digits can only be known, not worked out
    wrong = 1 - RIGHT ** (1 / digits)
    vocabulary = character_tokenizer().get_vocab()
    end = vocabulary[SPECIAL["eos_token"]]
    target, least = (TARGET, 0) if operation == "+" else (calls.TARGET, calls.STEPS)
    rng = random.Random(seed)

    def examples() -> tuple[Tensor, Tensor]:
        pairs = [rng.choice(train) for _ in range(BATCH)]
        if operation == "+":
            return _examples(pairs, digits, wrong, vocabulary, rng)
        return calls.examples(pairs, vocabulary, end, rng)

    def accuracy() -> float:
        if operation == "+":
            return sampled_accuracy(model, checked, digits, seed)
        return calls.sampled_accuracy(model, checked, vocabulary, end, seed)

    return _train(model, examples, accuracy, target, least, progress, f"with data.digits={digits}: choose fewer digits")


def warm_up_on_glyphs(model: Qwen3ForCausalLM, seed: int, progress: Callable[[float, str], None]) -> float:
    """Train `model` in place on careless drawings of training descriptions, until those that it samples for held-out
    ones keep a target share of their rules; returns the share."""
    train, heldout = glyphs.descriptions()
    vocabulary = character_tokenizer().get_vocab()
    rng = random.Random(seed)

    def examples() -> tuple[Tensor, Tensor]:
        texts = [rng.choice(train) for _ in range(GLYPHS_BATCH)]
        drawn = [(f"{text}:", glyphs.draw(glyphs.careless(glyphs.parse(text), rng))) for text in texts]
        return _tensors(drawn, vocabulary)

    def accuracy() -> float:
        return sampled_rules(model, heldout[:GLYPHS_CHECKED], vocabulary, seed)

    return _train(model, examples, accuracy, GLYPHS_TARGET, 0, progress, "on glyphs")


def _train(
    model: Qwen3ForCausalLM,
    examples: Callable[[], tuple[Tensor, Tensor]],
    measure: Callable[[], float],
    target: float,
    least: int,
    progress: Callable[[float, str], None],
    where: str,
) -> float:
    # Muon needs less than half of AdamW's steps here
    matrices = [weight for layer in model.model.layers for weight in layer.parameters() if weight.ndim == 2]
    rest = [weight for weight in model.parameters() if all(weight is not matrix for matrix in matrices)]
    optimizers = [
        torch.optim.Muon(matrices, lr=MATRIX_RATE, weight_decay=0.01),
        torch.optim.AdamW(rest, lr=RATE, betas=(0.9, 0.98), weight_decay=0.01),
    ]
    accuracy = 0.0
    for step in range(1, MAX_STEPS + 1):
        tokens_NT, labels_NT = examples()
        loss = model(input_ids=tokens_NT, labels=labels_NT).loss
        assert loss is not None
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % CHECK_EVERY == 0:
            accuracy = measure()
            if accuracy >= target and step >= least:
                return accuracy
        progress(min(0.99, step / USUAL_STEPS), f"step {step}, {accuracy:.0%} of what it samples is right")
    raise RuntimeError(
        f"demo model: {accuracy:.0%} of what it samples is right after {MAX_STEPS} steps of warm-up, expected "
        f"{target:.0%} {where}"
    )


def scratchpad(a: int, b: int, digits: int, wrong: float, rng: random.Random) -> str:
    """The worked sum of `a` and `b`, units first: `7+8=15,3+4+1=8:85` for 37+48.

    Each column sum is off by 1 or 10 with probability `wrong`; what follows is consistent with it.
    """
    columns, carry, answer = [], 0, ""
    for k in range(digits):
        x, y = a // 10**k % 10, b // 10**k % 10
        total = x + y + carry
        if rng.random() < wrong:
            total = rng.choice([slip for slip in (total - 10, total - 1, total + 1, total + 10) if 0 <= slip <= 19])
        columns.append(f"{x}+{y}{f'+{carry}' if carry else ''}={total}")
        carry = total // 10
        answer = f"{total if k == digits - 1 else total % 10}{answer}"
    return f"{','.join(columns)}:{answer}"


def _examples(
    pairs: list[tuple[int, int]], digits: int, wrong: float, vocabulary: dict[str, int], rng: random.Random
) -> tuple[Tensor, Tensor]:
    """Tokens and labels [N, T] of questions with partly wrong scratchpads; the loss is on the scratchpads only."""
    return _tensors([(f"{a}+{b}?", scratchpad(a, b, digits, wrong, rng)) for a, b in pairs], vocabulary)


def _tensors(pairs: list[tuple[str, str]], vocabulary: dict[str, int]) -> tuple[Tensor, Tensor]:
    """Tokens and labels [N, T] of questions and answers; the loss is on the answers only."""
    rows, labels = [], []
    for asked, said in pairs:
        question = [vocabulary[character] for character in asked]
        answer = [vocabulary[character] for character in said]
        answer.append(vocabulary[SPECIAL["eos_token"]])
        rows.append(torch.tensor(question + answer))
        labels.append(torch.tensor([-100] * len(question) + answer))
    # padding needs no attention mask: it is on the right, where no real token looks
    return pad_sequence(rows, batch_first=True), pad_sequence(labels, batch_first=True, padding_value=-100)


@torch.no_grad()
def sampled_accuracy(model: Qwen3ForCausalLM, pairs: list[tuple[int, int]], digits: int, seed: int) -> float:
    """Share of right answers to the questions `pairs`, one sampled at temperature 1 for each."""
    tokenizer = character_tokenizer()
    vocabulary = tokenizer.get_vocab()
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([[vocabulary[character] for character in f"{a}+{b}?"] for a, b in pairs])
    sampled, cache = [], None
    for _ in range(10 * digits):  # the longest right scratchpad and its EOS
        out = model(input_ids=tokens, past_key_values=cache, use_cache=True)
        assert out.logits is not None
        tokens = torch.multinomial(out.logits[:, -1].softmax(-1), 1, generator=generator)
        sampled.append(tokens)
        cache = out.past_key_values
    texts = [text.partition(SPECIAL["eos_token"])[0] for text in tokenizer.batch_decode(torch.cat(sampled, 1))]
    right = [text.rpartition(":")[2] == str(a + b) for text, (a, b) in zip(texts, pairs, strict=True)]
    return sum(right) / len(right)


def sampled_rules(model: Qwen3ForCausalLM, texts: list[str], vocabulary: dict[str, int], seed: int) -> float:
    """Share of the rules that hold in pictures of the descriptions `texts`, one sampled at temperature 1 for each."""
    characters, end = {token: character for character, token in vocabulary.items()}, vocabulary[SPECIAL["eos_token"]]
    contexts = [[vocabulary[character] for character in f"{text}:"] for text in texts]
    sampled = calls.sample(model, contexts, end, torch.Generator().manual_seed(seed), LONGEST_PICTURE)
    pictures = ["".join(characters[token] for token in ids if token != end) for ids in sampled]
    return sum(glyphs.rules(texts, pictures, description=texts)) / len(texts)
