from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from configs.schema import ConfigError, RunConfig, load

CONFIGS = Path(__file__).parents[2] / "configs"
DEMO = CONFIGS / "demo.yaml"


RUNS = sorted(path for path in CONFIGS.glob("*.yaml") if not path.stem.startswith("sweep-"))


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_every_configuration_that_ships_loads_and_says_what_it_is(path: Path):
    run = load(path)
    assert run.name == path.stem
    comment = path.read_text().splitlines()[0]
    assert comment.startswith("# ")
    assert "GPU" in comment


def test_the_demo_is_the_arithmetic_that_fits_two_cores():
    run = load(DEMO)
    assert (run.model.path, run.data.task, run.rollout.replicas) == ("demo", "arithmetic", 2)
    assert run.rollout.gpus == run.credit.gpus == run.learner.gpus == 0
    assert run.folder == Path("runs/demo")


def test_the_arca_configuration_has_the_settings_of_the_paper():
    run = load(CONFIGS / "math-qwen3-1.7b-arca.yaml")
    assert (run.lora.r, run.lora.alpha, run.learner.lr, run.steps) == (64, 128, 5e-6, 100)
    assert run.rollout.prompts_per_step * run.rollout.group_size == 32
    assert (run.credit.method, run.credit.sharpening, run.credit.advantage) == ("arca", 2, "grpo")
    assert (run.learner.loss.name, run.learner.loss.aggregation, run.learner.loss.mismatch) == (
        "policy_gradient",
        "sequence",
        "off",
    )


def test_overrides_are_yaml_values_and_reach_every_depth():
    run = load(DEMO, ["steps=3", "credit.method=arca", "learner.loss.clip_high=0.3", 'rollout.stop=["\\n"]', "seed=7"])
    assert (run.steps, run.credit.method, run.learner.loss.clip_high, run.seed) == (3, "arca", 0.3, 7)
    assert load(DEMO, ["learner.lr=1e-4"]).learner.lr == 1e-4  # text to YAML
    assert run.rollout.stop == ["\n"]


def test_an_override_of_the_task_replaces_the_kind_of_data():
    run = load(DEMO, ["data={task: dataset, path: my.jsonl}"])
    assert run.data.task == "dataset"
    assert run.data.path == "my.jsonl"


def test_a_configuration_survives_being_written_and_read(tmp_path: Path):
    run = load(CONFIGS / "gsm8k.yaml")
    copy = tmp_path / "config.yaml"
    copy.write_text(yaml.safe_dump(run.model_dump(mode="json")))
    assert load(copy) == run


def test_a_configuration_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        load(DEMO).steps = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_stale_versions_need_slots_of_their_own():
    assert load(DEMO).adapter_slots == 2
    assert load(DEMO, ["max_staleness=3"]).adapter_slots == 5


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps=0", "steps: got 0, expected: Input should be greater than 0"),
        ("steps=many", "steps: got 'many', expected: Input should be a valid integer"),
        ("credit.sharpening=-1", "credit.sharpening: got -1, expected: Input should be greater than 0"),
        ("model.dtype=float16", "model.dtype: got 'float16', expected: Input should be 'float32' or 'bfloat16'"),
        ("data.digits=10", "data.digits: got 10, expected: Input should be less than or equal to 9"),
        ("data.task=poetry", "data: got "),
        ("stpes=3", "stpes: unknown key, expected one of: credit, data, "),
        ("learner.loss.clip=3", "learner.loss.clip: unknown key, expected one of: aggregation, clip_high, clip_low, "),
        ("data.digit=3", "data.digit: unknown key"),
        ("name=null", "name: got None, expected: Input should be a valid string"),
        (
            "rollout.group_size=1",
            "rollout.group_size: credit.advantage='grpo' compares completions of one prompt, got 1, "
            "expected at least 2: a group of one has no baseline",
        ),
        ("rollout.min_replicas=3", "rollout.min_replicas: got 3, expected at most rollout.replicas=2"),
        (
            "model.max_length=32",
            "rollout.max_new_tokens: got 32, expected less than model.max_length=32: no room is left for a prompt",
        ),
    ],
)
def test_a_wrong_value_is_refused_in_one_line_with_its_field(override: str, message: str):
    with pytest.raises(ConfigError) as refusal:
        load(DEMO, [override])
    assert str(refusal.value).startswith(f"{DEMO}: {message}")
    assert "\n" not in str(refusal.value)


def test_every_problem_is_reported_on_a_line_of_its_own():
    with pytest.raises(ConfigError) as refusal:
        load(DEMO, ["steps=0", "seed=-1"])
    assert len(str(refusal.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "override 'steps': expected key=value, as in credit.method=arca"),
        ("=3", "override '=3': expected key=value, as in credit.method=arca"),
        ("steps.x=3", "override 'steps.x=3': 'steps' is a value, not a section"),
    ],
)
def test_an_override_that_is_none_is_refused(override: str, message: str):
    with pytest.raises(ConfigError) as refusal:
        load(DEMO, [override])
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "got list, expected a mapping of settings"),
        ("", "got NoneType, expected a mapping of settings"),
        ("a: [1\n", "not valid YAML: "),
        ("name: x\nsteps: 1\n", "data: missing, it has no default"),
        ("name: x\nsteps: 1\ndata: {task: dataset}\n", "data.path: missing, it has no default"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str, message: str):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        load(path)
    assert str(refusal.value).startswith(f"{path}: {message}")


def test_a_file_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot be read: No such file or directory"):
        load("absent.yaml")


def test_every_default_passes_its_own_check():
    RunConfig.model_validate({"name": "x", "steps": 1, "data": {"task": "arithmetic"}})
