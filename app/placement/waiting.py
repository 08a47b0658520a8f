"""The gated Pods that wait, for what, and what wakes them. In memory: a new leader looks at all anyway."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from app.api.reasons import DeferralReason, SkipReason

Key = tuple[str, str]
"""A Pod's namespace and name."""

_FNV_OFFSET, _FNV_PRIME, _64_BITS = 0xCBF29CE484222325, 0x100000001B3, 2**64 - 1
_ROOM = frozenset({SkipReason.LIMIT, SkipReason.BUDGET})  # there is more of it when a machine ends
_PLACE_REASONS = frozenset({DeferralReason.ALL_BLOCKED, DeferralReason.NO_CANDIDATE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Why one Pod waits. ``blocks``: row id to end, of every block that its last look met.

    ``met``: the reasons for which places of ``pool`` were passed over.
    """

    reason: DeferralReason
    blocks: Mapping[int, datetime] = field(default_factory=dict)
    pool: str | None = None
    met: frozenset[SkipReason] = frozenset()


@dataclass(frozen=True, slots=True)
class Mark:
    """How much had changed when a look began."""

    places: int = 0
    limits: int = 0
    namespaces: int = 0


class Waiting:
    """Who waits for what.

    What changes while a Pod is looked at wakes nobody, since nobody waits for it yet: so each look takes the
    `mark` before it reads anything, and `put` says whether it must look again.
    """

    def __init__(self) -> None:
        self._waits: dict[Key, Wait] = {}
        self.mark = Mark()

    def put(self, key: Key, wait: Wait, *, since: Mark) -> bool:
        """Let the Pod wait. True: what it waits for has changed since the look began."""
        self._waits[key] = wait
        return (
            (wait.reason in _PLACE_REASONS and since.places != self.mark.places)
            or (bool(_ROOM & wait.met) and since.limits != self.mark.limits)
            or (SkipReason.NAMESPACE_NOT_ALLOWED in wait.met and since.namespaces != self.mark.namespaces)
        )

    def drop(self, key: Key) -> None:
        self._waits.pop(key, None)

    def get(self, key: Key) -> Wait | None:
        return self._waits.get(key)

    def for_a_place(self) -> list[Key]:
        """Pods that another node, offering or account, which has just changed, could help."""
        self.mark = replace(self.mark, places=self.mark.places + 1)
        return [key for key, wait in self._waits.items() if wait.reason in _PLACE_REASONS]

    def on_limit(self, pool: str | None) -> list[Key]:
        """Pods that a smaller usage of this pool could help."""
        self.mark = replace(self.mark, limits=self.mark.limits + 1)
        return [key for key, wait in self._waits.items() if wait.pool == pool and _ROOM & wait.met]

    def on_namespace(self, name: str) -> list[Key]:
        """Pods of this namespace that other labels on it could help."""
        self.mark = replace(self.mark, namespaces=self.mark.namespaces + 1)
        return [
            key
            for key, wait in self._waits.items()
            if key[0] == name and SkipReason.NAMESPACE_NOT_ALLOWED in wait.met
        ]

    @property
    def on_blocks(self) -> bool:
        """Whether anybody waits for a block to end."""
        return any(wait.blocks for wait in self._waits.values())

    def freed(self, live: Iterable[int], *, now: datetime) -> list[Key]:
        """Pods that met a block which is gone before its time: a person cleared it.

        Those whose block has lapsed are not among them: each comes back at its own moment after that.
        """
        held = set(live)
        return [
            key
            for key, wait in self._waits.items()
            if any(row not in held and until > now for row, until in wait.blocks.items())
        ]


def offset_s(uid: str, *, spread_s: float) -> float:
    """A Pod's own part of ``spread_s``, always the same: Pods that wait for one block come back apart."""
    digest = _FNV_OFFSET
    for byte in uid.encode():
        digest = ((digest ^ byte) * _FNV_PRIME) & _64_BITS
    spread_ns = int(spread_s * 1e9)
    return digest % spread_ns / 1e9 if spread_ns else 0.0
