"""``nebula blocks``: what clouds have refused, until when it is not tried again, and how to end that."""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from app.cli import output
from app.cli.database import database_option, run, settings_of

if TYPE_CHECKING:
    from app.store.blocks import Block

TITLES = (
    "ID",
    "PROVIDER",
    "ACCOUNT",
    "ACCELERATOR",
    "TIER",
    "REGION",
    "REASON",
    "EXPIRES",
    "POOL",
    "POD",
    "AGE",
)
ANY = "*"


def _list_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The same for ``nebula blocks`` and ``nebula blocks list``."""
    for option in (
        output.style_option,
        click.option("--all", "lapsed", is_flag=True, help="Also those that have lapsed."),
        click.option("--account", help="Only this account's."),
        click.option("--provider", help="Only this provider's."),
        database_option,
    ):
        command = option(command)
    return command


@click.group("blocks", invoke_without_command=True)
@_list_options
@click.pass_context
def group(context: click.Context, /, **options: Any) -> None:
    """Show what clouds have refused a moment ago, or end it."""
    if context.invoked_subcommand is None:
        context.invoke(list_blocks, **options)
    elif given := [name for name in options if _was_given(context, name)]:
        raise click.UsageError(f"give options after {context.invoked_subcommand}: {', '.join(given)}")


def _was_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


@group.command("list")
@_list_options
def list_blocks(
    database_url: str | None,
    provider: str | None,
    account: str | None,
    lapsed: bool,
    style: output.Style,
) -> None:
    """List blocks, the latest end first. A * matches every value."""
    settings = settings_of(database_url=database_url)

    async def load(conn: Any) -> "list[Block]":
        from app.store import blocks

        return await blocks.load(conn, provider=provider, account=account, lapsed=lapsed)

    found, now = run(_in_transaction(settings, load))
    _print(found, now=now, style=style, empty="no blocks")


@group.command("clear")
@database_option
@click.argument("ids", nargs=-1, type=int, metavar="[ID]...")
@click.option("--provider", help="This provider's.")
@click.option("--account", help="This account's.")
@click.option("--all", "everything", is_flag=True, help="Every block.")
@output.style_option
def clear(
    database_url: str | None,
    ids: tuple[int, ...],
    provider: str | None,
    account: str | None,
    everything: bool,
    style: output.Style,
) -> None:
    """End blocks now, so that what they cover is tried again. They stay in `list --all`."""
    if everything == bool(ids or provider or account):
        raise click.UsageError("give ids, --provider or --account, or else --all")
    settings = settings_of(database_url=database_url)

    async def end(conn: Any) -> "list[Block]":
        from app.store import blocks

        return await blocks.clear(
            conn, ids=ids or None, provider=provider, account=account, everything=everything
        )

    found, now = run(_in_transaction(settings, end))
    _print(found, now=now, style=style, empty="no block fits")


async def _in_transaction(settings: Any, act: Any) -> "tuple[list[Block], datetime]":
    from app.store.engine import begin, database_now, engine_of

    engine = engine_of(settings)
    try:
        async with begin(engine) as conn:
            found: list[Block] = await act(conn)
            return found, await database_now(conn)
    finally:
        await engine.dispose()


def _print(blocks: "Sequence[Block]", *, now: datetime, style: output.Style, empty: str) -> None:
    if style == "json":
        click.echo(output.to_json([_plain(block) for block in blocks]))
    elif not blocks:
        click.echo(empty, err=True)
    else:
        click.echo(output.table(TITLES, [_row(block, now) for block in blocks], right=("ID",)))


def _row(block: "Block", now: datetime) -> list[str]:
    scope, cause = block.scope, block.cause
    region = _axis(scope.region)
    if scope.host is not None:
        region = f"{region} host {scope.host}"
    return [
        str(block.id),
        scope.provider,
        scope.account,
        _axis(scope.accelerator),
        _axis(scope.tier),
        region,
        f"{cause.kind} (template)" if scope.template is not None else cause.kind,
        output.until(block.expires_at, now=now),
        cause.pool or output.NONE,
        f"{cause.pod_namespace}/{cause.pod_name}",
        output.since(block.created_at, now=now),
    ]


def _axis(value: str | None) -> str:
    return ANY if value is None else value or output.NONE


def _plain(block: "Block") -> dict[str, Any]:
    scope, cause = block.scope, block.cause
    return {
        "id": block.id,
        "provider": scope.provider,
        "account": scope.account,
        "accelerator": scope.accelerator,
        "tier": scope.tier,
        "region": scope.region,
        "host": scope.host,
        "template": scope.template,
        "everything": scope.everything,
        "reason": cause.kind,
        "message": cause.message,
        "pool": cause.pool,
        "pod": f"{cause.pod_namespace}/{cause.pod_name}",
        "claim": cause.claim_uid,
        "createdAt": block.created_at,
        "expiresAt": block.expires_at,
    }
