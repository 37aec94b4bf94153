"""Faults of one rollout replica, in real vLLM behind real Ray: named, counted, and never sampled under."""

import asyncio
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster import pool as pool_module
from cluster.canary import FLOOR
from cluster.fleet import Fleet
from configs.schema import RunConfig
from credit.adapter import Adapter, Canary
from credit.trajectory import Prompt, Sample
from tests.actors.policy import Policy, run_config

pytestmark = pytest.mark.ray

PLAIN, TINY = 0.1, 1e-5
"""Sizes of the adapters' entries: versions that a canary tells apart, and versions that none could."""


@dataclass
class Setting:
    fleet: Fleet
    policy: Policy
    runner: asyncio.Runner
    adapters: dict[int, Adapter]

    def adapter(self, scale: float) -> Adapter:
        """A new version with the canary of transformers + PEFT."""
        version = len(self.adapters)
        made = self.policy.adapter(version, scale)
        adapted = self.policy.logprobs(made, made.canary.tokens)
        canary = Canary(tokens=made.canary.tokens, adapted=adapted, base=self.policy.logprobs(None, made.canary.tokens))
        self.adapters[version] = replace(made, canary=canary)
        return self.adapters[version]

    def wrong(self, samples: list[Sample]) -> list[Sample]:
        """Those that their named version did not sample."""
        return [sample for sample in samples if not self._is_own(sample)]

    def _is_own(self, sample: Sample) -> bool:
        adapter = self.adapters[sample.version]
        expected = self.policy.logprobs(adapter, sample.tokens)
        return sample.digest == adapter.digest and bool(np.abs(sample.logprobs - expected)[sample.mask].max() < 1e-4)


@pytest.fixture(scope="module")
def setting(tiny_model: Path) -> Iterator[Setting]:
    import ray

    from cluster import remote
    from tests.cluster.faulty_rollout import FaultyWorker

    run: RunConfig = run_config(max_length=64, max_new_tokens=16, replicas=2, cpus=0.1, timeout_s=60.0)
    remote.connect(run, dashboard=False)
    objects, faulty = remote.Objects(), ray.remote(FaultyWorker)

    async def start(name: str) -> remote.RemoteReplica:
        handle = faulty.options(num_cpus=0.1, runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}}).remote(
            run, str(tiny_model)
        )
        await remote.answer(handle.__ray_ready__.remote())  # pyright: ignore[reportAttributeAccessIssue]
        return remote.RemoteReplica(handle, objects)

    with asyncio.Runner() as runner:
        setting = Setting(Fleet(run, start), Policy(tiny_model), runner, {})
        try:
            runner.run(setting.fleet.start())
            runner.run(setting.fleet.publish(setting.adapter(PLAIN)))
            yield setting
        finally:
            runner.run(setting.fleet.close())
            ray.shutdown()


def prompts(wave: int) -> list[Prompt]:
    return [
        Prompt(group=i, tokens=[4 + (5 * i + j) % 90 for j in range(8)], seeds=[97 * wave + i], prompt="", columns={})
        for i in range(4)
    ]


async def sample_until(done: asyncio.Event, setting: Setting) -> list[Sample]:
    samples: list[Sample] = []
    wave = 0
    while not done.is_set() or wave % 4:  # a few more afterwards
        wave += 1
        await setting.fleet.sample(prompts(wave), samples.extend)
    return samples


REFUSED_BY_THE_WORKER = [
    ("previous version", RuntimeError, "28 of 28 tensors in vLLM's slot are not the adapter's"),
    ("tensor truncated", RuntimeError, "1 of 28 tensors in vLLM's slot.*o_proj.lora_B.weight"),
    ("tensor zeroed", RuntimeError, "1 of 28 tensors in vLLM's slot.*o_proj.lora_A.weight"),
    ("tensors swapped", RuntimeError, "2 of 28 tensors in vLLM's slot"),
    ("module missing", RuntimeError, "2 of 28 tensors in vLLM's slot"),
    ("wrong digest", ValueError, "does not match its digest"),
    ("wrong rank", ValueError, "got r=24 .*expected ranks .12"),
    ("wrong targets", ValueError, "target_modules=.'q_proj', 'v_proj'., expected .* modules .'down_proj'"),
    ("wrong alpha", RuntimeError, "14 of 28 tensors in vLLM's slot.*scaling"),
    ("rank on the way", RuntimeError, "14 of 28 tensors in vLLM's slot.*scaling"),
    ("id reused", RuntimeError, "an id that may have been used before"),
]


