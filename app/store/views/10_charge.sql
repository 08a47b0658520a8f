-- What old segments are read by, wherever they are kept. since_month and until_month say where that can be.
create view segment as
select id, run_id, label_set_id, meter, phase, period, quantity, usd, list_usd, price_source, confidence, why,
    commitment_id, gpus, frozen, seconds, dollar_seconds, false as is_archived,
    '-infinity'::date as since_month, 'infinity'::date as until_month
from billing_segment
union all
select id, run_id, label_set_id, meter, phase, period, quantity, usd, list_usd, price_source, confidence, why,
    commitment_id, gpus, true, seconds, dollar_seconds, true, month, month
from billing_segment_archive;
comment on view segment is
'One run x meter x phase x price, hot or archived (then cut at the months'' edges).';

create view closed_period as select month, closed_at, summed, dropped from closed_month;
comment on view closed_period is
'UTC months that are closed: nothing before their end changes any more. dropped: their segments are past retention, their sums stay. One row a month.';

-- Everything else reads from here, so that all totals agree by construction.
create view charge as
select
    'segment:' || s.id as charge_id,
    s.run_id,
    s.label_set_id,
    'Usage' as charge_category,
    null::date as corrects,
    s.period,
    lower(s.period) as charge_period_start,
    -- A price whose end is known ends a segment ahead of time: nothing is spent before it is there.
    case when s.frozen then upper(s.period)
        else least(upper(s.period), greatest(statement_timestamp(), lower(s.period))) end as charge_period_end,
    not s.frozen and (upper_inf(s.period) or upper(s.period) > statement_timestamp()) as is_open,
    false as is_instant,
    s.meter,
    s.phase,
    'usage' as kind,
    s.gpus,
    s.quantity,
    extract(epoch from case when s.frozen then upper(s.period)
        else least(upper(s.period), greatest(statement_timestamp(), lower(s.period))) end - lower(s.period)) as seconds,
    s.list_usd as list_unit_price,
    s.usd as contracted_unit_price,
    s.quantity * s.list_usd as list_usd_per_hour,
    s.quantity * s.usd as effective_usd_per_hour,
    case when s.commitment_id is null then s.quantity * s.usd else 0 end as billed_usd_per_hour,
    0::numeric as list_once,
    0::numeric as effective_once,
    0::numeric as billed_once,
    s.commitment_id,
    s.price_source,
    s.confidence,
    s.usd is null as is_unpriced,
    0::numeric as unpriced_once,
    s.why,
    null::text as invoice,
    s.since_month,
    s.until_month
from segment s
union all
select
    'adjustment:' || j.id,
    j.run_id,
    j.label_set_id,
    case when j.kind in ('credit', 'refund') then 'Credit' when j.kind = 'tax' then 'Tax'
        when j.kind in ('rounding', 'minimum') then 'Usage' else 'Adjustment' end,
    j.corrects,
    tstzrange(j.at, j.at, '[]'),
    j.at,
    j.at,
    false,
    true,
    j.meter,
    j.phase,
    j.kind,
    0,
    1,
    j.seconds,
    null, null, null, null, null,
    coalesce(j.list_dollar_seconds, 0),
    j.dollar_seconds,
    case when j.commitment_id is null then j.dollar_seconds else 0 end,
    j.commitment_id,
    case when j.kind = 'invoice_true_up' then 'billed' else 'quoted' end,
    case when j.dollar_seconds is null then 'unpriced' else 'firm' end,
    j.dollar_seconds is null,
    coalesce(j.unpriced_seconds, case when j.dollar_seconds is null then j.seconds else 0 end),
    j.reason,
    j.invoice,
    '-infinity'::date, 'infinity'::date
from billing_adjustment j
union all
select
    'purchase:' || c.id, null, c.label_set_id, 'Purchase', null, tstzrange(c.purchased_at, c.purchased_at, '[]'),
    c.purchased_at, c.purchased_at, false, true, '', '', 'purchase', 0, 1, 0, null, null, null, null, null,
    0, 0, c.amount_usd * 3600, c.id, 'quoted', 'firm', false, 0, c.reason, null, '-infinity'::date, 'infinity'::date
from commitment c
union all
-- One that was noted by mistake is taken off: at the instant of its purchase, unless that is in a closed month.
select
    'void:' || c.id, null, c.label_set_id, 'Purchase',
    case when c.reversed_at <> c.purchased_at then date_trunc('month', c.purchased_at at time zone 'UTC')::date end,
    tstzrange(c.reversed_at, c.reversed_at, '[]'), c.reversed_at, c.reversed_at, false, true, '', '', 'void', 0, 1, 0,
    null, null, null, null, null, 0, 0, -c.amount_usd * 3600, c.id, 'quoted', 'firm', false, 0, c.void_reason, null,
    '-infinity'::date, 'infinity'::date
