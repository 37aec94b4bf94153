"""Adapters of several runs, of different ranks, in one rollout worker and in one credit actor."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from actors.rollout import RolloutWorker
from actors.scorer import Scorer
from configs.sweep import SharedConfig
from credit.adapter import Adapter
from credit.trajectory import Prompt, Sample
from tests.actors.policy import Policy, run_config

RANKS = {"small": 4, "large": 12}


@pytest.fixture(scope="module")
def policies(tiny_model: Path) -> dict[str, Policy]:
    return {name: Policy(tiny_model, rank) for name, rank in RANKS.items()}


@pytest.fixture(scope="module")
def config() -> SharedConfig:
    loras = {name: {"r": rank, "alpha": 24} for name, rank in RANKS.items()}
    tree = run_config(max_staleness=0, max_new_tokens=12).model_dump()
    return SharedConfig.model_validate({**tree, "at_once": 2, "loras": loras})


@pytest.fixture(scope="module")
def worker(config: SharedConfig, tiny_model: Path) -> Iterator[RolloutWorker]:
    worker = RolloutWorker(config, str(tiny_model))
    yield worker
    worker.close()


def adapter(policies: dict[str, Policy], name: str, version: int) -> Adapter:
    return replace(policies[name].adapter(version), policy=name)


def prompts(name: str) -> list[Prompt]:
    tokens = [list(range(5 + i, 17 + i)) for i in range(3)]
    return [
        Prompt(group=i, tokens=row, seeds=[10 * i, 10 * i + 1], prompt="", columns={}, policy=name)
        for i, row in enumerate(tokens)
    ]


async def sampled(worker: RolloutWorker, name: str) -> list[Sample]:
    return [sample async for group in worker.sample(prompts(name)) for sample in group]


def error(policy: Policy, adapter: Adapter, sample: Sample) -> float:
    return float(np.abs(sample.logprobs - policy.logprobs(adapter, sample.tokens))[sample.mask].max())


def test_two_runs_sample_at_once_each_under_its_own_adapter_and_as_it_does_alone(
    worker: RolloutWorker, policies: dict[str, Policy]
) -> None:
    async def main() -> None:
        used = {"small": adapter(policies, "small", 3), "large": adapter(policies, "large", 3)}
        alone: dict[str, list[Sample]] = {}
        for name, one in used.items():
            await worker.load(one)
            with pytest.raises(RuntimeError, match="no adapter version is active"):
                await sampled(worker, name)
            await worker.activate(3, name)
            alone[name] = sorted(await sampled(worker, name), key=lambda sample: (sample.group, sample.index))
        both = dict(zip(used, await asyncio.gather(*(sampled(worker, name) for name in used)), strict=True))
        for name, samples in both.items():
            samples.sort(key=lambda sample: (sample.group, sample.index))
            assert {(s.policy, s.version, s.digest) for s in samples} == {(name, 3, used[name].digest)}
            assert max(error(policies[name], used[name], sample) for sample in samples) < 1e-4
            for sample, before in zip(samples, alone[name], strict=True):
                assert sample.tokens.tolist() == before.tokens.tolist()
                assert np.abs(sample.logprobs - before.logprobs).max() < 1e-4
        # superseded versions go policy by policy
        await worker.load(adapter(policies, "small", 4))
        await worker.activate(4, "small")
        assert [(await worker.stats(name))["resident"] for name in used] == [{4: 0}, {3: 0}]
        await worker.forget("small")
        assert [(await worker.stats(name))["resident"] for name in used] == [{}, {3: 0}]
        assert {sample.version for sample in await sampled(worker, "large")} == {3}
        await worker.forget("large")
        assert (await worker.stats())["slots_taken"] == 0

    asyncio.run(main())


def test_an_adapter_of_another_rank_than_its_run_says_is_refused(
    worker: RolloutWorker, policies: dict[str, Policy]
) -> None:
    wrong = replace(policies["large"].adapter(9), policy="small")  # alpha / r is 2, expected 6
    with pytest.raises(RuntimeError, match=r"v9 of small: .* scaling than the run's config"):
        asyncio.run(worker.load(wrong))


def test_one_model_scores_the_runs_each_under_its_own_adapter(
    config: SharedConfig, tiny_model: Path, policies: dict[str, Policy]
) -> None:
    scorer = Scorer(config, str(tiny_model))
    used = {name: adapter(policies, name, 3) for name in RANKS}
    samples = []
    for name, one in used.items():
        scorer.load(one)
        tokens = np.arange(5, 30)
        samples.append(
            Sample(group=0, index=0, tokens=tokens, mask=tokens > 12, logprobs=np.zeros(25, np.float32), text="",
                   finish="stop", version=3, digest=one.digest, policy=name)
        )  # fmt: skip
    for sample, signals in zip(samples, scorer.score(samples, frozenset({"logp", "delta_feature"})), strict=True):
        expected = policies[sample.policy].logprobs(used[sample.policy], sample.tokens)
        assert np.abs(signals["logp"] - expected)[sample.mask].max() < 1e-4
    ones = {(0, 0): np.ones(25, np.float32)}
    one, other = (scorer.delta_sums(ones, name)[0] for name in RANKS)
    assert np.abs(one - other).max() > 1e-3, "the features of a group are each run's own"
    scorer.unload(3, "small")
    assert scorer.features.keys() == {("large", 0, 0)}
    scorer.load(adapter(policies, "large", 4))
    with pytest.raises(RuntimeError, match=r"expected one of \[v3 of large, v4 of large\]"):
        scorer.unload(3, "small")
    scorer.forget("large")
    assert not scorer.slots.resident and not scorer.features
