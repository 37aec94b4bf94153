"""Samples completions with vLLM while adapter versions come and go.

One thread owns the engine: it runs the commands that have arrived, steps the engine once, and so on; it sleeps when
there is neither. Callers are coroutines of any event loop; they meet the thread only through a queue of commands and
through futures, so a call waits until the step in progress is over, and never longer than `rollout.timeout_s`.

No pause, no mixing: a new version is a new adapter in a free slot. Requests finish on the version they began with, new
ones take the active version, and a version is unloaded when it is superseded and its last request is done.
"""

import asyncio
import itertools
import logging
import queue
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from actors.episodes import Ask, Episodes
from configs.schema import RunConfig
from credit.adapter import Adapter, label
from credit.trajectory import Prompt, Sample

if TYPE_CHECKING:  # importing vLLM takes seconds and changes the environment: only the engine's thread does it
    from actors.engine import Finished

logger = logging.getLogger(__name__)

REMEMBERED = 16  # versions in `stats`


@dataclass(slots=True, eq=False)
class Resident:
    """An adapter version in one of the engine's slots."""

    version: int
    digest: str
    adapter: int  # the engine's id, never used twice
    policy: str
    requests: int = 0
    retired: bool = False  # superseded: unloaded with its last request


@dataclass(slots=True, eq=False)
class Group:
    """Requests with one answer: the completions of a prompt, or a canary."""

    answer: Future  # list[Sample], or the [T] log-probs of a canary
    resident: Resident | None  # None: the base model
    prompt: Prompt | None = None  # None: a canary
    pending: dict[str, int] = field(default_factory=dict)  # request -> index in the group
    samples: list[Sample] = field(default_factory=list)
    start: float = field(default_factory=time.perf_counter)


@dataclass(slots=True)
class Served:
    """What a version was used for."""

    requests: int = 0  # canaries not counted
    first: str = ""  # the first request
    first_token: float | None = None  # time.time() after the step that gave the first request its first token


@dataclass(slots=True)
class Counters:
    steps: int = 0
    step_s: float = 0.0
    generated_tokens: int = 0
    cached_tokens: int = 0
    loads: int = 0
    most_resident: int = 0  # versions at once
    load_s: float = 0.0  # of the last load: reading the adapter into its slot and back, between two steps
    proof_s: float = 0.0  # of it: reading back
    canary_s: float = 0.0  # of the last canary
    aborted: int = 0
    longest_step_s: float = 0.0  # since the last call of `stats`
    longest_pause_s: float = 0.0  # since then: between two steps while requests were running


