"""Which machines a budget that drains ends: those of its scope, as it is frozen on their claims."""

import json
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from app.api.keys import ATTRIBUTION_ANNOTATION
from app.ledger.budgets import claims_of
from app.store.budgets import Status


def a_claim(name: str, *, labels: dict[str, str] | None = None, **metadata: Any) -> dict[str, Any]:
    said = {} if labels is None else {ATTRIBUTION_ANNOTATION: json.dumps({"labels": labels})}
    return {
        "metadata": {"name": name, "annotations": said, **metadata},
        "spec": {"podRef": {"namespace": "team-a"}, "poolRef": "gpu"},
    }


CLAIMS = [
    a_claim("vision", labels={"team": "vision", "app": "train"}),
    a_claim("speech", labels={"team": "speech", "app": "train"}),
    a_claim("nobody"),
    a_claim("going", labels={"team": "vision", "app": "train"}, deletionTimestamp="2026-03-01T12:00:00Z"),
]


@pytest.mark.parametrize(("scope", "ends"), [
    ({}, {"vision", "speech", "nobody"}),
    ({"namespace": "team-b"}, set()),
    ({"pool": "gpu", "team": "vision"}, {"vision"}),
    ({"labels": {"app": "train"}}, {"vision", "speech"}),
    ({"labels": {"app": "train", "team": "speech"}}, {"speech"}),
    ({"labels": {"app": "serve"}}, set()),
])  # fmt: skip
def test_a_budget_that_drains_ends_the_machines_of_its_scope_and_no_other(
    scope: dict[str, Any], ends: set[str]
):
    status = Status(
        name="b",
        amount_usd=Decimal(1),
        period="month",
        period_start=datetime(2026, 3, 1, tzinfo=UTC),
        spent_usd=Decimal(1),
        usd_per_hour=Decimal(1),
        used_ratio=Decimal(1),
        forecast_usd=Decimal(1),
        exhausted_at=None,
        action="Drain",
        thresholds=(100,),
        **({"namespace": None, "team": None, "pool": None} | scope),
    )

    assert {claim["metadata"]["name"] for claim in claims_of(status, CLAIMS)} == ends
