"""The sweep's trail: findings, what happened to each, and the sweeps themselves. Nothing is ever deleted.

Whatever changes a finding adds a row to its history in the same transaction. Times are the database's.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Any

import orjson
from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection

CONTROLLER = "controller"
RUN_EVERY_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighted:
    """A finding as one sweep judged it; the columns of the same names say what they are."""

    key: str
    kind: str
    mark: str
    installation: str
    provider: str
    account: str
    region: str
    resource_id: str | None
    identity: str | None
    claim_uid: str | None
    attempt: int | None
    provider_created_at: datetime | None
    provider_state: str
    exists_since: datetime
    usd_per_hour: Decimal | None
    cost_so_far: Decimal | None
    namespace: str
    workload: str
    why: str
    decision: str
    decided_by: str
    blocked_by: str | None
    eligible_at: datetime | None
    evidence: Mapping[str, Any]


_NAMES = tuple(Sighted.__dataclass_fields__)
_FIXED = {"key", "kind", "installation", "provider", "account", "resource_id", "claim_uid", "exists_since"}
_UPSERT = text(f"""
    insert into orphan_finding ({", ".join(_NAMES)})
    values ({", ".join("cast(:evidence as jsonb)" if name == "evidence" else f":{name}" for name in _NAMES)})
    on conflict (key) where resolved_at is null do update set
        {", ".join(f"{name} = excluded.{name}" for name in _NAMES if name not in _FIXED)},
        sightings = case when orphan_finding.mark = excluded.mark
            then orphan_finding.sightings + 1 else 1 end,
        marked_at = case when orphan_finding.mark = excluded.mark then orphan_finding.marked_at
            else clock_timestamp() end,
        last_seen_at = clock_timestamp()
""")
_EVENT = text("""
    insert into orphan_event (finding_id, what, by, detail)
    values (:finding_id, :what, :by, cast(:detail as jsonb))
""")


async def sighted(
    conn: AsyncConnection, many: Sequence[Sighted], *, before: Mapping[str, tuple[str, str | None]]
) -> dict[str, int]:
    """Write findings down, all together; their ids by key. ``before``: decision and rail of those known."""
    if not many:
        return {}
    ordered = sorted(many, key=lambda one: one.key)
    values = [
        {name: getattr(one, name) for name in _NAMES} | {"evidence": _json(one.evidence)} for one in ordered
    ]
    await conn.execute(_UPSERT, values)
    query = text("select key, id from orphan_finding where key = any(:keys) and resolved_at is null")
    found = await conn.execute(query, {"keys": [one.key for one in ordered]})
    ids: dict[str, int] = {row.key: row.id for row in found}
    events = []
    for one in ordered:
        if one.key not in before:
            detail: dict[str, Any] = {"why": one.why, "state": one.provider_state, "identity": one.identity}
            events.append(_event(ids[one.key], "found", detail=detail))
        if before.get(one.key) != (one.decision, one.blocked_by):
            detail = {"decision": one.decision, "blocked_by": one.blocked_by, "evidence": one.evidence}
            events.append(_event(ids[one.key], "decided", detail=detail))
    if events:
        await conn.execute(_EVENT, events)
    return ids


async def note(
    conn: AsyncConnection,
    finding_id: int,
    what: str,
    *,
    by: str = CONTROLLER,
    detail: Mapping[str, Any] | None = None,
) -> None:
    """Add to a finding's history."""
    await conn.execute(_EVENT, _event(finding_id, what, by=by, detail=detail or {}))


def _event(finding_id: int, what: str, *, by: str = CONTROLLER, detail: Mapping[str, Any]) -> dict[str, Any]:
    return {"finding_id": finding_id, "what": what, "by": by, "detail": _json(detail)}


async def executing(conn: AsyncConnection, finding_id: int, *, detail: Mapping[str, Any]) -> None:
    """Its end is about to begin: written before anything is asked of the cloud."""
    query = text("""
        update orphan_finding set executed_at = clock_timestamp(), tries = tries + 1 where id = :id
    """)
    await conn.execute(query, {"id": finding_id})
    await note(conn, finding_id, "executing", detail=detail)


async def answered(conn: AsyncConnection, finding_id: int, response: str) -> None:
    """What came of it, for now."""
    query = text("update orphan_finding set provider_response = :response where id = :id")
    await conn.execute(query, {"id": finding_id, "response": response[:500]})
    await note(conn, finding_id, "executed", detail={"response": response[:500]})


async def resolve(
    conn: AsyncConnection,
    finding_id: int,
    *,
    how: str,
    by: str = CONTROLLER,
    gone_at: datetime | None = None,
    reason: str = "",
) -> None:
    """Close it. With ``gone_at`` the machine is proven gone since then, and cost nothing more."""
    query = text("""
        update orphan_finding set resolved_at = clock_timestamp(), resolved_as = :how,
            gone_confirmed_at = :gone_at,
            cost_so_far = usd_per_hour * greatest(0, extract(epoch from
                coalesce(:gone_at, clock_timestamp()) - exists_since)) / 3600
        where id = :id and resolved_at is null
    """)
    await conn.execute(query, {"id": finding_id, "how": how, "gone_at": gone_at})
    await note(conn, finding_id, "resolved", by=by, detail={"as": how, "reason": reason})


