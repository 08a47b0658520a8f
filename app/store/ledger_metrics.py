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
# series of its own: the highest that was ever shown is kept. The period is a row of its own, since Postgres
# puts a function's query into ours only where its arguments are plain: otherwise it reads whatever there is.
_COST = text("""
    with line as materialized (
        select l.provider, l.pool as nodepool, l.namespace, l.accelerator, l.tier as capacity_type, c.phase,
            sum(greatest(c.billed_dollar_seconds, 0)) / 3600 as cost,
            greatest(sum(c.list_dollar_seconds), 0) / 3600 as list_cost, sum(c.gpu_seconds) as gpu_seconds
        from (
            select date_trunc('day', least(since, (select min(lower(valid)) from commitment)), 'UTC')
                    as since,
                statement_timestamp() + interval '1 second' as until
            from ledger_begin
        ) w cross join lateral cost_lines(w.since, w.until, 'all', 'UTC') c
        join label_set l on l.id = c.label_set_id group by 1, 2, 3, 4, 5, 6
    ), gpu_seconds as (
        insert into shown_counter as k (series, labels, value)
        select 'gpu_seconds', array[provider, accelerator, phase], sum(gpu_seconds) from line
        where gpu_seconds > 0 and (select epoch from installation) = :epoch group by 2
        on conflict (series, labels) do update set value = greatest(k.value, excluded.value)
            where excluded.value > k.value
    )
    insert into cost_counter as k (provider, nodepool, namespace, accelerator, capacity_type, cost, list_cost,
        gpu_seconds)
    select provider, nodepool, namespace, accelerator, capacity_type, sum(cost), sum(list_cost),
        sum(gpu_seconds)
    from line where (select epoch from installation) = :epoch group by 1, 2, 3, 4, 5
    on conflict (provider, nodepool, namespace, accelerator, capacity_type) do update
        set cost = greatest(k.cost, excluded.cost), list_cost = greatest(k.list_cost, excluded.list_cost),
            gpu_seconds = greatest(k.gpu_seconds, excluded.gpu_seconds)
        where (excluded.cost, excluded.list_cost, excluded.gpu_seconds)
            is distinct from (k.cost, k.list_cost, k.gpu_seconds)
""")
_COUNTERS = text("select * from cost_counter")
# Each machine's, by its final reason, once it is over and exactly once; what is kept is added to.
_WASTE = text("""
    with over as (
        update ledger_run set waste_at = clock_timestamp() where run_id in (
                select run_id from ledger_run where closed_at is not null and waste_at is null
                order by run_id limit 1000 for update skip locked)
            and (select epoch from installation) = :epoch
        returning run_id
    )
    insert into shown_counter as k (series, labels, value)
    select 'waste', array[c.reason, c.provider_name], sum(c.dollar_seconds) / 3600
    from over o cross join lateral (
        select reason, provider_name, case when is_instant then effective_once
            else effective_usd_per_hour * seconds end as dollar_seconds
        from charge_use where run_id = o.run_id and reason <> 'useful' offset 0
    ) c group by 2 having sum(c.dollar_seconds) > 0
    on conflict (series, labels) do update set value = k.value + excluded.value
""")
_UNUSED = text("""
    insert into shown_counter as k (series, labels, value)
    select 'unused', array['unused_commitment', provider_name], sum(effective_once) / 3600
    from charge_use where kind = 'unused' and (select epoch from installation) = :epoch
    group by 2 having sum(effective_once) > 0
    on conflict (series, labels) do update set value = greatest(k.value, excluded.value)
        where excluded.value > k.value
""")
_SHOWN_WASTE = text("""
    select labels[1] as reason, labels[2] as provider, value from shown_counter
    where series in ('waste', 'unused')
""")
_SHOWN_GPU_SECONDS = text("""
    select labels[1] as provider, labels[2] as accelerator, labels[3] as phase, value from shown_counter
    where series = 'gpu_seconds'
""")
_BALANCE = text("""
    select b.provider, b.account, b.usd, extract(epoch from clock_timestamp() - b.observed_at) as age_s,
        b.usd * 3600 / nullif(greatest(b.usd_per_hour, (select sum(r.usd_per_hour) from burn_rate r
            where r.provider_name = b.provider and r.account = b.account)), 0) as runway_s
    from provider_balance b
""")
_CREDIT = text("""
    select l.provider, j.kind, -sum(j.dollar_seconds) / 3600 as value
    from billing_adjustment j join label_set l on l.id = j.label_set_id
    where j.dollar_seconds < 0 and j.commitment_id is null group by 1, 2
    union all
    select provider, 'void', sum(amount_usd) from commitment where voided_at is not null group by 1
""")
_HEALTH = text("""
    select provider, coalesce(r.open, 0) as open, coalesce(u.unpriced, 0) as unpriced, r.lag_s,
        (select extract(epoch from clock_timestamp() - min(p.observed_at)) from price_point p
            where p.provider = coalesce(r.provider, u.provider) and upper_inf(p.valid)) as price_age_s
    from (
        select provider, coalesce(sum(open), 0)::bigint as open,
            extract(epoch from clock_timestamp() - min(behind_since)) as lag_s
        from (
            select l.provider, count(*) as open, null::timestamptz as behind_since
            from billing_segment s join label_set l on l.id = s.label_set_id
            where upper_inf(s.period) group by 1
            union all
            select provider, null, behind_since from ledger_lag
        ) e group by provider
    ) r full join (
        select provider_name as provider, count(*) as unpriced from unpriced group by 1
    ) u using (provider)
""")
_BUDGETS = text("""
    select name as budget, used_ratio,
        extract(epoch from exhausted_at - statement_timestamp()) as exhausted_s from budget_status
""")
_RECONCILIATION = text("""
    select b.provider, r.delta, b.age_s from (
        select provider, extract(epoch from clock_timestamp() - min(bill_at)) as age_s
        from billing_rule where bills group by 1
    ) b left join (
        select provider_name as provider, sum(delta) as delta from reconciliation
        where status in ('matched', 'rounding') group by 1
    ) r using (provider)
""")


async def read(conn: AsyncConnection, *, epoch: int) -> dict[str, list[dict[str, Any]]]:
    """The rows of every series, read and kept in one transaction."""
    for kept in (_COST, _WASTE, _UNUSED):
        await conn.execute(kept, {"epoch": epoch})
    found = {}
    for name, query in (
        ("burn", _BURN),
        ("cost", _COUNTERS),
        ("credit", _CREDIT),
        ("waste", _SHOWN_WASTE),
        ("gpu_seconds", _SHOWN_GPU_SECONDS),
        ("balance", _BALANCE),
        ("health", _HEALTH),
        ("budgets", _BUDGETS),
        ("reconciliation", _RECONCILIATION),
    ):
        found[name] = [dict(row) for row in (await conn.execute(query)).mappings()]
    return found
