"""What every open account can rent, merged and queryable; a listener hears of each real change.

Offerings come from the rows of the account's catalogue file and from the adapter's ``offers()``, which is
believed where both speak of one shape, region and tier. An account is known from the moment it is open, with
its rows, and has answered once its first offers arrived. An account whose cloud does not answer keeps what it
last said: offers are promises of shape and price, never of capacity.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from decimal import Decimal
from types import MappingProxyType

from catalog.catalogue import CloudRows
from catalog.regions import RegionWords, words_of
from catalog.rows import ANY_COUNT
from providers.base import Accelerator, MeterKind, Offering, Tier, Traits

AccountKey = tuple[str, str]
"""Provider and account, as configured."""

Listener = Callable[[AccountKey], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountOffers:
    """One account's offerings in the order of their lists: the first match is the primary.

    ``adapter`` is the kind of cloud ("" when it is the provider's name). ``aliases`` leads from other names
    of an accelerator, in lower case, to its own. ``answered``: the cloud has told its offers, so that what is
    not here is not sold there.
    """

    provider: str
    account: str
    traits: Traits
    offerings: tuple[Offering, ...] = ()
    adapter: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict)
    answered: bool = False
    regions: tuple[str, ...] = field(init=False, repr=False, compare=False)
    _by_type: Mapping[str | None, tuple[Offering, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_type: dict[str | None, list[Offering]] = {}
        for row in self.offerings:
            kind = self.own_name(row.accelerator.type) if row.accelerator else None
            by_type.setdefault(kind, []).append(row)
        regions = dict.fromkeys(row.region for row in self.offerings)
        object.__setattr__(self, "_by_type", {kind: tuple(rows) for kind, rows in by_type.items()})
        object.__setattr__(self, "regions", tuple(regions))

    @property
    def key(self) -> AccountKey:
        return (self.provider, self.account)

    @property
    def words(self) -> RegionWords:
        """What region words mean there."""
        return words_of(self.adapter, self.provider)

    def own_name(self, kind: str) -> str:
        """The name, in lower case, that this account's offerings have for an accelerator."""
        return self.aliases.get(kind.lower(), kind).lower()

    def shown_name(self, kind: str) -> str:
        """The same as its list writes it; ``kind`` as it is where nothing like it is offered."""
        rows = self._by_type.get(self.own_name(kind), ())
        return next((row.accelerator.type for row in rows if row.accelerator), kind)

    def find(
        self, accelerator: Accelerator | None, *, tier: Tier | None = None, region: str | None = None
    ) -> tuple[Offering, ...]:
        """The offerings of exactly this accelerator (None: without any), primary first, repetitions dropped.

        The type is compared without regard to case, by any of its names, the count exactly; one for any count
        is given as for the count that was asked. ``tier`` and ``region`` None match all. A region that no
        offering names is served by the offerings without a region, if there are any.
        """
        found: dict[tuple[str, Tier, str], Offering] = {}
        for row in self._by_type.get(self.own_name(accelerator.type) if accelerator else None, ()):
            if (tier is None or row.tier is tier) and (fitting := _counted(row, accelerator)):
                found.setdefault((row.region, row.tier, row.shape), fitting)
        rows = tuple(found.values())
        return rows if region is None else in_region(rows, region)

    def counts(self, kind: str) -> frozenset[int]:
        """The counts in which an accelerator is offered; `ANY_COUNT` among them when any can be had."""
        rows = self._by_type.get(self.own_name(kind), ())
        return frozenset(row.accelerator.count for row in rows if row.accelerator)


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
        self._told: dict[AccountKey, tuple[Offering, ...]] = {}  # by the clouds
        self._written: dict[AccountKey, CloudRows] = {}
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
        self,
        provider: str,
        account: str,
        *,
        traits: Traits,
        offerings: Iterable[Offering] | None = None,
        written: CloudRows | None = None,
    ) -> bool:
        """Make an account known, ``offerings`` in place of what its cloud told (None: that stays).

        ``written`` are the rows of its kind of cloud, which stay until others are given. Returns whether that
        changed anything; listeners are called only then.

        Raises:
            ValueError: an offering is of another account.
        """
        key = (provider, account)
        told = self._told.get(key) if offerings is None else tuple(offerings)
        if strangers := [row for row in told or () if (row.provider, row.account) != key]:
            raise ValueError(f"offering {strangers[0].shape!r} is not of {provider}/{account}")
        cloud = written or self._written.get(key) or CloudRows(adapter="")
        rows = cloud.offerings(provider=provider, account=account)
        if told is not None:
            self._told[key] = told
        self._written[key] = cloud
        new = AccountOffers(
            provider=provider,
            account=account,
            traits=traits,
            offerings=_merged(told or (), rows),
            adapter=cloud.adapter,
            aliases=cloud.aliases,
            answered=told is not None,
        )
        if new == self._accounts.get(key):
            return False
        self._set({**self._accounts, key: new}, changed=key)
        return True

    def drop(self, provider: str, account: str) -> bool:
        """Forget an account, so that nothing is placed there. Returns whether it was known."""
        key = (provider, account)
        self._told.pop(key, None)
        self._written.pop(key, None)
        if key not in self._accounts:
            return False
        self._set({known: offers for known, offers in self._accounts.items() if known != key}, changed=key)
        return True

    def on_change(self, listener: Listener) -> None:
        """Call ``listener`` with the account after each change from now on. It must not wait."""
        self._listeners.append(listener)

    @contextmanager
    def listeners_of_a_term(self) -> Iterator[None]:
        """Forget, at the end of the block, the listeners that were added inside it."""
        before = list(self._listeners)
        try:
            yield
        finally:
            self._listeners[:] = before

    def get(self, provider: str, account: str) -> AccountOffers | None:
        return self._accounts.get((provider, account))

    def __iter__(self) -> Iterator[AccountOffers]:
        return iter(self._accounts.values())

    def _set(self, accounts: dict[AccountKey, AccountOffers], *, changed: AccountKey) -> None:
        self._accounts = MappingProxyType(accounts)
        self._version += 1
        for listener in self._listeners:
            listener(changed)


