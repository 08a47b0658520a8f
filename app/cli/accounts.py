"""Asking the configured clouds from a command: opened, asked once, closed. Nothing is rented or made."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from app.settings import ProviderEntry, Settings
    from providers.base import Offering, Provider

_ANSWER_S = 60.0

Credentials = Mapping[tuple[str, str], Mapping[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One account that was asked. ``trouble`` is why it did not answer."""

    entry: "ProviderEntry"
    provider: "Provider | None"
    offerings: "tuple[Offering, ...] | None"
    trouble: str = ""


def settings_of(**flags: Any) -> "Settings":
    """The settings from flags and variables, with a provider at least.

    Raises:
        click.UsageError: an option is wrong, or there is none.
    """
    import os

    from app.inventory.accounts import check_adapters
    from app.settings import SettingsError, load

    try:
        settings = load(flags, os.environ)
    except SettingsError as error:
        raise click.UsageError(str(error)) from None
    if errors := check_adapters(settings.providers):
        raise click.UsageError("\n".join(errors))
    if not settings.providers:
        raise click.UsageError("no clouds: give --providers or NEBULA_PROVIDERS, such as runpod")
    return settings


async def ask(settings: "Settings", *, credentials: Credentials) -> list[Asked]:
    """What each account offers now. `Asked.provider` stays open: close it."""
    return list(
        await asyncio.gather(
            *(_ask(settings, entry, credentials.get(entry.key, {})) for entry in settings.providers)
        )
    )


async def _ask(settings: "Settings", entry: "ProviderEntry", credentials: Mapping[str, str]) -> Asked:
    from app.inventory.accounts import load_factory
    from providers.base import ProviderConfig, ProviderError

    config = ProviderConfig(
        name=entry.name,
        account=entry.account,
        installation="none",
        options=entry.options,
        credentials=credentials,
        call_timeout_s=settings.call_timeout_s,
    )
    provider = None
    try:
        async with asyncio.timeout(_ANSWER_S):
            provider = await load_factory(entry.adapter).open(config)
            rows = await provider.offers()
    except ValueError as error:
        raise click.UsageError(f"--providers: {entry.name}/{entry.account}: {error}") from None
    except (ProviderError, TimeoutError) as error:
        return Asked(
            entry=entry, provider=provider, offerings=None, trouble=str(error) or "no answer in time"
        )
    now = datetime.now(UTC)
    told = tuple(replace(row, priced_at=row.priced_at or now) for row in rows)
    return Asked(entry=entry, provider=provider, offerings=told)
