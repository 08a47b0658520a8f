-- The many are added up by themselves, by hashing and not by run: five thousand in a few milliseconds. The other two
-- are rare, and added to what came of it. A machine is in one phase at a time, so that the first of its meters counts it.
create view burn_rate as
with begun as (
    select label_set_id, phase, quantity * usd as usd, quantity * coalesce(list_usd, usd) as list_usd,
        row_number() over (partition by run_id) = 1 as is_first
    from billing_segment where upper_inf(period) and lower(period) <= statement_timestamp()
), ending as (
    -- Where the end of a price is known already, what goes on for ever begins there, and this is what runs now.
    select s.label_set_id, s.phase, s.quantity * s.usd as usd, s.quantity * coalesce(s.list_usd, s.usd) as list_usd,
        row_number() over (partition by s.run_id) = 1 and not exists (select from billing_segment b
            where b.run_id = s.run_id and upper_inf(b.period) and lower(b.period) <= statement_timestamp()) as is_first
    from billing_segment s where not upper_inf(s.period) and s.period @> statement_timestamp() and s.run_id in (
        select run_id from billing_segment where upper_inf(period) and lower(period) > statement_timestamp())
), unpriced as (
    -- What is missing up to the ceiling of its claim, where a meter of it has no price.
    select s.label_set_id, s.phase,
        greatest(max(r.ceiling_usd_per_hour) - coalesce(sum(s.quantity * s.usd), 0), 0) as usd,
        case when count(coalesce(s.list_usd, s.usd)) = 0 then coalesce(max(r.ceiling_usd_per_hour), 0) end as list_usd
    from billing_segment s join run r on r.id = s.run_id
    where s.period @> statement_timestamp() and s.run_id in (
        select u.run_id from billing_segment u where u.usd is null and u.period @> statement_timestamp())
    group by s.run_id, s.label_set_id, s.phase
), line as (
    select l.provider, l.account, l.pool, l.namespace, l.team, l.accelerator, l.tier, s.phase,
        count(*) filter (where s.is_first) as instances, sum(l.accelerator_count) filter (where s.is_first) as gpus,
        sum(s.usd) as usd, sum(s.list_usd) as list_usd, 0 as unpriced
    from begun s join label_set l on l.id = s.label_set_id group by 1, 2, 3, 4, 5, 6, 7, 8
    union all
    select l.provider, l.account, l.pool, l.namespace, l.team, l.accelerator, l.tier, s.phase,
        s.is_first::int, case when s.is_first then l.accelerator_count end, s.usd, s.list_usd, 0
    from ending s join label_set l on l.id = s.label_set_id
    union all
    select l.provider, l.account, l.pool, l.namespace, l.team, l.accelerator, l.tier, s.phase, 0, 0, s.usd, s.list_usd, 1
    from unpriced s join label_set l on l.id = s.label_set_id
)
select provider as provider_name, account, pool as nodepool, namespace, team, accelerator, tier as capacity_type, phase,
    sum(instances)::bigint as instances, sum(gpus)::bigint as gpus, coalesce(sum(usd), 0) as usd_per_hour,
    coalesce(sum(list_usd), 0) as list_usd_per_hour, sum(unpriced)::bigint as unpriced
from line group by 1, 2, 3, 4, 5, 6, 7, 8;
comment on view burn_rate is
'What runs now costs an hour: one row a provider account, NodePool, namespace, team, accelerator, tier and phase. A machine without a price counts with the ceiling of its claim, and is told of in unpriced.';

-- Those that are over and booked are most, and are not looked at.
create view ledger_lag as
select provider, min(behind_since) as behind_since from (
    select r.provider, case when l.facts_at is distinct from r.changed_at then r.changed_at end as behind_since
    from ledger_run l join run r on r.id = l.run_id where l.closed_at is null
    union all
    select r.provider, r.changed_at from run r
    where (r.gone_at is null or r.changed_at > statement_timestamp() - interval '7 days')
        and not exists (select from ledger_run l where l.run_id = r.id)
) e group by provider;
comment on view ledger_lag is
'Since when the ledger has not taken up what was seen of a machine that is not over, or of one that it has not booked (of those that are gone, of the last week: nebula cost verify looks at all); null: it has. One row a provider.';

create view exposure as
select a.claim_uid, a.number as attempt, a.provider as provider_name, a.account, a.region, a.tier as capacity_type,
    a.accelerator, r.pool as nodepool, r.pod_namespace as namespace, r.pod_name as pod, a.send_by,
    a.created_at as since, a.ceiling_usd_per_hour as usd_per_hour
