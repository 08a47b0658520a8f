"""Keeps one account's offerings up to date from its adapter. A cloud that does not answer changes nothing.

Every replica runs this, since every one answers admission: offers are all that a follower asks a cloud for.
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from catalog.catalogue import CloudRows
from catalog.offerings import Offerings
from providers.base import Provider, ProviderError, Throttled

log = structlog.get_logger()
EVERY_S = 300.0
RETRY_S = 5.0


async def follow(
    offerings: Offerings,
    *,
    provider: Provider,
    account: str,
    written: CloudRows | None = None,
    turn: Callable[[], Awaitable[None]] | None = None,
    every_s: float = EVERY_S,
    retry_s: float = RETRY_S,
) -> None:
    """Put the account into ``offerings`` at once, then its offers as the cloud names them, until cancelled.

    ``written`` are the catalogue's rows of its kind of cloud, which are offered from the start. ``turn``
    waits for the account's call budget before each question. The account is dropped at the end.
    """
    offerings.put(provider.name, account, traits=provider.traits, written=written)
    try:
        while True:
            if turn is not None:
                await turn()
            try:
                rows = await provider.offers()
            except (ProviderError, TimeoutError) as error:
                log.info("offers not known", provider=provider.name, account=account, error=str(error)[:256])
                await asyncio.sleep(error.retry_after_s if isinstance(error, Throttled) else retry_s)
                continue
            if offerings.put(provider.name, account, traits=provider.traits, offerings=rows):
                log.info("offers changed", provider=provider.name, account=account, offerings=len(rows))
            await asyncio.sleep(every_s)
    finally:
        offerings.drop(provider.name, account)
