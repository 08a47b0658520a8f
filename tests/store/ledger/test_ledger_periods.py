"""Closed months stay as they are, whatever is still open; old segments move, the money stays."""

import asyncio
import random
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy.exc import IntegrityError

from app.ledger.verify import verify
from app.ledger.writer import Writer
from app.store import bills, ledger_periods, ledger_upkeep, terms
from app.store.engine import begin
from tests.store.ledger.world import Books, at, gpu

APRIL, MAY = datetime(2026, 4, 1, tzinfo=UTC), datetime(2026, 5, 1, tzinfo=UTC)


async def close(books: Books, *, before: datetime) -> list[date]:
    """Close the months that end by then."""
    async with begin(books.engine) as conn:
        months = await ledger_periods.due_months(conn, after_s=0)
    wanted = [month for month in months if datetime(month.year, month.month, 1, tzinfo=UTC) < before]
    for month in wanted:
        async with begin(books.engine) as conn:
            assert await ledger_periods.close_month(conn, month, epoch=books.epoch)
    return wanted


async def seal(books: Books) -> None:
    while True:
        async with begin(books.engine) as conn:
            days = await ledger_upkeep.due_days(conn, grace_s=0)
            for day in days:
                await ledger_upkeep.seal_day(conn, day, epoch=books.epoch)
        if not days:
            return


async def archive(books: Books, *, limit: int = 10_000) -> int:
    """Move what is cold, so many at once; how many segments in all."""
    async with begin(books.engine) as conn:
        await ledger_periods.make_partitions(conn, epoch=books.epoch)
    moved = 0
    while True:
        async with begin(books.engine) as conn:
            more = await ledger_periods.archive(conn, epoch=books.epoch, limit=limit)
        moved += more
        if not more:
            return moved


def months_back_to_may() -> int:
    """The retention that keeps May 2026 and what came after it, whenever this runs."""
    now = datetime.now(UTC)
    return (now.year - 2026) * 12 + now.month - 5


async def drop(books: Books, *, keep_months: int | None = None) -> list[int]:
    """Drop what is past retention (by default April 2026), once every day has its sum; which months."""
    keep_months = months_back_to_may() if keep_months is None else keep_months
    found: list[int] = []
    while True:
        await seal(books)
        async with begin(books.engine) as conn:
            months = await ledger_periods.drop_old(conn, keep_months=keep_months, epoch=books.epoch)
        await seal(books)
        found += [month.month for month in months]
        async with begin(books.engine) as conn:  # a day that had no sum keeps its month for one more turn
            more = await ledger_periods.drop_old(conn, keep_months=keep_months, epoch=books.epoch)
        found += [month.month for month in more]
        if not months and not more:
            return found


async def age(books: Books) -> None:
    """Every machine that is over was so long ago that no bill of it is waited for."""
    await books.sql("update ledger_run set closed_at = closed_at - interval '61 days'")


async def right(books: Books) -> None:
    async with begin(books.engine) as conn:
        assert await verify(conn) == []


def told(usd: str) -> str:
    return f'[{{"kind": "gpu", "quantity": "8", "usd": "{usd}", "label": ""}}]'


async def test_cost_28_a_closed_month_stays_under_a_run_that_is_still_open(books: Books):
    run = await books.run(meters=[gpu("1")])
    await books.tick()
    await close(books, before=APRIL)
    march = await books.cost(at(-86400), APRIL)
    assert march == 8 * Decimal((APRIL - at(0)).total_seconds())

    await books.change(run, meters=told("3"))
    await books.tick()
    await books.tick()

    assert await books.cost(at(-86400), APRIL) == march
    (late,) = await books.sql("select * from billing_adjustment")
    assert (late["kind"], str(late["corrects"]), late["dollar_seconds"]) == (
        "late_price",
        "2026-03-01",
        2 * march,
    )
    assert late["list_dollar_seconds"] == 2 * march
    assert late["at"] > MAY
    whole = Decimal((MAY - at(0)).total_seconds())
    await books.over(run, after_s=float(whole))
    await books.tick()
    assert await books.cost() == 3 * 8 * whole
    await right(books)


