"""What people have set and paid in advance, as the ledger reads it, and what prepayments may cover."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.store.ledger_values import ANY, Commitment, Covered, Override, Prices

_PRICES = text("""
    select 'override' as what, id, provider, account, sku, tier, usd_per_hour, lower(valid) as starts_at,
        upper(valid) as ends_at, null::numeric as amount_usd, null::int as machines, changed_at
    from price_override
    union all
    select case when voided_at is null then 'commitment' else 'void' end, id, provider, account, sku, tier,
        usd_per_hour, lower(valid), upper(valid), amount_usd, machines, changed_at from commitment
""")


async def prices(conn: AsyncConnection) -> Prices:
    """What people have set, most special first: one account before all, one shape before all."""
    rows = list(await conn.execute(_PRICES))
    rows.sort(key=lambda row: (row.account == ANY, row.sku == ANY, row.tier == ANY, row.id))
    names = ("id", "provider", "account", "sku", "tier", "usd_per_hour", "starts_at", "ends_at")
    made: dict[str, list[Any]] = {"override": [], "commitment": []}
    for row in rows:
        values = {name: getattr(row, name) for name in names}
        if row.what == "override":
            made[row.what].append(Override(**values))
        elif row.what == "commitment":
            more = {"amount_usd": row.amount_usd, "machines": row.machines}
            made[row.what].append(Commitment(**values, **more))
    return Prices(
        overrides=tuple(made["override"]),
        commitments=tuple(made["commitment"]),
        changed_at=max((row.changed_at for row in rows), default=datetime(1970, 1, 1, tzinfo=UTC)),
        void=frozenset(row.id for row in rows if row.what == "void"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lasting:
    """A run that a prepayment may cover, as it was derived last; ``accelerator`` by the ledger's name.

    ``is_settled``: the cloud has billed it, or its segments are past retention. What has covered it stays so.
    """

    id: int
    provider: str
    account: str
    sku: str
    accelerator: str
    tier: str
    begun_at: datetime
    over_at: datetime | None
    covered: Covered
    is_settled: bool = False


_LASTING = text("""
    select r.id, r.provider, r.account, coalesce(a.shape, '') as sku, r.tier, l.begun_at,
        l.over_at, l.covered, l.billed_at is not null or l.dropped_at is not null as is_settled,
        case when s.accelerator <> '' then s.accelerator || ':' || s.accelerator_count else r.accelerator end
            as accelerator
    from ledger_run l join run r on r.id = l.run_id join label_set s on s.id = l.label_set_id
    left join provision_attempt a on a.claim_uid = r.claim_uid and a.number = r.attempt
    where l.begun_at is not null and (l.covered <> '[]'::jsonb
        or exists (select from commitment c where c.provider = r.provider and c.voided_at is null
            and l.begun_at < upper(c.valid) and coalesce(l.over_at, 'infinity') > lower(c.valid)))
    order by r.id
""")


async def lasting(conn: AsyncConnection) -> list[Lasting]:
    """Every run that was there in the term of a prepayment of its provider, or was covered by one."""
    found = []
    for row in (await conn.execute(_LASTING)).mappings():
        pieces = tuple(
            (number, datetime.fromisoformat(start), datetime.fromisoformat(end))
            for number, start, end in row["covered"]
        )
        found.append(Lasting(**{**row, "covered": pieces}))
    return found
