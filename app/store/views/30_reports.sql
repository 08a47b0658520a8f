-- What a charge was good for. Useful: a workload ran.
create view charge_use as
select c.*, l.namespace, l.workload_kind, l.workload_name, l.team, l.cost_center, l.pool as nodepool,
    l.provider as provider_name, l.account, l.account_id as billing_account_id, l.region as region_id,
    l.sku as sku_id, l.tier as capacity_type, l.accelerator, l.accelerator_count, l.tags,
    r.resource_id, r.claim_uid, r.attempt, r.pod_uid, r.pod_name, r.end_reason,
    case when c.commitment_id is not null then 'Committed' when l.tier = 'Spot' then 'Dynamic'
        else 'Standard' end as pricing_category,
    case
        when c.kind = 'unused' then 'unused_commitment'
        when c.kind in ('purchase', 'void') then 'useful'
        when r.extra then 'duplicate'
        -- A machine whose claim was never known. What has no machine (a credit, a tax) is nobody's, and no waste.
        when (c.run_id is not null and l.namespace = '') or exists (select from orphan_finding f where f.provider = r.provider
            and f.account = r.account and f.resource_id = r.resource_id and f.kind = 'no-claim'
            and f.executed_at is not null) then 'orphan'
        when c.kind in ('minimum', 'rounding') then 'minimum_charge'
        when r.gone_at is not null and r.running_at is null and r.provider_started_at is null
            then 'failed_provision'
        when c.phase = 'booting' then 'booting'
        when c.phase = 'stopped' then 'stopped_storage'
        when c.phase = 'ending' then 'draining'
        else 'useful'
    end as reason
from charge c join label_set l on l.id = c.label_set_id left join run r on r.id = c.run_id;
comment on view charge_use is
'charge with its attribution in words, its machine, and the reason why it was paid: useful, or one of the kinds of waste. One row a charge.';

create function charge_daily(zone text)
returns table (
    day date, charge_id text, run_id bigint, starts timestamptz, ends timestamptz, seconds numeric,
    gpu_seconds numeric, billed_cost numeric, effective_cost numeric, list_cost numeric, is_unpriced boolean,
    confidence text, meter text, phase text, kind text, reason text, namespace text, team text, nodepool text,
    provider_name text, account text, accelerator text, capacity_type text, workload_kind text,
    workload_name text, region_id text, resource_id text
)
language sql stable as $$
    select d.wall::date, c.charge_id, c.run_id, t.starts, t.ends, t.seconds,
        case when c.is_instant then 0 else c.gpus * t.seconds end,
        (case when c.is_instant then c.billed_once else c.billed_usd_per_hour * t.seconds end) / 3600,
        (case when c.is_instant then c.effective_once else c.effective_usd_per_hour * t.seconds end) / 3600,
        (case when c.is_instant then c.list_once
            else coalesce(c.list_usd_per_hour, c.effective_usd_per_hour) * t.seconds end) / 3600,
        c.is_unpriced, c.confidence, c.meter, c.phase, c.kind, c.reason, c.namespace, c.team, c.nodepool,
        c.provider_name, c.account, c.accelerator, c.capacity_type, c.workload_kind, c.workload_name, c.region_id,
        c.resource_id
    from charge_use c
    cross join lateral generate_series(date_trunc('day', c.charge_period_start at time zone zone),
        c.charge_period_end at time zone zone, interval '1 day') d (wall)
    cross join lateral (
        select greatest(c.charge_period_start, d.wall at time zone zone) as starts,
            least(c.charge_period_end, (d.wall + interval '1 day') at time zone zone) as ends
    ) e
    cross join lateral (
        select e.starts, e.ends,
            case when c.is_instant then c.seconds else extract(epoch from e.ends - e.starts) end as seconds
    ) t
    where t.starts < t.ends or (c.is_instant and c.charge_period_start >= d.wall at time zone zone
        and c.charge_period_start < (d.wall + interval '1 day') at time zone zone)
$$;
comment on function charge_daily(text) is
'Report: charges cut at the days of a zone''s clock, which may have 23 or 25 hours. One row a charge and day; dollars.';

