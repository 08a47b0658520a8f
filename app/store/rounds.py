"""Rounds of listing the clouds, as stretches: while nothing changes, one row per place is extended.

A place is (provider, account, list region). The times are the lister's, on the database's
clock; the newest stretch of a place is the one with the highest id.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from sqlalchemy import bindparam, cast, delete, exists, func, insert, select, update
from sqlalchemy.dialects.postgresql import distinct_on
from sqlalchemy.ext.asyncio import AsyncConnection

from app.store.tables import ListRound


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round. ``reason`` says why it is not complete; ``machines`` counts those that it showed."""

    provider: str
    account: str
    region: str
    complete: bool
    reason: str | None
    account_id: str | None
    machines: int
    began_at: datetime
    ended_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A row: ``rounds`` like ones, the first begun at ``began_at``."""

    provider: str
    account: str
    region: str
    complete: bool
    reason: str | None
    account_id: str | None
    machines: int
    rounds: int
    began_at: datetime
    last_began_at: datetime
    last_ended_at: datetime


_PLACE = ("provider", "account", "region")
_LIKE = ("complete", "reason", "account_id", "machines")
_table: Any = ListRound.__table__
_BIND = {
    name: cast(bindparam(f"new_{name}", type_=_table.c[name].type), _table.c[name].type)
    for name in (*_PLACE, *_LIKE)
}
_BEGAN = cast(bindparam("new_began_at"), _table.c.began_at.type)
_ENDED = cast(bindparam("new_ended_at"), _table.c.last_ended_at.type)
_NEWEST = (
    select(_table.c.id)
    .where(*(_table.c[name] == _BIND[name] for name in _PLACE))
    .order_by(_table.c.id.desc())
    .limit(1)
    .scalar_subquery()
)
_EXTENDED = (
    update(_table)
    .where(_table.c.id == _NEWEST)
    .where(*(_table.c[name].is_not_distinct_from(_BIND[name]) for name in _LIKE))
    .values(
        rounds=_table.c.rounds + 1,
        last_began_at=func.greatest(_table.c.last_began_at, _BEGAN),
        last_ended_at=func.greatest(_table.c.last_ended_at, _ENDED),
    )
    .returning(_table.c.id)
    .cte("extended")
)
_RECORD = (
    insert(_table)
    .from_select(
        [*_BIND, "began_at", "last_began_at", "last_ended_at"],
        select(*_BIND.values(), _BEGAN, _BEGAN, _ENDED).where(~exists().select_from(_EXTENDED)),
    )
    .add_cte(_EXTENDED)
)


async def record(conn: AsyncConnection, rounds: Sequence[Round]) -> None:
    """Extend each place's newest stretch, or begin another where the round differs from it."""
    ordered = sorted(rounds, key=lambda it: (it.provider, it.account, it.region, it.began_at))
    rows = [{f"new_{field.name}": getattr(it, field.name) for field in fields(Round)} for it in ordered]
    if rows:
        await conn.execute(_RECORD, rows)


async def latest(conn: AsyncConnection, *, provider: str, account: str) -> list[Stretch]:
    """The newest stretch of each of an account's places, by region."""
    query = (
        select(*(_table.c[field.name] for field in fields(Stretch)))
        .ext(distinct_on(_table.c.region))
        .where(_table.c.provider == provider, _table.c.account == account)
        .order_by(_table.c.region, _table.c.id.desc())
    )
    return [Stretch(**row) for row in (await conn.execute(query)).mappings()]


async def last_whole(conn: AsyncConnection, *, provider: str, account: str) -> datetime | None:
    """When the newest complete round of any of an account's places ended, None if there was none."""
    query = select(func.max(_table.c.last_ended_at)).where(
        _table.c.provider == provider, _table.c.account == account, _table.c.complete
    )
    found: datetime | None = (await conn.execute(query)).scalar_one()
    return found


async def prune(conn: AsyncConnection, *, older_than_s: float, batch: int = 10_000) -> int:
    """Forget up to ``batch`` stretches that ended over ``older_than_s`` seconds ago; returns how many.

    The newest of each place stays, however old.
    """
    limit = func.clock_timestamp() - func.make_interval(0, 0, 0, 0, 0, 0, older_than_s)
    newer = _table.alias("newer")
    followed = (
        select(newer.c.id)
        .where(*(newer.c[name] == _table.c[name] for name in _PLACE), newer.c.id > _table.c.id)
        .exists()
    )
    old = (
        select(_table.c.id).where(_table.c.last_ended_at < limit, followed).order_by(_table.c.id).limit(batch)
    )
    return (await conn.execute(delete(_table).where(_table.c.id.in_(old)))).rowcount
