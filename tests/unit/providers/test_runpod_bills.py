"""RunPod's bill as lines: whole hours, exact digits, and final only when nothing can be missing."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from pydantic import ValidationError

from providers.runpod.bills import lines_of
from providers.runpod.wire import BillRecords

HOUR = timedelta(hours=1)
NOON = datetime(2026, 11, 30, 12, tzinfo=UTC)


def record(start: datetime, total: Any, **changes: Any) -> dict[str, Any]:
    body = {"podId": "p1", "startTime": start.isoformat(), "endTime": (start + HOUR).isoformat()}
    return body | {"totalAmount": total, "gpuAmount": total, "diskAmount": 0} | changes


def lines(*records: dict[str, Any], now: datetime = NOON + 30 * HOUR, **window: datetime) -> Any:
    body = BillRecords.model_validate({"records": records, "metadata": {}})
    return lines_of(
        body, since=window.get("since", NOON - HOUR), until=window.get("until", NOON + 10 * HOUR), now=now
    )


def test_only_whole_hours_inside_the_window_and_the_past_are_lines():
    found = lines(
        record(NOON - 2 * HOUR, 1),
        record(NOON, 2),
        record(NOON + HOUR, 3),
        record(NOON + 2 * HOUR, 4),
        now=NOON + 2.5 * HOUR,
    )

    assert [(line.start, line.usd) for line in found] == [(NOON, Decimal(2)), (NOON + HOUR, Decimal(3))]


def test_a_line_is_final_a_day_after_its_hour():
    early, late = record(NOON, 2), record(NOON + HOUR, 3)

    assert [line.final for line in lines(early, late, now=NOON + 25 * HOUR)] == [True, False]


def test_amounts_are_exact_and_rounded_as_the_longest_of_them():
    found = lines(record(NOON, 0.5), record(NOON + HOUR, 1.23456), record(NOON + 2 * HOUR, 1e-05))

    assert [str(line.usd) for line in found] == ["0.50000", "1.23456", "0.00001"]


def test_an_hour_without_a_pod_is_nobodys_and_one_without_times_is_no_bill():
    assert lines(record(NOON, 2, podId="")) == []
    with pytest.raises(ValidationError):
        lines(record(NOON, 2, startTime=None))
    with pytest.raises(ValidationError):
        lines(record(NOON, "NaN"))
