"""Sums by day, and listed prices: what the leader's clocks keep up beside the ledger itself.

Sums are recomputed, never counted on: dropped and added up again they are the same rows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import Any

import orjson
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

_DUE_DAYS = text("""
    select d.day::date as day from generate_series(
        coalesce((select max(day) + 1 from cost_day where not dirty),
            (select (since at time zone 'UTC')::date from ledger_begin)),
        ((now() - make_interval(secs => cast(:grace_s as float8))) at time zone 'UTC')::date - 1,
        interval '1 day') d (day)
    union
    select day from cost_day where dirty
        and day >= (select coalesce(max(month) + interval '1 month', '-infinity') from closed_month
            where dropped)
    order by day limit :limit
""")
_DROP_DAY = text("delete from cost_daily where day = :day")
_ADD_DAY = text("""
    insert into cost_daily (day, label_set_id, meter, phase, kind, seconds, gpu_seconds,
        billed_dollar_seconds, effective_dollar_seconds, list_dollar_seconds, guessed_dollar_seconds,
        estimated_dollar_seconds, unpriced_seconds)
    select cast(:day as date), label_set_id, meter, phase, kind, sum(seconds), sum(gpu_seconds),
        coalesce(sum(billed_dollar_seconds), 0), coalesce(sum(effective_dollar_seconds), 0),
        coalesce(sum(list_dollar_seconds), 0), coalesce(sum(guessed_dollar_seconds), 0),
        coalesce(sum(estimated_dollar_seconds), 0), sum(unpriced_seconds)
    from charge_between(cast(:day as date)::timestamp at time zone 'UTC',
        (cast(:day as date) + 1)::timestamp at time zone 'UTC')
    group by label_set_id, meter, phase, kind
""")
_SEAL_DAY = text("""
    insert into cost_day (day, dirty) select :day, false from installation where epoch = :epoch
    on conflict (day) do update set dirty = false, sealed_at = now()
    returning day
""")


async def due_days(conn: AsyncConnection, *, grace_s: float, limit: int = 40) -> list[date]:
    """Days that are over for ``grace_s``, or have changed, and are not added up as they are; oldest first."""
    return list((await conn.execute(_DUE_DAYS, {"grace_s": grace_s, "limit": limit})).scalars())


async def seal_day(conn: AsyncConnection, day: date, *, epoch: int) -> None:
    """Add one day up anew. Sealed first: whoever changes it meanwhile waits, and marks it again."""
    if (await conn.execute(_SEAL_DAY, {"day": day, "epoch": epoch})).first() is None:
        return  # somebody else leads
    await conn.execute(_DROP_DAY, {"day": day})
    await conn.execute(_ADD_DAY, {"day": day})


async def unseal(conn: AsyncConnection) -> None:
    """Forget the sums of days and months: they are made anew. Those past retention stay."""
    await conn.execute(_UNSEAL_DAILY)
    await conn.execute(_UNSEAL_DAYS)
    await conn.execute(_UNSEAL_MONTHLY)
    await conn.execute(_UNSEAL_MONTHS)


_KEPT = "(select coalesce(max(month) + interval '1 month', '-infinity') from closed_month where dropped)"
_UNSEAL_DAILY = text(f"delete from cost_daily where day >= {_KEPT}")
_UNSEAL_DAYS = text(f"delete from cost_day where day >= {_KEPT}")
_UNSEAL_MONTHLY = text(f"delete from cost_monthly where month >= {_KEPT}")
_UNSEAL_MONTHS = text("update closed_month set summed = false where summed and not dropped")


# --- listed prices -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One listed price of one meter of one shape."""

    sku: str
    region: str
    tier: str
    meter: str
    unit: str
    quantity: Decimal
    usd: Decimal | None


# The old price ends in the very moment in which the new one begins: the transaction's.
_LIST = text("""
    with leads as materialized (
        select from installation where epoch = :epoch
    ), data as materialized (
        select * from jsonb_to_recordset(cast(:rows as jsonb)) as d (sku text, region text, tier text,
            meter text, unit text, quantity numeric, usd numeric)
    ), held as materialized (
        select * from price_point where provider = :provider and account = :account and upper_inf(valid)
    ), ended as (
        update price_point p set valid = tstzrange(lower(p.valid), now())
        from held h left join data d using (sku, region, tier, meter)
        where p.id = h.id and lower(h.valid) < now() and exists (select from leads)
            and (d.sku is null or (d.quantity, d.usd) is distinct from (h.quantity, h.usd))
        returning p.id
    ), seen as (
        update price_point p set observed_at = now() from held h join data d using (sku, region, tier, meter)
        where p.id = h.id and (d.quantity, d.usd) is not distinct from (h.quantity, h.usd)
            and p.observed_at < now() - interval '10 minutes' and exists (select from leads)
        returning p.id
    )
    insert into price_point (provider, account, sku, region, tier, meter, unit, quantity, usd, valid, source)
    select :provider, :account, d.sku, d.region, d.tier, d.meter, d.unit, d.quantity, d.usd,
        tstzrange(now(), null), 'catalog'
    from data d left join held h using (sku, region, tier, meter)
    where exists (select from leads) and (h.id is null
            or ((d.quantity, d.usd) is distinct from (h.quantity, h.usd) and lower(h.valid) < now()))
        and (select count(*) from ended) >= 0
    returning id
""")


async def list_prices(
    conn: AsyncConnection, *, provider: str, account: str, rows: Iterable[Listed], epoch: int
) -> int:
    """What an account's cloud lists now, in place of what it listed; returns how many prices are new."""
    latest = {(row.sku, row.region, row.tier, row.meter): row for row in rows}
    body = _json([_plain(row) for row in latest.values()])
    values = {"provider": provider, "account": account, "rows": body, "epoch": epoch}
    found = await conn.execute(_LIST, values)
    return len(found.all())


def _plain(row: Listed) -> dict[str, Any]:
    return {
        "sku": row.sku,
        "region": row.region,
        "tier": row.tier,
        "meter": row.meter,
        "unit": row.unit,
        "quantity": format(row.quantity, "f"),
        "usd": None if row.usd is None else format(row.usd, "f"),
    }


def _json(value: Sequence[dict[str, Any]]) -> str:
    return orjson.dumps(value).decode()
