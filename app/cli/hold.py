"""``nebula hold``: what holds the sweeps, and the word of a person that lifts it.

A hold is set when something outside (a machine, a claim's mark) names an attempt that the database does not
know: it was restored or has lost rows, and a machine that nobody remembers may still be somebody's.
"""

from typing import TYPE_CHECKING

import click

from app.cli import output
from app.cli.database import database_option, run, settings_of

if TYPE_CHECKING:
    from app.store.installation import Hold


@click.group("hold", invoke_without_command=True)
@database_option
@output.style_option
@click.pass_context
def group(context: click.Context, database_url: str | None, style: output.Style) -> None:
    """Show whether sweeps are held, and why."""
    context.obj = database_url
    if context.invoked_subcommand is not None:
        return
    hold = run(_read(database_url))
    if style == "json":
        shown = None if hold is None else {"since": hold.since, "reason": hold.reason}
        click.echo(output.to_json({"hold": shown}))
    elif hold is None:
        click.echo("Nothing is held.")
    else:
        click.echo(f"Sweeps are held since {hold.since:%Y-%m-%d %H:%M:%S} UTC: {hold.reason}")
        click.echo("Once every machine is accounted for: nebula hold release --yes")


@group.command("release")
@click.option("--yes", is_flag=True, help="I have looked at the clouds' own lists.")
@click.pass_context
def release(context: click.Context, yes: bool) -> None:
    """Lift the hold: machines that no claim and no row knows are ended again."""
    if not yes:
        raise click.UsageError("look at the clouds' own lists first, then add --yes")
    lifted = run(_lift(context.obj))
    click.echo("The hold is lifted." if lifted else "Nothing was held.")


async def _read(database_url: str | None) -> "Hold | None":
    from app.store.engine import begin, engine_of
    from app.store.installation import held

    engine = engine_of(settings_of(database_url=database_url))
    try:
        async with begin(engine) as conn:
            return await held(conn)
    finally:
        await engine.dispose()


async def _lift(database_url: str | None) -> bool:
    from app.store.engine import begin, engine_of
    from app.store.installation import release_hold

    engine = engine_of(settings_of(database_url=database_url))
    try:
        async with begin(engine) as conn:
            return await release_hold(conn)
    finally:
        await engine.dispose()
