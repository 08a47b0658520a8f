"""The last steps of a placement: the binding, then one patch that selects the Pod's node and lifts our gate.

Each may have been done before, by us or by a leader that crashed. The patch carries the Pod's UID and
resourceVersion, so of two that place one Pod only one lifts the gate.
"""

from collections.abc import Callable
from datetime import datetime

import structlog

from app.api.nodeclaim import NodeClaim
from app.api.reasons import PlacedReason
from app.kube import paths
from app.kube.client import Kube, Obj
from app.kube.errors import Conflict
from app.kube.queue import Again
from app.placement import metrics, objects
from app.placement.bindings import bind
from app.placement.desk import Term
from app.placement.objects import created, placed_condition, uid_of
from app.placement.telling import Teller
from app.placement.waiting import Key
from app.settings import Settings

log = structlog.get_logger()


class Gate:
    """``lifted`` is told of each Pod whose gate we have lifted."""

    def __init__(
        self,
        *,
        kube: Kube,
        teller: Teller,
        settings: Settings,
        installation: str,
        term: Term,
        now: Callable[[], datetime],
        lifted: Callable[[Key], None],
    ) -> None:
        self._kube, self._teller, self._settings = kube, teller, settings
        self._installation, self._term, self._now, self._tell = installation, term, now, lifted
        self._lifted: dict[Key, str] = {}  # UIDs of Pods whose lifted gate the watch has not shown yet

    def clear(self) -> None:
        self._lifted.clear()

    def forget(self, key: Key) -> None:
        self._lifted.pop(key, None)

    def is_lifted(self, key: Key, pod: Obj) -> bool:
        """Whether we have lifted this Pod's gate, whatever a watch that lags behind still shows."""
        return self._lifted.get(key) == uid_of(pod)

    async def lift(self, key: Key, pod: Obj, stored: Obj, *, bound: bool = False) -> Again | None:
        """Let the Pod go towards the candidate on its claim. ``bound``: the claim has its binding."""
        claim = NodeClaim.model_validate(stored)
        if not bound:
            await self.bind(claim)
        if placed_condition(pod) is not None:
            message = f"placed on {objects.candidate_on(claim)}"
            pod = await self._teller.say(key, pod, placed=True, reason=PlacedReason.PLACED, message=message)
        if not self._term.valid():
            return Again(self._settings.stale_retry_s)
        if await self._patch(key, pod, claim):
            candidate = objects.candidate_on(claim)
            waited_s = (self._now() - created(pod)).total_seconds()
            metrics.placed(candidate, waited_s=waited_s)
            log.info(
                "gate lifted",
                claim=claim.metadata.name,
                claim_uid=claim.metadata.uid,
                candidate=str(candidate),
                waited_s=round(waited_s, 2),
            )
        return None

    async def _patch(self, key: Key, pod: Obj, claim: NodeClaim) -> bool:
        """The last write. False: somebody else has lifted our gate."""
        path = paths.pod(*key)
        try:
            await self._kube.patch(path, objects.ungate_patch(pod, claim), kind="merge", metadata_only=True)
        except Conflict:
            living = await self._kube.get(path)
            if uid_of(living) != uid_of(pod) or objects.is_over(living) or not objects.is_gated(living):
                return False
            patch = objects.ungate_patch(living, claim)
            await self._kube.patch(path, patch, kind="merge", metadata_only=True)
        self._lifted[key] = uid_of(pod)
        self._tell(key)
        return True

    async def bind(self, claim: NodeClaim) -> None:
        """See that the claim has its CloudPodBinding."""
        await bind(self._kube, claim, installation=self._installation)
