"""What every open account can rent, merged and queryable; a listener hears of each real change.

Rows come from the adapters' ``offers()``. An account is known from the moment it is open, before its first
offers arrive; until then nothing needing an accelerator can be placed there. An account whose cloud does not
answer keeps what it last said: offers are promises of shape and price, never of capacity.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from providers.base import Accelerator, Offering, Tier, Traits

AccountKey = tuple[str, str]
"""Provider and account, as configured."""

Listener = Callable[[AccountKey], None]
ANY_COUNT = 0
"""An offering whose accelerator has this count is for every count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountOffers:
    """One account's offerings in the order of its adapter's list: the first match is the primary."""

    provider: str
    account: str
    traits: Traits
    offerings: tuple[Offering, ...] = ()

    @property
    def key(self) -> AccountKey:
        return (self.provider, self.account)

    @property
    def regions(self) -> tuple[str, ...]:
        """The regions served, as listed; "" for a provider without regions."""
        return tuple(dict.fromkeys(offering.region for offering in self.offerings))

    def find(
        self, accelerator: Accelerator | None, *, tier: Tier | None = None, region: str | None = None
    ) -> tuple[Offering, ...]:
        """The offerings of exactly this accelerator (None: without any), primary first, repetitions dropped.

        The type is compared without regard to case, the count exactly. ``tier`` and ``region`` None match
        all. A region that no offering names is served by the offerings without a region, if there are any.
        """
        found: dict[tuple[str, Tier, str], Offering] = {}
        for row in self.offerings:
            if (tier is None or row.tier is tier) and _same(row.accelerator, accelerator):
                found.setdefault((row.region, row.tier, row.shape), row)
        rows = tuple(found.values())
        return rows if region is None else in_region(rows, region)


def in_region(rows: Iterable[Offering], region: str) -> tuple[Offering, ...]:
    """Those of ``rows`` that can be had in ``region``: its own, else those that name no region."""
    rows = tuple(rows)
    exact = tuple(row for row in rows if row.region == region)
    return exact or tuple(row for row in rows if not row.region)


OfferingView = Mapping[AccountKey, AccountOffers]
"""Every open account at one moment. Immutable."""


class Offerings:
    """The offerings of all open accounts. For one event loop; `view` may be kept and passed on."""

    def __init__(self) -> None:
        self._accounts: OfferingView = MappingProxyType({})
        self._listeners: list[Listener] = []
        self._version = 0

    @property
    def version(self) -> int:
        """Rises with every change; equal versions mean equal views."""
        return self._version

    @property
    def view(self) -> OfferingView:
        return self._accounts

    def put(
        self, provider: str, account: str, *, traits: Traits, offerings: Iterable[Offering] | None = None
    ) -> bool:
        """Make an account known, with ``offerings`` in place of those it had (None: those it had stay).

        Returns whether that changed anything; listeners are called only then.

        Raises:
            ValueError: an offering is of another account.
        """
        key = (provider, account)
        old = self._accounts.get(key)
        rows = tuple(offerings) if offerings is not None else (old.offerings if old else ())
        if strangers := [row for row in rows if (row.provider, row.account) != key]:
            raise ValueError(f"offering {strangers[0].shape!r} is not of {provider}/{account}")
        new = AccountOffers(provider=provider, account=account, traits=traits, offerings=rows)
        if new == old:
            return False
        self._set({**self._accounts, key: new}, changed=key)
        return True

    def drop(self, provider: str, account: str) -> bool:
        """Forget an account, so that nothing is placed there. Returns whether it was known."""
        key = (provider, account)
        if key not in self._accounts:
            return False
        self._set({known: offers for known, offers in self._accounts.items() if known != key}, changed=key)
        return True

    def on_change(self, listener: Listener) -> None:
        """Call ``listener`` with the account after each change from now on. It must not wait."""
        self._listeners.append(listener)

    def get(self, provider: str, account: str) -> AccountOffers | None:
        return self._accounts.get((provider, account))

    def __iter__(self) -> Iterator[AccountOffers]:
        return iter(self._accounts.values())

    def _set(self, accounts: dict[AccountKey, AccountOffers], *, changed: AccountKey) -> None:
        self._accounts = MappingProxyType(accounts)
        self._version += 1
        for listener in self._listeners:
            listener(changed)


def _same(offered: Accelerator | None, asked: Accelerator | None) -> bool:
    if offered is None or asked is None:
        return offered is asked
    return offered.type.lower() == asked.type.lower() and offered.count in (asked.count, ANY_COUNT)
