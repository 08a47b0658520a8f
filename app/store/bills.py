"""The clouds' own bills, line by line, and what they differ by from the ledger."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.store.ledger_periods import CLOSED_UNTIL


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line. ``resource_id`` empty: of the account as a whole; ``claim_uid``: of one of our machines."""

    resource_id: str
    meter: str
    starts_at: datetime
    ends_at: datetime
    usd: Decimal
    identity: str | None
    claim_uid: str | None
    final: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One closed run beside its bill. ``lines`` are the amounts, whose digits say how they were rounded."""

    run_id: int
    lines: tuple[Decimal, ...]
    dollar_seconds: Decimal


_OPEN_FROM = text("""
    select min(coalesce(r.provider_created_at, r.requested_at, r.first_seen_at)) from ledger_run l
    join run r on r.id = l.run_id
    where l.closed_at is not null and l.billed_at is null and l.dropped_at is null
        and r.provider = :provider and r.account = :account
        and l.closed_at > now() - interval '60 days'
""")


async def open_from(conn: AsyncConnection, *, provider: str, account: str) -> datetime | None:
    """When the oldest closed run began whose bill has not been seen; None when there is none."""
    found: datetime | None = (
        await conn.execute(_OPEN_FROM, {"provider": provider, "account": account})
    ).scalar_one()
    return found


_PUT = text("""
    insert into provider_bill_line (provider, account, resource_id, meter, starts_at, ends_at, usd, identity,
        claim_uid, final)
    select :provider, :account, :resource_id, :meter, cast(:starts_at as timestamptz),
        cast(:ends_at as timestamptz), cast(:usd as numeric), :identity, :claim_uid, cast(:final as boolean)
    from installation where epoch = :epoch
    on conflict (provider, account, resource_id, meter, starts_at, ends_at) do update
        set usd = excluded.usd, final = excluded.final, fetched_at = now()
        where not provider_bill_line.final
            and (provider_bill_line.usd, provider_bill_line.final)
                is distinct from (excluded.usd, excluded.final)
""")


async def put(
    conn: AsyncConnection, lines: Iterable[Line], *, provider: str, account: str, epoch: int
) -> None:
    """Take lines in, each once; a line that was final stays as it was."""
    rows = [
        {
            "provider": provider,
            "account": account,
            "resource_id": line.resource_id,
            "meter": line.meter,
            "starts_at": line.starts_at,
            "ends_at": line.ends_at,
            "usd": line.usd,
            "identity": line.identity,
            "claim_uid": line.claim_uid,
            "final": line.final,
            "epoch": epoch,
        }
        for line in lines
    ]
    if rows:
        await conn.execute(_PUT, sorted(rows, key=lambda row: (row["resource_id"], row["starts_at"])))


_FETCHED = text("""
    update billing_rule set bill_at = clock_timestamp()
    where provider = :provider and account = :account and (select epoch from installation) = :epoch
""")


async def fetched(conn: AsyncConnection, *, provider: str, account: str, epoch: int) -> None:
    """Note that the account's bill was fetched, whether or not anything was in it."""
    await conn.execute(_FETCHED, {"provider": provider, "account": account, "epoch": epoch})


# A bill that is whole may not name a machine at all. Of one that was shown, nothing is concluded from that:
# its lines may come late. One that no list has ever shown, and nothing has shown running, was none.
_COMPARABLE = text("""
    select l.run_id, coalesce(array_agg(b.usd::text) filter (where b.usd is not null), '{}') as lines,
        coalesce((select sum(s.dollar_seconds) from segment s where s.run_id = l.run_id), 0)
        + coalesce((select sum(j.dollar_seconds) from billing_adjustment j where j.run_id = l.run_id
            and j.kind not in ('credit', 'refund', 'tax')), 0) as dollar_seconds
    from ledger_run l join run r on r.id = l.run_id
    left join provider_bill_line b on b.provider = r.provider and b.account = r.account
        and b.resource_id = r.resource_id
    where l.closed_at < now() - make_interval(secs => cast(:settle_s as float8)) and l.billed_at is null
        and l.dropped_at is null and r.provider = :provider and r.account = :account
    group by l.run_id, l.closed_at, r.id
    having bool_and(b.final) or count(b.usd) = 0 and coalesce(r.running_at, r.exited_at) is null
        and l.closed_at < now() - make_interval(secs => 2 * cast(:settle_s as float8))
        and not exists (select from instance_seen s where s.provider = r.provider and s.account = r.account
            and s.resource_id = r.resource_id)
    order by l.run_id limit 500
""")


