"""What the user sees: a live panel on a terminal, plain lines elsewhere."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from cluster import evaluation
from cluster.estimators import Estimate
from configs.schema import RunConfig

WINDOW = 10  # steps of the moving mean
BLOCKS = "▁▂▃▄▅▆▇█"


class View:
    """`plain` prints one line for each event; it is chosen by itself where the output is not a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self._rewards: deque[float] = deque(maxlen=200)
        self._last: dict[str, float] = {}
        self._progress: Progress | None = None
        self._bar: TaskID | None = None
        self._live: Live | None = None
        self._title = ""

    def note(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """A spinner with the seconds, or a line before and after."""
        began = time.monotonic()
        if self.console.is_terminal:
            columns = (TextColumn("[cyan]{task.description}"), TimeElapsedColumn())
            with Progress(*columns, console=self.console, transient=True) as progress:
                progress.add_task(what)
                yield
        else:
            yield
        self.note(f"[dim]{what}: {time.monotonic() - began:.1f} s[/dim]")

    @contextmanager
    def making(self, what: str) -> Iterator[Any]:
        """Gives `progress(fraction, text)`; shows nothing when it is never called."""
        with Progress(
            TextColumn("[cyan]{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %  {task.fields[detail]}"),
            TimeElapsedColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        ) as progress:
            tasks: list[TaskID] = []
            told = -1

            def update(fraction: float, detail: str) -> None:
                nonlocal told
                if not tasks:
                    tasks.append(progress.add_task(what, total=1.0, detail=detail))
                progress.update(tasks[0], completed=fraction, detail=detail)
                if not self.console.is_terminal and int(fraction * 4) > told:
                    told = int(fraction * 4)
                    self.note(f"{what}: {fraction:.0%} {detail}")

            yield update

    @contextmanager
    def training(self, run: RunConfig, step: int, accuracy: Estimate) -> Iterator[None]:
        """The live panel of a run that goes on after `step`; `accuracy` is the held-out accuracy before."""
        self._title = (
            f"{run.name}  ·  {run.credit.method} credit, p = {run.credit.sharpening:g}  ·  "
            f"held-out {accuracy.value:.3f} before"
        )
        if not self.console.is_terminal:
            self.note(self._title)
            yield
            return
        self._progress = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(None), TimeElapsedColumn(), TimeRemainingColumn()
        )
        self._bar = self._progress.add_task("", total=run.steps, completed=step)
        with Live(self._panel(), console=self.console, refresh_per_second=4) as self._live:
            yield
        self._live = None

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self._rewards.append(metrics["reward/mean"])
        self._last = metrics
        if self._live and self._progress and self._bar is not None:
            self._progress.update(self._bar, completed=step)
            self._live.update(self._panel())
        elif not self.console.is_terminal:
            self.note(
                f"step {step:4d}  reward {metrics['reward/mean']:.3f} (mean {self._moving():.3f})  "
                f"tokens/s {self._rate():5.0f}  gini {metrics['credit/gini']:.3f}  "
                f"effective {metrics['credit/effective_token_ratio']:.3f}  "
                f"kl {metrics.get('policy/kl_base', float('nan')):.4f}  stale {metrics['staleness/mean']:.1f}  "
                f"{metrics['time/step_s']:.2f} s"
            )

    def _moving(self) -> float:
        window = list(self._rewards)[-WINDOW:]
        return sum(window) / len(window)

    def _rate(self) -> float:
        return self._last["rollout/tokens"] / max(1e-9, self._last["time/step_s"])

    def _panel(self) -> RenderableType:
        assert self._progress is not None
        if not self._last:
            return Panel(Group(self._progress, Text("first step under way", style="dim")), title=self._title)
        m = self._last
        table = Table.grid(padding=(0, 3), expand=True)
        for _ in range(3):
            table.add_column(ratio=1)
        cells = [
            ("reward", f"{m['reward/mean']:.3f}", f"mean {self._moving():.3f}"),
            ("accuracy", f"{m['reward/accuracy']:.3f}", f"{m['groups/no_signal']:.0%} of groups without signal"),
            ("tokens/s", f"{self._rate():,.0f}", f"length {m['rollout/length_mean']:.1f}"),
            ("gini", f"{m['credit/gini']:.3f}", "of the credit"),
            ("effective tokens", f"{m['credit/effective_token_ratio']:.3f}", "1 = uniform"),
            ("KL to base", f"{m.get('policy/kl_base', float('nan')):.4f}", f"entropy {m['policy/entropy']:.3f}"),
            ("staleness", f"{m['staleness/mean']:.1f}", f"max {m['staleness/max']:.0f}"),
            ("dropped", f"{m['groups/dropped']:.0f}", f"{m['samples/failed']:.0f} failed samples"),
            ("gradient", f"{m['learner/grad_norm']:.3f}", f"ratio {m['learner/ratio_mean']:.4f}"),
        ]
        rendered = [
            Text.assemble((f"{name}  ", "cyan"), (value, "bold"), (f"  {detail}", "dim"))
            for name, value, detail in cells
        ]
        for i in range(0, len(rendered), 3):
            table.add_row(*rendered[i : i + 3])
        seconds = [
            ("sample", m["time/sample_s"]),
            ("credit", m["time/credit_s"]),
            ("learn", m["time/learn_s"]),
            ("swap", m["time/publish_s"]),
            ("step", m["time/step_s"]),
        ]
        timing = Text("seconds  ", style="cyan")
        for name, value in seconds:
            timing.append(f"{name} ", style="dim").append(f"{value:.2f}   ", style="bold")
        curve = Text.assemble(("reward   ", "cyan"), (self._sparkline(), "green"))
        return Panel(Group(self._progress, table, timing, curve), title=self._title, border_style="blue")

    def _sparkline(self) -> str:
        width = max(10, self.console.width - 16)
        values = list(self._rewards)[-width:]
        low, high = min(0.0, *values), max(1.0, *values)
        return "".join(BLOCKS[min(7, int(8 * (v - low) / (high - low)))] for v in values)

    def summary(self, run: RunConfig, result: dict[str, Any], seconds: float) -> None:
        """The end of a run: accuracy before and after, where the adapter lies and how to load it."""
        table = Table.grid(padding=(0, 2))
        before, after = result["before"], result["after"]
        gains = evaluation.compare(after, before) if evaluation.same_rows(after, before) else {}
        kinds = {"accuracy": f"held-out accuracy, {after['samples']} samples", "greedy": "held-out accuracy, greedy"}
        for name in (name for name in kinds if name in before["figures"] and name in after["figures"]):
            old, new = (escape(f"{evaluation.figure(report, name)}") for report in (before, after))
            change = f"  [dim]change {escape(f'{gains[name]:+}')}[/dim]" if name in gains else ""
            table.add_row(f"[cyan]{kinds[name]}", f"{old} -> [bold green]{new}[/bold green]{change}")
        table.add_row("[cyan]adapter", f"{result['adapter']}  [dim]adapters/best is {result['best']}[/dim]")
        table.add_row(
            "[cyan]metrics", f"{run.folder}/metrics.jsonl   [dim]tensorboard --logdir {run.folder}/tensorboard[/dim]"
        )
        if result["dropped"]:
            reasons = ", ".join(f"{count} because {reason}" for reason, count in result["dropped"].items())
            table.add_row("[cyan]dropped groups", escape(reasons))
        table.add_row("[cyan]ledger", f"accredit audit {run.folder}")
        table.add_row("[cyan]time", f"{seconds:.0f} s")
        self.console.print(Panel(table, title=f"{run.name}: {run.steps} steps", border_style="green", expand=False))
        self.console.print("Load it with", highlight=False)
        self.console.print(
            f'  model = AutoModelForCausalLM.from_pretrained("{result["model"]}")\n'
            f'  model = PeftModel.from_pretrained(model, "{result["adapter"]}")',
            style="bold",
            highlight=False,
            soft_wrap=True,
        )
