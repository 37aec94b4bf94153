"""Rewards in killable children: a reward function may raise, hang, exit or be killed, and costs its own samples only.

score(prompt, completions, columns) ──▶ a free child ──▶ [0.0, 1.0, ...] or ["raised: ValueError: ...", ...]
"""

import asyncio
import json
import logging
import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from actors.children import Child
from actors.reward_parts import BUILT_IN
from configs.schema import RewardConfig
from credit.trajectory import Prompt, Sample

log = logging.getLogger("accredit.reward")

ATTEMPTS = (
    2  # children that one group may cost: what kills the child (memory, a crash) may have been the machine's doing
)
KINDS = ("raised", "timeout", "wrong length", "not a number", "does not apply", "died")
GROWTH_BYTES = 256 << 20  # a child that has grown by so much since it was ready is replaced


class Tally:
    """What happened to the samples since the last `take`."""

    def __init__(self) -> None:
        self.failed: Counter[str] = Counter()  # samples, by the kind of failure (KINDS)
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._counts: Counter[str] = Counter()

    def add(self, rewards: list[float | str], means: dict[str, tuple[float, int]]) -> None:
        for reward in rewards:
            if isinstance(reward, str):
                self.failed[next((kind for kind in KINDS if reward.startswith(kind)), "other")] += 1
        for name, (total, count) in means.items():
            self._sums[name] += total
            self._counts[name] += count

    def take(self) -> dict[str, float]:
        """`reward/part/NAME_mean` of weighted parts, `reward/log/NAME` of what rewards log, `reward/failed/REASON`."""
        record = {name: self._sums[name] / count for name, count in self._counts.items() if count}
        record |= {f"reward/failed/{kind.replace(' ', '_')}": float(n) for kind, n in self.failed.items()}
        for counter in (self.failed, self._sums, self._counts):
            counter.clear()
        return record


async def check(reward: RewardConfig, columns: Sequence[str]) -> None:
    """Raises ValueError when a function cannot be imported, or does not take its options and `columns`."""
    pool = RewardPool(reward.model_copy(update={"workers": 1}))
    await pool.start(columns)
    await pool.close()


