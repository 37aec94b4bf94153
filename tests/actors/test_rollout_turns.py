"""Episodes on a real engine: what is appended, under which version, with which seeds, and what a fault costs."""

import asyncio
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.episodes import Episodes, turn_seed
from actors.rollout import RolloutWorker
from actors.scorer import Scorer
from configs.schema import EnvironmentConfig
from credit.trajectory import Prompt, Sample
from tests.actors.policy import Policy, run_config
from tests.actors.test_rollout import EOS, collect, difference, prompts, switch

HERE = "tests.actors.environments."
LIMIT = 60


class Played:
    """A worker and the event loop that its environments belong to."""

    def __init__(
        self, model: Path, name: str, max_staleness: int = 0, timeout_s: float = 30, **environment: Any
    ) -> None:
        run = run_config(max_staleness=max_staleness, max_new_tokens=LIMIT)
        settings = {"max_turns": 4, "workers": 6, "timeout_s": timeout_s, **environment}
        run = run.model_copy(update={"environment": EnvironmentConfig(path=HERE + name, **settings)})
        self.worker = RolloutWorker(run, str(model))
        self.runner = asyncio.Runner()

    def __call__(self, coroutine: Any) -> Any:
        return self.runner.run(coroutine)

    @property
    def episodes(self) -> Episodes:
        assert self.worker._episodes is not None
        return self.worker._episodes

    async def end(self) -> None:
        for environment in self.episodes._pool._all:
            await environment.close()

    def close(self) -> None:
        self(self.end())
        self.runner.close()
        self.worker.close()


@pytest.fixture(scope="module")
def policy(tiny_model: Path) -> Policy:
    return Policy(tiny_model)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "steps.jsonl"


@pytest.fixture(scope="module")
def echo(tiny_model: Path, log: Path) -> Iterator[Played]:
    played = Played(tiny_model, "Echo", options={"turns": 3, "opening": "go:", "log": str(log)})
    yield played
    played.close()


@pytest.fixture(scope="module")
def faulty(tiny_model: Path) -> Iterator[Played]:
    played = Played(tiny_model, "Faulty", max_staleness=1, timeout_s=1.0)
    yield played
    played.close()


def parts(sample: Sample) -> list[tuple[bool, list[int]]]:
    """Runs of equal mask, with their tokens."""
    borders = [0, *(np.flatnonzero(np.diff(sample.mask)) + 1).tolist(), len(sample.mask)]
    return [(bool(sample.mask[start]), sample.tokens[start:end].tolist()) for start, end in itertools.pairwise(borders)]


def test_turns_are_appended_and_only_the_policys_tokens_are_in_the_mask(echo: Played, policy: Policy, log: Path):
    async def scenario() -> tuple[int, list[Sample]]:
        version = await switch(echo.worker, policy)
        return version, await collect(echo.worker, prompts(3))

    version, samples = echo(scenario())
    tokenizer = echo.episodes._tokenizer
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    assert {(s.group, s.index) for s in samples} == {(i, j) for i in range(3) for j in range(4)}
    several = 0
    for sample in samples:
        asked = prompts(3)[sample.group]
        assert (sample.version, sample.digest) == (version, policy.adapter(version).digest)
        assert len(sample.tokens) <= len(asked.tokens) + LIMIT
        opening, *rest = parts(sample)
        assert opening == (False, asked.tokens + tokenizer("go:").input_ids)
        assert sample.mask[-1]  # what comes after the last completion is not in the sequence
        completions = [tokens for mine, tokens in rest if mine]
        said = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in completions]
        for number, (tokens, text) in enumerate(zip(completions, said, strict=True), 1):
            assert any(step[1:] == [number, text] for step in steps)  # the environment was told exactly this
            if number < len(completions):
                assert tokens[-1] == EOS
        observed = [tokens for mine, tokens in rest if not mine]
        assert observed == [tokenizer(f"[{len(text)}]").input_ids for text in said[:-1]]
        ends = [t for t in range(len(sample.mask)) if sample.mask[t] and not sample.mask[t + 1 : t + 2].any()]
        assert [(turn.end, turn.reward) for turn in sample.turns] == [(t, k) for k, t in enumerate(ends, 1)]
        done = len(completions) == 3 and completions[-1][-1] == EOS
        assert sample.finish == ("stop" if done else "length")
        several += len(completions) > 1
        # the log-probs of every turn are those of the whole sequence under the one version
        assert difference(policy, sample, version) < 1e-4
        assert not sample.logprobs[~sample.mask].any()
    assert several > 3


