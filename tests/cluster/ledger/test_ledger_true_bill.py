"""Ledger = the cloud's true bill, to the last digit, whatever became of machines and controller."""

import asyncio
from decimal import Decimal
from typing import Any

import pytest

from app.ledger.rules import total
from tests.cluster.ledger.conftest import World
from tests.support.bill import expect_the_true_bill
from tests.support.clouds import SMALL
from tests.support.composed import until

GROUPINGS = (
    "namespace",
    "pool",
    "provider",
    "accelerator",
    "tier",
    "workload_name",
    "region",
    "label_set_id",
)


@pytest.mark.behaviour(356)
async def test_the_ledger_equals_the_clouds_true_bill_to_the_last_digit(world: World):
    """Reclaims, exits, failed starts, a lost answer, a change of leader: every second once."""
    cloud = world.cloud
    async with world.running() as parts:
        claims = [await world.claim(accelerator="H100:8", capacityType="Spot") for _ in range(3)]
        claims += [await world.claim(capacityType="OnDemand") for _ in range(2)]
        await cloud.add_fault("lost", verb="create")
        ids = [await parts.rent(claim) for claim in claims]
        await cloud.preempt(ids[0])
        await until(lambda: _running(world, ids[3]), what="it runs")
        await cloud.exit(ids[3], code=0)
        await cloud.fail(ids[4])
        await world.release(parts, claims[0])
    # Nobody keeps books for a while; a machine that nobody asked to end disappears.
    async with world.running(ledger=False) as parts:
        await cloud.remove(ids[1])
        await world.release(parts, claims[2])
    async with world.running() as parts:
        for claim in claims:
            await world.release(parts, claim)
        await world.billed()

        truth = await cloud.truth()
        billed = await expect_the_true_bill(world.engine, truth["machines"])
        assert billed == Decimal(truth["bill_usd"]) > 0

        await _any_grouping_is_the_same(world)
        await _any_split_is_the_same(world)


async def _running(world: World, machine: str) -> bool:
    rows = await world.rows(
        "select 1 from run where resource_id = :id and running_at is not null", id=machine
    )
    return bool(rows)


async def _any_grouping_is_the_same(world: World) -> None:
    (whole,) = await world.rows(
        "select sum(billed_dollar_seconds) as sum from charge_between('2020-01-01', '2100-01-01')"
    )
    for name in GROUPINGS:
        groups = await world.rows(
            f"select l.{'id' if name == 'label_set_id' else name}, sum(c.billed_dollar_seconds) as sum"
            " from cost_lines('2020-01-01', '2100-01-01', 'day', 'Asia/Kathmandu') c"
            " join label_set l on l.id = c.label_set_id group by 1"
        )
        assert total([row["sum"] for row in groups]) == whole["sum"], name


async def _any_split_is_the_same(world: World) -> None:
    edges: list[Any] = [
        row["at"]
        for row in await world.rows(
            "select lower(period) + random() * (upper(period) - lower(period)) as at from billing_segment"
            " union select lower(period) from billing_segment order by 1"
        )
    ]
    whole = await world.rows(
        "select billed_dollar_seconds as s from charge_between('2020-01-01', '2100-01-01')"
    )
    parts = []
    for low, high in zip(["-infinity", *edges], [*edges, "infinity"], strict=True):
        parts += await world.rows(
            "select billed_dollar_seconds as s from charge_between("
            f"{'timestamptz ' + repr(low) if isinstance(low, str) else ':low'},"
            f" {'timestamptz ' + repr(high) if isinstance(high, str) else ':high'})",
            **{name: value for name, value in (("low", low), ("high", high)) if not isinstance(value, str)},
        )
    assert total([row["s"] for row in whole]) == total([row["s"] for row in parts])


class TestACloudThatTellsItsTimes:
    """One that shows ended machines for a while: run facts alone are enough, and its bill changes nothing."""

    @pytest.fixture
    def scenario(self) -> dict[str, Any]:
        return SMALL | {"history_s": 30, "life": {"boot_s": 0.2}, "billing": {"unit_s": 0}}

    async def test_run_facts_alone_give_the_true_bill(self, world: World):
        async with world.running() as parts:
            claims = [await world.claim(accelerator="H100:8", capacityType="Spot") for _ in range(3)]
            for claim in claims:
                await parts.rent(claim)
            await asyncio.sleep(0)
            for claim in claims:
                await world.release(parts, claim)
            await world.billed()

            assert await world.cost() == await world.cloud.bill_usd() > 0
            kinds = await world.rows("select kind from billing_adjustment where kind = 'invoice_true_up'")
            assert kinds == []


async def test_fc_084_price_times_hours_of_one_and_of_eight_is_the_clouds_bill(world: World):
    async with world.running() as parts:
        for accelerator in ("H100:1", "H100:8"):
            claim = await world.claim(accelerator=accelerator)
            await parts.rent(claim)
            await world.release(parts, claim)
        await world.billed()

        rows = await world.rows("select accelerator, usd_per_hour from run order by 1")
        assert [(row["accelerator"], row["usd_per_hour"]) for row in rows] == [
            ("H100:1", Decimal("4.2136")),
            ("H100:8", Decimal("33.6129")),
        ]
        assert await world.cost() == await world.cloud.bill_usd()


@pytest.mark.behaviour(355)
async def test_burn_is_the_sum_of_what_runs_and_nothing_after_the_last_end(world: World):
    async with world.running() as parts:
        claim = await world.claim(accelerator="H100:8", capacityType="Spot")
        await parts.rent(claim)

        async def burn() -> list[dict[str, Any]]:
            return await world.rows("select provider_name, capacity_type, usd_per_hour, gpus from burn_rate")

        (row,) = await until(burn, what="a burn rate")
        assert row == {
            "provider_name": "modal",
            "capacity_type": "Spot",
            "usd_per_hour": Decimal("19.9345"),
            "gpus": 8,
        }
        await world.release(parts, claim)

        async def none() -> bool:
            return not await burn()

        await until(none, what="no burn")


async def test_cost_26_an_answer_that_was_lost_leaves_one_segment_from_the_clouds_own_moment(world: World):
    async with world.running() as parts:
        claim = await world.claim()
        await world.cloud.add_fault("lost", verb="create")
        machine = await parts.rent(claim)

        async def segments() -> list[dict[str, Any]]:
            return await world.rows(
                "select lower(s.period) as start, r.provider_created_at, r.resource_id from billing_segment s"
                " join run r on r.id = s.run_id where s.meter = 'gpu' order by 1"
            )

        rows = await until(segments, what="a segment")
        assert (rows[0]["start"], rows[0]["resource_id"]) == (rows[0]["provider_created_at"], machine)
        await world.release(parts, claim)
