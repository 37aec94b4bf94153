"""The learner: one rank of a DeepSpeed job that trains the LoRA and exports it.

Every rank gets the whole batch of a step and takes its own micro-batches of it. `step`, `export`, `save` and `load` are
collective: all ranks must call them, in the same order, with the same arguments.
"""

import logging
import math
import os
import time
import warnings
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from configs.schema import LearnerConfig, RunConfig
from credit.adapter import Adapter, Canary, digest
from credit.trajectory import Batch
from learner import batching, checkpoint, lora
from learner.loss import policy_loss, row_scale
from learner.policy import Policy


class Learner:
    """One rank. Trains on `Batch`es and answers with `Adapter`s; version v is the policy after v batches."""

    def __init__(
        self,
        run: RunConfig,
        model_path: str,
        canary_tokens: list[int],
        rank: int = 0,
        world_size: int = 1,
        master: str = "127.0.0.1:29500",
    ) -> None:
        """Load the model and join the other ranks at `master` (host:port); waits at most `learner.timeout_s` for them.

        `model_path` is the folder or hub id of the base model; `canary_tokens` [T] are what `export` is verified with.
        """
        self.run, self.config, self.rank, self.world_size = run, run.learner, rank, world_size
        if threads := os.environ.get("OMP_NUM_THREADS"):
            torch.set_num_threads(int(threads))
        self.device = _join(rank, world_size, master, run.learner.timeout_s)
        base = lora.load_base(model_path, run.model)
        if self.config.gradient_checkpointing:
            base.gradient_checkpointing_enable({"use_reentrant": False})
        self.policy = Policy(base, packing=self.config.packing).to(self.device)
        self.canary_tokens = canary_tokens
        self.canary_base = self._canary()
        peft_model = lora.add_lora(base, run.lora, seed=run.seed, base=run.model.path)
        self.policy.model = peft_model.to(self.device)
        self.adapter_config = lora.adapter_config(peft_model)
        self.engine = _engine(self.policy, self.config, world_size)
        self.shards = checkpoint.Shards(self.engine, lora.lora_parameters(peft_model))
        self.version = 0  # batches trained
        self.updates = 0  # optimiser updates applied

    def step(self, batch: Batch) -> dict[str, float]:
        """Train on one batch: `epochs` x `updates_per_batch` optimiser updates. Returns metrics over all ranks."""
        started = time.perf_counter()
        self.policy.train()
        # dropout is the only randomness; deriving it makes a resumed run repeat it without saved generators
        torch.manual_seed(((self.run.seed * 1_000_003 + self.version) * 1_009 + self.rank) % 2**63)
        lr = self._learning_rate()
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        parts = batching.updates(batch.groups, self.config.updates_per_batch)
        done = [self._update(batch, rows) for _ in range(self.config.epochs) for rows in parts]
        self.version += 1
        sums: Counter[str] = Counter()
        for part, _ in done:
            sums.update(part)
        norms = [norm for _, norm in done if norm is not None]
        applied = [norm for norm in norms if norm < math.inf]
        self.updates += len(applied)
        return _means(sums, len(done)) | {
            "learner/grad_norm": sum(applied) / max(1, len(applied)),
            "learner/lr": lr,
            "learner/updates": float(len(applied)),
            "learner/skipped": float(len(norms) - len(applied)),
            "learner/step_s": time.perf_counter() - started,
        }

    def export(self, version: int) -> Adapter | None:
        """The policy as an `Adapter`, on rank 0; None on the others."""
        self.policy.eval()
        weights = self.shards.weights()
        adapted = self._canary() if self.rank == 0 or self.shards.stage == 3 else None
        if self.rank != 0:
            return None
        assert adapted is not None
        # copies, so that later steps do not change what was exported
        tensors = {name: weight.cpu().numpy().copy() for name, weight in weights.items()}
        return Adapter(
            version=version,
            digest=digest(tensors, self.adapter_config),
            tensors=tensors,
            config=self.adapter_config,
            canary=Canary(tokens=self.canary_tokens, adapted=adapted.numpy(), base=self.canary_base.numpy()),
        )

    def save(self, folder: Path) -> None:
        """Write a checkpoint that resumes bit-equal. Rank 0 writes and fsyncs; the caller makes it visible.

        It is independent of the ZeRO stage and the number of ranks. The base model is not in it.
        """
        weights, moments = self.shards.weights(), self.shards.moments()
        if self.rank == 0:
            checkpoint.write(folder, weights, moments, {"version": self.version, "updates": self.updates})

    def load(self, folder: Path) -> None:
        """Continue from a checkpoint of `save`, which every rank reads. Raises ValueError if it is of another LoRA."""
        weights, moments, state = checkpoint.read(folder, self.shards.shapes)
        self.shards.load(weights, moments, state["updates"])
        self.version, self.updates = state["version"], state["updates"]

    def _update(self, batch: Batch, rows: list[int]) -> tuple[dict[str, float], float | None]:
        """One optimiser update on the given rows.

        Returns the metrics' sums over ranks, and the gradient's norm: infinite when the update was skipped because
        the gradient was not finite, None when no row had a gradient.
        """
        loss = self.config.loss
        scale_N = torch.zeros(len(batch.lengths))
        scale_N[rows] = row_scale(batch.mask[rows], loss.aggregation, self.run.rollout.max_new_tokens)
        keep_all = bool(loss.kl_beta or loss.entropy_bonus)
        units = batching.units(batch, rows, whole_groups=loss.name == "dfpo", keep_all=keep_all)
        if not units:
            return {}, None
        plan = batching.micro_batches(
            units,
            batch.lengths,
            budget=self.config.tokens_per_micro_batch,
            ranks=self.world_size,
            packing=self.config.packing,
        )[self.rank]
        total: dict[str, Tensor] = {}
        for i, micro_batch in enumerate(plan):
            self.engine.set_gradient_accumulation_boundary(i == len(plan) - 1)
            scale_B = scale_N[micro_batch] if micro_batch else torch.zeros(1)
            metrics = self._backward(batching.select(batch, micro_batch, self.device), scale_B.to(self.device))
            total = {name: total.get(name, 0.0) + value for name, value in metrics.items()}
        norm = self._apply()
        sums = torch.stack([total[name].double() for name in sorted(total)])
        if self.world_size > 1:
            dist.all_reduce(sums)
        return dict(zip(sorted(total), sums.tolist(), strict=True)), norm

    def _backward(self, rows: Batch, scale_B: Tensor) -> dict[str, Tensor]:
        """Add the gradient of one micro-batch. Returns the metrics' sums."""
        loss = self.config.loss
        logp_BT, entropy_BT = self.engine(
            rows.tokens,
            rows.lengths,
            rows.mask,
            entropy_gradient=loss.entropy_bonus != 0,
            temperature=self.run.rollout.temperature,
        )
        value, metrics = policy_loss(logp_BT, entropy_BT, rows, scale_B, loss)
        # DeepSpeed averages gradients over ranks; the loss is a sum over them
        self.engine.backward(value * self.world_size, scale_wrt_gas=False)
        return metrics

    def _learning_rate(self) -> float:
        """Of the batch to come: a function of its number alone, so that a resumed run needs no scheduler's state."""
        rise = min(1.0, (self.version + 1) / max(1, self.config.warmup_steps))
        left = max(0, self.run.steps - self.version) / self.run.steps if self.config.schedule == "linear" else 1.0
        return self.config.lr * rise * left

    def _apply(self) -> float:
        """Clip and update, unless the gradient is not finite. Returns its norm, infinite when it was skipped."""
        if self.shards.stage == 0:
            gradients = [parameter.grad for parameter in self.shards.parameters.values() if parameter.grad is not None]
            norm = float(torch.nn.utils.get_total_norm(gradients))
            if not math.isfinite(norm):
                self.engine.zero_grad()
                return math.inf
            self.engine.step()
            return norm
        self.engine.step()  # ZeRO itself skips an update that is not finite
        return float(self.engine.get_global_grad_norm()) if self.engine.was_step_applied() else math.inf

    @torch.no_grad()
    def _canary(self) -> Tensor:
        """Log-probs [T] of the canary tokens under the policy as it is, 0 at position 0."""
        tokens_1T = torch.tensor([self.canary_tokens], device=self.device)
        mask_1T = torch.ones_like(tokens_1T, dtype=torch.bool)
        mask_1T[:, 0] = False
        logp_1T, _ = self.policy(tokens_1T, torch.tensor([tokens_1T.shape[1]], device=self.device), mask_1T)
        return logp_1T[0].cpu()


