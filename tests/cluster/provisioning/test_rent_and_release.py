"""One claim, one machine; after release, none."""

import asyncio
from dataclasses import replace

import pytest
from sqlalchemy import text

from app.provisioning.model import Over, Releasing, Rented, Waiting, Why
from providers.base import Accelerator, RejectionKind, Tier
from tests.cluster.provisioning.conftest import Bench

GIB = 2**30


async def test_a_claim_rents_one_machine_and_release_ends_it(bench: Bench):
    async with bench.running():
        claim = await bench.claim()

        rented = await bench.rented(claim)

        (machine,) = await bench.cloud.alive()
        assert machine["id"] == rented.ref.resource_id
        run = await bench.row("select * from run")
        assert (run.resource_id, run.attempt, run.extra) == (rented.ref.resource_id, 1, False)
        assert run.requested_at <= run.accepted_at

        await bench.release(claim)

        assert await bench.cloud.alive() == []
        rental = await bench.row("select * from rental")
        assert (rental.state, rental.ending_reason) == ("ended", "test")
        run = await bench.row("select * from run")
        assert run.accepted_at <= run.terminate_asked_at <= run.gone_at


@pytest.mark.behaviour(148)
@pytest.mark.field_case("FC-011")
async def test_twenty_calls_at_once_rent_one_machine(bench: Bench):
    async with bench.running():
        claim = await bench.claim()

        outcomes = await asyncio.gather(*(bench.ensure(claim) for _ in range(20)))

        assert all(isinstance(outcome, Rented) for outcome in outcomes)
        assert list((await bench.cloud.creates()).values()) == [1]


async def test_a_released_claim_is_never_rented_for_again(bench: Bench):
    async with bench.running():
        claim = await bench.claim()
        await bench.rented(claim)
        await bench.release(claim)

        assert isinstance(await bench.ensure_once(claim), Over)

    async with bench.running():  # nor by a process that remembers nothing
        assert isinstance(await bench.ensure_once(claim), Over)
        assert len(await bench.cloud.machines()) == 1


@pytest.mark.behaviour(121, 125)
async def test_the_claim_is_marked_before_anything_is_sent(bench: Bench):
    async with bench.running():
        claim = await bench.claim()
        held = await bench.cloud.pause(verb="create")
        renting = asyncio.create_task(bench.ensure(claim))

        async with asyncio.timeout(10):
            while (live := await bench.door.look(claim)) is None or live.mark is None:
                await asyncio.sleep(0.01)
        attempt = await bench.row("select * from provision_attempt")

        assert (live.mark.sequence, live.mark.send_by) == (attempt.sequence, attempt.send_by)
        assert attempt.outcome is None
        await bench.cloud.resume(held)
        assert isinstance(await renting, Rented)


@pytest.mark.behaviour(139)
async def test_a_typed_refusal_blocks_its_scope_and_is_told_again_after_a_restart(bench: Bench):
    async with bench.running():
        await bench.cloud.set_capacity(0, tier="Spot", accelerator="H100", region="r1")
        claim = await bench.claim(tier="Spot")

        refused = await bench.refused(claim)

        assert refused.kind is RejectionKind.CAPACITY
        block = await bench.row("select * from block")
        assert (block.provider, block.tier, block.region, block.kind) == ("fake", "Spot", "r1", "capacity")
        assert block.accelerator == "h100:1"

    async with bench.running():
        again = await bench.ensure_once(claim)
        assert again == refused
        assert list((await bench.cloud.creates()).values()) == [1]
        await bench.release(claim)


@pytest.mark.behaviour(179)
async def test_two_machines_of_two_claims_are_not_mixed_up(bench: Bench):
    async with bench.running():
        first, second = await bench.claim(), await bench.claim(region="r2")
        await asyncio.gather(bench.rented(first), bench.rented(second))

        await bench.release(first)

        (left,) = await bench.cloud.alive()
        run = await bench.row("select * from run where claim_uid = :uid", uid=second.uid)
        assert left["id"] == run.resource_id


@pytest.mark.behaviour(293, 301)
@pytest.mark.field_case("FC-006")
async def test_release_during_a_create_leaves_nothing(bench: Bench):
    """The create is on its way when release begins: its machine is found and ended all the same."""
    async with bench.running():
        claim = await bench.claim()
        held = await bench.cloud.pause(verb="create", when="after")
        renting = asyncio.create_task(bench.ensure_once(claim))
        await bench.cloud.until(lambda truth: len(truth["machines"]) == 1)

        releasing = asyncio.create_task(bench.release(claim))
        await bench.until_row("select 1 from rental where state = 'ending'")
        await bench.cloud.resume(held)

        assert isinstance(await renting, (Over, Waiting))
        await releasing
        assert await bench.cloud.alive() == []


@pytest.mark.behaviour(295)
@pytest.mark.field_case("FC-019")
async def test_a_claim_without_a_mark_ends_at_once(bench: Bench):
    async with bench.running():
        claim = await bench.claim()

        await bench.release(claim)

        assert (await bench.row("select state from rental")).state == "ended"
        assert await bench.cloud.creates() == {}


