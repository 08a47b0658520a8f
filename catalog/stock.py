"""What admission may ask of all that could be rented: is there such a thing, and how much of it at most?

The answer "there is none" is given only when every configured account has told its offers: what is not known
yet is never absent. What is written down of clouds that are not configured counts as existing, too, since a
configuration can change; the offers of those that are configured say what there is now.
"""

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from catalog.catalogue import Catalogue, CloudRows
from catalog.offerings import AccountKey, AccountOffers, Offerings
from catalog.rows import ANY_COUNT
from catalog.sizes import Amounts, largest, roomy
from providers.base import Accelerator, Offering

_NEAR = 3
_CUTOFF = 0.55


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsold:
    """An accelerator that nobody has: the names nearest to it and all there are, or the counts of one."""

    near: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    counts: tuple[int, ...] = ()


@dataclass(slots=True)
class _Names:
    """Every name of an accelerator as people write it, by that name in lower case, and its counts."""

    shown: dict[str, str] = field(default_factory=dict)
    counts: dict[str, set[int]] = field(default_factory=dict)

    def add(self, name: str, counts: frozenset[int]) -> None:
        self.shown.setdefault(name.lower(), name)
        self.counts.setdefault(name.lower(), set()).update(counts)


class Stock:
    """All accounts' offers and all catalogue files, at each call as they are then. For one event loop."""

    def __init__(
        self, *, offerings: Offerings, catalogue: Catalogue, configured: frozenset[AccountKey]
    ) -> None:
        self._offerings, self._catalogue, self.configured = offerings, catalogue, configured
        self._names, self._version = _Names(), -1
        self._sizes: dict[str, tuple[Offering, ...]] = {}

    @property
    def known(self) -> bool:
        """Whether every configured account has told its offers, and there is one."""
        view = self._offerings.view
        return bool(self.configured) and all(key in view and view[key].answered for key in self.configured)

    def accounts(self, provider: str) -> tuple[AccountOffers, ...]:
        """What is known of the open accounts of a provider."""
        return tuple(offers for offers in self._offerings if offers.provider == provider)

    def account(self, key: AccountKey) -> AccountOffers | None:
        return self._offerings.get(*key)

    def unsold(self, accelerator: Accelerator) -> Unsold | None:
        """Why no cloud could ever rent this out; None when one may, or when that is not known."""
        if not self.known:
            return None
        names = self._all_names()
        kind = accelerator.type.lower()
        if kind not in names.shown:
            return Unsold(near=_near(kind, names.shown), known=tuple(sorted(names.shown.values())))
        counts = names.counts[kind]
        if accelerator.count in counts or ANY_COUNT in counts:
            return None
        return Unsold(counts=tuple(sorted(counts)))

    def only_elsewhere(self, accelerator: Accelerator) -> tuple[str, ...]:
        """The clouds that have it by their files, sorted, when none of the configured accounts offers it.

        Empty, too, as long as that is not known for certain.
        """
        if not self.known or any(offers.find(accelerator) for offers in self._offerings):
            return ()
        clouds = self._catalogue.clouds.items()
        return tuple(sorted(name for name, cloud in clouds if any(_counted(cloud, accelerator))))

    def too_small(self, accelerator: Accelerator | None, asked: Amounts) -> Amounts | None:
        """The largest machine that there is, when it is smaller than ``asked``; None when one may do.

        Each amount is the largest that any machine has; no one machine need have all of them.
        """
        if not self.known:
            return None
        rows = self._sized(accelerator)
        return None if not rows or roomy(rows, asked) else largest(rows)

    def _sized(self, accelerator: Accelerator | None) -> tuple[Offering, ...]:
        """All rows of it. Walking through them took a fifth of a review's time, so they are kept."""
        self._all_names()
        key = accelerator.key if accelerator else ""
        rows = self._sizes.get(key)
        if rows is None:
            rows = self._sizes[key] = tuple(self._rows(accelerator))
        return rows

    def _rows(self, accelerator: Accelerator | None) -> Iterator[Offering]:
        """All offerings of it, one without sizes among them where a cloud rents more than it lists."""
        for offers in self._offerings:
            rows = offers.find(accelerator)
            if rows:
                yield from rows
            elif accelerator is None and not offers.traits.needs_accelerator:
                return  # it makes any size: nothing can be said
        for cloud in self._catalogue.clouds.values():
            yield from _counted(cloud, accelerator)

    def _all_names(self) -> _Names:
        if self._version != self._offerings.version:
            self._names, self._version = self._collect(), self._offerings.version
            self._sizes = {}
        return self._names

    def _collect(self) -> _Names:
        names = _Names()
        for cloud in self._catalogue.clouds.values():
            counts: dict[str, set[int]] = {kind: set() for kind in cloud.accelerators}
            for row in cloud.rows:
                if row.accelerator is not None:
                    counts[row.accelerator.type].add(row.accelerator.count)
            for kind, found in counts.items():
                names.add(kind, frozenset(found))
            for alias, kind in cloud.aliases.items():
                names.add(alias, frozenset(counts.get(kind, ())))
        for offers in self._offerings:
            kinds = {row.accelerator.type for row in offers.offerings if row.accelerator}
            for kind in (*kinds, *offers.aliases):
                names.add(kind, offers.counts(kind))
        return names


def near(word: str, words: Iterable[str], *, cutoff: float = 0.6) -> tuple[str, ...]:
    """Those of ``words`` that ``word`` may be a slip of, the likeliest first."""
    return tuple(difflib.get_close_matches(word, sorted(words), n=_NEAR, cutoff=cutoff))


def _near(kind: str, shown: dict[str, str]) -> tuple[str, ...]:
    """Names that begin with what was written, or it with them, then those that look like it."""
    alike = [name for name in sorted(shown) if name.startswith(kind) or kind.startswith(name)]
    alike += difflib.get_close_matches(kind, sorted(shown), n=_NEAR, cutoff=_CUTOFF)
    return tuple(shown[name] for name in dict.fromkeys(alike))[:_NEAR]


def _counted(cloud: CloudRows, accelerator: Accelerator | None) -> Iterator[Offering]:
    """The rows of exactly this accelerator, by any of its names."""
    wanted = None
    if accelerator is not None:
        own = cloud.aliases.get(accelerator.type.lower(), accelerator.type)
        wanted = Accelerator(type=own, count=accelerator.count).key
    for row in cloud.rows:
        key = row.accelerator.key if row.accelerator else None
        any_count = row.accelerator is not None and row.accelerator.count == ANY_COUNT
        if key == wanted or (any_count and wanted and key and key.split(":")[0] == wanted.split(":")[0]):
            yield row