async def test_a_run_that_turns_out_to_have_ended_in_a_closed_month_is_corrected_in_an_open_one(books: Books):
    run = await books.run(meters=[gpu("1")])
    await books.tick()
    await close(books, before=MAY)
    before = {month: await books.cost(*month) for month in ((at(-86400), APRIL), (APRIL, MAY))}

    await books.over(run, after_s=3600)
    await books.tick()

    assert {month: await books.cost(*month) for month in before} == before
    assert await books.cost() == 8 * 3600
    assert await books.tick() == 0
    await right(books)


async def test_a_machine_that_is_found_after_its_month_was_closed_counts_in_an_open_one(books: Books):
    await books.run(meters=[gpu("1")])
    await books.tick()
    await close(books, before=MAY)
    closed = await books.cost(at(-86400), MAY)

    found = await books.run(meters=[gpu("2")])
    await books.over(found, after_s=70 * 86400)
    await books.tick()

    assert await books.cost(at(-86400), MAY) == closed
    (late,) = await books.adjustments(found)
    assert late["dollar_seconds"] == 16 * Decimal((MAY - at(0)).total_seconds())
    receipts = await books.sql(
        "select sum(cost) as usd from pod_receipt p join run r using (resource_id) where r.id = :id",
        id=found,
    )
    assert receipts[0]["usd"] * 3600 == 16 * 70 * 86400
    await right(books)


async def test_nothing_is_written_into_a_closed_month_whoever_writes(books: Books):
    run = await books.run(meters=[gpu("1")])
    await books.tick()
    await close(books, before=MAY)
    segment = (
        "insert into billing_segment (run_id, label_set_id, meter, phase, period, quantity, usd,"
        " price_source,"
        " confidence, frozen) select :run, label_set_id, 'cpu', 'running', '[2026-03-02, 2026-03-03)', 1, 1,"
        " 'quoted', 'firm', true from ledger_run"
    )
    adjustment = (
        "insert into billing_adjustment (key, label_set_id, kind, at, dollar_seconds, reason)"
        " select 'x', label_set_id, 'credit', '2026-03-02', -1, '' from ledger_run"
    )

    for statement in (segment, adjustment):
        with pytest.raises(IntegrityError, match="is closed"):
            await books.sql(statement, **({"run": run} if ":run" in statement else {}))


async def test_months_are_closed_one_after_another_and_by_the_leader_alone(books: Books):
    await books.over(await books.run(meters=[gpu("1")]), after_s=3600)
    await books.tick()

    assert [month.month for month in await close(books, before=datetime(2026, 7, 1, tzinfo=UTC))] == [
        3,
        4,
        5,
        6,
    ]
    async with begin(books.engine) as conn:
        assert not await ledger_periods.close_month(conn, date(2026, 7, 1), epoch=books.epoch + 1)
        assert not await ledger_periods.archive(conn, epoch=books.epoch + 1)
        assert not await ledger_periods.drop_old(conn, keep_months=1, epoch=books.epoch + 1)


async def test_a_close_waits_for_who_writes_and_who_writes_then_finds_it_closed(books: Books):
    run = await books.run(meters=[gpu("1")])
    await books.tick()
    await books.change(run, meters=told("2"))
    async with begin(books.engine) as conn:
        assert await ledger_periods.close_month(conn, date(2026, 3, 1), epoch=books.epoch)
        tick = asyncio.create_task(books.tick())  # derives for the open month, and waits to write it
        await _waits(books)
    await tick
    march = await books.cost(at(-86400), APRIL)
    await books.tick()

    assert march == 8 * Decimal((APRIL - at(0)).total_seconds()) == await books.cost(at(-86400), APRIL)
    assert [row["kind"] for row in await books.adjustments(run)] == ["late_price"]
    await right(books)