class RolloutWorker:
    """Raises RuntimeError from every call once the engine has failed, with the cause."""

    def __init__(self, run: RunConfig, model_path: str) -> None:
        self._run = run
        self._inbox: queue.SimpleQueue[tuple[Callable[[], Any] | None, Future]] = queue.SimpleQueue()
        self._failure: str | None = None
        self._episodes = Episodes(run, model_path) if run.environment else None
        # from here on: touched by the engine's thread only
        self._residents: dict[tuple[str, int], Resident] = {}  # by policy and version
        self._active: dict[str, Resident] = {}  # by policy
        self._groups: dict[str, Group] = {}  # by request
        self._served: dict[tuple[str, int], Served] = {}  # by policy and version, the newest
        self._ids = itertools.count(1)
        self._count = Counters()
        ready: Future = Future()
        self._thread = threading.Thread(target=self._drive, args=(model_path, ready), name="engine", daemon=True)
        self._thread.start()
        try:
            ready.result(run.rollout.timeout_s)
        except TimeoutError:
            raise RuntimeError(
                f"rollout: the engine did not start within rollout.timeout_s={run.rollout.timeout_s} s"
            ) from None

    # ---- for callers ----

    async def load(self, adapter: Adapter) -> np.ndarray:
        """Load a version into a free slot and return its log-probs of the canary's tokens, [T] float32, 0 at 0.

        New requests do not use it until `activate`. Loading a resident version again only asks its canary again.
        Raises ValueError when the content does not match the digest, RuntimeError when no slot is free or when what
        vLLM holds afterwards is not the adapter.
        """
        await asyncio.to_thread(adapter.verify)
        await self._call(lambda: self._load(adapter))
        try:
            return await self.canary(adapter.canary.tokens, adapter.version, adapter.policy)
        except BaseException:
            self._inbox.put((lambda: self._retire(adapter.version, adapter.policy), Future()))
            raise

    async def canary(self, tokens: list[int], version: int | None, policy: str = "") -> np.ndarray:
        """Log-probs of `tokens` [T] under a resident version (None: the base model), by a fresh forward pass.

        Returns [T] float32 at temperature 1, 0 at position 0.
        """
        answer: Future = Future()
        wrapped = asyncio.wrap_future(answer)
        try:
            await self._call(lambda: self._ask(tokens, version, policy, answer))
            return await self._within_deadline(wrapped)
        finally:
            wrapped.cancel()

    async def activate(self, version: int, policy: str = "") -> None:
        """The policy's requests from now on use this resident version; those that it supersedes go with their last
        request."""
        await self._call(lambda: self._activate(version, policy))

    async def unload(self, version: int, policy: str = "") -> None:
        """Give up a version that is not active: at once, or with its last request. Not resident: nothing to do."""
        await self._call(lambda: self._retire(version, policy))

    async def forget(self, policy: str) -> None:
        """Give up all versions of a policy, the active one included."""
        await self._call(lambda: self._forget(policy))

    async def sample(self, prompts: list[Prompt], temperature: float | None = None) -> AsyncIterator[list[Sample]]:
        """Yield the G samples of each prompt, all of one policy, when they are complete, in order of completion.

        All requests enter the engine in the given order between the same two steps, under the version that is active
        then; with an environment, the later turns of an episode have that version, too. `temperature` overrides the
        configured one; 0 is greedy. Leaving the generator aborts what is running.
        """
        if self._episodes is None:
            async with self._asked([Ask(prompt) for prompt in prompts], temperature) as groups:
                for group in asyncio.as_completed(groups):
                    yield await self._within_deadline(group)
            return
        over: Future = Future()

        async def answers(asks: list[Ask]) -> list[Sample]:
            async with self._asked(asks, temperature, resident) as groups:
                return [(await self._within_deadline(group))[0] for group in groups]

        try:
            resident: Resident = await self._call(lambda: self._hold(prompts, over))
            async with aclosing(self._episodes.play(prompts, answers, resident.version, resident.digest)) as played:
                async for group in played:
                    yield group
        finally:
            over.cancel()

    @asynccontextmanager
    async def _asked(
        self, asks: list[Ask], temperature: float | None, resident: Resident | None = None
    ) -> AsyncIterator[list[asyncio.Future[list[Sample]]]]:
        """The coming samples of each prompt; those that are not there at the end are aborted."""
        answers: list[Future] = [Future() for _ in asks]
        groups = [asyncio.wrap_future(answer) for answer in answers]
        try:
            await self._call(lambda: self._submit(asks, answers, temperature, resident))
            yield groups
        finally:
            for group in groups:
                group.cancel()
            await asyncio.gather(*groups, return_exceptions=True)  # a failure reaches every group; one is raised

    async def stats(self, policy: str = "") -> dict[str, Any]:
        """Of the worker; what it says of versions is the policy's."""
        return await self._call(lambda: self._stats(policy))

    async def ping(self) -> None:
        """Returns when the engine's thread answers, that is after the step in progress."""
        await self._call(lambda: None)

    def close(self) -> None:
        """Stop the engine; calls in progress fail."""
        self._inbox.put((None, Future()))
        self._thread.join(self._run.rollout.timeout_s)
        if self._episodes:
            self._episodes.close()

    async def _call(self, function: Callable[[], Any]) -> Any:
        """Run `function` in the engine's thread, between two steps."""
        future: Future = Future()
        self._inbox.put((function, future))
        if self._failure is not None:  # nobody reads the inbox any more
            self._fail_inbox()
        return await self._within_deadline(asyncio.wrap_future(future))

    async def _within_deadline(self, answer: Any) -> Any:
        try:
            return await asyncio.wait_for(answer, self._run.rollout.timeout_s)
        except TimeoutError:
            raise RuntimeError(
                f"rollout: the engine gave no answer within rollout.timeout_s={self._run.rollout.timeout_s} s"
            ) from None

    # ---- the engine's thread ----

    def _drive(self, model_path: str, ready: Future) -> None:
        try:
            from actors.engine import Engine

            self._engine = Engine(self._run, model_path)
        except BaseException as error:
            ready.set_exception(error)
            return
        ready.set_result(None)
        try:
            while self._run_commands():
                if self._groups:
                    self._step()
            self._fail("rollout: the worker was closed")
            self._engine.close()
        except BaseException as error:
            logger.exception("rollout: the engine's thread failed")
            self._fail(f"rollout: the engine's thread failed: {''.join(traceback.format_exception(error))}")

    def _run_commands(self) -> bool:
        """Run the commands that have arrived; wait for one if there is nothing else to do. False: stop."""
        running, start = bool(self._groups), time.perf_counter()
        for function, future in self._arrived():
            if function is None:
                return False
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as error:
                    future.set_exception(error)
        if running:
            self._count.longest_pause_s = max(self._count.longest_pause_s, time.perf_counter() - start)
        return True

    def _arrived(self) -> Iterator[tuple[Callable[[], Any] | None, Future]]:
        if not self._groups:
            yield self._inbox.get()
        while not self._inbox.empty():
            yield self._inbox.get()

    def _step(self) -> None:
        start = time.perf_counter()
        finished = self._engine.step()
        seconds = time.perf_counter() - start
        self._count.steps += 1
        self._count.step_s += seconds
        self._count.longest_step_s = max(self._count.longest_step_s, seconds)
        for served in self._served.values():
            if served.first_token is None and served.first in self._engine.begun:
                served.first_token = time.time()
        for request in finished:
            self._finish(request)

    def _finish(self, finished: "Finished") -> None:
        group = self._groups.pop(finished.request)
        index = group.pending.pop(finished.request)
        if group.prompt is None:
            self._count.canary_s = time.perf_counter() - group.start
            _settle(group.answer, finished.prompt_logprobs)
        else:
            assert group.resident is not None
            group.samples.append(finished.sample(group.prompt, index, group.resident.version, group.resident.digest))
            self._count.generated_tokens += len(finished.tokens)
            self._count.cached_tokens += finished.cached_tokens
            if not group.pending:
                _settle(group.answer, sorted(group.samples, key=lambda sample: sample.index))
        self._release(group.resident)

    def _hold(self, prompts: list[Prompt], over: Future) -> Resident:
        """The active version, which stays resident until `over` is."""
        resident = self._serving(prompts)
        resident.requests += 1
        over.add_done_callback(lambda _: self._inbox.put((lambda: self._release(resident), Future())))
        return resident

    def _serving(self, prompts: list[Prompt]) -> Resident:
        """The active version. Raises RuntimeError where there is none, ValueError for prompts that do not fit."""
        active = self._active.get(prompts[0].policy)
        if active is None:
            raise RuntimeError(
                "rollout: no adapter version is active, and the base model is never sampled: activate one"
            )
        for prompt in prompts:
            if not 0 < len(prompt.tokens) < self._run.model.max_length or not prompt.seeds:
                raise ValueError(
                    f"rollout: prompt group {prompt.group}: got {len(prompt.tokens)} tokens and {len(prompt.seeds)} "
                    f"seeds, expected at least one of each and fewer tokens than model.max_length="
                    f"{self._run.model.max_length}"
                )
        return active

    def _submit(
        self, asks: list[Ask], answers: list[Future], temperature: float | None, resident: Resident | None
    ) -> None:
        resident = resident or self._serving([ask.prompt for ask in asks])
        if temperature is None:
            temperature = self._run.rollout.temperature
        served = self._served.setdefault((resident.policy, resident.version), Served())
        while len(self._served) > REMEMBERED * max(1, len(self._active)):
            del self._served[next(iter(self._served))]
        for ask, answer in zip(asks, answers, strict=True):
            prompt = ask.prompt
            group = Group(answer, resident, prompt)
            answer.add_done_callback(self._abort_if_cancelled)
            for index, seed in enumerate(prompt.seeds):
                request = str(next(self._ids))
                self._engine.add(
                    request,
                    prompt.tokens,
                    seed=seed,
                    adapter=resident.adapter,
                    temperature=temperature,
                    max_tokens=ask.max_tokens,
                    announce=not served.first,
                )
                served.first = served.first or request
                served.requests += 1
                self._enter(request, group, index)

    def _ask(self, tokens: list[int], version: int | None, policy: str, answer: Future) -> None:
        resident = None if version is None else self._resident(version, policy)
        answer.add_done_callback(self._abort_if_cancelled)
        request = str(next(self._ids))
        self._engine.score(request, tokens, None if resident is None else resident.adapter)
        self._enter(request, Group(answer, resident), 0)

    def _enter(self, request: str, group: Group, index: int) -> None:
        self._groups[request] = group
        group.pending[request] = index
        if group.resident is not None:
            group.resident.requests += 1

    def _abort_if_cancelled(self, answer: Future) -> None:
        """Called in the thread that cancels."""
        if answer.cancelled():
            self._inbox.put((lambda: self._abort(answer), Future()))

    def _abort(self, answer: Future) -> None:
        requests = [request for request, group in self._groups.items() if group.answer is answer]
        self._engine.abort(requests)
        self._count.aborted += len(requests)
        for request in requests:
            self._release(self._groups.pop(request).resident)

    def _load(self, adapter: Adapter) -> None:
        resident = self._residents.get((adapter.policy, adapter.version))
        if resident is not None:
            if resident.digest != adapter.digest:
                raise RuntimeError(
                    f"rollout: {adapter} is resident with another content, got digest "
                    f"{adapter.digest[:12]}, expected {resident.digest[:12]}: activate another version and unload it"
                )
            resident.retired = False
            return
        if len(self._residents) >= self._run.adapter_slots:
            raise RuntimeError(
                f"rollout: no slot is free for {adapter}, all {self._run.adapter_slots} are taken: "
                f"{self._describe()}: unload one, or wait for its requests"
            )
        start = time.perf_counter()
        number = next(self._ids)
        self._engine.load(number, f"v{adapter.version}-{number}-{adapter.digest[:12]}", adapter)
        read = time.perf_counter()
        try:
            self._engine.prove(number, adapter)
        except BaseException:
            self._engine.unload(number)
            raise
        resident = Resident(adapter.version, adapter.digest, number, adapter.policy)
        self._residents[adapter.policy, adapter.version] = resident
        self._count.loads += 1
        self._count.most_resident = max(self._count.most_resident, len(self._residents))
        self._count.load_s, self._count.proof_s = time.perf_counter() - start, time.perf_counter() - read

    def _activate(self, version: int, policy: str) -> None:
        resident = self._resident(version, policy)
        previous, self._active[policy] = self._active.get(policy), resident
        resident.retired = False
        for other in [other for other in self._residents.values() if other.policy == policy]:
            if other is not resident and (other is previous or other.version < version):
                other.retired = True
                self._unload_if_done(other)

    def _retire(self, version: int, policy: str) -> None:
        resident = self._residents.get((policy, version))
        if resident is None:
            return
        if resident is self._active.get(policy):
            raise RuntimeError(f"rollout: {label(version, policy)} is active: activate another one before unloading it")
        resident.retired = True
        self._unload_if_done(resident)

    def _forget(self, policy: str) -> None:
        self._active.pop(policy, None)
        for resident in [resident for resident in self._residents.values() if resident.policy == policy]:
            self._retire(resident.version, policy)

    def _release(self, resident: Resident | None) -> None:
        """One request of this version is done."""
        if resident is not None:
            resident.requests -= 1
            self._unload_if_done(resident)

    def _unload_if_done(self, resident: Resident) -> None:
        if resident.retired and resident.requests == 0:
            del self._residents[resident.policy, resident.version]
            self._engine.unload(resident.adapter)

    def _resident(self, version: int, policy: str) -> Resident:
        if (policy, version) not in self._residents:
            raise RuntimeError(f"rollout: {label(version, policy)} is not resident: {self._describe()}: load it first")
        return self._residents[policy, version]

    def _describe(self) -> str:
        """`v3: 5 requests, v4 (active): 2 requests`."""
        return ", ".join(
            f"{label(resident.version, policy)}{' (active)' if resident is self._active.get(policy) else ''}: "
            f"{resident.requests} requests"
            for (policy, _), resident in self._residents.items()
        )

    def _stats(self, policy: str) -> dict[str, Any]:
        count, active = replace(self._count), self._active.get(policy)
        self._count.longest_step_s = self._count.longest_pause_s = 0.0
        return {
            "active": None if active is None else active.version,
            "resident": {r.version: r.requests for r in self._residents.values() if r.policy == policy},
            "most_resident": count.most_resident,
            "requests": len(self._groups),
            "steps": count.steps,
            "generated_tokens": count.generated_tokens,
            "tokens_per_s": count.generated_tokens / count.step_s if count.step_s else 0.0,
            "cached_prompt_tokens": count.cached_tokens,
            "slots_taken": len(self._engine.loaded()),
            "loads": count.loads,
            "load_s": count.load_s,
            "proof_s": count.proof_s,
            "canary_s": count.canary_s,
            "aborted": count.aborted,
            "longest_step_s": count.longest_step_s,
            "longest_pause_s": count.longest_pause_s,
            "versions": {
                v: (served.requests, served.first_token) for (p, v), served in self._served.items() if p == policy
            },
            "rss_bytes": psutil.Process().memory_info().rss,
        }

    def _fail(self, reason: str) -> None:
        """Fail every waiting call and every later one."""
        self._failure = reason
        for answer in {group.answer for group in self._groups.values()}:
            _settle(answer, RuntimeError(reason))
        self._fail_inbox()

    def _fail_inbox(self) -> None:
        while not self._inbox.empty():
            try:
                _, future = self._inbox.get_nowait()
            except queue.Empty:  # the other thread took it
                return
            _settle(future, RuntimeError(self._failure))


def _settle(future: Future, result: Any) -> None:
    """Answer a future unless its caller has gone."""
    if future.set_running_or_notify_cancel():
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
