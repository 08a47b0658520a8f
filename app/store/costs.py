"""The questions about money, as queries: what `nebula cost` prints, it can also show as SQL to run by hand.

All of them read the views; amounts come back in exact dollar-seconds or dollars and are rounded by whoever
shows them. Groups are a closed set of names, so that no text of a caller becomes SQL.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

GROUPS: Mapping[str, str] = {
    "namespace": "l.namespace",
    "team": "l.team",
    "cost-center": "l.cost_center",
    "pool": "l.pool",
    "provider": "l.provider",
    "account": "l.account",
    "region": "l.region",
    "accelerator": "l.accelerator",
    "tier": "l.tier",
    "workload": "l.namespace || '/' || l.workload_kind || '/' || l.workload_name",
    "sku": "l.sku",
    "phase": "c.phase",
    "meter": "c.meter",
    "kind": "c.kind",
}
"""What can be grouped by, and its expression; beside these ``label:KEY``, any label of the Pods."""

LABEL = "label:"
_KEY = re.compile(r"(?:[a-z0-9][-a-z0-9.]*/)?[A-Za-z0-9][-A-Za-z0-9_.]*")  # nothing that SQL would read

UNITS = ("hour", "day", "week", "month")


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """``[since, until)``; days and months are cut on the clocks of ``zone``."""

    since: datetime
    until: datetime
    zone: str = "UTC"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One line of a report. ``bucket`` is "" without a time unit. Dollars in dollar-seconds."""

    bucket: str
    keys: tuple[str, ...]
    seconds: Decimal
    gpu_seconds: Decimal
    useful_gpu_seconds: Decimal
    billed: Decimal
    effective: Decimal
    listed: Decimal
    guessed: Decimal
    unpriced_s: Decimal


@dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    """What every report says of itself. Ages in seconds, None where there is nothing yet."""

    unpriced: int
    price_age_s: float | None
    lag_s: float | None


def report_sql(groups: Sequence[str], unit: str | None, *, where: Mapping[str, str]) -> str:
    """The query of a report, with parameters ``since``, ``until``, ``zone`` and one for each of ``where``.

    Raises:
        KeyError: a group that does not exist.
    """
    columns = [f"{_expression(name)} as {column}" for name, column in _columns(groups).items()]
    conditions = [f"{_expression(name)} = :{parameter}" for name, parameter in _columns(where).items()]
    names = ["c.bucket"] * bool(unit) + [*_columns(groups).values()]
    return f"""
select {"c.bucket, " if unit else ""}{"".join(f"{column}, " for column in columns)}sum(c.seconds) as seconds,
    sum(c.gpu_seconds) as gpu_seconds,
    coalesce(sum(c.gpu_seconds) filter (where c.phase = 'running'), 0) as useful_gpu_seconds,
    sum(c.billed_dollar_seconds) as billed, sum(c.effective_dollar_seconds) as effective,
    sum(c.list_dollar_seconds) as listed, sum(c.guessed_dollar_seconds) as guessed,
    sum(c.unpriced_seconds) as unpriced_s
from cost_lines(:since, :until, '{unit or "all"}', :zone) c join attribution l using (label_set_id)
{"where " + " and ".join(conditions) if conditions else ""}
{"group by " + ", ".join(names) if names else ""}
order by {"c.bucket, " if unit else ""}billed desc nulls last{
        "".join(f", {column}" for column in _columns(groups).values())
    }
""".strip()


def is_group(name: str) -> bool:
    """Whether lines can be made by it."""
    return name in GROUPS or (name.startswith(LABEL) and bool(_KEY.fullmatch(name.removeprefix(LABEL))))


def _expression(name: str) -> str:
    if name.startswith(LABEL) and is_group(name):
        return f"coalesce(l.tags->>'{name.removeprefix(LABEL)}', '')"
    return GROUPS[name]