async def _waits(books: Books) -> None:
    query = "select count(*) as n from pg_locks where not granted and relation = 'billing_segment'::regclass"
    for _ in range(200):
        if (await books.sql(query))[0]["n"]:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("nobody waits")


async def test_what_is_archived_costs_what_it_did_and_is_corrected_as_before(books: Books):
    runs = [await books.run(meters=[gpu("1.37")], provider_created_at=at(n)) for n in range(3)]
    await books.over(runs[0], after_s=45 * 86400)
    await books.change(runs[1], repriced=f'[{{"at": "2026-04-02T00:00:00+00:00", "meters": {told("2")}}}]')
    await books.tick()
    await close(books, before=datetime(2026, 7, 1, tzinfo=UTC))
    windows = [(at(-86400), APRIL), (at(3 * 86400 + 7), MAY), (APRIL, datetime(2026, 7, 1, tzinfo=UTC))]
    before = [await books.cost(*window) for window in windows]

    assert await archive(books) == 6
    assert await archive(books) == 0

    assert [await books.cost(*window) for window in windows] == before
    rows = await books.sql("select month, count(*) as n from billing_segment_archive group by 1 order by 1")
    assert [(row["month"].month, row["n"]) for row in rows] == [(3, 3), (4, 4)]
    await seal(books)
    assert [await books.cost(*window) for window in windows] == before
    await right(books)
    await books.change(runs[0], meters=told("2.37"))
    await books.tick()
    assert [row["dollar_seconds"] for row in await books.adjustments(runs[0])] == [8 * 45 * 86400]
    await right(books)
    with pytest.raises(IntegrityError, match="never changed"):
        await books.sql("update billing_segment_archive set usd = 0")
    with pytest.raises(IntegrityError, match="frozen"):
        await books.sql("delete from billing_segment where frozen")


async def test_what_is_past_its_retention_goes_as_a_whole_month_and_its_sums_stay(books: Books):
    run = await books.run(meters=[gpu("1")])
    await books.over(run, after_s=40 * 86400)
    young = await books.run(meters=[gpu("1")], requested_at=at(100 * 86400), accepted_at=at(100 * 86400),
                            first_seen_at=at(100 * 86400), provider_created_at=at(100 * 86400))  # fmt: skip
    await books.tick()
    await seal(books)
    await close(books, before=datetime(2026, 9, 1, tzinfo=UTC))
    await archive(books)
    await age(books)
    before = [
        await books.cost(at(-86400), APRIL),
        await books.cost(at(-86400), datetime(2026, 9, 1, tzinfo=UTC)),
    ]

    async with begin(books.engine) as conn:
        assert await ledger_periods.drop_old(conn, keep_months=0, epoch=books.epoch) == []

    assert await drop(books) == [3, 4]  # days in which nothing ran have their sums, too
    after = [
        await books.cost(at(-86400), APRIL),
        await books.cost(at(-86400), datetime(2026, 9, 1, tzinfo=UTC)),
    ]
    assert after == before
    days = await books.sql(
        "select sum(billed_dollar_seconds) as sum from cost_lines('2026-03-01', '2026-04-01', 'day', 'UTC')"
    )
    assert days[0]["sum"] == before[0]
    async with begin(books.engine) as conn:
        where = {"provider": "modal", "account": "default"}
        resource = (await books.sql("select resource_id from run where id = :run", run=run))[0]["resource_id"]
        line = bills.Line(resource_id=resource, meter="", starts_at=at(0), ends_at=at(86400), usd=Decimal(1),
                          identity=None, claim_uid=None, final=True)  # fmt: skip
        await bills.put(conn, [line], **where, epoch=books.epoch)
        assert (
            await bills.comparable(conn, **where, settle_s=0) == []
        )  # half of it could be compared with all
    await books.change(run, meters=told("9"))  # too late: nobody can say any more what was billed
    await books.tick()
    assert await books.adjustments(run) == []
    async with begin(books.engine) as conn:
        await ledger_upkeep.unseal(conn)
        while await ledger_periods.sum_months(conn, epoch=books.epoch):
            pass
    await seal(books)
    assert await books.cost(at(-86400), APRIL) == before[0]
    await right(books)
    assert (await books.segments(young))[-1]["end"] is None


