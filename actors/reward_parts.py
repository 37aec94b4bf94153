"""The weighted sum of reward functions, each called as TRL's GRPOTrainer calls it.

A function receives, by name, those of these that it takes (all of them if it has **kwargs), one entry for each
completion: prompts; completions (text, or [{"role": "assistant", "content": text}] where the prompt is a list of
messages); completion_ids; every other column of the task's row. And, once for all: trainer_state; log_extra (what it is
given is not kept); log_metric; deadline (time.monotonic() by which the answer must be there).
"""

import asyncio
import importlib
import inspect
import math
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

BUILT_IN = {
    "exact": "actors.rewards.exact_match",
    "gsm8k": "actors.rewards.gsm8k",
    "math": "actors.math_reward.MathReward",
    "format": "actors.rewards.format_match",
    "length": "actors.rewards.length_penalty",
    "overlong": "actors.rewards.soft_overlong",
    "code": "actors.code_reward.CodeReward",
    "remote": "actors.remote_reward.RemoteReward",
}
OURS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "deadline")
NOT_COLUMNS = {*OURS, "prompt", "completion"}
SHARE_OF_DEADLINE = 0.9  # of the pool's deadline: the rest is for the answer's way back
TEXT = 300  # characters of an exception that are reported


class Part:
    """One function with its name and weight."""

    def __init__(self, given: dict[str, Any], columns: list[str] | None) -> None:
        """`given`: function, name, weight, options. Raises what the import raises, and TypeError for a function that
        does not take `columns` and options."""
        self.name, self.weight = given["name"], given["weight"]
        function, options = _resolve(given["function"]), given["options"]
        if not _takes_completions(function):  # a class, or a function that makes the reward
            function, options = function(**options), {}
        clash = set(options) & set(columns or [])
        if clash:
            raise TypeError(f"option {min(clash)!r} is a column of the task, too: rename the column (data.columns)")
        self._function: Callable[..., Any] = partial(function, **options)
        signature = inspect.signature(function)
        everything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
        self._names = None if everything else set(signature.parameters)
        if columns is not None:
            signature.bind(**options, **self._taken(dict.fromkeys([*OURS, *columns])))

    def _taken(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in arguments.items() if self._names is None or name in self._names}

    def __call__(self, runner: asyncio.Runner, arguments: dict[str, Any]) -> list[float | str | None]:
        """For each completion a number, why there is none, or None where the function does not apply."""
        n = len(arguments["completions"])
        try:
            result = self._function(**self._taken(arguments))
            if inspect.isawaitable(result):
                result = runner.run(_wait(result))
            values = [_number(value) for value in result]
        except (Exception, SystemExit) as error:  # a reward's exit is its failure, not ours
            return [_describe(error)] * n
        return values if len(values) == n else [f"wrong length: got {len(values)}, expected {n}"] * n


class WeightedSum:
    def __init__(self, parts: list[dict[str, Any]], columns: list[str] | None, timeout_s: float) -> None:
        """Raises ValueError naming the function that cannot be used."""
        self.timeout_s = timeout_s
        self._runner = asyncio.Runner()  # one event loop for all calls: clients may live in it
        self._parts: list[Part] = []
        for given in parts:
            try:
                self._parts.append(Part(given, columns))
            except (Exception, SystemExit) as error:
                why = " ".join(f"{type(error).__name__}: {error}".split())[:TEXT]
                raise ValueError(f"{given['function']!r} cannot be used: {why}") from error

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        """{"rewards": a number or the reason why there is none, "means": {metric: (sum, count)}}."""
        n = len(request["completions"])
        logged: dict[str, list[float]] = {}
        arguments = self._arguments(request, n)
        arguments["log_metric"] = lambda name, value: logged.setdefault(name, []).append(float(value))
        columns = [part(self._runner, arguments) for part in self._parts]
        rewards = [self._sum([column[i] for column in columns]) for i in range(n)]
        means = {f"reward/log/{name}": (sum(values), len(values)) for name, values in logged.items()}
        if len(self._parts) > 1:
            for part, column in zip(self._parts, columns, strict=True):
                numbers = [value for value in column if isinstance(value, float)]
                means[f"reward/part/{part.name}_mean"] = (sum(numbers), len(numbers))
        return {"rewards": rewards, "means": means}

    def _arguments(self, request: dict[str, Any], n: int) -> dict[str, Any]:
        prompt, completions = request["prompt"], request["completions"]
        if _is_chat(prompt):
            completions = [
                [{"role": "assistant", "content": text}] if isinstance(text, str) else text for text in completions
            ]
        state = {"global_step": 0, "max_steps": 0} | request["state"]
        arguments = {name: [value] * n for name, value in request["columns"].items() if name not in NOT_COLUMNS}
        arguments |= {"prompts": [prompt] * n, "completions": completions, "trainer_state": SimpleNamespace(**state)}
        arguments |= {"deadline": time.monotonic() + SHARE_OF_DEADLINE * self.timeout_s}
        arguments |= {"log_extra": lambda column, values: None}
        return arguments if request["ids"] is None else arguments | {"completion_ids": request["ids"]}

    def _sum(self, values: list[float | str | None]) -> float | str:
        """The weighted sum of the parts that apply to one completion; a part that failed fails the completion."""
        numbers: list[float] = []
        for part, value in zip(self._parts, values, strict=True):
            if isinstance(value, str):
                kind, colon, what = value.partition(": ")
                return value if len(self._parts) == 1 else f"{kind}: {part.name}{colon}{what}"
            if value is not None:
                numbers.append(part.weight * value)
        total = sum(numbers)
        return (total if math.isfinite(total) else f"not a number: {total}") if numbers else "does not apply"


def _resolve(path: str) -> Any:
    module, _, name = BUILT_IN.get(path, path).rpartition(".")
    if not module:
        raise ImportError("expected package.module.function")
    function = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise TypeError(f"it is a {type(function).__name__}, not a function")
    return function


def _takes_completions(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters
    everything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return not inspect.isclass(function) and (everything or not parameters.keys().isdisjoint(OURS[:3]))


def _is_chat(prompt: Any) -> bool:
    return (
        isinstance(prompt, list) and bool(prompt) and all(isinstance(turn, dict) and "role" in turn for turn in prompt)
    )


def _number(value: Any) -> float | str | None:
    """A finite float, or what it is instead. numpy and torch scalars have __float__; text is no number.

    An exception in a number's place fails its own completion.
    """
    if value is None:
        return None
    if isinstance(value, Exception):
        return _describe(value)
    if not isinstance(value, (str, bytes)) and hasattr(value, "__float__"):
        number = float(value)
        return number if math.isfinite(number) else f"not a number: {number}"
    return f"not a number: {value!r}"[:TEXT]


async def _wait(result: Any) -> Any:
    return await result


def _describe(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return " ".join(f"timeout: {error}".split())[:TEXT]
    return " ".join(f"raised: {type(error).__name__}: {error}".split())[:TEXT]
