"""Prices with an end, bills that came first, runs that the tables refuse: each dollar once."""

from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest

from app.ledger.bills import difference_of
from app.ledger.writer import AT_ONCE, Writer
from app.store import bills, budgets, ledger_upkeep, terms
from app.store.bills import Line
from app.store.engine import begin
from providers.base import BillingRule, BillsFrom, BillsUntil
from tests.store.ledger.world import Books, at, gpu

MINUTES = BillingRule(kind=None, starts=BillsFrom.ACCEPTED, until=BillsUntil.TERMINATE_ASKED, step_s=60)
BEFORE = at(-10)


async def override(
    books: Books, usd: str, *, since: datetime = BEFORE, until: datetime | None = None
) -> None:
    async with begin(books.engine) as conn:
        await terms.override(conn, usd_per_hour=Decimal(usd), since=since, until=until, **EVERYTHING)


async def commitment(books: Books, *, amount: str, usd: str) -> None:
    async with begin(books.engine) as conn:
        await terms.commitment(
            conn,
            amount_usd=Decimal(amount),
            usd_per_hour=Decimal(usd),
            since=BEFORE,
            until=at(86400),
            **EVERYTHING,
        )


EVERYTHING: dict[str, Any] = {
    "provider": "modal",
    "account": "default",
    "sku": "*",
    "tier": "*",
    "set_by": "somebody",
    "reason": "",
}


async def test_a_price_whose_end_is_known_is_burnt_now_and_not_spent_ahead_of_time(books: Books):
    begun = datetime.now(UTC) - timedelta(hours=1)
    times = ("requested_at", "accepted_at", "first_seen_at", "provider_created_at", "running_at")
    await books.run(meters=[gpu("2", 1), gpu("1", 1) | {"kind": "disk"}], **dict.fromkeys(times, begun))
    await override(books, "7", since=begun, until=begun + timedelta(days=30))
    await books.tick()

    (burn,) = await books.sql("select usd_per_hour, instances from burn_rate")
    assert (burn["usd_per_hour"], burn["instances"]) == (7, 1)
    (seen,) = await books.sql("""
        select (select sum(cost) from pod_receipt) as receipt,
            (select bool_or(is_open) from pod_receipt) as open,
            (select sum(billed_cost) from charge_daily('UTC')) as days,
            (select sum(billed_cost) from charge_hourly) as hours,
            (select sum(billed_dollar_seconds) / 3600 from charge_between('2020-01-01', '2100-01-01')) as all
    """)
    assert seen.pop("open")
    assert all(7 <= cost < 8 for cost in seen.values()), seen


async def test_burn_counts_each_machine_once_and_what_has_no_price_at_its_ceiling(books: Books):
    """Every meter's dollars, whatever of a machine has a price, by whole machines."""
    disk = gpu("0.5", 1) | {"kind": "disk"}
    for meters, ceiling in (
        ([gpu("2", 1), disk], "9"),
        ([gpu(None, 1), disk], "9"),  # its ceiling
        ([gpu(None, 1), gpu("20", 1) | {"kind": "machine"}], "9"),  # more than that already
        ([gpu(None, 1)], None),  # nobody knows anything
    ):
        await books.run(
            meters=meters, accelerator="H100:1", ceiling_usd_per_hour=ceiling and Decimal(ceiling)
        )
    await books.tick()

    (burn,) = await books.sql("select * from burn_rate")

    assert (burn["instances"], burn["gpus"], burn["unpriced"]) == (4, 4, 3)
    assert burn["usd_per_hour"] == Decimal("2.5") + 9 + 20
    (machines,) = await books.sql("select count(*) as n, sum(usd_per_hour) as usd from burn_machine")
    assert (machines["n"], machines["usd"]) == (4, burn["usd_per_hour"])


