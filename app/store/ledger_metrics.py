"""What the ledger's series are read from. Counters are kept in the database, so that they never fall."""

from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

_BURN = text("""
    select provider_name as provider, nodepool, namespace, accelerator, capacity_type, phase,
        sum(usd_per_hour) as usd_per_hour
    from burn_rate group by 1, 2, 3, 4, 5, 6
""")
# What an open segment has cost may turn out a little less once its end is known, and what is taken off is a
# series of its own: the highest that was ever shown is kept.
_COST = text("""
    with now_ as (
        select l.provider, l.pool as nodepool, l.namespace, l.accelerator, l.tier as capacity_type,
            sum(greatest(c.billed_dollar_seconds, 0)) / 3600 as cost,
            sum(greatest(c.list_dollar_seconds, 0)) / 3600 as list_cost, sum(c.gpu_seconds) as gpu_seconds
        from cost_lines((select date_trunc('day', least(since,
                (select min(lower(valid)) from commitment)), 'UTC') from ledger_begin),
            statement_timestamp() + interval '1 second', 'all', 'UTC') c
        join label_set l on l.id = c.label_set_id group by 1, 2, 3, 4, 5
    )
    insert into cost_counter as k (provider, nodepool, namespace, accelerator, capacity_type, cost, list_cost,
        gpu_seconds)
    select * from now_ where (select epoch from installation) = :epoch
    on conflict (provider, nodepool, namespace, accelerator, capacity_type) do update
        set cost = greatest(k.cost, excluded.cost), list_cost = greatest(k.list_cost, excluded.list_cost),
            gpu_seconds = greatest(k.gpu_seconds, excluded.gpu_seconds)
        where (excluded.cost, excluded.list_cost, excluded.gpu_seconds)
            is distinct from (k.cost, k.list_cost, k.gpu_seconds)
""")
_COUNTERS = text("select * from cost_counter")
_CREDIT = text("""
    select l.provider, j.kind, -sum(j.dollar_seconds) / 3600 as value
    from billing_adjustment j join label_set l on l.id = j.label_set_id
    where j.dollar_seconds < 0 group by 1, 2
""")
_HEALTH = text("""
    select r.provider, r.open, r.unpriced, r.lag_s,
        (select extract(epoch from clock_timestamp() - min(p.observed_at)) from price_point p
            where p.provider = r.provider and upper_inf(p.valid)) as price_age_s
    from (
        select r.provider, count(s.id) filter (where upper_inf(s.period)) as open,
            count(s.id) filter (where s.usd is null) as unpriced,
            extract(epoch from clock_timestamp() - min(r.changed_at) filter (
                where l.facts_at is distinct from r.changed_at)) as lag_s
        from run r left join ledger_run l on l.run_id = r.id
        left join billing_segment s on s.run_id = r.id and (upper_inf(s.period) or s.usd is null)
        where l.closed_at is null or s.usd is null
        group by r.provider
    ) r
""")
_BUDGETS = text("""
    select name as budget, used_ratio,
        extract(epoch from exhausted_at - statement_timestamp()) as exhausted_s from budget_status
""")
_RECONCILIATION = text("""
    select provider_name as provider, sum(delta) as delta from reconciliation
    where status in ('matched', 'rounding') group by 1
""")


async def read(conn: AsyncConnection, *, epoch: int) -> dict[str, list[dict[str, Any]]]:
    """The rows of every series, read and kept in one transaction."""
    await conn.execute(_COST, {"epoch": epoch})
    found = {}
    for name, query in (
        ("burn", _BURN),
        ("cost", _COUNTERS),
        ("credit", _CREDIT),
        ("health", _HEALTH),
        ("budgets", _BUDGETS),
        ("reconciliation", _RECONCILIATION),
    ):
        found[name] = [dict(row) for row in (await conn.execute(query)).mappings()]
    return found
