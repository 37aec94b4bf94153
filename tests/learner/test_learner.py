"""The learner against plain torch: one denominator, however a step is split, and checkpoints that resume bit-equal."""

import json
import math
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as multiprocessing
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from configs.schema import RunConfig
from credit.trajectory import Batch
from learner.learner import Learner
from tests.learner.conftest import MakeLearner, gradient_of, weights_of
from tests.learner.setting import SCENARIOS, make_batch, run_config, two_ranks, with_nan

DEADLINE_S = 240


@pytest.fixture(scope="module")
def two(tiny_model: Path, start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a real job of two ranks leaves behind."""
    out = tmp_path_factory.mktemp("two-ranks")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    job: Any = multiprocessing.start_processes(
        two_ranks, args=(port, str(tiny_model), str(start), str(out)), nprocs=2, join=False, start_method="spawn"
    )
    until = time.monotonic() + DEADLINE_S
    while not job.join(timeout=1):
        if time.monotonic() > until:
            for process in job.processes:
                process.kill()
            pytest.fail(f"two ranks did not finish in {DEADLINE_S} s")
    return out


@pytest.fixture(scope="module")
def reference(tiny_model: Path, start: Path) -> dict[str, dict[str, Tensor]]:
    """The gradient of each scenario on the whole padded batch, without DeepSpeed and without the learner's code."""
    return {name: reference_gradient(tiny_model, start, name) for name in SCENARIOS}


def reference_gradient(model_path: Path, start: Path, scenario: str) -> dict[str, Tensor]:
    base = AutoModelForCausalLM.from_pretrained(model_path, attn_implementation="eager", dtype=torch.float32)
    model: Any = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")).eval()
    weights = weights_of(start)
    parameters = {n.replace(".default.", "."): p for n, p in model.named_parameters() if p.requires_grad}
    assert parameters.keys() == weights.keys()
    for name, parameter in parameters.items():
        parameter.data.copy_(weights[name])
    batch = make_batch()
    attention = torch.arange(batch.tokens.shape[1])[None] < batch.lengths[:, None]
    logps = model(input_ids=batch.tokens, attention_mask=attention.long()).logits[:, :-1].log_softmax(-1)
    entropy = -(logps.exp() * logps).sum(-1)[batch.mask[:, 1:]]
    mask = batch.mask
    logp = logps.gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)[mask[:, 1:]]
    advantage, old = batch.advantages[mask], batch.logp_old[mask]
    mismatch = torch.exp(old - batch.logp_rollout[mask]).clamp(max=2.0)
    if scenario == "clip":
        ratio = torch.exp(logp - old)
        dropped = ((advantage > 0) & (ratio > 1.28)) | ((advantage < 0) & (ratio < 0.8))
        assert 0.05 < dropped.float().mean() < 0.95
        loss = -(mismatch * advantage * ratio * ~dropped).mean()
    else:
        assert batch.logp_base is not None
        gap = batch.logp_base[mask] - logp
        kl = torch.exp(gap) - gap - 1
        weight = dfpo_weights(batch, (logp - old).detach())
        loss = (-(mismatch * weight * advantage * logp) + 0.05 * kl - 0.02 * entropy).mean()
    loss.backward()
    return {name: parameter.grad for name, parameter in parameters.items()}


def dfpo_weights(batch: Batch, log_ratio: Tensor) -> Tensor:
    """w~ of `orthogonal`, for each policy token, in numpy."""
    counts = batch.mask.sum(1).tolist()
    rows = np.split(log_ratio.numpy(), np.cumsum(counts)[:-1])
    advantages = np.split(batch.advantages[batch.mask].numpy(), np.cumsum(counts)[:-1])
    w, a = np.array([np.exp(r.mean()) for r in rows]), np.array([r.mean() for r in advantages])
    for group in np.unique(batch.groups.numpy()):
        at = batch.groups.numpy() == group
        for _ in range(2 if a[at].any() else 0):
            w[at] = np.maximum(w[at] - a[at] * (a[at] @ w[at]) / (a[at] @ a[at]), 0 if _ == 0 else -np.inf)
    return torch.tensor(np.repeat(w, counts), dtype=torch.float32)


