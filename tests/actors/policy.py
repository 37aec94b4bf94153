"""Adapters made with PEFT, and their log-probs by transformers: what the engine is compared with."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from transformers import AutoModelForCausalLM

from configs.schema import RunConfig
from credit.adapter import Adapter, Canary, digest

RANK = 12  # not one of vLLM's ranks: the slots are larger than the adapters


class Policy:
    """The same base model outside vLLM, in float32."""

    def __init__(self, folder: Path, rank: int = RANK) -> None:
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        config = LoraConfig(r=rank, lora_alpha=24, target_modules="all-linear", task_type="CAUSAL_LM")
        self.model = get_peft_model(base, config)

    def adapter(self, version: int, scale: float = 0.1) -> Adapter:
        """Random matrices, another for every version; B is not zero."""
        generator = torch.Generator().manual_seed(version)
        tensors = {
            name: (torch.randn(tensor.shape, generator=generator) * scale).numpy()
            for name, tensor in get_peft_model_state_dict(self.model).items()
        }
        config = self.model.peft_config["default"].to_dict()
        config = json.loads(
            json.dumps(config, default=lambda value: sorted(value) if isinstance(value, set) else str(value))
        )
        unknown = np.zeros(20, np.float32)
        canary = Canary(tokens=list(range(5, 25)), adapted=unknown, base=unknown)
        return Adapter(version=version, digest=digest(tensors, config), tensors=tensors, config=config, canary=canary)

    @torch.no_grad()
    def logprobs(self, adapter: Adapter | None, tokens: Any, temperature: float = 1.0) -> np.ndarray:
        """Log-prob of each token under an adapter (None: the base model), [T] -> [T] float32, 0 at position 0."""
        tokens_1T = torch.tensor(np.asarray(tokens))[None]
        if adapter is None:
            with self.model.disable_adapter():
                logits_TV = self.model(tokens_1T).logits[0]
        else:
            set_peft_model_state_dict(self.model, {k: torch.from_numpy(v) for k, v in adapter.tensors.items()})
            logits_TV = self.model(tokens_1T).logits[0]
        logprobs_TV = torch.log_softmax(logits_TV / temperature, -1)
        return np.array([0.0, *(logprobs_TV[t - 1, token] for t, token in enumerate(tokens_1T[0]) if t)], np.float32)


def run_config(max_staleness: int = 1, max_length: int = 512, **rollout: Any) -> RunConfig:
    rollout = {"max_new_tokens": 24, "kv_cache_gb": 0.1, "timeout_s": 30.0, **rollout}
    return RunConfig.model_validate(
        {
            "name": "test",
            "steps": 1,
            "max_staleness": max_staleness,
            "data": {"task": "arithmetic"},
            "model": {"max_length": max_length},
            "lora": {"r": RANK, "alpha": 24},
            "rollout": rollout,
        }
    )
