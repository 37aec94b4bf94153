"""The adapter that the learner exports, as PEFT sees it."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model_state_dict
from transformers import AutoModelForCausalLM

from configs.schema import ModelConfig
from learner import lora
from tests.learner.conftest import MakeLearner, gradient_of
from tests.learner.setting import CANARY, make_batch, run_config


@pytest.mark.parametrize("stage", [0, 3])
def test_an_exported_adapter_loads_in_peft_and_answers_the_canary(
    make_learner: MakeLearner, tiny_model: Path, tmp_path: Path, stage: int
) -> None:
    learner = make_learner(zero_stage=stage, lr=1e-2)
    learner.step(make_batch())
    learner.step(make_batch(1))
    adapter = learner.export(2)
    assert adapter is not None
    adapter.verify()
    adapter.save(tmp_path)
    model: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), str(tmp_path)).eval()
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    assert {name: tensor.shape for name, tensor in state.items()} == {
        name: tensor.shape for name, tensor in adapter.tensors.items()
    }
    assert all(np.array_equal(tensor.numpy(), adapter.tensors[name]) for name, tensor in state.items())

    def logps() -> torch.Tensor:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([CANARY])).logits[0, :-1].log_softmax(-1)
        return logits.gather(-1, torch.tensor(CANARY)[1:, None]).squeeze(-1)

    assert adapter.canary.tokens == CANARY
    assert adapter.canary.adapted[0] == adapter.canary.base[0] == 0
    np.testing.assert_allclose(adapter.canary.adapted[1:], logps(), atol=2e-6)
    with model.disable_adapter():
        np.testing.assert_allclose(adapter.canary.base[1:], logps(), atol=2e-6)
    assert np.abs(adapter.canary.adapted - adapter.canary.base).max() > 0.01


def test_the_adapter_config_is_what_peft_saves(make_learner: MakeLearner, tmp_path: Path) -> None:
    adapter = make_learner(run_config(lora={"targets": ["q_proj", "v_proj"], "r": 2, "alpha": 3.5})).export(0)
    assert adapter is not None
    adapter.save(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert saved == adapter.config
    assert (saved["peft_type"], saved["task_type"], saved["r"], saved["lora_alpha"]) == ("LORA", "CAUSAL_LM", 2, 3.5)
    assert (saved["target_modules"], saved["base_model_name_or_path"]) == (["q_proj", "v_proj"], "demo")
    PeftLoraConfig(target_modules=["q_proj", "v_proj"], r=2, task_type="CAUSAL_LM").save_pretrained(
        str(tmp_path / "peft")
    )
    assert saved.keys() == json.loads((tmp_path / "peft" / "adapter_config.json").read_text()).keys()


def test_a_fresh_adapter_changes_nothing_and_follows_the_seed(make_learner: MakeLearner) -> None:
    first, same, other = (make_learner(run_config().model_copy(update={"seed": seed})).export(0) for seed in (3, 3, 4))
    assert first is not None and same is not None and other is not None
    assert first.digest == same.digest != other.digest
    np.testing.assert_allclose(first.canary.adapted, first.canary.base, atol=1e-6)
    assert not any(tensor.any() for name, tensor in first.tensors.items() if "lora_B" in name)
    assert all(tensor.any() for name, tensor in first.tensors.items() if "lora_A" in name)


def test_later_steps_do_not_change_an_exported_adapter(make_learner: MakeLearner) -> None:
    learner = make_learner()
    adapter = learner.export(0)
    learner.step(make_batch())
    assert adapter is not None
    adapter.verify()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_bfloat16_base_trains_a_float32_adapter(
    make_learner: MakeLearner, start: Path, tmp_path: Path, stage: int
) -> None:
    gradients = []
    for dtype in ("float32", "bfloat16"):
        learner = make_learner(run_config(model={"dtype": dtype}, zero_stage=stage, loss={"name": "policy_gradient"}))
        learner.load(start)
        learner.step(make_batch())
        learner.save(tmp_path / dtype)
        gradients.append(torch.cat([g.flatten() for g in gradient_of(tmp_path / dtype).values()]))
        adapter = learner.export(1)
        assert adapter is not None
        assert {tensor.dtype for tensor in adapter.tensors.values()} == {np.dtype("float32")}
        # values that bfloat16 cannot hold
        assert any(not np.array_equal(t, torch.tensor(t).bfloat16().float().numpy()) for t in adapter.tensors.values())
        kinds = {p.dtype for p in learner.policy.parameters() if not p.requires_grad}
        assert kinds == {getattr(torch, dtype)}
    assert torch.cosine_similarity(*gradients, dim=0) > 0.99


def test_targets_that_match_nothing_are_named_with_those_that_exist(tiny_model: Path) -> None:
    lora.check_targets(tiny_model, "all-linear")
    lora.check_targets(tiny_model, ["q_proj", "mlp.down_proj"])
    with pytest.raises(
        ValueError, match=r"lora.targets: 'query' matches no linear layer of .*: down_proj, gate_proj, k_proj, o_proj"
    ):
        lora.check_targets(tiny_model, ["q_proj", "query"])
    with pytest.raises(ValueError, match="'lm_head' matches no linear layer"):
        lora.check_targets(tiny_model, ["lm_head"])


def test_a_model_that_reshapes_its_logits_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "capped")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"final_logit_softcapping": 30.0}))
    with pytest.raises(ValueError, match="the learner needs logits that are one linear layer without bias"):
        lora.load_base(str(folder), ModelConfig())
