"""What the user sees of a sweep: one row for each run on a terminal, plain lines elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from cluster.estimators import Estimate
from cluster.view import WINDOW, View
from configs.schema import RunConfig
from configs.sweep import Entry

COLOURS = {"waiting": "dim", "finished": "green", "failed": "red"}


@dataclass(slots=True)
class Row:
    """The last of one run."""

    steps: int
    state: str = "waiting"
    step: int = 0
    rewards: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    def cells(self, name: str) -> list[str]:
        colour = COLOURS.get(self.state, "cyan")
        cells = [escape(name), f"[{colour}]{escape(self.state)}[/{colour}]", f"{self.step}/{self.steps}"]
        if not self.metrics:
            return [*cells, "", "", "", "", ""]
        m, window = self.metrics, self.rewards[-WINDOW:]
        figures = [sum(window) / len(window), m["credit/gini"], m["credit/effective_token_ratio"]]
        return [
            *cells,
            *(f"{figure:.3f}" for figure in figures),
            f"{m.get('policy/kl_base', float('nan')):.4f}",
            f"{m['time/step_s']:.2f}",
        ]


class SweepView:
    def __init__(self, entries: list[Entry], console: Console | None = None) -> None:
        self.console = console or Console()
        self.rows = {entry.run.name: Row(entry.run.steps) for entry in entries}
        self._live: Live | None = None

    @contextmanager
    def live(self) -> Iterator[None]:
        if not self.console.is_terminal:
            yield
            return
        with Live(self._table(), console=self.console, refresh_per_second=4) as self._live:
            yield
        self._live = None

    def of(self, name: str) -> "RunView":
        return RunView(self, name)

    def tell(self, name: str, state: str, detail: str = "") -> None:
        """A run's state; the detail is said once."""
        row = self.rows[name]
        row.state = state
        if state == "finished":
            row.step = row.steps
        if detail or not self.console.is_terminal:
            self.console.print(f"{name}: {state} {detail}".rstrip(), highlight=False, markup=False, soft_wrap=True)
        self.update()

    def update(self) -> None:
        if self._live:
            self._live.update(self._table())

    def _table(self) -> Table:
        window = f"reward, last {WINDOW}"
        table = Table("run", "state", "step", window, "Gini", "effective tokens", "KL to base", "s/step")
        for name, row in self.rows.items():
            table.add_row(*row.cells(name))
        return table


class RunView(View):
    """One run's view: what it shows becomes its row."""

    def __init__(self, sweep: SweepView, name: str) -> None:
        super().__init__(sweep.console)
        self._sweep, self._name = sweep, name

    def note(self, text: str) -> None:
        self._sweep.tell(self._name, text)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        self._sweep.tell(self._name, what)
        yield

    @contextmanager
    def training(self, run: RunConfig, step: int, accuracy: Estimate) -> Iterator[None]:
        self._sweep.rows[self._name].step = step
        self._sweep.tell(self._name, "training")
        yield

    def step(self, step: int, metrics: dict[str, float]) -> None:
        row = self._sweep.rows[self._name]
        row.step, row.metrics = step, metrics
        row.rewards.append(metrics["reward/mean"])
        if not self.console.is_terminal:
            line = f"{self._name}: step {step}/{row.steps}  reward {metrics['reward/mean']:.3f}"
            self.console.print(f"{line}  {metrics['time/step_s']:.2f} s", highlight=False, markup=False, soft_wrap=True)
        self._sweep.update()
