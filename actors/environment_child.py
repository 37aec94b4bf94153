"""The process that plays one episode at a time for `actors.environment`: `python -m actors.environment_child`.

It imports the module of the environment's class and nothing heavy.
"""

import importlib
import inspect
import math
from collections.abc import Callable
from typing import Any

from actors.serving import Reply, serve

TEXT = 300  # characters of an exception that are reported


class Player:
    """Makes a new environment for each episode. What goes wrong in it is answered as {"failed": reason}."""

    def __init__(self, spec: dict[str, Any]) -> None:
        """Raises ValueError for a class that cannot be imported or does not fit the protocol."""
        try:
            module, _, name = spec["path"].rpartition(".")
            self._make = getattr(importlib.import_module(module), name)
            inspect.signature(self._make).bind(**spec["options"])
            inspect.signature(self._make.step).bind(None, "")
            if spec["columns"] is not None:
                inspect.signature(self._make.reset).bind(None, **dict.fromkeys(spec["columns"]))
        except Exception as error:  # also whatever the module raises
            raise ValueError(f"{spec['path']!r} cannot be used: {type(error).__name__}: {error}") from error
        self._options = spec["options"]
        self._environment: Any = None

    def __call__(self, request: dict[str, Any]) -> Reply:
        call: Callable[[], Reply] = (
            (lambda: self._reset(request["reset"])) if "reset" in request else (lambda: self._step(request["step"]))
        )
        try:
            return call()
        except Exception as error:
            return {"failed": f"raised: {type(error).__name__}: {error}"[:TEXT]}

    def _reset(self, columns: dict[str, Any]) -> Reply:
        self._environment = self._make(**self._options)
        opening = self._environment.reset(**columns)
        if not isinstance(opening, str | None):
            raise TypeError(f"reset() returned {type(opening).__name__}, expected text or None")
        return {"observation": opening or ""}

    def _step(self, completion: str) -> Reply:
        observation, reward, done = self._environment.step(completion)
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            raise TypeError(f"step() returned the reward {reward!r}, expected a finite number")
        if not done and not _is_observation(observation):
            raise TypeError(f"step() returned the observation {observation!r}, expected text or chat messages")
        return {"observation": observation if not done else "", "reward": float(reward), "done": bool(done)}


def _is_observation(observation: Any) -> bool:
    return isinstance(observation, str) or (
        isinstance(observation, list)
        and bool(observation)
        and all(isinstance(message, dict) and "role" in message and "content" in message for message in observation)
    )


if __name__ == "__main__":
    serve(Player)
