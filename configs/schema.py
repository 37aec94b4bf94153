"""The configuration of a run: frozen pydantic models. Validators only reject, they never rewrite.

`load` reads a YAML file, applies `key=value` overrides and turns every problem into one line that names the field, the
value and what is allowed.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)


class Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


C = TypeVar("C", bound=Config)


class ModelConfig(Config):
    path: str = "demo"
    """A local folder or hub id of a causal LM, or `demo`: a 0.6M-parameter model that the run makes for itself."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the frozen base; LoRA is always float32 in the learner."""
    max_length: PositiveInt = 2048
    """Longest prompt + completion, in tokens."""
    trust_remote_code: bool = False


class LoraConfig(Config):
    r: PositiveInt = 16
    alpha: PositiveFloat = 32
    targets: list[str] | Literal["all-linear"] = "all-linear"
    """Module names as PEFT matches them; `all-linear` is every linear layer but the LM head."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0


class ArithmeticData(Config):
    """Addition with a scratchpad, generated from the run's seed: `37+48?` -> `7+8=15,3+4+1=8:85`."""

    task: Literal["arithmetic"]
    operation: Literal["+", "*"] = "+"
    """Of the questions; products are for a model with a calculator (docs/environments.md)."""
    digits: Annotated[int, Field(ge=1, le=9)] = 2
    heldout: PositiveInt = 256
    """Held-out questions; never among the training questions."""


class GlyphsData(Config):
    """Pictures of 8 x 8 coloured cells, drawn from descriptions: `red square NW, blue ring SE`."""

    task: Literal["glyphs"]
    heldout: PositiveInt = 128
    """Held-out descriptions; never among the training descriptions, in whatever order they name their objects."""


class DatasetData(Config):
    """Rows of files, of a folder or of a hub dataset (docs/tasks.md)."""

    task: Literal["dataset"]
    path: str | list[str]
    """JSONL, JSON, Parquet or CSV: a file, a glob or a list of them; a folder; or a hub id (owner/name)."""
    name: str | None = None
    """Configuration of a hub dataset."""
    split: str = "train"
    revision: str | None = None
    """Branch, tag or commit of a hub dataset."""
    columns: dict[str, str] = {}
    """New name -> column of the dataset. Columns keep their names otherwise."""
    filter: dict[str, Any] = {}
    """Column -> the value, or list of values, that a row must have to be used."""
    prompt: str = "{prompt}"
    """Template over the (renamed) columns."""
    system: str | None = None
    """System message, when the tokenizer has a chat template."""
    chat: bool = True
    """Apply the tokenizer's chat template, where it has one; a `tools` column goes to it."""
    chat_kwargs: dict[str, Any] = {}
    """More arguments of the chat template: {enable_thinking: false}."""
    max_prompt_tokens: PositiveInt | None = None
    """Drop rows with longer prompts, and count them; without it, a prompt that does not fit the model is an error."""
    heldout: PositiveInt = 64
    """Rows for evaluation, off the end of the shuffled training split; the first ones of a stream."""
    heldout_split: str | None = None
    """Take them from this split instead."""
    streaming: bool = False
    """Read rows as they are needed, and shuffle within blocks of `buffer` rows."""
    buffer: PositiveInt = 10_000


class MixturePart(Config):
    weight: PositiveFloat = 1.0
    name: str | None = None
    """What the reward receives as the column `part`; the place in the list, from 0, by default."""
    data: Annotated[ArithmeticData | DatasetData, Field(discriminator="task")]


class MixtureData(Config):
    """Several tasks at once: each draws its share of the groups, and has its own epochs."""

    task: Literal["mixture"]
    parts: Annotated[list[MixturePart], Field(min_length=1)]

    @property
    def named(self) -> dict[str, MixturePart]:
        return {part.name or str(place): part for place, part in enumerate(self.parts)}

    @model_validator(mode="after")
    def _parts_can_be_told_apart(self) -> "MixtureData":
        if len(self.named) < len(self.parts):
            raise ValueError(
                f"data.parts: got the names {', '.join(part.name or str(i) for i, part in enumerate(self.parts))}, "
                f"expected a different one for each part"
            )
        return self