create view charge_hourly as
select c.charge_id, c.run_id, c.charge_category, c.corrects, t.starts as charge_period_start, t.ends as charge_period_end,
    c.meter, c.phase, c.kind, c.reason, c.quantity, t.seconds, c.list_unit_price, c.contracted_unit_price,
    (case when c.is_instant then c.list_once
        else coalesce(c.list_usd_per_hour, c.effective_usd_per_hour) * t.seconds end) / 3600 as list_cost,
    (case when c.is_instant then c.billed_once else c.billed_usd_per_hour * t.seconds end) / 3600 as billed_cost,
    (case when c.is_instant then c.effective_once else c.effective_usd_per_hour * t.seconds end) / 3600 as effective_cost,
    c.price_source, c.confidence, c.is_instant, c.commitment_id, c.pricing_category, c.invoice, c.namespace, c.workload_kind,
    c.workload_name, c.team, c.cost_center, c.nodepool, c.provider_name, c.account, c.billing_account_id, c.region_id,
    c.sku_id, c.capacity_type, c.accelerator, c.accelerator_count, c.tags, c.resource_id, c.claim_uid, c.attempt,
    c.pod_uid, c.pod_name
from charge_use c
cross join lateral generate_series(date_trunc('hour', c.charge_period_start, 'UTC'), c.charge_period_end,
    interval '1 hour') h (at)
cross join lateral (
    select greatest(c.charge_period_start, h.at) as starts, least(c.charge_period_end, h.at + interval '1 hour') as ends
) e
cross join lateral (
    select e.starts, e.ends, case when c.is_instant then c.seconds else extract(epoch from e.ends - e.starts) end as seconds
) t
where t.starts < t.ends or c.is_instant;
comment on view charge_hourly is
'Charges cut at the hours of UTC; an open one ends now. One row a charge and hour; dollars.';

-- The period is a row of its own: as an argument it would keep the planner from looking into the function.
create view cost_day_lines as
select c.bucket_start::date as day, l.namespace, l.team, l.pool as nodepool, l.provider as provider_name, l.account,
    l.accelerator, l.workload_kind, l.workload_name, l.tier as capacity_type,
    case when c.phase = 'running' then c.gpu_seconds else 0 end as useful_gpu_seconds,
    c.list_dollar_seconds, c.billed_dollar_seconds, c.effective_dollar_seconds, c.guessed_dollar_seconds, c.unpriced_seconds
from (
    select coalesce((select date_trunc('day', least(
            (select since from ledger_begin), (select min(at) from billing_adjustment),
            (select min(lower(valid)) from commitment)), 'UTC')), statement_timestamp()) as since,
        greatest(statement_timestamp(), (select max(at) + interval '1 second' from billing_adjustment)) as until
) w cross join lateral cost_lines(w.since, w.until, 'day', 'UTC') c
join label_set l on l.id = c.label_set_id;
comment on view cost_day_lines is 'The ledger by UTC day and attribution, in lines that can be added up in any way.';

create view cost_by_namespace as
select day, namespace, sum(useful_gpu_seconds) / 3600 as gpu_hours, sum(list_dollar_seconds) / 3600 as list_cost,
    sum(billed_dollar_seconds) / 3600 as billed_cost, sum(effective_dollar_seconds) / 3600 as effective_cost,
    sum(guessed_dollar_seconds) / 3600 as guessed_cost, sum(unpriced_seconds) / 3600 as unpriced_hours,
    sum(effective_dollar_seconds) / nullif(sum(useful_gpu_seconds), 0) as usd_per_gpu_hour
from cost_day_lines group by day, namespace;
comment on view cost_by_namespace is
'One row a UTC day and namespace. gpu_hours are those in which a workload ran, so a slow boot shows in usd_per_gpu_hour.';

create view cost_by_team as
select day, team, sum(useful_gpu_seconds) / 3600 as gpu_hours, sum(list_dollar_seconds) / 3600 as list_cost,
    sum(billed_dollar_seconds) / 3600 as billed_cost, sum(effective_dollar_seconds) / 3600 as effective_cost,
    sum(guessed_dollar_seconds) / 3600 as guessed_cost, sum(unpriced_seconds) / 3600 as unpriced_hours,
    sum(effective_dollar_seconds) / nullif(sum(useful_gpu_seconds), 0) as usd_per_gpu_hour
