"""Runs become segments, once, whoever writes and however often; closed ones change by adjustments only."""

import asyncio
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError, IntegrityError

from app.ledger.verify import verify
from app.ledger.writer import Writer
from app.provisioning.core import run_facts
from app.store import ledger_metrics, rentals, scopes, terms
from app.store.engine import begin
from catalog.catalogue import CloudRows
from catalog.offerings import Offerings
from providers.base import Accelerator, BillsFrom, BillsUntil, Offering, Ref, ResourceId, Tier, Traits
from tests.store.ledger.test_late_prices import left_unpriced
from tests.store.ledger.world import RULE, T0, Books, at, gpu


async def test_a_run_is_a_segment_from_the_clouds_own_moment_and_open_while_it_runs(books: Books):
    run = await books.run(provider_created_at=at(-0.5))

    assert await books.tick() == 1

    (segment,) = await books.segments(run)
    assert (segment["start"], segment["end"]) == (at(-0.5), None)
    assert (segment["quantity"], segment["usd"], segment["phase"]) == (8, Decimal("2.49"), "booting")
    assert (segment["price_source"], segment["confidence"]) == ("quoted", "firm")


async def test_a_change_of_phase_closes_one_segment_and_opens_the_next_at_the_same_instant(books: Books):
    run = await books.run()
    await books.tick()
    await books.change(run, running_at=at(21), provider_started_at=at(20))
    await books.tick()
    await books.over(run, after_s=3620)
    await books.tick()

    one, two = await books.segments(run)
    assert [one["phase"], two["phase"]] == ["booting", "running"]
    assert (one["start"], one["end"], two["start"], two["end"]) == (T0, at(20), at(20), at(3620))
    assert await books.cost() == Decimal("2.49") * 8 * 3620
    assert all(each["frozen"] for each in (one, two))


@pytest.mark.behaviour(356)
async def test_cost_06_replaying_everything_leaves_the_ledger_unchanged(books: Books):
    run = await books.run()
    await books.over(run, after_s=100)
    await books.tick()
    before = await books.segments(run), await books.adjustments(run)

    for _ in range(3):
        again = Writer(engine=books.engine)  # a new leader looks at everything
        await again.tick(epoch=books.epoch)
        await books.sql("update ledger_run set facts_at = 'epoch'")

    assert (await books.segments(run), await books.adjustments(run)) == before


async def test_cost_25_two_controllers_at_once_write_one_segment(books: Books):
    run = await books.run()
    others = [Writer(engine=books.engine) for _ in range(4)]

    answers: list[Any] = await asyncio.gather(
        *(each.tick(epoch=books.epoch) for each in others), return_exceptions=True
    )

    assert all(isinstance(each, int | IntegrityError) for each in answers), answers
    assert len(await books.segments(run)) == 1
    assert await books.tick() == 0 or len(await books.segments(run)) == 1


async def test_fc_088_a_second_segment_of_the_same_seconds_is_refused_by_the_table(books: Books):
    run = await books.run()
    await books.tick()

    with pytest.raises(IntegrityError, match="billing_segment_once_excl"):
        await books.sql(
            "insert into billing_segment (run_id, label_set_id, meter, phase, period, quantity, price_source,"
            " confidence, frozen) select run_id, label_set_id, meter, phase, period, 1, 'none', 'unpriced',"
            " false from billing_segment where run_id = :run",
            run=run,
        )


async def test_a_former_leader_writes_nothing(books: Books):
    await books.run()

    assert await books.writer.tick(epoch=books.epoch - 1) == 0
    assert await books.sql("select * from billing_segment") == []


async def test_closed_segments_and_adjustments_are_frozen_whoever_writes(books: Books):
    await books.open(replace(RULE, minimum_s=600))
    run = await books.run()
    await books.over(run, after_s=100)
    await books.tick()

    for statement in (
        "update billing_segment set usd = 0",
        "delete from billing_segment",
        "update billing_adjustment set dollar_seconds = 0",
        "delete from billing_adjustment",
    ):
        with pytest.raises(DBAPIError, match=r"frozen|never changed"):
            await books.sql(statement)