async def test_a_price_that_is_set_late_is_not_put_on_top_of_the_clouds_own_bill(books: Books):
    run = await books.run(meters=[gpu(None, 1)], resource_id="billed")
    await books.over(run, after_s=3600)
    await books.tick()
    await books.sql("update ledger_run set closed_at = closed_at - interval '1 hour'")
    line = Line(
        resource_id="billed",
        meter="",
        starts_at=at(0),
        ends_at=at(3600),
        usd=Decimal("2.49"),
        identity=None,
        claim_uid=None,
        final=True,
    )
    async with begin(books.engine) as conn:
        await bills.put(conn, [line], provider="modal", account="default", epoch=books.epoch)
        for each in await bills.comparable(conn, provider="modal", account="default", settle_s=0):
            await bills.settle(conn, each, difference=difference_of(each), epoch=books.epoch)
    assert await books.cost() == Decimal("2.49") * 3600

    await override(books, "2.49")
    await books.tick()

    assert await books.cost() == Decimal("2.49") * 3600


async def test_what_is_billed_for_a_machine_nobody_saw_is_in_the_reports_of_a_sealed_day(books: Books):
    day = datetime(2026, 3, 5, tzinfo=UTC)
    line = Line(
        resource_id="unseen",
        meter="",
        starts_at=day,
        ends_at=day + timedelta(hours=3),
        usd=Decimal(3),
        identity="x",
        claim_uid="c-unseen",
        final=True,
    )
    async with begin(books.engine) as conn:
        await ledger_upkeep.seal_day(conn, day.date(), epoch=books.epoch)
        await bills.put(conn, [line], provider="modal", account="default", epoch=books.epoch)
        names = {"provider": "modal", "account": "default"}
        assert await bills.strays(conn, settle_s=0, epoch=books.epoch, **names)

    assert await books.cost(day, day + timedelta(days=1)) == 3 * 3600


@pytest.mark.parametrize(
    "meters",
    [[gpu("2", -1)], [gpu("2") | {"quantity": "NaN"}], [gpu("1e140000", 1)], [gpu("2", 1), gpu("3", 1)]],
    ids=["below zero", "no number", "too long for a numeric", "one name for two meters"],
)
async def test_a_nonsense_run_keeps_no_other_from_being_written(books: Books, meters: list[dict[str, Any]]):
    strange = await books.run(meters=meters)
    run = await books.run(meters=[gpu("2", 1)])
    await books.over(run, after_s=3600)
    await books.over(strange, after_s=3600)

    await books.tick()

    assert await books.cost(workload_name="train") in (7200, 7200 + 5 * 3600)
    (segment,) = await books.segments(run)
    assert segment["dollar_seconds"] == 7200


async def test_a_late_price_reaches_every_closed_run_within_one_term(books: Books):
    run = await books.run(meters=[gpu("2", 1)])
    await books.over(run, after_s=3600)
    columns = (
        "provider, account, region, tier, accelerator, pool, pod_namespace, pod_name, pod_uid, requested_at,"
        " accepted_at, first_seen_at, provider_created_at, gone_at, terminate_asked_at, provider_ended_at,"
        " end_reason, meters"
    )
    await books.sql(
        f"insert into run (claim_uid, attempt, resource_id, {columns})"
        f" select 'x' || n, 1, 'x' || n, {columns} from run, generate_series(1, :more) n",
        more=2 * AT_ONCE,
    )
    whole = 2 * AT_ONCE + 1
    await books.tick()
    assert await books.cost() == whole * 2 * 3600
    await books.sql("alter table run disable trigger run_changed")
    await books.sql("update run set changed_at = changed_at - interval '1 day'")
    await books.sql("update ledger_run set facts_at = facts_at - interval '1 day'")

    await override(books, "1")
    await books.tick()

    assert await books.cost() == whole * 3600
    await Writer(engine=books.engine).tick(epoch=books.epoch)  # the next leader finds nothing left
    assert await books.cost() == whole * 3600


