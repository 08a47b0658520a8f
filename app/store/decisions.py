"""Placement decisions: why a Pod went where it went, or still waits.

A row stands for a run of equal looks at one Pod: a gated Pod that is looked at every few seconds for a day
makes one row, not thousands. Prices are exact; in ``candidates`` they are texts. Times are the database's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from decimal import Decimal
from typing import Any

from sqlalchemy import bindparam, delete, func, select, text
from sqlalchemy.dialects.postgresql import JSONB
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
_KINDS = {"usd_per_hour": "numeric", "candidates": "jsonb"}
_NAMES = ", ".join(_COLUMNS)
# All looks of a batch in one statement: one each was one of the 14 of a Pod's life. The moment is the
# statement's own, not the column's default: a batch must keep its order.
_RECORD = text(f"""
    with look as materialized (
        select new.*, (select max(id) from placement_decision held where held.pod_uid = new.pod_uid) as latest
        from jsonb_to_recordset(:looks)
            as new (n int, {", ".join(f"{name} {_KINDS.get(name, 'text')}" for name in _COLUMNS)})
    ), again as (
        update placement_decision held set looks = held.looks + 1, last_decided_at = clock_timestamp()
        from look where held.id = look.latest
            and ({", ".join(f"held.{name}" for name in _COLUMNS)})
                is not distinct from ({", ".join(f"look.{name}" for name in _COLUMNS)})
        returning held.id
    )
    insert into placement_decision ({_NAMES}, decided_at, last_decided_at)
    select {_NAMES}, clock_timestamp(), clock_timestamp() from look
    where latest is null or latest not in (select id from again)
    order by n
""").bindparams(bindparam("looks", type_=JSONB))


async def record(conn: AsyncConnection, decisions: Sequence[Decision]) -> None:
    """Write looks down, in the order given for each Pod; one like the Pod's latest row is counted there."""
    left: Sequence[Decision] = decisions
    while left:  # a second look at one Pod is compared with the first, so it goes in a statement of its own
        wave: dict[str, Decision] = {}
        later = []
        for decision in left:
            if wave.setdefault(decision.pod_uid, decision) is not decision:
                later.append(decision)
        rows = [
            # What no text column takes must not cost the looks of all others in the statement.
            {"n": n, **{name: getattr(decision, name) for name in _COLUMNS}}
            | {"message": decision.message.replace("\0", "")}
            for n, decision in enumerate(wave.values())
        ]
        await conn.execute(_RECORD, {"looks": rows})
        left = later


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
