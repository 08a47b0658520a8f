create view orphan_open as
select id as finding_id, kind, provider, account, region, resource_id,
    extract(epoch from now() - exists_since)::bigint as age_s, sightings, usd_per_hour,
    usd_per_hour * extract(epoch from now() - exists_since) / 3600 as cost_so_far,
    namespace, workload, claim_uid, why, decision, decided_by, eligible_at, blocked_by,
    first_seen_at, last_seen_at, executed_at
from orphan_finding
where resolved_at is null;
comment on view orphan_open is
'Findings of the sweep that are open: what they cost an hour and so far (an estimate, null is unpriced), whom they belong to, what happens next and which rail holds it back. One row a finding.';

create view orphan_history as
select date_trunc('day', first_seen_at at time zone 'UTC')::date as day, kind, provider, count(*) as findings,
    avg(extract(epoch from first_seen_at - exists_since))::bigint as mean_detect_s,
    avg(extract(epoch from gone_confirmed_at - first_seen_at))::bigint as mean_gone_s,
    sum(cost_so_far) as usd, count(*) filter (where usd_per_hour is null) as unpriced
from orphan_finding
group by 1, 2, 3;
comment on view orphan_history is
'How many findings of each kind began on each UTC day, how long it took from birth to finding and from finding to the proven end, and what they cost. Null costs are counted in unpriced.';

create view orphan_cost as
select date_trunc('day', coalesce(gone_confirmed_at, resolved_at, now()) at time zone 'UTC')::date as day,
    namespace, provider, count(*) as machines, sum(cost_so_far) as usd,
    count(*) filter (where usd_per_hour is null) as unpriced
from orphan_finding
where kind in ('no-claim', 'duplicate', 'stale-attempt')
group by 1, 2, 3;
comment on view orphan_cost is
'What was lost to machines without an owner, by UTC day of their end, namespace and provider. An estimate at the price shown; waste has the ledger''s own figure.';

create view instance_inventory as
select s.provider, s.account, s.region, s.resource_id, s.identity,
    case when s.claim_uid is not null then 'ours'
        when s.identity ~ '^nb-[a-z2-7]{10}-[a-z2-7]{26}-[0-9]+-[0-9]+-[a-z2-7]{4}$' then 'other installation'
        else 'foreign' end as whose,
    s.state, extract(epoch from now() - coalesce(s.provider_created_at, s.first_seen_at))::bigint as age_s,
    s.usd_per_hour, s.claim_uid, r.pod_namespace as namespace, r.pod_name as pod, s.first_seen_at
from instance_seen s
left join rental r on r.claim_uid = s.claim_uid
where s.absent_since is null and s.state <> 'gone';
comment on view instance_inventory is
'Every machine that the newest lists show in every account: ours, of another installation, or foreign; state, age and dollars an hour. One row a machine.';

create view sweep_health as
select l.provider, l.account, l.region,
    max(l.last_ended_at) filter (where l.complete) as last_complete_at,
    extract(epoch from now() - max(l.last_ended_at) filter (where l.complete))::bigint as lag_s,
    (array_agg(l.reason order by l.id desc))[1] as unknown,
    (select r.report_only from sweep_run r order by r.id desc limit 1) as report_only,
    (select r.finished_at from sweep_run r order by r.id desc limit 1) as swept_at
from list_round l
group by l.provider, l.account, l.region;
comment on view sweep_health is
'When each place was last listed whole, why its newest list is not whole, and why the sweep would end nothing. One row a list.';

create view unowned_spend as
with line as (
    select b.provider, b.account, (b.ends_at at time zone 'UTC')::date as day, b.usd,
        case when b.claim_uid is not null or exists (select from run r where r.provider = b.provider
                and r.account = b.account and r.resource_id = b.resource_id) then 'ours'
            when exists (select from instance_seen s where s.provider = b.provider and s.account = b.account
                and s.resource_id = b.resource_id and s.claim_uid is null) then 'others'
            else 'unexplained' end as whose
    from provider_bill_line b
)
select day, provider as provider_name, account, sum(usd) as provider_billed_cost,
    coalesce(sum(usd) filter (where whose = 'ours'), 0) as ours,
    coalesce(sum(usd) filter (where whose = 'others'), 0) as others,
    coalesce(sum(usd) filter (where whose = 'unexplained'), 0) as unexplained
from line group by 1, 2, 3;
comment on view unowned_spend is
'What a cloud has charged on each UTC day, and how much of it no machine of ours, of another installation or of a stranger explains. One row a day and account; only of clouds that tell their bill.';
