"""The sample alert rules name only series that the sweep shows."""

import re
from pathlib import Path

import yaml
from prometheus_client import REGISTRY

import app.sweep.metrics  # noqa: F401 (it registers what the rules ask for)

RULES = Path(__file__).parents[3] / "docs" / "samples" / "alerts" / "orphans.yaml"
WANTED = {
    "OrphanBurning",
    "SweepBlockedByCeiling",
    "SweepIncomplete",
    "SweepReportOnly",
    "TerminateStuck",
    "DuplicateInstance",
    "UnexplainedSpend",
    "OtherInstallationInAccount",
    "ProtectedExpensive",
}


def test_every_alert_is_there_and_asks_for_series_that_exist():
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    shown = {metric.name for metric in REGISTRY.collect()}

    assert {rule["alert"] for rule in group["rules"]} >= WANTED
    for rule in group["rules"]:
        names = set(re.findall(r"nebula_\w+", rule["expr"]))
        assert names
        assert names <= shown, rule["alert"]
