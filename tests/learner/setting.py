"""Inputs of the learner's tests, and what the processes of a two-rank job do with them."""

import math
import os
from pathlib import Path
from typing import Any

import torch

from configs.schema import RunConfig
from credit.trajectory import Batch

BETA = 0.9
CANARY = list(range(5, 25))
SCENARIOS: dict[str, dict[str, Any]] = {
    "clip": {},
    "terms": {"loss": {"name": "dfpo", "variant": "orthogonal", "kl_beta": 0.05, "entropy_bonus": 0.02}},
}
"""`clip` leaves rows out and clips; `terms` has KL, entropy and whole groups."""


def run_config(lora: dict[str, Any] | None = None, model: dict[str, Any] | None = None, **learner: Any) -> RunConfig:
    """A run whose gradients are never clipped, so that a checkpoint's moments show them."""
    return RunConfig.model_validate(
        {
            "name": "test",
            "steps": 3,
            "seed": 3,
            "data": {"task": "arithmetic"},
            "rollout": {"group_size": 4, "max_new_tokens": 16},
            "model": model or {},
            "lora": {"r": 4, "alpha": 8, **(lora or {})},
            "learner": {"grad_clip": 1e6, "betas": (BETA, 0.999), "timeout_s": 120, **learner},
        }
    )


def make_batch(seed: int = 0, groups: int = 5, size: int = 4, width: int = 24) -> Batch:
    """Random rows of 10 to `width` tokens, prompts of 3 to 5; group 1 has no advantage."""
    random = torch.Generator().manual_seed(seed)
    count = groups * size
    position = torch.arange(width)[None]
    lengths = torch.randint(10, width + 1, (count,), generator=random)
    prompt = torch.randint(3, 6, (groups, 1), generator=random).repeat_interleave(size, 0)
    real = position < lengths[:, None]
    mask = real & (position >= prompt)
    group = torch.arange(groups).repeat_interleave(size)
    advantages = torch.randn(count, 1, generator=random) * (group != 1)[:, None]
    noise = torch.randn(3, count, width, generator=random)
    # a random model of 90 characters gives about -4.5 everywhere: ratios inside and outside the clip range
    logp_old = -4.5 + 0.3 * noise[0]
    return Batch(
        tokens=torch.randint(3, 80, (count, width), generator=random) * real,
        lengths=lengths,
        mask=mask,
        advantages=advantages * (1 + 0.5 * torch.tanh(noise[1])) * mask,
        logp_old=logp_old * mask,
        logp_rollout=(logp_old + 0.4 * noise[2]) * mask,
        logp_base=(logp_old + 0.2 * noise[1]) * mask,
        groups=group,
        rewards=torch.zeros(count),
    )


def with_nan(batch: Batch) -> Batch:
    """The same batch with one policy token whose advantage is not a number."""
    broken = batch.advantages.clone()
    broken[0, batch.mask[0].nonzero()[0]] = math.nan
    return Batch(**{name: getattr(batch, name) for name in Batch.__slots__} | {"advantages": broken})


def two_ranks(rank: int, port: int, model: str, start: str, out: str) -> None:
    """One rank of the job: every stage in turn, with all ranks; rank 0 leaves checkpoints and metrics in `out`."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from learner.learner import Learner

    def make(**learner: Any) -> Any:
        made = Learner(run_config(**learner), model, CANARY, rank, 2, f"127.0.0.1:{port}")
        made.load(Path(start))
        return made

    folder = Path(out)
    results: dict[str, Any] = {}
    for stage in range(4):
        # 70 tokens: several micro-batches, of rows of different lengths
        learner = make(zero_stage=stage, packing=stage % 2 == 0, tokens_per_micro_batch=70)
        results[f"stage-{stage}"] = learner.step(make_batch())
        learner.save(folder / f"stage-{stage}")
        learner.step(make_batch(1))
        learner.save(folder / f"through-{stage}")
        adapter = learner.export(2)
        assert (adapter is not None) == (rank == 0)
        results[f"canary-{stage}"] = adapter and adapter.canary.adapted.tolist()
        results[f"nan-{stage}"] = learner.step(with_nan(make_batch(2)))
        learner.save(folder / f"nan-{stage}")
        resumed = make(zero_stage=stage, packing=stage % 2 == 0, tokens_per_micro_batch=70)
        resumed.load(folder / f"stage-{stage}")
        resumed.step(make_batch(1))
        resumed.save(folder / f"resumed-{stage}")
    for stage in (2, 3):
        learner = make(zero_stage=stage, tokens_per_micro_batch=200, **SCENARIOS["terms"])
        results[f"terms-{stage}"] = learner.step(make_batch())
        learner.save(folder / f"terms-{stage}")
        learner = make(zero_stage=stage)
        one = make_batch(groups=1)
        one.advantages[1:] = 0  # one row left: the other rank has nothing
        learner.step(one)
        learner.save(folder / f"alone-{stage}")
    learner = make(zero_stage=3, model={"dtype": "bfloat16"})
    learner.step(make_batch())
    learner.save(folder / "bfloat16")
    if rank == 0:
        torch.save(results, folder / "results.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
