create view burn_rate as
with running as (
    select * from billing_segment where upper_inf(period) and lower(period) <= statement_timestamp()
    union all
    -- Where the end of a price is known already, what goes on for ever begins there, and this is what runs now.
    select * from billing_segment where not upper_inf(period) and period @> statement_timestamp() and run_id in (
        select run_id from billing_segment where upper_inf(period) and lower(period) > statement_timestamp())
), live as (
    select s.run_id, s.label_set_id, s.phase,
        sum(s.quantity * s.usd) as usd, sum(s.quantity * coalesce(s.list_usd, s.usd)) as list_usd,
        bool_or(s.usd is null) as unpriced
    from running s
    group by s.run_id, s.label_set_id, s.phase
)
-- A machine is in one phase at a time, so that rows can be counted; its ceiling is looked up only where it counts.
select l.provider as provider_name, l.account, l.pool as nodepool, l.namespace, l.team, l.accelerator,
    l.tier as capacity_type, v.phase,
    count(*) as instances,
    sum(l.accelerator_count) as gpus,
    sum(case when v.unpriced then greatest(coalesce((select r.ceiling_usd_per_hour from run r where r.id = v.run_id), 0),
        coalesce(v.usd, 0)) else v.usd end) as usd_per_hour,
    sum(coalesce(v.list_usd, (select r.ceiling_usd_per_hour from run r where r.id = v.run_id), 0)) as list_usd_per_hour,
    count(*) filter (where v.unpriced) as unpriced
from live v join label_set l on l.id = v.label_set_id
group by 1, 2, 3, 4, 5, 6, 7, 8;
comment on view burn_rate is
'What runs now costs an hour: one row a provider account, NodePool, namespace, team, accelerator, tier and phase. A machine without a price counts with the ceiling of its claim, and is told of in unpriced.';

create view exposure as
select a.claim_uid, a.number as attempt, a.provider as provider_name, a.account, a.region, a.tier as capacity_type,
    a.accelerator, r.pool as nodepool, r.pod_namespace as namespace, r.pod_name as pod, a.send_by,
    a.created_at as since, a.ceiling_usd_per_hour as usd_per_hour
from provision_attempt a join rental r on r.claim_uid = a.claim_uid
where a.outcome is null;
comment on view exposure is
'Orders that may have been taken without anybody knowing yet: no charge, but what they would cost at most. One row an attempt.';

create view unpriced as
select s.id as segment_id, r.provider as provider_name, r.account, r.resource_id, l.namespace, r.pod_name as pod,
    s.meter, s.phase, lower(s.period) as since,
    extract(epoch from least(upper(s.period), greatest(statement_timestamp(), lower(s.period))) - lower(s.period)) / 3600
        as hours,
    r.ceiling_usd_per_hour, s.why, s.run_id, l.team, l.pool as nodepool,
    least(upper(s.period), statement_timestamp()) as until
from segment s join run r on r.id = s.run_id join label_set l on l.id = s.label_set_id
where s.usd is null and lower(s.period) <= statement_timestamp() and not exists (
    select from billing_adjustment j where j.run_id = s.run_id and j.dollar_seconds is not null
        and (j.kind = 'invoice_true_up' or (j.kind = 'late_price' and j.meter = s.meter)
            -- A price of the whole machine came late: all seconds of this meter were taken off, and are another's.
            or (j.kind = 'late_fact' and j.meter = s.meter and j.seconds < 0
                and (select sum(t.seconds) from segment t where t.run_id = s.run_id and t.meter = s.meter and t.frozen)
                    + (select sum(t.seconds) from billing_adjustment t where t.run_id = s.run_id and t.meter = s.meter)
                    <= 0)));
comment on view unpriced is
'Seconds whose price nobody knows yet: recorded, and counted nowhere as zero. One row a segment; a price that comes late, or the cloud''s own bill, takes it from here.';
