"""What one send has come to closes no attempt that has another; runs that no rental follows are found."""

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from app.store import rentals
from app.store.engine import begin
from app.store.installation import get_or_create, next_epoch
from app.store.rentals import RENTAL_COLUMNS, RunFacts
from providers.base import ClaimUid, ResourceId

UID = ClaimUid("11111111-1111-4111-8111-111111111111")
CLAIM = {name: f"some-{name}" for name in RENTAL_COLUMNS} | {"claim_uid": UID}


async def an_attempt(conn: AsyncConnection) -> int:
    """An attempt that may have been sent once; the epoch."""
    await get_or_create(conn, new_id="aaaaaaaaaa")
    epoch = await next_epoch(conn, 0)
    await rentals.intend(
        conn,
        CLAIM,
        epoch=epoch,
        number=1,
        sequence=1,
        identity="nb-1",
        request_hash="h",
        shape="h100x1",
        ceiling=Decimal(4),
        window_s=30.0,
    )
    return epoch


async def sent_again(conn: AsyncConnection, epoch: int) -> None:
    sent = await rentals.replay(
        conn,
        UID,
        number=1,
        request_hash="h",
        epoch=epoch,
        window_s=30.0,
        effect_s=30.0,
        replay_for_s=600.0,
    )
    assert sent is not None


@pytest.mark.parametrize("outcome", ["rejected", "avoided", "throttled", "unsent"])
async def test_the_answer_to_a_first_send_closes_no_attempt_that_was_sent_again(
    engine: AsyncEngine, outcome: str
):
    """Whoever sent it again may have made a machine, though the first send was refused."""
    async with begin(engine) as conn:
        epoch = await an_attempt(conn)
        await sent_again(conn, epoch)

        closed = await rentals.settle(conn, UID, number=1, outcome=outcome, epoch=epoch)

        assert not closed
        assert await rentals.settle(conn, UID, number=1, outcome="absent", epoch=epoch)


async def test_the_answer_to_the_only_send_closes_the_attempt(engine: AsyncEngine):
    async with begin(engine) as conn:
        epoch = await an_attempt(conn)

        assert await rentals.settle(
            conn, UID, number=1, outcome="rejected", epoch=epoch, rejection="capacity", message="sold out"
        )


async def test_a_run_of_an_ended_rental_or_of_none_is_stray_until_it_has_its_end(engine: AsyncEngine):
    facts = RunFacts(
        attempt=1,
        resource_id=ResourceId("m-1"),
        region="r1",
        account_id="acct",
        meters=(),
        usd_per_hour=Decimal(4),
        accepted=True,
        seen=False,
        provider_created_at=None,
    )
    async with begin(engine) as conn:
        epoch = await an_attempt(conn)
        await rentals.record(conn, CLAIM, facts, outcome="accepted", epoch=epoch)
        assert await rentals.stray_runs(conn) == []  # its rental follows it

        await conn.execute(text("delete from rental"))
        (stray,) = await rentals.stray_runs(conn)

        assert (stray.resource_id, stray.seen) == ("m-1", False)
        await conn.execute(text("update run set gone_at = clock_timestamp()"))
        assert await rentals.stray_runs(conn) == []


async def test_an_extra_of_a_rental_that_lives_on_is_stray_and_its_own_machine_is_not(engine: AsyncEngine):
    """A leader that died may have asked for its end: else it would be billed as long as the rental."""
    async with begin(engine) as conn:
        epoch = await an_attempt(conn)
        for resource_id in ("m-1", "m-2"):
            facts = RunFacts(
                attempt=1,
                resource_id=ResourceId(resource_id),
                region="r1",
                account_id="acct",
                meters=(),
                usd_per_hour=Decimal(4),
                accepted=False,
                seen=True,
                provider_created_at=None,
            )
            await rentals.record(conn, CLAIM, facts, outcome="found", epoch=epoch)

        assert [stray.resource_id for stray in await rentals.stray_runs(conn)] == ["m-2"]


