"""Placed Pods that the scheduler does not bind: after a while they are given up, so that their claims go."""

from collections.abc import Callable

import structlog

from app.api.reasons import PodEvent
from app.kube import paths
from app.kube.client import Kube, Obj
from app.kube.queue import Again
from app.placement import objects
from app.placement.book import ClaimBook
from app.placement.objects import extras, leaving, uid_of, why_unbound
from app.placement.telling import Events
from app.placement.waiting import Key
from app.settings import Settings
from app.workload.owners import controller_of

log = structlog.get_logger()


class Unbound:
    """Remembers since when each has been waiting for its node. ``clock`` is monotonic."""

    def __init__(
        self, *, kube: Kube, book: ClaimBook, settings: Settings, events: Events, clock: Callable[[], float]
    ) -> None:
        self._kube, self._book, self._settings, self._events = kube, book, settings, events
        self._clock = clock
        self._since: dict[Key, tuple[str, float]] = {}  # Pod UID, and since when

    def clear(self) -> None:
        self._since.clear()

    def forget(self, key: Key) -> None:
        self._since.pop(key, None)

    async def see(self, key: Key, pod: Obj) -> Again | None:
        """Give up a placement that the scheduler does not take: its claim goes, an owned Pod makes way."""
        known = self._since.get(key)
        since = known[1] if known and known[0] == uid_of(pod) else self._clock()
        self._since[key] = (uid_of(pod), since)
        limit_s = self._settings.unbound_after_s
        own = [claim for claim in await self._book.own(key, pod) if not leaving(claim)]
        for extra in extras(own, pod):
            await self._book.delete(extra, why="a second claim of one Pod")
        left_s = since + limit_s - self._clock()
        if left_s > 0:
            return Again(left_s)
        living = await self._kube.find(paths.pod(*key)) if own else None
        if living is None or uid_of(living) != uid_of(pod) or not objects.is_waiting_for_node(living):
            return None
        owned = controller_of(living) is not None
        why = f"not bound within {limit_s:g} s ({why_unbound(living)}); its claim is released"
        if owned:
            # First the Pod, on condition that it is still unbound: a claim deleted under a Pod that is just
            # being bound would cost its owner that Pod.
            version = living["metadata"]["resourceVersion"]
            await self._kube.delete(paths.pod(*key), uid=uid_of(pod), resource_version=version)
            why += ", and the Pod is deleted for its owner to make a new one"
        for claim in own:
            await self._book.delete(claim, why="its Pod was not bound in time")
        log.warning("placed pod not bound", owned=owned, after_s=limit_s)
        self._events.note(living, type="Warning", reason=PodEvent.NOT_BOUND, message=why)
        return None
