"""The chart's alerts and dashboards ask for series and labels that the controller shows."""

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from prometheus_client import REGISTRY

import app.claims.metrics
import app.placement.metrics
import app.provisioning.metrics
import app.sweep.metrics  # noqa: F401 (they register what is asked for)
from app.ledger.metrics import Shown, Snapshot

FILES = Path(__file__).resolve().parents[3] / "chart" / "files"
ALERTS = sorted((FILES / "alerts").glob("*.yaml"))
DASHBOARDS = sorted((FILES / "dashboards").glob("*.json"))

# What Prometheus and its operator put onto every series of a scraped Pod.
SCRAPED = {"pod", "namespace", "job", "instance", "le"}
_PARTS = ("_total", "_bucket", "_sum", "_count", "_created")
_SERIES = re.compile(r"(?P<name>(?:nebula|process)_[a-z_]+)(?:\{(?P<selector>[^}]*)\})?")


def labels_by_series() -> dict[str, set[str]]:
    """Each series' own labels, by the name that a query uses."""
    found: dict[str, set[str]] = {}
    for collector in set(REGISTRY._collector_to_names):
        for name in REGISTRY._collector_to_names[collector]:
            found[name] = set(getattr(collector, "_labelnames", ()) or ())
    row = dict.fromkeys(("provider", "nodepool", "namespace", "accelerator", "capacity_type"), "x")
    row |= dict.fromkeys(("phase", "kind", "budget", "account", "reason"), "x")
    numbers = (
        "usd_per_hour",
        "cost",
        "list_cost",
        "gpu_seconds",
        "value",
        "open",
        "unpriced",
        "delta",
        "usd",
    )
    others = ("price_age_s", "lag_s", "used_ratio", "exhausted_s", "age_s", "runway_s")
    rows = [row | dict.fromkeys((*numbers, *others), 1)]
    snapshot = Snapshot(**{field.name: rows for field in fields(Snapshot)})
    for metric in Shown(snapshot=snapshot).collect():
        for sample in metric.samples:
            found[sample.name] = set(sample.labels)
    return found


def expressions() -> Iterator[tuple[str, str, str]]:
    """Where it is, the expression, and the text around it that names labels."""
    for path in ALERTS:
        for group in yaml.safe_load(path.read_text())["groups"]:
            for rule in group["rules"]:
                yield f"{path.name}: {rule['alert']}", rule["expr"], rule["annotations"]["summary"]
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                if "expr" in target:
                    yield f"{path.name}: {panel['title']}", target["expr"], target["legendFormat"]


@pytest.mark.parametrize(
    ("expr", "words"),
    [(expr, words) for _, expr, words in expressions()],
    ids=[at for at, *_ in expressions()],
)
def test_every_expression_asks_for_series_and_labels_that_are_shown(expr: str, words: str) -> None:
    shown = labels_by_series()
    asked = [(match["name"], match["selector"] or "") for match in _SERIES.finditer(expr)]
    assert asked

    known: set[str] = set()
    for name, selector in asked:
        assert name in shown, name
        known |= shown[name] | SCRAPED
        assert set(re.findall(r"(\w+)\s*=", selector)) <= shown[name] | SCRAPED, selector
    for grouped in re.findall(r"(?:by|without|on|ignoring)\s*\(([^)]*)\)", expr):
        assert set(re.findall(r"\w+", grouped)) <= known, grouped
    named = re.findall(r"\$labels\.(\w+)", words) + re.findall(r"\{\{(\w+)\}\}", words)
    assert set(named) <= known, words


def test_alerts_have_names_of_their_own_a_severity_and_a_sentence() -> None:
    rules = [
        rule
        for path in ALERTS
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
    ]

    assert len({rule["alert"] for rule in rules}) == len(rules) >= 20
    for rule in rules:
        assert rule["labels"]["severity"] in ("page", "ticket", "info"), rule["alert"]
        assert rule["annotations"]["summary"]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_is_one_that_grafana_takes(path: Path) -> None:
    """What its importer and its grid ask for; nothing here can start a Grafana."""
    board = json.loads(path.read_text())

    assert re.fullmatch(r"[a-zA-Z0-9_-]{1,40}", board["uid"])
    assert board["title"]
    assert board["schemaVersion"] >= 36  # the first in which a source is an object
    assert "id" not in board  # Grafana's own number: an import with one may replace another board
    assert [each["type"] for each in board["templating"]["list"]] == ["datasource"] * len(
        board["templating"]["list"]
    )
    kinds = {f"${{{each['name']}}}": each["query"] for each in board["templating"]["list"]}
    taken: dict[tuple[int, int], str] = {}
    for panel in board["panels"]:
        title, at = panel["title"], panel["gridPos"]
        assert panel["type"] in ("stat", "timeseries", "table"), title
        assert min(at["w"], at["h"]) > 0, title
        assert 0 <= at["x"] <= 24 - at["w"], title
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert (x, y) not in taken, f"{title} lies on {taken.get((x, y))}"
                taken[x, y] = title
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs) >= 1, title
        for target in panel["targets"]:
            source = target["datasource"]
            assert source["type"] == kinds[source["uid"]] == panel["datasource"]["type"], title
            assert ("expr" in target) is (source["type"] == "prometheus"), title
            assert ("rawSql" in target) is (source["type"] != "prometheus"), title
    assert len({json.loads(each.read_text())["uid"] for each in DASHBOARDS}) == len(DASHBOARDS)


def test_dashboards_name_no_source_of_somebodys_own() -> None:
    assert [path.name for path in DASHBOARDS] == ["money.json", "operation.json"]
    for path in DASHBOARDS:
        board = json.loads(path.read_text())
        sources = {f"${{{each['name']}}}" for each in board["templating"]["list"]}
        ids = [panel["id"] for panel in board["panels"]]
        assert len(set(ids)) == len(ids)
        for panel in board["panels"]:
            assert panel["title"]
            assert {
                panel["datasource"]["uid"],
                *(each["datasource"]["uid"] for each in panel["targets"]),
            } <= sources
