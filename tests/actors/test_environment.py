import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.environment import EnvironmentPool, EpisodeRewards, Reply, check
from configs.schema import EnvironmentConfig
from credit.trajectory import Prompt, Sample, Turn

HERE = "tests.actors.environments."


def config(name: str, **settings: Any) -> EnvironmentConfig:
    return EnvironmentConfig(path=HERE + name, **{"timeout_s": 20, "workers": 1, **settings})


async def end(pool: EnvironmentPool) -> None:
    """Kill, and wait in the loop of the processes."""
    for environment in pool._all:
        await environment.close()
    pool.kill()


def played(name: str, columns: dict[str, Any], completions: list[str], **settings: Any) -> list[Reply | str]:
    """What one environment answers to reset and to each completion; what fails ends the episode."""

    async def run() -> list[Reply | str]:
        pool = EnvironmentPool(config(name, **settings))
        try:
            async with pool.lend(1) as (environment,):
                answers = [await environment.reset(columns)]
                for completion in completions:
                    if isinstance(answers[-1], str):
                        break
                    answers.append(await environment.step(completion))
                return answers
        finally:
            await end(pool)

    return asyncio.run(run())


def test_an_episode_is_a_reset_and_steps_of_one_object():
    assert played("Echo", {"a": 1}, ["xy", ""], options={"opening": "hello"}) == [
        {"observation": "hello"},
        {"observation": "[2]", "reward": 1.0, "done": False},
        {"observation": "", "reward": 2.0, "done": True},
    ]


def test_a_reset_may_open_with_nothing_and_prints_do_not_reach_the_answers():
    assert played("Silent", {"answer": "4"}, ["four"]) == [
        {"observation": ""},
        {"observation": "", "reward": 4.0, "done": True},
    ]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("raise", "raised: KeyError: 'missing'"),
        ("hang", "timeout after 0.5 s"),
        ("exit", "died: exit code 3"),
        ("kill", "died: signal 9"),
        ("nan", "raised: TypeError: step() returned the reward nan, expected a finite number"),
        ("text", "raised: TypeError: step() returned the reward 'one', expected a finite number"),
        ("bool", "raised: TypeError: step() returned the reward True, expected a finite number"),
        ("no text", "raised: TypeError: step() returned the observation 7, expected text or chat messages"),
    ],
)
def test_a_fault_is_a_reason_and_the_next_episode_goes_well(fault: str, reason: str):
    async def run() -> None:
        pool = EnvironmentPool(config("Faulty", timeout_s=0.5 if fault == "hang" else 20))
        try:
            async with pool.lend(1) as (environment,):
                assert await environment.reset({"fault": fault, "turn": 2}) == {"observation": ""}
                assert isinstance(await environment.step("a"), dict)
                assert await environment.step("b") == reason
            async with pool.lend(1) as (environment,):
                assert await environment.reset({}) == {"observation": ""}
                assert await environment.step("a") == {"observation": "?", "reward": 1.0, "done": False}
        finally:
            await end(pool)

    asyncio.run(run())


def test_a_fault_in_reset_is_a_reason():
    assert played("Faulty", {"fault": "raise", "turn": 0}, ["a"]) == ["raised: KeyError: 'missing'"]
    assert played("Faulty", {"fault": "exit", "turn": 0}, ["a"]) == ["died: exit code 3"]


def test_a_cancelled_step_leaves_no_answer_behind_for_the_next_episode():
    async def run() -> None:
        pool = EnvironmentPool(config("Faulty"))
        try:
            async with pool.lend(1) as (environment,):
                await environment.reset({"fault": "hang", "turn": 1})
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await environment.step("a")
            async with pool.lend(1) as (environment,):
                assert await environment.reset({}) == {"observation": ""}
        finally:
            await end(pool)

    asyncio.run(run())


def test_episodes_wait_for_a_free_environment_and_sets_are_lent_whole():
    async def run() -> list[str]:
        pool = EnvironmentPool(config("Silent", workers=2))
        order = []

        async def use(name: str, count: int) -> None:
            async with pool.lend(count) as environments:
                order.append(f"{name}+")
                assert len(environments) == count
                await asyncio.sleep(0.01)
                order.append(f"{name}-")

        await asyncio.gather(use("a", 1), use("b", 2), use("c", 2))
        pool.kill()
        return order

    # b waits for both; c, who would take what b has left, waits for b
    assert asyncio.run(run()) == ["a+", "a-", "b+", "b-", "c+", "c-"]


def test_the_processes_of_a_killed_pool_are_gone():
    async def run() -> None:
        pool = EnvironmentPool(config("Faulty"))
        async with pool.lend(1) as (environment,):
            await environment.reset({"fault": "hang", "turn": 1})
            assert environment._child is not None
            pid = environment._child.pid
            step = asyncio.create_task(environment.step("a"))
            await asyncio.sleep(0)
            pool.kill()
            assert await step == "died: signal 9"
        with pytest.raises(ProcessLookupError):
            os.killpg(pid, 0)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        (HERE + "Missing", {}, "'tests.actors.environments.Missing' cannot be used: AttributeError"),
        (HERE + "NoStep", {}, "AttributeError"),
        (HERE + "Picky", {}, "TypeError: missing a required argument: 'question'"),
        (HERE + "Echo", {"turn": 3}, "TypeError: got an unexpected keyword argument 'turn'"),
        ("nowhere.Environment", {}, "ModuleNotFoundError"),
    ],
)
def test_what_cannot_be_an_environment_is_said_before_anything_starts(path: str, options: dict, message: str):
    with pytest.raises(ValueError, match="environment.path: .*" + message):
        asyncio.run(check(EnvironmentConfig(path=path, options=options), ["answer"]))


def test_a_usable_environment_passes_the_check():
    asyncio.run(check(config("Silent"), ["answer"]))
    asyncio.run(check(config("Echo", options={"turns": 3}), ["answer", "question"]))


def sample(index: int, turns: tuple[Turn, ...], failure: str | None = None) -> Sample:
    return Sample(
        group=0,
        index=index,
        tokens=np.arange(4),
        mask=np.array([False, True, False, True]),
        logprobs=np.zeros(4, np.float32),
        text="",
        finish="stop",
        version=0,
        digest="",
        turns=turns,
        failure=failure,
    )


def test_a_reward_is_the_sum_of_its_turns_and_a_failure_has_none():
    rewards = EpisodeRewards()
    prompt = Prompt(group=0, tokens=[1], seeds=[0, 1], prompt="", columns={})
    samples = [sample(0, (Turn(1, 0.5), Turn(3, 1.0))), sample(1, (Turn(1, 0.5),), "timeout after 1 s")]
    assert asyncio.run(rewards.score_samples(prompt, samples, 10)) == [1.5, "timeout after 1 s"]
    assert rewards.tally.take() == {"reward/failed/timeout": 1.0}


def test_an_environment_imports_nothing_heavy(tmp_path: Path):
    import subprocess
    import sys

    code = "import sys, actors.environment_child, actors.calculator; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
