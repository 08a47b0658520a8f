"""``nebula cost``: what was paid, by whom and for what, and whether the ledger is right.

Every report ends with its period and zone, the total, the share of it that is guessed, how much has no price,
and how old the newest listed price is. Dollars are rounded here only, and rounded lines add up to the total.
"""

import csv
import io
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal

import click

from app.cli import output, questions, terms
from app.cli.database import database_option, run, settings_of

if TYPE_CHECKING:
    from app.store.costs import Footer, Group, Window

Style = Literal["table", "csv", "json"]
BY = (
    "namespace",
    "team",
    "cost-center",
    "pool",
    "provider",
    "account",
    "region",
    "accelerator",
    "tier",
    "workload",
    "sku",
    "phase",
    "meter",
    "kind",
    "hour",
    "day",
    "week",
    "month",
)
UNITS = ("hour", "day", "week", "month")
LABEL = "label:"
NOBODY = "<none>"
EXACT_DIGITS = 12  # of CSV and JSON


def style_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "-o",
        "--output",
        "style",
        type=click.Choice(["table", "csv", "json"]),
        default="table",
        show_default=True,
        help="How to print.",
    )(command)


def period_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The window of a report: its two ends on the clocks of a zone."""
    for option in (
        click.option(
            "--zone", default="UTC", show_default=True, help="Whose days and months, such as Europe/Berlin."
        ),
        click.option("--to", "until", metavar="WHEN", help="End, not included. Default: now."),
        click.option(
            "--from",
            "since",
            metavar="WHEN",
            help="Begin: 2026-03, 2026-03-01 or 2026-03-01T12:00. Default: this month.",
        ),
    ):
        command = option(command)
    return command


def _report_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        style_option,
        click.option("--sql", "show_sql", is_flag=True, help="Print the query instead of running it."),
        click.option("--chart", is_flag=True, help="Draw bars beside the amounts."),
        click.option(
            "--only",
            multiple=True,
            metavar="GROUP=VALUE",
            help="Only these, such as namespace=team-a. May be repeated.",
        ),
        click.option(
            "--group-by",
            "groups",
            default="namespace",
            show_default=True,
            metavar="GROUP[,GROUP...]",
            help="What the lines are: " + ", ".join(BY) + "; or label:KEY, by a label of the Pods.",
        ),
        period_options,
        database_option,
    ):
        command = option(command)
    return command


@click.group("cost", invoke_without_command=True)
@_report_options
@click.pass_context
def group(context: click.Context, /, **options: Any) -> None:
    """What was paid: a report by any group and time, a Pod's receipt, an export, a check of the ledger."""
    if context.invoked_subcommand is None:
        _report(**options)
    elif given := [name for name in options if _was_given(context, name)]:
        raise click.UsageError(f"give options after {context.invoked_subcommand}: {', '.join(given)}")


def _was_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


# --- the report ----------------------------------------------------------------------------------


def _report(
    *,
    database_url: str | None,
    since: str | None,
    until: str | None,
    zone: str,
    groups: str,
    only: Sequence[str],
    chart: bool,
    show_sql: bool,
    style: Style,
) -> None:
    names, unit = groups_of(groups)
    where = _only(only)
    settings = settings_of(database_url=database_url)

    async def ask(conn: Any) -> "tuple[Window, list[Group], Footer]":
        from app.store import costs

        window = await window_of(conn, since=since, until=until, zone=zone)
        if show_sql:
            return window, [], await costs.footer(conn, window)
        lines = await costs.report(conn, window, groups=names, unit=unit, where=where)
        return window, lines, await costs.footer(conn, window)

    window, lines, foot = run(reading(settings, ask))
    if show_sql:
        from app.store import costs

        query = costs.report_sql(names, unit, where=where)
        click.echo(costs.literal_sql(query, costs.parameters(window, where)))
        return
    show(lines, window=window, foot=foot, names=names, unit=unit, style=style, chart=chart)


