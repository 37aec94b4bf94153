"""Several LoRA adapters resident in one model, in a fixed number of PEFT adapters."""

from typing import Any

import numpy as np
import torch
from peft import PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from transformers import PreTrainedModel

from credit.adapter import Adapter, label


class AdapterSlots:
    """PEFT adapters `slot0`, `slot1`, ... of `model`, each made when first needed and then refilled for ever.

    A version is known by its policy ("" unless several runs share the model) and its number. Policies may have
    different LoRA configs: a slot is refilled with the config that it was made for.

    Refilling copies tensors: no allocation, no growth over the versions of a run. Making and deleting a PEFT adapter
    for every version takes 20 ms at 0.6M parameters, most of it random initialisation that is overwritten at once.
    """

    def __init__(self, model: PreTrainedModel, slots: int) -> None:
        self.model = model
        self.slots = slots
        self.resident: dict[tuple[str, int], tuple[int, str]] = {}  # policy, version -> slot, digest
        self.active: int | None = None  # the slot that forwards go through; None is the base model
        self.config: dict[str, dict[str, Any]] = {}  # of each policy: the first adapter's, and so everyone's
        self.made_for: list[dict[str, Any]] = []  # config of each slot made so far
        self.peft: PeftModel | None = None
        self.layers: list[BaseTunerLayer] = []
        self.tensors: list[dict[str, Tensor]] = []  # of each slot made so far, under PEFT's checkpoint names

    def load(self, adapter: Adapter) -> None:
        """Make `adapter` resident; one that is already here stays as it is.

        Raises ValueError when the adapter is damaged or was made for another base model, RuntimeError when no slot is
        free or the version is here with other content.
        """
        where, key = f"adapter {adapter}", (adapter.policy, adapter.version)
        adapter.verify()
        if key in self.resident:
            if self.resident[key][1] != adapter.digest:
                raise RuntimeError(f"{where}: resident with another digest: a version is never reloaded")
            return
        if len(self.resident) >= self.slots:
            raise RuntimeError(
                f"{where}: got a new version with {self._describe()} resident, expected at most {self.slots} "
                "(max_staleness + 2 of each run): unload one first"
            )
        slot = self._free(adapter)
        self._check(where, adapter.tensors, self.tensors[slot])
        with torch.no_grad():
            for name, tensor in self.tensors[slot].items():
                tensor.copy_(torch.from_numpy(np.array(adapter.tensors[name])))
        self.resident[key] = (slot, adapter.digest)

    def unload(self, version: int, policy: str = "") -> None:
        """Free the version's slot for the next `load`. Raises RuntimeError if it is not resident."""
        if self.active == self._entry(version, policy)[0]:
            self.activate(None)
        del self.resident[policy, version]

    def digest(self, version: int, policy: str = "") -> str:
        """Content digest of a resident version. Raises RuntimeError if it is not resident."""
        return self._entry(version, policy)[1]

    def activate(self, version: int | None, policy: str = "") -> None:
        """Send forwards through a version or, with None, through the base model.

        Raises RuntimeError if the version is not resident.
        """
        slot = None if version is None else self._entry(version, policy)[0]
        if slot != self.active:
            # layer by layer: PEFT's own disable_adapter takes 5 ms at 0.6M parameters, more than a forward
            for layer in self.layers:
                layer.set_adapter([] if slot is None else [f"slot{slot}"], inference_mode=True)
            self.active = slot

    def _entry(self, version: int, policy: str) -> tuple[int, str]:
        if (policy, version) not in self.resident:
            raise RuntimeError(
                f"adapter {label(version, policy)}: not resident, expected one of {self._describe()}: load it"
            )
        return self.resident[policy, version]

    def _describe(self) -> str:
        return f"[{', '.join(label(version, policy) for policy, version in sorted(self.resident))}]"

    def _free(self, adapter: Adapter) -> int:
        """A free slot that was made for the adapter's config; PEFT makes one where there is none."""
        config = self.config.setdefault(adapter.policy, adapter.config)
        if adapter.config != config:
            names = sorted(adapter.config.keys() | config.keys())
            changed = [name for name in names if adapter.config.get(name) != config.get(name)]
            raise ValueError(
                f"adapter {adapter}: its config differs from the first adapter's in {changed}, expected one "
                "LoRA config for all versions of a run"
            )
        taken = {slot for slot, _ in self.resident.values()}
        free = [slot for slot, made_for in enumerate(self.made_for) if slot not in taken and made_for == config]
        if free:
            return free[0]
        self._make(adapter)
        return len(self.made_for) - 1

    def _make(self, adapter: Adapter) -> None:
        """Let PEFT make the adapter of the next slot."""
        name, config = f"slot{len(self.made_for)}", PeftConfig.from_peft_type(**adapter.config)
        if self.peft is None:
            peft = get_peft_model(self.model, config, adapter_name=name)
            assert isinstance(peft, PeftModel)
            self.peft = peft
            self.layers = [module for module in self.model.modules() if isinstance(module, BaseTunerLayer)]
        else:
            self.peft.add_adapter(name, config)
        self.made_for.append(adapter.config)
        self.peft.eval().requires_grad_(False)
        self.tensors.append(get_peft_model_state_dict(self.peft, adapter_name=name, save_embedding_layers=False))
        for layer in self.layers:  # PEFT switches a new adapter on
            layer.set_adapter([], inference_mode=True)
        self.active = None

    @staticmethod
    def _check(where: str, tensors: dict[str, np.ndarray], expected: dict[str, Tensor]) -> None:
        if missing := sorted(expected.keys() - tensors.keys()):
            raise ValueError(
                f"{where}: {len(missing)} tensors are missing, as {missing[0]}: its base model or its targets are not "
                "those of this model and config"
            )
        if extra := sorted(tensors.keys() - expected.keys()):
            raise ValueError(
                f"{where}: {len(extra)} tensors have no place in this model, as {extra[0]}: its base model or its "
                "targets are not those of this model and config"
            )
        for name, tensor in expected.items():
            if tensors[name].shape != tuple(tensor.shape):
                raise ValueError(
                    f"{where}: {name} has the wrong shape, got {tensors[name].shape}, expected {tuple(tensor.shape)}: "
                    "its rank or its base model's sizes are not those of this model and config"
                )
