import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from actors.rollout import RolloutWorker
from credit.trajectory import Prompt, Sample
from tests.actors.policy import Policy, run_config

EOS, SPECIAL = 1, 3  # ids below 3 are pad, EOS and unknown
SLOTS = 4


@pytest.fixture(scope="module")
def policy(tiny_model: Path) -> Policy:
    return Policy(tiny_model)


@pytest.fixture(scope="module")
def worker(tiny_model: Path) -> Iterator[RolloutWorker]:
    worker = RolloutWorker(run_config(max_staleness=SLOTS - 2, max_new_tokens=100), str(tiny_model))
    yield worker
    worker.close()


versions = iter(range(1, 10_000))  # every test continues where the last one ended


def prompts(count: int, group_size: int = 4, length: int = 12, first_seed: int = 0) -> list[Prompt]:
    return [
        Prompt(
            group=i,
            tokens=[4 + (7 * i + j) % 90 for j in range(length)],
            seeds=[first_seed + 100 * i + j for j in range(group_size)],
            prompt="",
            columns={},
        )
        for i in range(count)
    ]


async def switch(worker: RolloutWorker, policy: Policy) -> int:
    version = next(versions)
    await worker.load(policy.adapter(version))
    await worker.activate(version)
    return version


async def collect(worker: RolloutWorker, asked: list[Prompt], temperature: float | None = None) -> list[Sample]:
    return [sample async for group in worker.sample(asked, temperature) for sample in group]


async def until_started(worker: RolloutWorker, requests: int) -> None:
    """All requests of a call enter at once, but some may end with their first token: ask for fewer than there are."""
    async with asyncio.timeout(60):
        while (await worker.stats())["requests"] < requests:
            await asyncio.sleep(0)


def difference(policy: Policy, sample: Sample, version: int) -> float:
    expected = policy.logprobs(policy.adapter(version), sample.tokens)
    return float(np.abs(sample.logprobs - expected)[sample.mask].max())


def test_nothing_is_sampled_before_a_version_is_active(worker, policy):
    async def scenario() -> None:
        with pytest.raises(RuntimeError, match="no adapter version is active"):
            await collect(worker, prompts(1))
        version = next(versions)
        await worker.load(policy.adapter(version))
        with pytest.raises(RuntimeError, match="no adapter version is active"):
            await collect(worker, prompts(1))
        await worker.unload(version)
        assert (await worker.stats())["resident"] == {}

    asyncio.run(scenario())


def test_the_canary_answers_with_the_logprobs_of_the_version_asked(worker, policy):
    async def scenario() -> None:
        adapter = policy.adapter(next(versions))
        answer = await worker.load(adapter)
        tokens = adapter.canary.tokens
        assert answer.dtype == np.float32
        np.testing.assert_allclose(answer, policy.logprobs(adapter, tokens), atol=1e-4)
        np.testing.assert_allclose(await worker.canary(tokens, None), policy.logprobs(None, tokens), atol=1e-4)
        np.testing.assert_array_equal(await worker.load(adapter), answer)  # a second load only asks again
        assert (await worker.stats())["slots_taken"] == 1
        await worker.unload(adapter.version)
        with pytest.raises(RuntimeError, match=f"v{adapter.version} is not resident"):
            await worker.canary(tokens, adapter.version)

    asyncio.run(scenario())


def test_a_sample_carries_prompt_completion_and_behaviour_policy(worker, policy):
    async def scenario() -> None:
        version = await switch(worker, policy)
        asked = prompts(16)
        samples = await collect(worker, asked)
        assert sorted((s.group, s.index) for s in samples) == [(i, j) for i in range(16) for j in range(4)]
        for sample in samples:
            prompt = asked[sample.group].tokens
            assert sample.tokens[: len(prompt)].tolist() == prompt
            assert sample.mask.tolist() == [t >= len(prompt) for t in range(len(sample.tokens))]
            assert not sample.logprobs[: len(prompt)].any()
            assert (sample.version, sample.digest) == (version, policy.adapter(version).digest)
            assert difference(policy, sample, version) < 1e-4
            assert sample.finish == ("stop" if sample.tokens[-1] == EOS else "length")
            characters = sample.tokens[sample.mask] >= SPECIAL
            assert len(sample.text) == characters.sum()  # one character per token, none for EOS
        assert {sample.finish for sample in samples} == {"stop", "length"}

    asyncio.run(scenario())


def test_a_group_is_yielded_when_its_own_samples_are_complete(worker, policy):
    async def scenario() -> None:
        await switch(worker, policy)
        stream = worker.sample(prompts(8, group_size=1))
        first = await anext(stream)
        assert len(first) == 1
        assert 0 < (await worker.stats())["requests"] < 8
        await stream.aclose()

    asyncio.run(scenario())


