"""Episodes: a policy and an environment take turns, and what they say becomes one sequence of tokens.

    prompt + opening ──ask──▶ completion ──step──▶ observation ──▶ append, ask again ... until done, or a limit

Token ids are only ever appended: what is trained is what was sampled. The mask is True on the policy's tokens alone.

The last bits of a log-prob depend on what else is in the engine's batch, and an environment answers when it likes. A
synchronous run promises bits: there all episodes of a set take their turns in step. Otherwise each goes on by itself.
"""

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from actors.environment import Environment, EnvironmentPool
from configs.schema import DatasetData, MixtureData, RunConfig
from credit.trajectory import Prompt, Sample, Turn

BEFORE = [{"role": "user", "content": "-"}, {"role": "assistant", "content": "\u0001"}]
"""What chat messages of an environment follow; the mark is where the sampled completion stands."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One turn to be sampled. Its answer is the completion of `prompt`, a Sample of one turn."""

    prompt: Prompt  # all tokens so far, one seed
    max_tokens: int | None = None  # None: rollout.max_new_tokens


Answers = Callable[[list[Ask]], Awaitable[list[Sample]]]
"""Samples all turns that are asked for, under the version of the episodes; they enter the engine together."""


class Episode:
    """One trajectory in the making."""

    def __init__(self, prompt: Prompt, index: int, limit: int) -> None:
        self.prompt, self.index = prompt, index
        self._limit = limit  # tokens in all
        self._tokens = list(prompt.tokens)
        self._mask = [False] * len(prompt.tokens)
        self._logprobs = [0.0] * len(prompt.tokens)
        self._turns: list[Turn] = []
        self._finish = "length"
        self._failure: str | None = None
        self.over = False

    def ask(self) -> Ask:
        seed = turn_seed(self.prompt.seeds[self.index], len(self._turns))
        prompt = Prompt(group=self.prompt.group, tokens=self._tokens, seeds=[seed], prompt="", columns={})
        return Ask(prompt, self._limit - len(self._tokens))

    def observe(self, tokens: list[int]) -> bool:
        """Append what the environment said. False, and nothing appended, where no room is left for another turn."""
        if len(self._tokens) + len(tokens) >= self._limit:
            return False
        self._tokens = [*self._tokens, *tokens]  # anew: the engine may still hold the one before
        self._mask += [False] * len(tokens)
        self._logprobs += [0.0] * len(tokens)
        return True

    def answered(self, sample: Sample) -> None:
        """Append a completion."""
        start = len(self._tokens)
        assert sample.tokens[:start].tolist() == self._tokens
        self._tokens = sample.tokens.tolist()
        self._mask += [True] * (len(self._tokens) - start)
        self._logprobs += sample.logprobs[start:].tolist()

    def judged(self, sample: Sample, reward: float, done: bool, max_turns: int) -> None:
        self._turns.append(Turn(len(self._tokens) - 1, reward))
        self.over = done or sample.finish == "length" or len(self._turns) == max_turns
        if done and sample.finish == "stop":
            self._finish = "stop"

    def end(self, failure: str | None = None) -> None:
        self.over, self._failure = True, failure

    def sample(self, tokenizer: Any, version: int, digest: str) -> Sample:
        return Sample(
            group=self.prompt.group,
            index=self.index,
            tokens=np.array(self._tokens, np.int64),
            mask=np.array(self._mask),
            logprobs=np.array(self._logprobs, np.float32),
            text=tokenizer.decode(self._tokens[len(self.prompt.tokens) :], skip_special_tokens=True),
            finish=self._finish,
            version=version,
            digest=digest,
            policy=self.prompt.policy,
            turns=tuple(self._turns),
            failure=self._failure,
        )


