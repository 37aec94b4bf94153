"""Boards and alert rules against what a run exports: metrics.jsonl, recorded from a small demo of two steps."""

import json
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
BOARDS = sorted((ROOT / "docker/grafana/boards").glob("*.json"))
ALERTS = ROOT / "docker/prometheus/alerts.yml"
RAYS_OWN = {"ray_node_cpu_utilization", "ray_node_mem_used"}

FUNCTIONS = {"max_over_time", "min_over_time"}
KEYWORDS = {"and", "or"}
TOKEN = re.compile(
    r"""\s*(?:(?P<name>[A-Za-z_:][\w:]*) | (?P<braces>\{[^{}]*\}) | \[\d+[smhd]\] | \d+(?:\.\d+)?
    | [!=<>]=|[-+*/<>()])\s*""",
    re.VERBOSE,
)
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')


def names(query: str, exported: set[str]) -> set[str]:
    """Metric names of a query. Raises ValueError for anything else than metrics, matchers and the few words above."""
    found, at = set(), 0
    while at < len(query):
        token = TOKEN.match(query, at)
        if token is None:
            raise ValueError(f"{query}: not understood from {query[at:]!r}")
        at = token.end()
        if braces := token["braces"]:
            for part in braces[1:-1].split(","):
                matcher = MATCHER.fullmatch(part.strip())
                if matcher is None or matcher[1] not in {"__name__", "run"}:
                    raise ValueError(f"{query}: matcher {part!r}")
                if matcher[1] == "__name__":
                    matching = {name for name in exported if re.fullmatch(matcher[3], name)}
                    if not matching:
                        raise ValueError(f"{query}: no metric matches {matcher[3]!r}")
                    found |= matching
        elif (name := token["name"]) and query[at : at + 1] == "(" and name not in KEYWORDS:
            if name not in FUNCTIONS:
                raise ValueError(f"{query}: function {name}")
        elif name and name not in KEYWORDS:
            found.add(name)
    return found


def exported() -> set[str]:
    records = [json.loads(line) for line in (Path(__file__).parent / "metrics.jsonl").read_text().splitlines()]
    numeric = {key for record in records for key, value in record.items() if isinstance(value, int | float)}
    return {f"ray_accredit_{re.sub('[^a-z0-9]', '_', key.lower())}" for key in numeric - {"step", "time"}} | RAYS_OWN


def queries() -> list[tuple[str, str]]:
    panels = [(path.stem, panel) for path in BOARDS for panel in json.loads(path.read_text())["panels"]]
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    return [
        (f"{board}: {panel['title']}", target["expr"]) for board, panel in panels for target in panel["targets"]
    ] + [(f"alert {rule['alert']}", rule["expr"]) for rule in rules]


@pytest.mark.parametrize(("place", "query"), queries())
def test_a_query_names_only_metrics_that_a_run_exports(place: str, query: str) -> None:
    have = exported()
    used = names(query, have)
    assert used, place
    assert used <= have, f"{place}: {used - have}"


@pytest.mark.parametrize("query", ["rate(ray_accredit_reward_mean)", 'x{job="a"}', "x $ y", '{__name__=~"nothing.+"}'])
def test_a_query_that_is_not_understood_is_an_error(query: str) -> None:
    with pytest.raises(ValueError):
        names(query, {"ray_accredit_reward_mean"})


def test_the_names_of_a_query_are_found() -> None:
    query = 'max_over_time(a_b{run=~"$run"}[30m]) - c < 0.01 and {__name__=~"d.+"} != e'
    assert names(query, {"dx", "dy", "f"}) == {"a_b", "c", "dx", "dy", "e"}


def test_rays_own_metrics_are_those_that_ray_declares() -> None:
    from ray.dashboard.modules.reporter.reporter_agent import METRICS_GAUGES

    assert {name.removeprefix("ray_") for name in RAYS_OWN} <= METRICS_GAUGES.keys()


def test_every_board_has_the_data_source_that_is_provisioned() -> None:
    sources = yaml.safe_load((ROOT / "docker/grafana/provisioning/datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    boards = [json.loads(path.read_text()) for path in BOARDS]
    assert [board["title"] for board in boards] == ["Credit", "Fleet and swaps", "Training"]
    assert {panel["datasource"]["uid"] for board in boards for panel in board["panels"]} == {sources[0]["uid"]}
