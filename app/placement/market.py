"""What clouds say of a request without being asked over the network: the price of a machine, or a refusal.

Both come from the adapters' pure parts (`Provider.quote`, `Provider.validate`), which provisioning asks again
right before it rents: a place that would be refused there for what the Pod is must not be chosen here, for
its owner would make the same Pod again and again.
"""

from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Protocol

import structlog

from app.inventory.accounts import Accounts
from app.inventory.fitness import refuses
from app.placement.request import PlacementRequest
from catalog.offerings import AccountKey, AccountOffers
from providers.base import Completion, Offering, Workload, usd_per_hour
from providers.capabilities import Chooses, CompletesByOption

log = structlog.get_logger()


class Market(Protocol):
    """Pure as far as one ranking can tell: equal questions get equal answers."""

    def price(self, request: PlacementRequest, offering: Offering) -> Decimal | None:
        """Dollars an hour for the whole machine, disk included; None when not known."""
        ...

    def refuses(self, request: PlacementRequest, account: AccountKey) -> str | None:
        """Why this account's cloud can never run the request; None if it can, or if nobody knows."""
        ...

    def choose(self, request: PlacementRequest, offerings: Sequence[Offering]) -> tuple[Offering, ...]:
        """Those that the request's options allow, the one to rent first."""
        ...

    def completion(self, request: PlacementRequest, offers: AccountOffers) -> Completion:
        """What the account's cloud can tell of the request's end."""
        ...

    def closed(self, account: AccountKey) -> str:
        """Why an account is not open; "" where it is not known."""
        ...


class Listed:
    """The prices of the offerings as listed, for want of an adapter."""

    def price(self, request: PlacementRequest, offering: Offering) -> Decimal | None:
        return offering.usd_per_hour

    def refuses(self, request: PlacementRequest, account: AccountKey) -> str | None:
        return None

    def choose(self, request: PlacementRequest, offerings: Sequence[Offering]) -> tuple[Offering, ...]:
        return tuple(offerings)

    def completion(self, request: PlacementRequest, offers: AccountOffers) -> Completion:
        return offers.traits.completion

    def closed(self, account: AccountKey) -> str:
        return ""


LISTED = Listed()


class Adapters:
    """The adapters of the accounts that are open."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts

    def price(self, request: PlacementRequest, offering: Offering) -> Decimal | None:
        account = self._accounts.get((offering.provider, offering.account))
        if account is None or request.workload is None:
            return offering.usd_per_hour
        try:
            return usd_per_hour(account.provider.quote(_workload(request, account.name), offering))
        except Exception:  # an adapter's defect: the price is not known, and nobody else's Pod waits for it
            log.exception("quote raised", provider=account.name)
            return None

    def refuses(self, request: PlacementRequest, account: AccountKey) -> str | None:
        opened = self._accounts.get(account)
        if opened is None or request.workload is None:
            return None
        try:
            return refuses(opened.provider, _workload(request, opened.name))
        except Exception:  # provisioning asks again
            log.exception("validate raised", provider=opened.name)
            return None

    def choose(self, request: PlacementRequest, offerings: Sequence[Offering]) -> tuple[Offering, ...]:
        account = self._accounts.get((offerings[0].provider, offerings[0].account)) if offerings else None
        if account is None or request.workload is None or not isinstance(account.provider, Chooses):
            return tuple(offerings)
        try:
            return tuple(account.provider.choose(_workload(request, account.name), offerings))
        except Exception:
            log.exception("choose raised", provider=account.name)
            return ()

    def completion(self, request: PlacementRequest, offers: AccountOffers) -> Completion:
        account = self._accounts.get(offers.key)
        provider: object = account.provider if account else None
        if request.workload is None or not isinstance(provider, CompletesByOption):
            return offers.traits.completion
        return provider.completion_of(_workload(request, offers.provider))

    def closed(self, account: AccountKey) -> str:
        return self._accounts.trouble.get(account, "")


def _workload(request: PlacementRequest, provider: str) -> Workload:
    assert request.workload is not None
    return replace(request.workload, options=request.options_for(provider))
