"""Machines that clouds have shown, ours and others'. A row changes only when its machine does.

What tells whose a machine is (identity, claim, attempt, account) and how it ended is kept once it was shown:
a list that leaves a tag out for a while does not make our machine a stranger's. When one was last seen is the
round's to say (`app.store.rounds`). Prices are exact dollars an hour.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from decimal import Decimal
from typing import Any

from sqlalchemy import ColumnElement, bindparam, func, null, or_, select, tuple_, update
from sqlalchemy.dialects.postgresql import ARRAY, TEXT, insert
from sqlalchemy.ext.asyncio import AsyncConnection

from app.store.recordset import recordset
from app.store.tables import InstanceSeen

Key = tuple[str, str, str]
"""Provider, account, resource id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A machine as a list or a get showed it. ``claim_uid``, ``attempt``, ``sequence``: only of ours."""

    provider: str
    account: str
    resource_id: str
    region: str
    state: str
    account_id: str | None = None
    identity: str | None = None
    claim_uid: str | None = None
    attempt: int | None = None
    sequence: int | None = None
    end_reason: str | None = None
    exit_code: int | None = None
    endpoint: str | None = None
    host: str | None = None
    usd_per_hour: Decimal | None = None
    provider_created_at: datetime | None = None

    @property
    def key(self) -> Key:
        return (self.provider, self.account, self.resource_id)


_KEY = ("provider", "account", "resource_id")
_KEPT = frozenset(
    {"account_id", "identity", "claim_uid", "attempt", "sequence", "end_reason", "exit_code"}
    | {"host", "provider_created_at"}
)
_COLUMNS = tuple(field.name for field in fields(Seen))
_FACTS = tuple(name for name in _COLUMNS if name not in _KEY)
_table: Any = InstanceSeen.__table__


def _upsert() -> Any:
    rows = recordset({name: _table.c[name].type for name in _COLUMNS})
    chosen = select(*(rows.c[name] for name in _COLUMNS)).order_by(*(rows.c[name] for name in _KEY))
    statement = insert(_table).from_select(_COLUMNS, chosen)
    new: dict[str, ColumnElement[Any]] = {
        name: func.coalesce(statement.excluded[name], _table.c[name])
        if name in _KEPT
        else statement.excluded[name]
        for name in _FACTS
    }
    differs = tuple_(*(_table.c[name] for name in _FACTS)).is_distinct_from(tuple_(*new.values()))
    return statement.on_conflict_do_update(
        index_elements=list(_KEY),
        set_={**new, "absent_since": null(), "changed_at": func.clock_timestamp()},
        where=or_(differs, _table.c.absent_since.is_not(None)),
    ).returning(*(_table.c[name] for name in _KEY))


_UPSERT = _upsert()
_ABSENT = (
    update(_table)
    .where(
        _table.c.provider == bindparam("of_provider"),
        _table.c.account == bindparam("of_account"),
        _table.c.resource_id == func.any(bindparam("ids", type_=ARRAY(TEXT))),
        _table.c.absent_since.is_(None),
    )
    .values(absent_since=bindparam("since", type_=_table.c.absent_since.type))
    .returning(_table.c.resource_id)
)


async def record(conn: AsyncConnection, machines: Iterable[Seen]) -> list[Key]:
    """Write what is new or different, and take "absent" off what is back. Returns the keys of changed rows.

    Of a machine that comes twice the last one counts.
    """
    by_key = {machine.key: machine for machine in machines}
    rows = [{name: getattr(by_key[key], name) for name in _COLUMNS} for key in sorted(by_key)]
    if not rows:
        return []
    return [(row[0], row[1], row[2]) for row in await conn.execute(_UPSERT, {"rows": rows})]


async def mark_absent(
    conn: AsyncConnection, *, provider: str, account: str, resource_ids: Sequence[str], since: datetime
) -> list[str]:
    """Note that complete lists from ``since`` on have not shown these machines; the first such note stays.

    Returns the ids of changed rows.
    """
    if not resource_ids:
        return []
    values = {
        "of_provider": provider,
        "of_account": account,
        "ids": sorted(set(resource_ids)),
        "since": since,
    }
    return sorted((await conn.execute(_ABSENT, values)).scalars())


async def present(conn: AsyncConnection, *, provider: str, account: str) -> list[Seen]:
    """What was there when last heard of, for a replica that begins."""
    return await _load(
        conn, _table.c.provider == provider, _table.c.account == account, _table.c.absent_since.is_(None)
    )


async def of_claim(conn: AsyncConnection, claim_uid: str) -> list[Seen]:
    """Every machine ever shown for a claim, by sequence."""
    return await _load(conn, _table.c.claim_uid == claim_uid)


async def _load(conn: AsyncConnection, *wanted: ColumnElement[bool]) -> list[Seen]:
    query = (
        select(*(_table.c[name] for name in _COLUMNS))
        .where(*wanted)
        .order_by(_table.c.sequence, *(_table.c[name] for name in _KEY))
    )
    return [Seen(**row) for row in (await conn.execute(query)).mappings()]
