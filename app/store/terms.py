"""What people say about money: prices of a contract, what was paid in advance, credits and refunds.

Each concerns an account as a whole, so its attribution is nobody's. The ledger's next tick derives what an
override or a prepayment concerns anew, closed runs by adjustments.
"""

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.store.ledger_periods import CLOSED_UNTIL

_NOBODY = text("""
    with made as (
        insert into label_set (hash, namespace, workload_kind, workload_name, team, cost_center, pool,
            provider, account, account_id, region, sku, tier, accelerator, accelerator_count)
        values ('account:' || md5(row(cast(:provider as text), cast(:account as text))::text), '', '', '', '',
            '', '', :provider, :account, '', '', '', '', '', 0)
        on conflict (hash) do nothing returning id
    )
    select id from made union all
    select id from label_set where hash = 'account:' || md5(row(cast(:provider as text),
        cast(:account as text))::text)
""")
_END = text("""
    update price_override set valid = tstzrange(lower(valid), :since), changed_at = now()
    where provider = :provider and account = :account and sku = :sku and tier = :tier
        and valid @> cast(:since as timestamptz) and lower(valid) < :since
    returning id
""")
_SET = text("""
    insert into price_override (provider, account, sku, tier, usd_per_hour, valid, set_by, reason)
    values (:provider, :account, :sku, :tier, :usd_per_hour, tstzrange(:since, :until), :set_by, :reason)
    returning id
""")


async def override(
    conn: AsyncConnection,
    *,
    provider: str,
    account: str,
    sku: str,
    tier: str,
    usd_per_hour: Decimal,
    since: datetime,
    until: datetime | None,
    set_by: str,
    reason: str,
) -> int:
    """Set the price of whole machines from ``since`` on; one that holds then ends there. Its id.

    Raises:
        sqlalchemy.exc.IntegrityError: another one begins within the time.
    """
    key = {"provider": provider, "account": account, "sku": sku, "tier": tier}
    await conn.execute(_END, key | {"since": since})
    values = key | {
        "usd_per_hour": usd_per_hour,
        "since": since,
        "until": until,
        "set_by": set_by,
        "reason": reason,
    }
    return int((await conn.execute(_SET, values)).scalar_one())


async def end_override(conn: AsyncConnection, number: int) -> bool:
    """It holds no longer than now; False if there is none that still does."""
    query = text("""
        update price_override set valid = tstzrange(lower(valid), greatest(now(), lower(valid)
            + interval '1 microsecond')), changed_at = now()
        where id = :id and (upper_inf(valid) or upper(valid) > now())
    """)
    return bool((await conn.execute(query, {"id": number})).rowcount)


class TermIsClosed(ValueError):
    """A prepayment whose whole term lies in closed months: an adjustment of kind tax or credit says it."""


_COMMIT = text(f"""
    insert into commitment (provider, account, sku, tier, amount_usd, usd_per_hour, machines, valid,
        purchased_at, label_set_id, set_by, reason)
    values (:provider, :account, :sku, :tier, :amount_usd, :usd_per_hour, :machines,
        tstzrange(:since, :until), case when cast(:since as timestamptz) < {CLOSED_UNTIL} then now()
            else :since end, :label, :set_by, :reason)
    returning id
""")
# Days of closed months stay as they are: what concerns them is written into an open one.
# One that is being added up for the first time this very moment has no row that is seen: it is waited for.
_DIRTY = text(f"""
    insert into cost_day (day, dirty) select distinct d.day, true from unnest(cast(:days as date[])) d (day)
    where d.day >= coalesce({CLOSED_UNTIL} at time zone 'UTC', '-infinity')
        and d.day >= (select since at time zone 'UTC' from ledger_begin)::date
        and d.day < (now() at time zone 'UTC')::date
    order by 1
    on conflict (day) do update set dirty = true where not cost_day.dirty
""")


async def commitment(
    conn: AsyncConnection,
    *,
    provider: str,
    account: str,
    sku: str,
    tier: str,
    amount_usd: Decimal,
    usd_per_hour: Decimal,
    since: datetime,
    until: datetime,
    set_by: str,
    reason: str,
    machines: int | None = None,
) -> int:
    """Something paid in advance: what it covers in its term takes from it and is not billed.

    It covers so many ``machines`` at once (None: any number), and none any more once the amount is used.
    A term that ended in a closed month is refused: its unused rest would fall into that month.

    Raises:
        TermIsClosed: the whole term is over and closed.
    """
    closed = (await conn.execute(text(f"select {CLOSED_UNTIL}"))).scalar_one()
    if closed is not None and until < closed:
        raise TermIsClosed(f"the term ends before {closed:%Y-%m-%d}, up to when every month is closed")
    label = await _nobody(conn, provider=provider, account=account)
    values = {
        "provider": provider,
        "account": account,
        "sku": sku,
        "tier": tier,
        "amount_usd": amount_usd,
        "usd_per_hour": usd_per_hour,
        "machines": machines,
        "since": since,
        "until": until,
        "label": label,
        "set_by": set_by,
        "reason": reason,
    }
    await conn.execute(_DIRTY, {"days": [_utc_day(since), _utc_day(until)]})
    return int((await conn.execute(_COMMIT, values)).scalar_one())


