"""``nebula cost ask``: standing questions about money beside the plain sums, each a query over the views."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import click

from app.cli import output
from app.cli.database import database_option, run, settings_of

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question; its query has parameters ``since``, ``until`` and ``zone`` where a period matters."""

    about: str
    query: str


# The UTC days that the period has a part of; its end is no part of it.
_DAYS = """day >= (cast(:since as timestamptz) at time zone 'UTC')::date
    and day <= ((cast(:until as timestamptz) at time zone 'UTC') - interval '1 microsecond')::date"""

QUESTIONS: Mapping[str, Question] = {
    "waste": Question(
        about="What was paid while no workload ran, by reason and namespace.",
        query="""
select c.reason, c.namespace,
    sum(case when c.is_instant then c.effective_once
        else c.effective_usd_per_hour * t.seconds end) / 3600 as usd,
    sum(case when c.is_instant then 0 else c.gpus * t.seconds end) / 3600 as gpu_hours,
    count(distinct c.run_id) as machines
from charge_use c cross join lateral (
    select extract(epoch from least(c.charge_period_end, cast(:until as timestamptz))
        - greatest(c.charge_period_start, cast(:since as timestamptz))) as seconds
) t
where c.period && tstzrange(:since, :until) and (t.seconds > 0 or c.is_instant) and c.reason <> 'useful'
group by 1, 2 order by 3 desc nulls last, 1, 2""",
    ),
    "spot": Question(
        about="What Spot saved against on demand, by provider and accelerator, with interruptions taken off.",
        query=f"""
select provider_name, accelerator, sum(spot_cost) as spot_usd,
    sum(on_demand_equivalent_cost) as on_demand_usd, sum(saved_cost) as saved_usd,
    sum(interruptions) as interruptions, sum(rework_cost) as rework_usd, sum(net_saved_cost) as net_saved_usd
from spot_savings where {_DAYS} group by 1, 2 order by 8 desc nulls last, 1, 2""",
    ),
    "failed": Question(
        about="Launches that gave nobody a running workload, and what they cost, newest first.",
        query="""
select time, namespace, pod, provider_name, region, accelerator, capacity_type, reason, seconds, cost as usd,
    next_provider
from failed_provision where time >= :since and time < :until order by time desc""",
    ),
    "providers": Question(
        about="How well each place serves, by month: success, boot, reclaims, dollars a useful GPU hour.",
        query="""
select to_char(month at time zone 'UTC', 'YYYY-MM') as month, provider_name, region, accelerator, attempts,
    success_ratio, boot_p50_s, boot_p95_s, interruption_rate, usd_per_useful_gpu_hour
from provider_scorecard
where month >= date_trunc('month', cast(:since as timestamptz), 'UTC') and month < :until
order by month desc, usd_per_useful_gpu_hour nulls last, 2, 3, 4""",
    ),
    "pods": Question(
        about="The ten dearest Pods.",
        query="""
select r.pod_namespace as namespace, r.pod_name as pod, r.pod_uid as uid, count(distinct r.id) as machines,
    sum(c.effective_dollar_seconds) / 3600 as usd
from charge_between(:since, :until) c join run r on r.id = c.run_id
group by 1, 2, 3 order by 5 desc nulls last, 1, 2 limit 10""",
    ),
    "forecast": Question(
        about="To the end of the month, by namespace: if all that runs goes on, or the last seven days do.",
        query="""
select namespace, spent as spent_usd, run_rate_forecast as run_rate_usd, trend_forecast as trend_usd,
    low as low_usd, high as high_usd
from cost_forecast order by spent desc, namespace""",
    ),
    "drift": Question(
        about="Machines that run at another price than is listed now.",
        query="""
select provider_name, account, resource_id, meter, paid_unit_price, listed_unit_price, delta, delta_ratio
from price_drift order by abs(delta) desc nulls last, 3, 4""",
    ),
    "prices": Question(
        about="Listed prices that held in the period, and what each changed.",
        query="""
select provider_name, account, sku_id, region_id, capacity_type, meter, unit, list_unit_price, delta,
    since, until
from price_history where since < :until and coalesce(until, 'infinity') > :since
order by provider_name, account, sku_id, region_id, capacity_type, meter, since""",
    ),
    "unpriced": Question(
        about="Seconds whose price nobody knows yet, and why.",
        query="""
select provider_name, account, resource_id, namespace, pod, meter, phase, since, hours,
    ceiling_usd_per_hour, why
from unpriced where since < :until order by since""",
    ),
    "orphans": Question(
        about="What was lost to machines without an owner, by day, estimated; `waste` is exact.",
        query=f"select day, namespace, provider, machines, usd, unpriced from orphan_cost where {_DAYS}"
        " order by day desc, usd desc nulls last",
    ),
    "bills": Question(
        about="The ledger beside the clouds' own bills, machine by machine, the widest apart first.",
        query=f"""
select day, provider_name, account, resource_id, ledger_cost as ledger_usd,
    provider_billed_cost as billed_usd, delta as delta_usd, status
from reconciliation where {_DAYS} order by abs(delta) desc nulls last, day, resource_id""",
    ),
    "exposure": Question(
        about="Orders that may have been taken without anybody knowing yet, at their ceiling.",
        query="""
select since, namespace, pod, provider_name, account, region, accelerator, capacity_type, usd_per_hour
from exposure order by since""",
    ),
}


