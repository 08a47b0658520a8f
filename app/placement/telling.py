"""What a gated Pod is told: one condition of ours and, at a new reason, an Event. Only news is written."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Protocol

from app.api import keys
from app.api.reasons import PLACED_CONDITION, PlacedReason, PodEvent
from app.kube import patches, paths
from app.kube.client import Kube, Obj
from app.placement.objects import is_gated, leaving, placed_condition, uid_of
from app.placement.waiting import Key

MESSAGE_CHARS = 1024  # of a condition
_ORDINARY = frozenset({PlacedReason.STALE_CLAIM, PlacedReason.OTHER_GATES})  # reasons that pass by themselves
_NO_EVENT = frozenset({PlacedReason.RENTING})  # it changes with each candidate


class Events(Protocol):
    """Where Events go; `app.kube.events.Recorder` is one."""

    def note(self, about: Obj, *, type: Literal["Normal", "Warning"], reason: str, message: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """What our condition on a Pod says."""

    pod_uid: str
    reason: str
    message: str


class Teller:
    """Remembers what it has said, so that a copy of the Pod that lags behind causes no second write."""

    def __init__(self, kube: Kube, *, events: Events, now: Callable[[], datetime]) -> None:
        self._kube, self._events, self._now = kube, events, now
        self._said: dict[Key, _Said] = {}

    def forget(self, key: Key) -> None:
        self._said.pop(key, None)

    def clear(self) -> None:
        self._said.clear()

    async def say(self, key: Key, pod: Obj, *, placed: bool, reason: PlacedReason, message: str) -> Obj:
        """Make our condition say this. Returns the Pod as it is then.

        Raises:
            Replaced: it is another Pod now. KubeError: nothing was said.
        """
        said = _Said(pod_uid=uid_of(pod), reason=reason, message=message[:MESSAGE_CHARS])
        before, held = self._said.get(key), placed_condition(pod)
        if before == said:
            return pod
        if before is None and held and (held["reason"], held.get("message")) == (reason, said.message):
            self._said[key] = said  # an earlier leader has said it
            return pod
        conditions = patches.condition(
            [held] if held else [],
            type=PLACED_CONDITION,
            status="True" if placed else "False",
            reason=reason,
            message=said.message,
            now=self._now(),
        )
        patch = patches.pod_status(uid_of(pod), {"conditions": conditions})
        written = await self._kube.patch(paths.pod_status(*key), patch, kind="strategic")
        self._said[key] = said
        if not placed and reason not in _NO_EVENT and (before is None or before.reason != reason):
            kind: Literal["Normal", "Warning"] = "Normal" if reason in _ORDINARY else "Warning"
            self._events.note(pod, type=kind, reason=reason, message=said.message)
        return written

    async def opted_out(self, key: Key) -> None:
        """A Pod left the watch: say so if its opt-in label was taken off while it waited, for it waits on."""
        said = self._said.get(key)
        if said is None:
            return
        pod = await self._kube.find(paths.pod(*key))
        if pod is not None and uid_of(pod) == said.pod_uid and is_gated(pod) and not leaving(pod):
            why = f"the label {keys.ENABLED_LABEL}={keys.ENABLED} was taken off: the Pod stays gated"
            self._events.note(pod, type="Warning", reason=PodEvent.OPTED_OUT, message=why)
