"""Rows of NodeClaims and CloudPodBindings as the watch shows them: a record for people and reports.

Nothing decides by these rows. An older resourceVersion never overwrites a newer one; of an equal one only a
difference is written, so that writing everything again after an outage costs nothing where nothing changed.
An object that is gone keeps its row, with ``gone_at``.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from decimal import Decimal
from typing import Any

from sqlalchemy import Boolean, and_, case, func, or_, select, tuple_, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from app.store.recordset import recordset
from app.store.tables import Base, Binding, Claim


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRow:
    """A NodeClaim. ``gone``: the API server has it no more, and this is what it was at the end."""

    uid: str
    name: str
    pod_namespace: str
    pod_name: str
    pod_uid: str
    pool: str
    provider: str
    account: str
    region: str
    tier: str
    accelerator: str
    phase: str
    instance_id: str | None
    resource_version: int
    created_at: datetime
    deleting_since: datetime | None
    workload_kind: str = ""
    workload_name: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    gone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BindingRow:
    """A CloudPodBinding. ``conditions`` as in its status."""

    uid: str
    namespace: str
    name: str
    claim_name: str
    pod_uid: str
    provider: str
    account: str
    region: str
    tier: str
    external_name: str | None
    phase: str
    instance_id: str | None
    endpoint: str | None
    usd_per_hour: Decimal | None
    conditions: Sequence[Any] = field(default=())
    resource_version: int
    created_at: datetime
    gone: bool = False


async def upsert_claims(conn: AsyncConnection, rows: Iterable[ClaimRow]) -> list[str]:
    """Write what is newer or different; returns the UIDs of changed rows. Of one UID the newest counts."""
    return await _upsert(conn, _CLAIM, rows)


async def upsert_bindings(conn: AsyncConnection, rows: Iterable[BindingRow]) -> list[str]:
    """As `upsert_claims`."""
    return await _upsert(conn, _BINDING, rows)


async def present_claims(conn: AsyncConnection) -> set[str]:
    """UIDs of the claims that are not marked gone."""
    return await _present(conn, Claim)


async def present_bindings(conn: AsyncConnection) -> set[str]:
    """UIDs of the bindings that are not marked gone."""
    return await _present(conn, Binding)


async def mark_claims_gone(conn: AsyncConnection, uids: Iterable[str]) -> list[str]:
    """Mark claims that a complete list no longer has; returns the UIDs of changed rows."""
    return await _mark_gone(conn, Claim, uids)


async def mark_bindings_gone(conn: AsyncConnection, uids: Iterable[str]) -> list[str]:
    """As `mark_claims_gone`."""
    return await _mark_gone(conn, Binding, uids)


async def _upsert(conn: AsyncConnection, statement: Any, rows: Iterable[ClaimRow | BindingRow]) -> list[str]:
    newest: dict[str, ClaimRow | BindingRow] = {}
    for row in rows:
        held = newest.get(row.uid)
        if held is None or held.resource_version <= row.resource_version:
            newest[row.uid] = row
    values = [_values(newest[uid]) for uid in sorted(newest)]
    return list((await conn.execute(statement, {"rows": values})).scalars()) if values else []


def _values(row: ClaimRow | BindingRow) -> dict[str, Any]:
    values = {it.name: getattr(row, it.name) for it in fields(row) if it.name != "gone"}
    if isinstance(row, BindingRow):
        values["conditions"] = list(row.conditions)
    else:
        values["labels"] = dict(row.labels)
    return values | {"is_gone": row.gone}


# Who pays is what was said at placement: an annotation that somebody edits later moves no money.
_FIRST_COUNTS = frozenset({"workload_kind", "workload_name", "labels"})


def _statement(model: type[Base], row: type[ClaimRow | BindingRow]) -> Any:
    table: Any = model.__table__
    facts = [it.name for it in fields(row) if it.name not in ("uid", "resource_version", "gone")]
    names = ["uid", "resource_version", *facts]
    rows = recordset({**{name: table.c[name].type for name in names}, "is_gone": Boolean()})
    gone_at = case((rows.c.is_gone, func.clock_timestamp()), else_=None)
    chosen = select(*(rows.c[name] for name in names), gone_at).order_by(rows.c.uid)
    statement = insert(table).from_select([*names, "gone_at"], chosen)
    new = statement.excluded
    end = case((new.gone_at.is_(None), None), else_=func.coalesce(table.c.gone_at, new.gone_at))
    compared = [name for name in facts if name not in _FIRST_COUNTS]
    differs = or_(
        tuple_(*(table.c[name] for name in compared)).is_distinct_from(
            tuple_(*(new[name] for name in compared))
        ),
        table.c.gone_at.is_(None) != new.gone_at.is_(None),
    )
    return statement.on_conflict_do_update(
        index_elements=["uid"],
        set_={name: new[name] for name in (*compared, "resource_version")}
        | {
            name: case((table.c.workload_kind == "", new[name]), else_=table.c[name])
            for name in facts
            if name in _FIRST_COUNTS
        }
        | {"gone_at": end, "mirrored_at": func.clock_timestamp()},
        where=or_(
            table.c.resource_version < new.resource_version,
            and_(table.c.resource_version == new.resource_version, differs),
        ),
    ).returning(table.c.uid)


_CLAIM = _statement(Claim, ClaimRow)
_BINDING = _statement(Binding, BindingRow)


async def _present(conn: AsyncConnection, model: type[Base]) -> set[str]:
    table: Any = model.__table__
    return set((await conn.execute(select(table.c.uid).where(table.c.gone_at.is_(None)))).scalars())


async def _mark_gone(conn: AsyncConnection, model: type[Base], uids: Iterable[str]) -> list[str]:
    table: Any = model.__table__
    wanted = sorted(set(uids))
    if not wanted:
        return []
    now = func.clock_timestamp()
    statement = (
        update(table)
        .where(table.c.uid == func.any(wanted), table.c.gone_at.is_(None))
        .values(gone_at=now, mirrored_at=now)
        .returning(table.c.uid)
    )
    return sorted((await conn.execute(statement)).scalars())
