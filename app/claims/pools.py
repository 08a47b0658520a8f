"""NodePools: how many machines serve a Pod, whether the policy can be used, and the finalizer of one in use.

The finalizer comes on when a claim first names the pool, and goes only with the pool, when every claim that
names it is over: a claim's egress and price come from a policy that people can still read, and what may still
be rented or sent back asks it for durations. A claim whose rental has ended asks nothing of it any more, so
those of failed Pods, which stay as on a node, hold no pool. It costs one write a pool and not one a Pod, and
the status is written at most once a second.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

import structlog

from app.api.keys import NODE_POOL_LABEL, POOL_FINALIZER
from app.api.not_built import refusals
from app.api.reasons import (
    POOL_VALID_MESSAGE,
    ClaimPhase,
    PoolCondition,
    PoolReason,
    deleting_message,
    unknown_providers_message,
)
from app.claims.track import leaving, newer
from app.kube import paths
from app.kube.cache import Cache
from app.kube.client import Kube, Obj
from app.kube.errors import KubeError, Replaced
from app.kube.events import Recorder
from app.kube.patches import condition, guards, status_ops, without_finalizer
from app.kube.queue import Again, WorkQueue, run_workers
from app.settings import Settings

log = structlog.get_logger()
WORKERS = 2
EVERY_S = 1.0  # at most one write of one pool's status in this time

_BY_POOL = "claims: pool"


class Pools:
    """The controller. ``provider_names`` gives the configured providers."""

    def __init__(
        self,
        *,
        kube: Kube,
        pools: Cache,
        claims: Cache,
        provider_names: Callable[[], frozenset[str]],
        settings: Settings,
        events: Recorder,
        clock: Callable[[], float],
        now: Callable[[], datetime],
    ) -> None:
        self._kube, self._pools, self._claims = kube, pools, claims
        self._provider_names, self._events, self._clock, self._now = provider_names, events, clock, now
        self._running = False
        self._queue: WorkQueue[str] = WorkQueue(
            base_delay_s=settings.backoff_base_s, max_delay_s=settings.backoff_max_s
        )
        self._written: dict[str, Obj] = {}  # as we wrote them last, until the watch shows something newer
        self._not_before: dict[str, float] = {}
        claims.add_index(_BY_POOL, lambda claim: [pool] if (pool := _pool_of(claim)) else [])
        claims.on_change(self._claim_changed)
        pools.on_change(self._pool_changed)

    async def run(self) -> None:
        """Work until cancelled, beginning with a look at every pool."""
        await self._pools.synced()
        await self._claims.synced()
        self._running = True
        try:
            for pool in self._pools:
                self._queue.add(pool["metadata"]["name"])
            await run_workers(
                self._queue, self._reconcile, workers=WORKERS, name="pools", expected=(KubeError,)
            )
        finally:
            self._running = False

    def _pool_changed(self, old: Obj | None, new: Obj | None) -> None:
        if new is None and old is not None:
            self._written.pop(old["metadata"]["name"], None)
            self._not_before.pop(old["metadata"]["name"], None)
        elif new is not None and self._running:
            self._queue.add(new["metadata"]["name"])

    def _claim_changed(self, old: Obj | None, new: Obj | None) -> None:
        if self._running and _counts(old) != _counts(new):
            for claim in (old, new):
                if claim is not None and (pool := _pool_of(claim)):
                    self._queue.add(pool)

    async def _reconcile(self, name: str) -> Again | None:
        cached = self._pools.get("", name)
        if cached is None:
            return None
        if (left_s := self._not_before.get(name, 0.0) - self._clock()) > 0:
            return Again(left_s)
        pool = newer(cached, self._written.get(name))
        try:
            with structlog.contextvars.bound_contextvars(pool=name):
                return await self._look(pool, name)
        except Replaced:
            self._written.pop(name, None)
            return None  # the watch tells what is there instead

    async def _look(self, pool: Obj, name: str) -> Again | None:
        claims = self._claims.by_index(_BY_POOL, name)
        held = holding(claims)
        if leaving(pool):
            if not held and POOL_FINALIZER in (pool["metadata"].get("finalizers") or ()):
                if await self._is_held(name):
                    return Again(EVERY_S)
                await self._unpin(pool, name)
                return None
        elif held and (ops := pin_ops(pool)) is not None:
            pool = self._written[name] = await self._kube.patch(paths.nodepool(name), ops, kind="json")
        wanted = pool_status(pool, claims, provider_names=self._provider_names(), now=self._now())
        if (ops := status_ops(pool, wanted)) is not None:
            self._not_before[name] = self._clock() + EVERY_S
            path = paths.nodepool_status(name)
            self._written[name] = await self._kube.patch(path, ops, kind="json")
            self._tell(pool, wanted)
        return None

    async def _is_held(self, name: str) -> bool:
        """Ask the server: a claim may be younger than our copy, and the pool must outlive it."""
        async for page in self._kube.list_pages(
            paths.nodeclaims(), labelSelector=f"{NODE_POOL_LABEL}={name}"
        ):
            if holding(page["items"]):
                return True
        return False

    def _tell(self, pool: Obj, wanted: dict[str, Any]) -> None:
        """An Event for a deletion that waits, when it begins to: the condition follows how far it is."""
        before, after = _ready(pool.get("status") or {}), _ready(wanted)
        if after["reason"] == PoolReason.DELETING != before.get("reason"):
            self._events.note(pool, type="Warning", reason=PoolReason.DELETING, message=after["message"])

    async def _unpin(self, pool: Obj, name: str) -> None:
        ops = without_finalizer(pool, POOL_FINALIZER)
        await self._kube.patch(paths.nodepool(name), ops, kind="json", metadata_only=True)
        log.info("pool let go")


def pool_status(
    pool: Obj, claims: list[Obj], *, provider_names: frozenset[str], now: datetime
) -> dict[str, Any]:
    """The status of a pool that these claims name."""
    spec: Mapping[str, Any] = pool.get("spec") or {}
    listed = [str(entry["name"]) for entry in spec.get("providers") or ()]
    placed = Counter(claim["spec"]["provider"] for claim in claims if _is_bound(claim))
    status, reason, message = "True", PoolReason.VALID, POOL_VALID_MESSAGE
    if unknown := set(listed) - provider_names:
        status, reason, message = "False", PoolReason.UNKNOWN_PROVIDER, unknown_providers_message(unknown)
    if refused := refusals(
        pool
    ):  # nothing is placed from such a pool, while unknown providers are passed over
        status, reason, message = "False", PoolReason.NOT_SUPPORTED, "; ".join(refused)
    if leaving(pool):
        status, reason, message = "False", PoolReason.DELETING, deleting_message(holding(claims))
    return {
        "placed": dict(sorted(placed.items())) or None,
        "providers": ",".join(dict.fromkeys(listed)) or None,
        "conditions": condition(
            (pool.get("status") or {}).get("conditions"),
            type=PoolCondition.READY,
            status=status,
            reason=reason,
            message=message,
            now=now,
            observed_generation=pool["metadata"].get("generation"),
        ),
    }


def holding(claims: Iterable[Obj]) -> list[str]:
    """The names of the claims that still need their pool, sorted: all whose rental is not over."""
    return sorted(
        claim["metadata"]["name"]
        for claim in claims
        if (claim.get("status") or {}).get("phase") != ClaimPhase.TERMINATED
    )


def pin_ops(pool: Obj) -> list[Obj] | None:
    """A JSON patch that puts our finalizer on this very pool; None if it is there."""
    finalizers = pool["metadata"].get("finalizers")
    if POOL_FINALIZER in (finalizers or ()):
        return None
    path = "/metadata/finalizers"
    add = {"op": "add", "path": path, "value": [*(finalizers or ()), POOL_FINALIZER]}
    return [*guards(pool), {"op": "test", "path": path, "value": finalizers or None}, add]


def _pool_of(claim: Obj) -> str:
    return claim["spec"].get("poolRef") or ""


def _is_bound(claim: Obj) -> bool:
    return (claim.get("status") or {}).get("phase") == ClaimPhase.BOUND


def _counts(claim: Obj | None) -> tuple[Any, ...] | None:
    """What of a claim shows on its pool."""
    if claim is None:
        return None
    return _pool_of(claim), claim["spec"]["provider"], _is_bound(claim), bool(holding([claim]))


def _ready(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """The condition Ready; empty if it is not there yet."""
    conditions = status.get("conditions") or ()
    return next((each for each in conditions if each["type"] == PoolCondition.READY), {})
