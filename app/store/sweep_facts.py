"""What the rows know of machines, for a sweep: read in one transaction, after the clouds and the claims.

Rows come back as mappings; `app.sweep.facts` makes values of them. Rentals and runs that are over are read
only for the claims and machines that some list shows now, so that a long history costs nothing.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """One reading. ``version_since``: when the first sweep of this version ran, None if none has."""

    now: datetime
    installation: str
    held: str | None
    version_since: datetime | None
    rentals: list[RowMapping]
    runs: list[RowMapping]
    seen: list[RowMapping]
    protections: list[RowMapping]
    owners: list[RowMapping]
    findings: list[RowMapping]


_HEAD = text("""
    select clock_timestamp() as now, id, held_since, held_reason,
        (select min(started_at) from sweep_run where version = :version) as version_since
    from installation
""")
_RENTALS = text("""
    select r.claim_uid, r.claim_name, r.pod_namespace, r.pod_name, r.provider, r.account, r.state,
        r.created_at, r.resource_id, r.ending_at, r.ended_at, run.attempt,
        exists (select from provision_attempt a where a.claim_uid = r.claim_uid and a.outcome is null)
            as unsettled
    from rental r left join run on run.provider = r.provider and run.account = r.account
        and run.resource_id = r.resource_id
    where r.state <> 'ended' or r.claim_uid = any(:uids)
""")
_RUNS = text("""
    select claim_uid, attempt, provider, account, region, resource_id, usd_per_hour, pod_namespace, pod_name,
        accepted_at, first_seen_at, exited_at, terminate_asked_at, gone_at, provider_created_at
    from run where gone_at is null or resource_id = any(:ids)
        or exists (select from rental r where r.claim_uid = run.claim_uid and r.state <> 'ended')
""")
_SEEN = text("""
    select provider, account, region, resource_id, identity, claim_uid, first_seen_at, absent_since
    from instance_seen where absent_since is null or resource_id = any(:open_ids)
        or exists (select from run where run.provider = instance_seen.provider
            and run.account = instance_seen.account and run.resource_id = instance_seen.resource_id
            and run.gone_at is null)
""")
_PROTECTIONS = text("""
    select distinct on (provider, account, resource_id) provider, account, resource_id, until, reason, by
    from protection order by provider, account, resource_id, id desc
""")
_OWNERS = text("select uid, pod_namespace, pod_name from claim where uid = any(:uids)")
_FINDINGS = text("""
    select id, key, kind, mark, provider, account, region, resource_id, claim_uid, exists_since, usd_per_hour,
        first_seen_at, marked_at, last_seen_at, sightings, decision, decided_by, blocked_by, approved_at,
        executed_at, tries
    from orphan_finding where resolved_at is null
""")


async def read(
    conn: AsyncConnection, *, version: str, uids: Collection[str], ids: Collection[str]
) -> Rows | None:
    """Everything; ``uids`` and ``ids`` are the claims and machines that lists show. None: no installation."""
    head = (await conn.execute(_HEAD, {"version": version})).mappings().one_or_none()
    if head is None:
        return None
    findings = list((await conn.execute(_FINDINGS)).mappings())
    open_ids = sorted({row["resource_id"] for row in findings if row["resource_id"] is not None})
    held = (
        f"{head['held_reason']} (since {head['held_since']:%Y-%m-%d %H:%M} UTC)"
        if head["held_since"]
        else None
    )
    return Rows(
        now=head["now"],
        installation=head["id"],
        held=held,
        version_since=head["version_since"],
        rentals=await _all(conn, _RENTALS, uids=sorted(uids)),
        runs=await _all(conn, _RUNS, ids=sorted({*ids, *open_ids})),
        seen=await _all(conn, _SEEN, open_ids=open_ids),
        protections=await _all(conn, _PROTECTIONS),
        owners=await _all(conn, _OWNERS, uids=sorted(uids)),
        findings=findings,
    )


async def mirrored_claims(conn: AsyncConnection) -> list[RowMapping]:
    """The claims as the watch last showed them, for a command that cannot ask the API server."""
    query = text("""
        select uid, name, pod_namespace, pod_name, provider, account, created_at,
            deleting_since is not null as deleting
        from claim where gone_at is null
    """)
    return await _all(conn, query)


async def mirrored_claim(conn: AsyncConnection, uid: str) -> Mapping[str, Any] | None:
    """One claim as the watch last showed it, gone or not: whom its machine belonged to."""
    query = text("""
        select uid, name, pod_namespace, pod_name, pod_uid, pool, provider, account, region, tier, accelerator
        from claim where uid = :uid
    """)
    row = (await conn.execute(query, {"uid": uid})).mappings().one_or_none()
    return None if row is None else {str(name): value for name, value in row.items()}


async def regions(conn: AsyncConnection) -> dict[tuple[str, str], set[str]]:
    """Every region that a machine of ours was ever ordered or shown in, by account."""
    query = text("""
        select provider, account, region from rental union select provider, account, region from run
        union select provider, account, region from instance_seen where absent_since is null
    """)
    found: dict[tuple[str, str], set[str]] = {}
    for row in await conn.execute(query):
        found.setdefault((row.provider, row.account), set()).add(row.region)
    return found


async def _all(conn: AsyncConnection, query: Any, **values: Any) -> list[RowMapping]:
    return list((await conn.execute(query, values)).mappings())