from cost_day_lines group by day, team;
comment on view cost_by_team is 'One row a UTC day and team label; empty: Pods without one.';

create view cost_by_nodepool as
select day, nodepool, sum(useful_gpu_seconds) / 3600 as gpu_hours, sum(list_dollar_seconds) / 3600 as list_cost,
    sum(billed_dollar_seconds) / 3600 as billed_cost, sum(effective_dollar_seconds) / 3600 as effective_cost,
    sum(guessed_dollar_seconds) / 3600 as guessed_cost, sum(unpriced_seconds) / 3600 as unpriced_hours,
    sum(effective_dollar_seconds) / nullif(sum(useful_gpu_seconds), 0) as usd_per_gpu_hour
from cost_day_lines group by day, nodepool;
comment on view cost_by_nodepool is 'One row a UTC day and NodePool.';

create view cost_by_provider as
select day, provider_name, account, sum(useful_gpu_seconds) / 3600 as gpu_hours,
    sum(list_dollar_seconds) / 3600 as list_cost, sum(billed_dollar_seconds) / 3600 as billed_cost,
    sum(effective_dollar_seconds) / 3600 as effective_cost, sum(guessed_dollar_seconds) / 3600 as guessed_cost,
    sum(unpriced_seconds) / 3600 as unpriced_hours,
    sum(effective_dollar_seconds) / nullif(sum(useful_gpu_seconds), 0) as usd_per_gpu_hour
from cost_day_lines group by day, provider_name, account;
comment on view cost_by_provider is 'One row a UTC day and provider account.';

create view cost_by_accelerator as
select day, accelerator, sum(useful_gpu_seconds) / 3600 as gpu_hours, sum(list_dollar_seconds) / 3600 as list_cost,
    sum(billed_dollar_seconds) / 3600 as billed_cost, sum(effective_dollar_seconds) / 3600 as effective_cost,
    sum(guessed_dollar_seconds) / 3600 as guessed_cost, sum(unpriced_seconds) / 3600 as unpriced_hours,
    sum(effective_dollar_seconds) / nullif(sum(useful_gpu_seconds), 0) as usd_per_gpu_hour
from cost_day_lines group by day, accelerator;
comment on view cost_by_accelerator is 'One row a UTC day and kind of accelerator; empty: none.';

create view cost_by_workload as
select day, namespace, workload_kind, workload_name, sum(useful_gpu_seconds) / 3600 as gpu_hours,
    sum(list_dollar_seconds) / 3600 as list_cost, sum(billed_dollar_seconds) / 3600 as billed_cost,
    sum(effective_dollar_seconds) / 3600 as effective_cost, sum(guessed_dollar_seconds) / 3600 as guessed_cost,
    sum(unpriced_seconds) / 3600 as unpriced_hours,
    sum(effective_dollar_seconds) / nullif(sum(useful_gpu_seconds), 0) as usd_per_gpu_hour
from cost_day_lines group by day, namespace, workload_kind, workload_name;
comment on view cost_by_workload is 'One row a UTC day and what controlled the Pods: Deployment, Job and so on, or the Pod itself.';

create view spot_savings as
select d.day, d.provider_name, d.accelerator, sum(d.effective_cost) as spot_cost,
    sum(d.list_cost) as on_demand_equivalent_cost, sum(d.list_cost) - sum(d.effective_cost) as saved_cost,
    1 - sum(d.effective_cost) / nullif(sum(d.list_cost), 0) as saved_ratio,
    count(distinct d.run_id) filter (where r.end_reason = 'preempted'
        and coalesce(r.provider_ended_at, r.exited_at) >= d.starts
        and coalesce(r.provider_ended_at, r.exited_at) <= d.ends) as interruptions,
    coalesce(sum(d.effective_cost) filter (where r.end_reason = 'preempted'), 0) as rework_cost,
    sum(d.list_cost) - sum(d.effective_cost)
        - coalesce(sum(d.effective_cost) filter (where r.end_reason = 'preempted'), 0) as net_saved_cost
