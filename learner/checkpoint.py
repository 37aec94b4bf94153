"""LoRA weights and Adam moments as plain tensors, whatever ZeRO does with them, and their files.

DeepSpeed keeps each trainable parameter whole (stage 0) or as fragments of flat partitions (stages 1-3). `Shards` maps
between the fragments that this rank holds and full tensors, with one collective for all parameters.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")
TENSORS_FILE, STATE_FILE = "learner.safetensors", "learner.json"


@dataclass(frozen=True, slots=True)
class Fragment:
    """`numel` elements of a parameter, from `source` on, that lie in `flat` from `start` on."""

    name: str
    source: int
    flat: Tensor
    start: int
    numel: int


class Shards:
    """The trainable state of a DeepSpeed engine as full tensors by name."""

    def __init__(self, engine: Any, parameters: dict[str, nn.Parameter]) -> None:
        self.stage = int(engine.zero_optimization_stage())
        self.optimizer = engine.optimizer  # ZeRO's wrapper, or torch's AdamW at stage 0
        self.adam: torch.optim.Optimizer = self.optimizer.optimizer if self.stage else self.optimizer
        self.parameters = parameters
        self.shapes = {name: getattr(p, "ds_shape", p.shape) for name, p in parameters.items()}
        self.fragments = [
            fragment for name, parameter in parameters.items() if (fragment := self._fragment(name, parameter))
        ]
        self.offsets: dict[str, int] = {}
        self.total = 0
        for name, shape in self.shapes.items():
            self.offsets[name] = self.total
            self.total += shape.numel()

    def weights(self) -> dict[str, Tensor]:
        """Full float32 weights. A collective at stage 3; the tensors may alias the parameters."""
        if self.stage < 3:
            return {name: parameter.detach() for name, parameter in self.parameters.items()}
        return self._gather([lambda flat: flat])[0]

    def moments(self) -> list[dict[str, Tensor]]:
        """Adam's first and second moments, full, zeros before the first update. A collective at stages 1-3."""
        return self._gather([lambda flat, key=key: self.adam.state.get(flat, {}).get(key) for key in MOMENTS])

    def load(self, weights: dict[str, Tensor], moments: list[dict[str, Tensor]], updates: int) -> None:
        """Set this rank's part of everything from full tensors. Every rank must call it."""
        for flat in {id(f.flat): f.flat for f in self.fragments}.values():
            self.adam.state.pop(flat, None)
            if updates:
                self.adam.state[flat] = {"step": torch.tensor(float(updates))} | {
                    key: torch.zeros_like(flat, requires_grad=False) for key in MOMENTS
                }
        with torch.no_grad():
            self._load_parameters(weights)
            for f in self.fragments:
                part = slice(f.source, f.source + f.numel)
                f.flat.view(-1)[f.start : f.start + f.numel].copy_(weights[f.name].flatten()[part])
                for key, moment in zip(MOMENTS, moments, strict=True):
                    if updates:
                        state = self.adam.state[f.flat][key].view(-1)
                        state[f.start : f.start + f.numel].copy_(moment[f.name].flatten()[part])

    def _load_parameters(self, weights: dict[str, Tensor]) -> None:
        """The parameters that forward uses; ZeRO keeps them apart from the partitions that Adam updates."""
        if self.stage == 3:
            import deepspeed

            with deepspeed.zero.GatheredParameters(list(self.parameters.values()), modifier_rank=0):
                if dist.get_rank() == 0:
                    for name, parameter in self.parameters.items():
                        parameter.copy_(weights[name])
        else:
            for name, parameter in self.parameters.items():
                parameter.copy_(weights[name])

    def _gather(self, reads: list[Any]) -> list[dict[str, Tensor]]:
        device = next(iter(self.parameters.values())).device
        buffer = torch.zeros(len(reads), self.total, device=device)
        for row, read in enumerate(reads):
            for f in self.fragments:
                held = read(f.flat)
                if held is not None:
                    at = self.offsets[f.name] + f.source
                    buffer[row, at : at + f.numel] = held.detach().view(-1)[f.start : f.start + f.numel]
        if self.stage and dist.get_world_size() > 1:
            dist.all_reduce(buffer)  # each element is held by one rank, and zero elsewhere: exact
        return [
            {
                name: row[at : at + self.shapes[name].numel()].view(self.shapes[name])
                for name, at in self.offsets.items()
            }
            for row in buffer
        ]

    def _fragment(self, name: str, parameter: Any) -> Fragment | None:
        if self.stage == 0:
            return Fragment(name, 0, parameter, 0, parameter.numel())
        if self.stage == 3:
            group, start, numel = self.optimizer.grad_position[self.optimizer.get_param_id(parameter)]
            source = dist.get_rank() * numel
            numel = min(numel, self.shapes[name].numel() - source)  # the last partition is padded
            return (
                Fragment(name, source, self.optimizer.fp32_partitioned_groups_flat[group], start, numel)
                if numel > 0
                else None
            )
        mapping = parameter._hp_mapping
        if mapping is None:  # another rank's
            return None
        low, high = mapping.lp_fragment_address, mapping.hp_fragment_address
        flat = self.optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
        return Fragment(name, low.start, flat, high.start, low.numel)


def write(folder: Path, weights: dict[str, Tensor], moments: list[dict[str, Tensor]], state: dict[str, Any]) -> None:
    """Write tensors and state to `folder` and fsync them; the folder is made if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{kind}/{name}": tensor.cpu().contiguous()
        for kind, part in zip(("weight", *MOMENTS), (weights, *moments), strict=True)
        for name, tensor in part.items()
    }
    for name, content in ((TENSORS_FILE, save(tensors)), (STATE_FILE, json.dumps(state, indent=1).encode())):
        with open(folder / name, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


def read(
    folder: Path, shapes: dict[str, torch.Size]
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]], dict[str, Any]]:
    """Weights, moments and state of `folder`. Raises ValueError when they are of another LoRA than `shapes`."""
    tensors = load_file(folder / TENSORS_FILE)
    state = json.loads((folder / STATE_FILE).read_text())
    expected = {f"{kind}/{name}": shape for kind in ("weight", *MOMENTS) for name, shape in shapes.items()}
    actual = {name: tensor.shape for name, tensor in tensors.items()}
    if actual != expected:
        different = sorted(name for name in actual.keys() | expected.keys() if actual.get(name) != expected.get(name))
        raise ValueError(
            f"checkpoint {folder}: it is of another LoRA: {different[0]} and {len(different) - 1} more differ, got "
            f"{actual.get(different[0])}, expected {expected.get(different[0])}: resume with the lora and model "
            "settings it was made with"
        )
    parts = [{name: tensors[f"{kind}/{name}"] for name in shapes} for kind in ("weight", *MOMENTS)]
    return parts[0], parts[1:], state
