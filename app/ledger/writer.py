"""The tick: runs whose facts or prices have changed, derived again and written, many in one statement.

It reads only what changed since the tick before (a run's trigger keeps the time), a little more than that for
transactions that committed late, and at the start of a term whatever was ever left. It is never in the way of
renting: it only reads what provisioning has written, and a store that is away is tried again.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

import structlog
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from app.ledger.changes import changes_of, covered_by, lasted_of
from app.ledger.cover import Stay, cover
from app.store import ledger, ledger_prices
from app.store.engine import begin, database_now
from app.store.ledger_prices import Lasting
from app.store.ledger_values import Commitment, Due, Prices, Written
from catalog.offerings import Offerings

log = structlog.get_logger()

Covers = Mapping[int, tuple[Commitment, ...]]

LATE_COMMITS = timedelta(minutes=2)
AT_ONCE = 500


@dataclass(slots=True, kw_only=True)
class Writer:
    """One a term. ``epoch`` of the leader guards every write.

    ``offerings`` knows how its list writes the name of an accelerator, however a Pod has: one name.
    """

    engine: AsyncEngine
    offerings: Offerings | None = None
    _since: datetime | None = None
    _prices: Prices | None = None

    async def tick(self, *, epoch: int) -> int:
        """Bring the ledger up to the runs; returns how many were written.

        Raises:
            StoreUnavailable: what was not written is due at the next tick.
        """
        try:
            return await self._tick(epoch=epoch, together=True)
        except DBAPIError as error:
            # One run that the tables refuse must not keep the others from being written.
            log.warning("runs are written one by one", error=str(error.orig)[:256])
            return await self._tick(epoch=epoch, together=False)

    async def _tick(self, *, epoch: int, together: bool) -> int:
        written, missed = 0, False
        async with begin(self.engine) as conn:
            now = await database_now(conn)
            prices = await ledger_prices.prices(conn)
            also = await self._repriced(conn, prices)
            while True:
                found = [
                    self._named(each)
                    for each in await ledger.due(
                        conn, since=self._since, prices_at=prices.changed_at, also=also, limit=AT_ONCE
                    )
                ]
                covers = await self._covers(conn, found, prices, now=now)
                work = [
                    row
                    for each in found
                    if (row := self._changes(each, _prices_of(each, prices, covers), now=now)) is not None
                ]
                at = prices.changed_at
                if together:
                    done = await ledger.write(conn, work, epoch=epoch, prices_at=at)
                else:
                    done = [one for each in work for one in await _alone(conn, each, epoch=epoch, at=at)]
                written += len(done)
                missed |= together and len(done) < len(work)
                seen = {each.run.id for each in found}
                also = [run_id for run_id in also if run_id not in seen]
                if len(seen) < AT_ONCE or not done:
                    break
        if not missed:  # a month that was closed meanwhile: all of it is looked at once more
            self._since, self._prices = now - LATE_COMMITS, prices
        return written

    async def _covers(
        self, conn: AsyncConnection, found: list[Due], prices: Prices, *, now: datetime
    ) -> Covers:
        """What prepayments cover now, of all runs; those of which that has changed join ``found``."""
        if not (prices.commitments or prices.void) or not (found or self._prices != prices):
            return {}
        held = await ledger_prices.lasting(conn)
        covers = covers_of(held, found, prices, now=now)
        here = {each.run.id for each in found}
        moved = [
            each.id
            for each in held
            if each.id not in here and each.covered != covered_by(covers.get(each.id, ()))
        ]
        found += [self._named(each) for each in await ledger.derivable(conn, moved)]
        return covers

    async def _repriced(self, conn: AsyncConnection, prices: Prices) -> list[int]:
        """Closed runs that a price which a person has set since the last tick may concern.

        At the start of a term those that an older version has corrected, which does not say for what time.
        """
        if self._prices is None:
            return list((await conn.execute(_TIMELESS)).scalars())
        before = self._prices.changed_at
        if prices.changed_at <= before:
            return []
        return list((await conn.execute(_REPRICED, {"before": before})).scalars())

    def _named(self, due: Due) -> Due:
        """By the ledger's name of the accelerator, which people's prices are compared with."""
        offers = self.offerings.get(due.run.provider, due.run.account) if self.offerings is not None else None
        kind, colon, count = due.run.accelerator.rpartition(":")
        if offers is None or not colon:
            return due
        return replace(due, run=replace(due.run, accelerator=f"{offers.shown_name(kind)}:{count}"))

    def _changes(self, due: Due, prices: Prices, *, now: datetime) -> Written | None:
        """One run that cannot be derived must not keep the others from being written."""
        try:
            return changes_of(due, prices, now=now)
        except (ValueError, ArithmeticError, AssertionError):
            log.exception("a run cannot be derived", run=due.run.id, resource=due.run.resource_id)
            return None


def covers_of(held: Iterable[Lasting], found: Iterable[Due], prices: Prices, *, now: datetime) -> Covers:
    """What prepayments cover: of ``found`` by their newest facts, of ``held`` as they were derived last."""
    stays = {
        each.id: Stay(
            run=each, start=each.begun_at, end=each.over_at, kept=each.covered if each.is_settled else None
        )
        for each in held
    }
    for due in found:
        if due.held.billed:
            continue
        stays.pop(due.run.id, None)
        try:
            lasted = lasted_of(due.run, due.rules, now=now)
        except (ValueError, ArithmeticError, AssertionError):
            continue  # told of where it cannot be derived
        if lasted is not None:
            stays[due.run.id] = Stay(run=due.run, start=lasted[0], end=lasted[1])
    return cover(stays.values(), commitments=prices.commitments, overrides=prices.overrides)


def _prices_of(due: Due, prices: Prices, covers: Covers) -> Prices:
    return replace(prices, commitments=covers.get(due.run.id, ()))


async def _alone(conn: AsyncConnection, run: Written, *, epoch: int, at: datetime) -> list[int]:
    try:
        async with conn.begin_nested():
            return await ledger.write(conn, [run], epoch=epoch, prices_at=at)
    except DBAPIError as error:
        if error.connection_invalidated:
            raise
        log.error("a run was refused", run=run.run_id, error=str(error.orig)[:256])
        return []


# By what was written, and not by a mark: an older version that leads once more would take the mark away.
_TIMELESS = text("""
    select j.run_id from billing_adjustment j
    where j.kind in ('late_price', 'late_fact', 'spot_interrupt_free') and j.unpriced_seconds is null
        and j.run_id in (select run_id from billing_segment where usd is null
            union all select run_id from billing_segment_archive where usd is null)
        and not exists (select from ledger_run l where l.run_id = j.run_id and l.billed_at is not null)
        and not exists (select from billing_adjustment n where n.run_id = j.run_id and n.meter = j.meter
            and n.id > j.id and n.unpriced is not null)
    group by j.run_id order by j.run_id
""")
# From where a price begins, whatever its end is now: it may have been shortened.
_REPRICED = text("""
    select l.run_id from ledger_run l join run r on r.id = l.run_id
    join (select provider, valid, changed_at from price_override
          union all select provider, valid, changed_at from commitment) p
        on p.provider = r.provider and p.changed_at > :before
    where l.closed_at is not null and tstzrange(lower(p.valid), null) && tstzrange(
        coalesce(least(r.provider_created_at, r.requested_at), r.first_seen_at), l.ended_at, '[]')
""")