class Episodes:
    """Plays the episodes of prompts with the environments of one pool. Belongs to one event loop."""

    def __init__(self, run: RunConfig, model_path: str) -> None:
        assert run.environment is not None
        self._run, self._max_turns, self._workers = run, run.environment.max_turns, run.environment.workers
        self._tokenizer: Any = AutoTokenizer.from_pretrained(
            model_path, trust_remote_code=run.model.trust_remote_code
        )  # its own: the engine's thread uses the engine's
        self._pool = EnvironmentPool(run.environment)

    async def play(
        self, prompts: list[Prompt], answers: Answers, version: int, digest: str
    ) -> AsyncGenerator[list[Sample]]:
        """Yield the G samples of each prompt when all of its episodes are over. Leaving the generator ends the rest."""
        episodes = [
            Episode(
                prompt, index, min(len(prompt.tokens) + self._run.rollout.max_new_tokens, self._run.model.max_length)
            )
            for prompt in prompts
            for index in range(len(prompt.seeds))
        ]
        size = self._workers if self._run.max_staleness == 0 else 1
        sets = [episodes[i : i + size] for i in range(0, len(episodes), size)]
        tasks = [asyncio.create_task(self._play(chosen, answers)) for chosen in sets]
        groups: defaultdict[int, list[Sample]] = defaultdict(list)
        try:
            for task in asyncio.as_completed(tasks):
                for episode in await task:
                    group = groups[episode.prompt.group]
                    group.append(episode.sample(self._tokenizer, version, digest))
                    if len(group) == len(episode.prompt.seeds):
                        yield sorted(group, key=lambda sample: sample.index)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _play(self, episodes: list[Episode], answers: Answers) -> list[Episode]:
        """Their turns in step: the next ones are asked for when every environment has answered."""
        async with self._pool.lend(len(episodes)) as environments:
            playing = list(zip(episodes, environments, strict=True))
            await asyncio.gather(*(self._open(episode, environment) for episode, environment in playing))
            while playing := [pair for pair in playing if not pair[0].over]:
                samples = await answers([episode.ask() for episode, _ in playing])
                turns = zip(playing, samples, strict=True)
                await asyncio.gather(*(self._turn(*pair, sample) for pair, sample in turns))
        return episodes

    async def _open(self, episode: Episode, environment: Environment) -> None:
        reply = await environment.reset(episode.prompt.columns)
        if isinstance(reply, str):
            episode.end(failure=reply)
        elif not episode.observe(self._encode(episode.prompt, reply["observation"], ended=False)):
            episode.end(failure="does not apply: the opening observation leaves no token for a completion")

    async def _turn(self, episode: Episode, environment: Environment, sample: Sample) -> None:
        episode.answered(sample)
        reply = await environment.step(sample.text)
        if isinstance(reply, str):
            episode.end(failure=reply)
            return
        episode.judged(sample, reply["reward"], reply["done"], self._max_turns)
        ended = int(sample.tokens[-1]) == self._tokenizer.eos_token_id
        if not episode.over and not episode.observe(self._encode(episode.prompt, reply["observation"], ended)):
            episode.end()

    def _encode(self, prompt: Prompt, observation: str | list[dict[str, Any]], ended: bool) -> list[int]:
        """Text as it stands; chat messages as the chat template writes them after an assistant's message.

        `ended`: the completion has the end-of-turn token already.
        """
        if isinstance(observation, str):
            return self._tokenizer(observation, add_special_tokens=False)["input_ids"]
        data = self._run.data
        part = data.named[prompt.columns["part"]].data if isinstance(data, MixtureData) else data
        options = part.chat_kwargs if isinstance(part, DatasetData) else {}
        options = {**options, **(prompt.columns.get("chat_template_kwargs") or {})}
        text = self._tokenizer.apply_chat_template(
            [*BEFORE, *observation], tokenize=False, add_generation_prompt=True, **options
        )
        after = text.partition(BEFORE[-1]["content"])[2]
        if ended:
            after = after.removeprefix(self._tokenizer.eos_token)
        return self._tokenizer(after, add_special_tokens=False)["input_ids"]

    def close(self) -> None:
        self._pool.kill()


def turn_seed(seed: int, turn: int) -> int:
    """Of the first turn the completion's own seed, of later ones derived from it. 32 bits."""
    if turn == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{turn}".encode(), digest_size=4).digest(), "big")
