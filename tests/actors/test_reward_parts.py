"""TRL's reward functions and rows, run unchanged; weighted sums of them."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.reward import RewardPool
from actors.reward_parts import BUILT_IN, WeightedSum
from configs.schema import ConfigError, RewardConfig, load
from credit.trajectory import Prompt, Sample

TRL = "tests.actors.trl_rewards."
QUESTION = [{"role": "user", "content": "What is (1 + 2) * 4?"}]


def sum_of(*functions: str | dict[str, Any], columns: list[str] | None = None) -> WeightedSum:
    given = [{"function": part} if isinstance(part, str) else part for part in functions]
    for part in given:
        part["function"] = part["function"] if part["function"] in BUILT_IN else TRL + part["function"]
    config = RewardConfig.model_validate({"parts": given})
    return WeightedSum([part.model_dump() | {"name": part.label} for part in config.weighted], columns, 10.0)


def ask(
    score: WeightedSum,
    completions: list[Any],
    prompt: Any = "q",
    ids: list[list[int]] | None = None,
    state: dict[str, int] | None = None,
    **columns: Any,
) -> dict[str, Any]:
    request = {"prompt": prompt, "completions": completions, "columns": columns, "ids": ids, "state": state or {}}
    return score(request)


def rewards(score: WeightedSum, completions: list[Any], **more: Any) -> list[Any]:
    return ask(score, completions, **more)["rewards"]


def test_a_function_of_token_ids_gets_them():
    assert rewards(sum_of("longer"), ["ab", "c"], ids=[[5, 6, 7], [8]]) == [3.0, 1.0]


def test_a_conversational_row_gives_completions_as_messages():
    texts = ["<think>12</think><answer>12</answer>", "12"]
    assert rewards(sum_of("think_format"), texts, prompt=QUESTION) == [1.0, 0.0]


def test_completions_that_are_messages_already_stay_as_they_are():
    turns = [[{"role": "assistant", "content": "<think>12</think><answer>12</answer>"}]]
    assert rewards(sum_of("think_format"), turns, prompt=QUESTION) == [1.0]


def test_a_further_column_of_the_row_comes_as_a_list():
    texts = [r"\boxed{2}", r"\boxed{3}"]
    assert rewards(sum_of("boxed"), texts, ground_truth="2") == [1.0, 0.0]


@pytest.mark.parametrize(("task", "text", "reward"), [("math", "4", 1.0), ("code", "4", 0.0), ("code", "def f", 1.0)])
def test_a_function_that_returns_none_does_not_count(task: str, text: str, reward: float):
    both = sum_of("math_only", "code_only", columns=["task"])
    assert rewards(both, [text], task=task) == [reward]


def test_a_completion_to_which_nothing_applies_has_no_reward():
    both = sum_of("math_only", "code_only")
    assert rewards(both, ["4"], task="poetry") == ["does not apply"]


def test_asynchronous_functions_are_awaited_in_one_event_loop():
    assert rewards(sum_of("asynchronous"), ["abc", ""]) == [3.0, 0.0]
    score = sum_of("LoopOfItsOwn")
    assert rewards(score, ["a"]) == rewards(score, ["a"]) == [1.0]


def test_what_a_function_logs_is_averaged():
    reply = ask(sum_of("logs"), ["7", "8", "8"], answer="8")
    assert reply == {"rewards": [0.0, 1.0, 1.0], "means": {"reward/log/accuracy": (2 / 3, 1)}}


def test_the_trainers_state_has_the_step_and_the_last_one():
    assert rewards(sum_of("annealed"), ["a"], state={"global_step": 3, "max_steps": 12}) == [0.25]


def test_a_function_without_kwargs_gets_what_it_names():
    assert rewards(sum_of("without_kwargs", columns=["answer"]), ["a", "b"], answer="x") == [1.0, 0.0]


def test_a_function_with_kwargs_gets_all_that_trl_gives_it():
    assert rewards(sum_of("everything", columns=["answer"]), ["a"], ids=[[1]], answer="x") == [1.0]


def test_a_function_that_makes_the_reward_gets_the_options():
    made = sum_of({"function": "scaled", "options": {"factor": 0.5}})
    assert rewards(made, ["ab"], ids=[[1, 2, 3]]) == [1.5]


def test_a_weighted_sum_is_worked_by_hand_and_every_part_is_logged():
    score = sum_of(
        {"function": "seven", "weight": 0.5},
        {"function": "boxed"},
        {"function": "longer", "weight": -0.25, "name": "length"},
        columns=["ground_truth"],
    )
    reply = ask(score, [r"\boxed{2}", "2"], ids=[[1, 2], [1, 2, 3, 4]], ground_truth="2")
    assert reply["rewards"] == [3.5 + 1 - 0.5, 3.5 + 0 - 1.0]
    assert reply["means"] == {
        "reward/part/seven_mean": (14.0, 2),
        "reward/part/boxed_mean": (1.0, 2),
        "reward/part/length_mean": (6.0, 2),
    }


def test_a_part_that_fails_fails_the_completion_and_says_which_it_was():
    score = sum_of("seven", "fails_one")
    assert rewards(score, ["good", "bad"]) == [8.0, "raised: fails_one: ValueError: no way"]
    assert rewards(sum_of("seven", "raises"), ["a", "b"]) == ["raised: raises: ValueError: no way"] * 2


def test_a_sum_that_overflows_is_no_number():
    assert rewards(sum_of({"function": "infinite", "weight": 100}), ["a"]) == ["not a number: inf"]


@pytest.mark.parametrize(
    ("part", "columns", "why"),
    [
        ({"function": "options_back"}, [], "missing a required argument: 'scale'"),
        ({"function": "options_back", "options": {"scale": 1}}, ["scale"], "option 'scale' is a column of the task"),
        ({"function": "without_kwargs", "options": {"speed": 1}}, [], "got an unexpected keyword argument 'speed'"),
        ({"function": "scaled", "options": {}}, [], "missing 1 required positional argument: 'factor'"),
        ({"function": "code", "options": {"memory_mb": 1}}, ["tests"], "expected more than 0 and 64"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_runs(part: dict, columns: list[str], why: str):
    with pytest.raises(ValueError, match=why) as refusal:
        sum_of(part, columns=columns)
    assert part["function"] in str(refusal.value)


def test_the_pool_tallies_parts_failures_and_logs_and_forgets_them_when_taken():
    parts = [{"function": TRL + "fails_one"}, {"function": TRL + "logs", "weight": 2}]

    async def work() -> tuple[Any, ...]:
        pool = RewardPool(RewardConfig.model_validate({"parts": parts}))
        await pool.start(["answer"])
        try:
            first = await pool.score("q", ["a", "bad"], {"answer": "a"})
            second = await pool.score("q", ["a", "b"], {"answer": "a"})
            return first, second, pool.tally.take(), pool.tally.take()
        finally:
            await pool.close()

    first, second, record, nothing = asyncio.run(work())
    assert first == [3.0, "raised: fails_one: ValueError: no way"]
    assert second == [3.0, 1.0]
    assert record == {
        "reward/part/fails_one_mean": 1.0,  # of the three completions in which it gave a number
        "reward/part/logs_mean": 0.5,
        "reward/log/accuracy": 0.5,
        "reward/failed/raised": 1.0,
    }
    assert nothing == {}


def sample(index: int, completion: list[int], text: str) -> Sample:
    tokens = np.array([1, 2, *completion])
    mask = np.array([False, False, *(True for _ in completion)])
    zeros = np.zeros(len(tokens), np.float32)
    return Sample(
        group=0, index=index, tokens=tokens, mask=mask, logprobs=zeros, text=text, finish="stop", version=3, digest="d"
    )


@pytest.mark.parametrize(("function", "expected"), [("longer", [2.0, 3.0]), ("annealed", [0.25, 0.25])])
def test_samples_bring_their_tokens_and_their_version(function: str, expected: list[float]):
    prompt = Prompt(group=0, tokens=[1, 2], seeds=[0, 1], prompt="q", columns={})

    async def work() -> Any:
        pool = RewardPool(RewardConfig(function=TRL + function))
        await pool.start([])
        try:
            return await pool.score_samples(prompt, [sample(0, [5, 6], "ab"), sample(1, [5, 6, 7], "abc")], 12)
        finally:
            await pool.close()

    assert asyncio.run(work()) == expected


# ---- the configuration ----


def written(folder: Path, reward: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(f"name: r\nsteps: 1\ndata: {{task: arithmetic}}\n{reward}\n")
    return path


def test_a_list_of_parts_is_read_from_yaml_and_survives_being_written(tmp_path: Path):
    reward = """