def assert_same_gradient(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert max(value.abs().max().item() for value in expected.values()) > 1e-2
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("tokens", [8192, 150], ids=["one-micro-batch", "several"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_rank_has_the_gradient_of_plain_torch(
    make_learner: MakeLearner, start: Path, reference: Any, tmp_path: Path, stage: int, tokens: int, packing: bool
) -> None:
    for scenario, settings in SCENARIOS.items() if stage in (0, 3) else [("clip", {})]:
        learner = make_learner(zero_stage=stage, tokens_per_micro_batch=tokens, packing=packing, **settings)
        learner.load(start)
        metrics = learner.step(make_batch())
        learner.save(tmp_path)
        assert_same_gradient(gradient_of(tmp_path), reference[scenario])
        norm = math.sqrt(sum((g**2).sum().item() for g in reference[scenario].values()))
        assert metrics["learner/grad_norm"] == pytest.approx(norm, rel=1e-3)


@pytest.mark.parametrize("result", ["stage-0", "stage-1", "stage-2", "stage-3", "terms-2", "terms-3"])
def test_two_ranks_have_the_gradient_of_plain_torch(two: Path, reference: Any, result: str) -> None:
    scenario = "terms" if result.startswith("terms") else "clip"
    assert_same_gradient(gradient_of(two / result), reference[scenario])


def test_two_ranks_report_the_metrics_of_one(two: Path, start: Path, make_learner: MakeLearner) -> None:
    learner = make_learner()
    learner.load(start)
    alone = learner.step(make_batch())
    results = torch.load(two / "results.pt")
    for stage in range(4):
        together = results[f"stage-{stage}"]
        assert together.keys() == alone.keys()
        for name in alone.keys() - {"learner/step_s"}:
            assert together[name] == pytest.approx(alone[name], rel=1e-3, abs=1e-6), name


def test_a_rank_without_rows_takes_part(two: Path, start: Path, make_learner: MakeLearner, tmp_path: Path) -> None:
    batch = make_batch(groups=1)
    batch.advantages[1:] = 0
    learner = make_learner(zero_stage=0)
    learner.load(start)
    learner.step(batch)
    learner.save(tmp_path)
    for stage in (2, 3):
        assert_same_gradient(gradient_of(two / f"alone-{stage}"), gradient_of(tmp_path))


def test_two_ranks_share_a_bfloat16_base(two: Path, start: Path, make_learner: MakeLearner, tmp_path: Path) -> None:
    learner = make_learner(model={"dtype": "bfloat16"}, zero_stage=0)
    learner.load(start)
    learner.step(make_batch())
    learner.save(tmp_path)
    one, both = (torch.cat([g.flatten() for g in gradient_of(at).values()]) for at in (tmp_path, two / "bfloat16"))
    assert torch.cosine_similarity(one, both, dim=0) > 0.999
    assert both.norm() == pytest.approx(one.norm().item(), rel=0.01)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_resume_bit_equal(two: Path, stage: int) -> None:
    for file in ("learner.safetensors", "learner.json"):
        assert (two / f"resumed-{stage}" / file).read_bytes() == (two / f"through-{stage}" / file).read_bytes()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_rank_resumes_bit_equal(make_learner: MakeLearner, start: Path, tmp_path: Path, stage: int) -> None:
    """With dropout, whose random numbers must be the same too."""
    run = run_config(lora={"dropout": 0.2}, zero_stage=stage, warmup_steps=4)
    through, resumed = make_learner(run), make_learner(run)
    through.load(start)
    for seed in (0, 2):
        through.step(make_batch(seed))
    through.save(tmp_path / "half")
    resumed.step(make_batch(9))
    resumed.load(tmp_path / "half")
    assert [learner.step(make_batch(1))["learner/lr"] for learner in (through, resumed)] == [7.5e-4, 7.5e-4]
    for learner, name in ((through, "through"), (resumed, "resumed")):
        learner.save(tmp_path / name)
    for file in ("learner.safetensors", "learner.json"):
        assert (tmp_path / "through" / file).read_bytes() == (tmp_path / "resumed" / file).read_bytes()
    assert weights_of(tmp_path / "through").keys() == weights_of(tmp_path / "half").keys()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_checkpoint_of_two_ranks_continues_on_one(
    make_learner: MakeLearner, two: Path, tmp_path: Path, stage: int
) -> None:
    learner = make_learner(zero_stage=stage)
    learner.load(two / "stage-2")
    learner.step(make_batch(1))
    learner.save(tmp_path)
    assert json.loads((tmp_path / "learner.json").read_text()) == {"version": 2, "updates": 2}
    expected = weights_of(two / "through-2")
    moved = 0.0
    for name, value in weights_of(tmp_path).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)
        moved = max(moved, (value - weights_of(two / "stage-2")[name]).abs().max().item())
    assert moved > 5e-4


def test_every_rank_count_exports_the_same_policy(two: Path, make_learner: MakeLearner) -> None:
    results = torch.load(two / "results.pt")
    learner = make_learner()
    learner.load(two / "through-0")
    adapter = learner.export(2)
    assert adapter is not None
    for stage in range(4):
        np.testing.assert_allclose(results[f"canary-{stage}"], adapter.canary.adapted, atol=5e-6)


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(
    make_learner: MakeLearner, two: Path, start: Path, tmp_path: Path
) -> None:
    results = torch.load(two / "results.pt")
    for stage in range(4):
        learner = make_learner(zero_stage=stage)
        learner.load(start)
        learner.step(make_batch())
        learner.save(tmp_path / "before")
        metrics = learner.step(with_nan(make_batch(2)))
        assert (metrics["learner/skipped"], metrics["learner/updates"]) == (1, 0)
        learner.save(tmp_path / "after")
        for before, after in (
            (tmp_path / "before", tmp_path / "after"),
            (two / f"through-{stage}", two / f"nan-{stage}"),
        ):
            file = "learner.safetensors"
            assert (before / file).read_bytes() == (after / file).read_bytes()
        assert learner.step(make_batch(3))["learner/updates"] == 1
        assert results[f"nan-{stage}"]["learner/skipped"] == 1


def test_a_nan_under_the_mask_changes_nothing(make_learner: MakeLearner, start: Path) -> None:
    batch = make_batch()
    fields = {name: getattr(batch, name) for name in Batch.__slots__}
    for name in ("advantages", "logp_old", "logp_rollout", "logp_base"):
        fields[name] = fields[name].masked_fill(~batch.mask, math.nan)
    digests = []
    for given in (batch, Batch(**fields)):
        learner = make_learner(**SCENARIOS["terms"])
        learner.load(start)
        learner.step(given)
        adapter = learner.export(1)
        assert adapter is not None
        digests.append(adapter.digest)
    assert digests[0] == digests[1]


def test_a_batch_without_advantage_moves_nothing(make_learner: MakeLearner, start: Path, tmp_path: Path) -> None:
    batch = make_batch()
    learner = make_learner()
    learner.load(start)
    learner.step(batch)
    learner.save(tmp_path / "before")
    batch.advantages.zero_()
    metrics = learner.step(batch)
    learner.save(tmp_path / "after")
    assert (metrics["learner/updates"], metrics["learner/skipped"], metrics["learner/tokens"]) == (0, 0, 0)
    before, after = (weights_of(tmp_path / name) for name in ("before", "after"))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert learner.version == 2


def test_updates_per_batch_are_steps_on_parts_of_the_groups_and_epochs_repeat_them(
    make_learner: MakeLearner, start: Path
) -> None:
    """Groups 0-2 and then 3-4, twice: the same as four steps on these parts."""
    batch = make_batch()
    first, second = batch.groups < 3, batch.groups >= 3

    def part(rows: Tensor) -> Batch:
        return Batch(**{name: getattr(batch, name)[rows] for name in Batch.__slots__})

    split: Learner = make_learner(updates_per_batch=2, epochs=2)
    apart: Learner = make_learner()
    adapters = []
    for learner in (split, apart):
        learner.load(start)
        if learner is split:
            assert learner.step(batch)["learner/updates"] == 4
        else:
            for rows in (first, second, first, second):
                learner.step(part(rows))
        adapters.append(learner.export(1))
    for name, value in adapters[0].tensors.items():
        np.testing.assert_allclose(value, adapters[1].tensors[name], rtol=0, atol=1e-6)


def test_learning_raises_the_log_probs_of_rewarded_tokens(make_learner: MakeLearner) -> None:
    run: RunConfig = run_config(lr=1e-2, warmup_steps=2, loss={"name": "policy_gradient", "mismatch": "off"})
    learner = make_learner(run)
    batch = make_batch()
    batch.advantages.copy_(batch.mask.float())
    metrics = [learner.step(batch) for _ in range(6)]
    assert [m["learner/lr"] for m in metrics[:3]] == [5e-3, 1e-2, 1e-2]
    assert metrics[-1]["learner/loss"] < metrics[0]["learner/loss"] - 0.1


def test_a_checkpoint_of_another_lora_is_refused(make_learner: MakeLearner, start: Path) -> None:
    learner = make_learner(run_config(lora={"r": 2}))
    with pytest.raises(ValueError, match=r"it is of another LoRA: .* resume with the lora and model settings"):
        learner.load(start)


@pytest.mark.parametrize("stage", [0, 3])
def test_gradient_checkpointing_has_the_same_gradient(
    make_learner: MakeLearner, start: Path, reference: Any, tmp_path: Path, stage: int
) -> None:
    learner = make_learner(zero_stage=stage, gradient_checkpointing=True)
    learner.load(start)
    learner.step(make_batch())
    learner.save(tmp_path)
    assert_same_gradient(gradient_of(tmp_path), reference["clip"])