async def comparable(
    conn: AsyncConnection, *, provider: str, account: str, settle_s: float
) -> list[Compared]:
    """Closed runs whose bill is whole and has not been compared; ``lines`` empty: it will never name them."""
    values = {"provider": provider, "account": account, "settle_s": settle_s}
    return [
        Compared(
            run_id=row.run_id,
            lines=tuple(Decimal(usd) for usd in row.lines),
            dollar_seconds=row.dollar_seconds,
        )
        for row in await conn.execute(_COMPARABLE, values)
    ]


_SETTLE = text(f"""
    with run_ as (
        update ledger_run set billed_at = clock_timestamp()
        where run_id = :run_id and billed_at is null and (select epoch from installation) = :epoch
        returning *
    ), unpriced_ as (
        -- What had no price has one now, if only as a part of the bill.
        select coalesce((select sum(s.seconds) from segment s where s.run_id = l.run_id and s.usd is null), 0)
            + coalesce((select sum(coalesce(j.unpriced_seconds,
                case when j.dollar_seconds is null then j.seconds else 0 end))
                from billing_adjustment j where j.run_id = l.run_id), 0) as seconds
        from run_ l
    ), dirtied as (
        insert into cost_day (day, dirty)
        select (coalesce(ended_at, closed_at) at time zone 'UTC')::date, true from run_, unpriced_ u
        where (cast(:dollar_seconds as numeric) is not null or u.seconds <> 0)
            and coalesce(ended_at, closed_at) < date_trunc('day', now() at time zone 'UTC') at time zone 'UTC'
        on conflict (day) do update set dirty = true
    )
    insert into billing_adjustment (key, run_id, label_set_id, kind, at, dollar_seconds, unpriced_seconds,
        corrects, reason)
    select :key, l.run_id, l.label_set_id, 'invoice_true_up',
        case when m.month is null then coalesce(l.ended_at, l.closed_at) else now() end,
        coalesce(cast(:dollar_seconds as numeric), 0), -u.seconds, m.month,
        case when cast(:dollar_seconds as numeric) is null then 'the cloud''s own bill has a price for it'
            else 'the cloud''s own bill says otherwise' end
    from unpriced_ u, run_ l
    cross join lateral (select case when coalesce(l.ended_at, l.closed_at) < {CLOSED_UNTIL}
        then date_trunc('month', coalesce(l.ended_at, l.closed_at) at time zone 'UTC')::date end as month) m
    where cast(:dollar_seconds as numeric) is not null or u.seconds <> 0
    on conflict (key) do nothing
""")


async def settle(
    conn: AsyncConnection, compared: Compared, *, difference: Decimal | None, epoch: int
) -> None:
    """Note that the bill was compared; ``difference`` in dollar-seconds is adjusted, None: it agrees."""
    values = {
        "run_id": compared.run_id,
        "epoch": epoch,
        "key": f"run:{compared.run_id}:bill",
        "dollar_seconds": difference,
    }
    await conn.execute(_SETTLE, values)


_PRICED = text(f"""
    insert into billing_adjustment (key, run_id, label_set_id, kind, at, dollar_seconds, unpriced_seconds,
        corrects, reason)
    select 'priced:' || l.run_id, l.run_id, l.label_set_id, 'invoice_true_up', now(), 0, -u.seconds,
        case when coalesce(l.ended_at, l.closed_at) < {CLOSED_UNTIL}
            then date_trunc('month', coalesce(l.ended_at, l.closed_at) at time zone 'UTC')::date end,
        'the cloud''s own bill has a price for it'
    from ledger_run l join run r on r.id = l.run_id cross join lateral (
        select coalesce((select sum(s.seconds) from segment s where s.run_id = l.run_id and s.usd is null), 0)
            + coalesce((select sum(coalesce(j.unpriced_seconds,
                case when j.dollar_seconds is null then j.seconds else 0 end))
                from billing_adjustment j where j.run_id = l.run_id), 0) as seconds
    ) u
    where l.run_id in (select run_id from billing_segment where usd is null
            union all select run_id from billing_segment_archive where usd is null)
        and l.billed_at is not null and l.dropped_at is null and r.provider = :provider
        and r.account = :account and u.seconds <> 0 and (select epoch from installation) = :epoch
    on conflict (key) do nothing
""")


