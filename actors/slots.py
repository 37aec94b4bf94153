"""Several versions of one LoRA adapter resident in one model, in a fixed number of PEFT adapters."""

from typing import Any

import numpy as np
import torch
from peft import PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from transformers import PreTrainedModel

from credit.adapter import Adapter


class AdapterSlots:
    """PEFT adapters `slot0`, `slot1`, ... of `model`, each made when first needed and then refilled for ever.

    Refilling copies tensors: no allocation, no growth over the versions of a run. Making and deleting a PEFT adapter
    for every version takes 20 ms at 0.6M parameters, most of it random initialisation that is overwritten at once.
    """

    def __init__(self, model: PreTrainedModel, slots: int) -> None:
        self.model = model
        self.slots = slots
        self.resident: dict[int, tuple[int, str]] = {}  # version -> slot, digest
        self.active: int | None = None  # the version that forwards go through; None is the base model
        self.config: dict[str, Any] = {}  # the first adapter's, and so everyone's
        self.peft: PeftModel | None = None
        self.layers: list[BaseTunerLayer] = []
        self.tensors: list[dict[str, Tensor]] = []  # of each slot made so far, under PEFT's checkpoint names

    def load(self, adapter: Adapter) -> None:
        """Make `adapter` resident; one that is already here stays as it is.

        Raises ValueError when the adapter is damaged or was made for another base model, RuntimeError when no slot is
        free or the version is here with other content.
        """
        where = f"adapter v{adapter.version}"
        adapter.verify()
        if adapter.version in self.resident:
            if self.digest(adapter.version) != adapter.digest:
                raise RuntimeError(f"{where}: resident with another digest: a version is never reloaded")
            return
        if len(self.resident) >= self.slots:
            raise RuntimeError(
                f"{where}: got a new version with {sorted(self.resident)} resident, expected at most {self.slots} "
                "(max_staleness + 2): unload one first"
            )
        slot = min(set(range(self.slots)) - {slot for slot, _ in self.resident.values()})
        self._make(slot, adapter)
        self._check(where, adapter.tensors, self.tensors[slot])
        with torch.no_grad():
            for name, tensor in self.tensors[slot].items():
                tensor.copy_(torch.from_numpy(np.array(adapter.tensors[name])))
        self.resident[adapter.version] = (slot, adapter.digest)

    def unload(self, version: int) -> None:
        """Free the version's slot for the next `load`. Raises RuntimeError if it is not resident."""
        self._entry(version)
        if self.active == version:
            self.activate(None)
        del self.resident[version]

    def digest(self, version: int) -> str:
        """Content digest of a resident version. Raises RuntimeError if it is not resident."""
        return self._entry(version)[1]

    def activate(self, version: int | None) -> None:
        """Send forwards through a version or, with None, through the base model.

        Raises RuntimeError if the version is not resident.
        """
        names = [] if version is None else [f"slot{self._entry(version)[0]}"]
        if version != self.active:
            # layer by layer: PEFT's own disable_adapter takes 5 ms at 0.6M parameters, more than a forward
            for layer in self.layers:
                layer.set_adapter(names, inference_mode=True)
            self.active = version

    def _entry(self, version: int) -> tuple[int, str]:
        if version not in self.resident:
            raise RuntimeError(f"adapter v{version}: not resident, expected one of {sorted(self.resident)}: load it")
        return self.resident[version]

    def _make(self, slot: int, adapter: Adapter) -> None:
        """Let PEFT make the adapter of `slot`, unless an earlier version did."""
        if self.peft is not None and adapter.config != self.config:
            names = sorted(adapter.config.keys() | self.config.keys())
            changed = [name for name in names if adapter.config.get(name) != self.config.get(name)]
            raise ValueError(
                f"adapter v{adapter.version}: its config differs from the first adapter's in {changed}, expected one "
                "LoRA config for all versions of a run"
            )
        if slot < len(self.tensors):
            return
        name, config = f"slot{slot}", PeftConfig.from_peft_type(**adapter.config)
        if self.peft is None:
            peft = get_peft_model(self.model, config, adapter_name=name)
            assert isinstance(peft, PeftModel)
            self.peft, self.config = peft, adapter.config
            self.layers = [module for module in self.model.modules() if isinstance(module, BaseTunerLayer)]
        else:
            self.peft.add_adapter(name, config)
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
