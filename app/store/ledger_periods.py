"""Closed months, and what becomes of segments that are old: frozen, summed, moved, dropped.

A month is closed once, after every one before it, and from then on nothing of what came before its end ever
changes, whatever becomes of a run that is still open: its segments are cut at the month's end and frozen,
and what its facts turn out to be later falls into an open month as an adjustment that names the closed one.
Whoever writes money at the same time waits for the close, and finds the month closed then.
"""

from datetime import date

import structlog
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

log = structlog.get_logger()

HOT_MONTHS = 2  # so many closed months stay beside the open one
AT_ONCE = 10_000  # segments that are moved in one transaction: far below a statement's time-out
CORRECTED_DAYS = 60  # for so long after a machine's end its bill and late news of it may still come
ARCHIVE = "billing_segment_archive"
CLOSED_UNTIL = "(select (max(month) + interval '1 month') at time zone 'UTC' from closed_month)"
"""The end of the closed months; null while there is none."""

_DUE_MONTHS = text("""
    select m.month::date as month from generate_series(
        coalesce((select max(month) + interval '1 month' from closed_month),
            date_trunc('month', (select min(lower(period)) from billing_segment) at time zone 'UTC')),
        date_trunc('month', (now() - make_interval(secs => cast(:after_s as float8))) at time zone 'UTC')
            - interval '1 month', interval '1 month') m (month)
    order by 1
""")


async def due_months(conn: AsyncConnection, *, after_s: float) -> list[date]:
    """First days of months that have been over for ``after_s`` and are not closed; oldest first, no gaps."""
    return list((await conn.execute(_DUE_MONTHS, {"after_s": after_s})).scalars())


_LOCK = text("lock table billing_segment, billing_adjustment, commitment in share row exclusive mode")
# Only the row itself is held: placement writes to it meanwhile, and must never wait for the books.
_LEADS = text("select epoch from installation where epoch = :epoch for key share")
# The end of the month in UTC; a parameter, so that the planner goes by the index on lower(period).
_EDGE = "cast(:edge as date)::timestamp at time zone 'UTC'"
_CUT = text(f"""
    with across as materialized (
        select s.*, upper(s.period) as until from billing_segment s
        where not s.frozen and lower(s.period) < {_EDGE}
            and (upper_inf(s.period) or upper(s.period) > {_EDGE})
    ), cut as (
        update billing_segment s set period = tstzrange(lower(s.period), {_EDGE}) from across a
        where s.id = a.id returning s.id
    )
    insert into billing_segment (run_id, label_set_id, meter, phase, period, quantity, usd, list_usd,
        price_source, confidence, why, commitment_id, gpus, frozen)
    select run_id, label_set_id, meter, phase, tstzrange({_EDGE}, until), quantity, usd, list_usd,
        price_source, confidence, why, commitment_id, gpus, false
    from across where (select count(*) from cut) >= 0
""")
_FREEZE = text(f"update billing_segment set frozen = true where not frozen and upper(period) <= {_EDGE}")
_CLOSED = text("""
    insert into closed_month (month, summed) values (:month, false) on conflict do nothing returning month
""")
_LINES = """
    from cost_lines(cast(:month as date)::timestamp at time zone 'UTC',
        (cast(:month as date) + interval '1 month') at time zone 'UTC', 'all', 'UTC')
"""
_TOTALS = text(f"""
    insert into billing_period_close (month, label_set_id, billed_dollar_seconds, effective_dollar_seconds,
        list_dollar_seconds, unpriced_seconds)
    select cast(:month as date), label_set_id, sum(billed_dollar_seconds), sum(effective_dollar_seconds),
        sum(list_dollar_seconds), sum(unpriced_seconds) {_LINES} group by label_set_id
    on conflict do nothing
""")
_SUM = text(f"""
    insert into cost_monthly (month, label_set_id, meter, phase, kind, seconds, gpu_seconds,
        billed_dollar_seconds, effective_dollar_seconds, list_dollar_seconds, guessed_dollar_seconds,
        estimated_dollar_seconds, unpriced_seconds)
    select cast(:month as date), label_set_id, meter, phase, kind, sum(seconds), sum(gpu_seconds),
        sum(billed_dollar_seconds), sum(effective_dollar_seconds), sum(list_dollar_seconds),
        sum(guessed_dollar_seconds), sum(estimated_dollar_seconds), sum(unpriced_seconds) {_LINES}
    group by label_set_id, meter, phase, kind
""")
_SUMMED = text("update closed_month set summed = true where month = :month and not summed")