async def test_what_a_prepayment_covers_is_not_billed_with_its_rounding_or_late(books: Books):
    await books.open(MINUTES)
    early = await books.run(meters=[gpu("2", 1)])
    await books.over(early, after_s=61)
    await books.tick()
    assert await books.cost() == 2 * 120

    await commitment(books, amount="10", usd="60")
    await books.tick()
    late = await books.run(meters=[gpu("2", 1)])
    await books.over(late, after_s=61)
    await books.tick()

    (row,) = await books.sql(
        "select sum(billed_dollar_seconds) / 3600 as billed,"
        " sum(effective_dollar_seconds) / 3600 as effective"
        " from charge_between('2020-01-01', '2100-01-01')"
    )
    assert (row["billed"], row["effective"]) == (10, 10)


@pytest.mark.field_case("FX-11")
async def test_a_quoted_price_of_nothing_is_not_believed_where_one_is_listed(books: Books):
    run = await books.run(meters=[gpu("0")])
    for query in (
        "insert into rental (claim_uid, claim_name, pod_namespace, pod_name, pod_uid, pool, provider,"
        " account, region, tier, accelerator, state, epoch) select claim_uid, claim_uid, pod_namespace,"
        " pod_name, pod_uid, pool, provider, account, region, tier, accelerator, 'open', 1 from run",
        "insert into provision_attempt (claim_uid, number, sequence, identity, provider, account, region,"
        " tier, accelerator, shape, epoch, send_by, outcome, settled_at) select claim_uid, 1, id, 'i',"
        " provider, account, region, tier, accelerator, 'h100', 1, now(), 'accepted', now() from run",
        "insert into price_point (provider, account, sku, region, tier, meter, unit, quantity, usd, valid,"
        " source) select 'modal', 'default', 'h100', region, 'OnDemand', 'gpu', 'unit-hour', 8, usd,"
        " tstzrange('2026-01-01', null), 'catalog' from (values ('us-east', 2), ('', 9)) p (region, usd)",
    ):
        await books.sql(query)
    await books.tick()

    (segment,) = await books.segments(run)
    assert (segment["usd"], segment["price_source"], segment["confidence"]) == (2, "catalog", "guessed")


async def test_the_day_of_an_adjustment_is_that_of_utc_whatever_zone_its_time_has(books: Books):
    day = datetime(2026, 3, 5, tzinfo=UTC)
    moment = datetime(2026, 3, 6, 0, 30, tzinfo=timezone(timedelta(hours=5, minutes=30)))
    async with begin(books.engine) as conn:
        await ledger_upkeep.seal_day(conn, day.date(), epoch=books.epoch)
        await terms.adjust(
            conn,
            kind="credit",
            provider="modal",
            account="default",
            usd=Decimal(-1),
            at=moment,
            key="k",
            invoice=None,
            reason="",
        )

    assert await books.cost(day, day + timedelta(days=1)) == -3600


async def test_a_budget_counts_what_has_no_price_with_its_ceiling_and_once(books: Books):
    begun = datetime.now(UTC) - timedelta(hours=5)
    times = ("requested_at", "accepted_at", "first_seen_at", "provider_created_at")
    run = await books.run(
        meters=[gpu(None, 1), gpu(None, 1) | {"kind": "disk"}],
        ceiling_usd_per_hour=4,
        **dict.fromkeys(times, begun),
    )
    await books.tick()
    async with begin(books.engine) as conn:
        budget = budgets.Budget(
            name="b", amount_usd=Decimal(10), period="total", action="RefuseNew", pool="gpu"
        )
        await budgets.put(conn, [budget])
    await books.sql("update budget set created_at = :at", at=begun - timedelta(hours=1))

    async with begin(books.engine) as conn:
        (standing,) = await budgets.standing(conn, ["gpu"])
        (status,) = await budgets.status(conn)
    assert all(20 <= each < 21 for each in (standing.spent_usd, status.spent_usd))

    await override(books, "1", since=begun)
    await books.over(run, after_s=(begun - at(0)).total_seconds() + 3600)
    await books.tick()

    async with begin(books.engine) as conn:
        (standing,) = await budgets.standing(conn, ["gpu"])
        (status,) = await budgets.status(conn)
    assert (standing.spent_usd, status.spent_usd) == (1, 1)
