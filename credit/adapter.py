"""One version of the policy on its way from the learner to the actors: tensors, PEFT config, digest and canary."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Canary:
    """Fixed tokens with the log-probs that the learner's own model gives them.

    An actor that has really loaded the adapter answers `adapted`; one that serves the base model answers `base`.
    """

    tokens: list[int]  # [T]
    adapted: np.ndarray  # [T] float32, log-prob of each token under the adapter, 0 at position 0
    base: np.ndarray  # [T] float32, the same with the adapter disabled


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adapter:
    """A LoRA adapter in PEFT's layout. `tensors` are float32 under PEFT's checkpoint names."""

    version: int  # optimiser batches behind it; 0 is the fresh adapter (B = 0)
    digest: str  # `digest(tensors, config)`
    tensors: dict[str, np.ndarray]
    config: dict[str, Any]  # the content of adapter_config.json
    canary: Canary
    policy: str = ""  # of a sweep: the run that it belongs to

    def __str__(self) -> str:
        """`v3`, in a sweep `v3 of NAME`."""
        return label(self.version, self.policy)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def verify(self) -> None:
        """Raise ValueError when the tensors are not those that the digest was taken of, or not those of the config."""
        actual = digest(self.tensors, self.config)
        if actual != self.digest:
            raise ValueError(
                f"adapter v{self.version}: the content does not match its digest, got {actual[:12]}, expected "
                f"{self.digest[:12]}: it was changed or truncated on the way"
            )
        rank, targets = self.config["r"], self.config["target_modules"]
        found = {name.split(".lora_")[0] for name in self.tensors}
        named = {module for module in found for target in targets if f".{module}".endswith(f".{target}")}
        unused = [target for target in targets if not any(f".{module}".endswith(f".{target}") for module in found)]
        ranks = {tensor.shape[-1 if "lora_B" in name else 0] for name, tensor in self.tensors.items()}
        if found != named or unused or ranks != {rank}:
            raise ValueError(
                f"adapter v{self.version}: the config does not describe the tensors, got r={rank} and target_modules="
                f"{targets}, expected ranks {sorted(ranks)} and modules {sorted({m.rsplit('.', 1)[-1] for m in found})}"
            )

    def save(self, folder: Path) -> None:
        """Write adapter_model.safetensors and adapter_config.json, as PEFT and vLLM load them."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.tensors, folder / "adapter_model.safetensors", metadata={"format": "pt", "digest": self.digest})
        (folder / "adapter_config.json").write_text(json.dumps(self.config, indent=1, sort_keys=True))


def label(version: int, policy: str) -> str:
    return f"v{version} of {policy}" if policy else f"v{version}"


def digest(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> str:
    """sha256 over the PEFT config and every tensor's name, dtype, shape and bytes, in order of name."""
    sha = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = np.ascontiguousarray(tensors[name])
        sha.update(f"\n{name} {tensor.dtype.str} {tensor.shape}\n".encode())
        sha.update(tensor.data)
    return sha.hexdigest()
