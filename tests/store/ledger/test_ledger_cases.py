"""What went wrong for other people, on the ledger."""

from dataclasses import replace
from decimal import Decimal
from typing import Any

from app.cli.cost import footer
from app.store import costs, ledger_metrics
from app.store.costs import Window
from app.store.engine import begin
from providers.base import BillingRule, BillsFrom, BillsUntil, MeterKind
from tests.store.ledger.world import RULE, T0, Books, at, gpu


async def test_fc_083_the_price_that_is_paid_counts_and_not_the_one_that_was_asked_for(books: Books):
    run = await books.run(meters=[gpu("1.52", 1)], ceiling_usd_per_hour=Decimal("0.98"))
    await books.over(run, after_s=3600)
    await books.sql(
        "insert into price_point (provider, account, sku, region, tier, meter, unit, quantity, usd,"
        " valid, source)"
        " values ('modal', 'default', '', 'us-east', 'OnDemand', 'gpu', 'unit-hour', 1, 0.98,"
        " tstzrange('2020-01-01', null), 'catalog')"
    )
    await books.tick()

    assert await books.cost() == Decimal("1.52") * 3600
    other = await books.run(meters=[gpu("1.52", 1)])
    await books.tick()
    assert len(await books.segments(other)) == 1
    (drift,) = await books.sql("select paid_unit_price, listed_unit_price, delta from price_drift")
    assert (drift["paid_unit_price"], drift["delta"]) == (Decimal("1.52"), Decimal("0.54"))


async def test_fc_087_a_stopped_machine_goes_on_costing_its_disk_until_it_is_gone(books: Books):
    disk = {"kind": "disk", "quantity": "100", "usd": "0.0002", "label": ""}
    await books.open(
        BillingRule(kind=None, starts=BillsFrom.ACCEPTED, until=BillsUntil.ENDED, step_s=0),
        BillingRule(kind=MeterKind.DISK, starts=BillsFrom.ACCEPTED, until=BillsUntil.GONE, step_s=0),
    )
    run = await books.run(meters=[gpu("2", 1), disk])
    await books.change(
        run, running_at=T0, provider_started_at=T0, exited_at=at(100), provider_ended_at=at(100)
    )
    await books.tick()
    (burn,) = await books.sql("select phase, usd_per_hour from burn_rate")
    assert (burn["phase"], burn["usd_per_hour"]) == ("stopped", Decimal("0.02"))

    await books.change(run, terminate_asked_at=at(400), gone_at=at(500))
    await books.tick()

    assert await books.cost() == 2 * 100 + Decimal("0.02") * 500
    reasons = await books.sql("select reason, cost from waste order by 1")
    assert [row["reason"] for row in reasons] == ["draining", "stopped_storage"]


async def test_fc_092_an_old_price_list_says_how_old_it_is_and_the_quoted_price_wins(books: Books):
    await books.sql(
        "insert into price_point (provider, account, sku, region, tier, meter, unit, quantity, usd,"
        " valid, source,"
        " observed_at) values ('modal', 'default', 'h100x8', 'us-east', 'OnDemand', 'gpu', 'unit-hour', 8, 1,"
        " tstzrange('2020-01-01', null), 'catalog', now() - interval '90 days')"
    )
    run = await books.run(meters=[gpu("2")])
    await books.tick()

    assert [each["usd"] for each in await books.segments(run)] == [2]
    window = Window(since=at(-60), until=at(60))
    async with begin(books.engine) as conn:
        foot = await costs.footer(conn, window)
        health = (await ledger_metrics.read(conn, epoch=books.epoch))["health"]
    assert "newest listed price 90d old" in footer([], window=window, foot=foot)
    assert health[0]["price_age_s"] > 89 * 86400


async def test_cost_08_waste_and_useful_are_the_whole(books: Books):
    await books.open(replace(RULE, minimum_s=600))
    for after_s, columns in (
        (3600, {"running_at": at(300), "provider_started_at": at(300)}),
        (60, {"end_reason": "failed"}),
        (900, {"extra": True}),
        (900, {"pod_namespace": "", "pod_name": ""}),
    ):
        run = await books.run(meters=[gpu("2.4901")])
        await books.over(run, after_s=after_s, **{"end_reason": "terminated", **columns})
    await books.tick()

    rows = await books.sql("select reason, cost from waste")
    (useful,) = await books.sql(
        "select sum(effective_cost) as sum from charge_daily('UTC') where reason = 'useful'"
    )
    assert {row["reason"] for row in rows} == {
        "booting",
        "failed_provision",
        "minimum_charge",
        "duplicate",
        "orphan",
    }
    total = sum((row["cost"] for row in rows), Decimal(0)) + useful["sum"]
    assert abs(total - await books.cost() / 3600) < Decimal("1e-12")


async def test_cost_27_what_waits_for_the_store_is_late_and_not_lost_or_doubled(books: Books):
    run = await books.run()
    await books.change(run, running_at=at(20), provider_started_at=at(20))

    async def lag() -> Any:
        async with begin(books.engine) as conn:
            return (await ledger_metrics.read(conn, epoch=books.epoch))["health"][0]["lag_s"]

    assert await lag() > 0
    await books.over(run, after_s=600)
    await books.tick()

    assert [(each["start"], each["end"]) for each in await books.segments(run)] == [
        (T0, at(20)),
        (at(20), at(600)),
    ]
    assert await books.cost() == Decimal("2.49") * 8 * 600