TaskData = ArithmeticData | GlyphsData | DatasetData | MixtureData


class RewardPart(Config):
    """One term of a weighted sum of rewards."""

    function: str
    weight: float = 1.0
    options: dict[str, Any] = {}
    name: str = ""
    """In the metrics: `reward/part/NAME_mean`. Empty: the last part of the function's path."""

    @property
    def label(self) -> str:
        return self.name or self.function.rpartition(".")[2]


class RewardConfig(Config):
    function: str = "exact"
    """A built-in (docs/rewards.md), or the dotted path of `f(prompts, completions, **columns) -> list[float]`."""
    options: dict[str, Any] = {}
    """Keyword arguments of the function."""
    parts: list[RewardPart] = []
    """In place of `function`: rewards that are summed."""
    env: list[str] = []
    """Names of environment variables that the functions may see; they see no others."""
    workers: PositiveInt = 1
    timeout_s: PositiveFloat = 10.0
    """Deadline for one group; a reward that takes longer is killed and its samples fail."""
    correct: float = 1.0
    """A reward of at least this counts as correct."""

    @property
    def weighted(self) -> list[RewardPart]:
        return self.parts or [RewardPart(function=self.function, options=self.options)]

    @model_validator(mode="after")
    def _parts_are_told_apart(self) -> "RewardConfig":
        if self.parts and (self.function != "exact" or self.options):
            raise ValueError("reward.parts: got reward.function or reward.options as well, expected either: drop one")
        names = [part.label for part in self.parts]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ValueError(f"reward.parts: got two called {twice[0]!r}, expected different ones: set their `name`")
        return self


class EnvironmentConfig(Config):
    """Completions become turns of an episode with the user's environment (docs/environments.md)."""

    path: str
    """Dotted path of a class with `reset(**columns)` and `step(completion)`."""
    options: dict[str, Any] = {}
    """Keyword arguments of the class."""
    max_turns: PositiveInt = 8
    timeout_s: PositiveFloat = 10.0
    """Deadline of one call; an environment that takes longer is killed and its sample fails."""
    workers: PositiveInt = 32
    """Episodes at once on each rollout replica; each has a process of its own."""


