"""The demo's base model: a small Qwen3-shaped model with a character tokenizer, made on the spot."""

import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
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
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model