class RewardPool:
    """At most `reward.workers` child processes that run the reward's functions, first come first served.

    Each call has `timeout_s` seconds from the moment that a child takes it. A child that is late or dead is killed with
    all that it started, and replaced; the group of one that died is asked once more. A child that has grown is replaced
    between two calls. Children have an empty folder as their home and for temporary files, and of the environment only
    PATH, PYTHONPATH, LANG and what `reward.env` names. Belongs to the event loop that it was started in.
    """

    def __init__(self, reward: RewardConfig) -> None:
        self.tally = Tally()
        self._reward = reward
        self._columns: list[str] | None = None
        self._free: asyncio.Queue[Child | None] = asyncio.Queue()  # None: this worker's child is yet to be started
        self._children: set[Child] = set()
        self._said: set[str] = set()
        self._home = tempfile.TemporaryDirectory(prefix="accredit-reward-")
        self._closed = False

    async def start(self, columns: Sequence[str] | None = None) -> None:
        """Start every child. Raises ValueError if a function cannot be imported or does not take `columns`."""
        self._columns = None if columns is None else list(columns)
        missing = [name for name in self._reward.env if name not in os.environ]
        if missing:
            raise ValueError(f"reward.env: {missing[0]} is not in the environment, set it or take it off the list")
        try:
            for _ in range(self._reward.workers):
                self._free.put_nowait(await self._spawn())
        except BaseException:
            await self.close()
            raise

    async def score(
        self,
        prompt: Any,
        completions: list[str],
        columns: dict[str, Any],
        *,
        ids: list[list[int]] | None = None,
        state: dict[str, Any] | None = None,
        tally: Tally | None = None,
    ) -> list[float | str]:
        """One group: for each completion its reward, or the reason why it has none; a failed reward raises nothing.

        Functions that ask for them get `ids` as completion_ids and `state` as the attributes of trainer_state. Columns
        that JSON does not know (dates, ...) reach the reward as text. What happened is added to `tally`, or else to the
        pool's own. Raises RuntimeError once closed.
        """
        request = {"prompt": prompt, "completions": completions, "columns": columns, "ids": ids, "state": state or {}}
        line = json.dumps(request, default=str).encode() + b"\n"
        child = await self._free.get()
        keep = False
        reply: dict[str, Any] = {}
        try:
            for _ in range(ATTEMPTS):
                if self._closed:
                    raise RuntimeError("reward pool: closed, got a group to score")
                if child is None or not child.running:  # killed, or dead since its last answer
                    child = await self._spawn()
                reply = await self._ask(child, line, len(completions))
                keep = child.running and not self._closed and not self._grown(child, reply)
                if self._closed or not str(reply["rewards"][0]).startswith("died"):
                    break
                log.warning("reward: a child %s, its group goes to another", reply["rewards"][0])
                await self._kill(child)
        finally:  # a cancelled call, too, leaves a reply behind that is not for the next group
            if child and not keep:
                await self._kill(child)
            self._free.put_nowait(child if keep else None)
        (tally or self.tally).add(reply["rewards"], reply["means"])
        return reply["rewards"]

    async def score_samples(
        self, prompt: Prompt, samples: list[Sample], max_steps: int, tally: Tally | None = None
    ) -> list[float | str]:
        """`score` of the completions of a prompt. The trainer's step is the policy's version that sampled them."""
        return await self.score(
            prompt.prompt,
            [sample.text for sample in samples],
            prompt.columns,
            ids=[sample.tokens[sample.mask].tolist() for sample in samples],
            state={"global_step": samples[0].version, "max_steps": max_steps},
            tally=tally,
        )

    def pids(self) -> list[int]:
        """The children's process ids."""
        return [child.pid for child in self._children]

    async def close(self) -> None:
        """Kill every child and what it started. Groups that are being scored fail as `died`."""
        self._closed = True
        for child in list(self._children):
            await self._kill(child)
        self._home.cleanup()

    async def _ask(self, child: Child, line: bytes, n: int) -> dict[str, Any]:
        try:
            answer = await child.ask(line, self._reward.timeout_s)
        except TimeoutError:
            await self._kill(child)
            return {"rewards": [f"timeout after {self._reward.timeout_s:g} s"] * n, "means": {}}
        if not answer:
            return {"rewards": [f"died: {await child.last_words()}"] * n, "means": {}}
        return json.loads(answer)

    def _grown(self, child: Child, reply: dict[str, Any]) -> bool:
        return reply.get("memory", 0) > child.hello["memory"] + GROWTH_BYTES

    async def _spawn(self) -> Child:
        spec = {
            "parts": [part.model_dump() | {"name": part.label} for part in self._reward.weighted],
            "columns": self._columns,
            "timeout_s": self._reward.timeout_s,
        }
        functions = " + ".join(repr(part.function) for part in self._reward.weighted)
        why = ""
        for _ in range(ATTEMPTS):
            child = await Child.start("actors.reward_child", spec, self._home.name, self._reward.env)
            self._children.add(child)
            if "ready" in child.hello:
                for note in set(child.hello["notes"]) - self._said:
                    log.warning("reward: %s", note)
                    self._said.add(note)
                return child
            ended = f"{functions} cannot be used: the process ended at once: {await child.last_words()}"
            why = child.hello.get("error") or ended
            await self._kill(child)
            if "error" in child.hello or self._closed:
                break
        raise ValueError(
            f"reward.function: {why}; expected one of {', '.join(BUILT_IN)}, or the dotted path of "
            f"f(prompts, completions, **columns) that takes the task's columns"
        )

    async def _kill(self, child: Child) -> None:
        self._children.discard(child)
        await child.kill()