async def close_month(conn: AsyncConnection, month: date, *, epoch: int) -> bool:
    """Freeze everything up to the end of ``month``, and write its totals down; False: not ours to do.

    In the caller's transaction, which waits for those that write money, and keeps new ones waiting.
    """
    await conn.execute(_LOCK)
    if (await conn.execute(_LEADS, {"epoch": epoch})).first() is None:
        return False
    edge = {"edge": _next(month)}
    await conn.execute(_CUT, edge)
    await conn.execute(_FREEZE, edge)
    await conn.execute(_TOTALS, {"month": month})
    await conn.execute(_SUM, {"month": month})
    if (await conn.execute(_CLOSED, {"month": month})).first() is None:
        return False
    await conn.execute(_SUMMED, {"month": month})
    return True


_UNSUMMED = text("select month from closed_month where not summed and not dropped order by month limit 1")


async def sum_months(conn: AsyncConnection, *, epoch: int) -> int:
    """Add up closed months whose sums were forgotten, one; returns how many."""
    if (await conn.execute(_LEADS, {"epoch": epoch})).first() is None:
        return 0
    month = (await conn.execute(_UNSUMMED)).scalar_one_or_none()
    if month is None:
        return 0
    await conn.execute(text("delete from cost_monthly where month = :month"), {"month": month})
    await conn.execute(_SUM, {"month": month})
    return (await conn.execute(_SUMMED, {"month": month})).rowcount


# --- the archive ---------------------------------------------------------------------------------

_COLD = text(f"""
    select min(date_trunc('month', lower(period) at time zone 'UTC'))::date as low,
        (max(c.month) - interval '{HOT_MONTHS - 1} months')::date as edge
    from (select max(month) as month from closed_month) c left join billing_segment s
        on s.frozen and upper(s.period) <= (c.month - interval '{HOT_MONTHS - 1} months') at time zone 'UTC'
        and lower(s.period) < (c.month - interval '{HOT_MONTHS - 1} months') at time zone 'UTC'
""")
_SLICE = text(f"""
    select id from billing_segment where frozen and lower(period) < {_EDGE} and upper(period) <= {_EDGE}
    order by id limit :limit
""")
_MOVED = text(f"""
    insert into {ARCHIVE} (id, month, run_id, label_set_id, meter, phase, period, quantity, usd, list_usd,
        price_source, confidence, why, commitment_id, gpus, seconds, dollar_seconds)
    select s.id, m.month::date, s.run_id, s.label_set_id, s.meter, s.phase, p.part, s.quantity, s.usd,
        s.list_usd, s.price_source, s.confidence, s.why, s.commitment_id, s.gpus, e.seconds,
        s.quantity * s.usd * e.seconds
    from billing_segment s
    cross join lateral generate_series(date_trunc('month', lower(s.period) at time zone 'UTC'),
        upper(s.period) at time zone 'UTC', interval '1 month') m (month)
    cross join lateral (select s.period * tstzrange(m.month at time zone 'UTC',
        (m.month + interval '1 month') at time zone 'UTC') as part) p
    cross join lateral (select extract(epoch from upper(p.part) - lower(p.part)) as seconds) e
    where s.id = any(cast(:ids as bigint[])) and s.frozen and not isempty(p.part)
""")
_REMOVED = text("delete from billing_segment where id = any(cast(:ids as bigint[])) and frozen")
_IS_THERE = text("select to_regclass(:name) is not null")


async def make_partitions(conn: AsyncConnection, *, epoch: int) -> int:
    """Make what `archive` moves segments to, where it is missing; how many partitions.

    In a transaction of its own: making one keeps every reader of the archive waiting until that ends.
    """
    if (await conn.execute(_LEADS, {"epoch": epoch})).first() is None:
        return 0
    cold = (await conn.execute(_COLD)).one()
    month, made = cold.low, 0
    while month is not None and cold.edge is not None and month < cold.edge:
        if not (await conn.execute(_IS_THERE, {"name": partition(month)})).scalar_one():
            await conn.execute(text(partition_sql(month)))
            made += 1
        month = _next(month)
    return made


