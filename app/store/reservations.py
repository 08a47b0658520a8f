"""Reservations: what each claim takes from its pool's limits, promised before the claim exists.

A row is written in the transaction that decides for a candidate and goes when the claim is gone or its rental
has ended. Until a machine is rented at a known price the row's own dollars count, which are the most that it
may cost; from then on that price does. Sums are exact, and an unknown price is counted as unknown, never as
nothing. Every function runs in the caller's transaction; `app.placement.desk` sees to it that only one such
transaction is open at a time.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from decimal import Decimal
from typing import Any

import orjson
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.store import tables

Key = tuple[str, str]
"""A Pod's UID and the name of the claim that is made for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """One claim's part. ``usd_per_hour`` is the most that its machine may cost; None when unpriced.

    ``claim_uid`` is given for a claim that exists already.
    """

    pod_uid: str
    claim_name: str
    pool: str
    provider: str
    account: str
    gpus: int
    usd_per_hour: Decimal | None
    claim_uid: str | None = None
    namespace: str = ""
    team: str = ""
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def key(self) -> Key:
        return (self.pod_uid, self.claim_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """What one pool holds at one provider account. ``unpriced``: machines whose dollars nobody knows."""

    pool: str
    provider: str
    account: str
    machines: int
    gpus: int
    usd_per_hour: Decimal
    unpriced: int


_table: Any = tables.Reservation.__table__
_COLUMNS = tuple(each.name for each in fields(Reservation))


_KINDS = {"gpus": "int", "usd_per_hour": "numeric", "labels": "jsonb"}
_ARRAYS = ", ".join(f"cast(:{name} as {_KINDS.get(name, 'text')}[])" for name in _COLUMNS)
_NEW = ", ".join(f"{name} = excluded.{name}" for name in (*_COLUMNS, "created_at") if name != "usd_per_hour")
_PUT = text(f"""
    insert into reservation ({", ".join(_COLUMNS)}) select * from unnest({_ARRAYS})
    on conflict (pod_uid, claim_name) do update set {_NEW},
        usd_per_hour = coalesce(excluded.usd_per_hour, reservation.usd_per_hour)
""")


async def put(conn: AsyncConnection, rows: Iterable[Reservation]) -> None:
    """Write rows down; what is there already of the same key gives way, but for a price that is not known."""
    latest: Mapping[Key, Reservation] = {row.key: row for row in rows}
    if not latest:
        return
    ordered = [latest[key] for key in sorted(latest)]
    values: dict[str, list[Any]] = {name: [getattr(row, name) for row in ordered] for name in _COLUMNS}
    values["labels"] = [orjson.dumps(dict(row.labels)).decode() for row in ordered]
    await conn.execute(_PUT, values)


_RELEASE = text("""
    delete from reservation where (pod_uid, claim_name) in (
        select * from unnest(cast(:uids as text[]), cast(:names as text[])))
""")


async def release(conn: AsyncConnection, keys: Collection[Key]) -> None:
    """Give back what these claims took; one that took nothing is no error."""
    if keys:
        uids, names = [uid for uid, _ in keys], [name for _, name in keys]
        await conn.execute(_RELEASE, {"uids": uids, "names": names})


_KEEP = text("""
    delete from reservation where (pod_uid, claim_name) not in (
        select * from unnest(cast(:uids as text[]), cast(:names as text[])))
""")


async def keep_only(conn: AsyncConnection, keys: Collection[Key]) -> int:
    """Give back whatever was taken for other claims than these; returns how many rows that were."""
    uids, names = [uid for uid, _ in keys], [name for _, name in keys]
    return (await conn.execute(_KEEP, {"uids": uids, "names": names})).rowcount


# Of a Pod's several rentals under one claim name, the one that the row is about.
_OWN = """l.pod_uid = r.pod_uid and l.claim_name = r.claim_name and case when r.claim_uid is null
    then coalesce(l.ended_at > r.created_at, true) else l.claim_uid = r.claim_uid end"""
_END = text(f"""
    delete from reservation r using rental l
    where r.pool = any(:pools) and l.state = 'ended' and {_OWN}
""")
_SUMS = text(f"""
    with held as (
        select r.pool, r.provider, r.account, r.gpus, coalesce(m.usd_per_hour, r.usd_per_hour) as usd
        from reservation r
        left join rental l on {_OWN}
        left join run m on m.claim_uid = l.claim_uid and m.provider = l.provider and m.account = l.account
            and m.resource_id = l.resource_id
        where r.pool = any(:pools)
    )
    select pool, provider, account, count(*) as machines, sum(gpus) as gpus, coalesce(sum(usd), 0) as usd,
        count(*) filter (where usd is null) as unpriced
    from held group by pool, provider, account order by pool, provider, account
""")


async def sums(conn: AsyncConnection, pools: Collection[str]) -> list[Sum]:
    """What these pools hold now. Rows of rentals that have ended are given back first."""
    names = {"pools": sorted(pools)}
    await conn.execute(_END, names)
    return [
        Sum(
            pool=row.pool,
            provider=row.provider,
            account=row.account,
            machines=row.machines,
            gpus=row.gpus,
            usd_per_hour=row.usd,
            unpriced=row.unpriced,
        )
        for row in await conn.execute(_SUMS, names)
    ]


async def load(conn: AsyncConnection, *, pool: str | None = None) -> Sequence[Reservation]:
    """The rows as they stand, for people and reports; of one pool, or all."""
    query = _table.select().order_by(_table.c.created_at, _table.c.pod_uid, _table.c.claim_name)
    if pool is not None:
        query = query.where(_table.c.pool == pool)
    rows = (await conn.execute(query)).mappings()
    return [Reservation(**{name: row[name] for name in _COLUMNS}) for row in rows]
