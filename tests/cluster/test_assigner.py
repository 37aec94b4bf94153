"""Methods that need more than a group's signals, in whole runs on the real stack."""

import json
import sqlite3
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import credit
from actors.scorer import Scorer
from credit.adapter import Adapter, Canary, digest
from credit.trajectory import Trajectory
from tests.cluster.test_run import adapter, config, of_completion, train, trajectories

pytestmark = pytest.mark.ray


def trajectory(row: dict) -> Trajectory:
    return Trajectory(
        group=row["group"],
        index=row["index"],
        tokens=np.array(row["tokens"]),
        mask=np.array(row["mask"]),
        logprobs=np.array(row["logprobs"], dtype=np.float32),
        text=row["completion"],
        finish=row["finish"],
        version=row["version"],
        digest=row["digest"],
        reward=row["reward"],
    )


def test_delta_over_two_credit_actors_gives_the_advantages_of_one_batch_in_memory(
    cluster: None, tiny_model: Path, tmp_path: Path
):
    run = config(
        tiny_model, tmp_path, "delta", steps=2, credit={"method": "delta", "replicas": 2}, learner={"ranks": 1}
    )
    train(run)
    rows = [row for row in trajectories(run.folder) if row["step"] == 2]
    scorer = Scorer(run, str(tiny_model))
    folder = run.folder / "adapters" / "v000001"
    tensors, settings = adapter(run.folder, 1), json.loads((folder / "adapter_config.json").read_text())
    zeros = np.zeros(2, dtype=np.float32)
    canary = Canary(tokens=[5, 6], adapted=zeros, base=zeros)
    scorer.load(Adapter(version=1, digest=digest(tensors, settings), tensors=tensors, config=settings, canary=canary))
    whole = [trajectory(row) for row in rows]
    signals = scorer.score(list(whole), frozenset({"logp", "entropy", "delta_feature"}))
    for one, values in zip(whole, signals, strict=True):
        kept = scorer.features["", one.group, one.index]
        feature = torch.zeros(len(one.tokens), scorer.hidden_size)
        feature[torch.from_numpy(one.mask)] = kept.surprise[:, None] * kept.hidden.float()
        values["delta_feature"] = feature.numpy()
    batch, _ = credit.assign(whole, signals, method="delta")
    for row, expected in zip(rows, batch.advantages, strict=True):
        np.testing.assert_allclose(row["advantages"], expected[: len(row["tokens"])], atol=1e-4)
    lambdas = np.abs(np.concatenate([of_completion(row, "advantages") for row in rows]))
    assert lambdas.std() > 1e-3, "the weights differ from token to token"


def test_gcpo_in_a_run_teacher_forces_the_completion_after_the_negative_prompt(
    cluster: None, tiny_model: Path, tmp_path: Path
):
    chosen = {"method": "gcpo", "negative": "{{ prompt[::-1] }}"}
    run = config(tiny_model, tmp_path, "gcpo", steps=1, credit=chosen, learner={"ranks": 1})
    train(run)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)  # version 0 is the base model
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    for row in trajectories(run.folder):
        negative = tokenizer(row["prompt"][::-1])["input_ids"]
        completion = of_completion(row, "tokens").tolist()
        tokens = torch.tensor([negative + completion])
        logp = model(input_ids=tokens).logits[0, :-1].detach().log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        np.testing.assert_allclose(of_completion(row, "signal_logp_negative"), logp[len(negative) - 1 :], atol=1e-4)


def test_ibpo_enters_every_revision_in_the_ledger_and_trains_none(cluster: None, tiny_model: Path, tmp_path: Path):
    """A completion counts as correct with half of its characters letters; each wrong one meets two siblings."""
    run = config(
        tiny_model, tmp_path, "ibpo", steps=1, model={"max_length": 1024}, reward={"correct": 0.5},
        credit={"method": "ibpo", "options": {"references": 2}}, learner={"ranks": 1},
    )  # fmt: skip
    train(run)
    rows = trajectories(run.folder)
    wrong = {(row["group"], row["index"]) for row in rows if row["reward"] < 0.5}
    assert 0 < len(wrong) < len(rows) == 16
    ledger = sqlite3.connect(run.folder / "ledger.sqlite")
    revisions = ledger.execute("SELECT group_id, sample, reference, outcome FROM revisions").fetchall()
    assert len(revisions) == 2 * len(wrong) and {revision[:2] for revision in revisions} == wrong
    assert {revision[3] for revision in revisions} == {"repaired", "still wrong"}
    assert ledger.execute("SELECT count(*) FROM groups").fetchone() == (4,), "revisions are no groups"
    # R' = R + .6 x .5 x share of repairs: the group advantages are those of the shaped rewards
    for group in range(4):
        mine = [row for row in rows if row["group"] == group]
        repaired = [
            np.mean([r[3] == "repaired" for r in revisions if r[:2] == (group, row["index"])] or [0.0]) for row in mine
        ]
        shaped = np.array([row["reward"] for row in mine]) + 0.3 * np.array(repaired)
        expected = (shaped - shaped.mean()) / shaped.std(ddof=1)
        largest = [max(of_completion(row, "advantages"), key=abs) for row in mine]
        np.testing.assert_allclose(largest, expected, atol=1e-4)