def _columns(names: Iterable[str]) -> dict[str, str]:
    """What each is called in the query: a label's key may be no name there."""
    return {
        name: f"label_{number}" if name.startswith(LABEL) else name.replace("-", "_")
        for number, name in enumerate(names, start=1)
    }


def literal_sql(query: str, values: Mapping[str, Any]) -> str:
    """The same with its parameters written out, to be run by hand."""
    for name in sorted(values, key=len, reverse=True):
        value = values[name]
        said = value.isoformat() if isinstance(value, datetime) else str(value)
        cast = "timestamptz " if isinstance(value, datetime) else ""
        query = query.replace(f":{name}", cast + "'" + said.replace("'", "''") + "'")
    return query + ";"


async def report(
    conn: AsyncConnection,
    window: Window,
    *,
    groups: Sequence[str],
    unit: str | None,
    where: Mapping[str, str],
) -> list[Group]:
    """The lines of a report, dearest first within a bucket of time."""
    values = parameters(window, where)
    found = await conn.execute(text(report_sql(groups, unit, where=where)), values)
    lines = []
    for row in found.mappings():
        if row["seconds"] is None:
            continue  # nothing in the window, and nothing to group by
        lines.append(
            Group(
                bucket=row["bucket"] if unit else "",
                keys=tuple(str(row[column]) for column in _columns(groups).values()),
                **{name: row[name] or Decimal(0) for name in _SUMS},
            )
        )
    return lines


_SUMS = (
    "seconds",
    "gpu_seconds",
    "useful_gpu_seconds",
    "billed",
    "effective",
    "listed",
    "guessed",
    "unpriced_s",
)


def parameters(window: Window, where: Mapping[str, str]) -> dict[str, Any]:
    """Of `report_sql`."""
    named = {parameter: where[name] for name, parameter in _columns(where).items()}
    return {"since": window.since, "until": window.until, "zone": window.zone} | named


_FOOTER = text("""
    select (select count(*) from unpriced u where u.since < :until) as unpriced,
        extract(epoch from clock_timestamp() - (select max(observed_at) from price_point))::float8
            as price_age_s,
        extract(epoch from clock_timestamp() - (select min(behind_since) from ledger_lag))::float8 as lag_s
""")


async def footer(conn: AsyncConnection, window: Window) -> Footer:
    """Unpriced rows, the age of the newest listed price, and how far the ledger is behind the runs."""
    row = (await conn.execute(_FOOTER, {"until": window.until})).one()
    return Footer(unpriced=row.unpriced, price_age_s=row.price_age_s, lag_s=row.lag_s)


async def zone_is_known(conn: AsyncConnection, zone: str) -> bool:
    query = text("select exists (select from pg_timezone_names where name = :zone)")
    return bool((await conn.execute(query, {"zone": zone})).scalar_one())


async def window_of(conn: AsyncConnection, *, since: str | None, until: str | None, zone: str) -> Window:
    """The window that a person has named: dates and times are on the clocks of ``zone``.

    ``since`` None: the first of this month; ``until`` None: now, or the end of the day of ``since``'s future.

    Raises:
        sqlalchemy.exc.DBAPIError: a text is no time.
    """
    query = text("""
        select coalesce(cast(:since as timestamp) at time zone :zone,
                date_trunc('month', clock_timestamp(), :zone)) as since,
            coalesce(cast(:until as timestamp) at time zone :zone, clock_timestamp()) as until
    """)
    values = {"since": _wall(since), "until": _wall(until), "zone": zone}
    row = (await conn.execute(query, values)).one()
    return Window(since=row.since, until=row.until, zone=zone)


def _wall(value: str | None) -> datetime | None:
    return None if value is None else datetime.fromisoformat(value)


async def rows(conn: AsyncConnection, query: str, **values: Any) -> list[dict[str, Any]]:
    """Any view's rows, as they are."""
    found = await conn.execute(text(query), values)
    names = tuple(found.keys())  # less than half of what a mapping for each row costs
    return [dict(zip(names, row, strict=True)) for row in found]


