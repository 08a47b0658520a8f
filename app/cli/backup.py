"""``nebula backup`` and ``nebula restore``: the store in one file, and back, with the fence set."""

import getpass
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from app.cli.database import database_option, run, settings_of

if TYPE_CHECKING:
    from app.store.backup import Copied


@click.command("backup")
@database_option
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Write over a file that is there.")
def backup(database_url: str | None, file: Path, force: bool) -> None:
    """Write the whole store into FILE, as it is at one moment. Controllers may run meanwhile."""
    if file.exists() and not force:
        raise click.UsageError(f"{file} is there already: choose another name, or --force")
    if not file.absolute().parent.is_dir():
        raise click.UsageError(f"{file.absolute().parent} is no folder")
    settings = settings_of(database_url=database_url)
    url = settings.direct_database_url or settings.database_url or ""
    done = _said(lambda: run(_backup(url, file)))
    click.echo(
        f"{done.file}: {done.size_bytes} bytes, installation {done.installation}, revision {done.revision},"
        f" attempts up to {done.last_sequence}"
    )


@click.command("restore")
@database_option
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--replace", is_flag=True, help="Yes, replace what the database holds now.")
@click.option("--by", default=getpass.getuser, show_default="you", help="Who says so.")
def restore(database_url: str | None, file: Path, replace: bool, by: str) -> None:
    """Put the store back to what FILE holds. Stop the controllers first.

    Sweeps are held from then on: what was rented since is found again in the clouds, and once every machine
    is accounted for, `nebula hold release --yes` lets the sweep end what nobody owns.
    """
    if not replace:
        raise click.UsageError("this replaces what the database holds now: add --replace")
    settings = settings_of(database_url=database_url)
    url = settings.direct_database_url or settings.database_url or ""
    done = _said(lambda: run(_restore(url, file, by)))
    click.echo(f"restored: installation {done.installation}, revision {done.revision}")
    click.echo(
        "Sweeps are held. Start the controllers, look at nebula orphans, then: nebula hold release --yes"
    )


async def _backup(url: str, file: Path) -> "Copied":
    from app.store.backup import backup as act

    return await act(url, file)


async def _restore(url: str, file: Path, by: str) -> "Copied":
    from app.store.backup import restore as act

    return await act(url, file, by=by)


def _said(act: "Callable[[], Copied]") -> "Copied":
    """The result; a refusal is one line."""
    from app.store.backup import BackupFailed, NoTools, StoreInUse

    try:
        return act()
    except (NoTools, BackupFailed, StoreInUse, LookupError, OSError) as error:
        raise click.ClickException(str(error)) from None
