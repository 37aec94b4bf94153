"""One training run: joins the parts, resumes after the last committed step, evaluates before and after."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from actors.environment import EpisodeRewards
from actors.reward import RewardPool, Tally
from actors.tasks import first_rows, longest, render
from cluster import evaluation, remote, trajectories
from cluster.assigner import Assigner
from cluster.canary import TOKENS, tokens_of
from cluster.checkpoints import Checkpoints
from cluster.deadline import within
from cluster.fleet import Fleet, Scorers
from cluster.ledger import Ledger, check_free, die_at
from cluster.loop import TOO_LONG, Group, Loop
from cluster.metrics import Metrics
from cluster.preflight import Inputs
from cluster.publisher import Publisher
from cluster.view import View
from configs.schema import ConfigError, RunConfig
from credit.trajectory import Batch, Prompt, Sample, Signals, Trajectory

log = logging.getLogger("accredit.run")

ROW_TIMEOUT_S = 3600.0  # for one row: after a crash a stream is read again up to where the run was


class Run:
    """The stages of the loop over real actors."""

    def __init__(self, run: RunConfig, given: Inputs, view: View, shared: tuple[Fleet, Scorers] | None = None) -> None:
        """`shared` are the started actors that the run uses together with others, as the policy `given.policy`."""
        self.run, self.given, self.view = run, given, view
        self.folder = run.folder
        self.ledger = Ledger(self.folder / "ledger.sqlite")
        self.checkpoints = Checkpoints(self.folder, run.keep_checkpoints)
        self.rewards = RewardPool(run.reward) if run.environment is None else EpisodeRewards()
        self.fleet, self.scorers = shared or actors(run, given.model)
        self.own = () if shared else (self.fleet, self.scorers)
        self.assigner = Assigner(run, given.tokenizer, self.scorers, self.fleet, self.reward, self.ledger, given.policy)
        rows = (row for row in first_rows(given.task, TOKENS) if row.prompt is not None)
        prompts = (render(row, given.tokenizer, run.data) for row in rows)
        self.learners = remote.Learners(run, given.model, tokens_of(prompts, run.model.max_length - 1))
        self.publisher = Publisher(self.learners, self.fleet, self.scorers, self.folder, given.policy)
        self.metrics = Metrics(self.folder, run.name)
        self.skipped_in_a_row = 0

    # ---- stages ----

    async def prompt(self, group: int) -> Prompt | str:
        """The prompt of a group, or why its row has none: rows beyond those of the preflight are first met here."""
        reading = asyncio.to_thread(self.given.task.row, group)
        row = await within(ROW_TIMEOUT_S, f"data: the row of group {group}", reading)
        self.ledger.drawn(group, row.source, row.epoch, row.number)
        try:
            prompt = self.given.prompt(self.run, row, group, self.run.rollout.group_size)
        except ValueError as error:
            log.warning("group %d: %s", group, error)
            return "the row makes no prompt"
        limit = longest(row, self.run.data, self.run.model.max_length - self.run.rollout.max_new_tokens)
        return prompt if len(prompt.tokens) <= limit else TOO_LONG

    async def sample(self, prompts: list[Prompt], done: Any) -> None:
        await self.fleet.sample(prompts, done)

    async def reward(self, prompt: Prompt, samples: list[Sample]) -> list[float | str]:
        return await self.rewards.score_samples(prompt, samples, self.run.steps, None if prompt.group >= 0 else Tally())

    async def signals(self, prompt: Prompt, trajectories: list[Trajectory]) -> list[Signals]:
        return await self.assigner.signals(prompt, trajectories)

    async def assign(self, groups: list[Group], step: int) -> tuple[Batch, dict[str, float]]:
        return await self.assigner.assign(groups, step)

    async def learn(self, batch: Batch) -> dict[str, float]:
        """Raises RuntimeError when too many batches in a row had no finite gradient; the last is not committed."""
        metrics = await self.learners.step(batch)
        skipped = metrics["learner/skipped"] > 0 and metrics["learner/updates"] == 0
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if self.skipped_in_a_row >= self.run.learner.max_skipped:
            raise RuntimeError(
                f"learner: the gradient was not finite for {self.skipped_in_a_row} batches in a row "
                f"(learner.max_skipped), the policy has not changed since: lower learner.lr, or look at the rewards"
            )
        return metrics

    async def commit(self, step: int, groups: list[Group]) -> dict[str, float]:
        """Checkpoint to a temporary name, fsync, rename; then one transaction."""
        began = time.monotonic()
        await self.learners.save(self.checkpoints.temporary(step))
        digest = await asyncio.to_thread(self.checkpoints.seal, step)
        die_at("rename", step)
        self.ledger.commit(step, step, digest, [group.prompt.group for group in groups])
        self.learners.committed(self.checkpoints.path(step))
        self.checkpoints.prune()
        return {"time/commit_s": time.monotonic() - began}

    async def publish(self, version: int) -> dict[str, float]:
        return await self.publisher.publish(version)

    # ---- life of the run ----

    async def start(self) -> int:
        """Start every actor at once and publish the version to begin with. Returns the last committed step."""
        restored = self.checkpoints.restore(self.ledger)
        if restored and restored[0].step > self.run.steps:
            raise RuntimeError(f"steps: got {self.run.steps}, but {restored[0].step} are committed: ask for more")
        columns = list(self.given.task.row(0).columns)
        await asyncio.gather(self.rewards.start(columns), self.learners.start(), *(pool.start() for pool in self.own))
        if restored:
            await self.learners.load(restored[1])
        step = restored[0].step if restored else 0
        await self.publish(step)
        return step

    async def train(self, step: int) -> None:
        await Loop(self.run, self, self.ledger, step).train(self._log)

    async def _log(self, step: int, metrics: dict[str, float], groups: list[Group], batch: Batch) -> None:
        metrics |= self._state() | self.rewards.tally.take()
        self.metrics.write(step, metrics)
        self.view.step(step, metrics)
        await asyncio.to_thread(trajectories.write, self.folder, step, groups, batch)
        every = self.run.eval.every
        if every and step % every == 0 and step < self.run.steps:
            await self.evaluate(step)

    def _state(self) -> dict[str, int]:
        """The actors and the ledger as they are; a replica that holds no version (it is being restarted) has -1."""
        states = self.ledger.counts()
        members = self.fleet.members
        versions = {f"fleet/version/{member.name}": member.versions.get(self.given.policy, -1) for member in members}
        return versions | {
            "fleet/restarts": self.fleet.restarts,
            "fleet/quarantined": sum(not member.serving for member in members),
            "scorers/restarts": self.scorers.restarts,
            "scorers/quarantined": sum(not member.serving for member in self.scorers.members),
            "learner/restarts": self.learners.restarts,
            "staleness/bound": self.run.max_staleness,
            "ledger/issued": self.ledger.issued,
            **{
                f"ledger/{state}": states.get(state, 0)
                for state in ("leased", "sampled", "scored", "trained", "dropped")
            },
        }

    async def evaluate(self, step: int) -> evaluation.Report:
        """Held-out accuracy under the newest version, to metrics.jsonl and evals/; adapters/best may move to it."""
        prompts = evaluation.heldout_prompts(self.run, self.given)
        report = await evaluation.evaluate(self.run, prompts, self.fleet, self.reward)
        evaluation.write(evaluation.path_of(self.folder, report["version"]), report)
        await asyncio.to_thread(evaluation.mark_best, self.folder)
        self.metrics.write(step, evaluation.record(report))
        return report

    async def before(self, step: int) -> evaluation.Report:
        """The evaluation that the run began with: of a resumed run, the one on record."""
        recorded = evaluation.path_of(self.folder, 0)
        return evaluation.read(recorded) if recorded.exists() else await self.evaluate(step)

    async def close(self) -> list[BaseException]:
        """End every actor, then close the files, whatever fails on the way. Returns and logs what failed."""
        parts = [self.rewards.close(), self.learners.kill()]
        for pool in (self.fleet, self.scorers):
            parts.append(pool.close() if self.own else pool.forget(self.given.policy))
        failures = [end for end in await asyncio.gather(*parts, return_exceptions=True) if end is not None]
        for file in (self.metrics, self.ledger):
            try:
                file.close()
            except (OSError, RuntimeError) as error:
                failures.append(error)
        failures = [failure for failure in failures if isinstance(failure, BaseException)]
        for failure in failures:
            log.error("closing the run: %s: %s", type(failure).__name__, failure)
        return failures


def actors(run: RunConfig, model: str, policies: int = 1) -> tuple[Fleet, Scorers]:
    """The pools of a run, or of `policies` runs that share them; not started."""
    objects = remote.Objects()
    fleet = Fleet(run, partial(remote.RemoteReplica.start, run, model, objects), policies)
    return fleet, Scorers(run, partial(remote.RemoteScorer.start, run, model, objects))


class Interrupted(RuntimeError):
    """SIGINT or SIGTERM ended the run: a text, and the exit code."""


def check_folder(run: RunConfig, allow: Sequence[str] = ()) -> None:
    """Raises ConfigError when another process is training the run, and when the run's folder holds a run with other
    settings than those that `allow` names (a key, or a section), naming them.
    """
    path = run.folder / "config.yaml"
    if not path.exists():
        return
    try:
        check_free(run.folder)
    except RuntimeError as error:
        raise ConfigError(str(error)) from None
    differences = _differences(yaml.safe_load(path.read_text()), run.model_dump(mode="json"))
    for key in [key for key in differences if any(key == name or key.startswith(f"{name}.") for name in allow)]:
        log.warning("%s: %s", run.folder, differences.pop(key))
    if differences:
        options = " ".join(f"--allow {key}" for key in differences)
        raise ConfigError(
            f"{run.folder}: holds a run with other settings ({'; '.join(differences.values())}): "
            f"choose another name=..., use the settings it began with, or go on with the new ones: {options}"
        )


def make_folder(run: RunConfig) -> None:
    """The run's folder, with its resolved configuration. Raises ConfigError when it cannot be written."""
    path = run.folder / "config.yaml"
    temporary = path.with_suffix(".writing")
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        temporary.write_text(yaml.safe_dump(run.model_dump(mode="json"), sort_keys=False))
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(
            f"{run.folder}: cannot be written: {error.strerror}: a run writes into its folder, choose another out=..."
        ) from None


