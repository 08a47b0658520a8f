"""A price that comes late for a part: that part is priced, the rest stays unpriced, and no second is lost."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from app.ledger.writer import Writer
from app.store import bills, ledger_periods
from app.store.engine import begin
from tests.store.ledger.test_ledger_periods import APRIL, MAY, close, right
from tests.store.ledger.test_void_terms import note, void
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


async def test_cost_15_what_is_frozen_after_a_late_correction_stays_unpriced(books: Books):
    """A correction of a closed month says nothing of the next one: not once the run is over, nor closed."""
    run = await books.run(meters=[gpu(None)], ceiling_usd_per_hour=Decimal(25))
    await books.tick()
    await close(books, before=APRIL)
    told = '[{"at": "2026-03-01T13:00:00+00:00", "meters": [{"kind": "gpu", "quantity": "8", "usd": "2"}]},'
    told += '{"at": "2026-03-31T00:00:00+00:00", "meters": [{"kind": "gpu", "quantity": "8", "usd": null}]}]'
    await books.change(run, repriced=told)
    await books.tick()
    ends = datetime(2026, 4, 3, tzinfo=UTC)
    await books.over(run, after_s=(ends - T0).total_seconds())
    left = [(at(0), at(3600), 1), (datetime(2026, 3, 31, tzinfo=UTC), APRIL, 24), (APRIL, ends, 48)]

    await books.tick()
    assert await left_unpriced(books) == left
    await close(books, before=MAY)
    await books.tick()
    assert await left_unpriced(books) == left
    (least,) = await books.sql("select usd from unpriced_by_machine('2020-01-01')")
    assert least["usd"] == 73 * 25


async def test_what_had_a_price_and_lost_it_is_unpriced(books: Books):
    number = await note(books, until=at(10 * 3600))
    run = await books.run(ceiling_usd_per_hour=Decimal(25), meters=[])
    await books.over(run, after_s=3 * 3600)
    await books.tick()
    assert await left_unpriced(books) == []

    await void(books, number)
    await books.tick()

    assert await left_unpriced(books) == [(at(0), at(3 * 3600), 3)]
    (least,) = await books.sql("select usd from unpriced_by_machine('2020-01-01')")
    assert least["usd"] == 3 * 25


async def test_a_machine_without_a_price_counts_its_ceiling_for_all_the_time_in_which_a_meter_has_none(
    books: Books,
):
    disk = {"kind": "disk", "quantity": "10", "label": ""}
    run = await books.run(meters=[gpu("2"), disk | {"usd": None}], ceiling_usd_per_hour=Decimal(25))
    later = json.dumps([{"at": at(3600).isoformat(), "meters": [gpu(None), disk | {"usd": "1"}]}])
    await books.change(run, repriced=later)
    await books.over(run, after_s=7200)
    await books.tick()

    assert [row["meter"] for row in await books.sql("select meter from unpriced order by since")] == [
        "disk",
        "gpu",
    ]
    (least,) = await books.sql("select usd from unpriced_by_machine('2020-01-01')")
    assert least["usd"] == 2 * 25


async def test_what_an_older_version_has_corrected_is_derived_once_more_by_the_next_leader(books: Books):
    """However often that one has led after the migration. Until then its price counts as one for all."""
    run = await books.run(meters=[gpu(None)], ceiling_usd_per_hour=Decimal(25))
    await books.over(run, after_s=7200)
    await books.tick()
    told = '[{"at": "2026-03-01T12:30:00+00:00", "meters": [{"kind": "gpu", "quantity": "8", "usd": "2"}]}]'
    await books.change(run, repriced=told)
    await books.sql(  # as that version writes it
        "insert into billing_adjustment (key, run_id, label_set_id, meter, phase, kind, at, seconds,"
        " dollar_seconds, reason) select 'run:' || s.run_id || ':gpu:late_price:0', s.run_id, s.label_set_id,"
        " 'gpu', s.phase, 'late_price', upper(s.period), 0, 16 * 5400, '' from billing_segment s"
    )
    await books.sql(
        "update ledger_run l set prices_at = now(), facts_at = r.changed_at from run r where r.id = l.run_id"
    )
    assert await books.sql("select * from unpriced") == []

    books.writer = Writer(engine=books.engine)
    await books.tick()

    assert await left_unpriced(books) == [(at(0), at(1800), Decimal("0.5"))]
    books.writer = Writer(engine=books.engine)
    assert await books.tick() == 0
    await right(books)


async def test_what_an_older_version_has_compared_with_its_bill_is_unpriced_no_longer(books: Books):
    run = await books.run(meters=[gpu(None)])
    await books.over(run, after_s=7200)
    await books.tick()
    await close(books, before=APRIL)
    await books.sql("update ledger_run set billed_at = now()")

    for _ in range(2):
        async with begin(books.engine) as conn:
            await bills.price(conn, provider="modal", account="default", epoch=books.epoch)

    assert await left_unpriced(books) == []
    assert [row["kind"] for row in await books.adjustments(run)] == ["invoice_true_up"]
    await right(books)