from commitment c where c.voided_at is not null
union all
select
    'void:' || c.id || ':unused', null, c.label_set_id, 'Usage',
    date_trunc('month', upper(c.valid) at time zone 'UTC')::date,
    tstzrange(c.unused_reversed_at, c.unused_reversed_at, '[]'), c.unused_reversed_at, c.unused_reversed_at, false,
    true, '', '', 'unused', 0, 1, 0, null, null, null, null, null, 0, -c.amount_usd * 3600, 0, c.id, 'quoted', 'firm',
    false, 0, c.void_reason, null, '-infinity'::date, 'infinity'::date
from commitment c where c.unused_reversed_at is not null
union all
-- What came after the term (a correction) is taken off at its own instant, so that a closed month stays.
select
    'unused:' || c.id, null, c.label_set_id, 'Usage', null, tstzrange(upper(c.valid), upper(c.valid), '[]'),
    upper(c.valid), upper(c.valid), false, true, '', '', 'unused', 0, 1, 0, null, null, null, null, null,
    0, c.amount_usd * 3600
        - coalesce((select sum(s.dollar_seconds) from segment s where s.commitment_id = c.id), 0)
        - coalesce((select sum(j.dollar_seconds) from billing_adjustment j where j.commitment_id = c.id
            and j.at <= upper(c.valid)), 0),
    0, c.id, 'quoted', 'firm', false, 0, 'what was paid for and not used', null, '-infinity'::date, 'infinity'::date
from commitment c
where upper(c.valid) <= statement_timestamp() and (c.voided_at is null or c.unused_reversed_at is not null)
union all
select
    'unused:' || c.id || ':' || j.id, null, c.label_set_id, 'Usage', j.corrects, tstzrange(j.at, j.at, '[]'),
    j.at, j.at, false, true, '', '', 'unused', 0, 1, 0, null, null, null, null, null,
    0, -j.dollar_seconds, 0, c.id, 'quoted', 'firm', false, 0, 'what turned out to be used, or not', null,
    '-infinity'::date, 'infinity'::date
from commitment c join billing_adjustment j on j.commitment_id = c.id and j.at > upper(c.valid)
where j.dollar_seconds is not null and (c.voided_at is null or c.unused_reversed_at is not null);

comment on view charge is
'One segment of a machine (its price for its seconds; an open one ends now), or one adjustment: dollars that fall whole on the instant charge_period_start. Dollars are (per_hour x seconds + once) / 3600. Billed: on the cloud''s invoice; effective: what is paid in advance is spread over what it covers; list: on demand. Null is not known, never zero.';

create view attribution as
select id as label_set_id, namespace, workload_kind, workload_name, team, cost_center, pool, provider, account,
    account_id, region, sku, tier, accelerator, accelerator_count, tags
from label_set;
comment on view attribution is
'Who a charge is put down to, as it was when the money was spent. One row a distinct attribution; cost_lines and charge name it by label_set_id.';

-- The earliest is known by sums where segments are past retention; each of these is one look at an index.
create view ledger_begin as
select least(
    (select min(lower(period)) from billing_segment),
    (select min(month)::timestamp at time zone 'UTC' from closed_month),
    (select min(day)::timestamp at time zone 'UTC' from cost_day)) as since;
comment on view ledger_begin is 'No segment begins before this instant. One row.';

create view sealed_day as select day, dirty, sealed_at from cost_day;
comment on view sealed_day is 'UTC days that are added up; a dirty one is read from its charges. One row a day.';

create view sealed_cost as
select day, label_set_id, meter, phase, kind, seconds, gpu_seconds, billed_dollar_seconds, effective_dollar_seconds,
    list_dollar_seconds, guessed_dollar_seconds, estimated_dollar_seconds, unpriced_seconds
from cost_daily;
comment on view sealed_cost is 'Sums of sealed UTC days. One row a day, attribution, meter, phase and kind.';

create view sealed_month_cost as
select month, label_set_id, meter, phase, kind, seconds, gpu_seconds, billed_dollar_seconds, effective_dollar_seconds,
    list_dollar_seconds, guessed_dollar_seconds, estimated_dollar_seconds, unpriced_seconds
from cost_monthly;
comment on view sealed_month_cost is 'Sums of closed UTC months. One row a month, attribution, meter, phase and kind.';