BURN = """
select provider_name, account, nodepool, namespace, team, accelerator, capacity_type, phase, instances, gpus,
    usd_per_hour, list_usd_per_hour, unpriced
from burn_rate order by usd_per_hour desc, provider_name, namespace, phase
"""
BUCKETS = """
select label, extract(epoch from sum(ends - starts)) / 3600 as hours
from report_bucket(:since, :until, :unit, :zone) group by label
"""
EXPOSURE = "select * from exposure order by since"
RECEIPT = """
select * from pod_receipt where namespace = :namespace and name = :name
    and (cast(:uid as text) is null or uid = cast(:uid as text))
order by started, resource_id, phase, meter, kind
"""
WASTE = """
select reason, sum(effective_cost) as cost from charge_daily(:zone)
where starts >= :since and starts < :until and reason <> 'useful' group by reason order by 2 desc nulls last
"""
OVERLAPS = """
select a.run_id, a.meter, a.id, b.id as other from billing_segment a
join billing_segment b on a.run_id = b.run_id and a.meter = b.meter and a.id < b.id and a.period && b.period
"""
GAPS = """
select run_id, meter, until as since, next as until from (
    select run_id, meter, upper(period) as until, phase,
        lead(lower(period)) over (partition by run_id, meter order by lower(period)) as next
    from billing_segment) s
where next > until and not exists (select from run r where r.id = run_id and jsonb_array_length(r.stops) > 0)
    and not exists (select from price_override o) and not exists (select from commitment c)
    and not exists (select from billing_adjustment j where j.run_id = s.run_id
        and j.kind in ('late_fact', 'late_price'))
"""
STALE_SUMS = """
select d.day, l.sum as sealed, c.sum as ledger from cost_day d
left join lateral (select sum(billed_dollar_seconds) from cost_daily x where x.day = d.day) l (sum) on true
left join lateral (select sum(billed_dollar_seconds) from charge_between(d.day::timestamp at time zone 'UTC',
    (d.day + 1)::timestamp at time zone 'UTC')) c (sum) on true
where not d.dirty and coalesce(l.sum, 0) <> coalesce(c.sum, 0)
    and not exists (select from closed_month m where m.dropped and m.month = date_trunc('month', d.day)::date)
"""
MOVED_MONTHS = """
select m.month, t.sum as closed, c.sum as ledger from closed_month m
left join lateral (select sum(billed_dollar_seconds) from billing_period_close x where x.month = m.month
    ) t (sum) on true
left join lateral (select sum(billed_dollar_seconds) from charge_between(
    m.month::timestamp at time zone 'UTC', (m.month + interval '1 month') at time zone 'UTC')) c (sum) on true
where not m.dropped and coalesce(t.sum, 0) <> coalesce(c.sum, 0) and not exists (
    select from billing_period_close x where x.month = m.month and x.closed_at < m.closed_at)
"""
"""A closed month that does not cost what it cost when it was closed: never."""
UNBOOKED = """
select r.id as run_id, r.provider, r.resource_id from run r left join ledger_run l on l.run_id = r.id
where l.run_id is null and r.changed_at < clock_timestamp() - interval '2 minutes'
"""
"""A run that the ledger has not taken up although it had time to."""
RECONCILIATION = """
select provider_name as provider, status, count(*) as machines, sum(ledger_cost) as ledger_cost,
    sum(provider_billed_cost) as billed_cost, sum(delta) as delta
from reconciliation group by 1, 2 order by 1, 2
"""


async def focus(conn: AsyncConnection, window: Window) -> list[dict[str, Any]]:
    """The charges that begin in the window, in FOCUS columns."""
    query = """
        select * from focus_1_2 where "ChargePeriodStart" >= :since and "ChargePeriodStart" < :until
        order by "ChargePeriodStart", "x_LedgerId"
    """
    return await rows(conn, query, since=window.since, until=window.until)
