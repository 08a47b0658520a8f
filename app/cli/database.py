"""The options of commands that talk to Postgres, and what they say when it cannot be reached."""

import asyncio
import os
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from app.settings import Settings

T = TypeVar("T")

database_option = click.option(
    "--database-url", metavar="URL", help="postgresql://user:password@host:port/name [NEBULA_DATABASE_URL]"
)


def settings_of(**flags: Any) -> "Settings":
    """The settings from flags and variables, with a database URL.

    Raises:
        click.UsageError: an option is wrong, or there is no URL.
    """
    from app.settings import SettingsError, load

    try:
        settings = load(flags, os.environ)
    except SettingsError as error:
        raise click.UsageError(str(error)) from None
    if settings.database_url is None:
        raise click.UsageError("no database: give --database-url or NEBULA_DATABASE_URL")
    return settings


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end; a store that cannot be used ends the command with one line."""
    from app.store.engine import StoreUnavailable

    try:
        return asyncio.run(work)
    except StoreUnavailable as error:
        raise click.ClickException(f"the database cannot be used: {error}") from None