-- Functions read views only, so that a role which may read nothing else can call them.
-- The exact part of every charge in a window: an adjustment is in it whole, or not at all.
create function charge_between(t_from timestamptz, t_to timestamptz)
returns table (
    charge_id text, run_id bigint, label_set_id bigint, meter text, phase text, kind text, corrects date,
    starts timestamptz, ends timestamptz, seconds numeric, gpu_seconds numeric,
    billed_dollar_seconds numeric, effective_dollar_seconds numeric, list_dollar_seconds numeric,
    guessed_dollar_seconds numeric, estimated_dollar_seconds numeric, unpriced_seconds numeric,
    is_unpriced boolean, commitment_id bigint
)
language sql stable as $$
    select c.charge_id, c.run_id, c.label_set_id, c.meter, c.phase, c.kind, c.corrects, t.starts, t.ends, t.seconds,
        case when c.is_instant then 0 else c.gpus * t.seconds end,
        case when c.is_instant then c.billed_once else c.billed_usd_per_hour * t.seconds end,
        case when c.is_instant then c.effective_once else c.effective_usd_per_hour * t.seconds end,
        case when c.is_instant then c.list_once else coalesce(c.list_usd_per_hour, c.effective_usd_per_hour) * t.seconds end,
        case when c.confidence = 'guessed' then c.effective_usd_per_hour * t.seconds else 0 end,
        case when c.confidence = 'estimated' then c.effective_usd_per_hour * t.seconds else 0 end,
        case when c.is_instant then c.unpriced_once when c.is_unpriced then t.seconds else 0 end,
        c.is_unpriced, c.commitment_id
    from charge c cross join lateral (
        select greatest(c.charge_period_start, t_from) as starts,
            case when c.is_instant then c.charge_period_start else least(c.charge_period_end, t_to) end as ends,
            case when c.is_instant then c.seconds else greatest(0, extract(epoch from
                least(c.charge_period_end, t_to) - greatest(c.charge_period_start, t_from))) end as seconds
    ) t
    where t_from < t_to and c.period && tstzrange(t_from, case when t_from < t_to then t_to else t_from end, '[)')
        and c.charge_period_start < t_to and c.charge_period_end >= t_from
        and c.until_month >= date_trunc('month', t_from at time zone 'UTC')::date
        and c.since_month <= (t_to at time zone 'UTC')::date
$$;
comment on function charge_between(timestamptz, timestamptz) is
'Report: every charge cut exactly to [t_from, t_to). One row a charge; dollars are dollar_seconds / 3600.';

-- The windows of a report in a zone. Hours are hours of the sun; days, weeks and months are those of the wall.
create function report_bucket(t_from timestamptz, t_to timestamptz, unit text, zone text)
returns table (starts timestamptz, ends timestamptz, label text)
language sql stable strict rows 12 as $$
    with edge as (
        select case unit
                when 'hour' then g.at
                else (g.wall at time zone zone) end as at,
            g.wall
        from (
            select null::timestamptz as at, w as wall from (
                select case when unit in ('day', 'week', 'month') then unit end) u (unit),
                generate_series(date_trunc(u.unit, t_from at time zone zone), t_to at time zone zone,
                    ('1 ' || u.unit)::interval) w
            union all
            select h, h at time zone zone from generate_series(
                date_trunc('hour', t_from, zone), t_to, interval '1 hour') h where unit = 'hour'
            union all
            select t_from, t_from at time zone zone where unit = 'all'
        ) g
    ), cut as (
        select greatest(at, t_from) as starts,
            least(coalesce(lead(at) over (order by wall, at), t_to), t_to) as ends, wall
        from edge
    )
    select starts, ends, to_char(wall, case unit when 'hour' then 'YYYY-MM-DD HH24:MI' when 'month' then 'YYYY-MM'
        when 'week' then 'IYYY-"W"IW' else 'YYYY-MM-DD' end)
    from cut where starts < ends
$$;
comment on function report_bucket(timestamptz, timestamptz, text, text) is
'Report: the parts of [t_from, t_to) by unit (all, hour, day, week, month) on the clocks of a zone.';

-- The next ones are strict so that the planner believes how few rows they give, and goes by the indexes.
create function report_month(t_from timestamptz, t_to timestamptz, unit text, zone text)
returns table (month date, starts timestamptz, label text)
language sql stable strict rows 12 as $$
    select m.month, b.starts, b.label from closed_period m join report_bucket(t_from, t_to, unit, zone) b
        on m.month::timestamp at time zone 'UTC' >= b.starts
        and (m.month + interval '1 month') at time zone 'UTC' <= b.ends
    where m.summed and unit in ('all', 'month')
