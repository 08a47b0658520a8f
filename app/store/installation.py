"""The one row that says who we are, which leader may write, and whether a person must confirm something.

The epoch only ever rises. Every function runs in the caller's transaction and, where it writes, holds the row
until the end of it.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, bindparam, func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from app.store import tables

_table: Any = tables.Installation.__table__


class NotInstalled(LookupError):
    """The row is not there: `get_or_create` was not called yet, or the database was emptied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Renting and sweeping wait for a person. ``reason`` says what was seen first."""

    since: datetime
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """``id`` is in every machine's name; ``epoch`` the newest leader's; ``hold`` None: nothing to confirm."""

    id: str
    epoch: int
    hold: Hold | None
    created_at: datetime


async def get_or_create(conn: AsyncConnection, *, new_id: str) -> Installation:
    """The installation; with ``new_id`` if there was none. Two callers at once get the same."""
    await conn.execute(insert(_table).values(id=new_id).on_conflict_do_nothing(index_elements=["only"]))
    found = await get(conn)
    if found is None:
        raise NotInstalled("the row vanished while it was read")
    return found


async def get(conn: AsyncConnection, *, lock: bool = False) -> Installation | None:
    """The installation, None in a database that has never had one.

    With ``lock`` the row is held until the transaction ends: no other leader's epoch begins meanwhile, and of
    those who lock it one goes after the other.
    """
    query = select(_table).with_for_update(key_share=True) if lock else select(_table)
    row = (await conn.execute(query)).mappings().one_or_none()
    if row is None:
        return None
    return Installation(id=row["id"], epoch=row["epoch"], hold=_hold(row), created_at=row["created_at"])


async def id_of(conn: AsyncConnection) -> str | None:
    """The installation's id and nothing else, so that it can be read whatever revision the schema has."""
    found: str | None = (await conn.execute(select(_table.c.id))).scalar_one_or_none()
    return found


async def epoch_of(conn: AsyncConnection) -> int | None:
    """The newest leader's epoch and nothing else: as `id_of`, while the schema is being made anew, too."""
    found: int | None = (await conn.execute(select(_table.c.epoch))).scalar_one_or_none()
    return found


async def lineage(conn: AsyncConnection) -> str:
    """Which store this is: another text after a restore, a failover or a restart, and never the same again.

    A restore gives the database another server life, another database or other tables; each shows here. (So
    does a rewrite of a table by maintenance, which costs no more than a look at all rows.)
    """
    query = text("""
        select concat_ws(' ', extract(epoch from pg_postmaster_start_time()), d.oid,
            pg_relation_filenode('installation'), pg_relation_filenode('rental'))
        from pg_database d where d.datname = current_database()
    """)
    return str((await conn.execute(query)).scalar_one())


async def next_epoch(conn: AsyncConnection, lease_epoch: int) -> int:
    """Begin a new leader's epoch: one more than the larger of the Lease's and the store's.

    Raises:
        NotInstalled: there is no row.
    """
    return await _set_epoch(conn, func.greatest(_table.c.epoch, lease_epoch) + 1)


async def set_epoch_at_least(conn: AsyncConnection, epoch: int) -> int:
    """Raise the epoch to the Lease's if that is ahead (raised without a store); returns the one in force.

    Raises:
        NotInstalled: there is no row.
    """
    return await _set_epoch(conn, func.greatest(_table.c.epoch, epoch))


async def hold(conn: AsyncConnection, reason: str, *, sequence: int | None = None) -> Hold | None:
    """Make every sweep wait for a person. The first reason stays.

    ``sequence`` is that of an attempt which exists outside and has no row here. None is returned, and nothing
    written, where a person has confirmed it already: what was looked at once is not asked for again.

    Raises:
        NotInstalled: there is no row.
    """
    held = (
        update(_table)
        .values(
            held_since=func.coalesce(_table.c.held_since, func.clock_timestamp()),
            held_reason=func.coalesce(_table.c.held_reason, bindparam("why", reason)),
            held_sequence=func.greatest(_table.c.held_sequence, bindparam("sequence", sequence, BigInteger)),
        )
        .returning(_table.c.held_since, _table.c.held_reason)
    )
    if sequence is not None:
        held = held.where(_table.c.confirmed_sequence < sequence)
    row = (await conn.execute(held)).mappings().one_or_none()
    if row is not None:
        return _hold(row)
    if await get(conn) is None:
        raise NotInstalled("no installation to hold")
    return None


async def bind_cluster(conn: AsyncConnection, cluster_uid: str) -> str | None:
    """Note which cluster this store belongs to; the uid of another one that it belongs to already, if so.

    A cluster that was cloned, its Secret and its database with it, has the same id as the first: only this
    tells them apart.
    """
    bound = update(_table).where(_table.c.cluster_uid.is_(None)).values(cluster_uid=cluster_uid)
    await conn.execute(bound)
    found: str | None = (await conn.execute(select(_table.c.cluster_uid))).scalar_one_or_none()
    return found if found not in (None, cluster_uid) else None


async def cluster_of(conn: AsyncConnection) -> str | None:
    """The uid of the cluster that this store belongs to; None: of none yet, or a person has confirmed."""
    found: str | None = (await conn.execute(select(_table.c.cluster_uid))).scalar_one_or_none()
    return found


async def held(conn: AsyncConnection) -> Hold | None:
    """What waits for a person, None if nothing does.

    Raises:
        NotInstalled: there is no row.
    """
    found = await get(conn)
    if found is None:
        raise NotInstalled("no installation")
    return found.hold


async def release_hold(conn: AsyncConnection) -> bool:
    """A person has confirmed, and with it every machine and mark seen so far. False: nothing was held.

    Else the next look at the same machine would set the hold again, at the latest with the next leader's.
    """
    confirmed = text("""
        greatest(confirmed_sequence, held_sequence, (select max(sequence) from instance_seen),
            (select max(sequence) from provision_attempt where identity is not null))
    """)
    done = await conn.execute(
        update(_table)
        .where(_table.c.held_since.is_not(None))
        .values(
            held_since=None,
            held_reason=None,
            held_sequence=None,
            confirmed_sequence=confirmed,
            cluster_uid=None,  # whichever cluster comes next
        )
    )
    return done.rowcount == 1


async def _set_epoch(conn: AsyncConnection, value: Any) -> int:
    epoch: int | None = (
        await conn.execute(update(_table).values(epoch=value).returning(_table.c.epoch))
    ).scalar_one_or_none()
    if epoch is None:
        raise NotInstalled("no installation whose epoch could be raised")
    return epoch


def _hold(row: Any) -> Hold | None:
    if row["held_since"] is None:
        return None
    return Hold(since=row["held_since"], reason=row["held_reason"] or "")
