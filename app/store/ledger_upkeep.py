"""Sums by day, closed months, and listed prices: what the leader's clocks keep up beside the ledger itself.

Sums are recomputed, never counted on: dropped and added up again they are the same rows. A month is closed
once, and its rows never change; what comes later is an adjustment that names the month.
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
        coalesce((select max(day) + 1 from cost_day),
            (select (min(lower(period)) at time zone 'UTC')::date from billing_segment)),
        ((now() - make_interval(secs => cast(:grace_s as float8))) at time zone 'UTC')::date - 1,
        interval '1 day') d (day)
    union
    select day from cost_day where dirty
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
    insert into cost_day (day, dirty) values (:day, false)
    on conflict (day) do update set dirty = false, sealed_at = now()
""")


async def due_days(conn: AsyncConnection, *, grace_s: float, limit: int = 40) -> list[date]:
    """Days that are over for ``grace_s``, or have changed, and are not added up as they are; oldest first."""
    return list((await conn.execute(_DUE_DAYS, {"grace_s": grace_s, "limit": limit})).scalars())


async def seal_day(conn: AsyncConnection, day: date) -> None:
    """Add one day up anew. Sealed first: whoever changes it meanwhile waits, and marks it again."""
    await conn.execute(_SEAL_DAY, {"day": day})
    await conn.execute(_DROP_DAY, {"day": day})
    await conn.execute(_ADD_DAY, {"day": day})


async def unseal(conn: AsyncConnection) -> None:
    """Forget every sum: they are made anew."""
    await conn.execute(text("delete from cost_daily"))
    await conn.execute(text("delete from cost_day"))


_DUE_MONTHS = text("""
    select m.month::date as month from generate_series(
        date_trunc('month', (select min(lower(period)) from billing_segment) at time zone 'UTC'),
        date_trunc('month', (now() - make_interval(secs => cast(:after_s as float8))) at time zone 'UTC')
            - interval '1 month', interval '1 month') m (month)
    where not exists (select from billing_period_close c where c.month = m.month::date)
    order by 1
""")
_CLOSE_MONTH = text("""
    insert into billing_period_close (month, label_set_id, billed_dollar_seconds, effective_dollar_seconds,
        list_dollar_seconds, unpriced_seconds)
    select cast(:month as date), label_set_id, sum(billed_dollar_seconds), sum(effective_dollar_seconds),
        sum(list_dollar_seconds), sum(unpriced_seconds)
    from cost_lines(cast(:month as date)::timestamp at time zone 'UTC',
        (cast(:month as date) + interval '1 month') at time zone 'UTC', 'all', 'UTC')
    group by label_set_id
    on conflict do nothing
""")


async def due_months(conn: AsyncConnection, *, after_s: float) -> list[date]:
    """First days of months that have been over for ``after_s`` and are not closed."""
    return list((await conn.execute(_DUE_MONTHS, {"after_s": after_s})).scalars())


async def close_month(conn: AsyncConnection, month: date) -> int:
    """Write a month's totals down for good; returns how many rows that are."""
    return (await conn.execute(_CLOSE_MONTH, {"month": month})).rowcount


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
    with data as materialized (
        select * from jsonb_to_recordset(cast(:rows as jsonb)) as d (sku text, region text, tier text,
            meter text, unit text, quantity numeric, usd numeric)
    ), held as materialized (
        select * from price_point where provider = :provider and account = :account and upper_inf(valid)
    ), ended as (
        update price_point p set valid = tstzrange(lower(p.valid), now())
        from held h left join data d using (sku, region, tier, meter)
        where p.id = h.id and lower(h.valid) < now()
            and (d.sku is null or (d.quantity, d.usd) is distinct from (h.quantity, h.usd))
        returning p.id
    ), seen as (
        update price_point p set observed_at = now() from held h join data d using (sku, region, tier, meter)
        where p.id = h.id and (d.quantity, d.usd) is not distinct from (h.quantity, h.usd)
            and p.observed_at < now() - interval '10 minutes'
        returning p.id
    )
    insert into price_point (provider, account, sku, region, tier, meter, unit, quantity, usd, valid, source)
    select :provider, :account, d.sku, d.region, d.tier, d.meter, d.unit, d.quantity, d.usd,
        tstzrange(now(), null), 'catalog'
    from data d left join held h using (sku, region, tier, meter)
    where (h.id is null
            or ((d.quantity, d.usd) is distinct from (h.quantity, h.usd) and lower(h.valid) < now()))
        and (select count(*) from ended) >= 0
    returning id
""")


async def list_prices(conn: AsyncConnection, *, provider: str, account: str, rows: Iterable[Listed]) -> int:
    """What an account's cloud lists now, in place of what it listed; returns how many prices are new."""
    latest = {(row.sku, row.region, row.tier, row.meter): row for row in rows}
    body = _json([_plain(row) for row in latest.values()])
    found = await conn.execute(_LIST, {"provider": provider, "account": account, "rows": body})
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