async def test_cost_15_a_late_price_is_one_adjustment_and_a_second_arrival_none(books: Books):
    run = await books.run(meters=[gpu(None)])
    await books.over(run, after_s=3600)
    await books.tick()
    assert await books.cost() == 0
    assert [row["hours"] for row in await books.sql("select hours from unpriced")] == [1]

    for _ in range(2):
        await books.change(run, meters='[{"kind": "gpu", "quantity": "8", "usd": "2.49", "label": ""}]')
        await books.tick()
        await books.sql("update ledger_run set facts_at = 'epoch'")

    (adjustment,) = await books.adjustments(run)
    assert (adjustment["kind"], adjustment["dollar_seconds"]) == ("late_price", Decimal("2.49") * 8 * 3600)
    assert await books.cost() == Decimal("2.49") * 8 * 3600
    (segment,) = await books.segments(run)
    assert (segment["usd"], segment["confidence"]) == (None, "unpriced")
    assert await books.sql("select * from unpriced") == []


async def test_a_contract_price_that_comes_late_leaves_nothing_unpriced(books: Books):
    """The machine's price is another meter than the one without: its seconds move, and count once."""
    run = await books.run(meters=[gpu(None)], ceiling_usd_per_hour=Decimal(25))
    await books.over(run, after_s=7200)
    await books.tick()
    assert await _told_unpriced(books) == (1, 1)
    values = {"provider": "modal", "account": "default", "sku": "*", "tier": "*", "set_by": "", "reason": ""}

    async with begin(books.engine) as conn:
        await terms.override(conn, usd_per_hour=Decimal(1), since=at(3600), until=at(9000), **values)
    await books.tick()
    assert await _told_unpriced(books) == (1, 1)  # of the first hour nobody knows it still
    assert await left_unpriced(books) == [(at(0), at(3600), 1)]
    async with begin(books.engine) as conn:
        await terms.override(conn, usd_per_hour=Decimal("1.1"), since=at(-60), until=at(3600), **values)
    await books.tick()

    assert await _told_unpriced(books) == (0, 0)
    assert await books.cost() == Decimal("1.1") * 3600 + 3600


async def test_an_end_that_comes_late_prices_nothing(books: Books):
    """Its last seconds had a price, and are taken off; of its first hour nobody knows it all the same."""
    told = '[{"at": "2026-03-01T13:00:00+00:00", "meters": [{"kind": "gpu", "quantity": "8", "usd": "1"}]}]'
    run = await books.run(meters=[gpu(None)])
    await books.change(run, repriced=told, terminate_asked_at=at(7207), gone_at=at(7210))
    await books.tick()
    await books.change(run, provider_ended_at=at(7200), end_reason="terminated")
    await books.tick()

    (late,) = await books.adjustments(run)
    assert (late["kind"], late["seconds"], late["dollar_seconds"]) == ("late_fact", -7, -56)
    assert await _told_unpriced(books) == (1, 1)


async def _told_unpriced(books: Books) -> tuple[int, int]:
    """By the view, and by the gauge."""
    async with begin(books.engine) as conn:
        found = await ledger_metrics.read(conn, epoch=books.epoch)
    (health,) = found["health"] or [{"unpriced": 0}]
    return len(await books.sql("select * from unpriced")), health["unpriced"]


async def test_a_time_that_comes_late_corrects_a_closed_run_by_one_adjustment(books: Books):
    run = await books.run()
    await books.change(run, terminate_asked_at=at(107), gone_at=at(110))
    await books.tick()
    assert [each["confidence"] for each in await books.segments(run)] == ["estimated"]

    await books.change(run, provider_ended_at=at(100), end_reason="terminated")
    await books.tick()

    (adjustment,) = await books.adjustments(run)
    assert (adjustment["kind"], adjustment["seconds"]) == ("late_fact", -7)
    assert await books.cost() == Decimal("2.49") * 8 * 100


async def test_cost_23_a_failed_attempt_that_billed_counts_for_its_namespace(books: Books):
    run = await books.run(end_reason="failed")
    await books.change(run, exited_at=at(38), terminate_asked_at=at(40), gone_at=at(41))
    await books.tick()

    assert await books.cost(namespace="team-a") == Decimal("2.49") * 8 * 40
    assert await books.cost(namespace="team-b") == 0


