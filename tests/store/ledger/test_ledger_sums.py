"""Sums by day and by zone, closed months, bills: whatever is added up, and however, it is the same money."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from app.ledger.bills import difference_of
from app.ledger.rules import total
from app.store import bills, ledger_periods, ledger_upkeep
from app.store.bills import Compared, Line
from app.store.engine import begin
from app.store.ledger_upkeep import Listed
from tests.store.ledger.world import Books, at, gpu

ZONES = (
    "UTC",
    "Europe/Berlin",
    "America/New_York",
    "Australia/Lord_Howe",
    "Asia/Kolkata",
    "Asia/Kathmandu",
    "Pacific/Apia",
)


def utc(*parts: int) -> datetime:
    return datetime(*parts, tzinfo=UTC)  # type: ignore[misc,arg-type]


async def a_long_run(books: Books, begun: datetime, over: datetime, **columns: Any) -> int:
    run = await books.run(
        requested_at=begun,
        accepted_at=begun,
        first_seen_at=begun,
        provider_created_at=begun,
        **columns,
    )
    await books.change(
        run, gone_at=over, terminate_asked_at=over, provider_ended_at=over, end_reason="terminated"
    )
    return run


async def lines(books: Books, since: datetime, until: datetime, unit: str, zone: str) -> dict[str, Decimal]:
    rows = await books.sql(
        "select bucket, sum(billed_dollar_seconds) as sum from cost_lines(:since, :until, :unit, :zone)"
        " group by 1 order by 1",
        since=since,
        until=until,
        unit=unit,
        zone=zone,
    )
    return {row["bucket"]: row["sum"] for row in rows}


@pytest.mark.parametrize("zone", ZONES)
async def test_cost_11_the_days_of_a_month_are_the_month_in_every_zone(books: Books, zone: str):
    """Over both changes of the clock in 2026, leap days and a day that a zone has skipped."""
    await a_long_run(books, utc(2026, 1, 31, 22, 59, 59, 1), utc(2026, 12, 2, 3, 4, 5, 678901))
    await books.tick()
    since, until = utc(2026, 1, 1), utc(2027, 1, 1)

    days = await lines(books, since, until, "day", zone)
    months = await lines(books, since, until, "month", zone)
    (whole,) = (await lines(books, since, until, "all", zone)).values()

    assert total(list(days.values())) == total(list(months.values())) == whole
    for month, sum_ in months.items():
        assert total([each for day, each in days.items() if day.startswith(month)]) == sum_


async def test_cost_11_a_day_of_a_clock_change_has_23_or_25_hours(books: Books):
    await a_long_run(books, utc(2026, 3, 1), utc(2026, 11, 30), meters=[gpu("1", 1)])
    await books.tick()

    days = await lines(books, utc(2026, 3, 1), utc(2026, 11, 30), "day", "Europe/Berlin")

    assert (days["2026-03-29"], days["2026-10-25"]) == (23 * 3600, 25 * 3600)
    assert days["2026-03-30"] == 24 * 3600


@pytest.mark.parametrize("session", ["UTC", "Europe/Berlin", "America/New_York"])
async def test_cost_12_fc_090_the_zones_of_session_and_database_change_nothing(books: Books, session: str):
    await a_long_run(books, utc(2026, 3, 28, 20), utc(2026, 3, 30, 3))
    await books.tick()
    since, until = utc(2026, 3, 1), utc(2026, 4, 1)
    before = await lines(books, since, until, "day", "America/New_York")

    async with begin(books.engine) as conn:
        await conn.execute(text(f"set local timezone = '{session}'"))
        rows = await conn.execute(
            text(
                "select bucket, sum(billed_dollar_seconds) as sum from"
                " cost_lines(:since, :until, 'day', 'America/New_York') group by 1"
            ),
            {"since": since, "until": until},
        )
        assert {row.bucket: row.sum for row in rows} == before


@given(edges=st.lists(st.integers(0, 40 * 86400 * 10**6), min_size=2, max_size=6, unique=True))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_cost_02_windows_add_up_however_they_are_cut(books: Books, edges: list[int]):
    if not await books.sql("select 1 from billing_segment limit 1"):
        await _some_runs(books)
    moments = [utc(2026, 2, 20) + timedelta(microseconds=edge) for edge in sorted(edges)]

    pieces = [await books.cost(low, high) for low, high in pairwise(moments)]

    assert total(pieces) == await books.cost(moments[0], moments[-1])


async def _some_runs(books: Books) -> None:
    for day in range(5):
        begun = utc(2026, 2, 20 + day, 23, 30)
        await a_long_run(
            books,
            begun,
            begun + timedelta(hours=30, microseconds=7),
            meters=[gpu("2.4901"), {"kind": "disk", "quantity": "17", "usd": "0.000131", "label": ""}],
            pod_namespace=f"team-{day % 2}",
        )
    await books.tick()


async def seal(books: Books) -> None:
    """Every day that is over is added up."""
    while True:
        async with begin(books.engine) as conn:
            days = await ledger_upkeep.due_days(conn, grace_s=0)
            for day in days:
                await ledger_upkeep.seal_day(conn, day, epoch=books.epoch)
        if not days:
            return


async def test_cost_04_and_10_sums_by_day_are_the_ledger_and_can_be_rebuilt(books: Books):
    await _some_runs(books)
    windows = [(utc(2026, 2, 1), utc(2026, 4, 1)), (utc(2026, 2, 21, 7), utc(2026, 2, 24, 13))]
    raw = [
        await lines(books, low, high, unit, zone)
        for low, high in windows
        for unit in ("all", "day", "hour", "month")
        for zone in ("UTC", "Asia/Kathmandu")
    ]

    async def sealed() -> list[dict[str, Any]]:
        while True:
            async with begin(books.engine) as conn:
                days = await ledger_upkeep.due_days(conn, grace_s=3600)
                for day in days:
                    await ledger_upkeep.seal_day(conn, day, epoch=books.epoch)
            if not days:
                return await books.sql(
                    "select * from cost_daily order by day, label_set_id, meter, phase, kind"
                )

    first = await sealed()
    assert first
    summed = [
        await lines(books, low, high, unit, zone)
        for low, high in windows
        for unit in ("all", "day", "hour", "month")
        for zone in ("UTC", "Asia/Kathmandu")
    ]
    assert summed == raw
    async with begin(books.engine) as conn:
        await ledger_upkeep.unseal(conn)
    assert await sealed() == first


async def test_a_change_in_a_sealed_day_is_seen_at_once_and_added_up_again(books: Books):
    run = await books.run(meters=[gpu(None)])
    await books.over(run, after_s=3600)
    await books.tick()
    await seal(books)
    assert await books.cost() == 0

    await books.change(run, meters='[{"kind": "gpu", "quantity": "8", "usd": "1", "label": ""}]')
    await books.tick()

    assert await books.cost() == 8 * 3600
    async with begin(books.engine) as conn:
        assert [str(day) for day in await ledger_upkeep.due_days(conn, grace_s=0)] == ["2026-03-01"]


async def test_cost_28_a_closed_month_stays_and_a_correction_names_it(books: Books):
    run = await books.run(meters=[gpu(None)])
    await books.over(run, after_s=3600)
    await books.tick()
    async with begin(books.engine) as conn:
        months = await ledger_periods.due_months(conn, after_s=0)
        for month in months:
            await ledger_periods.close_month(conn, month, epoch=books.epoch)
    closed = await books.sql("select * from billing_period_close order by month, label_set_id")
    march = await books.cost(utc(2026, 3, 1), utc(2026, 4, 1))

    await books.change(run, meters='[{"kind": "gpu", "quantity": "8", "usd": "1", "label": ""}]')
    await books.tick()

    assert await books.sql("select * from billing_period_close order by month, label_set_id") == closed
    assert await books.cost(utc(2026, 3, 1), utc(2026, 4, 1)) == march
    (row,) = await books.sql("select corrects, at, dollar_seconds from billing_adjustment")
    assert (str(row["corrects"]), row["dollar_seconds"]) == ("2026-03-01", 8 * 3600)
    assert row["at"] >= utc(2026, 4, 1)


@pytest.mark.parametrize("length_s", [1, 20, 600, 3540, 90000])
async def test_fc_089_short_windows_cost_what_their_seconds_cost(books: Books, length_s: int):
    await a_long_run(books, at(-86400), at(2 * 86400), meters=[gpu("1", 1)])
    await books.tick()

    assert await books.cost(at(0), at(length_s)) == length_s


async def test_cost_13_leap_days_year_ends_and_week_53_have_their_seconds(books: Books):
    await a_long_run(books, utc(2020, 12, 20), utc(2021, 1, 10), meters=[gpu("1", 1)])
    await a_long_run(books, utc(2024, 2, 28, 12), utc(2024, 3, 1, 12), meters=[gpu("1", 1)])
    await books.tick()
    day = 86_400

    assert await lines(books, utc(2020, 12, 21), utc(2021, 1, 11), "week", "UTC") == {
        "2020-W52": 7 * day,
        "2020-W53": 7 * day,
        "2021-W01": 6 * day,
    }
    assert await lines(books, utc(2020, 12, 1), utc(2021, 2, 1), "month", "UTC") == {
        "2020-12": 12 * day,
        "2021-01": 9 * day,
    }
    assert await lines(books, utc(2024, 2, 1), utc(2024, 4, 1), "day", "UTC") == {
        "2024-02-28": day // 2,
        "2024-02-29": day,
        "2024-03-01": day // 2,
    }


async def test_an_empty_or_inverted_window_costs_nothing(books: Books):
    await a_long_run(books, at(0), at(100))
    await books.tick()

    assert await books.cost(at(10), at(10)) == 0
    assert await books.cost(at(50), at(10)) == 0


# --- prices --------------------------------------------------------------------------------------


def a_price(usd: str | None = "2.49", **changes: Any) -> Listed:
    values = {
        "sku": "h100x8",
        "region": "us",
        "tier": "Spot",
        "meter": "gpu",
        "unit": "unit-hour",
        "quantity": Decimal(8),
        "usd": None if usd is None else Decimal(usd),
    }
    return Listed(**(values | changes))


async def put(books: Books, *rows: Listed) -> int:
    async with begin(books.engine) as conn:
        return await ledger_upkeep.list_prices(
            conn, provider="modal", account="default", rows=rows, epoch=books.epoch
        )


async def test_every_change_of_a_listed_price_is_a_new_interval(books: Books):
    assert await put(books, a_price(), a_price("4", tier="OnDemand")) == 2
    assert await put(books, a_price(), a_price("4", tier="OnDemand")) == 0
    assert await put(books, a_price("2.60"), a_price("4", tier="OnDemand")) == 1
    assert await put(books, a_price("4", tier="OnDemand")) == 0

    rows = await books.sql(
        "select usd, upper(valid) as until, lower(valid) as since from price_point where tier = 'Spot'"
        " order by 3"
    )
    assert [row["usd"] for row in rows] == [Decimal("2.49"), Decimal("2.60")]
    assert rows[0]["until"] == rows[1]["since"]
    assert rows[1]["until"] is not None


async def test_fc_091_another_currency_is_refused_by_every_table(books: Books):
    for statement in (
        "insert into price_override (provider, account, sku, tier, usd_per_hour, currency, valid, set_by,"
        " reason) values ('modal', '*', '*', '*', 1, 'EUR', tstzrange(now(), null), 'me', '')",
        "insert into provider_bill_line (provider, account, resource_id, meter, starts_at, ends_at, usd,"
        " currency, final) values ('modal', 'default', '', '', now(), now(), 1, 'EUR', true)",
    ):
        with pytest.raises(IntegrityError, match="currency"):
            await books.sql(statement)


# --- bills ---------------------------------------------------------------------------------------


def a_line(resource_id: str, usd: str, **changes: Any) -> Line:
    values = {
        "resource_id": resource_id,
        "meter": "",
        "starts_at": at(0),
        "ends_at": at(100),
        "usd": Decimal(usd),
        "identity": None,
        "claim_uid": None,
        "final": True,
    }
    return Line(**(values | changes))


async def compare(books: Books, *fetched: Line) -> None:
    where = {"provider": "modal", "account": "default"}
    async with begin(books.engine) as conn:
        await bills.put(conn, fetched, epoch=books.epoch, **where)
        for each in await bills.comparable(conn, settle_s=0, **where):
            await bills.settle(conn, each, difference=difference_of(each), epoch=books.epoch)


async def test_cost_29_a_bill_within_its_own_rounding_agrees_and_another_is_adjusted_to(books: Books):
    same = await books.run(resource_id="same", meters=[gpu("1", 1)])
    other = await books.run(resource_id="other", meters=[gpu("1", 1)])
    open_ = await books.run(resource_id="open", meters=[gpu("1", 1)])
    for run in (same, other, open_):
        await books.over(run, after_s=100)
    await books.tick()

    fetched = (
        a_line("same", "0.028"),
        a_line("other", "0.030"),
        a_line("open", "0.01", final=False),
        a_line("stranger", "1"),
    )
    await compare(books, *fetched)
    await compare(books, *fetched)  # the same bill again is nothing new

    assert await books.adjustments(same) == []
    (row,) = await books.adjustments(other)
    assert (row["kind"], row["dollar_seconds"]) == ("invoice_true_up", Decimal("0.030") * 3600 - 100)
    assert await books.adjustments(open_) == []
    billed = await books.sql("select count(billed_at) as n from ledger_run")
    assert billed[0]["n"] == 2


async def test_an_order_whose_machine_was_never_shown_and_never_billed_costs_nothing(books: Books):
    """Accepted, and it never became one. One that was shown waits for its lines, however late they come."""
    phantom = await books.run(resource_id="phantom", meters=[gpu("1", 1)])
    shown = await books.run(resource_id="shown", meters=[gpu("1", 1)])
    await books.sql(
        "insert into instance_seen (provider, account, resource_id, region, state)"
        " values ('modal', 'default', 'shown', 'us-east', 'gone')"
    )
    for run in (phantom, shown):
        await books.over(run, after_s=100)
    await books.tick()
    assert await books.cost() == 200

    await compare(books)

    assert [row["kind"] for row in await books.adjustments(phantom)] == ["invoice_true_up"]
    assert await books.adjustments(shown) == []
    assert await books.cost() == 100


async def test_an_unpriced_run_gets_its_price_from_the_bill(books: Books):
    run = await books.run(resource_id="m", meters=[gpu(None)])
    await books.over(run, after_s=100)
    await books.tick()

    await compare(books, a_line("m", "1.25"))

    assert await books.cost() == Decimal("1.25") * 3600
    assert await books.sql("select * from unpriced") == []


async def test_what_a_cloud_bills_for_a_machine_of_ours_that_nobody_saw_is_written_down(books: Books):
    async with begin(books.engine) as conn:
        line = a_line("ghost", "0.5", claim_uid="c-ghost", identity="nb-…")
        await bills.put(
            conn, [line, a_line("foreign", "9")], provider="modal", account="default", epoch=books.epoch
        )
        for _ in range(2):
            found = await bills.strays(
                conn, provider="modal", account="default", settle_s=0, epoch=books.epoch
            )
    assert found == []
    assert await books.cost() == Decimal("0.5") * 3600


async def test_a_bill_for_a_machine_of_a_claim_in_release_waits_until_its_run_cannot_come(books: Books):
    """Else it would count twice: whoever releases the claim may find the machine yet, or remember it."""
    names: dict[str, Any] = {"provider": "modal", "account": "default"}
    await books.sql(
        "insert into rental (claim_uid, claim_name, pod_namespace, pod_name, pod_uid, pool, provider,"
        " account, region, tier, accelerator, state, epoch)"
        " values ('c-late', 'c', 'ns', 'p', 'u', 'gpu', 'modal', 'default', 'r', 'OnDemand', '', 'ending', 1)"
    )
    async with begin(books.engine) as conn:
        line = a_line("late", "0.5", claim_uid="c-late", identity="nb-…")
        await bills.put(conn, [line], epoch=books.epoch, **names)
        assert await bills.strays(conn, settle_s=0, epoch=books.epoch, **names) == []

    await books.sql("update rental set state = 'ended', ended_at = now()")
    async with begin(books.engine) as conn:
        assert len(await bills.strays(conn, settle_s=0, epoch=books.epoch, **names)) == 1


@pytest.mark.parametrize(("lines_", "ours", "differs"), [
    (("0.028",), "100", False),
    (("0.014", "0.014"), "100", False),
    (("0.03",), "100", False),
    (("0.030",), "100", True),
    (("-0.5",), "0", True),
])  # fmt: skip
def test_what_rounding_explains_is_no_difference(lines_: tuple[str, ...], ours: str, differs: bool):
    compared = Compared(run_id=1, lines=tuple(Decimal(each) for each in lines_), dollar_seconds=Decimal(ours))

    assert (difference_of(compared) is not None) is differs
