"""LoRA on a frozen base model: build, check, export and load, in PEFT's layout."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, TaskType, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from configs.schema import LoraConfig, ModelConfig
from learner.policy import Head

SCALED_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale")


def load_base(model_path: str, config: ModelConfig) -> PreTrainedModel:
    """The frozen base model, without dropout, with its LM head replaced by `policy.Head`.

    Raises ValueError for models that do more to the logits than one bias-free linear layer.
    """
    model = AutoModelForCausalLM.from_pretrained(
        model_path,
        dtype=getattr(torch, config.dtype),
        attn_implementation="packed",
        trust_remote_code=config.trust_remote_code,
    )
    scaled = [name for name in SCALED_LOGITS if getattr(model.config, name, None) not in (None, 1, 1.0)]
    head = model.get_output_embeddings()
    if scaled or not isinstance(head, nn.Linear) or head.bias is not None:
        raise ValueError(
            f"model.path={model_path}: the learner needs logits that are one linear layer without bias, got "
            f"{type(head).__name__} with {scaled or 'a bias'}: choose another model"
        )
    model.set_output_embeddings(Head(head))
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def add_lora(model: PreTrainedModel, config: LoraConfig, *, seed: int, base: str) -> PeftModel:
    """Wrap the base in a fresh float32 LoRA (B = 0). The same seed gives the same weights in every process.

    `base` is the model's name as the adapter's config records it.
    """
    peft_config = PeftLoraConfig(
        task_type=TaskType.CAUSAL_LM,
        base_model_name_or_path=model.name_or_path,
        r=config.r,
        lora_alpha=int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=config.dropout,
        target_modules=config.targets,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lora = get_peft_model(model, peft_config, autocast_adapter_dtype=True)
    assert isinstance(lora, PeftModel)
    lora.peft_config["default"].base_model_name_or_path = base
    for parameter in lora_parameters(lora).values():
        parameter.data = parameter.data.float()
    return lora


def lora_parameters(lora: PeftModel) -> dict[str, nn.Parameter]:
    """Trainable parameters under PEFT's checkpoint names, in the model's order."""
    return {
        name.replace(".default.", "."): parameter
        for name, parameter in lora.named_parameters()
        if parameter.requires_grad
    }


def adapter_config(lora: PeftModel) -> dict[str, Any]:
    """The content of adapter_config.json: what PEFT's save_pretrained writes, with every set sorted."""
    config = lora.peft_config["default"].to_dict() | {"inference_mode": True}
    return {name: _plain(value) for name, value in config.items()}


def check_targets(model_path: str | Path, targets: list[str] | str, *, trust_remote_code: bool = False) -> None:
    """Raise ValueError when a LoRA target matches no linear layer of the model. Reads the model's config only."""
    if isinstance(targets, str):
        return
    config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    head = model.get_output_embeddings()
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            raise ValueError(
                f"lora.targets: {target!r} matches no linear layer of {model_path}, expected all-linear or some of: "
                f"{known}"
            )


def _plain(value: Any) -> Any:
    """JSON's types only, the same for the same configuration."""
    if isinstance(value, set):
        return sorted(value)
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    return getattr(value, "value", value)  # PEFT's enums