def _join(rank: int, world_size: int, master: str, timeout_s: float) -> torch.device:
    """Join the process group of the ranks and return this rank's device."""
    cuda = torch.cuda.is_available()
    host, _, port = master.rpartition(":")
    local_rank = rank % torch.cuda.device_count() if cuda else rank
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(local_rank), MASTER_ADDR=host, MASTER_PORT=port
    )
    if not cuda:
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # here, since it chooses its accelerator when it is imported

    deepspeed.utils.logger.setLevel(logging.WARNING)
    # DeepSpeed's own calls, at every step
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # otherwise it compiles a shared-memory all-reduce at first start: half a minute, a compiler, and only for inference
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if cuda:
        torch.cuda.set_device(local_rank)
    deepspeed.init_distributed(
        "nccl" if cuda else "gloo", auto_mpi_discovery=False, verbose=False, timeout=timedelta(seconds=timeout_s)
    )
    return torch.device("cuda", local_rank) if cuda else torch.device("cpu")


def _engine(policy: Policy, config: LearnerConfig, world_size: int) -> Any:
    import deepspeed

    settings = {
        "train_batch_size": world_size,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # `step` sets the boundaries itself
        "gradient_clipping": config.grad_clip,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": config.lr,
                "betas": list(config.betas),
                "weight_decay": config.weight_decay,
                "torch_adam": True,
            },
        },
        "zero_optimization": {"stage": config.zero_stage},
        "steps_per_print": 10**9,
    }
    trainable = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=policy, model_parameters=trainable, config=settings)  # pyright: ignore
    return engine


def _means(sums: Counter[str], updates: int) -> dict[str, float]:
    """Means over the tokens trained; the loss is the mean over updates."""

    def share(name: str, of: str = "tokens") -> float:
        return sums[name] / max(1, sums[of])

    return {
        "learner/loss": sums["loss"] / updates,
        "learner/tokens": float(sums["tokens"]),
        "learner/ratio_mean": share("ratio"),
        "learner/entropy": share("entropy"),
        "learner/kl_base": share("kl_base"),
        "learner/clip_share_positive": share("clipped_positive", "positive"),
        "learner/clip_share_negative": share("clipped_negative", "negative"),
        "learner/mismatch_truncated_share": share("mismatch_truncated"),
        "learner/mismatch_ratio_mean": share("mismatch_ratio"),
        "learner/mismatch_kl": share("mismatch_kl"),
    }
