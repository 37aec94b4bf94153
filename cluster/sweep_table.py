"""The results of a sweep in the layout of ARCA's table (2606.00257): a row for each variant and rank, means over seeds.

Everything is read from the runs' folders, so the table can be made again at any time.
"""

import csv
import html
import io
import json
import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster import evaluation
from cluster.metrics import read
from configs.schema import RunConfig
from configs.sweep import Entry

T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
         2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052,
         2.048, 2.045, 2.042)  # fmt: skip
"""97.5 % of Student's t with 1, 2, ... 30 degrees of freedom; beyond, that of 30 is a little wide."""

TITLES = {"variant": "method", "rank": "rank", "runs": "runs"}
FIGURES = {
    "greedy": "greedy accuracy",
    "reward": "mean train reward",
    "gini": "Gini",
    "ratio": "effective-token ratio",
}
"""Without pass@k, whose k is the configuration's."""

Result = dict[str, Any]


def mean(values: Sequence[float]) -> dict[str, Any]:
    """The mean with its 95 % interval (Student's t over seeds); of a single seed there is none: None."""
    half = None
    if len(values) > 1:
        t = T_975[min(len(values) - 1, len(T_975)) - 1]
        half = t * statistics.stdev(values) / math.sqrt(len(values))
    return {"mean": statistics.fmean(values), "half": half, "values": list(values)}


def figures(run: RunConfig) -> dict[str, float]:
    """Of one finished run. The train reward is a mean over all steps; Gini and ratio over the second half of them: a
    fresh adapter's weights say nothing of the method."""
    report = evaluation.read(evaluation.path_of(run.folder, run.steps))
    steps = [record for record in read(run.folder) if "reward/mean" in record]
    late = steps[len(steps) // 2 :]
    found = {
        "reward": statistics.fmean(step["reward/mean"] for step in steps),
        "gini": statistics.fmean(step["credit/gini"] for step in late),
        "ratio": statistics.fmean(step["credit/effective_token_ratio"] for step in late),
    }
    accuracies = {"pass@1" if name == "accuracy" else name: e["value"] for name, e in report["figures"].items()}
    return accuracies | found


def results(entries: list[Entry], failed: dict[str, str], done: set[str]) -> list[Result]:
    """One result for each variant and rank, in order; `done` are the names of the finished runs."""
    groups: dict[tuple[str, int], list[RunConfig]] = {}
    for entry in entries:
        groups.setdefault((entry.variant, entry.run.lora.r), []).append(entry.run)
    table = []
    for (variant, rank), runs in groups.items():
        found = [figures(run) for run in runs if run.name in done]
        common = [name for name in (found[0] if found else {}) if all(name in one for one in found)]
        table.append(
            {
                "variant": variant,
                "rank": rank,
                "runs": len(found),
                "of": len(runs),
                "figures": {name: mean([one[name] for one in found]) for name in common},
                "failed": {run.name: failed[run.name] for run in runs if run.name in failed},
            }
        )
    return table


def columns(table: list[Result]) -> dict[str, str]:
    """The figures of the table, in its order: name -> title."""
    names = {name for result in table for name in result["figures"]}
    passes = sorted((name for name in names if name.startswith("pass@")), key=lambda name: int(name[5:]))
    shown = {"greedy": FIGURES["greedy"], **{name: name for name in passes}, **FIGURES}
    return {name: title for name, title in shown.items() if name in names}


def cells(table: list[Result]) -> tuple[list[str], list[list[str]]]:
    """Titles and rows, as text: `0.612 ± 0.024`; a row of runs that all failed says `failed`."""
    shown = columns(table)
    rows = []
    for result in table:
        known = [str(result["variant"]), str(result["rank"]), f"{result['runs']}/{result['of']}"]
        rows.append([*known, *(_cell(result, name) for name in shown)])
    return [*TITLES.values(), *shown.values()], rows


def _cell(result: Result, name: str) -> str:
    if name not in result["figures"]:
        return "failed" if result["failed"] else "–"
    figure = result["figures"][name]
    return f"{figure['mean']:.3f}" + ("" if figure["half"] is None else f" ± {figure['half']:.3f}")


def write(folder: Path, name: str, table: list[Result]) -> None:
    """results.md, results.csv, results.html and results.json in the sweep's folder."""
    titles, rows = cells(table)
    texts = {
        "md": markdown(titles, rows),
        "csv": as_csv(table),
        "html": page(name, titles, rows),
        "json": json.dumps(table, indent=1) + "\n",
    }
    folder.mkdir(parents=True, exist_ok=True)
    for ending, text in texts.items():
        temporary = folder / f".results.{ending}.unfinished"
        temporary.write_text(text)
        os.replace(temporary, folder / f"results.{ending}")


def markdown(titles: list[str], rows: list[list[str]]) -> str:
    lines = [titles, ["---", *("---:" for _ in titles[1:])], *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def as_csv(table: list[Result]) -> str:
    """With all digits; the interval is the mean - half .. mean + half."""
    shown, out = columns(table), io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["method", "rank", "runs", *(column for name in shown for column in (name, f"{name}_half"))])
    for result in table:
        row = [result["variant"], result["rank"], result["runs"]]
        for name in shown:
            figure = result["figures"].get(name, {"mean": None, "half": None})
            row += [figure["mean"], figure["half"]]
        writer.writerow(row)
    return out.getvalue()


def page(name: str, titles: list[str], rows: list[list[str]]) -> str:
    """One HTML file without anything from elsewhere."""
    line = lambda tag, cells: "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>\n"  # noqa: E731
    style = (
        "body{font:15px system-ui,sans-serif;margin:2rem;color:#222;background:#fff}table{border-collapse:collapse}"
        "th,td{padding:.35rem .8rem;text-align:right;border-bottom:1px solid #ccc}th:first-child,td:first-child"
        "{text-align:left}tbody tr:hover{background:#f3f3f3}"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(name)}</title>'
        f"<style>{style}</style></head><body><h1>{html.escape(name)}</h1>\n<table><thead>{line('th', titles)}</thead>"
        f"<tbody>\n{''.join(line('td', row) for row in rows)}</tbody></table>\n"
        "<p>Means over seeds; ± is half of the 95 % interval (Student's t). Gini and effective-token ratio are of the "
        "second half of the steps.</p></body></html>\n"
    )