def groups_of(text: str) -> tuple[list[str], str | None]:
    """The groups, and the one unit of time among them.

    Raises:
        click.UsageError: one that does not exist, with the nearest; or two units of time.
    """
    from difflib import get_close_matches

    names = [
        name if name.startswith(LABEL) else name.lower() for part in text.split(",") if (name := part.strip())
    ]
    for name in names:
        if name.startswith(LABEL):
            _expect_label("--group-by", name)
        elif name not in BY:
            near = get_close_matches(name, BY, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise click.UsageError(
                f"--group-by: there is no group {name!r}{hint} There are: {', '.join(BY)}, {LABEL}KEY"
            )
    units = [name for name in names if name in UNITS]
    if len(units) > 1:
        raise click.UsageError(f"--group-by: one unit of time, not {' and '.join(units)}")
    return list(dict.fromkeys(name for name in names if name not in UNITS)), (units[0] if units else None)


def _only(pairs: Sequence[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if name.startswith(LABEL):
            _expect_label("--only", name)
        if not sign or name in UNITS or not (name in BY or name.startswith(LABEL)):
            raise click.UsageError(
                f"--only: {pair!r} is not GROUP=VALUE, with one of: {', '.join(BY[:-4])}, {LABEL}KEY"
            )
        found[name] = value
    return found


def _expect_label(option: str, name: str) -> None:
    from app.store.costs import is_group

    if not is_group(name):
        raise click.UsageError(f"{option}: {name!r} names no label of a Pod, such as {LABEL}app")


async def window_of(conn: Any, *, since: str | None, until: str | None, zone: str) -> "Window":
    """The window of the options.

    Raises:
        click.UsageError: an unknown zone, a text that is no time, or an empty or inverted period.
    """
    from app.store import costs

    if not await costs.zone_is_known(conn, zone):
        raise click.UsageError(f"--zone: there is no time zone {zone!r}; such as UTC or Europe/Berlin")
    window = await costs.window_of(
        conn, since=_moment("--from", since), until=_moment("--to", until), zone=zone
    )
    if window.until <= window.since:
        raise click.UsageError(
            f"--to must be after --from: {window.since.isoformat()} to"
            f" {window.until.isoformat()} is no period"
        )
    return window


def _moment(option: str, text: str | None) -> str | None:
    if text is None:
        return None
    value = f"{text}-01" if len(text) == len("2026-03") else text
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise click.UsageError(
            f"{option}: {text!r} is no time; write 2026-03, 2026-03-01 or 2026-03-01T12:00"
        ) from None
    if moment.tzinfo is not None:
        raise click.UsageError(f"{option}: leave the offset away, and name the zone with --zone")
    return value


async def reading(settings: Any, ask: Callable[[Any], Any]) -> Any:
    """Run ``ask`` with a connection; all that it reads is of one moment."""
    from sqlalchemy import text

    from app.store.engine import connect, engine_of

    engine = engine_of(settings)
    try:
        async with connect(engine) as conn:
            await conn.execute(text("set transaction isolation level repeatable read, read only"))
            return await ask(conn)
    finally:
        await engine.dispose()


def show(
    lines: "Sequence[Group]",
    *,
    window: "Window",
    foot: "Footer",
    names: Sequence[str],
    unit: str | None,
    style: Style,
    chart: bool = False,
) -> None:
    from app.ledger.rounding import digits_for, shares
    from app.ledger.rules import total

    whole = total([line.billed for line in lines])
    digits = digits_for(whole)
    titles = [*([unit] if unit else []), *names]
    keys = [[*([line.bucket] if unit else []), *(key or NOBODY for key in line.keys)] for line in lines]
    if style == "json":
        click.echo(output.to_json(_plain(lines, titles, keys, window=window, foot=foot, whole=whole)))
        return
    if style == "csv":
        click.echo(_csv(lines, titles, keys), nl=False)
        return
    billed = shares([line.billed for line in lines], digits=digits)
    effective = shares([line.effective for line in lines], digits=digits)
    listed = shares([line.listed for line in lines], digits=digits)
    heads = [title if title.startswith(LABEL) else title.upper() for title in titles]  # a key has its letters
    columns = [*heads, "GPU-HOURS", "LIST $", "EFFECTIVE $", "BILLED $"]
    rows = [
        [*key, _hours(line.useful_gpu_seconds), str(listed[n]), str(effective[n]), str(billed[n])]
        for n, (key, line) in enumerate(zip(keys, lines, strict=True))
    ]
    if chart:
        columns.append("")
        most = max((line.billed for line in lines), default=Decimal(0))
        for row, line in zip(rows, lines, strict=True):
            row.append(bar(line.billed, most))
    if rows:
        right = ("GPU-HOURS", "LIST $", "EFFECTIVE $", "BILLED $")
        click.echo(output.table(columns, rows, right=right) + "\n")
    click.echo(footer(lines, window=window, foot=foot))


def footer(lines: "Sequence[Group]", *, window: "Window", foot: "Footer") -> str:
    """What every report says of itself."""
    from app.ledger.rounding import digits_for, rounded
    from app.ledger.rules import total

    whole = total([line.billed for line in lines])
    guessed = total([line.guessed for line in lines])
    effective = total([line.effective for line in lines])
    unpriced_s = total([line.unpriced_s for line in lines])
    share = f"{float(guessed / effective):.1%}" if effective else "0.0%"
    since, until = (_local(at, window.zone) for at in (window.since, window.until))
    price = (
        "no price is listed"
        if foot.price_age_s is None
        else f"newest listed price {output.age(foot.price_age_s)} old"
    )
    lag = "" if foot.lag_s is None else f", ledger {output.age(foot.lag_s)} behind"
    return (
        f"Total ${rounded(whole, digits=digits_for(whole))} from {since} to {until} ({window.zone});"
        f" guessed {share}; unpriced {foot.unpriced} ({_hours(unpriced_s)} h); {price}{lag}"
    )


def _plain(
    lines: "Sequence[Group]",
    titles: Sequence[str],
    keys: Sequence[Sequence[str]],
    *,
    window: "Window",
    foot: "Footer",
    whole: Decimal,
) -> dict[str, Any]:
    from app.ledger.rules import total

    return {
        "from": window.since,
        "to": window.until,
        "zone": window.zone,
        "currency": "USD",
        "totalUSD": _exact(whole),
        "guessedUSD": _exact(total([line.guessed for line in lines])),
        "unpriced": foot.unpriced,
        "newestPriceAgeSeconds": foot.price_age_s,
        "ledgerLagSeconds": foot.lag_s,
        "lines": [
            dict(zip(titles, key, strict=True))
            | {
                "seconds": line.seconds,
                "usefulGPUSeconds": line.useful_gpu_seconds,
                "listUSD": _exact(line.listed),
                "effectiveUSD": _exact(line.effective),
                "billedUSD": _exact(line.billed),
                "guessedUSD": _exact(line.guessed),
                "unpricedSeconds": line.unpriced_s,
            }
            for key, line in zip(keys, lines, strict=True)
        ],
    }


def _csv(lines: "Sequence[Group]", titles: Sequence[str], keys: Sequence[Sequence[str]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = (
        "seconds",
        "useful_gpu_seconds",
        "list_usd",
        "effective_usd",
        "billed_usd",
        "guessed_usd",
        "unpriced_seconds",
    )
    writer.writerow([*titles, *names])
    for key, line in zip(keys, lines, strict=True):
        amounts = [_exact(each) for each in (line.listed, line.effective, line.billed, line.guessed)]
        writer.writerow([*key, line.seconds, line.useful_gpu_seconds, *amounts, line.unpriced_s])
    return text.getvalue()


def _exact(dollar_seconds: Decimal) -> Decimal:
    from app.ledger.rounding import rounded

    return rounded(dollar_seconds, digits=EXACT_DIGITS)


def _hours(seconds: Decimal) -> str:
    return f"{seconds / 3600:.2f}"


def _local(at: datetime, zone: str) -> str:
    from zoneinfo import ZoneInfo

    return at.astimezone(ZoneInfo(zone)).strftime("%Y-%m-%d %H:%M")


def bar(amount: Decimal, most: Decimal, *, width: int = 30) -> str:
    """A bar of block characters, in eighths."""
    eighths = int(max(amount, Decimal(0)) / most * width * 8) if most > 0 else 0
    return "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]


# --- one Pod -------------------------------------------------------------------------------------


@group.command("pod")
@database_option
@click.argument("pod")
@click.option("-n", "--namespace", default="default", show_default=True, help="The Pod's namespace.")
@click.option("--uid", help="Only the Pod with this UID, where several had the name.")
@style_option
def pod(database_url: str | None, pod: str, namespace: str, uid: str | None, style: Style) -> None:
    """The receipt of POD: its machines, phase by phase, with what they cost."""
    settings = settings_of(database_url=database_url)

    async def ask(conn: Any) -> list[dict[str, Any]]:
        from app.store import costs

        return await costs.rows(conn, costs.RECEIPT, namespace=namespace, name=pod, uid=uid)

    found = run(reading(settings, ask))
    if not found:
        raise click.ClickException(
            f"nothing was ever rented for a Pod {namespace}/{pod}"
            + (f" with UID {uid}" if uid else "")
            + "; `nebula why` says where it waits"
        )
    if style == "json":
        click.echo(output.to_json(found))
    elif style == "csv":
        click.echo(rows_csv(found), nl=False)
    else:
        click.echo(receipt(found))


def receipt(found: Sequence[dict[str, Any]]) -> str:
    from app.ledger.rounding import digits_for, shares
    from app.ledger.rules import total

    costs = [(row["cost"] or Decimal(0)) * 3600 for row in found]
    digits = digits_for(total(costs))
    parts = shares(costs, digits=digits)
    lines = []
    for row, cost in zip(found, parts, strict=True):
        lines.append(
            [
                row["resource_id"],
                f"{row['provider_name']}/{row['region_id']}".rstrip("/"),
                f"{row['accelerator_count']}x {row['accelerator']}" if row["accelerator"] else "CPU",
                row["capacity_type"],
                row["phase"] if row["kind"] == "usage" else row["kind"],
                row["meter"] or NOBODY,
                output.age(float(row["seconds"])),
                "unpriced" if row["is_unpriced"] else str(cost),
                row["confidence"],
            ]
        )
    titles = ("MACHINE", "WHERE", "WHAT", "TIER", "FOR", "METER", "TIME", "$", "CONFIDENCE")
    whole = sum(parts, Decimal(0))
    listed = total([(row["on_demand_equivalent"] or Decimal(0)) for row in found])
    first = found[0]
    open_ = "; it goes on" if any(row["is_open"] for row in found) else ""
    saved = f"; on demand it had been ${listed:.{digits}f}" if listed > whole else ""
    who = f"{first['namespace']}/{first['name']} ({first['workload_kind']} {first['workload_name']})"
    return f"{output.table(titles, lines, right=('$', 'TIME'))}\n\n{who}: ${whole}{saved}{open_}"


def rows_csv(rows: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


# --- export --------------------------------------------------------------------------------------


@group.command("export")
@database_option
@period_options
@click.option("--focus", is_flag=True, required=True, help="As FOCUS 1.2 columns, for billing tools.")
@click.option(
    "-o",
    "--output",
    "style",
    type=click.Choice(["csv", "json"]),
    default="csv",
    show_default=True,
    help="How to print.",
)
def export(
    database_url: str | None, since: str | None, until: str | None, zone: str, focus: bool, style: Style
) -> None:
    """Print every charge by UTC hour, for tools that read FOCUS."""
    settings = settings_of(database_url=database_url)

    async def ask(conn: Any) -> list[dict[str, Any]]:
        from app.store import costs

        window = await window_of(conn, since=since, until=until, zone=zone)
        return await costs.focus(conn, window)

    found = run(reading(settings, ask))
    if style == "json":
        click.echo(output.to_json(found))
    elif found:
        click.echo(_focus_csv(found), nl=False)
    else:
        click.echo("nothing was charged in that time", err=True)


def _focus_csv(found: Sequence[dict[str, Any]]) -> str:
    def plain(value: Any) -> Any:
        if isinstance(value, datetime):
            return value.strftime("%Y-%m-%dT%H:%M:%S.%fZ" if value.microsecond else "%Y-%m-%dT%H:%M:%SZ")
        if isinstance(value, Decimal):
            return format(value, "f")
        if isinstance(value, dict):
            import json

            return json.dumps(value, sort_keys=True)
        return value

    return rows_csv([{name: plain(value) for name, value in row.items()} for row in found])


# --- verify --------------------------------------------------------------------------------------


@group.command("verify")
@database_option
@click.option(
    "-o", "--output", "style", type=click.Choice(["table", "json"]), default="table", help="How to print."
)
def verify(database_url: str | None, style: Style) -> None:
    """Hold the ledger against itself, and against the clouds' own bills. Exit code 1 if something is wrong.

    Against itself: every run derived again from its facts; no second twice; no gap; sums as their days.
    """
    settings = settings_of(database_url=database_url)

    async def ask(conn: Any) -> tuple[list[str], list[dict[str, Any]]]:
        from app.ledger.verify import verify
        from app.store import costs

        return await verify(conn), await costs.rows(conn, costs.RECONCILIATION)

    wrong, bills = run(reading(settings, ask))
    if style == "json":
        click.echo(output.to_json({"wrong": wrong, "bills": bills}))
    else:
        for line in wrong:
            click.echo(f"wrong: {line}")
        rows = [
            [
                row["provider"],
                row["status"],
                str(row["machines"]),
                _dollars(row["ledger_cost"]),
                _dollars(row["billed_cost"]),
                _dollars(row["delta"]),
            ]
            for row in bills
        ]
        if rows:
            titles = ("PROVIDER", "BILL", "MACHINES", "LEDGER $", "BILLED $", "DELTA $")
            click.echo(output.table(titles, rows, right=titles[2:]) + "\n")
        click.echo("the ledger agrees with itself" if not wrong else f"{len(wrong)} things are wrong")
    sys.exit(1 if wrong else 0)


def _dollars(amount: Decimal | None) -> str:
    return output.NONE if amount is None else f"{amount:.6f}"


group.add_command(questions.command(period_options, style_option))
group.add_command(terms.override)
group.add_command(terms.commitment)
group.add_command(terms.adjust)
group.add_command(terms.reader)