@pytest.fixture(scope="module")
def worker(tiny_model: Path) -> Iterator[Any]:
    from tests.cluster.faulty_rollout import FaultyWorker

    worker = FaultyWorker(run_config(max_new_tokens=16), str(tiny_model))
    yield worker
    worker.close()


@pytest.mark.parametrize(("fault", "error", "says"), REFUSED_BY_THE_WORKER, ids=[f for f, *_ in REFUSED_BY_THE_WORKER])
def test_what_no_canary_could_see_is_refused_by_reading_the_slots_back(
    worker: Any, setting: Setting, fault: str, error: type[Exception], says: str
):
    good, bad = setting.adapter(TINY), setting.adapter(TINY)
    apart = np.sqrt(np.mean((good.canary.adapted - bad.canary.adapted) ** 2))
    assert apart < FLOOR, "a canary would tell them apart"

    async def scenario() -> None:
        await worker.load(good)
        await worker.activate(good.version)
        await worker.arm(fault)
        with pytest.raises(error, match=says):
            await worker.load(bad)
        with pytest.raises(RuntimeError, match=f"v{bad.version} is not resident"):
            await worker.activate(bad.version)
        samples = [sample async for group in worker.sample(prompts(1)) for sample in group]
        assert {sample.digest for sample in samples} == {good.digest}
        assert (await worker.stats())["slots_taken"] == 1
        await worker.arm("")
        await worker.load(bad)  # the next attempt succeeds
        await worker.activate(bad.version)

    asyncio.run(scenario())


QUARANTINED = [
    ("dropped", "RuntimeError", "LoRAAdapterNotFoundError"),
    ("base model", "Refused", "is that of the base model"),
    ("previous version", "RuntimeError", "28 of 28 tensors in vLLM's slot are not the adapter's"),
    ("previous answer", "Refused", r"is that of the version \d+"),
    ("load raises", "OSError", "no space is left"),
    ("load hangs", "Late", "rollout-0: v.* load: no answer within"),
    ("killed", "ActorDiedError", "rollout-0 quarantined"),
]


@pytest.mark.parametrize(("fault", "error", "says"), QUARANTINED, ids=[fault for fault, *_ in QUARANTINED])
def test_a_replica_that_fails_during_a_swap_is_named_and_counted_and_no_completion_is_wrong(
    setting: Setting,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    error: str,
    says: str,
):
    if fault == "load hangs":
        monkeypatch.setattr(pool_module, "LOAD_TIMEOUT_S", 5.0)
    fleet, before = setting.fleet, setting.fleet.refusals.total()
    faulty, other = fleet.members

    async def scenario() -> list[Sample]:
        await fleet.publish(setting.adapter(PLAIN))
        old = len(setting.adapters) - 1
        done = asyncio.Event()
        load = asyncio.create_task(sample_until(done, setting))
        actor: Any = faulty.actor
        await actor.handle.arm.remote(fault)
        adapter = setting.adapter(PLAIN)
        metrics = await fleet.publish(adapter)
        assert metrics["swap/rollout_serving"] == 1 and other.serving and other.versions[""] == adapter.version
        assert not faulty.serving
        async with asyncio.timeout(120):
            while not faulty.serving:
                await asyncio.sleep(0.05)
        done.set()
        samples = await load
        assert faulty.versions == other.versions == {"": adapter.version}
        assert {sample.version for sample in samples} <= {old, adapter.version}
        assert samples[-1].version == adapter.version
        return samples

    with caplog.at_level(logging.WARNING, logger="accredit.pool"):
        samples = setting.runner.run(scenario())
    assert fleet.refusals.total() == before + 1 and fleet.refusals[error] >= 1
    (named,) = [record.getMessage() for record in caplog.records if "quarantined" in record.getMessage()]
    assert named.startswith(f"rollout-0 quarantined: {error}: ")
    assert re.search(says, named), named
    assert len(samples) >= 16 and setting.wrong(samples) == []


def test_the_check_on_completions_tells_versions_apart(setting: Setting):
    """What the tests above rely on can fail."""

    async def scenario() -> list[Sample]:
        await setting.fleet.publish(setting.adapter(PLAIN))
        samples: list[Sample] = []
        await setting.fleet.sample(prompts(0), samples.extend)
        return samples

    samples = setting.runner.run(scenario())
    assert setting.wrong(samples) == []
    setting.adapter(PLAIN)
    renamed = [replace(sample, version=sample.version + 1, digest=setting.adapters[sample.version + 1].digest)
               for sample in samples]  # fmt: skip
    assert len(setting.wrong(renamed)) == len(samples)