def _listed() -> str:
    return "\n".join(f"  {name:<10} {each.about}" for name, each in QUESTIONS.items())


def command(period_options: Decorator, style_option: Decorator) -> click.Command:
    """``nebula cost ask``, with the options that all reports have."""

    @click.command("ask", help=f"Answer one of the standing questions:\n\n\b\n{_listed()}")
    @database_option
    @period_options
    @click.argument("question")
    @style_option
    @click.option("--sql", "show_sql", is_flag=True, help="Print the query, and do not run it.")
    def ask(
        database_url: str | None,
        since: str | None,
        until: str | None,
        zone: str,
        question: str,
        style: str,
        show_sql: bool,
    ) -> None:
        asked = _question(question)
        settings = settings_of(database_url=database_url)

        async def read(conn: Any) -> list[dict[str, Any]] | str:
            from app.cli import cost
            from app.store import costs

            window = await cost.window_of(conn, since=since, until=until, zone=zone)
            values = {
                name: value
                for name, value in costs.parameters(window, {}).items()
                if f":{name}" in asked.query
            }
            if show_sql:
                return costs.literal_sql(asked.query.strip(), values)
            return await costs.rows(conn, asked.query, **values)

        from app.cli import cost

        found = run(cost.reading(settings, read))
        if isinstance(found, str):
            click.echo(found)
        elif style == "json":
            click.echo(output.to_json(found))
        elif not found:
            click.echo("nothing", err=True)
        elif style == "csv":
            click.echo(cost.rows_csv(found), nl=False)
        else:
            titles = tuple(name.upper().replace("_", " ") for name in found[0])
            click.echo(output.table(titles, [[_cell(value) for value in row.values()] for row in found]))

    return ask


def _question(name: str) -> Question:
    from difflib import get_close_matches

    if name not in QUESTIONS:
        near = get_close_matches(name, QUESTIONS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise click.UsageError(f"there is no question {name!r}; {hint}There are: {', '.join(QUESTIONS)}")
    return QUESTIONS[name]


def _cell(value: Any) -> str:
    from datetime import datetime
    from decimal import Decimal

    match value:
        case None | "":
            return output.NONE
        case datetime():
            return value.strftime("%Y-%m-%d %H:%M")
        case Decimal() | float():
            return f"{value:.4f}".rstrip("0").rstrip(".") or "0"
    return str(value)