reward:
  parts:
    - {function: math}
    - {function: overlong, weight: 0.5, options: {max_length: 512, buffer: 128}}
"""
    run = load(written(tmp_path, reward))
    assert [(part.label, part.weight) for part in run.reward.weighted] == [("math", 1.0), ("overlong", 0.5)]
    assert RewardConfig.model_validate(run.reward.model_dump(mode="json")) == run.reward


def test_a_single_function_is_one_part_with_its_options(tmp_path: Path):
    run = load(written(tmp_path, "reward: {function: format, options: {pattern: 'a+'}}"))
    [part] = run.reward.weighted
    assert (part.function, part.weight, part.options) == ("format", 1.0, {"pattern": "a+"})


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            "{function: math, parts: [{function: format}]}",
            "reward.parts: got reward.function or reward.options as well",
        ),
        ("{parts: [{function: math}, {function: a.math}]}", "reward.parts: got two called 'math'"),
    ],
)
def test_a_reward_that_says_two_things_is_refused(tmp_path: Path, reward: str, message: str):
    with pytest.raises(ConfigError, match=message):
        load(written(tmp_path, f"reward: {reward}"))


def test_a_variable_that_is_not_set_is_refused_before_anything_runs():
    pool = RewardPool(RewardConfig(function="exact", env=["ACCREDIT_NOT_SET"]))
    with pytest.raises(ValueError, match=r"reward\.env: ACCREDIT_NOT_SET is not in the environment"):
        asyncio.run(pool.start(["answer"]))