def _merged(told: tuple[Offering, ...], rows: tuple[Offering, ...]) -> tuple[Offering, ...]:
    """What the cloud told, with the rows' sizes where it says none, then the rows of what it did not tell."""
    spoken_of = {(row.shape, row.region, row.tier) for row in told}
    written: dict[tuple[str, Tier], Offering] = {}
    for row in rows:
        written.setdefault((row.shape, row.tier), row)
    sized = (_sized(row, written.get((row.shape, row.tier))) for row in told)
    return (*sized, *(row for row in rows if (row.shape, row.region, row.tier) not in spoken_of))


def _sized(told: Offering, row: Offering | None) -> Offering:
    """The offer with the sizes of its row, in whatever region, where it says none itself."""
    if row is None:
        return told
    return replace(
        told,
        cpu=row.cpu if told.cpu is None else told.cpu,
        memory_bytes=row.memory_bytes if told.memory_bytes is None else told.memory_bytes,
        disk_bytes=row.disk_bytes if told.disk_bytes is None else told.disk_bytes,
    )


def _counted(row: Offering, asked: Accelerator | None) -> Offering | None:
    """The offering for the count that is asked; None when it is for another count."""
    if row.accelerator is None or asked is None or row.accelerator.count == asked.count:
        return row
    if row.accelerator.count != ANY_COUNT:
        return None
    meters = (
        replace(meter, quantity=Decimal(asked.count)) if meter.kind is MeterKind.GPU else meter
        for meter in row.meters
    )
    counted = Accelerator(type=row.accelerator.type, count=asked.count)
    return replace(row, accelerator=counted, meters=tuple(meters))