class RolloutConfig(Config):
    replicas: PositiveInt = 2
    min_replicas: PositiveInt = 1
    prompts_per_step: PositiveInt = 16
    group_size: PositiveInt = 8
    max_new_tokens: PositiveInt = 32
    temperature: Annotated[float, Field(gt=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    stop: list[str] = []
    refill: bool = False
    """Dynamic sampling (2503.14476): drop groups whose rewards are all equal, and sample others in their place."""
    max_num_seqs: PositiveInt = 128
    kv_cache_gb: PositiveFloat = 0.5
    """CPU only."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.8
    """GPU only: vLLM's share of the card."""
    enforce_eager: bool = False
    """GPU only: skip CUDA graphs. On a CPU it is always eager."""
    tensor_parallel: PositiveInt = 1
    timeout_s: PositiveFloat = 600.0
    """Deadline for one group of completions."""
    cpus: NonNegativeFloat = 0.4
    gpus: NonNegativeFloat = 0.0
    """Per replica, as Ray counts them."""


class CreditConfig(Config):
    method: str = "uniform"
    """A name of `credit.METHODS`, or the dotted path of a function of signals (docs/methods.md)."""
    advantage: str = "grpo"
    """A name of `credit.ADVANTAGES`."""
    turns: bool = False
    """With an environment: the advantage of a turn's reward-to-go among the same turns of the group, on its tokens."""
    sharpening: Annotated[float, Field(gt=0)] = 1.0
    permute: bool = False
    """Control: shuffle the weights within each completion (same Gini, no location)."""
    quadrant: Literal["PHR", "PLR", "NHR", "NLR"] | None = None
    """Train only the tokens of one reward x entropy quadrant (2604.11056)."""
    options: dict[str, Any] = {}
    """Options of the method, as its function takes them."""
    advantage_options: dict[str, Any] = {}
    record: list[str] = ["logp_base", "residual"]
    """Signals computed beside those that the method needs, for the diagnostics of every method; [] for speed."""
    residual_layer: int = -1
    residual_norm: Literal["post", "pre"] = "post"
    residual_relative: bool = False
    noise_floor: bool = False
    """Also measure the residual of base against base in another batch shape."""
    negative: str | None = None
    """Negative prompt of contrastive methods: a jinja template over `prompt` and the columns, `empty`, or the dotted
    path of a callable `f(prompt, **columns)`."""
    tokens_per_forward: PositiveInt = 4096
    timeout_s: PositiveFloat = 300.0
    replicas: PositiveInt = 1
    cpus: NonNegativeFloat = 0.4
    gpus: NonNegativeFloat = 0.0


class LossConfig(Config):
    name: str = "ppo_clip"
    """A name of `learner.loss.LOSSES`."""
    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.28
    dual_clip: PositiveFloat | None = None
    variant: Literal["min_replace", "orthogonal"] = "min_replace"
    """Of `dfpo`."""
    aggregation: Literal["token", "sequence", "constant"] = "token"
    mismatch: Literal["off", "token", "sequence"] = "token"
    """Truncated importance correction of the sampler-trainer mismatch."""
    mismatch_cap: PositiveFloat = 2.0
    kl_beta: NonNegativeFloat = 0.0
    entropy_bonus: float = 0.0


class LearnerConfig(Config):
    ranks: PositiveInt = 1
    zero_stage: Literal[0, 1, 2, 3] = 1
    lr: PositiveFloat = 1e-3
    warmup_steps: NonNegativeInt = 0
    schedule: Literal["constant", "linear"] = "constant"
    """After the warm-up; `linear` falls to zero at the end of the run."""
    weight_decay: NonNegativeFloat = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    grad_clip: PositiveFloat = 1.0
    tokens_per_micro_batch: PositiveInt = 8192
    packing: bool = True
    """Pack sequences without padding; off pads each micro-batch."""
    gradient_checkpointing: bool = False
    epochs: PositiveInt = 1
    updates_per_batch: PositiveInt = 1
    loss: LossConfig = LossConfig()
    max_skipped: PositiveInt = 3
    """Batches in a row whose gradient is not finite, and which are skipped, before the run ends with an error."""
    timeout_s: PositiveFloat = 600.0
    cpus: NonNegativeFloat = 0.4
    gpus: NonNegativeFloat = 0.0


class EvalConfig(Config):
    every: NonNegativeInt = 0
    """Steps between evaluations on the held-out set; 0: only before and after."""
    samples: PositiveInt = 1
    """Completions per held-out prompt, sampled as in training."""
    k: list[PositiveInt] = [1]
    """Numbers of completions to estimate pass@k for; pass@1 is the accuracy itself."""
    greedy: bool = True
    """Also one completion per held-out prompt at temperature 0."""

    @model_validator(mode="after")
    def _samples_suffice(self) -> "EvalConfig":
        if too_many := [k for k in self.k if k > self.samples]:
            raise ValueError(
                f"eval.k: got {too_many[0]}, expected at most eval.samples={self.samples}: pass@k needs k completions"
            )
        return self


class RunConfig(Config):
    name: str
    out: str = "runs"
    seed: NonNegativeInt = 0
    steps: PositiveInt
    max_staleness: NonNegativeInt = 0
    """0 is synchronous; K lets rollouts run K versions ahead. A hard bound: older groups are dropped and counted."""
    keep_checkpoints: PositiveInt = 3
    model: ModelConfig = ModelConfig()
    lora: LoraConfig = LoraConfig()
    data: Annotated[TaskData, Field(discriminator="task")]
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig | None = None
    """Where it is set, rewards are the environment's, and the prompt's completion may have several turns."""
    rollout: RolloutConfig = RolloutConfig()
    credit: CreditConfig = CreditConfig()
    learner: LearnerConfig = LearnerConfig()
    eval: EvalConfig = EvalConfig()

    @property
    def folder(self) -> Path:
        return Path(self.out) / self.name

    @property
    def adapter_slots(self) -> int:
        """Adapter versions that an actor may hold at once: K + 1 in flight and one arriving."""
        return self.max_staleness + 2

    def lora_of(self, policy: str) -> LoraConfig:
        """Of the run that owns an adapter; several of a sweep share the actors (configs/sweep.py)."""
        return self.lora

    @model_validator(mode="after")
    def _groups_have_a_baseline(self) -> "RunConfig":
        if self.rollout.group_size < 2:
            raise ValueError(
                f"rollout.group_size: credit.advantage={self.credit.advantage!r} compares completions of one prompt, "
                f"got {self.rollout.group_size}, expected at least 2: a group of one has no baseline"
            )
        return self

    @model_validator(mode="after")
    def _replicas_suffice(self) -> "RunConfig":
        if self.rollout.min_replicas > self.rollout.replicas:
            raise ValueError(
                f"rollout.min_replicas: got {self.rollout.min_replicas}, expected at most "
                f"rollout.replicas={self.rollout.replicas}"
            )
        return self

    @model_validator(mode="after")
    def _rewards_have_one_source(self) -> "RunConfig":
        if self.environment and (self.reward.parts or self.reward.function != "exact"):
            raise ValueError(
                f"environment: its rewards are the run's, got reward.{'parts' if self.reward.parts else 'function'} as "
                f"well, expected either: drop one"
            )
        return self

    @model_validator(mode="after")
    def _turns_have_an_environment(self) -> "RunConfig":
        if self.credit.turns and (self.environment is None or self.credit.method == "ibpo"):
            without = (
                "no environment" if self.environment is None else "credit.method='ibpo', which shapes whole rewards"
            )
            raise ValueError(f"credit.turns: got {without}, expected an environment and another method: switch it off")
        return self

    @model_validator(mode="after")
    def _completions_fit(self) -> "RunConfig":
        if self.rollout.max_new_tokens >= self.model.max_length:
            raise ValueError(
                f"rollout.max_new_tokens: got {self.rollout.max_new_tokens}, expected less than "
                f"model.max_length={self.model.max_length}: no room is left for a prompt"
            )
        return self


class ConfigError(ValueError):
    """A configuration that cannot be run; the text is meant for the user."""


def load(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read `path`, apply `a.b=value` overrides (values are YAML) and validate. Raises ConfigError."""
    tree = read(path)
    for text in overrides or []:
        override(tree, text)
    return validate(RunConfig, tree, str(path))


def read(path: str | Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: got {type(tree).__name__}, expected a mapping of settings")
    return tree


def validate(model: type[C], tree: dict[str, Any], where: str) -> C:
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(model, where, problem) for problem in error.errors())) from None


def override(tree: dict[str, Any], text: str) -> None:
    """Apply `a.b=value`. Raises ConfigError."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise ConfigError(f"override {text!r}: expected key=value, as in credit.method=arca")
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError:
        parsed = value
    put(tree, key, parsed)


def put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set the value at a dotted key. Raises ConfigError."""
    *parents, leaf = key.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"override {f'{key}={value}'!r}: {parent!r} is a value, not a section")
    tree[leaf] = value


def _explain(model: type[BaseModel], path: str, problem: Any) -> str:
    """One line for one pydantic error."""
    # pydantic puts the discriminator's value into the location of a tagged union; users do not write it
    field = ".".join(str(part) for part in problem["loc"] if part not in ("arithmetic", "glyphs", "dataset", "mixture"))
    if problem["type"] == "extra_forbidden":
        section: Any = model
        for part in problem["loc"][:-1]:
            annotation = getattr(section, "model_fields", {}).get(str(part))
            section = annotation.annotation if annotation else section
        known = ", ".join(sorted(getattr(section, "model_fields", {})))
        return f"{path}: {field}: unknown key, expected one of: {known}" if known else f"{path}: {field}: unknown key"
    if problem["type"] == "value_error":
        return f"{path}: {problem['ctx']['error']}"
    if problem["type"] == "missing":
        return f"{path}: {field}: missing, it has no default"
    return f"{path}: {field}: got {problem['input']!r}, expected: {problem['msg']}"
