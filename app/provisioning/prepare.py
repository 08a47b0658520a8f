"""What is settled before an intent to rent is written: which offering, and what its create will name."""

import asyncio
from collections.abc import Mapping, Sequence

from app.inventory.accounts import Account
from app.provisioning.model import ClaimSpec
from catalog.offerings import AccountOffers
from catalog.sizes import Amounts, roomy, too_small
from providers.base import Offering, Rejection, Workload
from providers.capabilities import Chooses, Prepares


def offering_of(
    offers: AccountOffers | None, claim: ClaimSpec, *, account: Account, workload: Workload | None
) -> Offering | None:
    """The one to rent for the claim; None when there is none now, or none that its options allow."""
    found: Sequence[Offering] = ()
    if offers is not None:
        found = offers.find(claim.accelerator, tier=claim.tier, region=claim.region)
    if found and workload is not None:
        found = roomy(found, Amounts.of(workload))
        if isinstance(account.provider, Chooses):
            found = account.provider.choose(workload, found)
    return found[0] if found else None


def no_room(offers: AccountOffers | None, claim: ClaimSpec, workload: Workload) -> str | None:
    """Why no machine that is offered for the claim is large enough; None when one is, or none is offered."""
    found = offers.find(claim.accelerator, tier=claim.tier, region=claim.region) if offers else ()
    asked = Amounts.of(workload)
    if not found or roomy(found, asked):
        return None
    return too_small(found, asked, what=f"{claim.accelerator or 'such'} machines")


async def pins_of(
    claim: ClaimSpec, workload: Workload, offering: Offering, *, account: Account, avoid: frozenset[str]
) -> Mapping[str, str] | Rejection:
    """What `Attempt.pins` will be; empty for a cloud that prepares nothing. It may be repeated.

    Raises:
        ProviderError, TimeoutError: ask again; nothing was rented.
    """
    if not isinstance(account.provider, Prepares):
        return {}
    async with asyncio.timeout(account.call_timeout_s):
        pins = await account.provider.prepare(
            workload,
            offering=offering,
            region=claim.region,
            ceiling_usd_per_hour=claim.max_price,
            options=claim.options,
            avoid=avoid,
        )
    if pins and not isinstance(pins, Rejection):
        account.budget.charge(1)  # it looked something up
    return pins
