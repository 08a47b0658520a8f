"""``nebula cost override``, ``commitment`` and ``adjust``: what people say about prices and payments."""

import getpass
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Any

import click

from app.cli import output
from app.cli.database import database_option, run, settings_of

_new_option = click.option(
    "--new", "is_new", is_flag=True, help="Take names that nothing was ever seen of, too."
)


def _account_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        _new_option,
        click.option("--reason", default="", help="For those who read it later."),
        click.option("--tier", type=click.Choice(["Spot", "OnDemand", "*"]), default="*", show_default=True),
        click.option(
            "--sku", default="*", show_default=True, help="The cloud's id of a shape, or TYPE:COUNT."
        ),
        click.option("--account", default="default", show_default=True, help="The provider's account."),
        click.option("--provider", required=True, help="The provider, as it is configured."),
    ):
        command = option(command)
    return command


@click.group("override", invoke_without_command=True)
@database_option
@output.style_option
@click.pass_context
def override(context: click.Context, /, database_url: str | None, style: output.Style) -> None:
    """Show prices that people have set, a contract's for example; they are used exactly."""
    if context.invoked_subcommand is None:
        _list(database_url, style, "overrides", ("id", "provider", "account", "sku", "tier", "usd_per_hour"))


@override.command("set")
@database_option
@_account_options
@click.option("--usd-per-hour", required=True, metavar="DOLLARS", help="For the whole machine; 0 is a price.")
@click.option("--from", "since", metavar="WHEN", help="UTC. Default: now.")
@click.option("--to", "until", metavar="WHEN", help="UTC. Default: until further notice.")
def set_override(
    database_url: str | None, usd_per_hour: str, since: str | None, until: str | None, **rest: Any
) -> None:
    """Set the price of machines; one that holds at its beginning ends there."""
    begins, ends = _moment("--from", since) or datetime.now(UTC), _moment("--to", until)
    if ends is not None and ends <= begins:
        raise click.UsageError("--to must be after --from (which is now, unless it is given)")
    values = rest | {
        "usd_per_hour": _dollars("--usd-per-hour", usd_per_hour),
        "since": begins,
        "until": ends,
        "set_by": getpass.getuser(),
    }
    number = _write(database_url, "override", values)
    click.echo(f"override {number}: ${values['usd_per_hour']} an hour")


@override.command("end")
@database_option
@click.argument("number", type=int)
def end_override(database_url: str | None, number: int) -> None:
    """Let override NUMBER end now."""

    async def act(conn: Any) -> bool:
        from app.store import terms

        return await terms.end_override(conn, number)

    if not run(_transaction(settings_of(database_url=database_url), act)):
        raise click.ClickException(f"there is no override {number} that still holds")
    click.echo(f"override {number} has ended")


@click.group("commitment", invoke_without_command=True)
@database_option
@output.style_option
@click.pass_context
def commitment(context: click.Context, /, database_url: str | None, style: output.Style) -> None:
    """Show what was paid in advance, and how much of it is used."""
    if context.invoked_subcommand is None:
        columns = (
            *("id", "provider", "account", "sku", "tier"),
            *("amount_usd", "used_usd", "usd_per_hour", "machines", "voided_at"),
        )
        _list(database_url, style, "commitments", columns)


@commitment.command("add")
@database_option
@_account_options
@click.option("--amount", required=True, metavar="DOLLARS", help="What was paid.")
@click.option(
    "--usd-per-hour", required=True, metavar="DOLLARS", help="What an hour of a machine takes from it."
)
@click.option(
    "--machines",
    type=click.IntRange(1),
    metavar="N",
    help="How many it covers at once. Default: any number, until the amount is used.",
)
@click.option("--from", "since", required=True, metavar="WHEN", help="The term begins, UTC.")
@click.option("--to", "until", required=True, metavar="WHEN", help="The term ends, UTC.")
def add_commitment(
    database_url: str | None, amount: str, usd_per_hour: str, since: str, until: str, **rest: Any
) -> None:
    """Note a prepayment: machines that it covers are not billed again, as long as its amount lasts."""
    begins, ends = _moment("--from", since), _moment("--to", until)
    if begins is None or ends is None or ends <= begins:
        raise click.UsageError("--to must be after --from")
    values = rest | {
        "amount_usd": _dollars("--amount", amount),
        "usd_per_hour": _dollars("--usd-per-hour", usd_per_hour),
        "since": begins,
        "until": ends,
        "set_by": getpass.getuser(),
    }
    click.echo(f"commitment {_write(database_url, 'commitment', values)}: ${values['amount_usd']}")


