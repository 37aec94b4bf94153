"""Several runs in one pool, over actors that are plain objects; and the table of results, by hand."""

import asyncio
import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster import sweep_table
from cluster.cli import main
from cluster.fleet import Fleet, Scorers
from configs.schema import ArithmeticData, LoraConfig, RunConfig
from configs.sweep import Entry
from credit.adapter import Adapter
from credit.trajectory import Prompt, Signals
from tests.cluster.world import (
    BASE,
    Actor,
    Dead,
    G,
    World,
    adapter,
    answers,
    config,
    dies,
    prompts,
    raises,
    run,
    sample_of,
    until,
)


async def publish(pool: Any, *adapters: Adapter) -> None:
    await asyncio.gather(*(pool.publish(one) for one in adapters))


def test_a_prompt_is_sampled_under_the_newest_version_of_its_own_policy(world: World) -> None:
    async def main() -> None:
        fleet = Fleet(config(replicas=2), world.start, policies=2)
        await fleet.start()
        await publish(fleet, adapter(3, "a"), adapter(1, "b"))
        await fleet.publish(adapter(4, "a"))
        asked = {policy: fleet.sample(prompts(0, 1, 2, policy=policy), world.done) for policy in "ab"}
        await asyncio.gather(*asked.values())
        seen = sorted((s.policy, s.group, s.version) for samples in world.delivered for s in samples[:1])
        assert seen == [("a", g, 4) for g in range(3)] + [("b", g, 1) for g in range(3)]
        await fleet.close()

    run(main())


def test_a_restarted_member_holds_every_policy_before_it_serves(world: World) -> None:
    async def main() -> None:
        world.faults["rollout-0"] = [{"sample": dies}]
        fleet = Fleet(config(replicas=1), world.start, policies=2)
        await fleet.start()
        await publish(fleet, adapter(3, "a"), adapter(1, "b"))
        await fleet.sample(prompts(0, policy="b"), world.done)
        again = world.of("rollout-0")[1]
        assert again.active == {"a": 3, "b": 1}
        order = [method for method, _ in again.asked]
        assert order.index("sample") > max(i for i, method in enumerate(order) if method == "activate")
        assert [len(samples) for samples in world.delivered] == [G]
        await fleet.close()

    run(main())


def test_a_policy_that_no_member_can_hold_is_given_up_and_the_others_go_on(world: World) -> None:
    async def main() -> None:
        wrong = answers(lambda version: BASE - np.float32(9), since=7)  # of version 7, whichever member is asked
        world.faults = {f"rollout-{i}": [{"load": wrong}] * 9 for i in range(2)}
        fleet = Fleet(config(replicas=2), world.start, policies=2)
        await fleet.start()
        await publish(fleet, adapter(1, "well"), adapter(1, "ill"))
        with pytest.raises(RuntimeError, match="v7 of ill: failed on 3 actors, the last because: canary"):
            await fleet.publish(adapter(7, "ill"))
        with pytest.raises(RuntimeError, match="v7 of ill"):
            await fleet.sample(prompts(0, policy="ill"), world.done)
        await fleet.publish(adapter(2, "well"))
        await until(lambda: len(fleet.serving()) == 2)
        await fleet.sample(prompts(0, 1, policy="well"), world.done)
        assert world.groups() == [0, 1] and {s[0].version for s in world.delivered} == {2}
        await fleet.close()

    run(main())


def test_an_adapter_that_is_not_finite_reaches_no_member(world: World) -> None:
    async def main() -> None:
        fleet = Fleet(config(replicas=1), world.start, policies=2)
        await fleet.start()
        await publish(fleet, adapter(1, "well"), adapter(1, "ill"))
        nan = adapter(2, "ill")
        nan.canary.adapted[-1] = np.nan
        with pytest.raises(RuntimeError, match=r"v2 of ill: .* not finite"):
            await fleet.publish(nan)
        assert ("load", 2) not in world.actors[0].asked and fleet.restarts == 0
        await fleet.close()

    run(main())