def test_the_scorer_agrees_with_the_sampler_on_every_turn(echo: Played, policy: Policy, tiny_model: Path):
    async def scenario() -> tuple[int, list[Sample]]:
        version = await switch(echo.worker, policy)
        return version, await collect(echo.worker, prompts(3))

    version, samples = echo(scenario())
    assert any(len(sample.turns) > 1 for sample in samples)
    scorer = Scorer(echo.worker._run, str(tiny_model))
    scorer.load(policy.adapter(version))
    for sample, signals in zip(samples, scorer.score(samples, frozenset({"entropy", "residual"})), strict=True):
        np.testing.assert_allclose(signals["logp"], sample.logprobs, atol=1e-4)
        for values in signals.values():
            assert not values[~sample.mask].any()
        assert (signals["entropy"][sample.mask] > 0).all()


def test_two_runs_of_a_synchronous_run_give_the_same_bits(echo: Played, policy: Policy):
    async def scenario() -> list[list[Sample]]:
        await switch(echo.worker, policy)
        return [await collect(echo.worker, prompts(3)) for _ in range(2)]

    first, again = (sorted(run, key=lambda s: (s.group, s.index)) for run in echo(scenario()))
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)


def test_a_version_that_is_superseded_between_turns_stays_until_the_episodes_are_over(echo: Played, policy: Policy):
    async def scenario() -> None:
        old = await switch(echo.worker, policy)
        task = asyncio.create_task(collect(echo.worker, prompts(3)))
        while (await echo.worker.stats())["resident"].get(old, 0) < 2:
            await asyncio.sleep(0.001)
        new = await switch(echo.worker, policy)
        samples = await task
        assert {sample.version for sample in samples} == {old}
        assert any(len(sample.turns) > 1 for sample in samples)
        assert max(difference(policy, sample, old) for sample in samples) < 1e-4
        await echo.worker.ping()
        assert (await echo.worker.stats())["resident"] == {new: 0}

    echo(scenario())


def test_leaving_the_generator_ends_the_episodes_and_lets_the_version_go(echo: Played, policy: Policy):
    async def scenario() -> None:
        version = await switch(echo.worker, policy)
        stream: Any = echo.worker.sample(prompts(6))
        await anext(stream)
        await stream.aclose()
        await echo.worker.ping()
        stats = await echo.worker.stats()
        assert (stats["requests"], stats["resident"]) == (0, {version: 0})
        assert len(await collect(echo.worker, prompts(2))) == 8  # and the environments are free again

    echo(scenario())


def test_without_room_for_the_opening_the_sample_fails_and_with_room_for_little_it_is_cut(echo: Played, policy: Policy):
    async def scenario() -> None:
        await switch(echo.worker, policy)
        length = 512  # model.max_length
        for room, failure in ((3, True), (4, False)):
            for sample in await collect(echo.worker, prompts(1, length=length - room)):
                assert (sample.failure is not None) == failure
                if failure:
                    assert str(sample.failure).startswith("does not apply: the opening observation")
                else:
                    assert (len(sample.tokens), sample.finish) == (length, "length")

    echo(scenario())


def test_a_fault_costs_its_own_sample_only(faulty: Played, policy: Policy):
    faults = {0: ("raise", 1), 1: ("hang", 1), 2: ("kill", 1), 3: ("exit", 0), 4: ("", 0)}

    async def scenario() -> list[Sample]:
        await switch(faulty.worker, policy)
        asked = [
            replace(prompt, columns={"fault": faults[prompt.group][0], "turn": faults[prompt.group][1]})
            for prompt in prompts(5, group_size=2)
        ]
        return await collect(faulty.worker, asked)

    samples = faulty(scenario())
    reasons = {group: {s.failure for s in samples if s.group == group} for group in faults}
    assert reasons == {
        0: {"raised: KeyError: 'missing'"},
        1: {"timeout after 1 s"},
        2: {"died: signal 9"},
        3: {"died: exit code 3"},
        4: {None},
    }
    assert len(samples) == 10
    assert all(len(sample.turns) >= 1 for sample in samples if sample.group == 4)


def test_later_turns_have_seeds_of_their_own():
    assert turn_seed(7, 0) == 7
    seeds = [turn_seed(seed, turn) for seed in (7, 8) for turn in range(4)]
    assert len(set(seeds)) == 8 and all(0 <= seed < 2**32 for seed in seeds)


def test_chat_messages_are_written_as_the_template_does_after_an_assistant(echo: Played):
    episodes, tokenizer = echo.episodes, echo.episodes._tokenizer
    before = tokenizer.chat_template
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}<eos>\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    try:
        prompt = Prompt(group=0, tokens=[5], seeds=[0], prompt="", columns={})
        messages = [{"role": "tool", "content": "42"}]
        told = [tokenizer.decode(episodes._encode(prompt, messages, ended)) for ended in (True, False)]
    finally:
        tokenizer.chat_template = before
    assert told == ["\n[tool]42<eos>\n[assistant]", "<eos>\n[tool]42<eos>\n[assistant]"]
