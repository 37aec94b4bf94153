"""Reward functions written as TRL's documentation of GRPOTrainer writes them, and some around them."""

import asyncio
import re


def longer(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def think_format(completions, **kwargs):
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    completion_contents = [completion[0]["content"] for completion in completions]
    matches = [re.match(pattern, content) for content in completion_contents]
    return [1.0 if match else 0.0 for match in matches]


def boxed(completions, ground_truth, **kwargs):
    matches = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in matches]
    return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth, strict=True)]


def math_only(prompts, completions, task, **kwargs):
    return [float("4" in text) if t == "math" else None for t, text in zip(task, completions, strict=True)]


def code_only(prompts, completions, task, **kwargs):
    return [float("def" in text) if t == "code" else None for t, text in zip(task, completions, strict=True)]


async def asynchronous(prompts, completions, **kwargs):
    await asyncio.sleep(0.01)
    return [float(len(completion)) for completion in completions]


def logs(completions, answer, log_extra=None, log_metric=None, **kwargs):
    rewards = [float(completion == expected) for completion, expected in zip(completions, answer, strict=True)]
    if log_extra:
        log_extra("expected", list(answer))
    if log_metric:
        log_metric("accuracy", sum(rewards) / len(rewards))
    return rewards


def annealed(completions, trainer_state, **kwargs):
    return [trainer_state.global_step / trainer_state.max_steps] * len(completions)


def without_kwargs(prompts, completions):
    return [float(prompt == "q" and completion == "a") for prompt, completion in zip(prompts, completions, strict=True)]


def scaled(factor):
    """As get_soft_overlong_punishment: makes the reward function."""

    def reward(completion_ids, **kwargs):
        return [factor * len(ids) for ids in completion_ids]

    return reward


class LoopOfItsOwn:
    """A client that belongs to an event loop, as HTTP clients do."""

    def __init__(self):
        self.loop = None

    async def __call__(self, completions, **kwargs):
        self.loop = self.loop or asyncio.get_running_loop()
        return [float(self.loop is asyncio.get_running_loop())] * len(completions)


def everything(**kwargs):
    """1 where the names are those that TRL hands over for a row with the column `answer`."""
    names = {"prompts", "completions", "completion_ids", "answer", "trainer_state", "log_extra", "log_metric"}
    return [float(names <= set(kwargs))] * len(kwargs["completions"])


def fails_one(completions, **kwargs):
    return [ValueError("no way") if text == "bad" else 1.0 for text in completions]


def seven(completions, **kwargs):
    return [7.0] * len(completions)


def raises(completions, **kwargs):
    raise ValueError("no way")


def infinite(completions, **kwargs):
    return [1e308] * len(completions)


def options_back(completions, scale, offset=0.0, **kwargs):
    return [scale + offset] * len(completions)
