"""Lifts the gate of each opted-in Pod, towards one candidate, after the claim for it exists.

The order is: decision row, NodeClaim, CloudPodBinding, then one patch of the Pod. A crash between any two is
safe: whoever comes next finds the claim by the Pod's UID and goes on from it, never from a second ranking.
The patch carries the Pod's UID and resourceVersion, so of two that place one Pod only one lifts the gate.

Nothing is placed without the store, without leadership, or while a person must confirm something. The caches
may be trimmed, but not of a Pod's metadata, node constraints, gates, containers, restart policy, deadline,
owner references and conditions.

What a claim takes from its pool's limits is written with the decision, before the claim, and given back when
the claim is gone; a decision that led to no claim is given back before the Pod is looked at again.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime

import structlog
from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncEngine

from app.api import keys
from app.api.nodeclaim import NodeClaim
from app.api.nodepool import NodePool
from app.api.not_built import refusals
from app.api.reasons import DeferralReason, SkipReason
from app.kube import paths
from app.kube.cache import Cache, key_of
from app.kube.client import Kube, Obj
from app.kube.errors import Conflict, Exists, KubeError, Replaced
from app.kube.patches import timestamp
from app.kube.queue import Again, WorkQueue, run_workers
from app.placement import explain, metrics, objects
from app.placement.constraints import node_view
from app.placement.desk import Desk, MayNotPlace, Seen, Term
from app.placement.market import LISTED, Market
from app.placement.objects import (
    age,
    created,
    extras,
    labels_of,
    leaving,
    owners,
    phase_of,
    placed_condition,
    pod_of,
    same_but_status,
    uid_of,
    why_unbound,
)
from app.placement.rank import Place, Skip, chosen
from app.placement.ranking import Ranking
from app.placement.request import InvalidRequest, PlacementRequest, pool_name, request_of
from app.placement.reserve import Hands, Reserve
from app.placement.telling import Events, Teller
from app.placement.waiting import Key, Mark, Wait, Waiting, offset_s
from app.provisioning.service import Provisioning
from app.settings import Settings
from app.store.backoffs import Backoff
from app.store.decisions import Decision
from app.store.engine import StoreUnavailable
from app.store.reservations import Reservation
from app.workload.owners import controller_of
from catalog.offerings import Offerings

log = structlog.get_logger()

WORKERS = 8
_BY_UID, _BY_POD, _BY_POOL = "placement-pod-uid", "placement-pod", "placement-pool"
_CONDITION_REASONS = {
    DeferralReason.NO_POOL: "NoPool",
    DeferralReason.INVALID_REQUEST: "InvalidRequest",
    DeferralReason.ALL_BLOCKED: "AllBlocked",
    DeferralReason.NO_CANDIDATE: "NoCandidate",
    DeferralReason.STALE_CLAIM: "StaleClaim",
    DeferralReason.OWNER_BACKOFF: "OwnerBackOff",
}


class Placement:
    """The controller. Make one for the life of its caches; `run` it during each term."""

    def __init__(
        self,
        *,
        kube: Kube,
        pods: Cache,
        pools: Cache,
        claims: Cache,
        nodes: Cache,
        namespaces: Cache,
        engine: AsyncEngine,
        offerings: Offerings,
        provisioning: Provisioning,
        settings: Settings,
        installation: str,
        term: Term,
        events: Events,
        market: Market = LISTED,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``pods`` holds the opted-in Pods, ``nodes`` at least our virtual nodes. ``clock`` is monotonic."""
        self._kube = kube.room("placement")
        self._pods, self._pools, self._claims, self._nodes = pods, pools, claims, nodes
        self._namespaces = namespaces
        self._settings, self._installation = settings, installation
        self._term, self._events = term, events
        self._now, self._clock = now, clock
        self._teller = Teller(self._kube, events=events, now=now)
        self._desk = Desk(engine, term=term)
        self._queue: WorkQueue[Key] | None = None
        self._waiting = Waiting()
        self._looked: dict[Key, Mark] = {}  # the Pods under a look, and what had changed when it began
        self._made: dict[Key, Obj] = {}  # claims that the watch has not shown yet
        self._promised: dict[Key, Reservation] = {}  # for claims that the watch has not shown yet
        self._lifted: dict[Key, str] = {}  # UIDs of Pods whose lifted gate the watch has not shown yet
        self._held: dict[Key, str] = {}  # UIDs of Pods that met a time when nothing may be placed
        self._unbound: dict[Key, tuple[str, float]] = {}  # Pod UID, and since when
        self._ranking = Ranking(offerings=offerings, nodes=nodes, market=market)
        self._reserve = Reserve(
            kube=self._kube,
            pods=pods,
            pools=pools,
            namespaces=namespaces,
            ranking=self._ranking,
            provisioning=provisioning,
            settings=settings,
            teller=self._teller,
            events=events,
            hands=Hands(
                valid=term.valid,
                claims=self._own_claims,
                permit=self._permit,
                give_back=lambda claim: self._desk.claim_ended(objects.reservation_of(claim).key),
                bind=self._bind,
                lift=self._lift_for,
                hold=self._hold,
                choose=lambda key: self._wake([key]),
            ),
            now=now,
            clock=clock,
        )
        claims.add_index(_BY_UID, lambda claim: [claim["spec"]["podRef"]["uid"]])
        claims.add_index(_BY_POD, lambda claim: ["/".join(pod_of(claim))])
        pods.add_index(_BY_POOL, lambda pod: [pool_name(pod) or ""] if objects.is_gated(pod) else [])
        pods.on_change(self._pod_changed)
        pools.on_change(self._pool_changed)
        claims.on_change(self._claim_changed)
        nodes.on_change(self._node_changed)
        namespaces.on_change(self._namespace_changed)
        offerings.on_change(lambda _: self._wake(self._waiting.for_a_place()))

    async def run(self) -> None:
        """Place Pods until cancelled. Begins when all caches are synced, with a look at every Pod."""
        settings = self._settings
        for cache in (self._pods, self._pools, self._claims, self._nodes, self._namespaces):
            await cache.synced()
        self._queue = WorkQueue(base_delay_s=settings.backoff_base_s, max_delay_s=settings.backoff_max_s)
        self._waiting = Waiting()
        self._teller.clear()
        for memory in (self._made, self._promised, self._lifted, self._held, self._unbound):
            memory.clear()
        self._desk.claims_are(objects.reservation_of(claim) for claim in self._claims)
        try:
            for pod in self._pods:
                self._pod_changed(None, pod)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._desk.run(), name="placement-desk")
                tasks.create_task(self._watch_blocks(), name="placement-blocks")
                tasks.create_task(self._reserve.run(), name="placement-reserve")
                work = run_workers(
                    self._queue, self._reconcile, workers=WORKERS, name="placement", expected=(KubeError,)
                )
                tasks.create_task(work, name="placement-workers")
        finally:
            self._queue.close()
            self._queue = None

    # --- what wakes a Pod -----------------------------------------------------------------------

    def _wake(self, pod_keys: list[Key]) -> None:
        if self._queue is not None:
            for key in pod_keys:
                self._queue.add(key)

    def _pod_changed(self, old: Obj | None, new: Obj | None) -> None:
        pod = new or old
        if pod is None or (old and new and same_but_status(old, new)):
            return
        was_ours = old is not None and not objects.is_over(old)
        if was_ours or (new is not None and not objects.is_over(new)):
            self._wake([key_of(pod)])

    def _pool_changed(self, old: Obj | None, new: Obj | None) -> None:
        pool = new or old
        if pool is None or (old and new and same_but_status(old, new)):
            return
        self._wake([key_of(pod) for pod in self._pods.by_index(_BY_POOL, pool["metadata"]["name"])])

    def _claim_changed(self, old: Obj | None, new: Obj | None) -> None:
        claim = new or old
        if claim is None:
            return
        key = pod_of(claim)
        self._keep_books(key, old, new)
        if (made := self._made.get(key)) and uid_of(made) == uid_of(claim):
            del self._made[key]
        began_leaving = new is not None and leaving(new) and not (old and leaving(old))
        if old is None or new is None or began_leaving:
            self._wake([key])

    def _keep_books(self, key: Key, old: Obj | None, new: Obj | None) -> None:
        """What claims take from limits follows the claims that there are; who waits for a limit is woken."""
        if self._queue is None:
            return
        same = old is not None and new is not None and uid_of(old) == uid_of(new)
        if old is not None and not same:
            self._desk.claim_ended(objects.reservation_of(old).key)
        if new is not None and not same:
            found = objects.reservation_of(new)
            promised = self._promised.get(key)
            if promised is not None and promised.key == found.key:
                del self._promised[key]
            if promised is None or not objects.is_promised(found, promised):
                self._desk.claim_found(found)
        if old is not None and not (same and new is not None and phase_of(old) == phase_of(new)):
            self._wake(self._waiting.on_limit(old["spec"].get("poolRef")))

    def _namespace_changed(self, old: Obj | None, new: Obj | None) -> None:
        namespace = new or old
        if namespace is not None and (old is None or new is None or labels_of(old) != labels_of(new)):
            self._wake(self._waiting.on_namespace(namespace["metadata"]["name"]))

    def _node_changed(self, old: Obj | None, new: Obj | None) -> None:
        before, after = (node_view(node) if node else None for node in (old, new))
        if before != after:
            self._wake(self._waiting.for_a_place())

    async def _watch_blocks(self) -> None:
        """Wake Pods whose block a person has cleared. Asks only while somebody waits for one."""
        while True:
            await asyncio.sleep(self._settings.list_busy_s)
            if not self._waiting.on_blocks:
                continue
            try:
                seen = await self._desk.live_blocks()
            except StoreUnavailable as error:
                log.debug("blocks not read", error=str(error))
                continue
            self._wake(self._waiting.freed((block.id for block in seen.blocks), now=seen.now))

    # --- one Pod --------------------------------------------------------------------------------

    async def _reconcile(self, key: Key) -> Again | None:
        self._looked[key] = self._waiting.mark
        try:
            return await self._look(key)
        finally:
            self._looked.pop(key, None)

    async def _look(self, key: Key) -> Again | None:
        pod = self._pods.get(*key)
        if pod is None or objects.is_over(pod):
            if pod is None:
                await self._teller.opted_out(key)
            if pod is None or objects.is_gated(pod):
                self._take_back(key)
            self._forget(key)
            return None if pod is None else await self._give_back(key, pod)
        if not self._term.valid():
            return Again(self._settings.stale_retry_s)  # until we may again, or are cancelled
        with structlog.contextvars.bound_contextvars(pod=f"{key[0]}/{key[1]}", pod_uid=uid_of(pod)):
            try:
                return await self._step(key, pod)
            except Replaced as error:
                log.info("pod is not the same any more", error=str(error))
                return None  # the watch shows what is there now

    async def _step(self, key: Key, pod: Obj) -> Again | None:
        if objects.is_gated(pod):
            self._unbound.pop(key, None)
            return None if self._lifted.get(key) == uid_of(pod) else await self._place(key, pod)
        unbound = self._unbound.get(key)
        self._forget(key)
        if not objects.is_waiting_for_node(pod):
            return await self._give_back(key, pod)
        since = unbound[1] if unbound and unbound[0] == uid_of(pod) else self._clock()
        self._unbound[key] = (uid_of(pod), since)
        return await self._see_it_bound(key, pod, since=since)

    def _forget(self, key: Key) -> None:
        self._waiting.drop(key)
        self._teller.forget(key)
        self._reserve.forget(key)
        for memory in (self._made, self._lifted, self._held, self._unbound):
            memory.pop(key, None)

    async def _place(self, key: Key, pod: Obj) -> Again | None:
        own = await self._own_claims(key, pod)
        staying = [claim for claim in own if not leaving(claim) and not self._reserve.gave_up(key, claim)]
        if staying:
            for extra in staying[1:]:
                await self._delete_claim(extra, why="a second claim of one Pod")
            return await self._go_on(key, pod, staying[0])
        name = pool_name(pod)
        stored = self._pools.get("", name) if name else None
        reserved = self._reserve.wants(pod, stored)
        if own and reserved and not self._reserve.may_choose(key, own):
            self._reserve.take(key, pod)
            return None
        if own and not reserved:
            former = own[0]["metadata"]["name"]
            return await self._wait_for_claim(key, pod, f"the Pod's former claim {former} is being released")
        if older := self._others_claims(key, pod):
            return await self._wait_for_older(key, pod, older[0])
        if reserved and (others := objects.other_gates(pod)):
            await self._reserve.wait_for_gates(key, pod, others)
            return None
        if name is None:
            why = f"the Pod names no NodePool; set the label {keys.NODE_POOL_LABEL}"
            return await self._defer(key, pod, DeferralReason.NO_POOL, why)
        if stored is None:
            return await self._defer(key, pod, DeferralReason.NO_POOL, f"NodePool {name} does not exist")
        if leaving(stored):
            return await self._defer(key, pod, DeferralReason.NO_POOL, f"NodePool {name} is being deleted")
        namespace = self._namespaces.get("", key[0])
        try:
            request = request_of(pod, namespace_labels=labels_of(namespace) if namespace else None)
        except InvalidRequest as error:
            return await self._defer(key, pod, DeferralReason.INVALID_REQUEST, str(error), pool=name)
        if refused := refusals(stored):
            why = f"NodePool {name}: {'; '.join(refused)}"
            return await self._defer(key, pod, DeferralReason.NO_CANDIDATE, why, pool=name)
        try:
            pool = NodePool.model_validate(stored)
        except ValidationError as error:
            fields = ", ".join(".".join(map(str, item["loc"])) for item in error.errors(include_input=False))
            why = f"NodePool {name} cannot be used: {fields}"
            return await self._defer(key, pod, DeferralReason.NO_CANDIDATE, why, pool=name)
        if unusable := explain.unusable(pool.spec):
            why = f"NodePool {name} can serve no Pod: {unusable}"
            return await self._defer(key, pod, DeferralReason.NO_CANDIDATE, why, pool=name)
        if namespace is None and pool.spec.namespace_selector is not None:
            return Again(self._settings.backoff_base_s)  # it exists, and the watch is about to show it
        return await self._choose(key, pod, request, pool)

    async def _choose(self, key: Key, pod: Obj, request: PlacementRequest, pool: NodePool) -> Again | None:
        self._take_back(key)
        name, pool_name = self._claim_name(key, pod, request), pool.metadata.name
        owner = controller_of(pod)

        def judge(seen: Seen) -> tuple[tuple[list[Place] | Backoff, datetime], Decision]:
            if owner is not None and (wait := seen.backoffs.get(owner["uid"])) is not None:
                outcome = DeferralReason.OWNER_BACKOFF.value
                row = Decision(
                    pod_namespace=key[0],
                    pod_name=key[1],
                    pod_uid=uid_of(pod),
                    pool=pool_name,
                    outcome=outcome,
                )
                return (wait, seen.now), row
            avoided = self._reserve.avoided(key, seen, template=request.template)
            places = self._ranking.places(
                request,
                pool,
                blocks=(*seen.blocks, *avoided),
                usage=seen.promises.usage(pool_name),
                history=seen.history,
                now=seen.now,
            )
            if (first := chosen(places)) is not None:
                promise = objects.promised(request, first, pool=pool_name, name=name)
                self._promised[key] = promise
                seen.promises.reserve(promise)
            return (places, seen.now), explain.decision_of(request, pool_name, places)

        try:
            places, database_now = await self._desk.look(judge, pool=pool_name)
        except MayNotPlace as error:
            return await self._hold(key, pod, str(error))
        self._held.pop(key, None)
        if isinstance(places, Backoff):
            return await self._defer_owner(key, pod, pool_name, places, database_now=database_now)
        metrics.skipped(places)
        candidate = chosen(places)
        if candidate is None:
            return await self._defer_places(key, pod, pool_name, places, database_now=database_now)
        if not self._may_begin(key, pod):
            return Again(0.0)  # a claim has come to light since we looked: begin anew with it
        log.info("candidate chosen", candidate=str(candidate), pool=pool_name)

        wanted = objects.claim_of(request, candidate, pool=pool, name=name, installation=self._installation)
        if not self._term.valid():
            return Again(self._settings.stale_retry_s)
        try:
            claim = await self._kube.create(paths.nodeclaims(), wanted)
        except Exists:
            return await self._name_taken(key, pod, name)
        self._reserve.made(key, pod)
        self._remember(key, claim)
        return await self._go_on(key, pod, claim, fresh=True)

    async def _name_taken(self, key: Key, pod: Obj, name: str) -> Again | None:
        """A claim of this name that the watch has not shown: ours from a lost answer, or somebody else's."""
        claim = await self._kube.find(paths.nodeclaim(name))
        if claim is None:
            return Again(0.0)
        if claim["spec"]["podRef"]["uid"] == uid_of(pod) and not leaving(claim):
            self._reserve.made(key, pod)
            self._remember(key, claim)
            return await self._go_on(key, pod, claim)
        if pod_of(claim) == key:
            return await self._wait_for_older(key, pod, claim)
        raise KubeError(409, message=f"NodeClaim {name} is another Pod's; the watch will show it")

    async def _go_on(self, key: Key, pod: Obj, stored: Obj, *, fresh: bool = False) -> Again | None:
        """From a claim to the lifted gate, or to the machine that comes before it."""
        if self._reserve.wants(pod, self._pools.get("", stored["spec"].get("poolRef") or "")):
            self._waiting.drop(key)
            self._reserve.take(key, pod, stored)
            return None
        if not fresh:
            try:
                await self._permit()
            except MayNotPlace as error:
                return await self._hold(key, pod, str(error))
        return await self._lift_towards(key, pod, stored)

    async def _lift_for(self, key: Key, pod: Obj, stored: Obj, bound: bool) -> Again | None:
        """For Reserve: the machine is in hand."""
        await self._permit()
        return await self._lift_towards(key, pod, stored, bound=bound)

    async def _permit(self) -> None:
        """Raises `MayNotPlace` while nothing may be placed."""
        await self._desk.look(lambda seen: (None, None))

    async def _lift_towards(self, key: Key, pod: Obj, stored: Obj, *, bound: bool = False) -> Again | None:
        """The last steps, each of which may have been done before."""
        claim = NodeClaim.model_validate(stored)
        if not bound:
            await self._bind(claim)
        if placed_condition(pod) is not None:
            message = f"placed on {objects.candidate_on(claim)}"
            pod = await self._teller.say(key, pod, placed=True, reason="Placed", message=message)
        if not self._term.valid():
            return Again(self._settings.stale_retry_s)
        if await self._lift(key, pod, claim):
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

    async def _lift(self, key: Key, pod: Obj, claim: NodeClaim) -> bool:
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
        self._held.pop(key, None)
        self._waiting.drop(key)
        return True

    async def _bind(self, claim: NodeClaim) -> None:
        wanted = objects.binding_of(claim, installation=self._installation)
        namespace, name = wanted["metadata"]["namespace"], wanted["metadata"]["name"]
        try:
            await self._kube.create(paths.cloudpodbindings(namespace), wanted, metadata_only=True)
        except Exists:
            found = await self._kube.find(paths.cloudpodbinding(namespace, name))
            if found is not None and claim.metadata.uid in owners(found):
                return
            # Of an earlier claim of that name, which the garbage collector has not come to yet.
            if found is not None:
                await self._delete(paths.cloudpodbinding(namespace, name), uid=uid_of(found))
            await self._kube.create(paths.cloudpodbindings(namespace), wanted, metadata_only=True)

    # --- why a Pod waits ------------------------------------------------------------------------

    async def _wait_for_older(self, key: Key, pod: Obj, claim: Obj) -> Again | None:
        why = f"claim {claim['metadata']['name']} of an earlier Pod of this name is not released yet"
        return await self._wait_for_claim(key, pod, why)

    async def _wait_for_claim(self, key: Key, pod: Obj, why: str) -> Again | None:
        name = pool_name(pod)
        known = name if name and self._pools.get("", name) else None
        await self._defer(key, pod, DeferralReason.STALE_CLAIM, why, pool=known)
        return Again(self._settings.stale_retry_s)

    async def _defer_places(
        self, key: Key, pod: Obj, pool: str, places: list[Place], *, database_now: datetime
    ) -> Again | None:
        reason = explain.deferral_of(places)
        skips = [place for place in places if isinstance(place, Skip)]
        # Ids below 0 are no rows: what only this Pod avoids, which no person can clear.
        blocks = {row: skip.until for skip in skips if skip.until for row in skip.blocks if row > 0}
        met = frozenset(skip.reason for skip in skips)
        await self._tell(key, pod, reason, explain.sentence(places), pool=pool, blocks=blocks, met=met)
        end = explain.soonest_expiry(places)
        if end is None:
            return None
        spread_s = offset_s(uid_of(pod), spread_s=self._settings.retry_offset_s)
        return Again((end - database_now).total_seconds() + spread_s)

    async def _defer_owner(
        self, key: Key, pod: Obj, pool: str, wait: Backoff, *, database_now: datetime
    ) -> Again | None:
        """A loop buys no machines: its owner's Pods wait, each longer than the one before."""
        why = (
            f"nothing is rented for its owner before {timestamp(wait.until)}: {wait.message}"
            f" ({wait.failures} in a row)"
        )
        await self._tell(key, pod, DeferralReason.OWNER_BACKOFF, why, pool=pool)
        return Again(max(0.05, (wait.until - database_now).total_seconds()))

    async def _defer(
        self, key: Key, pod: Obj, reason: DeferralReason, why: str, *, pool: str | None = None
    ) -> Again | None:
        """Leave the Pod gated for a reason that only a change of something else can end."""
        row = Decision(
            pod_namespace=key[0], pod_name=key[1], pod_uid=uid_of(pod), pool=pool, outcome=reason.value
        )
        try:
            await self._desk.look(lambda seen: (None, row))
        except MayNotPlace as error:
            log.debug("deferral not recorded", error=str(error))
        await self._tell(key, pod, reason, why, pool=pool)
        return None

    async def _tell(
        self,
        key: Key,
        pod: Obj,
        reason: DeferralReason,
        why: str,
        *,
        pool: str | None,
        blocks: dict[int, datetime] | None = None,
        met: frozenset[SkipReason] = frozenset(),
    ) -> None:
        metrics.deferred(reason, pool=pool)
        self._reserve.rests(key)
        wait = Wait(reason=reason, blocks=blocks or {}, pool=pool, met=met)
        if self._waiting.put(key, wait, since=self._looked.pop(key, Mark())):
            self._wake([key])
        await self._teller.say(key, pod, placed=False, reason=_CONDITION_REASONS[reason], message=why)

    async def _hold(self, key: Key, pod: Obj, why: str) -> Again:
        """Nothing may be placed now, whatever the Pod asks for. It is told if that lasts: a new leader's
        first moments, or a dropped connection, are no news."""
        self._waiting.drop(key)
        log.debug("placement waits", why=why)
        if key not in self._held:
            self._held[key] = uid_of(pod)
            return Again(min(self._settings.backoff_base_s, self._settings.stale_retry_s))
        await self._teller.say(
            key, pod, placed=False, reason="OnHold", message=f"nothing is placed now: {why}"
        )
        return Again(self._settings.stale_retry_s)

    # --- a placed Pod that nobody binds ---------------------------------------------------------

    async def _see_it_bound(self, key: Key, pod: Obj, *, since: float) -> Again | None:
        """Give up a placement that the scheduler does not take: its claim goes, an owned Pod makes way."""
        limit_s = self._settings.unbound_after_s
        own = [claim for claim in await self._own_claims(key, pod) if not leaving(claim)]
        for extra in extras(own, pod):
            await self._delete_claim(extra, why="a second claim of one Pod")
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
            await self._delete_claim(claim, why="its Pod was not bound in time")
        log.warning("placed pod not bound", owned=owned, after_s=limit_s)
        self._events.note(living, type="Warning", reason="NotBound", message=why)
        return None

    # --- small things ---------------------------------------------------------------------------

    async def _own_claims(self, key: Key, pod: Obj) -> list[Obj]:
        """The claims of this very Pod, oldest first."""
        own = sorted(self._claims.by_index(_BY_UID, uid_of(pod)), key=age)
        made = self._made.get(key)
        if made is None or any(uid_of(claim) == uid_of(made) for claim in own):
            return own
        living = await self._kube.find(paths.nodeclaim(made["metadata"]["name"]))
        if living is None or living["spec"]["podRef"]["uid"] != uid_of(pod):
            self._made.pop(key, None)
            return own
        return [*own, living]

    def _others_claims(self, key: Key, pod: Obj) -> list[Obj]:
        """Claims of this namespace and name that are not of this very Pod."""
        found = self._claims.by_index(_BY_POD, "/".join(key))
        return [claim for claim in found if claim["spec"]["podRef"]["uid"] != uid_of(pod)]

    def _may_begin(self, key: Key, pod: Obj) -> bool:
        """Whether there is still no claim but those of which nothing more can be had."""
        own = self._claims.by_index(_BY_UID, uid_of(pod))
        return not self._others_claims(key, pod) and (not own or self._reserve.may_choose(key, own))

    async def _give_back(self, key: Key, pod: Obj) -> Again | None:
        """A Pod that was let go by somebody else, or is leaving: what is rented for it serves nobody."""
        for claim in objects.unneeded(self._claims.by_index(_BY_UID, uid_of(pod)), pod):
            if not self._term.valid():
                return Again(self._settings.stale_retry_s)
            await self._delete_claim(claim, why="its Pod goes another way")
        return None

    def _take_back(self, key: Key) -> None:
        """Give back what was promised for a claim that was not made, as far as we know.

        If it was, the watch shows it, and then it counts.
        """
        promised = self._promised.pop(key, None)
        if promised is not None and key not in self._made:
            self._desk.claim_ended(promised.key)
            self._wake(self._waiting.on_limit(promised.pool))

    def _remember(self, key: Key, claim: Obj) -> None:
        if self._claims.by_uid(uid_of(claim)) is None:
            self._made[key] = claim

    def _claim_name(self, key: Key, pod: Obj, request: PlacementRequest) -> str:
        """The same until a claim has it: a lost answer must not make a second one."""
        known = len(self._claims.by_index(_BY_UID, request.uid))
        tried = self._reserve.tried(key, pod, known=known)
        name = keys.claim_name(request.namespace, request.name)
        if tried == 0 and self._claims.get("", name) is None:
            return name
        return keys.hashed_claim_name(request.namespace, request.name, uid=request.uid, candidate=tried + 1)

    async def _delete_claim(self, claim: Obj, *, why: str) -> None:
        log.warning("claim given up", claim=claim["metadata"]["name"], claim_uid=uid_of(claim), why=why)
        await self._delete(paths.nodeclaim(claim["metadata"]["name"]), uid=uid_of(claim))

    async def _delete(self, path: str, *, uid: str) -> None:
        with suppress(Replaced):  # gone already, which is what we want
            await self._kube.delete(path, uid=uid)
