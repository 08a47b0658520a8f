"""What the sweep and its fence read: how far the rows reach, what has none, what no machine explains."""

from decimal import Decimal
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.store import findings, rentals
from app.store.engine import begin
from providers.base import ClaimUid


async def _rented(conn: Any, uid: str, *, sequence: int, epoch: int, identity: str | None) -> None:
    await conn.execute(
        text("""
            with made as (
                insert into rental (claim_uid, claim_name, pod_namespace, pod_name, pod_uid, pool, provider,
                    account, region, tier, accelerator, state, epoch)
                values (:uid, :uid, 'ns', 'p', 'u', 'gpu', 'fake', 'default', 'r1', 'Spot', 'T4:1', 'open',
                    :epoch)
            )
            insert into provision_attempt (claim_uid, number, sequence, identity, provider, account, region,
                tier, accelerator, epoch, send_by)
            values (:uid, 1, :sequence, :identity, 'fake', 'default', 'r1', 'Spot', 'T4:1', :epoch, now())
        """),
        {"uid": uid, "sequence": sequence, "epoch": epoch, "identity": identity},
    )


async def test_the_highest_attempt_is_of_earlier_leaders_and_written_by_them(engine: AsyncEngine):
    """After a restore the newest leader may give numbers out again; a mark's own row says nothing either."""
    async with begin(engine) as conn:
        assert await rentals.highest_attempt(conn, before_epoch=5) == 0
        await _rented(conn, "a", sequence=7, epoch=4, identity="a")
        await _rented(conn, "b", sequence=9, epoch=5, identity="b")
        await _rented(conn, "c", sequence=8, epoch=4, identity=None)

        assert await rentals.highest_attempt(conn, before_epoch=5) == 7
        assert await rentals.highest_attempt(conn, before_epoch=6) == 9


async def test_a_rental_that_has_ended_has_its_row_and_one_that_was_lost_has_not(engine: AsyncEngine):
    async with begin(engine) as conn:
        await _rented(conn, "ended", sequence=1, epoch=1, identity="a")
        await conn.execute(text("update rental set state = 'ended', ended_at = now()"))

        assert await rentals.without_row(conn, [ClaimUid("ended"), ClaimUid("lost")]) == ["lost"]


async def test_the_part_of_a_closed_days_bill_that_no_machine_explains(engine: AsyncEngine):
    bill = text("""
        insert into provider_bill_line (provider, account, resource_id, meter, starts_at, ends_at, usd, final,
            claim_uid)
        select 'fake', 'default', x.id, '', now() - interval '26 hours', now() - interval '25 hours', x.usd,
            true, x.claim from (values ('ours', 199, 'c-1'), ('nobodys', 1, null)) x (id, usd, claim)
    """)
    async with begin(engine) as conn:
        assert await findings.unexplained_share(conn) == 0
        await conn.execute(bill)

        assert await findings.unexplained_usd(conn) == Decimal(1)
        assert await findings.unexplained_share(conn) == Decimal("0.005")