async def approve(conn: AsyncConnection, ids: Sequence[int], *, by: str) -> list[int]:
    """A person has said yes to ending these; those that are still open, which it now counts for."""
    query = text("""
        update orphan_finding set approved_at = clock_timestamp(), approved_by = :by
        where id = any(:ids) and resolved_at is null returning id
    """)
    done = sorted((await conn.execute(query, {"ids": list(ids), "by": by})).scalars())
    for finding_id in done:
        await note(conn, finding_id, "approved", by=by)
    return done


async def protect(
    conn: AsyncConnection,
    *,
    provider: str,
    account: str,
    resource_id: str,
    until: datetime,
    reason: str,
    by: str,
) -> None:
    """Keep one machine until a moment; open findings of it hear of it."""
    values = {"provider": provider, "account": account, "resource_id": resource_id}
    query = text("""
        insert into protection (provider, account, resource_id, until, reason, by)
        values (:provider, :account, :resource_id, :until, :reason, :by)
    """)
    await conn.execute(query, values | {"until": until, "reason": reason, "by": by})
    for row in await open_of(conn, resource_id):
        if (row["provider"], row["account"]) == (provider, account):
            detail = {"until": until.isoformat(), "reason": reason}
            await note(conn, row["id"], "protected", by=by, detail=detail)


async def is_protected(
    conn: AsyncConnection, provider: str, account: str, resource_ids: Sequence[str]
) -> bool:
    """Whether somebody's word keeps it now; ``resource_ids``: the names that a protection may give it."""
    query = text("""
        select exists (select from (
            select distinct on (resource_id) until from protection
            where provider = :provider and account = :account and resource_id = any(:ids)
            order by resource_id, id desc
        ) newest where until > clock_timestamp())
    """)
    values = {"provider": provider, "account": account, "ids": list(resource_ids)}
    return bool((await conn.execute(query, values)).scalar_one())


async def open_of(conn: AsyncConnection, resource_id: str) -> list[RowMapping]:
    """The open findings about one machine."""
    query = text("select * from orphan_finding where resource_id = :id and resolved_at is null order by id")
    return list((await conn.execute(query, {"id": resource_id})).mappings())


async def history(
    conn: AsyncConnection, *, since: datetime | None = None, kind: str | None = None, all_: bool = False
) -> list[RowMapping]:
    """Findings with all their columns, the newest first; only open ones unless ``all_``."""
    query = text("""
        select * from orphan_finding
        where (:all or resolved_at is null) and (cast(:kind as text) is null or kind = :kind)
            and (cast(:since as timestamptz) is null or last_seen_at >= :since)
        order by id desc
    """)
    values = {"all": all_, "kind": kind, "since": since}
    return list((await conn.execute(query, values)).mappings())


async def events_of(conn: AsyncConnection, ids: Iterable[int]) -> list[RowMapping]:
    """What happened to these findings, oldest first."""
    query = text("select * from orphan_event where finding_id = any(:ids) order by id")
    return list((await conn.execute(query, {"ids": list(ids)})).mappings())


# --- sweeps --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One sweep's result."""

    started_at: datetime
    version: str
    mode: str
    leader: str
    ours: int
    report_only: Sequence[str] = ()
    places: Sequence[Mapping[str, Any]] = ()
    findings: Mapping[str, int] = field(default_factory=dict)
    others: Sequence[Mapping[str, Any]] = ()
    bounds: Mapping[str, float] = field(default_factory=dict)
    terminated: int = 0
    blocked: Mapping[str, int] = field(default_factory=dict)
    error: str | None = None


_RUN_JSON = ("places", "findings", "others", "bounds", "blocked")
_RUN_NAMES = tuple(Run.__dataclass_fields__)
_RUN_INSERT = text(f"""
    insert into sweep_run ({", ".join(_RUN_NAMES)})
    values ({", ".join(f"cast(:{n} as jsonb)" if n in _RUN_JSON else f":{n}" for n in _RUN_NAMES)})
    returning id
""")


async def ran(conn: AsyncConnection, run: Run) -> int:
    """Write a sweep down; its id."""
    values = asdict(run)
    values |= {name: _json(values[name]) for name in _RUN_JSON}
    values["report_only"] = list(run.report_only)
    return int((await conn.execute(_RUN_INSERT, values)).scalar_one())


async def last_run(conn: AsyncConnection) -> RowMapping | None:
    """The newest sweep that was written down."""
    query = text("select * from sweep_run order by id desc limit 1")
    return (await conn.execute(query)).mappings().one_or_none()


async def unexplained_usd(conn: AsyncConnection) -> Decimal | None:
    """Dollars on the clouds' bills of seven days that no machine explains; None where there is no bill."""
    query = text("select sum(unexplained) from unowned_spend where day > current_date - 7")
    found: Decimal | None = (await conn.execute(query)).scalar_one()
    return found


async def unexplained_share(conn: AsyncConnection) -> Decimal:
    """The largest part of an account's bill of a closed day, of seven, that no machine explains; 0 to 1."""
    query = text("""
        select coalesce(max(unexplained / nullif(provider_billed_cost, 0)), 0) from unowned_spend
        where day between current_date - 7 and current_date - 1
    """)
    found: Decimal = (await conn.execute(query)).scalar_one()
    return found


def _json(value: Any) -> str:
    return orjson.dumps(value, default=str).decode()
