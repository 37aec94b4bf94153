"""Whole runs with an environment on the real stack: the same bits, also when a replica is killed."""

import os
from pathlib import Path

import numpy as np
import pytest

from benchmarks.chaos import descendants, equal_adapters, trained_twice, victim
from cluster.checkpoints import audit
from configs.schema import RunConfig
from tests.cluster.test_kills import train
from tests.cluster.test_run import config, records, trajectories

pytestmark = pytest.mark.ray

STEPS = 3


def run_config(model: Path, out: Path, name: str) -> RunConfig:
    return config(
        model,
        out,
        name,
        steps=STEPS,
        reward={"function": "exact"},
        environment={"path": "tests.actors.environments.Letters", "workers": 8, "max_turns": 3},
        # a random model says EOS too seldom
        rollout={"max_new_tokens": 40, "stop": list("abcdefgh")},
        learner={"ranks": 1},
    )


@pytest.fixture(scope="module")
def folder(cluster: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = run_config(tiny_model, tmp_path_factory.mktemp("runs"), "turns")
    train(run)
    return run.folder


def test_a_run_trains_on_the_sum_of_its_turns_and_its_log_probs_agree_over_the_holes(folder: Path):
    rows = trajectories(folder)
    several = [row for row in rows if len(row["turn_ends"]) == 2]
    assert len(several) > 5
    for row in rows:
        mask = np.array(row["mask"])
        assert row["reward"] == pytest.approx(sum(row["turn_rewards"]))
        assert row["turn_ends"][-1] == np.flatnonzero(mask)[-1] == len(mask) - 1
        assert not np.array(row["advantages"])[~mask].any()
        # the sampler's log-probs turn by turn are the scorer's of the whole sequence
        np.testing.assert_allclose(row["signal_logp"], row["logprobs"], atol=1e-4)
    for row in several:
        hole = slice(row["turn_ends"][0] + 1, row["turn_ends"][0] + 4)
        assert not np.array(row["mask"])[hole].any() and np.array(row["mask"])[hole.stop :].all()
        assert "..." in row["completion"]
    assert all(record["mismatch/kl"] < 1e-6 for record in records(folder))


def test_failed_episodes_are_counted_with_their_reason_and_not_trained(folder: Path):
    told = records(folder)
    failed = sum(record.get("reward/failed/raised", 0) for record in told)
    assert 0 < failed == sum(record["samples/failed"] for record in told)
    if not any(record["groups/dropped"] for record in told):
        assert len(trajectories(folder)) == STEPS * 16 - failed


def test_a_synchronous_run_whose_replica_is_killed_gives_the_same_bits(folder: Path, tiny_model: Path):
    killed: list[str] = []

    def kill() -> None:
        process, name = next(found for p in descendants(os.getpid()) if (found := victim(p, "rollout")))
        killed.append(name)
        process.kill()

    run = run_config(tiny_model, folder.parent, "killed")
    train(run, {1: kill})
    assert len(killed) == 1
    assert equal_adapters(run.folder, folder, STEPS)
    assert trained_twice(run.folder) == 0
    report = audit(run.folder)
    assert report["balanced"] and report["trained"] == 4 * STEPS