from charge_daily('UTC') d join run r on r.id = d.run_id
where d.capacity_type = 'Spot'
group by d.day, d.provider_name, d.accelerator;
comment on view spot_savings is
'What Spot saved against the list on demand. One row a UTC day, provider and accelerator. rework_cost: all that reclaimed machines cost, the most that may have to be done again.';

create view waste as
select day, reason, namespace, sum(effective_cost) as cost, sum(gpu_seconds) / 3600 as gpu_hours,
    count(distinct run_id) as instances
from charge_daily('UTC') where reason <> 'useful'
group by day, reason, namespace;
comment on view waste is
'What was paid while no workload ran: booting, stopped_storage (its workload was over), draining, failed_provision (it never ran), minimum_charge, duplicate, orphan (nobody''s), unused_commitment. One row a UTC day, reason and namespace; waste and useful are the total.';

create view failed_provision as
select coalesce(a.settled_at, a.created_at) as time, r.pod_namespace as namespace, r.pod_name as pod,
    a.provider as provider_name, a.account, a.region, a.accelerator, a.tier as capacity_type,
    coalesce(a.rejection, u.end_reason, a.outcome) as reason, a.message,
    extract(epoch from coalesce(u.gone_at, a.settled_at) - a.created_at) as seconds,
    coalesce(c.cost, 0) as cost,
    (select n.provider from rental n where n.pod_uid = r.pod_uid and n.created_at > r.created_at
        order by n.created_at limit 1) as next_provider
from provision_attempt a join rental r on r.claim_uid = a.claim_uid
left join run u on u.claim_uid = a.claim_uid and u.attempt = a.number
left join lateral (
    select sum(case when x.is_instant then x.effective_once else x.effective_usd_per_hour * x.seconds end) / 3600 as cost
    from charge x where x.run_id = u.id
) c on true
where a.outcome in ('rejected', 'avoided', 'absent', 'unsent', 'throttled')
    or (u.gone_at is not null and u.running_at is null and u.provider_started_at is null);
comment on view failed_provision is
'Attempts that gave nobody a running workload: refused, never arrived, or ended before they ran, with what they cost all the same. One row an attempt.';

create view provider_scorecard as
select date_trunc('month', a.created_at, 'UTC') as month, a.provider as provider_name, a.region, a.accelerator,
    count(*) as attempts,
    count(*) filter (where u.running_at is not null)::numeric / count(*) as success_ratio,
    percentile_cont(0.5) within group (order by extract(epoch from u.running_at - a.created_at)) as boot_p50_s,
    percentile_cont(0.95) within group (order by extract(epoch from u.running_at - a.created_at)) as boot_p95_s,
    count(*) filter (where u.end_reason = 'preempted')::numeric
        / nullif(count(*) filter (where u.running_at is not null), 0) as interruption_rate,
    sum(c.cost) / nullif(sum(c.gpu_hours), 0) as usd_per_useful_gpu_hour
from provision_attempt a
left join run u on u.claim_uid = a.claim_uid and u.attempt = a.number
left join lateral (
    select sum(case when x.is_instant then x.effective_once else x.effective_usd_per_hour * x.seconds end) / 3600 as cost,
        sum(x.gpus * x.seconds) filter (where x.phase = 'running' and not x.is_instant) / 3600 as gpu_hours
    from charge x where x.run_id = u.id
) c on true
where a.outcome is not null
group by 1, 2, 3, 4;
comment on view provider_scorecard is
'How well a place serves: attempts, the share that ran, seconds to run, reclaims, dollars a useful GPU hour. One row a UTC month, provider, region and accelerator.';

create view price_history as
select provider as provider_name, account, sku as sku_id, region as region_id, tier as capacity_type, meter, unit, quantity,
    lower(valid) as since, upper(valid) as until, usd as list_unit_price,
    usd - lag(usd) over (partition by provider, account, sku, region, tier, meter order by lower(valid)) as delta,
    source, observed_at
from price_point;
comment on view price_history is 'Every listed price with its time, and its change from the one before. One row a price.';

create view price_drift as
select r.provider_name, r.account, r.resource_id, r.meter, r.paid_unit_price, p.usd as listed_unit_price,
    r.paid_unit_price - p.usd as delta, r.paid_unit_price / nullif(p.usd, 0) - 1 as delta_ratio
