"""Adapters on disk: which version, whether it is what was saved, and the log-probs that PEFT gives it.

Dimensions: T tokens of a sequence.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from configs.schema import ModelConfig
from credit.adapter import Adapter, Canary, digest

SETTINGS, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def version_folder(run: Path, version: str) -> Path:
    """The folder of a version, by number, "best" or "last", below a run's folder. Raises ValueError."""
    adapters = run / "adapters"
    have = sorted(int(path.name[1:]) for path in adapters.glob("v[0-9]*"))
    if version == "last" and have:
        return adapters / f"v{have[-1]:06d}"
    if version == "best" and (adapters / "best").exists():
        return adapters / (adapters / "best").readlink()
    if version.removeprefix("v").isdecimal() and int(version.removeprefix("v")) in have:
        return adapters / f"v{int(version.removeprefix('v')):06d}"
    known = f"v{have[0]} to v{have[-1]}, last" if have else "none yet"
    best = ", best" if (adapters / "best").exists() else "; best is known once the run has evaluated a version"
    raise ValueError(f"version: {run} has no {version!r}, expected one of its adapters: {known}{best}")


def digest_on_disk(folder: Path) -> str | None:
    """The digest that an adapter was saved with; None for one that another program wrote, and where there is none."""
    if not (folder / TENSORS).exists():
        return None
    with safe_open(folder / TENSORS, "np") as file:
        return (file.metadata() or {}).get("digest")


def read_version(folder: Path, vocabulary: int) -> Adapter:
    """An adapter that a run saved, under its version. Raises ValueError when it is not what was saved."""
    adapter = read_adapter(folder, vocabulary)
    saved = digest_on_disk(folder)
    if saved != adapter.digest:
        raise ValueError(
            f"adapter: {folder}: got content of digest {adapter.digest[:12]}, expected {str(saved)[:12]}, which it was "
            "saved with: it was changed since"
        )
    return replace(adapter, version=int(folder.name[1:]))


def read_adapter(folder: Path, vocabulary: int) -> Adapter:
    """The LoRA adapter in a folder that PEFT wrote, as version 1, for a model of that vocabulary. Raises ValueError."""
    settings, tensors = folder / SETTINGS, folder / TENSORS
    if not folder.is_dir():
        raise ValueError(f"adapter: {folder} is no folder, expected one with {settings.name} and {tensors.name}")
    if not tensors.is_file() and (folder / "adapter_model.bin").exists():
        raise ValueError(
            f"adapter: {folder} has adapter_model.bin, a pickle, which may run any code: save it as {tensors.name}"
        )
    for file in (settings, tensors):
        if not file.is_file():
            raise ValueError(f"adapter: {folder} has no {file.name}")
    try:
        config = json.loads(settings.read_text())
        kind = config.get("peft_type") if isinstance(config, dict) else None
        if kind != "LORA" or not config.get("target_modules"):
            raise ValueError(f"got peft_type {kind!r}, expected 'LORA' with its target_modules")
        PeftConfig.from_peft_type(**config)
        values = {name: tensor.float().numpy() for name, tensor in load_file(tensors).items()}
    except SafetensorError as error:
        raise ValueError(f"adapter: {tensors}: {error}") from error
    except (TypeError, ValueError) as error:  # TypeError: a setting that this PEFT does not know
        raise ValueError(f"adapter: {settings}: {error}") from error
    for name, value in values.items():
        if name.endswith((".lora_A.weight", ".lora_B.weight")):
            continue
        if ("embed" in name or "lm_head" in name) and vocabulary not in value.shape:
            raise ValueError(
                f"adapter: {tensors}: {name} has the shape {value.shape}, expected the model's vocabulary of "
                f"{vocabulary}: it was made for another base model"
            )
        raise ValueError(
            f"adapter: {tensors}: {name} is no LoRA factor of a linear layer, expected nothing else: embeddings, "
            "modules_to_save and DoRA cannot be scored"
        )
    if isinstance(config["target_modules"], str):  # a pattern; its matches, by name, are what it stands for
        config["target_modules"] = sorted({name.split(".lora_")[0].split(".", 2)[2] for name in values})
    return _adapter(1, values, config)


def zero_adapter(model: str, targets: list[str] | str = "all-linear", *, trust_remote_code: bool = False) -> Adapter:
    """A LoRA that changes nothing: the policy is the base model itself."""
    with torch.device("meta"):
        settings = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
        base = AutoModelForCausalLM.from_config(settings, trust_remote_code=trust_remote_code)
    config = LoraConfig(r=1, target_modules=targets, task_type="CAUSAL_LM")
    lora = get_peft_model(base, config)
    shapes = get_peft_model_state_dict(lora, save_embedding_layers=False)
    written = config.to_dict() | {"target_modules": sorted(config.target_modules or ())}
    return _adapter(0, {name: np.zeros(value.shape, np.float32) for name, value in shapes.items()}, written)


def _adapter(version: int, tensors: dict[str, np.ndarray], config: dict[str, Any]) -> Adapter:
    # the process that reads it serves it: there is no learner whose answer a canary could be compared with
    canary = Canary(tokens=[0], adapted=np.zeros(1, np.float32), base=np.zeros(1, np.float32))
    return Adapter(version=version, digest=digest(tensors, config), tensors=tensors, config=config, canary=canary)


def with_canary(adapter: Adapter, folder: Path | None, model: str, config: ModelConfig, tokens: list[int]) -> Adapter:
    """The adapter with what transformers and PEFT answer to `tokens` [T]: where no learner can say what is right.

    `folder` is where PEFT loads it from; None for one that changes nothing. The model is loaded on the CPU and freed.
    Raises ValueError when the adapter does not fit the model.
    """
    base = load_model(model, config, getattr(torch, config.dtype))
    plain = logprobs(base, tokens)
    adapted = plain if folder is None else logprobs(attach(base, folder), tokens)
    return replace(adapter, canary=Canary(tokens=tokens, adapted=adapted, base=plain))


def load_model(model: str, config: ModelConfig, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=dtype, trust_remote_code=config.trust_remote_code).eval()


def attach(base: Any, folder: Path) -> PeftModel:
    """PEFT's own reading of the adapter. Raises ValueError when it was made for another base model."""
    try:
        return PeftModel.from_pretrained(base, str(folder)).eval()
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"adapter: {folder} does not fit the base model: {reason}") from error


@torch.inference_mode()
def logprobs(model: Any, tokens: list[int]) -> np.ndarray:
    """Log-prob of each token at temperature 1 by one plain forward pass, [T] -> [T] float32, 0 at position 0."""
    tokens_1T = torch.tensor([tokens], device=model.device)
    logp_TV = model(input_ids=tokens_1T).logits[0, :-1].float().log_softmax(-1)
    logp_T = logp_TV.gather(1, tokens_1T[0, 1:, None])[:, 0]
    return np.concatenate([np.zeros(1, np.float32), logp_T.cpu().numpy()])
