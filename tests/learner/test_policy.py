"""The packed forward and the chunked LM head against transformers' own logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from configs.schema import ModelConfig
from learner import lora, policy
from tests.learner.setting import make_batch

SMALL: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
ARCHITECTURES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=5)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SMALL, sliding_window=5)),
}


@pytest.fixture(params=["qwen3", *ARCHITECTURES])
def folder(request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path) -> Path:
    if request.param == "qwen3":
        return tiny_model
    torch.manual_seed(0)
    ARCHITECTURES[request.param]().save_pretrained(tmp_path)
    return tmp_path


def expected(folder: Path, batch: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Log-probs and entropies of the policy tokens from the padded logits of eager attention."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    attention = torch.arange(batch.tokens.shape[1])[None] < batch.lengths[:, None]
    logps = model(input_ids=batch.tokens, attention_mask=attention.long()).logits.log_softmax(-1)[:, :-1]
    chosen = logps.gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)
    entropy = -(logps.exp() * logps).sum(-1)
    return chosen[batch.mask[:, 1:]], entropy[batch.mask[:, 1:]], model


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_log_probs_and_their_gradients_are_those_of_the_full_logits(
    folder: Path, packing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "HEAD_CHUNK", 7)
    batch = make_batch(groups=2)
    base = lora.load_base(str(folder), ModelConfig())
    weight = next(p for name, p in base.named_parameters() if name.endswith("layers.0.self_attn.q_proj.weight"))
    weight.requires_grad_(True)
    logp_BT, entropy_BT = policy.Policy(base, packing=packing)(
        batch.tokens, batch.lengths, batch.mask, entropy_gradient=True
    )
    logp, entropy, reference = expected(folder, batch)
    torch.testing.assert_close(logp_BT[batch.mask], logp, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy_BT[batch.mask], entropy, rtol=1e-5, atol=1e-5)
    assert not logp_BT[~batch.mask].any()

    random = torch.randn(2, len(logp), generator=torch.Generator().manual_seed(1))
    (logp_BT[batch.mask] @ random[0] + entropy_BT[batch.mask] @ random[1]).backward()
    (logp @ random[0] + entropy @ random[1]).backward()
    like = next(p for name, p in reference.named_parameters() if name.endswith("layers.0.self_attn.q_proj.weight"))
    assert like.grad.abs().max() > 1e-4
    torch.testing.assert_close(weight.grad, like.grad, rtol=1e-3, atol=1e-5)


def test_logits_are_divided_by_the_temperature(tiny_model: Path) -> None:
    base = lora.load_base(str(tiny_model), ModelConfig())
    batch = make_batch(groups=1)
    logp_BT, entropy_BT = policy.Policy(base, packing=True)(batch.tokens, batch.lengths, batch.mask, temperature=0.5)
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for row in range(4):
        tokens = batch.tokens[row, : int(batch.lengths[row])]
        full = (plain(input_ids=tokens[None]).logits[0, :-1].detach() / 0.5).log_softmax(-1)
        mask = batch.mask[row, 1 : len(tokens)]
        expected = full.gather(1, tokens[1:, None])[:, 0]
        torch.testing.assert_close(logp_BT[row, 1 : len(tokens)][mask], expected[mask], rtol=0, atol=1e-5)
        entropy = -(full.exp() * full).sum(1)
        torch.testing.assert_close(entropy_BT[row, 1 : len(tokens)][mask], entropy[mask], rtol=0, atol=1e-5)


def test_a_row_does_not_see_the_rows_packed_before_it(tiny_model: Path) -> None:
    model = policy.Policy(lora.load_base(str(tiny_model), ModelConfig()), packing=True)
    batch = make_batch(groups=1)
    together, _ = model(batch.tokens, batch.lengths, batch.mask)
    for row in range(4):
        length = int(batch.lengths[row])
        alone, _ = model(
            batch.tokens[row : row + 1, :length], batch.lengths[row : row + 1], batch.mask[row : row + 1, :length]
        )
        torch.testing.assert_close(together[row : row + 1, :length], alone, rtol=0, atol=2e-6)


def test_the_head_never_holds_all_logits() -> None:
    """4,096 positions of a 20k vocabulary: no tensor has more than a quarter of the logits."""
    head = policy.Head(torch.nn.Linear(16, 20_000, bias=False).requires_grad_(False))
    hidden = torch.randn(4096, 16, requires_grad=True)
    largest = 0

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    with Watch():
        logp, _ = head(hidden, torch.arange(4096), False)
    logp.sum().backward()
    assert hidden.grad is not None and hidden.grad.abs().sum() > 0
    assert 0 < largest <= 4096 * 20_000 / 4
