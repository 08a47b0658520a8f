"""``nebula budget``: what may be spent by whom, where that stands, and what happens when it is spent."""

import re
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

import click

from app.cli import output
from app.cli.database import database_option, run, settings_of

if TYPE_CHECKING:
    from app.store.budgets import Status

TITLES = ("BUDGET", "SCOPE", "PERIOD", "SPENT $", "AMOUNT $", "USED", "$/H", "SPENT BY", "ACTION")
_NAME = "[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_LABEL_KEY = re.compile(rf"(?:[a-z0-9](?:[-a-z0-9.]{{0,251}}[a-z0-9])?/)?{_NAME}")
_LABEL_VALUE = re.compile(rf"(?:{_NAME})?")
ACTIONS = ("Alert", "RefuseNew", "RefuseOnDemand", "Drain")


@click.group("budget", invoke_without_command=True)
@database_option
@output.style_option
@click.pass_context
def group(context: click.Context, /, database_url: str | None, style: output.Style) -> None:
    """Show budgets, those of NodePools too; or set and drop those that are nobody's NodePool."""
    if context.invoked_subcommand is None:
        _show(database_url, style)


def _show(database_url: str | None, style: output.Style) -> None:
    from app.store import budgets
    from app.store.engine import database_now

    async def ask(conn: Any) -> Any:
        return await budgets.status(conn), await database_now(conn)

    found, now = run(_transaction(settings_of(database_url=database_url), ask))
    if style == "json":
        from dataclasses import asdict

        click.echo(output.to_json([asdict(each) for each in found]))
    elif not found:
        click.echo("no budgets", err=True)
    else:
        right = ("SPENT $", "AMOUNT $", "USED", "$/H")
        click.echo(output.table(TITLES, [_row(each, now) for each in found], right=right))


@group.command("set")
@database_option
@click.argument("name")
@click.option("--amount", required=True, metavar="DOLLARS", help="Dollars in a period.")
@click.option(
    "--period",
    type=click.Choice(["day", "week", "month", "total"]),
    default="month",
    show_default=True,
    help="UTC.",
)
@click.option("--namespace", help="Only this namespace's machines.")
@click.option("--team", help="Only this team's machines.")
@click.option("--pool", help="Only this NodePool's machines.")
@click.option(
    "--label",
    "labels",
    multiple=True,
    metavar="KEY=VALUE",
    help="Only machines of Pods with this label; given again: with all of them.",
)
@click.option(
    "--action",
    type=click.Choice(ACTIONS),
    default="Alert",
    show_default=True,
    help="At the full amount: tell, refuse new machines, refuse those on demand, or end what runs.",
)
@click.option(
    "--thresholds",
    default="50,80,100",
    show_default=True,
    help="Percentages that are told of, once a period.",
)
@click.option(
    "--look-ahead",
    "look_ahead_s",
    type=click.IntRange(0, 31 * 86400),
    default=3600,
    show_default=True,
    metavar="S",
    help="What runs and is promised counts for so many seconds more.",
)
@click.option("--new", "is_new", is_flag=True, help="Take names that nothing was ever seen of, too.")
def set_budget(
    database_url: str | None,
    name: str,
    amount: str,
    thresholds: str,
    labels: tuple[str, ...],
    is_new: bool,
    **rest: Any,
) -> None:
    """Set budget NAME, in place of what had the name. Without a scope it is for everything."""
    from app.store.budgets import POOL_PREFIX, Budget, put
    from app.store.scopes import UnknownName, expect_known

    if name.startswith(POOL_PREFIX):
        raise click.UsageError("that is a NodePool's budget: write spec.budget of the NodePool")
    budget = Budget(
        name=name,
        amount_usd=_dollars(amount),
        thresholds=_percentages(thresholds),
        labels=_labels(labels),
        set_by="nebula budget",
        **rest,
    )

    async def write(conn: Any) -> None:
        if not is_new:
            await expect_known(conn, {each: rest[each] for each in ("namespace", "team", "pool")})
            for label in labels:
                await expect_known(conn, {"label": label})
        await put(conn, [budget])

    try:
        run(_transaction(settings_of(database_url=database_url), write))
    except UnknownName as error:
        raise click.UsageError(str(error)) from None
    click.echo(f"budget {name}: ${budget.amount_usd} a {budget.period}, {budget.action}")


@group.command("drop")
@database_option
@click.argument("name")
def drop(database_url: str | None, name: str) -> None:
    """Forget budget NAME."""
    from app.store import budgets

    async def write(conn: Any) -> bool:
        return await budgets.drop(conn, name)

    if not run(_transaction(settings_of(database_url=database_url), write)):
        raise click.ClickException(f"there is no budget {name!r}; `nebula budget` lists them")
    click.echo(f"budget {name} is dropped")


async def _transaction(settings: Any, act: Any) -> Any:
    from app.store.engine import begin, engine_of

    engine = engine_of(settings)
    try:
        async with begin(engine) as conn:
            return await act(conn)
    finally:
        await engine.dispose()


def _dollars(text: str) -> Decimal:
    try:
        amount = Decimal(text)
    except InvalidOperation:
        amount = Decimal("NaN")
    if not amount.is_finite() or amount <= 0:
        raise click.UsageError(f"--amount: {text!r} is no amount of dollars above 0, such as 500 or 12.50")
    return amount


def _percentages(text: str) -> tuple[int, ...]:
    try:
        found = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        found = ()
    if not found or not all(1 <= each <= 100 for each in found):
        raise click.UsageError(
            f"--thresholds: {text!r} is no list of percentages from 1 to 100, such as 50,80,100"
        )
    return found


def _labels(pairs: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (equals and _LABEL_KEY.fullmatch(key) and _LABEL_VALUE.fullmatch(value)):
            raise click.UsageError(f"--label: {pair!r} is no label of a Pod, such as app=train")
        if found.setdefault(key, value) != value:
            raise click.UsageError(f"--label: no Pod has {key} twice, {found[key]!r} and {value!r}")
    return found


def _row(each: "Status", now: Any) -> list[str]:
    scope = [
        f"{name}={value}"
        for name, value in (("namespace", each.namespace), ("team", each.team), ("pool", each.pool))
        if value
    ] + [f"{key}={value}" for key, value in sorted(each.labels.items())]
    return [
        each.name,
        " ".join(scope) or "everything",
        each.period,
        f"{each.spent_usd:.2f}",
        f"{each.amount_usd:.2f}",
        f"{each.used_ratio:.0%}",
        f"{each.usd_per_hour:.2f}",
        output.NONE if each.exhausted_at is None else output.until(each.exhausted_at, now=now),
        each.action,
    ]
