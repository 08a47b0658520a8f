"""Blocks: what a cloud refused a moment ago, and until when it is not tried again.

A scope has at most one row: the unique index over all axes, nulls alike, is the guard. An axis that is None
matches every value; an empty text means "not applicable" and matches only a candidate without that axis. The
end of an entry only ever moves later, but for a person's `clear`. The database's clock decides what is live;
a lapsed entry is kept for reports until `prune`. Every function runs in the caller's transaction.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, RowMapping, case, delete, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from app.store import tables

DEFAULT_TTL_S = 30.0  # of a pool that names none
MESSAGE_CHARS = 1000

_AXES = ("accelerator", "tier", "region", "host", "template")
_SCOPE = ("provider", "account", *_AXES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What a refusal is true of. Accelerators are ``type:count`` and compared in lower case."""

    provider: str
    account: str
    accelerator: str | None = None
    tier: str | None = None
    region: str | None = None
    host: str | None = None
    template: str | None = None
    everything: bool = False

    def __post_init__(self) -> None:
        if self.accelerator is not None:
            object.__setattr__(self, "accelerator", self.accelerator.lower())

    @property
    def is_empty(self) -> bool:
        """True of what would block a whole account only because somebody forgot an axis."""
        return not self.provider or not (self.everything or any(axis is not None for axis in self._axes))

    @property
    def _axes(self) -> tuple[str | None, ...]:
        return (self.accelerator, self.tier, self.region, self.host, self.template)

    def covers(
        self,
        *,
        provider: str,
        account: str,
        accelerator: str = "",
        tier: str = "",
        region: str = "",
        host: str = "",
        template: str = "",
    ) -> bool:
        """Is this candidate blocked? An empty text is a candidate without that axis."""
        if (self.provider, self.account) != (provider, account):
            return False
        if self.everything:
            return True
        candidate = (accelerator.lower(), tier, region, host, template)
        return all(axis is None or axis == value for axis, value in zip(self._axes, candidate, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Who met the refusal, and what the cloud said."""

    kind: str
    message: str
    pool: str
    pod_namespace: str
    pod_name: str
    claim_uid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One row. ``created_at`` is when the scope was blocked first without a break until now."""

    id: int
    scope: Scope
    cause: Cause
    created_at: datetime
    expires_at: datetime


def ttl_s(pool_ttl_s: float | None, *, jitter_s: float) -> float:
    """How long a block holds: the pool's time (30 s when unset, zero or negative) and the caller's jitter."""
    return (pool_ttl_s if pool_ttl_s is not None and pool_ttl_s > 0 else DEFAULT_TTL_S) + jitter_s


def soonest_end(blocks: Sequence[Block], **candidate: str) -> datetime | None:
    """When the candidate is free again: the latest end of all that cover it; None when nothing does."""
    return max((block.expires_at for block in blocks if block.scope.covers(**candidate)), default=None)


async def record(conn: AsyncConnection, scope: Scope, cause: Cause, *, ttl_s: float) -> datetime | None:
    """Block ``scope`` for ``ttl_s`` seconds, or longer if it already is. Returns the end now in force.

    None, and nothing recorded, for a time that is not positive or a scope that names nothing.
    """
    if scope.is_empty or not ttl_s > 0:
        return None
    now = func.clock_timestamp()
    values: dict[str, Any] = {
        **{name: getattr(scope, name) for name in _SCOPE},
        **{field.name: getattr(cause, field.name) for field in fields(Cause)},
        "everything": scope.everything,
        # A cloud's own words: the one character that no text column takes must not cost the record.
        "message": cause.message.replace("\0", "")[:MESSAGE_CHARS],
        "created_at": now,
        "expires_at": now + func.make_interval(0, 0, 0, 0, 0, 0, ttl_s),
    }
    table = tables.Block
    statement = insert(table).values(values)
    new = statement.excluded
    later = new.expires_at > table.expires_at
    kept: dict[str, Any] = {
        field.name: case((later, new[field.name]), else_=getattr(table, field.name))
        for field in fields(Cause)
    }
    extended = statement.on_conflict_do_update(
        index_elements=list(_SCOPE),
        set_=kept
        | {
            "expires_at": func.greatest(table.expires_at, new.expires_at),
            "created_at": case((table.expires_at <= now, new.created_at), else_=table.created_at),
        },
    )
    end: datetime = (await conn.execute(extended.returning(table.expires_at))).scalar_one()
    return end


async def live(conn: AsyncConnection) -> list[Block]:
    """What is blocked now, by the database's clock; the latest end first."""
    return await _load(conn, tables.Block.expires_at > func.clock_timestamp())


async def load(
    conn: AsyncConnection,
    *,
    ids: Sequence[int] | None = None,
    provider: str | None = None,
    account: str | None = None,
    lapsed: bool = False,
) -> list[Block]:
    """For people: live entries, or all that are kept with ``lapsed``."""
    wanted: list[ColumnElement[bool]] = []
    if not lapsed:
        wanted.append(tables.Block.expires_at > func.clock_timestamp())
    if ids is not None:
        wanted.append(tables.Block.id.in_(ids))
    if provider is not None:
        wanted.append(tables.Block.provider == provider)
    if account is not None:
        wanted.append(tables.Block.account == account)
    return await _load(conn, *wanted)


async def clear(
    conn: AsyncConnection,
    *,
    ids: Sequence[int] | None = None,
    provider: str | None = None,
    account: str | None = None,
    everything: bool = False,
) -> list[Block]:
    """End live entries now, on a person's word, and return them. They stay in the record as lapsed.

    Raises:
        ValueError: no selector and not ``everything``: a slip must not open all that was refused.
    """
    wanted: list[ColumnElement[bool]] = []
    if ids is not None:
        wanted.append(tables.Block.id.in_(ids))
    if provider is not None:
        wanted.append(tables.Block.provider == provider)
    if account is not None:
        wanted.append(tables.Block.account == account)
    if not wanted and not everything:
        raise ValueError("name blocks, a provider or an account, or say everything")
    now = func.clock_timestamp()
    ended = (
        update(tables.Block)
        .where(tables.Block.expires_at > now, *wanted)
        .values(expires_at=now)
        .returning(*tables.Block.__table__.columns)
    )
    found = [of_row(row) for row in (await conn.execute(ended)).mappings()]
    return sorted(found, key=lambda block: block.id)


async def prune(conn: AsyncConnection, *, older_than_s: float) -> int:
    """Forget entries that lapsed more than ``older_than_s`` seconds ago; returns how many."""
    limit = func.clock_timestamp() - func.make_interval(0, 0, 0, 0, 0, 0, older_than_s)
    return (await conn.execute(delete(tables.Block).where(tables.Block.expires_at < limit))).rowcount


async def _load(conn: AsyncConnection, *wanted: ColumnElement[bool]) -> list[Block]:
    query = (
        select(*tables.Block.__table__.columns)
        .where(*wanted)
        .order_by(tables.Block.expires_at.desc(), tables.Block.id)
    )
    return [of_row(row) for row in (await conn.execute(query)).mappings()]


def of_row(row: Mapping[str, Any] | RowMapping) -> Block:
    """A block from its row's columns by name."""
    return Block(
        id=row["id"],
        scope=Scope(**{field.name: row[field.name] for field in fields(Scope)}),
        cause=Cause(**{field.name: row[field.name] for field in fields(Cause)}),
        created_at=row["created_at"],
        expires_at=row["expires_at"],
    )