async def _ordered(books: Books, **values: str) -> None:
    """One order of claim ``c``, as provisioning writes it."""
    await books.sql(
        "insert into rental (claim_uid, claim_name, pod_namespace, pod_name, pod_uid, pool,"
        " provider, account,"
        " region, tier, accelerator, state, epoch) values ('c', 'c', 'ns', 'p', 'u', 'gpu', 'modal',"
        " 'default', '', :tier, :accelerator, 'open', 1)",
        **values,
    )
    await books.sql(
        "insert into provision_attempt (claim_uid, number, sequence, identity, provider, account,"
        " region, tier,"
        " accelerator, ceiling_usd_per_hour, epoch, send_by) values ('c', 1, 1, 'x', 'modal', 'default', '',"
        " :tier, :accelerator, 25, 1, now())",
        **values,
    )


async def test_fc_085_attempts_that_made_nothing_have_no_rows(books: Books):
    await _ordered(books, tier="Spot", accelerator="H100:8")
    await books.tick()

    (open_order,) = await books.sql("select usd_per_hour from exposure")
    assert open_order["usd_per_hour"] == 25
    assert await books.cost() == 0

    await books.sql("update provision_attempt set outcome = 'rejected', settled_at = now()")
    assert await books.sql("select * from exposure") == []
    assert await books.cost() == 0


async def test_attribution_is_what_was_said_when_the_machine_was_rented(books: Books):
    run = await books.run(labels={"team": "vision", "app": "x"}, region="us-west")
    await books.over(run, after_s=60)
    await books.tick()
    await books.sql("""update claim set labels = '{"team": "other"}'""")
    await books.sql("update ledger_run set facts_at = 'epoch'")
    await books.tick()

    (labels,) = await books.sql("select * from label_set l join billing_segment s on s.label_set_id = l.id")
    assert (labels["team"], labels["workload_kind"], labels["workload_name"]) == (
        "vision",
        "Deployment",
        "train",
    )
    assert (labels["region"], labels["accelerator"], labels["accelerator_count"]) == ("us-west", "H100", 8)
    assert labels["tags"] == {"team": "vision", "app": "x"}


async def test_an_accelerator_is_one_group_however_pods_write_its_name(books: Books):
    offerings = Offerings()
    listed = Offering(
        provider="modal",
        account="default",
        region="",
        tier=Tier.ON_DEMAND,
        shape="s",
        accelerator=Accelerator(type="H100", count=8),
        meters=(),
    )
    offerings.put("modal", "default", traits=Traits(tiers=frozenset(Tier)), offerings=[listed])
    books.writer = Writer(engine=books.engine, offerings=offerings)
    for name in ("H100:8", "h100:8", "Unlisted:1"):
        await books.run(accelerator=name)
    await books.tick()

    rows = await books.sql("select distinct accelerator, accelerator_count from label_set order by 1")
    assert [tuple(row.values()) for row in rows] == [("H100", 8), ("Unlisted", 1)]


async def test_a_prepayment_covers_what_the_ledger_calls_a_machine_however_its_pod_does(books: Books):
    offerings = Offerings()
    listed = Offering(
        provider="modal",
        account="default",
        region="",
        tier=Tier.ON_DEMAND,
        shape="s",
        accelerator=Accelerator(type="A10G", count=1),
        meters=(),
    )
    offerings.put(
        "modal",
        "default",
        traits=Traits(tiers=frozenset(Tier)),
        offerings=[listed],
        written=CloudRows(adapter="modal", aliases={"a10": "A10G"}),
    )
    books.writer = Writer(engine=books.engine, offerings=offerings)
    run = await books.run(accelerator="A10:1", meters=[gpu("5", 1)], claim_uid="c")
    await _ordered(books, tier="OnDemand", accelerator="A10:1")
    common = {"provider": "modal", "account": "default", "tier": "*", "amount_usd": Decimal(100),
              "since": at(0), "until": at(36000), "set_by": "", "reason": ""}  # fmt: skip
    async with begin(books.engine) as conn:
        await terms.commitment(conn, sku="A10:1", usd_per_hour=Decimal(2), **common)
        await terms.commitment(conn, sku="A10G:1", usd_per_hour=Decimal(1), **common)
    await books.tick()

    assert [(row["price_source"], row["usd"]) for row in await books.segments(run)][:1] == [("commitment", 1)]
    await books.over(run, after_s=3600)
    await books.tick()
    assert [row["used_usd"] for row in await _commitments(books)] == [1, 0]
    async with begin(books.engine) as conn:
        assert await verify(conn) == []
        await scopes.expect_known(conn, {"sku": "A10G:1"}, provider="modal")
        with pytest.raises(scopes.UnknownName, match="did you mean A10G:1"):
            await scopes.expect_known(conn, {"sku": "A10:1"}, provider="modal")


