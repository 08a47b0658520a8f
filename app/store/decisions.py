"""Placement decisions: why a Pod went where it went, or still waits.

A row stands for a run of equal looks at one Pod: a gated Pod that is looked at every few seconds for a day
makes one row, not thousands. Prices are exact; in ``candidates`` they are texts. Times are the database's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from decimal import Decimal
from typing import Any

from sqlalchemy import bindparam, cast, delete, exists, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from app.store.tables import PlacementDecision


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One look. ``outcome`` is "placed" or the deferral's reason; ``candidates`` are in the order of ranking.

    Each candidate holds provider, account, region, tier, price and skip, prices as `Decimal` or text.
    ``message``: of a look that came to no candidates, what the Pod is told.
    """

    pod_namespace: str
    pod_name: str
    pod_uid: str
    outcome: str
    pool: str | None = None
    claim_uid: str | None = None
    provider: str | None = None
    account: str | None = None
    region: str | None = None
    tier: str | None = None
    usd_per_hour: Decimal | None = None
    candidates: Sequence[Mapping[str, Any]] = ()
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A row: a decision and the run of looks that gave it."""

    decision: Decision
    looks: int
    decided_at: datetime
    last_decided_at: datetime


_COLUMNS = tuple(field.name for field in fields(Decision))
_table: Any = PlacementDecision.__table__
# Not the columns' own names: the update would take those for values to set.
_BIND = {
    name: cast(bindparam(f"new_{name}", type_=_table.c[name].type), _table.c[name].type) for name in _COLUMNS
}
_LATEST = (
    select(_table.c.id)
    .where(_table.c.pod_uid == _BIND["pod_uid"])
    .order_by(_table.c.id.desc())
    .limit(1)
    .scalar_subquery()
)
_AGAIN = (
    update(_table)
    .where(_table.c.id == _LATEST)
    .where(*(_table.c[name].is_not_distinct_from(_BIND[name]) for name in _COLUMNS))
    .values(looks=_table.c.looks + 1, last_decided_at=func.clock_timestamp())
    .returning(_table.c.id)
    .cte("again")
)
# The moment is the statement's own, not the column's default: a batch must keep its order.
_MOMENT = func.clock_timestamp()
_RECORD = (
    insert(_table)
    .from_select(
        [*_COLUMNS, "decided_at", "last_decided_at"],
        select(*_BIND.values(), _MOMENT, _MOMENT).where(~exists().select_from(_AGAIN)),
    )
    .add_cte(_AGAIN)
)


async def record(conn: AsyncConnection, decisions: Sequence[Decision]) -> None:
    """Write looks down, in the order given for each Pod; one like the Pod's latest row is counted there."""
    rows = [
        {f"new_{name}": getattr(decision, name) for name in _COLUMNS}
        | {"new_candidates": list(decision.candidates)}
        for decision in sorted(decisions, key=lambda decision: decision.pod_uid)  # stable; one lock order
    ]
    if rows:
        await conn.execute(_RECORD, rows)


async def latest(conn: AsyncConnection, pod_uid: str) -> Recorded | None:
    """The newest row of a Pod, None if it was never looked at."""
    found = await history(conn, pod_uid, limit=1)
    return found[0] if found else None


async def history(conn: AsyncConnection, pod_uid: str, *, limit: int = 50) -> list[Recorded]:
    """The rows of a Pod, newest first."""
    query = select(_table).where(_table.c.pod_uid == pod_uid).order_by(_table.c.id.desc()).limit(limit)
    return [_recorded(row) for row in (await conn.execute(query)).mappings()]


async def latest_of(
    conn: AsyncConnection, namespace: str, name: str, *, uid: str | None = None
) -> Recorded | None:
    """The newest row of the newest Pod of this name, or of the one with ``uid``; None if there is none.

    For people: without ``uid`` a name that is not there costs a walk through the table.
    """
    query = select(_table).where(_table.c.pod_namespace == namespace, _table.c.pod_name == name)
    if uid is not None:
        query = query.where(_table.c.pod_uid == uid)
    row = (await conn.execute(query.order_by(_table.c.id.desc()).limit(1))).mappings().one_or_none()
    return None if row is None else _recorded(row)


async def uids_of(conn: AsyncConnection, namespace: str, name: str) -> list[str]:
    """The UIDs of all Pods of this name that were ever looked at and not forgotten, newest first."""
    query = (
        select(_table.c.pod_uid)
        .where(_table.c.pod_namespace == namespace, _table.c.pod_name == name)
        .group_by(_table.c.pod_uid)
        .order_by(func.max(_table.c.id).desc())
    )
    return list((await conn.execute(query)).scalars())


def _recorded(row: Any) -> Recorded:
    return Recorded(
        decision=Decision(**{name: row[name] for name in _COLUMNS}),
        looks=row["looks"],
        decided_at=row["decided_at"],
        last_decided_at=row["last_decided_at"],
    )


async def prune(conn: AsyncConnection, *, older_than_s: float, batch: int = 10_000) -> int:
    """Forget up to ``batch`` rows last looked at over ``older_than_s`` seconds ago; returns how many."""
    limit = func.clock_timestamp() - func.make_interval(0, 0, 0, 0, 0, 0, older_than_s)
    old = select(_table.c.id).where(_table.c.last_decided_at < limit).order_by(_table.c.id).limit(batch)
    done = await conn.execute(delete(_table).where(_table.c.id.in_(old)))
    return done.rowcount