from (
    select s.meter, s.usd as paid_unit_price, u.resource_id, l.provider as provider_name, l.account, l.sku, l.region, l.tier
    from billing_segment s join run u on u.id = s.run_id join label_set l on l.id = s.label_set_id
    where upper_inf(s.period)
) r join price_point p on p.provider = r.provider_name and p.account = r.account and p.sku = r.sku
    and p.region in (r.region, '') and p.tier = r.tier and p.meter = r.meter and upper_inf(p.valid)
where p.usd is distinct from r.paid_unit_price;
comment on view price_drift is 'Machines that run at another price than is listed now. One row a machine and meter.';

create view budget_status as
with due as (
    select b.name, b.namespace, b.team, b.pool, b.labels, b.amount_usd, b.period, b.action, b.label_action, b.thresholds,
        b.look_ahead_s, case b.period when 'total' then b.created_at else date_trunc(b.period, statement_timestamp(), 'UTC') end as period_start,
        case b.period when 'total' then null
            else date_trunc(b.period, statement_timestamp(), 'UTC') + ('1 ' || b.period)::interval end as period_end
    from budget b
), live as materialized (
    select label_set_id, sum(usd_per_hour) as usd_per_hour from burn_machine group by label_set_id
), counted as (
    select d.*,
        coalesce((select sum(c.billed_dollar_seconds) from cost_lines(d.period_start, statement_timestamp(), 'all', 'UTC') c
            join label_set l on l.id = c.label_set_id
            where (d.namespace is null or l.namespace = d.namespace) and (d.team is null or l.team = d.team)
                and (d.pool is null or l.pool = d.pool) and (d.labels = '{}' or l.tags @> d.labels)), 0) / 3600
        -- What has no price counts with the ceiling of its claim, once a machine, until there is one.
        + coalesce((select sum(u.usd) from unpriced_by_machine(d.period_start) u join label_set l on l.id = u.label_set_id
            where (d.namespace is null or l.namespace = d.namespace) and (d.team is null or l.team = d.team)
                and (d.pool is null or l.pool = d.pool) and (d.labels = '{}' or l.tags @> d.labels)), 0) as spent,
        coalesce((select sum(v.usd_per_hour) from live v join label_set l on l.id = v.label_set_id
            where (d.namespace is null or l.namespace = d.namespace) and (d.team is null or l.team = d.team)
                and (d.pool is null or l.pool = d.pool) and (d.labels = '{}' or l.tags @> d.labels)), 0) as live_usd_per_hour
    from due d
)
select name, namespace, team, pool as nodepool, amount_usd as amount, period, period_start, period_end, spent,
    live_usd_per_hour as committed_rate, spent / amount_usd as used_ratio,
    spent + live_usd_per_hour * coalesce(extract(epoch from period_end - statement_timestamp()), look_ahead_s) / 3600 as forecast,
    case when spent >= amount_usd then statement_timestamp()
        when live_usd_per_hour > 0 then statement_timestamp()
            + make_interval(secs => least((amount_usd - spent) / live_usd_per_hour * 3600, 3153600000)::float8) end as exhausted_at,
    action, thresholds, look_ahead_s, labels, label_action
from counted;
comment on view budget_status is
'What each budget has left in its period: spent so far (what has no price at its ceiling), what runs an hour, and when that uses it up. What one with labels does is in label_action, and its action is Alert. One row a budget.';

create view cost_forecast as
with spent as (
    select namespace, sum(billed_dollar_seconds) filter (where day >= date_trunc('month', statement_timestamp(), 'UTC')::date) / 3600 as month,
        sum(billed_dollar_seconds) filter (where day >= (statement_timestamp() at time zone 'UTC')::date - 7
            and day < (statement_timestamp() at time zone 'UTC')::date) / 3600 / 7 as a_day
    from cost_day_lines group by namespace
), live as (
    select namespace, sum(usd_per_hour) as usd_per_hour from burn_rate group by namespace
), left_ as (
    select extract(epoch from date_trunc('month', statement_timestamp(), 'UTC') + interval '1 month' - statement_timestamp()) / 3600 as hours
)
select coalesce(s.namespace, l.namespace) as namespace, date_trunc('month', statement_timestamp(), 'UTC') as month,
    coalesce(s.month, 0) as spent, coalesce(s.month, 0) + coalesce(l.usd_per_hour, 0) * h.hours as run_rate_forecast,
    coalesce(s.month, 0) + coalesce(s.a_day, 0) * h.hours / 24 as trend_forecast,
    coalesce(s.month, 0) + least(coalesce(l.usd_per_hour, 0), coalesce(s.a_day, 0) / 24) * h.hours as low,
    coalesce(s.month, 0) + greatest(coalesce(l.usd_per_hour, 0), coalesce(s.a_day, 0) / 24) * h.hours as high