async def test_a_machine_that_outlives_the_retention_of_its_first_month_keeps_its_ledger(books: Books):
    """Its months stay as long as it is there, and as long as its bill may come; then they go."""
    run = await books.run(meters=[gpu("1")])
    await books.tick()
    await close(books, before=datetime(2026, 10, 1, tzinfo=UTC))
    await archive(books)

    assert await drop(books) == []

    whole = Decimal(200 * 86400)
    await books.over(run, after_s=float(whole))
    await books.tick()
    assert await books.sql("select 1 from billing_segment where upper_inf(period)") == []
    assert await books.cost() == 8 * whole
    assert await drop(books) == []
    await age(books)
    assert await drop(books) == [3, 4]
    assert await books.cost() == 8 * whole
    await right(books)


async def test_retention_leaves_what_prepayments_were_used_for_as_it_was(books: Books):
    """A month in which one was used stays; a run that lost an older month keeps its share of it."""
    first = await books.run(meters=[gpu("1", 1)])
    second = await books.run(meters=[gpu("1", 1)], **dict.fromkeys(
        ("requested_at", "accepted_at", "first_seen_at", "provider_created_at"), at(35 * 86400)))  # fmt: skip
    async with begin(books.engine) as conn:
        await terms.commitment(
            conn, provider="modal", account="default", sku="*", tier="*", amount_usd=Decimal(10_000),
            usd_per_hour=Decimal(1), machines=1, since=APRIL, until=datetime(2026, 6, 1, tzinfo=UTC),
            set_by="", reason="",
        )  # fmt: skip
    await books.over(first, after_s=40 * 86400)
    await books.over(second, after_s=42 * 86400)
    await books.tick()
    unused = "select effective_once from charge where kind = 'unused'"
    (before,) = await books.sql(unused)
    used = 36000000 - before["effective_once"]
    assert used == Decimal((at(42 * 86400) - APRIL).total_seconds())
    await seal(books)
    await close(books, before=datetime(2026, 9, 1, tzinfo=UTC))
    await archive(books)
    await age(books)

    assert await drop(books) == [3]

    assert await books.sql(unused) == [before]
    dropped = await books.sql("select run_id from ledger_run where dropped_at is not null")
    assert [row["run_id"] for row in dropped] == [first]
    for _ in range(2):
        await Writer(engine=books.engine).tick(epoch=books.epoch)
        await books.sql("update ledger_run set facts_at = 'epoch'")
    assert await books.adjustments(second) == []
    assert await books.sql(unused) == [before]
    await right(books)


async def test_the_archive_is_filled_in_short_steps_that_placement_never_waits_for(books: Books):
    for n in range(3):
        await books.over(await books.run(meters=[gpu("1")], provider_created_at=at(n)), after_s=86400 + n)
    await books.tick()
    await close(books, before=datetime(2026, 7, 1, tzinfo=UTC))
    cost = await books.cost()
    async with begin(books.engine) as conn:
        assert await ledger_periods.make_partitions(conn, epoch=books.epoch) > 0
    async with begin(books.engine) as conn:
        assert await ledger_periods.make_partitions(conn, epoch=books.epoch) == 0

    async with begin(books.engine) as conn:
        assert await ledger_periods.archive(conn, epoch=books.epoch, limit=2) == 2
        # What placement locks and reads meanwhile; neither waits.
        assert await books.sql("select 1 from installation for no key update nowait") != []
        await books.sql("lock table billing_segment_archive in access share mode nowait")
        assert await books.cost() == cost
    assert await archive(books, limit=2) == 1
    assert await books.cost() == cost
    await right(books)


