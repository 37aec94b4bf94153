"""A sweep's configuration: which runs it is, and what cannot share actors."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.schema import ConfigError
from configs.sweep import load, shared

CONFIGS = Path(__file__).parents[2] / "configs"
BASE = {
    "steps": 3,
    "max_staleness": 1,
    "data": {"task": "arithmetic"},
    "lora": {"r": 8, "alpha": 24},
    "learner": {"ranks": 2},
}


def write(folder: Path, **changes: Any) -> Path:
    tree = {"name": "grid", "base": BASE, "variants": {"uniform": {}}, **changes}
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


def test_runs_are_variants_by_ranks_by_seeds_and_keep_alpha_over_r(tmp_path: Path) -> None:
    variants = {"uniform": {}, "ARCA, p=2": {"credit.method": "arca", "credit.sharpening": 2}}
    sweep, entries = load(write(tmp_path, variants=variants, ranks=[4, 16], seeds=[0, 7]))
    runs = [entry.run for entry in entries]
    assert [run.name for run in runs] == [
        *("uniform-r4-seed0", "uniform-r4-seed7", "uniform-r16-seed0", "uniform-r16-seed7"),
        *("ARCA__p_2-r4-seed0", "ARCA__p_2-r4-seed7", "ARCA__p_2-r16-seed0", "ARCA__p_2-r16-seed7"),
    ]
    assert [(run.lora.r, run.lora.alpha) for run in runs[1:3]] == [(4, 12), (16, 48)]
    assert (runs[7].credit.method, runs[7].credit.sharpening, runs[7].seed) == ("arca", 2, 7)
    assert {run.folder.parent for run in runs} == {sweep.folder}


def test_a_base_may_be_a_file_beside_it_and_overrides_go_to_the_sweep_or_to_every_run(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(yaml.safe_dump({"name": "x", **BASE}))
    path = write(tmp_path, base="base.yaml", set={"eval.every": 2}, variants={"a": {}, "b": {"credit.permute": True}})
    sweep, entries = load(path, ["seeds=[3]", "out=elsewhere", "steps=9", "learner.lr=0.5"])
    assert sweep.folder == Path("elsewhere/grid")
    assert [(e.run.seed, e.run.steps, e.run.learner.lr, e.run.eval.every) for e in entries] == [(3, 9, 0.5, 2)] * 2


def test_the_actors_have_slots_for_the_runs_at_once_and_the_largest_rank(tmp_path: Path) -> None:
    sweep, entries = load(write(tmp_path, ranks=[4, 16], seeds=[0, 1, 2], at_once=5))
    settings = shared(sweep, entries)
    assert settings.adapter_slots == 5 * (1 + 2)
    assert (settings.lora.r, settings.learner.ranks) == (16, 5 * 2)
    assert settings.lora_of("uniform-r4-seed1").alpha == 12
    assert shared(sweep, entries[:2]).adapter_slots == 2 * 3, "no more than there are runs"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.path", "other"),
        ("model.dtype", "bfloat16"),
        ("model.max_length", 64),
        ("rollout.temperature", 0.5),
        ("rollout.max_new_tokens", 8),
        ("max_staleness", 0),
        ("lora.targets", ["q_proj"]),
        ("credit.residual_layer", 0),
    ],
)
def test_what_the_actors_see_must_be_one_value(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        load(write(tmp_path, variants={"one": {}, "two": {key: value}}))
    assert key in str(refused.value) and repr(value) in str(refused.value) and "\n" not in str(refused.value)


def test_what_only_a_run_sees_may_differ(tmp_path: Path) -> None:
    variants = {"one": {}, "two": {"rollout.group_size": 4, "learner.lr": 1.0, "credit.advantage": "rloo"}}
    assert len(load(write(tmp_path, variants=variants))[1]) == 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"variants": {}}, "variants"),
        ({"variants": {"a": {"credit.method": "arca", "credit.method.x": 1}}}, "method.x=1.*is a value"),
        ({"variants": {"a b": {}, "a,b": {}}}, "two runs called a_b-r8-seed0"),
        ({"variants": {"a": {"no.such": 1}}}, "no: unknown key"),
        ({"grid": 1}, "grid: unknown key"),
        ({"seeds": [1, 1]}, "two runs called uniform-r8-seed1"),
    ],
)
def test_a_wrong_sweep_is_told_in_one_line(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        load(write(tmp_path, **changes))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["sweep-demo", "sweep-arca"])
def test_every_sweep_that_ships_loads_and_says_what_it_is(name: str) -> None:
    path = CONFIGS / f"{name}.yaml"
    sweep, entries = load(path)
    assert sweep.name == name and len(entries) >= 6
    assert "GPU" in path.read_text().split("\nname:")[0]


def test_the_grid_of_the_paper_has_every_rank_method_and_control() -> None:
    _, entries = load(CONFIGS / "sweep-arca.yaml")
    assert len(entries) == 13 * 3 * 5
    assert {entry.run.lora.alpha / entry.run.lora.r for entry in entries} == {2}
    assert {entry.run.model.path for entry in entries} == {"Qwen/Qwen3-1.7B-Base"}