class CannotVoid(ValueError):
    """A prepayment that cannot be taken back: it is none, is void, or what it covered is past retention."""


# The months are asked for only once nobody can close one meanwhile: who closes holds this table.
_HOLD = text("lock table commitment in row exclusive mode")
_VOIDABLE = text("""
    select c.voided_at, exists (select from ledger_run l where l.dropped_at is not null
        and l.covered @> jsonb_build_array(jsonb_build_array(c.id))) as is_past,
        array(select distinct (e.at at time zone 'UTC')::date from (
            values (c.purchased_at), (upper(c.valid))
            union all select j.at from billing_adjustment j where j.commitment_id = c.id) e (at)) as days
    from commitment c where c.id = :id for update
""")
# A version before 0011, which may lead once more after a rollback, goes by the shape: none has such a name.
_VOID = text(f"""
    update commitment c set voided_at = now(), changed_at = now(), voided_by = :voided_by,
        void_reason = :reason, sku = 'void:' || sku,
        reversed_at = case when c.purchased_at < {CLOSED_UNTIL} then now() else c.purchased_at end,
        unused_reversed_at = case when upper(c.valid) < {CLOSED_UNTIL} then now() end
    where id = :id
""")


async def void(conn: AsyncConnection, number: int, *, voided_by: str, reason: str) -> None:
    """Take back a prepayment that was noted by mistake, for good: it covers nothing, and was never bought.

    What it covered is billed after all by the ledger's next tick. Closed months stay as they were: what was
    billed, covered or unused in one is taken off by a line of this month that names it.

    Raises:
        CannotVoid: see there.
    """
    await conn.execute(_HOLD)
    row = (await conn.execute(_VOIDABLE, {"id": number})).one_or_none()
    if row is None:
        raise CannotVoid(f"there is no commitment {number}; `nebula cost commitment` lists them")
    if row.voided_at is not None:
        raise CannotVoid(f"commitment {number} has been void since {row.voided_at:%Y-%m-%d %H:%M} UTC")
    if row.is_past:
        raise CannotVoid(
            f"commitment {number} covered a machine whose segments are past retention, which can be billed no"
            " more: `nebula cost adjust credit` takes the amount off"
        )
    await conn.execute(_DIRTY, {"days": row.days})
    await conn.execute(_VOID, {"id": number, "voided_by": voided_by, "reason": reason})


_ADJUST = text(f"""
    insert into billing_adjustment (key, label_set_id, kind, at, dollar_seconds, corrects, invoice, reason)
    select :key, :label, :kind, case when m.month is null then cast(:at as timestamptz)
        else greatest(cast(:at as timestamptz), now()) end, cast(:usd as numeric) * 3600, m.month,
        :invoice, :reason
    from (select case when cast(:at as timestamptz) < {CLOSED_UNTIL}
        then date_trunc('month', cast(:at as timestamptz) at time zone 'UTC')::date end as month) m
    on conflict (key) do nothing returning id
""")


async def adjust(
    conn: AsyncConnection,
    *,
    kind: str,
    provider: str,
    account: str,
    usd: Decimal,
    at: datetime,
    key: str,
    invoice: str | None,
    reason: str,
) -> bool:
    """A credit, refund or tax of an account; the same ``key`` is never written twice: False then."""
    label = await _nobody(conn, provider=provider, account=account)
    await conn.execute(_DIRTY, {"days": [_utc_day(at)]})
    values = {"key": f"{kind}:{key}", "label": label, "kind": kind, "at": at, "usd": usd} | {
        "invoice": invoice,
        "reason": reason,
    }
    return (await conn.execute(_ADJUST, values)).first() is not None


async def overrides(conn: AsyncConnection) -> list[dict[str, Any]]:
    """All of them, the newest first."""
    query = "select *, lower(valid) as since, upper(valid) as until from price_override order by id desc"
    return [dict(row) for row in (await conn.execute(text(query))).mappings()]


async def commitments(conn: AsyncConnection) -> list[dict[str, Any]]:
    """All of them with what is used of each."""
    query = """
        select c.*, lower(c.valid) as since, upper(c.valid) as until, (
            coalesce((select sum(s.quantity * s.usd * extract(epoch from
                least(upper(s.period), greatest(statement_timestamp(), lower(s.period))) - lower(s.period)))
                from segment s where s.commitment_id = c.id), 0)
            + coalesce((select sum(j.dollar_seconds) from billing_adjustment j
                where j.commitment_id = c.id), 0)) / 3600 as used_usd
        from commitment c order by c.id desc
    """
    return [dict(row) for row in (await conn.execute(text(query))).mappings()]


def _utc_day(at: datetime) -> date:
    return at.astimezone(UTC).date()


async def _nobody(conn: AsyncConnection, *, provider: str, account: str) -> int:
    found = await conn.execute(_NOBODY, {"provider": provider, "account": account})
    return int(found.scalars().first() or 0)