$$;
comment on function report_month(timestamptz, timestamptz, text, text) is
'Report: the summed UTC months that lie whole within a part of [t_from, t_to), and in which one.';

create function report_sealed(t_from timestamptz, t_to timestamptz, unit text, zone text)
returns table (day date, starts timestamptz, label text)
language sql stable strict rows 30 as $$
    select d.day, b.starts, b.label from sealed_day d join report_bucket(t_from, t_to, unit, zone) b
        on d.day::timestamp at time zone 'UTC' >= b.starts
        and (d.day + 1)::timestamp at time zone 'UTC' <= b.ends
    where not d.dirty and not exists (select from report_month(t_from, t_to, unit, zone) m
        where m.month = date_trunc('month', d.day)::date and m.starts = b.starts)
$$;
comment on function report_sealed(timestamptz, timestamptz, text, text) is
'Report: the sealed UTC days that lie whole within a part of [t_from, t_to) and in no summed month of it.';

create function report_piece(t_from timestamptz, t_to timestamptz, unit text, zone text)
returns table (starts timestamptz, label text, span tstzrange)
language sql stable strict rows 2 as $$
    with sealed as (
        select s.starts, range_agg(s.span) as spans from (
            select d.starts, tstzrange(d.day::timestamp at time zone 'UTC', (d.day + 1)::timestamp at time zone 'UTC')
            from report_sealed(t_from, t_to, unit, zone) d
            union all
            select m.starts, tstzrange(m.month::timestamp at time zone 'UTC',
                (m.month + interval '1 month') at time zone 'UTC')
            from report_month(t_from, t_to, unit, zone) m
        ) s (starts, span) group by s.starts
    )
    select b.starts, b.label,
        unnest(tstzmultirange(tstzrange(b.starts, b.ends)) - coalesce(s.spans, '{}'::tstzmultirange))
    from report_bucket(t_from, t_to, unit, zone) b left join sealed s on s.starts = b.starts
$$;
comment on function report_piece(timestamptz, timestamptz, text, text) is
'Report: what is left of the parts of [t_from, t_to) without the summed months and days in them.';

-- Summed months and days come from their sums, everything else from the charges themselves; all are exact.
create function cost_lines(t_from timestamptz, t_to timestamptz, unit text, zone text)
returns table (
    bucket text, bucket_start timestamptz, label_set_id bigint, meter text, phase text, kind text,
    seconds numeric, gpu_seconds numeric, billed_dollar_seconds numeric, effective_dollar_seconds numeric,
    list_dollar_seconds numeric, guessed_dollar_seconds numeric, estimated_dollar_seconds numeric,
    unpriced_seconds numeric
)
language sql stable as $$
    select m.label, m.starts, d.label_set_id, d.meter, d.phase, d.kind, d.seconds, d.gpu_seconds,
        d.billed_dollar_seconds, d.effective_dollar_seconds, d.list_dollar_seconds, d.guessed_dollar_seconds,
        d.estimated_dollar_seconds, d.unpriced_seconds
    from report_month(t_from, t_to, unit, zone) m join sealed_month_cost d on d.month = m.month
    union all
    select s.label, s.starts, d.label_set_id, d.meter, d.phase, d.kind, d.seconds, d.gpu_seconds,
        d.billed_dollar_seconds, d.effective_dollar_seconds, d.list_dollar_seconds, d.guessed_dollar_seconds,
        d.estimated_dollar_seconds, d.unpriced_seconds
    from report_sealed(t_from, t_to, unit, zone) s cross join lateral (
        -- Apart, so that each day is looked up: else the sums of all years are read for a month of them.
        select * from sealed_cost d where d.day = s.day offset 0
    ) d
    union all
    select p.label, p.starts, c.label_set_id, c.meter, c.phase, c.kind, c.seconds, c.gpu_seconds,
        coalesce(c.billed_dollar_seconds, 0), coalesce(c.effective_dollar_seconds, 0),
        coalesce(c.list_dollar_seconds, 0), coalesce(c.guessed_dollar_seconds, 0),
        coalesce(c.estimated_dollar_seconds, 0), c.unpriced_seconds
    from report_piece(t_from, t_to, unit, zone) p cross join lateral (
        -- Apart, so that each piece is looked up by its own edges: else all there is is read once, and compared.
        select * from charge_between(lower(p.span), upper(p.span)) offset 0
    ) c
$$;
comment on function cost_lines(timestamptz, timestamptz, text, text) is
'Report: what [t_from, t_to) costs, in lines that can be added up in any way. One row a bucket of the zone''s clock, attribution, meter, phase and kind, or part of one.';