def _differences(old: Any, new: Any, prefix: str = "") -> dict[str, str]:
    """What differs, by dotted key."""
    if isinstance(old, dict) and isinstance(new, dict):
        found: dict[str, str] = {}
        for key in sorted(old.keys() | new.keys()):
            found |= _differences(old.get(key), new.get(key), f"{prefix}.{key}".strip("."))
        return found
    return {} if old == new else {prefix: f"{prefix}: was {old!r}, now {new!r}"}


async def train(run: RunConfig, given: Inputs, view: View) -> dict[str, Any]:
    """The whole run, from the last committed step to `run.steps`. Returns the summary.

    SIGINT and SIGTERM abandon the step in progress, whose groups stay open in the ledger, and raise Interrupted.
    """
    job = Run(run, given, view)

    def committed() -> str:
        last = job.ledger.last_step()
        return f"step {last.step} is committed" if last else "no step was committed"

    try:
        with interruptible(committed):
            result = await drive(job)
    finally:
        failures = await job.close()
    if failures:
        raise failures[0]
    return result


@contextmanager
def interruptible(state: Callable[[], str]) -> Iterator[None]:
    """The first SIGINT or SIGTERM cancels the current task; Interrupted is raised in the end, with the `state` then.

    A second signal ends the process at once; Ray ends its actors.
    """
    received: list[signal.Signals] = []
    this, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert this is not None

    def stop(number: signal.Signals) -> None:
        if not received:
            this.cancel()
        received.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        yield
    except asyncio.CancelledError:
        raise Interrupted(f"stopped by {received[0].name}, {state()}", 128 + received[0]) from None
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def drive(job: Run) -> dict[str, Any]:
    """From the last committed step to `run.steps`. Returns the summary; the caller closes the run."""
    run, view = job.run, job.view
    with view.waiting("starting actors"):
        step = await job.start()
    link_logs(run.folder)
    if step:
        view.note(f"resumed after step {step}")
    with view.waiting("evaluating"):
        before = await job.before(step)
    with view.training(run, step, evaluation.figure(before)):
        await job.train(step)
    with view.waiting("evaluating"):
        after = await job.evaluate(run.steps)
    adapters = run.folder / "adapters"
    return {
        "before": before,
        "after": after,
        "adapter": str(adapters / f"v{run.steps:06d}"),
        "best": (adapters / "best").readlink().name,
        "model": job.given.model,
        "resumed_after": step,
        "dropped": job.ledger.drops(),
    }


def log_to(path: Path) -> None:
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger("accredit").addHandler(handler)
    logging.getLogger("accredit").setLevel(logging.INFO)
    logging.raiseExceptions = False  # a full disk is told once, by the error that ends the run


def link_logs(folder: Path) -> None:
    link = folder / "logs"
    link.unlink(missing_ok=True)
    link.symlink_to(remote.session_logs())