async def price(conn: AsyncConnection, *, provider: str, account: str, epoch: int) -> None:
    """What a version before 0011 has compared with a bill, and left unpriced all the same, has its price."""
    await conn.execute(_PRICED, {"provider": provider, "account": account, "epoch": epoch})


_STRAYS = text(f"""
    with stray as (
        select b.provider, b.account, b.resource_id, b.claim_uid, sum(b.usd) as usd, max(b.ends_at) as at
        from provider_bill_line b
        where b.provider = :provider and b.account = :account and b.claim_uid is not null
            and b.fetched_at <= now() - make_interval(secs => cast(:settle_s as float8))
            and not exists (select from run r where r.provider = b.provider and r.account = b.account
                and r.resource_id = b.resource_id)
            -- whoever releases its claim may yet write it down; it would count twice then
            and not exists (select from rental l where l.claim_uid = b.claim_uid and l.state <> 'ended')
            and not exists (select from billing_adjustment j where j.key = 'bill:' || b.provider || ':'
                || b.account || ':' || b.resource_id)
        group by 1, 2, 3, 4 having bool_and(b.final) and sum(b.usd) <> 0
    ), named as (
        select s.*, coalesce(c.pod_namespace, l.pod_namespace, '') as namespace,
            coalesce(c.workload_kind, '') as workload_kind, coalesce(c.workload_name, '') as workload_name,
            coalesce(c.pool, l.pool, '') as pool, coalesce(l.region, c.region, '') as region,
            coalesce(l.tier, c.tier, 'OnDemand') as tier
        from stray s left join claim c on c.uid = s.claim_uid left join rental l on l.claim_uid = s.claim_uid
    ), labelled as (
        insert into label_set (hash, namespace, workload_kind, workload_name, team, cost_center, pool,
            provider, account, account_id, region, sku, tier, accelerator, accelerator_count)
        select distinct 'stray:' || md5(row(namespace, workload_kind, workload_name, pool, provider,
            account, region, tier)::text), namespace, workload_kind, workload_name, '', '', pool, provider,
            account, '', region, '', tier, '', 0 from named
        on conflict (hash) do nothing returning id, hash
    ), dirtied as (
        insert into cost_day (day, dirty)
        select distinct (at at time zone 'UTC')::date, true from named
        where at < date_trunc('day', now() at time zone 'UTC') at time zone 'UTC'
            and (select epoch from installation) = :epoch
        on conflict (day) do update set dirty = true
    )
    insert into billing_adjustment (key, label_set_id, kind, at, dollar_seconds, corrects, reason)
    select 'bill:' || n.provider || ':' || n.account || ':' || n.resource_id, coalesce(l.id, o.id),
        'invoice_true_up', case when m.month is null then n.at else greatest(n.at, now()) end, n.usd * 3600,
        m.month, 'billed by the cloud for a machine of ours that we never saw'
    from named n cross join lateral (select case when n.at < {CLOSED_UNTIL}
        then date_trunc('month', n.at at time zone 'UTC')::date end as month) m
    cross join lateral (select 'stray:' || md5(row(n.namespace, n.workload_kind, n.workload_name,
        n.pool, n.provider, n.account, n.region, n.tier)::text) as hash) h
    left join labelled l on l.hash = h.hash left join label_set o on o.hash = h.hash
    where (select epoch from installation) = :epoch
    on conflict (key) do nothing
    returning key
""")


async def strays(
    conn: AsyncConnection, *, provider: str, account: str, settle_s: float, epoch: int
) -> Sequence[str]:
    """Bill what the cloud charged for machines of this installation that no row knows; returns their keys."""
    values = {"provider": provider, "account": account, "settle_s": settle_s, "epoch": epoch}
    return list((await conn.execute(_STRAYS, values)).scalars())
