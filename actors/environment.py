"""Environments in killable children: one may raise, hang, exit or be killed, and costs its own episode only.

reset(columns) ──▶ a child with a new environment ──▶ the opening observation, or why there is none
step(completion) ─▶ the same child ────────────────▶ observation, reward, done, or why there is none
"""

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from actors.children import Child
from actors.reward import GROWTH_BYTES, Tally
from configs.schema import EnvironmentConfig
from credit.trajectory import Prompt, Sample

Reply = dict[str, Any]
"""`observation` (text or chat messages) and, of a step, `reward` and `done`."""


class Environment:
    """A process that plays one episode after the other, each with a new object of the user's class.

    It is started when it is first needed. Whatever goes wrong is an answer, the reason as text: `raised: ...`,
    `timeout after ... s`, `died: ...`; after the last two the process is replaced. Belongs to one event loop.
    """

    def __init__(self, config: EnvironmentConfig, home: str) -> None:
        self._config, self._home = config, home
        self._child: Child | None = None
        self._memory = 0  # of the process after its last answer

    async def reset(self, columns: dict[str, Any]) -> Reply | str:
        """A new episode. Columns that JSON does not know (dates, ...) reach the environment as text."""
        if self._child and self._memory > self._child.hello["memory"] + GROWTH_BYTES:
            await self.close()
        if self._child is None or not self._child.running:
            self._child, self._memory = await start(self._config, self._home, None), 0
            if "ready" not in self._child.hello:
                why = self._child.hello.get("error") or await self._child.last_words()
                await self.close()
                return f"died: its process did not start: {why}"
        return await self._ask({"reset": columns})

    async def step(self, completion: str) -> Reply | str:
        return await self._ask({"step": completion})

    async def _ask(self, request: dict[str, Any]) -> Reply | str:
        child, answer = self._child, b""
        assert child is not None, "an episode begins with reset"
        try:
            answer = await child.ask(json.dumps(request, default=str).encode() + b"\n", self._config.timeout_s)
            if not answer:
                return f"died: {await child.last_words()}"
        except TimeoutError:
            return f"timeout after {self._config.timeout_s:g} s"
        finally:  # a cancelled call, too, leaves a reply behind that is not for the next episode
            if not answer:
                await self.close()
        reply = json.loads(answer)
        self._memory = reply.pop("memory")
        return reply.get("failed") or reply

    async def close(self) -> None:
        """Kill the process and what it started, and wait until it is gone."""
        child, self._child = self._child, None
        if child is not None:
            await child.kill()

    def kill(self) -> None:
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):  # gone already
                os.killpg(self._child.pid, signal.SIGKILL)


class EnvironmentPool:
    """`environment.workers` environments, lent in the order of asking. Belongs to the event loop of its first use."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="accredit-environment-")
        self._all = [Environment(config, self._home.name) for _ in range(config.workers)]
        self._free: asyncio.Queue[Environment] = asyncio.Queue()
        self._asking = asyncio.Lock()
        for environment in self._all:
            self._free.put_nowait(environment)

    @asynccontextmanager
    async def lend(self, count: int) -> AsyncIterator[list[Environment]]:
        """`count` environments at once, at most as many as there are."""
        lent: list[Environment] = []
        try:
            async with self._asking:  # who has some and waits for more is alone: nobody waits for each other
                while len(lent) < count:
                    lent.append(await self._free.get())
            yield lent
        finally:
            for environment in lent:
                self._free.put_nowait(environment)

    def kill(self) -> None:
        """SIGKILL to every process and what it started, from any thread; the pool cannot be used any more."""
        for environment in self._all:
            environment.kill()
        self._home.cleanup()


async def start(config: EnvironmentConfig, home: str, columns: Sequence[str] | None) -> Child:
    spec = {"path": config.path, "options": config.options, "columns": columns}
    return await Child.start("actors.environment_child", spec, home)


async def check(config: EnvironmentConfig, columns: Sequence[str]) -> None:
    """Raises ValueError when the class cannot be imported, does not take its options, or its reset the columns."""
    with tempfile.TemporaryDirectory(prefix="accredit-environment-") as home:
        child = await start(config, home, list(columns))
        try:
            if "ready" not in child.hello:
                raise ValueError(
                    f"environment.path: {child.hello.get('error') or await child.last_words()}; expected the dotted "
                    f"path of a class with reset(**columns) and step(completion)"
                )
        finally:
            await child.kill()


class EpisodeRewards:
    """In the place of a RewardPool: a trajectory's reward is the sum of what its environment gave for its turns."""

    def __init__(self) -> None:
        self.tally = Tally()

    async def start(self, columns: Sequence[str] | None = None) -> None:
        """Nothing to start: the environments are with the rollout actors."""

    async def score_samples(
        self, prompt: Prompt, samples: list[Sample], max_steps: int, tally: Tally | None = None
    ) -> list[float | str]:
        rewards = [sample.failure or sum(turn.reward for turn in sample.turns) for sample in samples]
        (tally or self.tally).add(rewards, {})
        return rewards

    async def close(self) -> None:
        """Nothing to end."""
