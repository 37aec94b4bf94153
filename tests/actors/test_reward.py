import asyncio
import datetime
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from actors.reward import RewardPool
from configs.schema import RewardConfig

FAULTS = "tests.actors.faulty_rewards."


def with_pool(function: str, work: Callable[[RewardPool], Awaitable[Any]], workers: int = 1, timeout_s: float = 20):
    """What `work` returns, and that no child outlives the pool."""

    async def run() -> Any:
        pool = RewardPool(RewardConfig(function=FAULTS + function, workers=workers, timeout_s=timeout_s))
        await pool.start()
        pids = pool.pids()
        try:
            return await work(pool)
        finally:
            pids += pool.pids()
            await pool.close()
            assert pool.pids() == []
            assert not [pid for pid in pids if running(pid)]

    return asyncio.run(run())


def running(pid: int) -> bool:
    """A zombie that nobody has waited for yet is not running."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone_within(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not running(pid)


def score(pool: RewardPool, completions: list[str]):
    return pool.score("q", completions, {})


def test_rewards_come_back_in_the_order_of_the_completions():
    assert with_pool("good", lambda pool: score(pool, ["a", "", "ccc"])) == [1.0, 0.0, 3.0]


def test_a_reward_receives_prompts_and_columns_as_lists_and_dates_as_text():
    columns = {"answer": 7, "when": datetime.date(2020, 1, 2)}
    rewards = with_pool("columns_back", lambda pool: pool.score(["q"], ["x", "y"], columns))
    assert rewards == [1.0, 1.0]


@pytest.mark.parametrize(
    ("function", "reason", "kind"),
    [
        ("raises", "raised: ValueError: no way", "raised"),
        ("exits", "raised: SystemExit: 3", "raised"),
        ("no_list", "raised: TypeError: 'NoneType' object is not iterable", "raised"),
        ("takes_all_memory", "raised: MemoryError:", "raised"),
        ("exits_hard", "died: exit code 3", "died"),
        ("too_short", "wrong length: got 1, expected 3", "wrong length"),
    ],
)
def test_a_failed_reward_fails_every_sample_of_its_group_with_the_reason(function: str, reason: str, kind: str):
    async def twice(pool: RewardPool) -> Any:
        return await score(pool, ["a", "b", "c"]), await score(pool, ["a", "b", "c"]), dict(pool.tally.failed)

    first, second, counts = with_pool(function, twice)
    assert first == second == [reason] * 3
    assert counts == {kind: 6}


def test_what_is_not_a_finite_number_fails_its_own_sample_only():
    async def once(pool: RewardPool) -> Any:
        return await score(pool, list("abcdef")), dict(pool.tally.failed)

    rewards, counts = with_pool("no_numbers", once)
    assert rewards[0] == rewards[5] == 1.0
    assert rewards[1:5] == ["does not apply", *(f"not a number: {text}" for text in ("nan", "inf", "'1'"))]
    assert counts == {"does not apply": 1, "not a number": 3}


@pytest.mark.parametrize("function", ["slow_on_request", "holds_the_lock"])
def test_a_reward_that_hangs_is_killed_at_its_deadline_and_its_child_replaced(function: str):
    async def work(pool: RewardPool) -> Any:
        [before], start = pool.pids(), time.monotonic()
        rewards = await score(pool, ["slow", "b"])
        took = time.monotonic() - start
        assert gone_within(before, 1)
        return rewards, took, pool.tally.failed["timeout"]

    rewards, took, counted = with_pool(function, work, timeout_s=0.3)
    assert rewards == ["timeout after 0.3 s"] * 2
    assert 0.3 <= took < 5
    assert counted == 2


def test_the_group_after_a_hung_one_gets_its_own_rewards():
    async def work(pool: RewardPool) -> Any:
        return await asyncio.gather(score(pool, ["slow"]), score(pool, ["22"]), score(pool, ["333"]))

    assert with_pool("slow_on_request", work, timeout_s=0.5) == [["timeout after 0.5 s"], [2.0], [3.0]]


def test_a_cancelled_group_leaves_no_reply_for_the_next_one():
    async def work(pool: RewardPool) -> Any:
        waiting = asyncio.create_task(score(pool, ["slow"]))
        await asyncio.sleep(0.1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return await score(pool, ["22"])

    assert with_pool("slow_on_request", work) == [2.0]


@pytest.mark.parametrize(
    ("function", "rewards", "counts"),
    [("hangs_once", [1.0, 1.0], {}), ("starts_a_child_and_hangs", ["died: signal 9"] * 2, {"died": 2})],
)
def test_a_group_whose_child_is_killed_is_asked_once_more(tmp_path: Path, function: str, rewards: list, counts: dict):
    begun = tmp_path / "begun"

    async def work(pool: RewardPool) -> Any:
        waiting = asyncio.create_task(score(pool, [str(begun), "b"]))
        for _ in range(2 if counts else 1):
            while not begun.exists():
                await asyncio.sleep(0.01)
            os.kill(pool.pids()[0], signal.SIGKILL)
            if counts:
                begun.unlink()
        return await waiting, dict(pool.tally.failed)

    assert with_pool(function, work) == (rewards, counts)


def test_a_child_killed_between_calls_costs_no_sample():
    async def work(pool: RewardPool) -> Any:
        [pid] = pool.pids()
        os.kill(pid, signal.SIGKILL)
        assert gone_within(pid, 5)
        await asyncio.sleep(0.2)
        return await score(pool, ["22"]), pool.tally.failed.total()

    assert with_pool("good", work) == ([2.0], 0)


def test_what_a_reward_started_is_killed_with_it(tmp_path: Path):
    note = tmp_path / "pid"
    rewards = with_pool("starts_a_child_and_hangs", lambda pool: score(pool, [str(note)]), timeout_s=1)
    assert rewards == ["timeout after 1 s"]
    assert gone_within(int(note.read_text()), 5)


def test_prints_cannot_pass_for_rewards(capfd: pytest.CaptureFixture[str]):
    assert with_pool("prints", lambda pool: score(pool, ["a", "b"])) == [1.0, 1.0]
    out, err = capfd.readouterr()
    assert out == ""
    assert "garbage" in err


def test_at_most_the_given_number_of_children_work_and_all_of_them_do():
    async def work(pool: RewardPool) -> Any:
        rewards = await asyncio.gather(*(score(pool, ["a"]) for _ in range(8)))
        return {int(reward) for [reward] in rewards}, set(pool.pids())

    used, pids = with_pool("pid", work, workers=2)
    assert used == pids
    assert len(pids) == 2


def test_groups_are_served_in_the_order_in_which_they_came():
    async def work(pool: RewardPool) -> Any:
        return await asyncio.gather(*(score(pool, ["a"]) for _ in range(8)))

    moments = with_pool("moment", work)
    assert moments == sorted(moments)


def test_children_see_no_secret_and_load_nothing_heavy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET_TOKEN", "s")
    assert with_pool("surroundings", lambda pool: score(pool, ["a", "b", "c"])) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("nowhere.f", "ModuleNotFoundError: No module named 'nowhere'"),
        (FAULTS + "absent", "AttributeError: module 'tests.actors.faulty_rewards' has no attribute 'absent'"),
        (FAULTS + "not_a_function", "TypeError: it is a int, not a function"),
        ("good", "ImportError: expected package.module.function"),
        ("exact", "TypeError: missing a required argument: 'answer'"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_before_anything_runs(path: str, why: str):
    async def start() -> None:
        pool = RewardPool(RewardConfig(function=path, workers=2, timeout_s=1))
        try:
            await pool.start(["question"])
        finally:
            assert pool.pids() == []

    with pytest.raises(ValueError) as refusal:
        asyncio.run(start())
    assert str(refusal.value) == (
        f"reward.function: {path!r} cannot be used: {why}; expected one of exact, gsm8k, math, format, length, "
        f"overlong, code, remote, or the dotted path of f(prompts, completions, **columns) that takes the task's "
        f"columns"
    )


def test_a_child_that_has_grown_is_replaced_after_its_answer():
    async def work(pool: RewardPool) -> Any:
        before = pool.pids()
        small = await score(pool, ["a"])
        same = pool.pids()
        large = await score(pool, ["large"])
        return small, before == same, large, pool.pids(), await score(pool, ["22"]), before == pool.pids()

    assert with_pool("keeps_memory", work) == ([1.0], True, [5.0], [], [2.0], False)


def test_children_see_the_variables_that_are_named_and_no_other(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACCREDIT_SHOWN", "s")
    monkeypatch.setenv("ACCREDIT_HIDDEN", "s")

    async def ask() -> Any:
        pool = RewardPool(RewardConfig(function=FAULTS + "sees", env=["ACCREDIT_SHOWN"]))
        await pool.start()
        try:
            return await score(pool, ["ACCREDIT_SHOWN", "ACCREDIT_HIDDEN"])
        finally:
            await pool.close()

    assert asyncio.run(ask()) == [1.0, 0.0]


def test_what_a_reward_warns_of_at_its_start_is_said_once_for_all_children(caplog: pytest.LogCaptureFixture):
    assert with_pool("Warns", lambda pool: score(pool, ["a"]), workers=2) == [1.0]
    assert [record.message for record in caplog.records] == ["reward: no network is withheld"]


def test_closing_fails_the_groups_under_way_and_refuses_later_ones():
    async def work(pool: RewardPool) -> Any:
        waiting = asyncio.create_task(score(pool, ["slow"]))
        await asyncio.sleep(0.1)
        await pool.close()
        with pytest.raises(RuntimeError, match="closed"):
            await score(pool, ["22"])
        return await waiting

    assert with_pool("slow_on_request", work) == ["died: signal 9"]


def test_children_die_with_a_parent_that_is_killed():
    script = f"""
import asyncio
from actors.reward import RewardPool
from configs.schema import RewardConfig

async def main():
    pool = RewardPool(RewardConfig(function="{FAULTS}holds_the_lock", timeout_s=600))
    await pool.start()
    waiting = asyncio.create_task(pool.score("q", ["a"], {{}}))
    await asyncio.sleep(0.3)
    print(*pool.pids(), flush=True)
    await waiting

asyncio.run(main())
"""
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=root) as parent:
        assert parent.stdout
        pid = int(parent.stdout.readline())
        assert running(pid)
        parent.kill()
    assert gone_within(pid, 5)


def test_a_step_of_128_samples_is_scored_in_well_under_50_ms():
    async def work(pool: RewardPool) -> float:
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            await asyncio.gather(*(score(pool, ["7+8=15,3+4+1=8:85"] * 8) for _ in range(16)))
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    assert with_pool("good", work) < 0.05