def test_of_a_single_run_the_members_are_given_up_not_its_policy(world: World) -> None:
    async def main() -> None:
        world.faults = {"rollout-0": [{"load": raises}] * 9}
        fleet = Fleet(config(replicas=1), world.start)
        await fleet.start()
        with pytest.raises(RuntimeError, match="rollout-0 was given up after 3 restarts"):
            await fleet.publish(adapter(1))
        await fleet.close()

    run(main())


def test_what_a_finished_run_held_is_given_up_everywhere(world: World) -> None:
    async def main() -> None:
        fleet = Fleet(config(replicas=2), world.start, policies=2)
        await fleet.start()
        await publish(fleet, adapter(1, "a"), adapter(5, "b"))
        await fleet.forget("a")
        await fleet.forget("never published")
        assert [sorted(actor.held) for actor in world.actors] == [[("b", 5)]] * 2
        world.actors[0].killed = True
        await fleet.sample(prompts(0, 1, policy="b"), world.done)
        await until(lambda: len(fleet.serving()) == 2)
        assert world.of("rollout-0")[1].active == {"b": 5}
        await fleet.close()

    run(main())


def test_a_canary_tells_a_run_from_the_newest_of_the_others(world: World) -> None:
    async def main() -> None:
        # the actor answers for v2 of b as v3 of a would
        world.faults = {"rollout-0": [{"load": answers(lambda version: BASE - np.float32(0.75), since=2)}]}
        fleet = Fleet(config(replicas=1), world.start, policies=2)
        await fleet.start()
        await fleet.publish(adapter(3, "a"))
        await fleet.publish(adapter(2, "b"))
        assert fleet.refusals["Refused"] == 1
        await fleet.close()

    run(main())


def test_shares_of_several_runs_overlap_on_a_replica_in_a_synchronous_sweep(world: World) -> None:
    assert Fleet(config(), world.start).synchronous
    assert not Fleet(config(), world.start, policies=2).synchronous


def test_a_run_is_scored_under_its_own_versions_whatever_the_others_publish(world: World) -> None:
    async def main() -> None:
        scorers = Scorers(config(replicas=1), world.start)
        await scorers.start()
        await publish(scorers, adapter(1, "a"), adapter(8, "b"))
        await scorers.publish(adapter(9, "b"))
        (prompt,) = prompts(0, policy="a")
        (signals,) = await scorers.score([sample_of(prompt, 0, 1)], frozenset({"logp"}))
        assert signals.keys() == {"logp"} and not scorers.refusals
        await scorers.close()

    run(main())


def test_work_that_kills_every_credit_actor_ends_its_own_run_and_no_other(world: World) -> None:
    async def main() -> None:
        async def poison(actor: Actor, version: int) -> None:
            if version == 7:
                raise ValueError("poison")
            for _ in range(50):  # long enough to be under way when the other fails
                await asyncio.sleep(0)
                if actor.killed:
                    raise Dead(actor.name)

        world.faults = {"credit-0": [{"score": poison}] * 9}
        scorers = Scorers(config(replicas=1), world.start)
        await scorers.start()
        await publish(scorers, adapter(1, "well"), adapter(7, "ill"))
        (well,), (ill,) = prompts(0, policy="well"), prompts(0, policy="ill")

        async def score(prompt: Prompt, version: int) -> list[Signals]:
            return await scorers.score([sample_of(prompt, 0, version)], frozenset({"logp"}))

        got = await asyncio.gather(score(well, 1), score(ill, 7), return_exceptions=True)
        assert isinstance(got[0], list)
        assert "group 0 failed on 3 actors, the last because: poison" in str(got[1])
        await scorers.close()

    run(main())


# ---- the table ----


def test_the_interval_of_three_seeds_is_students() -> None:
    # mean 2, standard deviation 1, t(2) = 4.303: 4.303 / sqrt(3)
    got = sweep_table.mean([1.0, 2.0, 3.0])
    assert (got["mean"], got["half"]) == (2.0, pytest.approx(2.484338))
    assert sweep_table.mean([0.5])["half"] is None


def entry(folder: Path, variant: str, rank: int, seed: int, steps: int = 4) -> Entry:
    name = f"{variant}-r{rank}-seed{seed}"
    data = ArithmeticData(task="arithmetic")
    return Entry(variant, RunConfig(name=name, out=str(folder), steps=steps, data=data, lora=LoraConfig(r=rank)))


