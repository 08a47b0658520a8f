"""``nebula burn``: what runs now, and what it costs an hour."""

from decimal import Decimal
from typing import Any

import click

from app.cli import cost, output
from app.cli.database import database_option, run, settings_of

TITLES = (
    "PROVIDER",
    "POOL",
    "NAMESPACE",
    "TEAM",
    "ACCELERATOR",
    "TIER",
    "PHASE",
    "MACHINES",
    "GPUS",
    "$/H",
    "LIST $/H",
)
RIGHT = ("MACHINES", "GPUS", "$/H", "LIST $/H")


@click.command("burn")
@database_option
@click.option("--chart", is_flag=True, help="Draw bars beside the amounts.")
@click.option("--sql", "show_sql", is_flag=True, help="Print the query instead of running it.")
@cost.style_option
def command(database_url: str | None, chart: bool, show_sql: bool, style: cost.Style) -> None:
    """What runs now costs an hour, and what orders without an answer would at most.

    A machine without a price counts with its claim's ceiling.
    """
    from app.api.quantities import usd
    from app.store import costs

    if show_sql:
        click.echo(costs.BURN.strip() + ";")
        return
    settings = settings_of(database_url=database_url)

    async def ask(conn: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        return await costs.rows(conn, costs.BURN), await costs.rows(conn, costs.EXPOSURE)

    live, exposed = run(cost.reading(settings, ask))
    if style == "json":
        click.echo(output.to_json({"live": live, "exposure": exposed}))
        return
    if style == "csv":
        click.echo(cost.rows_csv(live) if live else "", nl=False)
        return
    most = max((row["usd_per_hour"] for row in live), default=Decimal(0))
    rows = [[*_row(row), *([cost.bar(row["usd_per_hour"], most)] if chart else [])] for row in live]
    if rows:
        click.echo(output.table((*TITLES, *([""] if chart else [])), rows, right=RIGHT) + "\n")
    whole = sum((row["usd_per_hour"] for row in live), Decimal(0))
    unpriced = sum(row["unpriced"] for row in live)
    said = f"{usd(whole)}/h now"
    if unpriced:
        said += f"; {unpriced} machines have no price, and count with their ceilings"
    if exposed:
        at_most = sum((row["usd_per_hour"] or Decimal(0) for row in exposed), Decimal(0))
        said += f"; {len(exposed)} orders without an answer may add {usd(at_most)}/h"
    click.echo(said)


def _row(row: dict[str, Any]) -> list[str]:
    from app.api.quantities import usd

    where = (
        row["provider_name"] if row["account"] == "default" else f"{row['provider_name']}/{row['account']}"
    )
    words = (row[name] or output.NONE for name in ("nodepool", "namespace", "team", "accelerator"))
    return [
        where,
        *words,
        row["capacity_type"],
        row["phase"],
        str(row["instances"]),
        str(row["gpus"]),
        usd(row["usd_per_hour"]).lstrip("$"),
        usd(row["list_usd_per_hour"]).lstrip("$"),
    ]
