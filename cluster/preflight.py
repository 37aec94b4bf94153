"""Everything that can be wrong with a run's input, found before any actor starts."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

import credit
from actors import environment, reward
from actors.demo import demo_base
from actors.negatives import render_negative
from actors.rows import Row
from actors.tasks import AnyTask, check_prompts, first_rows, make_prompt, make_task, render
from cluster.loop import sampling_seed
from configs.schema import ArithmeticData, ConfigError, CreditConfig, GlyphsData, RunConfig
from credit.trajectory import Prompt
from learner.lora import check_targets
from learner.loss import LOSSES

CHECKED_NEGATIVES = 1000
"""Negative prompts rendered before anything starts: a bad template fails on the first, an odd row soon after."""
Progress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a run works on, checked."""

    model: str  # a local folder or hub id
    tokenizer: PreTrainedTokenizerBase
    task: AnyTask
    notes: list[str]  # what a user should know before the start
    policy: str = ""  # of a sweep: the run, among those that share the actors

    def prompt(self, run: RunConfig, row: Row, group: int, count: int) -> Prompt:
        """`count` completions of the row, with the group's own sampling seeds."""
        seeds = [sampling_seed(run.seed, group, index) for index in range(count)]
        prompt = make_prompt(row, group, render(row, self.tokenizer, run.data), seeds)
        return replace(prompt, policy=self.policy)


def inputs(run: RunConfig, progress: Progress) -> Inputs:
    """Check the whole input of a run and make the demo's base model where it is asked for. Raises ConfigError."""
    try:
        return _inputs(run, progress)
    except ConfigError:
        raise
    except (ValueError, OSError) as error:
        raise ConfigError(" ".join(str(error).split())) from error


def _inputs(run: RunConfig, progress: Progress) -> Inputs:
    if run.learner.loss.name not in LOSSES:
        raise ConfigError(f"learner.loss.name: got {run.learner.loss.name!r}, expected one of: {', '.join(LOSSES)}")
    _check_credit(run.credit)
    task = make_task(run.data, run.seed)
    columns = list(task.row(0).columns)
    if run.environment:
        asyncio.run(environment.check(run.environment, columns))
    else:
        asyncio.run(reward.check(run.reward, columns))
    model = run.model.path
    if model == "demo":
        data = run.data if isinstance(run.data, ArithmeticData | GlyphsData) else ArithmeticData(task="arithmetic")
        model = str(demo_base(Path(run.out) / ".models", data, 0, progress))
    elif not Path(model).is_dir() and (model.startswith((".", "/", "~")) or model.count("/") != 1):
        raise ConfigError(f"model.path: {model!r} is neither a folder nor a hub id (owner/name), nor 'demo'")
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=run.model.trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=run.model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {model!r} cannot be loaded: {' '.join(str(error).split())[:300]}") from error
    context = getattr(config, "max_position_embeddings", run.model.max_length)
    if run.model.max_length > context:
        raise ConfigError(
            f"model.max_length: got {run.model.max_length}, expected at most {context}: the model's context"
        )
    check_targets(model, run.lora.targets)
    notes = check_prompts(task, tokenizer, run.data, run.model.max_length - run.rollout.max_new_tokens)
    if run.credit.negative is not None:
        for row in first_rows(task, CHECKED_NEGATIVES):
            render_negative(row, tokenizer, run.data, run.credit.negative)
    return Inputs(model=model, tokenizer=tokenizer, task=task, notes=notes)


def _check_credit(chosen: CreditConfig) -> None:
    unknown = set(chosen.record) - set(credit.SIGNALS)
    if unknown:
        raise ConfigError(f"credit.record: got {sorted(unknown)}, expected some of: {', '.join(credit.SIGNALS)}")
    credit.check(
        chosen.method,
        chosen.advantage,
        sharpening=chosen.sharpening,
        quadrant=chosen.quadrant,
        options=chosen.options,
        advantage_options=chosen.advantage_options,
        negative=chosen.negative,
    )
