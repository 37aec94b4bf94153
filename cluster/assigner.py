"""Credit in a run: what is asked of the credit actors, and the batch that comes of it."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import credit
from actors.negatives import render_negative
from actors.tasks import Row, render
from cluster.fleet import ATTEMPTS, Fleet, Lost, Scorers
from cluster.ledger import Ledger
from cluster.loop import Group, sampling_seed
from configs.schema import RunConfig
from credit.delta import Feature
from credit.ibpo import Revision, pairs
from credit.ibpo import prompt as revision_prompt
from credit.trajectory import Batch, Prompt, Sample, Signals, Trajectory

Key = tuple[int, int]


def signals_of(run: RunConfig) -> frozenset[str]:
    """What the credit actors compute: what the method needs, what the loss needs, and what is to be recorded."""
    needed = credit.needs(run.credit.method, quadrant=run.credit.quadrant, **run.credit.options)
    kl = {"logp_base"} if run.learner.loss.kl_beta else set()
    return needed | kl | {"logp", "entropy", *run.credit.record}


class Assigner:
    """Two stages of the loop: the signals of a group, and the advantages of a batch."""

    def __init__(
        self,
        run: RunConfig,
        tokenizer: Any,
        scorers: Scorers,
        fleet: Fleet,
        reward: Callable[[Prompt, list[Sample]], Any],
        ledger: Ledger,
        policy: str = "",
    ) -> None:
        self.run, self.chosen, self.needs = run, run.credit, signals_of(run)
        self.tokenizer, self.scorers, self.fleet = tokenizer, scorers, fleet
        self.reward, self.ledger, self.policy = reward, ledger, policy
        self._revisions: dict[Key, list[Revision]] = {}
        self._versions: dict[Key, int] = {}  # of every trajectory for which something is kept

    async def signals(self, prompt: Prompt, trajectories: list[Trajectory]) -> list[Signals]:
        """The signals of one group's trajectories, in their order."""
        self._versions |= {(row.group, row.index): row.version for row in trajectories}
        if self.chosen.method == "ibpo":
            await self._revise(prompt, trajectories)
        return await self._score(prompt, trajectories)

    async def _score(self, prompt: Prompt, trajectories: list[Trajectory]) -> list[Signals]:
        negatives = None
        if self.chosen.negative is not None and self.needs & {"logp_negative", "kl_negative"}:
            row = Row(prompt.prompt, prompt.columns)
            negatives = {prompt.group: render_negative(row, self.tokenizer, self.run.data, self.chosen.negative)}
        return await self.scorers.score(list(trajectories), self.needs, negatives)

    async def assign(self, groups: list[Group], step: int) -> tuple[Batch, dict[str, float]]:
        """The batch of step `step` and its diagnostics, computed off the event loop.

        DelTA's features stay on the credit actors; those that died with theirs are computed again.
        """
        keys = {group.prompt.group: [(row.group, row.index) for row in group.trajectories] for group in groups}
        attempt = 1
        while True:
            for group in groups:
                if "delta_feature" in self.needs and not self.scorers.keeps(keys[group.prompt.group], self.policy):
                    await self._score(group.prompt, group.trajectories)
            try:
                result = await self._assign(groups, step)
                break
            except Lost:
                if attempt == ATTEMPTS:
                    raise
                attempt += 1
        await self._forget([key for group in keys.values() for key in group], step)
        return result

    async def _assign(self, groups: list[Group], step: int) -> tuple[Batch, dict[str, float]]:
        rows = [row for group in groups for row in group.trajectories]
        keys = [(row.group, row.index) for row in rows]
        chosen = self.chosen
        return await asyncio.to_thread(
            credit.assign,
            rows,
            [row for group in groups for row in group.signals],
            method=chosen.method,
            advantage=chosen.advantage,
            turns=chosen.turns,
            sharpening=chosen.sharpening,
            permute=chosen.permute,
            quadrant=chosen.quadrant,
            options=chosen.options,
            advantage_options=chosen.advantage_options,
            seed=self.run.seed + step,
            delta=self._delta(groups) if "delta_feature" in self.needs else None,
            revisions={key: self._revisions[key] for key in keys if key in self._revisions},
            version=step - 1,
            correct=self.run.reward.correct,
        )

    async def _forget(self, trained: list[Key], step: int) -> None:
        """What was kept for the trained trajectories, and for those that are too old to be trained any more."""
        oldest = step - self.run.max_staleness
        done = [*trained, *(key for key, version in self._versions.items() if version < oldest)]
        for key in done:
            self._revisions.pop(key, None)
            self._versions.pop(key, None)
        if "delta_feature" in self.needs:
            await self.scorers.delta_clear(list(dict.fromkeys(done)), self.policy)

    def _delta(self, groups: list[Group]) -> Feature:
        """DelTA's two views of features that stay on the credit actors; called from the thread that assigns."""
        loop = asyncio.get_running_loop()
        lengths = {(row.group, row.index): len(row.tokens) for group in groups for row in group.trajectories}
        keys, width = sorted(lengths), max(lengths.values())

        def wait(coroutine: Any) -> Any:
            pending: Future = asyncio.run_coroutine_threadsafe(coroutine, loop)
            return pending.result(self.chosen.timeout_s)

        def sums(coefficients_NT: Tensor) -> tuple[Tensor, Tensor]:
            parts = {key: row[: lengths[key]].numpy() for key, row in zip(keys, coefficients_NT, strict=True)}
            positive, negative = wait(self.scorers.delta_sums(parts, self.policy))
            return torch.from_numpy(positive), torch.from_numpy(negative)

        def dots(direction_H: Tensor) -> Tensor:
            answers = wait(self.scorers.delta_dots(direction_H.numpy(), keys, self.policy))
            out = np.zeros((len(keys), width), dtype=np.float32)
            for row, key in zip(out, keys, strict=True):
                row[: lengths[key]] = answers[key]
            return torch.from_numpy(out)

        return Feature(sums, dots)

    async def _revise(self, prompt: Prompt, trajectories: list[Trajectory]) -> None:
        """IBPO's compare-and-correct rollouts: issued, rewarded and entered in the ledger, and never trained."""
        rewards = [trajectory.reward for trajectory in trajectories]
        wanted = pairs(rewards, references=self.chosen.options.get("references", 3), correct=self.run.reward.correct)
        asked: dict[int, tuple[Trajectory, Trajectory]] = {}
        prompts = []
        for number, (wrong, sibling) in enumerate((trajectories[w], trajectories[s]) for w, s in wanted):
            text = revision_prompt(str(prompt.prompt), wrong.text, sibling.text)
            tokens = render(Row(text, prompt.columns), self.tokenizer, self.run.data)
            if len(tokens) + self.run.rollout.max_new_tokens > self.run.model.max_length:
                self.ledger.revised(prompt.group, wrong.index, sibling.index, "prompt too long")
                continue
            asked[number] = wrong, sibling
            seed = sampling_seed(self.run.seed, prompt.group, self.run.rollout.group_size + number)
            prompts.append(replace(prompt, group=number, tokens=tokens, seeds=[seed]))
        answers: list[Sample] = []
        if prompts:
            await self.fleet.sample(prompts, answers.extend)
        judged = await asyncio.gather(*(self.reward(prompt, [answer]) for answer in answers))
        for answer, (reward,) in sorted(zip(answers, judged, strict=True), key=lambda pair: pair[0].group):
            wrong, sibling = asked[answer.group]
            if isinstance(reward, str):
                self.ledger.revised(prompt.group, wrong.index, sibling.index, reward)
                continue
            right = reward >= self.run.reward.correct
            self.ledger.revised(prompt.group, wrong.index, sibling.index, "repaired" if right else "still wrong")
            revisions = self._revisions.setdefault((prompt.group, wrong.index), [])
            revisions.append(Revision(answer.tokens[answer.mask], right))