async def test_a_store_that_is_nobodys_yet_knows_no_claim_and_names_no_installation(engine: AsyncEngine):
    """It was emptied, and its tables are there again before its one row is."""
    async with begin(engine) as conn:
        await an_attempt(conn)
        await conn.execute(text("delete from installation"))

        rows = await rentals.load(conn, UID, provider="fake", account="default")

        assert (rows.installation, rows.state) == (None, None)


async def test_a_marked_attempt_takes_the_place_of_an_older_one_of_its_number(engine: AsyncEngine):
    """Numbers are given out again after a restore: what was settled then says nothing of the newer one."""
    async with begin(engine) as conn:
        epoch = await an_attempt(conn)
        assert await rentals.settle(conn, UID, number=1, outcome="unsent", epoch=epoch)
        (old,) = (await rentals.load(conn, UID, provider="fake", account="default")).attempts

        newer = old.send_by + timedelta(seconds=7)
        await rentals.rebuild_attempt(conn, UID, sequence=1, send_by=newer, epoch=epoch)

        (attempt,) = (await rentals.load(conn, UID, provider="fake", account="default")).attempts
        assert (attempt.outcome, attempt.send_by, attempt.identity) == (None, newer, None)
        await rentals.rebuild_attempt(conn, UID, sequence=1, send_by=old.send_by, epoch=epoch)
        assert (await rentals.load(conn, UID, provider="fake", account="default")).attempts[
            0
        ].send_by == newer


async def test_an_intent_of_an_epoch_that_is_over_makes_no_rental(engine: AsyncEngine):
    """Whoever has lost the Lease would leave a row that is open for nobody."""
    async with begin(engine) as conn:
        await get_or_create(conn, new_id="aaaaaaaaaa")
        former = await next_epoch(conn, 0)
        await next_epoch(conn, former)

        sent = await rentals.intend(
            conn,
            CLAIM,
            epoch=former,
            number=1,
            sequence=1,
            identity="nb-1",
            request_hash="h",
            shape="h100x1",
            ceiling=Decimal(4),
            window_s=30.0,
        )

        assert sent is None
        assert await rentals.without_row(conn, [UID]) == [UID]


async def test_an_order_proven_to_have_come_to_nothing_costs_no_more_than_until_then(engine: AsyncEngine):
    """Its machine is written down afterwards, perhaps days later, when the claim ends."""
    async with begin(engine) as conn:
        epoch = await an_attempt(conn)
        await rentals.settle(conn, UID, number=1, outcome="absent", epoch=epoch)
    facts = RunFacts(
        attempt=1,
        resource_id=ResourceId("m-1"),
        region="r1",
        account_id=None,
        meters=[],
        usd_per_hour=Decimal(4),
        accepted=True,
        seen=False,
        provider_created_at=None,
        gone=True,
    )
    async with begin(engine) as conn:
        await rentals.record(conn, CLAIM, facts, outcome="found", epoch=epoch)

    async with begin(engine) as conn:
        run = (await conn.execute(text("select * from run"))).one()
        attempt = (await conn.execute(text("select * from provision_attempt"))).one()
    assert run.accepted_at == run.requested_at == attempt.created_at
    assert (run.gone_at, run.first_seen_at) == (attempt.settled_at, None)
    assert attempt.outcome == "absent"


async def test_a_request_for_an_end_that_was_remembered_reaches_a_run_that_is_there(engine: AsyncEngine):
    facts = RunFacts(
        attempt=1,
        resource_id=ResourceId("m-1"),
        region="r1",
        account_id=None,
        meters=[],
        usd_per_hour=Decimal(4),
        accepted=False,
        seen=True,
        provider_created_at=None,
    )
    async with begin(engine) as conn:
        epoch = await an_attempt(conn)
        await rentals.record(conn, CLAIM, facts, outcome="found", epoch=epoch)
        shown = (await conn.execute(text("select * from run"))).one()
        asked_at = shown.first_seen_at + timedelta(microseconds=1)
        remembered = replace(facts, gone=True, terminate_asked_at=asked_at)
        await rentals.record(conn, CLAIM, remembered, outcome="found", epoch=epoch)

        run = (await conn.execute(text("select * from run"))).one()
        assert (run.first_seen_at, run.terminate_asked_at) == (shown.first_seen_at, asked_at)
        assert run.gone_at > asked_at