async def _commitments(books: Books) -> list[dict[str, Any]]:
    async with begin(books.engine) as conn:
        return await terms.commitments(conn)


@pytest.mark.field_case("FC-081")
async def test_cost_14_clocks_that_step_back_make_no_negative_interval(books: Books):
    run = await books.run(accepted_at=at(300), running_at=at(20), provider_created_at=None)
    await books.change(run, exited_at=at(10), terminate_asked_at=at(5), gone_at=at(2))
    await books.tick()

    for each in await books.segments(run):
        assert each["start"] < each["end"]


@pytest.mark.field_case("FC-081")
async def test_a_clouds_time_that_cannot_be_true_is_not_believed(books: Books):
    run = await books.run(provider_created_at=at(-86400))
    await books.tick()

    (segment,) = await books.segments(run)
    assert (segment["start"], segment["confidence"]) == (T0, "estimated")


@pytest.mark.field_case("FC-081")
async def test_a_cloud_clock_that_is_off_is_shifted_as_a_whole(books: Books):
    run = await books.run(provider_created_at=at(90.25), clock_offset_s=90.0)
    await books.over(run, after_s=190.75)
    await books.tick()

    (segment,) = await books.segments(run)
    assert (segment["start"], segment["end"]) == (at(0.25), at(100.75))


async def test_fc_086_an_end_that_nobody_saw_is_when_the_machine_was_last_there(books: Books):
    run = await books.run(resource_id="lost")
    await books.change(run, running_at=at(10), provider_started_at=at(10), gone_at=at(7300))
    await books.sql(
        "insert into instance_seen (provider, account, resource_id, region, state, absent_since)"
        " values ('modal', 'default', 'lost', 'us-east', 'running', :since)",
        since=at(7290),
    )
    await books.sql(
        "insert into list_round (provider, account, region, complete, machines, began_at, last_began_at,"
        " last_ended_at) values ('modal', 'default', 'us-east', true, 1, :from, :last, :last),"
        " ('modal', 'default', 'us-east', true, 0, :since, :since, :since)",
        **{"from": T0, "last": at(95), "since": at(7290)},
    )
    await books.tick()
    first = await books.cost()

    assert first == Decimal("2.49") * 8 * 95
    assert {each["confidence"] for each in await books.segments(run) if each["phase"] == "running"} == {
        "estimated"
    }
    for _ in range(3):
        await books.tick()
        assert await books.cost() == first


@pytest.mark.parametrize("price", ["-1", "250000", "NaN"])
async def test_an_absurd_price_is_unpriced_with_its_reason_and_loses_no_second(books: Books, price: str):
    run = await books.run(meters=[gpu(price)])
    await _listed(books, run, usd="2.49")
    await books.tick()

    (segment,) = await books.segments(run)
    assert (segment["start"], segment["usd"], segment["confidence"]) == (T0, None, "unpriced")
    (row,) = await books.sql("select why from unpriced")
    assert "absurd" in row["why"]


