"""A sweep: several runs as one job. They share the rollout replicas and the credit actors, all else is each run's own.

    run 1: loop, ledger, learner ─┐
    run 2: loop, ledger, learner ─┼─▶ rollout replicas, credit actors: every run's adapters over one base model
    ...                          ─┘

A run is a policy of the shared pools, under its name. One that fails is told and leaves them; the others go on.
"""

import asyncio
import json
import logging
from dataclasses import replace

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster import evaluation, remote, sweep_table
from cluster.fleet import Fleet, Scorers
from cluster.preflight import Inputs, inputs
from cluster.run import Interrupted, Run, actors, check_folder, drive, interruptible, log_to, make_folder
from cluster.sweep_view import SweepView
from cluster.view import View
from configs.schema import RunConfig
from configs.sweep import Entry, SweepConfig, shared

log = logging.getLogger("accredit.sweep")


def finished(run: RunConfig) -> bool:
    """Whether the run has been evaluated after its last step."""
    return evaluation.path_of(run.folder, run.steps).exists()


def main(sweep: SweepConfig, entries: list[Entry], as_json: bool) -> int:
    """Prepare, train what is not finished, write the results. Returns the exit code."""
    console = Console(stderr=as_json)
    view, one = SweepView(entries, console), View(console)
    open_runs = [entry.run for entry in entries if not finished(entry.run)]
    for run in open_runs:
        check_folder(run)
    given: dict[str, Inputs] = {}
    with one.making("demo base model") as progress:
        for run in open_runs:
            given[run.name] = inputs(run, progress)
    for note in dict.fromkeys(note for inputs_of in given.values() for note in inputs_of.notes):
        one.note(note)
    if open_runs:
        with one.waiting("starting Ray"):
            address = remote.connect(shared(sweep, [entry for entry in entries if entry.run in open_runs]))
        if address:
            one.note(f"Ray dashboard: http://{address}")
    for run in open_runs:
        make_folder(run)
    log_to(sweep.folder / "driver.log")
    try:
        failed = asyncio.run(train(sweep, entries, given, view))
    except Interrupted as end:
        console.print(f"accredit: {end.args[0]}; the same command goes on from there", highlight=False)
        return end.args[1]
    except Exception as error:
        log.exception("the sweep ended with an error")
        console.print(f"accredit: {type(error).__name__}: {error}\n  details: {sweep.folder}/driver.log", markup=False)
        return 1
    table = sweep_table.results(entries, failed, {entry.run.name for entry in entries if finished(entry.run)})
    sweep_table.write(sweep.folder, sweep.name, table)
    _show(console, sweep, table, failed)
    if as_json:
        print(json.dumps({"results": table, "failed": failed}, indent=1))
    return 1 if failed else 0


def _show(console: Console, sweep: SweepConfig, table: list[sweep_table.Result], failed: dict[str, str]) -> None:
    titles, rows = sweep_table.cells(table)
    if console.is_terminal:
        shown = Table(*titles, title=f"{sweep.name}: means over seeds, ± half of the 95 % interval")
        for row in rows:
            shown.add_row(*(escape(cell) for cell in row))
        console.print(shown)
    else:
        console.print(sweep_table.markdown(titles, rows), highlight=False, markup=False, soft_wrap=True)
    for name, reason in failed.items():
        console.print(f"{name}: {reason}", style="red", markup=False, soft_wrap=True)
    console.print(f"{sweep.folder}/results.md, .csv, .html, .json", highlight=False)


async def train(sweep: SweepConfig, entries: list[Entry], given: dict[str, Inputs], view: SweepView) -> dict[str, str]:
    """Train the runs that are not finished, `at_once` at a time. Returns what ended those that failed, by name.

    SIGINT and SIGTERM end all of them after the steps that they have committed, and raise Interrupted.
    """
    runs = [entry.run for entry in entries if not finished(entry.run)]
    for entry in entries:
        if finished(entry.run):
            view.tell(entry.run.name, "finished")
    if not runs:
        return {}
    settings = shared(sweep, [entry for entry in entries if entry.run in runs])
    pools = actors(settings, given[runs[0].name].model, policies=len(runs))
    failed: dict[str, str] = {}
    try:
        with interruptible(lambda: "each run keeps the steps that it has committed"), view.live():
            await asyncio.gather(*(pool.start() for pool in pools))
            places, starting = asyncio.Semaphore(settings.at_once), asyncio.Lock()
            async with asyncio.TaskGroup() as tasks:
                for run in runs:
                    one = _one(run, given[run.name], view, pools, places, starting, failed)
                    tasks.create_task(one, name=run.name)
    finally:
        await asyncio.gather(*(pool.close() for pool in pools))
    return failed


async def _one(
    run: RunConfig,
    given: Inputs,
    view: SweepView,
    pools: tuple[Fleet, Scorers],
    places: asyncio.Semaphore,
    starting: asyncio.Lock,
    failed: dict[str, str],
) -> None:
    async with places:
        try:
            job = SweepRun(run, replace(given, policy=run.name), view.of(run.name), pools, starting)
            try:
                await drive(job)
            finally:
                failures = await job.close()
            if failures:
                raise failures[0]
            view.tell(run.name, "finished")
        except Exception as error:
            log.exception("%s ended with an error", run.name)
            failed[run.name] = f"{type(error).__name__}: {' '.join(str(error).split())}"
            view.tell(run.name, "failed", failed[run.name])


class SweepRun(Run):
    """Learners start one after another: all at once they would only compete, for memory too."""

    def __init__(
        self, run: RunConfig, given: Inputs, view: View, pools: tuple[Fleet, Scorers], starting: asyncio.Lock
    ) -> None:
        super().__init__(run, given, view, pools)
        self._starting = starting

    async def start(self) -> int:
        async with self._starting:
            return await super().start()