async def archive(conn: AsyncConnection, *, epoch: int, limit: int = AT_ONCE) -> int:
    """Move frozen segments of months that are long closed to where a month can be dropped whole; how many.

    At most ``limit`` at once, so that a statement never takes long: again, until there is none. Cut at the
    months' edges, to the microsecond the same money; a trigger lets none go that is not there.
    """
    if (await conn.execute(_LEADS, {"epoch": epoch})).first() is None:
        return 0
    cold = (await conn.execute(_COLD)).one()
    if cold.low is None or cold.edge is None:
        return 0
    ids = list((await conn.execute(_SLICE, {"edge": cold.edge, "limit": limit})).scalars())
    await conn.execute(_MOVED, {"ids": ids})
    return (await conn.execute(_REMOVED, {"ids": ids})).rowcount


def partition_sql(month: date) -> str:
    """What makes the partition of one month."""
    return (
        f"create table if not exists {partition(month)} partition of {ARCHIVE}"
        f" for values from ('{month}') to ('{_next(month)}')"
    )


def partition(month: date) -> str:
    """Its name."""
    return f"{ARCHIVE}_{month:%Y_%m}"


# A run is derived from all its segments: the months of one that is open, or may still be corrected, stay, and
# those in which a prepayment was used, since what is left of it is counted from them.
_IS_OLD = f"""
    m.summed and not m.dropped and m.month < (date_trunc('month', now() at time zone 'UTC')
        - make_interval(months => :keep))::date
    and m.month < (select max(month) from closed_month) - interval '1 month'
    and not exists (select from billing_segment
        where lower(period) < (m.month + interval '1 month') at time zone 'UTC')
    and not exists (select from {ARCHIVE} a where a.month = m.month and a.commitment_id is not null)
    and not exists (select from {ARCHIVE} a join ledger_run l on l.run_id = a.run_id where a.month = m.month
        and (l.closed_at is null or l.closed_at > now() - interval '{CORRECTED_DAYS} days'))
"""
_DAYS = "generate_series(m.month, m.month + interval '1 month' - interval '1 day', interval '1 day') g (day)"
# A day in which nothing ran may have no sum yet: it gets one first, and its month goes the next time.
_WHOLE = text(f"""
    insert into cost_day (day, dirty) select g.day::date, true from closed_month m, {_DAYS} where {_IS_OLD}
    on conflict do nothing
""")
_OLD = text(f"""
    select m.month from closed_month m where {_IS_OLD} and not exists (select from {_DAYS}
        where not exists (select from cost_day d where d.day = g.day::date and not d.dirty))
    order by 1 limit 1
""")
_DROPPED = text("update closed_month set dropped = true where month = :month")


async def drop_old(conn: AsyncConnection, *, keep_months: int, epoch: int) -> list[date]:
    """Drop the partition of the oldest month older than ``keep_months``; 0: none ever. Which month, if any.

    Its sums stay. Only what is summed by day and by month goes, and what a run is derived from no more. One
    at once, since that keeps every reader of the archive waiting until the transaction ends: again, until
    there is none.
    """
    if not keep_months or (await conn.execute(_LEADS, {"epoch": epoch})).first() is None:
        return []
    await conn.execute(_WHOLE, {"keep": keep_months})
    months = list((await conn.execute(_OLD, {"keep": keep_months})).scalars())
    for month in months:
        name = partition(month)
        if (await conn.execute(_IS_THERE, {"name": name})).scalar_one():
            await conn.execute(text(
                f"update ledger_run set dropped_at = now() where run_id in (select run_id from {name})"
            ))  # fmt: skip
            await conn.execute(text(f"drop table {name}"))
        await conn.execute(_DROPPED, {"month": month})
        log.info("month past retention", month=str(month))
    return months


def _next(month: date) -> date:
    return date(month.year + month.month // 12, month.month % 12 + 1, 1)
