"""Episodes in the learner: what an environment said is read, and never trained."""

from dataclasses import fields
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from configs.schema import LossConfig, ModelConfig
from credit.trajectory import Batch
from learner import lora, policy
from learner.loss import policy_loss, row_scale
from tests.learner.setting import make_batch


def with_observations() -> Batch:
    """Two groups of rows in which positions 7 and 8 are an observation, and 9 and later the next turn."""
    batch = make_batch(groups=2)
    hole = torch.zeros_like(batch.mask)
    hole[:, 7:9] = True
    mask = batch.mask & ~hole
    changed = {"mask": mask} | {
        name: getattr(batch, name) * mask for name in ("advantages", "logp_old", "logp_rollout", "logp_base")
    }
    return Batch(**{field.name: changed.get(field.name, getattr(batch, field.name)) for field in fields(Batch)})


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_the_loss_is_the_one_worked_out_from_full_logits(tiny_model: Path, packing: bool, aggregation: str):
    batch = with_observations()
    config = LossConfig.model_validate({"name": "ppo_clip", "mismatch": "off", "aggregation": aggregation})
    scale = row_scale(batch.mask, aggregation, 16)
    model = policy.Policy(lora.load_base(str(tiny_model), ModelConfig()), packing=packing)
    with torch.no_grad():
        logp, entropy = model(batch.tokens, batch.lengths, batch.mask)
        loss, metrics = policy_loss(logp, entropy, batch, scale, config)

    reference = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    expected, tokens = 0.0, int(batch.mask.sum())
    for row in range(len(batch.tokens)):
        length = int(batch.lengths[row])
        with torch.no_grad():
            logps = reference(input_ids=batch.tokens[row : row + 1, :length]).logits[0].log_softmax(-1)
        mine = [t for t in range(length) if batch.mask[row, t]]
        assert 7 not in mine and 8 not in mine and 9 in mine
        each = {"token": 1 / tokens, "sequence": 1 / (8 * len(mine)), "constant": 1 / (8 * 16)}[aggregation]
        for t in mine:
            ratio = float(torch.exp(logps[t - 1, batch.tokens[row, t]] - batch.logp_old[row, t]))
            advantage = float(batch.advantages[row, t])
            expected -= each * min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
    assert float(loss) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert int(metrics["tokens"]) == tokens


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_no_gradient_comes_from_predicting_an_observation(tiny_model: Path, packing: bool):
    batch = with_observations()
    base = lora.load_base(str(tiny_model), ModelConfig())
    base.get_input_embeddings().weight.requires_grad_(True)
    states = []

    def keep(module, inputs, output):
        output.last_hidden_state.retain_grad()
        states.append(output.last_hidden_state)

    base.get_decoder().register_forward_hook(keep)
    logp, entropy = policy.Policy(base, packing=packing)(batch.tokens, batch.lengths, batch.mask)
    config = LossConfig.model_validate({"name": "policy_gradient", "mismatch": "off"})
    policy_loss(logp, entropy, batch, row_scale(batch.mask, "token", 16), config)[0].backward()
    gradient = states[0].grad
    if packing:  # back to rows
        real = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]
        rows = torch.zeros(*batch.tokens.shape, gradient.shape[-1])
        rows[real] = gradient[0]
        gradient = rows
    predicts = torch.nn.functional.pad(batch.mask[:, 1:], (0, 1)) & (batch.advantages.abs().sum(1, keepdim=True) > 0)
    assert torch.equal(gradient.abs().sum(-1) > 0, predicts)
    # 6 and 7 predict the observation; 8, its last token, predicts the next turn's first
    assert not gradient[:, 6:8].any() and gradient[:4, 8].any()