from provision_attempt a join rental r on r.claim_uid = a.claim_uid
where a.outcome is null;
comment on view exposure is
'Orders that may have been taken without anybody knowing yet: no charge, but what they would cost at most. One row an attempt.';

-- A price may come late for a part of what is frozen: the newest adjustment of a meter says what of it has none still. That
-- of a run that was open corrects up to the end of a closed month, and says nothing of what is frozen after it. Those of
-- versions before 0011 name no times: until the next leader has derived their runs anew, they hold for all of it.
create view unpriced as
with late as (
    select distinct on (j.run_id, j.meter) j.run_id, j.meter, j.label_set_id, j.phase, j.reason,
        coalesce(j.unpriced, '{}') as unpriced, (j.corrects + interval '1 month') at time zone 'UTC' as until
    from billing_adjustment j
    where j.unpriced is not null or (j.unpriced_seconds is null and j.dollar_seconds is not null
        and (j.kind = 'late_price' or (j.kind = 'late_fact' and j.seconds < 0)))
    order by j.run_id, j.meter, j.id desc
), piece as (
    select s.id as segment_id, s.run_id, s.label_set_id, s.meter, s.phase, s.why, p.part
    from segment s left join late l on l.run_id = s.run_id and l.meter = s.meter and s.frozen
        and (l.until is null or lower(s.period) < l.until)
    cross join lateral unnest(case when l.run_id is null then tstzmultirange(s.period)
        else l.unpriced * tstzmultirange(s.period) end) p (part)
    where s.usd is null
    union all
    -- Time that itself came late lies in no segment; and what had a price may have lost it.
    select null, l.run_id, l.label_set_id, l.meter, l.phase, l.reason, p.part
    from late l cross join lateral unnest(l.unpriced - coalesce((select range_agg(s.period) from segment s
        where s.run_id = l.run_id and s.meter = l.meter and s.frozen and s.usd is null), '{}')) p (part)
)
select p.segment_id, r.provider as provider_name, r.account, r.resource_id, a.namespace, r.pod_name as pod,
    p.meter, p.phase, lower(p.part) as since,
    extract(epoch from least(upper(p.part), greatest(statement_timestamp(), lower(p.part))) - lower(p.part)) / 3600
        as hours,
    r.ceiling_usd_per_hour, p.why, p.run_id, a.team, a.pool as nodepool,
    least(upper(p.part), statement_timestamp()) as until, p.label_set_id
from piece p join run r on r.id = p.run_id join label_set a on a.id = p.label_set_id
where lower(p.part) <= statement_timestamp()
    and not exists (select from ledger_run b where b.run_id = p.run_id and b.billed_at is not null);
comment on view unpriced is
'Seconds whose price nobody knows yet: recorded, and counted nowhere as zero. One row a segment, or a part of one where a price came late for the rest; a price that comes late, or the cloud''s own bill, takes it from here.';

create function unpriced_by_machine(t_from timestamptz)
returns table (run_id bigint, label_set_id bigint, usd numeric)
language sql stable as $$
    select m.run_id, m.label_set_id, (select m.ceiling_usd_per_hour * sum(extract(epoch from upper(p) - lower(p))) / 3600
        from unnest(m.time) p)
    from (
        select run_id, label_set_id, ceiling_usd_per_hour, range_agg(tstzrange(greatest(since, t_from), until)) as time
        from unpriced where until > t_from group by run_id, label_set_id, ceiling_usd_per_hour
    ) m
$$;
comment on function unpriced_by_machine(timestamptz) is
'Report: what machines without a price may have cost from t_from on, at most: the ceilings of their claims for that time, once a machine. Dollars.';

create view burn_machine as
select m.run_id, m.label_set_id, m.phase,
    case when m.unpriced then greatest(coalesce(r.ceiling_usd_per_hour, 0), coalesce(m.usd, 0)) else m.usd end as usd_per_hour
from (
    select run_id, label_set_id, phase, sum(quantity * usd) as usd, bool_or(usd is null) as unpriced
    from billing_segment where period @> statement_timestamp() group by run_id, label_set_id, phase
) m join run r on r.id = m.run_id;
comment on view burn_machine is
'What each machine costs an hour now, the ceiling of its claim where a meter of it has no price. One row a machine.';
