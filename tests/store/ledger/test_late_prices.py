"""A price that comes late for a part: that part is priced, the rest stays unpriced, and no second is lost."""

from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from app.store import ledger_periods
from app.store.engine import begin
from tests.store.ledger.world import RULE, T0, Books, at, gpu


async def left_unpriced(books: Books) -> list[tuple[Any, ...]]:
    """What is listed; reports count the same seconds, in whatever way they are cut."""
    rows = await books.sql("select since, until, hours from unpriced order by since")
    (counted,) = await books.sql(
        "select sum(unpriced_seconds) as s from cost_lines('2020-01-01', '2100-01-01', 'day', 'UTC')"
    )
    assert counted["s"] == sum(row["hours"] for row in rows) * 3600
    return [(row["since"], row["until"], row["hours"]) for row in rows]


@pytest.mark.parametrize("is_closed", [True, False], ids=["frozen", "open, but its month is closed"])
async def test_cost_15_a_price_that_comes_late_for_a_part_leaves_the_rest_unpriced(
    books: Books, is_closed: bool
):
    """No second is lost, none is free: what has no price is listed, and counts its ceiling."""
    run = await books.run(meters=[gpu(None)], ceiling_usd_per_hour=Decimal(25))
    until = 7200 if is_closed else int((datetime(2026, 4, 1, tzinfo=UTC) - T0).total_seconds())
    if is_closed:
        await books.over(run, after_s=until)
    await books.tick()
    if not is_closed:
        async with begin(books.engine) as conn:
            (month, *_) = await ledger_periods.due_months(conn, after_s=0)
            await ledger_periods.close_month(conn, month, epoch=books.epoch)

    told = '[{"at": "2026-03-01T12:30:00+00:00", "meters": [{"kind": "gpu", "quantity": "8", "usd": "2"}]}]'
    await books.change(run, repriced=told)
    await books.tick()
    await books.tick()

    assert await left_unpriced(books) == [(at(0), at(1800), Decimal("0.5"))]
    (late,) = await books.adjustments(run)
    assert (late["kind"], late["seconds"], late["dollar_seconds"]) == ("late_price", 0, 16 * (until - 1800))
    (least,) = await books.sql("select usd from unpriced_by_machine('2020-01-01')")
    assert least["usd"] == Decimal("12.5")
    await books.change(run, meters='[{"kind": "gpu", "quantity": "8", "usd": "0"}]')
    await books.tick()
    assert await left_unpriced(books) == []  # a price of nothing is a price


async def test_a_reclaim_that_is_free_takes_off_what_had_a_price_and_leaves_nothing_unpriced(engine: Any):
    books = await Books(engine).open(replace(RULE, reclaim_free_s=3600))
    run = await books.run(meters=[gpu(None)], tier="Spot", running_at=at(0), provider_started_at=at(0))
    told = '[{"at": "2026-03-01T12:10:00+00:00", "meters": [{"kind": "gpu", "quantity": "8", "usd": "2"}]}]'
    await books.change(run, repriced=told)
    await books.tick()
    await books.change(run, end_reason="preempted", provider_ended_at=at(1200), gone_at=at(1201))
    await books.tick()

    assert await books.cost() == 0
    assert await left_unpriced(books) == []
