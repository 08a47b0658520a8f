"""A store that was emptied under a leader: what claims take from limits is back before any decision."""

import asyncio
from dataclasses import dataclass
from decimal import Decimal

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.placement.desk import Desk, Seen
from app.store import installation
from app.store.decisions import Decision
from app.store.engine import begin
from app.store.reservations import Reservation


@dataclass(slots=True)
class ATerm:
    epoch: int | None

    def valid(self) -> bool:
        return True


def a_claim() -> Reservation:
    return Reservation(
        pod_uid="u-1",
        claim_name="c-1",
        pool="gpu",
        provider="modal",
        account="default",
        gpus=8,
        usd_per_hour=Decimal(4),
        claim_uid="claim-1",
    )


def gpus_taken(seen: Seen) -> tuple[int, Decision | None]:
    return seen.promises.usage("gpu").gpus, None


async def test_the_first_look_after_it_sees_what_the_claims_take(engine: AsyncEngine) -> None:
    async with begin(engine) as conn:
        await installation.get_or_create(conn, new_id="testtestaa")
        term = ATerm(await installation.next_epoch(conn, 0))
    renewals = 0

    def renewed() -> None:
        nonlocal renewals
        renewals += 1
        desk.claims_are([a_claim()])

    desk = Desk(engine, term=term, renewed=renewed)
    desk.claims_are([a_claim()])
    working = asyncio.create_task(desk.run())
    try:
        assert await desk.look(gpus_taken, pool="gpu") == 8
        async with begin(engine) as conn:
            await conn.execute(text("truncate reservation"))
            term.epoch = await installation.next_epoch(conn, term.epoch or 0)

        assert await desk.look(gpus_taken, pool="gpu") == 8
        assert await desk.look(gpus_taken, pool="gpu") == 8
        assert renewals == 1
    finally:
        working.cancel()


async def test_a_term_without_an_epoch_for_a_while_is_no_lost_store(engine: AsyncEngine) -> None:
    """A store that is only away still knows everything when it is back."""
    async with begin(engine) as conn:
        await installation.get_or_create(conn, new_id="testtestaa")
        epoch = await installation.next_epoch(conn, 0)
    told: list[str] = []
    term = ATerm(epoch)
    desk = Desk(engine, term=term, renewed=lambda: told.append("renewed"))

    for each in (epoch, None, epoch, epoch):
        term.epoch = each
        desk.mind_the_epoch()

    assert told == []
