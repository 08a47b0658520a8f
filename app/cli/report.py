"""``nebula report``: the money of a period on one page, to be opened in a browser or sent by mail."""

from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from app.cli import cost
from app.cli.database import database_option, run, settings_of

if TYPE_CHECKING:
    from app.ledger.page import Report

HOURS_SHOWN = 7 * 24  # a burn by hour for up to a week, else by day


@click.command("report")
@database_option
@cost.period_options
@click.option(
    "--html",
    "file",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    required=True,
    metavar="FILE",
    help="Where to write the page.",
)
def command(database_url: str | None, since: str | None, until: str | None, zone: str, file: Path) -> None:
    """Write one self-contained page: burn over time, cost by team and provider, waste, forecast, budgets."""
    settings = settings_of(database_url=database_url)

    async def ask(conn: Any) -> "Report":
        window = await cost.window_of(conn, since=since, until=until, zone=zone)
        return await _gather(conn, window)

    from app.ledger.page import page

    text = page(run(cost.reading(settings, ask)))
    try:
        file.write_text(text)
    except OSError as error:
        raise click.ClickException(f"--html: {file} cannot be written: {error.strerror}") from None
    click.echo(f"wrote {file}")


async def _gather(conn: Any, window: Any) -> "Report":
    from app.ledger.page import Report
    from app.ledger.rules import total
    from app.store import costs

    hours = (window.until - window.since).total_seconds() / 3600
    unit = "hour" if hours <= HOURS_SHOWN else "day"

    async def stacked(group: str, by: str) -> list[tuple[str, str, Decimal]]:
        lines = await costs.report(conn, window, groups=[group], unit=by, where={})
        lines.sort(key=lambda line: line.bucket)
        return [(line.bucket, line.keys[0], line.effective / 3600) for line in lines]

    # By the real length of each: the last has only begun, and a day may have 23 or 25 hours.
    lengths = await costs.rows(conn, costs.BUCKETS, unit=unit, **costs.parameters(window, {}))
    hours_of = {row["label"]: row["hours"] for row in lengths}
    burn = [(bucket, name, usd / hours_of[bucket]) for bucket, name, usd in await stacked("provider", unit)]
    whole = await costs.report(conn, window, groups=["tier"], unit=None, where={})
    workloads = await costs.report(conn, window, groups=["workload"], unit=None, where={})
    live = await costs.rows(conn, costs.BURN)
    foot = await costs.footer(conn, window)
    forecasts = await costs.rows(conn, "select * from cost_forecast order by spent desc limit 12")
    waste = await costs.rows(conn, costs.WASTE, since=window.since, until=window.until, zone=window.zone)
    spot = [line for line in whole if line.keys == ("Spot",)]
    since, until = (at.strftime("%Y-%m-%d %H:%M") for at in (window.since, window.until))
    return Report(
        title="What the machines cost",
        about=f"{since} to {until} UTC, days of {window.zone}; dollars, prepayments spread over their use",
        total=total([line.billed for line in whole]) / 3600,
        burn_usd_per_hour=sum((row["usd_per_hour"] for row in live), Decimal(0)),
        forecast=sum((row["run_rate_forecast"] for row in forecasts), Decimal(0)),
        saved=total([line.listed - line.effective for line in spot]) / 3600,
        wasted=sum((row["cost"] or Decimal(0) for row in waste), Decimal(0)),
        unpriced=foot.unpriced,
        by_hour=burn,
        by_team=await stacked("team", "day"),
        by_provider=await stacked("provider", "day"),
        waste=[(row["reason"], row["cost"] or Decimal(0)) for row in waste],
        forecasts=forecasts,
        budgets=await costs.rows(conn, "select * from budget_status order by used_ratio desc"),
        workloads=[
            (line.keys[0], line.useful_gpu_seconds / 3600, line.effective / 3600) for line in workloads[:10]
        ],
    )