@commitment.command("void")
@database_option
@click.argument("number", type=int)
@click.option("--reason", default="", help="For those who read it later.")
def void_commitment(database_url: str | None, number: int, reason: str) -> None:
    """Take back commitment NUMBER, noted by mistake, for good: what it covered is billed after all.

    Closed months stay as they were: what concerns them is a line of this month, which names them.
    """
    from app.store import terms

    async def act(conn: Any) -> None:
        await terms.void(conn, number, voided_by=getpass.getuser(), reason=reason)

    try:
        run(_transaction(settings_of(database_url=database_url), act))
    except terms.CannotVoid as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"commitment {number} is void")


@click.command("adjust")
@database_option
@click.argument("kind", type=click.Choice(["credit", "refund", "tax"]))
@click.option("--provider", required=True, help="The provider, as it is configured.")
@click.option("--account", default="default", show_default=True, help="The provider's account.")
@click.option("--amount", required=True, metavar="DOLLARS", help="Signed: below zero is money back.")
@click.option("--at", metavar="WHEN", help="The instant in which it counts, UTC. Default: now.")
@click.option(
    "--key", required=True, help="What it is, so that it is written once: an invoice's line, for example."
)
@click.option("--invoice", help="The invoice's number.")
@click.option("--reason", default="", help="For those who read it later.")
@_new_option
def adjust(database_url: str | None, amount: str, at: str | None, **rest: Any) -> None:
    """Write a credit, refund or tax down; one of a closed month falls into this one, and names it."""
    values = rest | {
        "usd": _dollars("--amount", amount, signed=True),
        "at": _moment("--at", at) or datetime.now(UTC),
    }
    written = _write(database_url, "adjust", values)
    click.echo("written" if written else "it was written before: nothing changes")


@click.command("reader")
@database_option
@click.argument("role")
def reader(database_url: str | None, role: str) -> None:
    """Let ROLE of the database read the reports, and nothing else; for dashboards. It must exist."""
    from app.store.views import NoSuchRole, let_read

    async def act(conn: Any) -> None:
        await conn.run_sync(let_read, role)

    try:
        run(_transaction(settings_of(database_url=database_url), act))
    except NoSuchRole:
        raise click.ClickException(f"there is no role {role!r}; make it: create role {role} login") from None
    click.echo(f"{role} may read the reports")


def _list(database_url: str | None, style: output.Style, what: str, columns: tuple[str, ...]) -> None:
    async def act(conn: Any) -> Any:
        from app.store import terms

        return await getattr(terms, what)(conn)

    rows = run(_transaction(settings_of(database_url=database_url), act))
    shown = [{name: row[name] for name in (*columns, "since", "until", "set_by", "reason")} for row in rows]
    if style == "json":
        click.echo(output.to_json(shown))
    elif not shown:
        click.echo(f"no {what}", err=True)
    else:
        titles = tuple(name.upper().replace("_", " ") for name in shown[0])
        click.echo(output.table(titles, [[_cell(value) for value in row.values()] for row in shown]))


def _cell(value: Any) -> str:
    if value is None:
        return output.NONE
    return value.strftime("%Y-%m-%d %H:%M") if isinstance(value, datetime) else str(value)


def _write(database_url: str | None, what: str, values: dict[str, Any]) -> Any:
    from sqlalchemy.exc import IntegrityError

    from app.store.scopes import UnknownName, expect_known
    from app.store.terms import TermIsClosed

    is_new = values.pop("is_new")

    async def act(conn: Any) -> Any:
        from app.store import terms

        if not is_new:
            names = {name: values.get(name) for name in ("provider", "account", "sku")}
            await expect_known(conn, names, provider=values["provider"])
        return await getattr(terms, what)(conn, **values)

    try:
        return run(_transaction(settings_of(database_url=database_url), act))
    except UnknownName as error:
        raise click.UsageError(str(error)) from None
    except TermIsClosed as error:
        raise click.UsageError(f"--to: {error}; `nebula cost adjust` writes what is left to say") from None
    except IntegrityError as error:
        if "one_price" in str(error.orig):
            raise click.ClickException("another override holds within that time: end it first") from None
        raise click.ClickException(f"it was refused: {error.orig}") from None


async def _transaction(settings: Any, act: Any) -> Any:
    from app.store.engine import begin, engine_of

    engine = engine_of(settings)
    try:
        async with begin(engine) as conn:
            return await act(conn)
    finally:
        await engine.dispose()


def _dollars(option: str, text: str, *, signed: bool = False) -> Decimal:
    try:
        amount = Decimal(text)
    except InvalidOperation:
        amount = Decimal("NaN")
    if not amount.is_finite() or (amount < 0 and not signed):
        raise click.UsageError(f"{option}: {text!r} is no amount of dollars, such as 2.49")
    return amount


def _moment(option: str, text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise click.UsageError(
            f"{option}: {text!r} is no time; write 2026-03-01 or 2026-03-01T12:00"
        ) from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
