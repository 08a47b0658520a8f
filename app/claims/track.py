"""What this process remembers of a claim between two looks. Nothing is the worse for losing it."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest

from app.claims.projection import Finding, Sight
from app.kube.cache import Cache
from app.kube.client import Obj
from app.provisioning.model import Refused

CLAIM_DELETED = "claim deleted"


@dataclass(frozen=True, slots=True)
class Shown:
    """A claim and its bindings as they were, and what was to be shown on them."""

    claim: Obj
    bindings: tuple[Obj, ...]
    sight: Sight

    def covers(self, claim: Obj, bindings: Iterable[Obj], sight: Sight) -> bool:
        """Whether these are the very same objects, with the same to show."""
        same = zip_longest(self.bindings, bindings)
        return self.claim is claim and all(a is b for a, b in same) and self.sight == sight


@dataclass(slots=True, kw_only=True)
class Track:
    """One claim, by UID. Moments are monotonic seconds; None: not yet.

    ``pod_gone``: its Pod's deletion was seen to its end. ``reason``: what the rental's row will say of why it
    was released. ``finished``: its Pod is terminal, so it is released while the claim stays. ``let_go``: its
    finalizer is off. ``refusal``, ``lost`` and ``released``: told already. ``claim`` and ``binding``: as we
    have written them last, until the watch shows something newer. ``shown``: what the last look compared with
    both, and found written, or wrote.
    """

    first_seen: float
    pod_seen: bool = False
    pod_gone: bool = False
    rented_since: float | None = None
    leaving_since: float | None = None
    over_since: float | None = None
    reason: str = CLAIM_DELETED
    finished: bool = False
    finding: Finding | None = None
    refusal: Refused | None = None
    lost: bool = False
    released: bool = False
    let_go: bool = False
    claim: Obj | None = None
    binding: Obj | None = None
    shown: Shown | None = None


class Tracks:
    """All of them, beside the claims' cache."""

    def __init__(self, claims: Cache) -> None:
        self._claims = claims
        self._tracks: dict[str, Track] = {}

    def of(self, uid: str, *, now: float) -> Track:
        track = self._tracks.get(uid)
        if track is None:
            track = self._tracks[uid] = Track(first_seen=now)
        return track

    def drop(self, uid: str) -> Track | None:
        return self._tracks.pop(uid, None)

    def newest(self, uid: str) -> Obj | None:
        """The claim, our own last write included; None once the watch has shown that it is gone."""
        cached = self._claims.by_uid(uid)
        track = self._tracks.get(uid)
        if cached is None or track is None:
            return cached
        found = newer(cached, track.claim)
        if found is cached:
            track.claim = None
        return found


def newer(cached: Obj, written: Obj | None) -> Obj:
    """The later version of one object. The watch lags behind our own writes, and must not undo them here."""
    if written is None or written["metadata"]["uid"] != cached["metadata"]["uid"]:
        return cached
    try:
        behind = version(cached) < version(written)
    except ValueError:  # a server whose versions are no numbers: then the watch is believed
        return cached
    return written if behind else cached


def version(obj: Obj) -> int:
    return int(obj["metadata"]["resourceVersion"])


def leaving(obj: Obj) -> bool:
    """Whether the object's deletion has begun."""
    return "deletionTimestamp" in obj["metadata"]
