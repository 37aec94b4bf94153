"""From what was collected to one HTML file that opens without network: template, style, script, Bokeh and the data.

Bokeh (BSD, on PyPI with its JavaScript inside) draws the curves: 0.35 MB compressed, against 1.4 MB for Plotly.
Both it and the data are compressed; the browser unpacks them after the first paint.
"""

import base64
import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from bokeh.embed import json_item
from bokeh.models import BasicTicker, HoverTool, Range1d
from bokeh.plotting import figure
from bokeh.resources import INLINE
from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from cluster.report.data import Collected, Progress, collect
from cluster.report.tokens import KINDS
from credit.eapo import QUADRANTS

Series = tuple[str, str]  # name in metrics.jsonl, name in the legend
CURVES: tuple[tuple[str, str, tuple[Series, ...]], ...] = (
    (
        "Reward and accuracy",
        "",
        (("reward/mean", "reward"), ("reward/accuracy", "accuracy"), ("eval/accuracy", "held-out accuracy")),
    ),
    ("Entropy", "nats", (("policy/entropy", "policy"),)),
    ("KL to the base model", "nats", (("policy/kl_base", "policy to base"),)),
    (
        "Concentration of credit",
        "",
        (("credit/gini", "Gini"), ("credit/effective_token_ratio", "effective-token ratio")),
    ),
    ("Staleness", "versions", (("staleness/mean", "mean"), ("staleness/max", "max"))),
    ("Sampler against learner", "nats", (("mismatch/kl", "KL"),)),
    (
        "Adapter swaps",
        "s",
        (("swap/rollout_s", "rollout actors"), ("swap/credit_s", "credit actors"), ("swap/export_s", "export")),
    ),
    (
        "Stages of a step",
        "s",
        (
            ("time/sample_s", "sample"),
            ("time/reward_s", "reward"),
            ("time/credit_s", "credit"),
            ("time/assign_s", "assign"),
            ("time/learn_s", "learn"),
            ("time/publish_s", "publish"),
        ),
    ),
)
DASHES = ("solid", "dashed", "dotted", "dotdash", "dashdot", "solid")


@dataclass(frozen=True, slots=True)
class Written:
    path: Path
    trajectories: int
    bytes: int
    warnings: list[str]


def write(source: Path, out: Path | None, limit: int, model: str | None, progress: Progress) -> Written:
    """Write the report, by default beside what it is of. ValueError for what cannot be shown."""
    path = out or (source / "report.html" if source.is_dir() else source.with_suffix(".html"))
    if not path.parent.is_dir():
        raise ValueError(f"--out: there is no folder {path.parent} to write in")
    collected = collect(source, limit=limit, model=model, progress=progress)
    html = render(collected)
    path.write_text(html, encoding="utf-8")
    return Written(path, len(collected.arrays["reward"]), len(html.encode()), collected.warnings)


@contextmanager
def bar(console: Console) -> Iterator[Progress]:
    """A bar with the trajectories read, on a terminal."""
    columns = (
        TextColumn("reading"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} trajectories"),
    )
    with RichProgress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as shown:
        task = shown.add_task("reading", total=0)
        yield lambda done, total: shown.update(task, completed=done, total=total)


def render(collected: Collected) -> str:
    """The page. What comes from a run is escaped: by autoescape, or as JSON of which text nodes are made."""
    loader = PackageLoader("cluster.report", "")
    page = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page.policies["json.dumps_kwargs"] = {"sort_keys": False, "allow_nan": False}  # Bokeh refers back, in this order
    sources = Path(__file__).parent
    curves = [_curve(*curve, collected.records) for curve in CURVES]
    charts = [curve for curve in curves if curve]
    directory, blob = _packed(collected.arrays)
    facts = _facts(collected) | {"arrays": directory}
    scripts = "\n".join(INLINE.js_raw[:1]) if charts else ""
    return page.get_template("page.html.j2").render(
        title=collected.title,
        run=collected.run,
        config=yaml.safe_dump(collected.run.model_dump(mode="json"), sort_keys=False) if collected.run else "",
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        tiles=_tiles(collected),
        charts=charts,
        warnings=collected.warnings,
        facts=facts,
        methods=facts["methods"],
        quadrants=QUADRANTS,
        steps=facts["steps"],
        style=(sources / "page.css").read_text(),
        script=(sources / "page.js").read_text(),
        items=[chart["item"] for chart in charts],
        plotting=_text(gzip.compress(scripts.encode(), 9, mtime=0)),
        data=_text(blob),
    )


def _facts(collected: Collected) -> dict[str, Any]:
    """What the script needs beside the arrays."""
    run, steps = collected.run, collected.arrays["step"]
    used = run.credit.method if run else ""
    shuffled = " permuted" if run and run.credit.permute else ""
    labels = {"trained": f"{used}{shuffled}, as trained"}
    return {
        "task": run.data.task if run else "",
        "methods": [
            {"name": name, "label": labels.get(name, name), "recorded": name == "trained"} for name in collected.methods
        ],
        "shaped": used == "ibpo",  # trained on other advantages than those of the rewards
        "correct": run.reward.correct if run else 1.0,
        "kinds": KINDS,
        "quadrants": QUADRANTS,
        "edges": collected.entropy_edges,
        "vocabulary": collected.vocabulary,
        "kindOf": collected.kinds,
        "prompts": collected.prompts,
        "labels": collected.labels,
        "digests": collected.digests,
        "steps": [int(steps.min()), int(steps.max())],
    }


