"""What the ledger reads of runs and writes of money. One statement reads a tick's work, one writes it.

Writes are compare-and-set on `run.changed_at`: a run whose facts moved meanwhile is written by the next tick.
Segments that are equal stay, so that a tick touches only what differs; a closed run's are frozen, and all
that lies in a closed month. What was derived for other closed months than there are is left.
Only the leader of the epoch writes.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any

import orjson
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.store.ledger_rules import rules_from_json, rules_to_json
from app.store.ledger_values import EXACT, Adjusted, Due, Held, LedgerRun, MeterFact, SegmentRow, Written
from providers.base import MeterKind

_LISTED = """
    (select jsonb_agg(jsonb_build_object('meter', p.meter, 'quantity', p.quantity::text, 'usd', p.usd::text)
            order by p.meter)
        from (select distinct on (p.meter) p.meter, p.quantity, p.usd from price_point p
        where p.provider = r.provider and p.account = r.account and p.sku = a.shape and p.tier = {tier}
            and p.region = any(array[r.region, a.region, ''])
            and p.valid @> coalesce(r.requested_at, r.accepted_at, r.first_seen_at, r.provider_created_at)
        order by p.meter, array_position(array[r.region, a.region, ''], p.region)) p)
"""
_READ = f"""
    select r.*, l.facts_at is not distinct from r.changed_at as is_current, a.shape as sku,
        c.workload_kind, c.workload_name, c.labels,
        {_LISTED.format(tier="'OnDemand'")} as listed,
        {_LISTED.format(tier="r.tier")} as catalog,
        b.rules, l.closed_at is not null as closed,
        l.billed_at is not null as billed, l.label_set_id, l.ended_at as billed_until,
        case when r.gone_at is not null and r.terminate_asked_at is null and r.provider_ended_at is null then
            (select max(o.last_began_at) from instance_seen i join list_round o on o.provider = i.provider
                and o.account = i.account and o.region in (i.region, '') and o.complete
                and o.last_began_at < coalesce(i.absent_since, r.gone_at)
             where i.provider = r.provider and i.account = r.account and i.resource_id = r.resource_id)
            end as last_seen_at,
        (select coalesce(jsonb_agg(jsonb_build_object(
            'meter', s.meter, 'phase', s.phase, 'start', lower(s.period), 'end', upper(s.period),
            'quantity', s.quantity::text, 'usd', s.usd::text, 'list_usd', s.list_usd::text,
            'price_source', s.price_source, 'confidence', s.confidence, 'why', s.why,
            'commitment_id', s.commitment_id, 'gpus', s.gpus, 'frozen', s.frozen)), '[]'::jsonb)
            from segment s where s.run_id = r.id) as segments,
        (select coalesce(jsonb_agg(jsonb_build_object('meter', j.meter, 'seconds', j.seconds::text,
            'dollar_seconds', j.dollar_seconds::text, 'list_dollar_seconds', j.list_dollar_seconds::text,
            'unpriced_seconds', coalesce(j.unpriced_seconds,
                case when j.dollar_seconds is null then j.seconds else 0 end)::text,
            'commitment_id', j.commitment_id)), '[]'::jsonb)
            from billing_adjustment j where j.run_id = r.id
                and j.kind in ('rounding', 'minimum', 'spot_interrupt_free', 'late_price', 'late_fact')
            ) as adjustments,
        (select max(month) from closed_month) as closed_month
    from run r
    left join ledger_run l on l.run_id = r.id
    left join provision_attempt a on a.claim_uid = r.claim_uid and a.number = r.attempt
    left join claim c on c.uid = r.claim_uid
    left join billing_rule b on b.provider = r.provider and b.account = r.account
"""
_DERIVABLE = text(f"{_READ} where r.id = any(:ids) and l.dropped_at is null order by r.id")
_DUE = text(f"""{_READ}
    where (cast(:since as timestamptz) is null or r.changed_at >= :since
            or r.id in (select run_id from ledger_run where closed_at is null and prices_at < :prices_at)
            or r.id = any(cast(:also as bigint[])))
        and (l.run_id is null or l.facts_at is distinct from r.changed_at or l.prices_at < :prices_at
            or r.id = any(cast(:also as bigint[])))
        and l.dropped_at is null
    order by r.id
    limit :limit
