"""``nebula migrate``: bring the database to this version's schema, or say how far it is."""

from typing import TYPE_CHECKING

import click

from app.cli import output
from app.cli.database import database_option, run, settings_of

if TYPE_CHECKING:
    from app.store.revisions import State


@click.command("migrate")
@database_option
@click.option("--direct-database-url", metavar="URL", help="Where --database-url goes through a pooler.")
@click.option("--check", is_flag=True, help="Change nothing; exit with 1 unless this version can run.")
@click.option(
    "--lock-timeout",
    "lock_timeout_s",
    type=click.FloatRange(min=0.1),
    default=10.0,
    show_default=True,
    help="Seconds to wait for a table that others use before giving up.",
)
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=0),
    default=600.0,
    show_default=True,
    help="Seconds to wait for another migrator.",
)
@output.style_option
def command(
    database_url: str | None,
    direct_database_url: str | None,
    check: bool,
    lock_timeout_s: float,
    wait_s: float,
    style: output.Style,
) -> None:
    """Bring the database to this version's schema.

    Safe to run at any time, and many times: a replica that starts does the same.
    """
    settings = settings_of(database_url=database_url, direct_database_url=direct_database_url)
    url = settings.direct_database_url or settings.database_url or ""
    if check:
        _check(url, style)
    else:
        _migrate(url, lock_timeout_s, wait_s, style)


def _check(url: str, style: output.Style) -> None:
    from app.store import migrate

    state = run(migrate.check(url))
    if style == "json":
        click.echo(output.to_json({"revision": state.revision, "head": state.head, "verdict": state.verdict}))
    else:
        click.echo(f"database: {state.revision or 'empty'}, this version: {state.head}: {state.verdict}")
    if not state.usable:
        raise click.exceptions.Exit(1)


def _migrate(url: str, lock_timeout_s: float, wait_s: float, style: output.Style) -> None:
    from app.store import migrate

    async def work() -> tuple["State", str]:
        before = await migrate.check(url)
        after = await migrate.migrate(
            url, lock_timeout_s=lock_timeout_s, wait_s=wait_s, report=lambda line: click.echo(line, err=True)
        )
        return before, after

    try:
        before, after = run(work())
    except migrate.SchemaTooNew as error:
        raise click.ClickException(str(error)) from None
    if style == "json":
        click.echo(output.to_json({"from": before.revision, "to": after}))
    elif before.revision == after:
        click.echo(f"the database is at revision {after}: nothing to do")
    else:
        click.echo(f"migrated from {before.revision or 'an empty database'} to revision {after}")