def test_over_many_swaps_under_load_every_sample_matches_its_own_version_and_no_other(worker, policy):
    async def sample_until(done: asyncio.Event, lane: int, samples: list[Sample]) -> None:
        round_ = 0
        while not done.is_set():
            seed = 1_000_000 * lane + 1000 * round_
            samples += await collect(worker, prompts(2, group_size=2, length=8 + lane, first_seed=seed))
            round_ += 1

    async def scenario() -> tuple[list[int], list[Sample]]:
        done = asyncio.Event()
        samples: list[Sample] = []
        used = [await switch(worker, policy)]
        lanes = [asyncio.create_task(sample_until(done, lane, samples)) for lane in range(3)]
        while len(used) <= 20:
            while (await worker.stats())["resident"][used[-1]] == 0:  # until a request runs under it
                await asyncio.sleep(0.001)
            try:
                used.append(await switch(worker, policy))
            except RuntimeError as error:  # older versions still have requests
                assert "no slot is free" in str(error)
                await asyncio.sleep(0.01)
        done.set()
        await asyncio.gather(*lanes)
        assert (await worker.stats())["resident"] == {used[-1]: 0}
        return used, samples

    used, samples = asyncio.run(scenario())
    assert len(used) > 20 and {sample.version for sample in samples} >= set(used[:-1])
    for sample in samples:
        assert difference(policy, sample, sample.version) < 1e-4
        position = used.index(sample.version)
        for neighbour in used[max(position - 1, 0) : position] + used[position + 1 : position + 2]:
            assert difference(policy, sample, neighbour) > 1e-3


def test_requests_in_flight_across_swaps_finish_on_their_version_which_then_leaves(worker, policy):
    async def scenario() -> None:
        old = await switch(worker, policy)
        task = asyncio.create_task(collect(worker, prompts(4)))
        await until_started(worker, 4)
        newer = [await switch(worker, policy) for _ in range(3)]
        residents = (await worker.stats())["resident"]
        assert residents[old] > 0 and set(residents) == {old, newer[-1]}  # versions without requests left at once
        samples = await task
        assert {sample.version for sample in samples} == {old}
        assert max(difference(policy, sample, old) for sample in samples) < 1e-4
        stats = await worker.stats()
        assert (stats["resident"], stats["slots_taken"]) == ({newer[-1]: 0}, 1)

    asyncio.run(scenario())


def test_a_version_stays_until_exactly_its_last_request(worker, policy):
    async def scenario() -> None:
        old = await switch(worker, policy)
        stream = worker.sample(prompts(8, group_size=1))
        first = await anext(stream)
        new = await switch(worker, policy)
        remaining = 8 - len(first)
        async for _ in stream:
            remaining -= 1
            residents = (await worker.stats())["resident"]
            assert (old in residents) == (residents.get(old, 0) > 0)
            assert residents.get(old, 0) <= remaining
        stats = await worker.stats()
        assert (stats["resident"], stats["slots_taken"]) == ({new: 0}, 1)

    asyncio.run(scenario())


def test_the_prefix_cache_does_not_cross_versions(worker, policy):
    async def scenario() -> None:
        asked = prompts(1, group_size=1, length=300)  # two whole blocks of the cache
        cached = []
        first, second = next(versions), next(versions)
        for version in (first, first, second):
            await worker.load(policy.adapter(version))
            await worker.activate(version)
            before = (await worker.stats())["cached_prompt_tokens"]
            (sample,) = await collect(worker, asked)
            cached.append((await worker.stats())["cached_prompt_tokens"] - before)
            assert difference(policy, sample, version) < 1e-4
        assert cached == [0, 256, 0]

    asyncio.run(scenario())


def test_a_load_without_a_free_slot_names_the_residents(worker, policy):
    async def scenario() -> None:
        active = await switch(worker, policy)
        waiting = [next(versions) for _ in range(SLOTS - 1)]
        for version in waiting:
            await worker.load(policy.adapter(version))
        expected = rf"all {SLOTS} are taken: v{active} \(active\): 0 requests, v{waiting[0]}: 0 requests"
        with pytest.raises(RuntimeError, match=expected):
            await worker.load(policy.adapter(next(versions)))
        for version in waiting:
            await worker.unload(version)
        with pytest.raises(RuntimeError, match=f"v{active} is active"):
            await worker.unload(active)
        assert (await worker.stats())["resident"] == {active: 0}

    asyncio.run(scenario())


def test_a_wrong_digest_is_refused(worker, policy):
    adapter = policy.adapter(next(versions))
    name = next(iter(adapter.tensors))
    changed = replace(adapter, tensors={**adapter.tensors, name: adapter.tensors[name] + 1e-6})

    async def scenario() -> None:
        before = (await worker.stats())["resident"]
        with pytest.raises(ValueError, match="does not match its digest"):
            await worker.load(changed)
        assert (await worker.stats())["resident"] == before

    asyncio.run(scenario())


def test_another_content_under_a_resident_version_is_refused(worker, policy):
    async def scenario() -> None:
        version = await switch(worker, policy)
        with pytest.raises(RuntimeError, match=f"v{version} is resident with another content"):
            await worker.load(replace(policy.adapter(next(versions)), version=version))

    asyncio.run(scenario())