from spent s full join live l using (namespace) cross join left_ h;
comment on view cost_forecast is
'To the end of the UTC month: what is spent, and what it comes to if all that runs goes on (run_rate), or the last seven days do (trend). One row a namespace.';

create view reconciliation as
with ours as (
    select r.provider, r.account, r.resource_id, l.ended_at, l.closed_at, l.billed_at,
        coalesce((select sum(s.dollar_seconds) from segment s where s.run_id = l.run_id), 0)
        + coalesce((select sum(j.dollar_seconds) from billing_adjustment j where j.run_id = l.run_id
            and j.kind <> 'invoice_true_up'), 0) as before,
        coalesce((select sum(j.dollar_seconds) from billing_adjustment j where j.run_id = l.run_id
            and j.kind = 'invoice_true_up'), 0) as true_up
    from ledger_run l join run r on r.id = l.run_id where l.closed_at is not null
), theirs as (
    select provider, account, resource_id, sum(usd) as usd, max(ends_at) as ended_at, bool_and(final) as final,
        max(claim_uid) as claim_uid
    from provider_bill_line group by 1, 2, 3
)
select (coalesce(o.ended_at, o.closed_at, t.ended_at) at time zone 'UTC')::date as day,
    provider as provider_name, account, resource_id,
    (o.before + o.true_up) / 3600 as ledger_cost, o.before / 3600 as ledger_cost_before_bill,
    t.usd as provider_billed_cost, (o.before + o.true_up) / 3600 - t.usd as delta,
    ((o.before + o.true_up) / 3600 - t.usd) / nullif(t.usd, 0) as delta_ratio,
    case
        when t.usd is null and not coalesce(b.bills, false) then 'no_bill'
        when t.usd is null then case when o.closed_at > statement_timestamp() - interval '2 days' then 'late' else 'ledger_only' end
        when o.before is null then 'provider_only'
        when not t.final or o.billed_at is null then 'late'
        when o.true_up = 0 and o.before / 3600 <> t.usd then 'rounding'
        else 'matched'
    end as status
from ours o full join theirs t using (provider, account, resource_id)
left join billing_rule b using (provider, account)
where o.before is not null or t.claim_uid is not null;
comment on view reconciliation is
'The ledger beside the clouds'' own bills: matched, rounding (within the bill''s digits), late (not final yet), ledger_only, provider_only, no_bill (that cloud tells none). One row a machine of ours that is over.';

create view pod_receipt as
select c.namespace, c.pod_name as name, c.pod_uid as uid, c.provider_name, c.account, c.region_id, c.capacity_type,
    c.accelerator, c.accelerator_count, c.resource_id, c.nodepool, c.workload_kind, c.workload_name, c.team,
    c.phase, c.kind, c.meter, c.price_source, c.confidence,
    min(c.charge_period_start) as started, max(c.charge_period_end) as ended, bool_or(c.is_open) as is_open,
    sum(c.seconds) as seconds,
    sum(case when c.is_instant then c.effective_once else c.effective_usd_per_hour * c.seconds end) / 3600 as cost,
    sum(case when c.is_instant then c.list_once
        else coalesce(c.list_usd_per_hour, c.effective_usd_per_hour) * c.seconds end) / 3600 as on_demand_equivalent,
    bool_or(c.is_unpriced) as is_unpriced, min(c.reason) as reason
from charge_use c where c.run_id is not null
group by 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19;
comment on view pod_receipt is
'What one Pod''s machines cost, line by line. One row a machine, phase, meter, kind and price source.';
