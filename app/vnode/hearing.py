"""Whether a provider account tells what its machines are, and since when it does not.

Said once, on the account's Node, not on each of its thousands of Pods: a cloud that does not answer changes
no Pod's phase, and an outage costs one write. What an outage began with stays its message until it ends.
"""

from collections.abc import Callable
from dataclasses import dataclass

from app.api.reasons import NodeReason
from app.inventory.rounds import AccountKey, Judged, Place

Said = tuple[str, str, str]
"""Status, reason and message of the condition."""

_KNOWN: Said = ("True", NodeReason.ANSWERS, "the provider lists its machines")


OUT_OF_SCOPE = 4.0  # a place that is not listed any more is no silence; in times of the patience


@dataclass(slots=True)
class _Silence:
    since: float
    why: str
    last_at: float


class Hearing:
    """One account's. ``clock`` is monotonic; ``patience_s`` is how long a silence is no news."""

    def __init__(
        self, key: AccountKey, *, patience_s: float, clock: Callable[[], float], changed: Callable[[], None]
    ) -> None:
        self._key, self._patience_s, self._clock, self._changed = key, patience_s, clock, changed
        self._began = self._newest = clock()
        self._heard: set[Place] = set()
        self._silent: dict[Place, _Silence] = {}
        self._last: Said | None = None

    def take(self, judged: Judged) -> None:
        """A round of the inventory."""
        place, before = judged.place, self._last
        if (place.provider, place.account) != self._key:
            return
        self._newest = judged.began_at
        if judged.unknown is None:
            self._heard.add(place)
            self._silent.pop(place, None)
        else:
            self._heard.discard(place)
            new = _Silence(judged.began_at, judged.unknown, judged.began_at)
            self._silent.setdefault(place, new).last_at = judged.began_at
        for other, silence in list(self._silent.items()):
            if self._newest - silence.last_at > OUT_OF_SCOPE * self._patience_s:
                del self._silent[other]
        if self.said() != before:
            self._changed()

    def said(self) -> Said | None:
        """What the condition should say; None as long as nothing is known either way."""
        now = self._clock()
        long = sorted(
            (silence.since, place.region, silence.why)
            for place, silence in self._silent.items()
            if now - silence.since >= self._patience_s
        )
        if long:
            regions = ", ".join(region for _, region, _ in long if region)
            where = f" in {regions}" if regions else ""
            text = (
                f"what becomes of its machines{where} is not known, and Pods keep their status: {long[0][2]}"
            )
            self._last = ("Unknown", NodeReason.SILENT, text[:1000])
        elif self._heard and not self._silent:
            self._last = _KNOWN
        elif not self._heard and not self._silent and now - self._began >= self._patience_s:
            text = "the account could not be opened yet: what becomes of its machines is not known"
            self._last = ("Unknown", NodeReason.SILENT, text)
        return self._last

    def due_s(self) -> float | None:
        """Seconds until a silence becomes news; None if none is on its way."""
        now, begun = self._clock(), [silence.since for silence in self._silent.values()]
        if not begun and not self._heard:
            begun = [self._began]
        left = [since + self._patience_s - now for since in begun]
        return min((seconds for seconds in left if seconds > 0), default=None)
