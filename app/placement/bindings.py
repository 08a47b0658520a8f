"""CloudPodBindings: made with their claim, and made again when somebody deletes one while its claim lives.

They are for people who may not read claims, so nothing is decided by them; but a Pod's owner who has deleted
one by mistake would look in vain for the rest of the claim's life. The claim is read live before one is made
again: what the garbage collector takes after its claim does not come back. Only placement creates them.
"""

from collections.abc import Iterable
from contextlib import suppress

import structlog
from pydantic import ValidationError

from app.api import keys
from app.api.nodeclaim import NodeClaim
from app.kube import paths
from app.kube.cache import Cache
from app.kube.client import Kube, Obj
from app.kube.errors import Exists, KubeError, Replaced
from app.kube.queue import Again, WorkQueue, run_workers
from app.placement import objects
from app.placement.desk import Term
from app.placement.objects import leaving, owners, uid_of
from app.settings import Settings

log = structlog.get_logger()
WORKERS = 2
_BY_OWNER = "placement: owner uid"


async def bind(kube: Kube, claim: NodeClaim, *, installation: str) -> bool:
    """See that the claim has its CloudPodBinding. True: it was made now."""
    wanted = objects.binding_of(claim, installation=installation)
    namespace, name = wanted["metadata"]["namespace"], wanted["metadata"]["name"]
    path = paths.cloudpodbinding(namespace, name)
    try:
        await kube.create(paths.cloudpodbindings(namespace), wanted, metadata_only=True)
    except Exists:
        found = await kube.find(path)
        if found is not None and claim.metadata.uid in owners(found):
            return False
        if found is not None:
            # Of an earlier claim of that name, which the garbage collector has not come to yet.
            with suppress(Replaced):
                await kube.delete(path, uid=uid_of(found))
        await kube.create(paths.cloudpodbindings(namespace), wanted, metadata_only=True)
    return True


class Bindings:
    """A duty of one term. It is idle unless a binding vanishes; the caches are the caller's to run."""

    def __init__(
        self, *, kube: Kube, claims: Cache, bindings: Cache, settings: Settings, installation: str, term: Term
    ) -> None:
        self._kube = kube.room("placement")
        self._claims, self._bindings = claims, bindings
        self._settings, self._installation, self._term = settings, installation, term
        self._queue: WorkQueue[str] | None = None
        bindings.add_index(_BY_OWNER, _of)
        bindings.on_change(self._changed)

    async def run(self) -> None:
        """Work until cancelled. Begins, when the caches are synced, with the rented claims that have none."""
        settings = self._settings
        for cache in (self._claims, self._bindings):
            await cache.synced()
        self._queue = WorkQueue(base_delay_s=settings.backoff_base_s, max_delay_s=settings.backoff_max_s)
        try:
            for claim in self._claims:
                # One that names no machine yet is being placed: its binding is on the way, or, in Reserve,
                # comes only if a machine does.
                rented = (claim.get("status") or {}).get("instanceID")
                if rented and not self._bindings.by_index(_BY_OWNER, uid_of(claim)):
                    self._queue.add(uid_of(claim))
            await run_workers(
                self._queue, self._reconcile, workers=WORKERS, name="bindings", expected=(KubeError,)
            )
        finally:
            self._queue.close()
            self._queue = None

    def _changed(self, old: Obj | None, new: Obj | None) -> None:
        if self._queue is not None and old is not None and (new is None or uid_of(new) != uid_of(old)):
            for uid in _of(old):
                self._queue.add(uid)

    async def _reconcile(self, uid: str) -> Again | None:
        held = self._claims.by_uid(uid)
        if held is None or leaving(held) or self._bindings.by_index(_BY_OWNER, uid):
            return None
        if not self._term.valid():
            return Again(self._settings.stale_retry_s)
        claim = await self._kube.find(paths.nodeclaim(held["metadata"]["name"]))
        if claim is None or uid_of(claim) != uid or leaving(claim):
            return None
        try:
            readable = NodeClaim.model_validate(claim)
        except ValidationError:  # its own room says so
            return None
        if await bind(self._kube, readable, installation=self._installation):
            log.info("a binding that somebody deleted is made again", claim=held["metadata"]["name"])
        return None


def _of(binding: Obj) -> Iterable[str]:
    """The claims that it belongs to: one, unless a person has edited it."""
    return [
        owner["uid"]
        for owner in binding["metadata"].get("ownerReferences") or ()
        if owner.get("kind") == keys.NODE_CLAIM
    ]