async def _listed(books: Books, run: int, *, usd: str) -> None:
    """The catalogue's price for the run's shape, of another tier, so that it is no substitute."""
    await books.sql(
        "insert into rental (claim_uid, claim_name, pod_namespace, pod_name, pod_uid, pool,"
        " provider, account,"
        " region, tier, accelerator, state, epoch) select claim_uid, claim_uid, pod_namespace, pod_name,"
        " pod_uid, pool, provider, account, region, tier, accelerator, 'open', 1 from run where id = :run",
        run=run,
    )
    await books.sql(
        "insert into provision_attempt (claim_uid, number, sequence, identity, provider, account,"
        " region, tier,"
        " accelerator, shape, epoch, send_by, outcome, settled_at) select claim_uid, 1, id, 'i' ||"
        " id, provider,"
        " account, region, tier, accelerator, 'h100x8', 1, now(), 'accepted', now() from run where id = :run",
        run=run,
    )
    await books.sql("update run set tier = 'Spot' where id = :run", run=run)
    await books.sql(
        "insert into price_point (provider, account, sku, region, tier, meter, unit, quantity, usd, valid,"
        " source) values ('modal', 'default', 'h100x8', 'us-east', 'OnDemand', 'gpu', 'unit-hour', 8,"
        " cast(:usd as numeric), tstzrange('2020-01-01', null), 'catalog')",
        usd=usd,
    )


async def test_the_list_price_on_demand_stands_beside_what_a_spot_machine_costs(books: Books):
    run = await books.run(meters=[gpu("0.99")])
    await _listed(books, run, usd="2.49")
    await books.tick()

    (segment,) = await books.segments(run)
    assert (segment["usd"], segment["list_usd"]) == (Decimal("0.99"), Decimal("2.49"))


@pytest.mark.parametrize("price", ["0", "1", "1.23"])
async def test_fc_093_a_price_that_a_person_has_set_is_used_exactly(books: Books, price: str):
    run = await books.run()
    before = await books.run()
    await books.over(before, after_s=100)
    await books.tick()

    await books.sql(
        "insert into price_override (provider, account, sku, tier, usd_per_hour, valid, set_by, reason)"
        " values ('modal', '*', 'h100:8', '*', cast(:usd as numeric), tstzrange(:since, null),"
        " 'me', 'contract')",
        usd=price,
        since=at(0),
    )
    await books.tick()
    await books.over(run, after_s=3600)
    await books.tick()

    (segment,) = await books.segments(run)
    assert (segment["usd"], segment["price_source"], segment["meter"]) == (
        Decimal(price),
        "override",
        "machine",
    )
    assert await books.cost() == Decimal(price) * 3700  # the closed one by adjustments


async def test_a_tick_is_one_read_and_one_write_for_a_whole_batch(books: Books):
    runs = [await books.run() for _ in range(50)]
    said: list[str] = []

    @event.listens_for(books.engine.sync_engine, "before_cursor_execute")
    def _(_conn: Any, _cursor: Any, statement: str, *_: Any) -> None:
        said.append(statement)

    await books.tick()

    assert len(said) <= 5
    assert len(runs) == 50


async def test_a_rule_without_booting_starts_with_the_machine(books: Books):
    await books.open(replace(RULE, starts=BillsFrom.STARTED, until=BillsUntil.ENDED))
    run = await books.run()
    await books.tick()
    assert await books.segments(run) == []

    await books.change(run, running_at=at(31), provider_started_at=at(30))
    await books.tick()

    assert [each["start"] for each in await books.segments(run)] == [at(30)]


async def test_what_a_cloud_shows_later_is_kept_with_its_time(books: Books):
    """Another price while it runs, and an end of its workload that a restart has undone."""
    run = await books.run(resource_id="m", meters=[gpu("2")])
    shown: dict[str, Any] = run_facts(
        Ref(provider="modal", account="default", region="", resource_id=ResourceId("m")), None, gone=False
    )
    async with begin(books.engine) as conn:
        for facts in (
            {"running": True, "provider_started_at": at(10), "meters": [gpu("2")]},
            {"running": True, "again": True, "meters": [gpu("3")]},
            {"running": True, "again": True, "meters": [gpu("3")]},
            {"exited": True, "provider_ended_at": at(60), "meters": []},
            {"running": True, "again": True, "meters": [gpu("3")]},
        ):
            await rentals.observe(conn, [shown | facts])

    (row,) = await books.sql("select repriced, stops, provider_ended_at from run where id = :id", id=run)
    assert [each["meters"][0]["usd"] for each in row["repriced"]] == ["3"]
    assert [each["ended"][:19] for each in row["stops"]] == [at(60).isoformat()[:19]]
    assert row["provider_ended_at"] is None
    await books.tick()
    assert [each["usd"] for each in await books.segments(run)][-1] == 3