""")


async def due(
    conn: AsyncConnection,
    *,
    since: datetime | None,
    prices_at: datetime,
    also: Sequence[int] = (),
    limit: int = 1000,
) -> list[Due]:
    """Runs whose facts or prices have changed since they were derived; oldest first.

    ``since``: only runs changed from then on are looked at (None: all); ``also``: these in any case.
    """
    values = {"since": since, "prices_at": prices_at, "also": list(also), "limit": limit}
    return [_due(dict(row)) for row in (await conn.execute(_DUE, values)).mappings()]


async def derivable(conn: AsyncConnection, ids: Sequence[int]) -> list[Due]:
    """These runs, whether or not anything of them has changed."""
    return [_due(dict(row)) for row in (await conn.execute(_DERIVABLE, {"ids": list(ids)})).mappings()]


def _due(row: Mapping[str, Any]) -> Due:
    run = LedgerRun(
        id=row["id"],
        claim_uid=row["claim_uid"],
        provider=row["provider"],
        account=row["account"],
        resource_id=row["resource_id"],
        region=row["region"],
        tier=row["tier"],
        accelerator=row["accelerator"],
        sku=row["sku"] or "",
        meters=_meters(row["meters"]),
        repriced=tuple((_time(each["at"]), _meters(each["meters"])) for each in row["repriced"]),
        stops=tuple((_time(each["ended"]), _time(each["again"])) for each in row["stops"]),
        listed=_listed(row["listed"]),
        catalog=_listed(row["catalog"]),
        **{name: row[name] for name in _RUN_COLUMNS},
    )
    adjusted: dict[tuple[str, int | None], Adjusted] = {}
    for each in row["adjustments"]:
        key = (each["meter"], each["commitment_id"])
        before = adjusted.get(key, Adjusted())
        adjusted[key] = Adjusted(
            seconds=EXACT.add(before.seconds, Decimal(each["seconds"])),
            dollar_seconds=EXACT.add(before.dollar_seconds, Decimal(each["dollar_seconds"] or 0)),
            list_dollar_seconds=EXACT.add(
                before.list_dollar_seconds, Decimal(each["list_dollar_seconds"] or 0)
            ),
            unpriced_seconds=EXACT.add(before.unpriced_seconds, Decimal(each["unpriced_seconds"])),
        )
    held = Held(
        segments=tuple(_segment(each) for each in row["segments"]),
        adjusted=adjusted,
        adjustments=len(row["adjustments"]),
        closed=row["closed"],
        label_set_id=row["label_set_id"],
        ended_at=row["billed_until"],
        billed=row["billed"],
    )
    return Due(
        run=run,
        labels={
            name: row[name]
            for name in ("workload_kind", "workload_name", "labels", "pool", "pod_namespace", "pod_name")
        }
        | {"account_id": row["account_id"]},
        changed_at=row["changed_at"],
        rules=rules_from_json(row["rules"] or ()),
        held=held,
        is_current=row["is_current"],
        closed_month=row["closed_month"],
    )


_RUN_COLUMNS = (
    "clock_offset_s",
    "requested_at",
    "accepted_at",
    "first_seen_at",
    "running_at",
    "exited_at",
    "terminate_asked_at",
    "gone_at",
    "last_seen_at",
    "provider_created_at",
    "provider_started_at",
    "provider_ended_at",
    "end_reason",
    "exit_code",
)


def _meters(items: Iterable[Mapping[str, Any]]) -> tuple[MeterFact, ...]:
    return tuple(
        MeterFact(
            kind=MeterKind(item["kind"]),
            label=item.get("label") or "",
            quantity=Decimal(item["quantity"]),
            usd=None if item["usd"] is None else Decimal(item["usd"]),
        )
        for item in items
    )


def _listed(items: Iterable[Mapping[str, Any]] | None) -> tuple[MeterFact, ...]:
    found = []
    for item in items or ():
        kind, _, label = item["meter"].partition(":")
        found.append({"kind": kind, "label": label, "quantity": item["quantity"], "usd": item["usd"]})
    return _meters(found)


_SEGMENT_COLUMNS = (
    "meter",
    "phase",
    "price_source",
    "confidence",
    "why",
    "commitment_id",
    "gpus",
    "frozen",
)


def _segment(item: Mapping[str, Any]) -> SegmentRow:
    return SegmentRow(
        **{name: item[name] for name in _SEGMENT_COLUMNS},
        start=_time(item["start"]),
        end=None if item["end"] is None else _time(item["end"]),
        quantity=Decimal(item["quantity"]),
        usd=None if item["usd"] is None else Decimal(item["usd"]),
        list_usd=None if item["list_usd"] is None else Decimal(item["list_usd"]),
    )


def _time(value: str) -> datetime:
    return datetime.fromisoformat(value)


# One statement: the deletes are through before the inserts begin (a scalar subquery is read first), since the
# exclusion constraint looks at each row as it is inserted. A frozen row is in no list of what goes.
_WRITE = text("""
    with data as materialized (
        select d.*, r.id as run from jsonb_to_recordset(cast(:runs as jsonb)) as d (
            run_id bigint, changed_at timestamptz, label_hash text, labels jsonb, rules jsonb, gone jsonb,
            new jsonb, adjustments jsonb, closed boolean, ended_at timestamptz, closed_month date,
            begun_at timestamptz, over_at timestamptz, covered jsonb)
        join run r on r.id = d.run_id and r.changed_at = d.changed_at
        where (select epoch from installation) = :epoch
            and d.closed_month is not distinct from (select max(month) from closed_month)
    ), labelled as (
        insert into label_set (hash, namespace, workload_kind, workload_name, team, cost_center, pool,
            provider, account, account_id, region, sku, tier, accelerator, accelerator_count, tags)
        select distinct on (d.label_hash) d.label_hash, l.namespace, l.workload_kind, l.workload_name,
            l.team, l.cost_center, l.pool, l.provider, l.account, l.account_id, l.region, l.sku, l.tier,
            l.accelerator, l.accelerator_count, l.tags
        from data d, jsonb_to_record(d.labels) as l (namespace text, workload_kind text, workload_name text,
            team text, cost_center text, pool text, provider text, account text, account_id text, region text,
            sku text, tier text, accelerator text, accelerator_count int, tags jsonb)
        on conflict (hash) do nothing
        returning id, hash
    ), named as (
        select d.*, coalesce(held.label_set_id, n.id, o.id) as label_set_id,
            held.closed_at is not null as was_closed
        from data d left join labelled n on n.hash = d.label_hash
        left join label_set o on o.hash = d.label_hash
        left join ledger_run held on held.run_id = d.run_id and held.closed_at is not null
    ), dropped as (
        delete from billing_segment s using data d,
            jsonb_to_recordset(d.gone) as g (meter text, start timestamptz)
        where s.run_id = d.run_id and s.meter = g.meter and lower(s.period) = g.start and not s.frozen
        returning s.id
    ), relabelled as (
        update billing_segment s set label_set_id = n.label_set_id, frozen = n.closed
        from named n where s.run_id = n.run_id and not s.frozen
            and (s.label_set_id <> n.label_set_id or n.closed)
            and not exists (select from jsonb_to_recordset(n.gone) as g (meter text, start timestamptz)
                where g.meter = s.meter and g.start = lower(s.period))
        returning s.id
    ), added as (
        insert into billing_segment (run_id, label_set_id, meter, phase, period, quantity, usd, list_usd,
            price_source, confidence, why, commitment_id, gpus, frozen)
        select n.run_id, n.label_set_id, s.meter, s.phase, tstzrange(s.start, s."end", '[)'), s.quantity,
            s.usd, s.list_usd, s.price_source, s.confidence, s.why, s.commitment_id,
            s.gpus, n.closed
        from named n, jsonb_to_recordset(n.new) as s (meter text, phase text, start timestamptz,
            "end" timestamptz, quantity numeric, usd numeric, list_usd numeric, price_source text,
            confidence text, why text, commitment_id bigint, gpus int)
        where (select count(*) from dropped) >= 0
    ), adjusted as (
        insert into billing_adjustment (key, run_id, label_set_id, meter, phase, kind, at, seconds,
            dollar_seconds, list_dollar_seconds, unpriced_seconds, unpriced, commitment_id, corrects, reason)
        select j.key, n.run_id, n.label_set_id, j.meter, j.phase, j.kind,
            case when m.month is null then j.at else greatest(j.at, now()) end, j.seconds, j.dollar_seconds,
            j.list_dollar_seconds, j.unpriced_seconds, j.unpriced, j.commitment_id, m.month, j.reason
        from named n, jsonb_to_recordset(n.adjustments) as j (key text, meter text, phase text, kind text,
            at timestamptz, seconds numeric, dollar_seconds numeric, list_dollar_seconds numeric, reason text,
            unpriced_seconds numeric, unpriced tstzmultirange, commitment_id bigint)
        cross join lateral (select case when j.at < (n.closed_month + interval '1 month') at time zone 'UTC'
            then date_trunc('month', j.at at time zone 'UTC')::date end as month) m
        on conflict (key) do nothing
        returning at
    ), dirtied as (
        insert into cost_day (day, dirty)
        select distinct g.day::date, true from (
            select lower(x.span) as low, upper(x.span) as high from named n, lateral (
                select tstzrange(min(g.start), max(coalesce(g."end", now())), '[]') from (
                    select * from jsonb_to_recordset(n.gone) as g (start timestamptz, "end" timestamptz)
                    union all
                    select * from jsonb_to_recordset(n.new) as g (start timestamptz, "end" timestamptz)
                ) g) x (span)
            union all select at, at from adjusted
        ) t, generate_series(date_trunc('day', t.low at time zone 'UTC'),
            t.high at time zone 'UTC', '1 day') g (day)
        where g.day < date_trunc('day', now() at time zone 'UTC')
        on conflict (day) do update set dirty = true where not cost_day.dirty
    )
    insert into ledger_run (run_id, label_set_id, facts_at, prices_at, derived_at, closed_at, ended_at, rules,
        begun_at, over_at, covered)
    select run_id, label_set_id, changed_at, :prices_at, clock_timestamp(),
        case when closed then clock_timestamp() end, ended_at, rules, begun_at, over_at, covered from named
    on conflict (run_id) do update set label_set_id = excluded.label_set_id, facts_at = excluded.facts_at,
        prices_at = excluded.prices_at, derived_at = excluded.derived_at, rules = excluded.rules,
        closed_at = coalesce(ledger_run.closed_at, excluded.closed_at),
        begun_at = excluded.begun_at, over_at = excluded.over_at, covered = excluded.covered,
        ended_at = coalesce(excluded.ended_at, ledger_run.ended_at)
    returning run_id
""")


async def write(
    conn: AsyncConnection, runs: Sequence[Written], *, epoch: int, prices_at: datetime
) -> list[int]:
    """Write a tick's work; returns the runs that were written: not those whose facts have moved meanwhile."""
    if not runs:
        return []
    values = {"runs": _json([_plain(run) for run in runs]), "epoch": epoch, "prices_at": prices_at}
    return list((await conn.execute(_WRITE, values)).scalars())


def _plain(run: Written) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "changed_at": run.changed_at,
        "closed_month": run.closed_month,
        "label_hash": run.label_hash,
        "labels": run.labels,
        "rules": rules_to_json(run.rules),
        "gone": list(run.gone),
        "new": list(run.new),
        "adjustments": list(run.adjustments),
        "closed": run.closed,
        "ended_at": run.ended_at,
        "begun_at": run.begun_at,
        "over_at": run.over_at,
        "covered": run.covered,
    }


def _json(value: Any) -> str:
    def exact(item: Any) -> Any:
        if isinstance(item, Decimal):
            return format(item, "f")  # as text: a JSON number would be read by others as a float
        if isinstance(item, Mapping):
            return dict(item)
        raise TypeError(type(item).__name__)

    return orjson.dumps(value, default=exact).decode()