def write_run(run: RunConfig, greedy: float, rewards: list[float], ginis: list[float]) -> None:
    (run.folder / "evals").mkdir(parents=True)
    interval = {"low": 0.0, "high": 1.0, "prompts": 4}
    figures = {name: {"value": value, **interval} for name, value in
               {"accuracy": greedy / 2, "pass@4": greedy / 4, "greedy": greedy}.items()}  # fmt: skip
    report = {"version": run.steps, "digest": "", "figures": figures, "settings": {}, "prompts": []}
    (run.folder / "evals" / f"v{run.steps:06d}.json").write_text(json.dumps(report))
    lines = [
        {"step": i + 1, "reward/mean": reward, "credit/gini": gini, "credit/effective_token_ratio": 1 - gini}
        for i, (reward, gini) in enumerate(zip(rewards, ginis, strict=True))
    ]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def table(tmp_path: Path) -> list[sweep_table.Result]:
    entries = [entry(tmp_path, "a|b", 4, 0), entry(tmp_path, "a|b", 4, 1), entry(tmp_path, "<c>", 16, 0)]
    write_run(entries[0].run, 0.6, [0.0, 0.2, 0.4, 0.6], [0.9, 0.9, 0.1, 0.3])
    write_run(entries[1].run, 0.8, [0.0, 0.4, 0.6, 1.0], [0.9, 0.9, 0.3, 0.3])
    return sweep_table.results(entries, {"<c>-r16-seed0": "ValueError: no"}, {e.run.name for e in entries[:2]})


def test_the_table_has_means_over_seeds_and_says_what_failed(table: list[sweep_table.Result]) -> None:
    titles, rows = sweep_table.cells(table)
    assert titles == [
        *("method", "rank", "runs", "greedy accuracy", "pass@1", "pass@4"),
        *("mean train reward", "Gini", "effective-token ratio"),
    ]
    # greedy .6, .8: sd .141421, t(1) = 12.706, / sqrt(2): 1.2706; reward .3, .5; gini (.1 + .3) / 2 = .2, and .3
    assert rows[0] == [
        *("a|b", "4", "2/2", "0.700 ± 1.271", "0.350 ± 0.635", "0.175 ± 0.318"),
        *("0.400 ± 1.271", "0.250 ± 0.635", "0.750 ± 0.635"),
    ]
    assert rows[1] == ["<c>", "16", "0/1", *["failed"] * 6]
    assert table[1]["failed"] == {"<c>-r16-seed0": "ValueError: no"}


def test_the_files_escape_names_and_keep_all_digits(table: list[sweep_table.Result], tmp_path: Path) -> None:
    sweep_table.write(tmp_path / "out", "x & y", table)
    out = {path.suffix: path.read_text() for path in (tmp_path / "out").iterdir()}
    assert out.keys() == {".md", ".csv", ".html", ".json"}
    assert out[".md"].splitlines()[2].startswith("| a\\|b | 4 | 2/2 | 0.700 ± 1.271 |")
    assert "<td>&lt;c&gt;</td>" in out[".html"] and "<h1>x &amp; y</h1>" in out[".html"]
    rows = list(csv.DictReader(io.StringIO(out[".csv"])))
    assert float(rows[0]["greedy"]) == pytest.approx(0.7) and float(rows[0]["greedy_half"]) == pytest.approx(1.2706)
    assert rows[1]["greedy"] == ""
    assert json.loads(out[".json"])[0]["figures"]["reward"]["values"] == pytest.approx([0.3, 0.5])


# ---- the command ----


def test_a_sweep_that_cannot_share_its_actors_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = {"steps": 1, "data": {"task": "arithmetic"}}
    variants = {"cold": {}, "hot": {"rollout.temperature": 2}}
    (tmp_path / "sweep.yaml").write_text(json.dumps({"name": "s", "base": base, "variants": variants}))
    monkeypatch.setattr(sys, "argv", ["accredit", "sweep", str(tmp_path / "sweep.yaml"), f"out={tmp_path / 'out'}"])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.count("\n") == 1
    assert "rollout.temperature: got 1.0 in cold-r16-seed0 and 2.0 in hot-r16-seed0" in said
    assert not (tmp_path / "out").exists()