async def test_nothing_is_rented_by_a_replica_that_does_not_lead(bench: Bench):
    async with bench.running():
        claim = await bench.claim()
        bench.leader.leads = False

        outcome = await bench.ensure_once(claim)

        assert isinstance(outcome, Waiting)
        assert outcome.why is Why.NOT_LEADER
        assert await bench.cloud.creates() == {}


@pytest.mark.behaviour(403)
async def test_a_newer_epoch_stops_a_send_at_the_fence(bench: Bench):
    async with bench.running():
        claim = await bench.claim()
        bench.leader.epoch = (bench.leader.epoch or 0) - 1  # somebody else has written a higher one

        outcome = await bench.ensure_once(claim)

        assert isinstance(outcome, Waiting)
        assert await bench.cloud.creates() == {}


async def test_a_refusal_of_one_host_is_tried_again_without_it(bench: Bench):
    async with bench.running():
        await bench.cloud.add_fault("refuse", verb="create", code="capacity", host="h-7")
        claim = await bench.claim()

        await bench.rented(claim)

        outcomes = [
            row.outcome for row in await bench.rows("select outcome from provision_attempt order by number")
        ]
        assert outcomes == ["avoided", "accepted"]
        assert (await bench.row("select host from block")).host == "h-7"


async def test_a_price_above_the_ceiling_is_refused_unsent_and_blocks_the_template(bench: Bench):
    async with bench.running():
        claim = await bench.claim(maxPrice="3.00")

        refused = await bench.refused(claim)

        assert refused.kind is RejectionKind.PRICE
        assert await bench.cloud.creates() == {}
        assert (await bench.row("select template from block")).template == "owner/1"


@pytest.mark.behaviour(66)
@pytest.mark.field_case("FC-083")
async def test_a_machine_dearer_than_the_ceiling_goes_back_and_is_not_bought_again_at_once(bench: Bench):
    """The offer was within the ceiling, and the order was filled above it."""
    async with bench.running():
        claim = await bench.claim(maxPrice="4.50")
        await bench.cloud.set_price("5.00", tier="OnDemand", accelerator="H100", region="r1")

        refused = await bench.refused(claim)

        assert refused.kind is RejectionKind.PRICE
        block = await bench.row("select kind, tier, region, everything from block")
        assert tuple(block) == ("price", "OnDemand", "r1", False)
        await bench.release(claim)
        assert await bench.cloud.alive() == []
        run = await bench.row("select * from run")
        assert str(run.usd_per_hour) == "5.00"


async def test_while_only_lists_are_missing_a_release_asks_neither_rows_nor_claim(bench: Bench):
    """It is called again and again meanwhile, and could not answer anything else."""
    async with bench.running():
        claim = await bench.claim()
        await bench.rented(claim)
        held = await bench.cloud.pause(verb="list")
        release = await bench.release_once(claim)
        assert isinstance(release, Releasing)
        assert release.accepted

        async with bench.engine.begin() as conn:
            await conn.execute(text("lock table rental in access exclusive mode"))
            async with asyncio.timeout(5):
                again = await bench.release_once(claim)
        await bench.cloud.resume(held)
        await bench.release(claim)

        assert isinstance(again, Releasing)
        assert again.accepted
        assert (await bench.row("select state from rental")).state == "ended"


async def test_a_rental_that_the_store_forgets_while_it_ends_is_ended_all_the_same(bench: Bench):
    async with bench.running():
        claim = await bench.claim()
        await bench.rented(claim)
        held = await bench.cloud.pause(verb="list")
        await bench.release_once(claim)
        async with bench.engine.begin() as conn:
            await conn.execute(text("truncate rental, provision_attempt, run cascade"))
        await bench.cloud.resume(held)

        await bench.release(claim)

        assert await bench.cloud.alive() == []
        assert (await bench.row("select state from rental")).state == "ended"


async def test_the_first_shape_with_room_for_the_workload_is_ordered_and_without_any_nothing_is(bench: Bench):
    """A claim names an accelerator and a place, not a shape: the size decides again before the order."""
    async with bench.running() as running:
        told = running.offerings.get("fake", "default")
        assert told is not None
        (one,) = told.find(Accelerator(type="H100", count=1), tier=Tier.ON_DEMAND, region="r1")
        rows = [replace(one, shape="small", memory_bytes=8 * GIB), replace(one, memory_bytes=64 * GIB)]
        running.offerings.put("fake", "default", traits=told.traits, offerings=rows)

        claim = await bench.claim()
        await bench.rented(claim, memory_bytes=16 * GIB)
        assert (await bench.row("select shape from provision_attempt")).shape == one.shape

        other = await bench.claim()
        refused = await bench.refused(other, memory_bytes=65 * GIB)
        assert refused.kind is RejectionKind.UNSUPPORTED
        assert refused.message == ("its H100:1 machines have memory 64Gi at most, and 65Gi is asked for")
        assert len(await bench.cloud.alive()) == 1
