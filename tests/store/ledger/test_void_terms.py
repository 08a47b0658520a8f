"""A prepayment that was noted by mistake is taken back: as if it had never been, but for closed months."""

import asyncio
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest
from click.testing import CliRunner, Result

from app.cli import main
from app.ledger.verify import verify
from app.store import bills, ledger_metrics, ledger_periods, ledger_upkeep, terms
from app.store.bills import Line
from app.store.engine import begin
from tests.store.ledger.test_ledger_periods import APRIL, close, seal
from tests.store.ledger.world import T0, Books, at, gpu

MAY = datetime(2026, 5, 1, tzinfo=UTC)


@pytest.fixture
def nebula(database_url: str) -> Any:
    async def call(*args: str) -> Result:
        runner = CliRunner()
        return await asyncio.to_thread(
            lambda: runner.invoke(main, [*args], env={"NEBULA_DATABASE_URL": database_url})
        )

    return call


async def note(books: Books, *, until: datetime, amount: str = "100", usd: str = "10") -> int:
    async with begin(books.engine) as conn:
        return await terms.commitment(
            conn,
            provider="modal",
            account="default",
            sku="*",
            tier="*",
            amount_usd=Decimal(amount),
            usd_per_hour=Decimal(usd),
            since=T0,
            until=until,
            set_by="somebody",
            reason="",
        )


async def void(books: Books, number: int) -> None:
    async with begin(books.engine) as conn:
        await terms.void(conn, number, voided_by="somebody", reason="never bought")


async def sums(books: Books, since: str = "2020-01-01", until: str = "2100-01-01") -> tuple[Decimal, Decimal]:
    """Dollars billed and effective."""
    (row,) = await books.sql(
        "select coalesce(sum(billed_dollar_seconds), 0) / 3600 as billed,"
        " coalesce(sum(effective_dollar_seconds), 0) / 3600 as effective"
        f" from cost_lines('{since}', '{until}', 'all', 'UTC')"
    )
    return row["billed"], row["effective"]


async def right(books: Books) -> None:
    async with begin(books.engine) as conn:
        assert await verify(conn) == []


@pytest.mark.parametrize("is_over", [True, False], ids=["a machine that is over", "one that runs"])
async def test_what_a_void_prepayment_covered_is_billed_after_all(books: Books, nebula: Any, is_over: bool):
    """In open months nothing of it is left, in sums of sealed days neither."""
    number = await note(books, until=at(10 * 3600))
    run = await books.run(meters=[gpu("5", 1)])
    if is_over:
        await books.over(run, after_s=3 * 3600)
    await books.tick()
    await seal(books)

    said = await nebula("cost", "commitment", "void", str(number), "--reason", "never bought")
    again = await nebula("cost", "commitment", "void", str(number))
    other = await nebula("cost", "commitment", "void", "99")
    await books.tick()
    await seal(books)

    assert said.exit_code == 0, said.output
    assert (again.exit_code, other.exit_code) == (1, 1)
    assert "has been void since" in again.output
    assert "there is no commitment 99" in other.output
    if not is_over:
        await books.over(run, after_s=3 * 3600)
        await books.tick()
        await seal(books)
    assert await sums(books) == (15, 15)
    assert [row["used_usd"] for row in await books.sql(_USED)] == [0]
    assert await books.tick() == 0
    await right(books)


_USED = """
    select coalesce((select sum(dollar_seconds) from segment s where s.commitment_id = c.id), 0)
        + coalesce((select sum(dollar_seconds) from billing_adjustment j where j.commitment_id = c.id), 0)
        as used_usd
    from commitment c
"""


@pytest.mark.parametrize(
    "term_ends", [at(10 * 3600), datetime(2026, 4, 2, tzinfo=UTC)], ids=["a term that was closed", "one open"]
)
async def test_cost_28_a_void_prepayment_leaves_closed_months_as_they_were(books: Books, term_ends: datetime):
    number = await note(books, until=term_ends)
    run = await books.run(meters=[gpu("5", 1)])
    await books.over(run, after_s=3 * 3600)
    await books.tick()
    await close(books, before=APRIL)
    march = await sums(books, "2026-03-01", "2026-04-01")
    assert march[0] == 100

    await void(books, number)
    await books.tick()
    await books.tick()

    assert await sums(books, "2026-03-01", "2026-04-01") == march
    assert await sums(books) == (15, 15)
    lines = await books.sql(
        "select kind, corrects, charge_period_start > '2026-05-01' as is_now from charge"
        " where corrects is not null"
    )
    assert {(row["corrects"], row["is_now"]) for row in lines} == {(date(2026, 3, 1), True)}
    assert "void" in {row["kind"] for row in lines}
    await close(books, before=MAY)
    assert await sums(books, "2026-03-01", "2026-04-01") == march
    assert await sums(books) == (15, 15)
    await right(books)


async def test_what_the_cloud_has_billed_is_billed_once_when_its_prepayment_turns_out_to_be_none(
    books: Books,
):
    """The bill has the last word on the sum; void, the sum is the same, and nothing of it is covered."""
    number = await note(books, until=at(10 * 3600))
    run = await books.run(meters=[gpu("5", 1)], resource_id="billed")
    await books.over(run, after_s=3 * 3600)
    await books.tick()
    await books.sql("update ledger_run set closed_at = closed_at - interval '1 hour'")
    names = {"provider": "modal", "account": "default"}
    line = Line(
        resource_id="billed",
        meter="",
        starts_at=at(0),
        ends_at=at(3 * 3600),
        usd=Decimal(16),
        identity=None,
        claim_uid=None,
        final=True,
    )
    async with begin(books.engine) as conn:
        await bills.put(conn, [line], epoch=books.epoch, **names)
        (compared,) = await bills.comparable(conn, settle_s=0, **names)
        await bills.settle(conn, compared, difference=Decimal(-14 * 3600), epoch=books.epoch)

    await void(books, number)
    await books.tick()
    await books.tick()

    assert await sums(books) == (16, 16)
    (machine,) = await books.sql("select status, delta from reconciliation")
    assert (machine["status"], machine["delta"]) == ("matched", 0)
    await right(books)