def _tiles(collected: Collected) -> list[dict[str, str]]:
    """The summary's figures: name, value, and what it is compared with."""
    arrays, records = collected.arrays, collected.records
    reward, advantage = arrays["reward"], arrays["advantage"]
    zero = float((advantage == 0).mean())

    def series(name: str) -> list[float]:
        return [record[name] for record in records if name in record]

    tiles = []

    def tile(name: str, value: str, note: str = "") -> None:
        tiles.append({"name": name, "value": value, "note": note})

    if accuracy := series("eval/accuracy"):
        first = f"from {accuracy[0]:.1%} · best {max(accuracy):.1%}" if len(accuracy) > 1 else "one evaluation"
        tile("Held-out accuracy", f"{accuracy[-1]:.1%}", first)
    if rewards := series("reward/mean"):
        tile("Mean reward", f"{np.mean(rewards[-10:]):.3g}", f"last 10 steps · from {rewards[0]:.3g}")
    else:
        tile("Mean reward", f"{reward.mean():.3g}", f"{reward.min():.3g} to {reward.max():.3g}")
    fewer = f" · {collected.total:,} on disk" if collected.total > len(reward) else ""
    tile("Trajectories", f"{len(reward):,}", f"in {len(set(arrays['group'].tolist())):,} groups{fewer}")
    tile("Policy tokens", f"{int(arrays['mask'].sum()):,}", f"{arrays['mask'].sum() / len(reward):.1f} a completion")
    tile("Without signal", f"{zero:.1%}", "trajectories of zero advantage")
    if gini := series("credit/gini"):
        ratio = series("credit/effective_token_ratio")
        tile("Gini of credit", f"{gini[-1]:.2f}", f"effective-token ratio {ratio[-1]:.2f}" if ratio else "")
    if kl := series("policy/kl_base"):
        tile("KL to the base", f"{kl[-1]:.3g}", "nats, last step")
    if collected.ledger:
        states = collected.ledger
        tile(
            "Groups trained",
            f"{states['trained']:,}",
            f"of {states['issued']:,} issued · {states['dropped']:,} dropped",
        )
    return tiles


def _curve(title: str, unit: str, names: tuple[Series, ...], records: list[dict[str, Any]]) -> dict[str, Any] | None:
    """A Bokeh figure as JSON, with the same figures for the legend and for readers who do not see it."""
    lines = []
    for name, label in names:
        points = [(record["step"], record[name]) for record in records if name in record]
        if points:
            lines.append((label, [step for step, _ in points], [value for _, value in points]))
    if not lines:
        return None
    plot = figure(height=170, sizing_mode="stretch_width", toolbar_location=None, tools="", min_border=2)
    for place, ((label, steps, values), dash) in enumerate(zip(lines, DASHES, strict=False)):
        source = {"step": steps, "value": values}
        glyph = plot.line("step", "value", source=source, line_width=1.8, line_dash=dash, name=str(place))
        if len(steps) < 15:
            plot.scatter("step", "value", source=source, size=5, name=str(place))
        plot.add_tools(HoverTool(renderers=[glyph], tooltips=f"{label} @value{{0.0000}} at step @step", mode="vline"))
    if not any(any(values) for _, _, values in lines):
        plot.y_range = Range1d(start=-0.04, end=1)  # zeros, at the bottom
    plot.outline_line_color = plot.background_fill_color = plot.border_fill_color = None
    plot.xgrid.visible = False
    plot.yaxis.ticker = BasicTicker(desired_num_ticks=4)
    for axis in (*plot.xaxis, *plot.yaxis):
        axis.minor_tick_line_color = axis.major_tick_line_color = None
        axis.major_label_text_font_size = "11px"
    plot.yaxis.axis_line_color = None
    return {
        "title": title,
        "unit": unit,
        "item": json_item(plot),
        "lines": [
            {
                "label": label,
                "dash": dash,
                "first": _figure(values[0]),
                "last": _figure(values[-1]),
                "low": _figure(min(values)),
                "high": _figure(max(values)),
            }
            for (label, _, values), dash in zip(lines, DASHES, strict=False)
        ],
    }


def _figure(value: float) -> str:
    return f"{value:.3g}"


def _packed(arrays: dict[str, np.ndarray]) -> tuple[dict[str, list[Any]], bytes]:
    """All arrays one after the other, on multiples of 4 bytes, compressed; name -> type, first byte, length."""
    directory, parts, offset = {}, [], 0
    for name, values in arrays.items():
        data = np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<")).tobytes()
        directory[name] = [values.dtype.name, offset, len(values)]
        parts += [data, bytes(-len(data) % 4)]
        offset += len(data) + -len(data) % 4
    return directory, gzip.compress(b"".join(parts), 6, mtime=0)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