async def test_cost_04_closed_months_are_read_from_their_sums_and_these_can_be_rebuilt(books: Books):
    await books.over(await books.run(meters=[gpu("1.37")]), after_s=80 * 86400)
    await books.tick()
    raw = await _by_month(books)
    await close(books, before=datetime(2026, 6, 1, tzinfo=UTC))

    assert await _by_month(books) == raw
    sums = await books.sql("select * from cost_monthly order by month, label_set_id, meter, phase, kind")
    assert [row["month"].month for row in sums] == [3, 4, 5]
    async with begin(books.engine) as conn:
        await ledger_upkeep.unseal(conn)
        assert await books.sql("select 1 from closed_month where summed") != []
        while await ledger_periods.sum_months(conn, epoch=books.epoch):
            pass
    assert (
        await books.sql("select * from cost_monthly order by month, label_set_id, meter, phase, kind") == sums
    )


async def _by_month(books: Books) -> list[dict[str, Any]]:
    return await books.sql(
        "select bucket, sum(billed_dollar_seconds) as sum from cost_lines('2026-01-01', '2026-12-01',"
        " 'month', 'UTC') group by 1 order by 1"
    )


@pytest.mark.parametrize("seed", range(4))
async def test_a_random_ledger_ends_at_its_facts_and_never_moves_a_closed_month(books: Books, seed: int):
    """Machines come, change their price, end and are corrected; months close and are archived in between."""
    dice = random.Random(seed)
    runs: list[int] = []
    prices: dict[int, list[tuple[datetime, str]]] = {}
    months = [datetime(2026, month, 1, tzinfo=UTC) for month in range(3, 10)]
    closed: dict[tuple[datetime, datetime], Decimal] = {}
    for low, high in pairwise(months):
        for _ in range(dice.randint(1, 3)):
            begun = low + timedelta(microseconds=dice.randrange(10**6 * 86400 * 25))
            times = ("requested_at", "accepted_at", "first_seen_at", "provider_created_at", "running_at")
            runs.append(await books.run(meters=[gpu("1.37")], **dict.fromkeys(times, begun)))
        for run in dice.sample(runs, len(runs) // 2):
            usd, when = str(Decimal(dice.randint(1, 999)) / 100), low + timedelta(days=dice.randrange(28))
            prices.setdefault(run, []).append((when, usd))
            told_ = sorted(prices[run])
            body = ", ".join(
                f'{{"at": "{at_.isoformat()}", "meters": {told(price)}}}' for at_, price in told_
            )
            await books.change(run, repriced=f"[{body}]")
        for run in dice.sample(runs, len(runs) // 3):
            over = low + timedelta(seconds=dice.randrange(86400 * 28))
            await books.sql(
                "update run set gone_at = greatest(:over, accepted_at), terminate_asked_at ="
                " greatest(:over, accepted_at) where id = :run and gone_at is null",
                over=over, run=run,
            )  # fmt: skip
        await books.tick()
        if dice.random() < 0.7:
            for month in await close(books, before=high):
                start = datetime(month.year, month.month, 1, tzinfo=UTC)
                closed[start, _after(start)] = await books.cost(start, _after(start))
        if dice.random() < 0.5:
            await archive(books, limit=2)
        assert {month: await books.cost(*month) for month in closed} == closed
    await right(books)
    await books.sql(
        "update run set gone_at = :end, terminate_asked_at = :end where gone_at is null", end=months[-1]
    )
    await books.tick()
    assert await books.tick() == 0
    assert {month: await books.cost(*month) for month in closed} == closed
    await right(books)
    ours = await books.cost(months[0], datetime.now(UTC) + timedelta(days=1))
    await books.sql("truncate billing_segment, billing_segment_archive, billing_adjustment, ledger_run,"
                    " cost_monthly, cost_daily, cost_day, closed_month, billing_period_close")  # fmt: skip
    books.writer = type(books.writer)(engine=books.engine)
    await books.tick()
    assert ours == await books.cost(months[0], datetime.now(UTC) + timedelta(days=1)) > 0


def _after(month: datetime) -> datetime:
    return datetime(month.year + month.month // 12, month.month % 12 + 1, 1, tzinfo=UTC)
