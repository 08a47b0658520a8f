"""From the regions that a pool declares to the region tokens that are tried, in order. Pure.

A token is opaque to everybody but the provider's adapter: a region's own name, several joined by the
provider's own character, or "" for "the provider chooses". Whoever asks where a pool's machines may be (the
placement walk, the clock that lists a cloud) must come through here: a region that is rented in and not
listed would read as "gone".
"""

import functools
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files

ANYWHERE = ""
"""The token of a provider that has no regions, or is left to choose one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionWords:
    """What one provider's region words mean. Group names are lower case; see ``regions.toml``."""

    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    walk: tuple[str, ...] = ()
    join: str | None = None

    @property
    def named(self) -> tuple[str, ...]:
        """Every region that any group names."""
        return tuple(dict.fromkeys(region for group in self.groups.values() for region in group))

    @property
    def grouped(self) -> tuple[str, ...]:
        """Every region of every group, in walking order."""
        return tuple(region for group in self.walk for region in self.groups[group])


PLAIN = RegionWords()


def region_tokens(
    declared: Iterable[str], *, served: Sequence[str], words: RegionWords = PLAIN
) -> tuple[str, ...]:
    """The candidate tokens of one provider in a pool, at least one, in the order in which they are tried.

    ``declared`` is the pool's list as written: trimmed here, blanks dropped, a list of blanks counts as none.
    A group word (any case) stands for its regions, anything else for itself, unchecked. ``served`` are the
    regions of the provider's offerings as listed; they decide only where nothing is declared.
    """
    wanted = [word for entry in declared if (word := entry.strip())]
    regions = (region for word in wanted for region in words.groups.get(word.lower(), (word,)))
    named = tuple(dict.fromkeys(regions))
    if not named:
        return _anywhere(served, words=words)
    if words.join is not None and not any(served):
        return (words.join.join(named),)
    return named


def _anywhere(served: Sequence[str], *, words: RegionWords) -> tuple[str, ...]:
    regions = dict.fromkeys(region for region in served if region)
    grouped = tuple(region for region in words.grouped if region in regions)
    return grouped or tuple(regions) or (ANYWHERE,)


def words_of(*kinds: str) -> RegionWords:
    """The region words of a kind of cloud: of the first of ``kinds`` that has any; `PLAIN` where none has.

    Asked with an account's adapter, then its configured name: an account that is called otherwise has the
    words of its cloud, and a simulator that stands in for a cloud has those of the name it is given.
    """
    return next((words for kind in kinds if (words := _all().get(kind)) is not None), PLAIN)


@functools.cache
def _all() -> Mapping[str, RegionWords]:
    table = tomllib.loads(files("catalog").joinpath("regions.toml").read_text(encoding="utf-8"))
    return {
        provider: RegionWords(
            groups={name: tuple(regions) for name, regions in entry.get("groups", {}).items()},
            walk=tuple(entry.get("walk", ())),
            join=entry.get("join"),
        )
        for provider, entry in table.items()
    }
