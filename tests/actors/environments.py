"""Environments for the tests; each is played in a process of its own."""

import json
import os
import signal
import time
from typing import Any


class Echo:
    """Says back what it was told, for `turns` turns; turn k is worth k."""

    def __init__(self, turns: int = 2, opening: str = "", chat: bool = False, log: str = "") -> None:
        self.turns, self.opening, self.chat, self.log = turns, opening, chat, log

    def reset(self, **columns: Any) -> str:
        self.count = 0
        self.columns = columns
        return self.opening

    def step(self, completion: str) -> tuple[Any, float, bool]:
        self.count += 1
        if self.log:
            with open(self.log, "a") as file:
                file.write(json.dumps([self.columns, self.count, completion]) + "\n")
        said = f"[{len(completion)}]"
        observation = [{"role": "user", "content": said}] if self.chat else said
        return observation, float(self.count), self.count == self.turns


class Silent:
    """Opens with nothing, and is done at once with the length of the completion."""

    def reset(self, answer: str) -> None:
        print("printed:", answer)  # must not reach the replies

    def step(self, completion: str) -> tuple[str, float, bool]:
        return "", len(completion), True


class Faulty:
    """Does what the `fault` column says, in the step that the column `turn` counts (0: reset)."""

    def reset(self, fault: str = "", turn: int = 0, **columns: Any) -> None:
        self.fault, self.turn, self.count = fault, turn, 0
        self._perhaps()

    def step(self, completion: str) -> tuple[Any, Any, bool]:
        self.count += 1
        self._perhaps()
        faulty = self.count == self.turn
        observation = 7 if faulty and self.fault == "no text" else "?"
        reward = {"nan": float("nan"), "text": "one", "bool": True}.get(self.fault, 1.0) if faulty else 1.0
        return observation, reward, self.count == 3

    def _perhaps(self) -> None:
        if self.count == self.turn:
            match self.fault:
                case "raise":
                    raise KeyError("missing")
                case "hang":
                    time.sleep(600)
                case "exit":
                    os._exit(3)
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)


class NoStep:
    def reset(self, **columns: Any) -> None: ...


class Picky:
    def reset(self, question: str) -> None: ...

    def step(self, completion: str) -> tuple[str, float, bool]:
        return "", 0.0, True


class Letters:
    """Two turns, each worth the share of small letters in it; of seven characters it wants to know nothing."""

    def reset(self, **columns: Any) -> None:
        self.count = 0

    def step(self, completion: str) -> tuple[str, float, bool]:
        self.count += 1
        if len(completion) == 7:
            raise ValueError("seven")
        return "...", sum(c.islower() for c in completion) / max(1, len(completion)), self.count == 2
