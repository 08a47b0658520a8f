"""What went wrong for other people, on the ledger."""

import json
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from app.cli.cost import footer
from app.ledger.verify import verify
from app.store import costs, ledger_metrics
from app.store.costs import Window
from app.store.devserver import DevPostgres
from app.store.engine import StoreUnavailable, begin, create_engine
from app.store.migrate import migrate
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


@pytest.mark.slow
async def test_cost_27_ten_minutes_without_a_database_lose_nothing_and_double_nothing(
    own_server: DevPostgres,
):
    """Machines go on, end and change their price while the server is down; leaders come and go in vain."""
    await migrate(own_server.url, report=lambda line: None)
    engine = create_engine(own_server.url, timeout_s=5)
    books = await Books(engine).open()
    runs = [await books.run(meters=[gpu("1.37")]) for _ in range(3)]
    await books.tick()
    own_server.stop()
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            await type(books.writer)(engine=engine).tick(epoch=books.epoch)
    own_server.start()

    # What provisioning writes once it can: all of it happened in those ten minutes, by the cloud's own clock.
    await books.over(runs[0], after_s=600)
    await books.change(
        runs[1], repriced=f'[{{"at": "{at(300).isoformat()}", "meters": [{json.dumps(gpu("2"))}]}}]'
    )
    async with begin(engine) as conn:
        lag = (await ledger_metrics.read(conn, epoch=books.epoch))["health"][0]["lag_s"]
    assert lag > 0
    await books.tick()
    await type(books.writer)(engine=engine).tick(epoch=books.epoch)

    assert [(each["start"], each["end"]) for each in await books.segments(runs[0])] == [(T0, at(600))]
    assert [(each["start"], each["usd"]) for each in await books.segments(runs[1])] == [
        (T0, Decimal("1.37")),
        (at(300), Decimal(2)),
    ]
    assert [(each["start"], each["end"]) for each in await books.segments(runs[2])] == [(T0, None)]
    assert await books.cost(T0, at(600)) == (3 * Decimal("1.37") * 600 + Decimal("0.63") * 300) * 8
    async with begin(engine) as conn:
        assert await verify(conn) == []
        assert (await ledger_metrics.read(conn, epoch=books.epoch))["health"][0]["lag_s"] is None
    await engine.dispose()


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


async def test_cost_24_an_orphan_found_after_three_hours_costs_whom_it_was_rented_for(books: Books):
    run = await books.run(meters=[gpu("2.4901")], running_at=at(60), provider_started_at=at(60))
    (row,) = await books.sql("select resource_id, claim_uid from run where id = :id", id=run)
    await books.sql(
        "insert into orphan_finding (key, kind, mark, installation, provider, account, region, resource_id,"
        " claim_uid, provider_state, namespace, workload, exists_since, why, decision, decided_by,"
        " executed_at)"
        " values ('no-claim:m', 'no-claim', '', 'abcdefghij', 'modal', 'default', '', :resource_id,"
        " :claim_uid,"
        " 'running', 'team-a', 'train', :since, 'its claim is gone', 'terminate', 'sweep', :found)",
        since=at(0),
        found=at(3 * 3600),
        **row,
    )
    await books.over(run, after_s=3 * 3600)
    await books.tick()

    wasted = await books.sql("select reason, namespace, sum(cost) as cost from waste group by 1, 2")
    assert [(row["reason"], row["namespace"]) for row in wasted] == [("orphan", "team-a")]
    cost = await books.cost(namespace="team-a", team="vision", workload_name="train")
    assert cost == Decimal("2.4901") * 8 * 3 * 3600
    assert abs(wasted[0]["cost"] - cost / 3600) < Decimal("1e-12")
    async with begin(books.engine) as conn:
        shown = await ledger_metrics.read(conn, epoch=books.epoch)
        again = await ledger_metrics.read(conn, epoch=books.epoch)
    assert [(row["reason"], row["provider"]) for row in shown["waste"]] == [("orphan", "modal")]
    assert shown["waste"] == again["waste"]  # counted once


async def test_cost_26_a_machine_whose_answer_was_never_written_down_has_one_segment_from_its_birth(
    books: Books,
):
    """Killed between the create call and the commit: the run is made of what the cloud's list shows later."""
    run = await books.run(accepted_at=None, first_seen_at=at(90), provider_created_at=at(3))
    await books.tick()
    books.writer = type(books.writer)(
        engine=books.engine
    )  # and killed again, before anybody heard of the tick
    await books.tick()
    await books.over(run, after_s=600)
    await books.tick()

    (segment,) = await books.segments(run)
    assert (segment["start"], segment["end"], segment["confidence"]) == (at(3), at(600), "firm")