def test_a_call_that_is_refused_leaves_nothing_running(worker, policy):
    async def scenario() -> None:
        await switch(worker, policy)
        with pytest.raises(ValueError, match="vLLM refuses the request: temperature must be non-negative"):
            await collect(worker, prompts(2), temperature=-1.0)
        unknown = replace(prompts(1)[0], tokens=[5, 1_000_000])
        with pytest.raises(ValueError, match="out of vocabulary"):  # after the first requests have entered
            await collect(worker, [*prompts(2), unknown])
        with pytest.raises(ValueError, match="got 512 tokens and 4 seeds"):
            await collect(worker, prompts(2) + prompts(1, length=512))
        assert (await worker.stats())["requests"] == 0

    asyncio.run(scenario())


def test_leaving_the_generator_or_cancelling_its_task_aborts_the_requests(worker, policy):
    async def scenario() -> None:
        old = await switch(worker, policy)
        stream = worker.sample(prompts(8))
        await anext(stream)
        await stream.aclose()
        task = asyncio.create_task(collect(worker, prompts(8)))
        await until_started(worker, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stats = await worker.stats()
        assert (stats["requests"], stats["resident"]) == (0, {old: 0})
        assert len(await collect(worker, prompts(2))) == 8  # and the engine goes on

    asyncio.run(scenario())


def test_more_prompt_tokens_than_one_step_takes_are_sampled_with_their_seeds(worker, policy):
    """vLLM would prefill the prompt at the limit in pieces, which a seeded request on a CPU does not survive."""

    async def run() -> None:
        await switch(worker, policy)
        many = prompts(60, group_size=2, length=150)
        assert sum(len(prompt.tokens) * 2 for prompt in many) > 2 * 8192
        samples = await collect(worker, many)
        assert len(samples) == 120
        again = await collect(worker, many[:1])
        first = [sample for sample in samples if sample.group == 0]
        assert [sample.tokens.tolist() for sample in again] == [sample.tokens.tolist() for sample in first]

    asyncio.run(run())


def test_greedy_completions_do_not_depend_on_the_seed(worker, policy):
    async def scenario() -> None:
        await switch(worker, policy)
        samples = await collect(worker, prompts(1, group_size=3), temperature=0.0)
        assert len({tuple(sample.tokens) for sample in samples}) == 1

    asyncio.run(scenario())


def test_many_swaps_keep_memory_flat(worker, policy):
    async def scenario() -> None:
        for _ in range(20):
            await switch(worker, policy)
        before = (await worker.stats())["rss_bytes"]
        for _ in range(100):
            await switch(worker, policy)
        after = await worker.stats()
        assert after["slots_taken"] == 1
        assert after["rss_bytes"] - before < 100 * policy.adapter(0).nbytes / 2  # half of what a leak would take

    asyncio.run(scenario())


def test_two_workers_with_the_same_seeds_give_the_same_bits(worker, policy, tiny_model):
    second = RolloutWorker(run_config(max_new_tokens=100), str(tiny_model))

    async def scenario() -> None:
        adapter = policy.adapter(next(versions))
        results = []
        for other in (worker, second):
            await other.load(adapter)
            await other.activate(adapter.version)
            samples = await collect(other, prompts(8))
            results.append(sorted(samples, key=lambda sample: (sample.group, sample.index)))
        for first, again in zip(*results, strict=True):
            np.testing.assert_array_equal(first.tokens, again.tokens)
            np.testing.assert_array_equal(first.logprobs, again.logprobs)

    try:
        asyncio.run(scenario())
    finally:
        second.close()


def test_a_failure_of_the_engine_reaches_every_call_and_later_ones(policy, tiny_model):
    worker = RolloutWorker(run_config(max_new_tokens=100), str(tiny_model))

    async def scenario() -> None:
        await switch(worker, policy)
        calls = [asyncio.create_task(collect(worker, prompts(2))) for _ in range(2)]
        await until_started(worker, 9)
        # vLLM loses the adapter, and there is no file to load it from
        await worker._call(lambda: [worker._engine._llm.remove_lora(number) for number in worker._engine.loaded()])
        for result in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(result, RuntimeError)
            assert "the engine's thread failed" in str(result) and "LoRAAdapterNotFoundError" in str(result)
        for call in (worker.ping(), worker.stats(), collect(worker, prompts(1))):
            with pytest.raises(RuntimeError, match="LoRAAdapterNotFoundError"):
                await call

    asyncio.run(scenario())


def test_calls_after_close_fail(policy, tiny_model):
    worker = RolloutWorker(run_config(), str(tiny_model))
    asyncio.run(worker.ping())
    worker.close()
    with pytest.raises(RuntimeError, match="the worker was closed"):
        asyncio.run(worker.ping())


def test_a_model_that_cannot_be_loaded_fails_the_start(tmp_path):
    with pytest.raises(Exception, match=str(tmp_path)):
        RolloutWorker(run_config(), str(tmp_path))
