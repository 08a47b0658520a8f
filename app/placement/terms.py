"""What its pool, as it is now, says of a claim in Reserve: how long to wait, and whether it may stay."""

import random
from collections.abc import Callable
from datetime import datetime

from pydantic import ValidationError

from app.api.nodeclaim import NodeClaim
from app.api.nodepool import NodePool
from app.kube.cache import Cache
from app.kube.client import Obj
from app.kube.orders import Unusable, pool_of
from app.placement import objects
from app.placement.objects import leaving
from app.placement.rank import History, Usage
from app.placement.ranking import Ranking
from app.placement.request import InvalidRequest, request_of
from app.placement.standing import Objection, objection_to
from app.provisioning.model import ClaimSpec
from app.provisioning.service import Provisioning
from app.settings import Settings
from providers.base import ClaimUid


class Terms:
    """Reads pools from the watch, but for `objection`, which is told of one."""

    def __init__(
        self,
        *,
        pools: Cache,
        namespaces: Cache,
        ranking: Ranking,
        provisioning: Provisioning,
        settings: Settings,
        now: Callable[[], datetime],
        rng: random.Random,
    ) -> None:
        self._pools, self._namespaces, self._ranking = pools, namespaces, ranking
        self._provisioning, self._settings = provisioning, settings
        self._now, self._rng = now, rng

    def pool(self, spec: ClaimSpec) -> NodePool:
        """The claim's pool for its durations; with the defaults where it cannot be read (any more)."""
        try:
            return pool_of(self._pools.get("", spec.pool), spec.pool)
        except Unusable:
            return NodePool.model_validate(
                {"metadata": {"name": spec.pool}, "spec": {"providers": [{"name": spec.provider}]}}
            )

    def unknown_s(self, spec: ClaimSpec) -> float:
        """How long to look for what became of an order without an answer."""
        asked_s = self.pool(spec).spec.failover.unknown_timeout.total_seconds()
        return max(asked_s, self._settings.unknown_timeout_floor_s)

    def reserve_s(self, spec: ClaimSpec) -> float:
        """How long a provider may keep an order in its queue."""
        return self.pool(spec).spec.failover.reserve_timeout.total_seconds()

    def lost_s(self, spec: ClaimSpec) -> float:
        """How long a Pod does not try again what it has lost."""
        return self.pool(spec).spec.failover.blocklist_ttl.total_seconds() + self.jitter_s()

    def jitter_s(self) -> float:
        return self._rng.uniform(0.0, self._settings.block_jitter_s)

    def objection(self, pod: Obj, claim: NodeClaim, stored: Obj | None) -> Objection | None:
        """What the pool as ``stored`` has against the claim, and against the machine that it may have."""
        name = claim.spec.pool_ref or ""
        if stored is None or leaving(stored):
            state = "does not exist any more" if stored is None else "is being deleted"
            return Objection(text=f"NodePool {name} {state}", lasting=True)
        namespace = self._namespaces.get("", pod["metadata"]["namespace"])
        try:
            pool = NodePool.model_validate(stored)
            labels = objects.labels_of(namespace) if namespace else None
            request = request_of(pod, namespace_labels=labels)
        except (ValidationError, InvalidRequest):
            return None  # what was chosen while both could be read stays
        places = self._ranking.places(
            request, pool, blocks=(), usage=Usage(), history=History(), now=self._now()
        )
        view = self._provisioning.view(ClaimUid(claim.metadata.uid))
        return objection_to(
            claim, pool=pool, places=places, usd_per_hour=view.usd_per_hour, rented=view.ref is not None
        )