async def test_what_the_cloud_has_billed_takes_nothing_of_another_prepayment_that_fits(books: Books):
    """The usual way: the right one is noted, the wrong one is taken back. Its money is another's."""
    wrong = await note(books, until=at(10 * 3600))
    run = await books.run(meters=[gpu("5", 1)])
    await books.over(run, after_s=3 * 3600)
    await books.tick()
    await books.sql("update ledger_run set billed_at = now()")
    await note(books, until=at(9 * 3600), amount="30")
    await books.tick()
    await void(books, wrong)
    await books.tick()
    assert await sums(books) == (60, 60)  # the cloud's 30 of which nothing is covered, and what was bought

    later = await books.run(meters=[gpu("5", 1)])
    await books.over(later, after_s=3 * 3600)
    await books.tick()

    assert await sums(books) == (60, 60)
    assert [row["used_usd"] for row in await books.sql(_USED + " order by id")] == [0, 30 * 3600]
    await right(books)


async def test_a_month_that_is_closed_between_a_ticks_read_and_its_write_delays_it_by_one_tick(books: Books):
    number = await note(books, until=at(10 * 3600))
    run = await books.run(meters=[gpu("5", 1)])
    await books.over(run, after_s=3 * 3600)
    await books.sql("alter table run disable trigger user")
    await books.sql("update run set changed_at = now() - interval '1 hour'")  # nothing new is known of it
    await books.tick()
    await void(books, number)
    waits = "select 1 from pg_locks where not granted and relation = 'billing_segment'::regclass"

    async with begin(books.engine) as conn:
        assert await ledger_periods.close_month(conn, date(2026, 3, 1), epoch=books.epoch)
        ticking = asyncio.create_task(books.tick())
        async with asyncio.timeout(30):
            while not await books.sql(waits):
                await asyncio.sleep(0.02)
    assert await ticking == 0

    assert await books.tick() == 1
    assert await sums(books) == (15, 15)
    await right(books)


async def test_the_cost_counter_never_falls_under_a_void_prepayment_and_its_credit_says_so(books: Books):
    await books.run(meters=[gpu("5", 1)])
    number = await note(books, until=at(10 * 3600))
    await books.tick()

    async def shown() -> tuple[Decimal, Decimal]:
        async with begin(books.engine) as conn:
            rows = await ledger_metrics.read(conn, epoch=books.epoch)
        credit = [row["value"] for row in rows["credit"] if row["kind"] == "void"]
        return sum(row["cost"] for row in rows["cost"] if not row["namespace"]), sum(credit)

    assert await shown() == (100, 0)
    await void(books, number)
    await books.tick()
    assert await shown() == (100, 100)

    await note(books, until=at(20 * 3600), amount="30")
    await books.tick()
    assert await shown() == (130, 100)


async def test_the_counters_of_a_machine_that_is_billed_after_all_take_nothing_twice(books: Books):
    """What it had of the prepayment was billed by nobody, and is no credit; it has one list price."""
    number = await note(books, until=at(10 * 3600))
    run = await books.run(meters=[gpu("5", 1)])
    await books.over(run, after_s=3 * 3600)
    await books.tick()
    async with begin(books.engine) as conn:
        await ledger_metrics.read(conn, epoch=books.epoch)

    await void(books, number)
    await books.tick()

    async with begin(books.engine) as conn:
        rows = await ledger_metrics.read(conn, epoch=books.epoch)
    cost, credit = (
        sum(row["cost"] for row in rows["cost"]),
        {row["kind"]: row["value"] for row in rows["credit"]},
    )
    assert (cost, credit) == (115, {"void": 100})
    assert cost - sum(credit.values()) == (await sums(books))[0]
    (listed,) = await books.sql(
        "select sum(list_dollar_seconds) / 3600 as usd"
        " from cost_lines('2020-01-01', '2100-01-01', 'all', 'UTC')"
    )
    assert sum(row["list_cost"] for row in rows["cost"]) == listed["usd"]


async def test_a_day_that_is_added_up_while_a_prepayment_in_it_becomes_void_is_added_up_again(books: Books):
    number = await note(books, until=at(86400))
    day = at(86400).date()  # on which its unused rest falls, and of which nothing else is known
    run = await books.run(meters=[gpu("5", 1)])
    await books.over(run, after_s=3 * 3600)
    await books.tick()
    waits = "select 1 from pg_locks where not granted and locktype = 'transactionid'"

    async with begin(books.engine) as conn:
        await ledger_upkeep.seal_day(conn, day, epoch=books.epoch)
        voiding = asyncio.create_task(void(books, number))
        async with asyncio.timeout(30):
            while not voiding.done() and not await books.sql(waits):
                await asyncio.sleep(0.02)
    await voiding

    assert await books.sql("select dirty from cost_day where day = :day", day=day) == [{"dirty": True}]
    await books.tick()
    assert await sums(books) == (15, 15)
