"""Lifts the gate of each opted-in Pod, towards one candidate, after the claim for it exists.

The order is: decision row, NodeClaim, CloudPodBinding, then one patch of the Pod. A crash between any two is
safe: whoever comes next finds the claim by the Pod's UID and goes on from it, never from a second ranking.
The patch carries the Pod's UID and resourceVersion, so of two that place one Pod only one lifts the gate.

Nothing is placed without the store, without leadership, or while a person must confirm something. The caches
may be trimmed, but not of a Pod's metadata, node constraints, gates, containers, restart policy, deadline,
owner references and conditions.

What a claim takes from its pool's limits is written with the decision, before the claim, and given back when
the claim is gone; a decision that led to no claim is given back before the Pod is looked at again.

This module wakes Pods and chooses; `book` knows their claims, `deferrals` what they wait for, `gate` takes
the last steps, `reserve` rents while they are gated, `unbound` gives up those that nobody binds.
"""

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime

import structlog
from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncEngine

from app.api import keys
from app.api.nodepool import NodePool
from app.api.not_built import refusals
from app.api.reasons import DeferralReason
from app.kube import paths
from app.kube.cache import Cache, key_of
from app.kube.client import Kube, Obj
from app.kube.errors import Exists, KubeError, Replaced
from app.kube.queue import Again, WorkQueue, run_workers
from app.placement import explain, metrics, objects
from app.placement.book import ClaimBook
from app.placement.constraints import node_view
from app.placement.deferrals import Deferrals, decision_without_places, owner_waits
from app.placement.desk import Desk, MayNotPlace, Seen, Term
from app.placement.gate import Gate
from app.placement.market import LISTED, Market
from app.placement.objects import labels_of, leaving, pod_of, same_but_status, uid_of
from app.placement.rank import Place, chosen
from app.placement.ranking import Ranking
from app.placement.request import InvalidRequest, PlacementRequest, pool_name, request_of
from app.placement.reserve import Hands, Reserve
from app.placement.telling import Events, Teller
from app.placement.unbound import Unbound
from app.placement.waiting import Key
from app.provisioning.service import Provisioning
from app.settings import Settings
from app.store.backoffs import Backoff
from app.store.decisions import Decision
from app.store.engine import StoreUnavailable
from app.workload.owners import controller_of
from catalog.offerings import Offerings

log = structlog.get_logger()

WORKERS = 32  # so many share one look at the desk; with 8, placing was the slowest stage of a burst
_BY_POOL = "placement-pool"


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
        self._term = term
        self._teller = Teller(self._kube, events=events, now=now)
        self._desk = Desk(engine, term=term, renewed=self._begin_anew)
        self._queue: WorkQueue[Key] | None = None
        self._book = ClaimBook(kube=self._kube, claims=claims, desk=self._desk)
        self._deferrals = Deferrals(
            desk=self._desk,
            teller=self._teller,
            pools=pools,
            settings=settings,
            events=events,
            wake=self._wake,
            rests=lambda key: self._reserve.rests(key),
        )
        self._gate = Gate(
            kube=self._kube,
            teller=self._teller,
            settings=settings,
            installation=installation,
            term=term,
            now=now,
            lifted=self._deferrals.forget,
        )
        self._unbound = Unbound(
            kube=self._kube, book=self._book, settings=settings, events=events, clock=clock
        )
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
                claims=self._book.own,
                permit=self._permit,
                give_back=self._book.give_back,
                bind=self._gate.bind,
                lift=self._lift_for,
                hold=self._deferrals.hold,
                choose=lambda key: self._wake([key]),
            ),
            now=now,
            clock=clock,
        )
        pods.add_index(_BY_POOL, lambda pod: [pool_name(pod) or ""] if objects.is_gated(pod) else [])
        pods.on_change(self._pod_changed)
        pools.on_change(self._pool_changed)
        claims.on_change(self._claim_changed)
        nodes.on_change(self._node_changed)
        namespaces.on_change(self._namespace_changed)
        offerings.on_change(lambda _: self._wake(self._deferrals.waiting.for_a_place()))

    async def run(self) -> None:
        """Place Pods until cancelled. Begins when all caches are synced, with a look at every Pod."""
        settings = self._settings
        for cache in (self._pods, self._pools, self._claims, self._nodes, self._namespaces):
            await cache.synced()
        self._queue = WorkQueue(base_delay_s=settings.backoff_base_s, max_delay_s=settings.backoff_max_s)
        for memory in (self._deferrals, self._teller, self._gate, self._unbound):
            memory.clear()
        self._book.begin()
        try:
            for pod in self._pods:
                self._pod_changed(None, pod)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._desk.run(), name="placement-desk")
                tasks.create_task(self._watch_store(), name="placement-store")
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
        if self._queue is not None and self._book.follow(key, old, new) and old is not None:
            self._wake(self._deferrals.waiting.on_limit(old["spec"].get("poolRef")))
        self._book.seen(key, claim)
        began_leaving = new is not None and leaving(new) and not (old and leaving(old))
        if old is None or new is None or began_leaving:
            self._wake([key])

    def _namespace_changed(self, old: Obj | None, new: Obj | None) -> None:
        namespace = new or old
        if namespace is not None and (old is None or new is None or labels_of(old) != labels_of(new)):
            self._wake(self._deferrals.waiting.on_namespace(namespace["metadata"]["name"]))

    def _node_changed(self, old: Obj | None, new: Obj | None) -> None:
        before, after = (node_view(node) if node else None for node in (old, new))
        if before != after:
            self._wake(self._deferrals.waiting.for_a_place())

    async def _watch_store(self) -> None:
        """Wake Pods whose block a person has cleared, asking only while somebody waits for one.

        And see that a store which has lost everything is told of Pods that nothing else would wake.
        """
        while True:
            await asyncio.sleep(self._settings.list_busy_s)
            self._desk.mind_the_epoch()
            waiting = self._deferrals.waiting
            if not waiting.on_blocks:
                continue
            try:
                seen = await self._desk.live_blocks()
            except StoreUnavailable as error:
                log.debug("blocks not read", error=str(error))
                continue
            self._wake(waiting.freed((block.id for block in seen.blocks), now=seen.now))

    def _begin_anew(self) -> None:
        """The store had lost what claims take from limits, and every decision."""
        log.info("the store begins anew: every gated Pod is looked at again")
        self._book.restore()
        self._wake([key_of(pod) for pod in self._pods if objects.is_gated(pod)])

    # --- one Pod --------------------------------------------------------------------------------

    async def _reconcile(self, key: Key) -> Again | None:
        self._deferrals.begin(key)
        try:
            return await self._look(key)
        finally:
            self._deferrals.end(key)

    async def _look(self, key: Key) -> Again | None:
        pod = self._pods.get(*key)
        if pod is None or objects.is_over(pod):
            if pod is None:
                await self._teller.opted_out(key)
            if pod is None or objects.is_gated(pod):
                self._take_back(key)
            self._forget(key)
            self._unbound.forget(key)
            return None if pod is None else await self._give_back(pod)
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
            self._unbound.forget(key)
            return None if self._gate.is_lifted(key, pod) else await self._place(key, pod)
        self._forget(key)
        if objects.is_waiting_for_node(pod):
            return await self._unbound.see(key, pod)
        self._unbound.forget(key)
        return await self._give_back(pod)

    def _forget(self, key: Key) -> None:
        """The Pod is not gated, or is no business of ours any more."""
        self._deferrals.forget(key)
        self._teller.forget(key)
        self._reserve.forget(key)
        self._book.forget(key)
        self._gate.forget(key)

    async def _place(self, key: Key, pod: Obj) -> Again | None:
        own = await self._book.own(key, pod)
        staying = [claim for claim in own if not leaving(claim) and not self._reserve.gave_up(key, claim)]
        if staying:
            for extra in staying[1:]:
                await self._book.delete(extra, why="a second claim of one Pod")
            return await self._go_on(key, pod, staying[0])
        name = pool_name(pod)
        stored = self._pools.get("", name) if name else None
        reserved = self._reserve.wants(pod, stored)
        if own and reserved and not self._reserve.may_choose(key, own):
            self._reserve.take(key, pod)
            return None
        if own and not reserved:
            former = own[0]["metadata"]["name"]
            return await self._deferrals.for_claim(
                key, pod, f"the Pod's former claim {former} is being released"
            )
        if older := self._book.others(key, pod):
            return await self._deferrals.for_older(key, pod, older[0])
        if reserved and (others := objects.other_gates(pod)):
            await self._reserve.wait_for_gates(key, pod, others)
            return None
        if name is None:
            why = f"the Pod names no NodePool; set the label {keys.NODE_POOL_LABEL}"
            return await self._deferrals.without_places(key, pod, DeferralReason.NO_POOL, why)
        if stored is None:
            return await self._deferrals.without_places(
                key, pod, DeferralReason.NO_POOL, f"NodePool {name} does not exist"
            )
        if leaving(stored):
            return await self._deferrals.without_places(
                key, pod, DeferralReason.NO_POOL, f"NodePool {name} is being deleted"
            )
        namespace = self._namespaces.get("", key[0])
        try:
            request = request_of(pod, namespace_labels=labels_of(namespace) if namespace else None)
        except InvalidRequest as error:
            return await self._deferrals.without_places(
                key, pod, DeferralReason.INVALID_REQUEST, str(error), pool=name
            )
        if refused := refusals(stored):
            why = f"NodePool {name}: {'; '.join(refused)}"
            return await self._deferrals.without_places(key, pod, DeferralReason.NO_CANDIDATE, why, pool=name)
        try:
            pool = NodePool.model_validate(stored)
        except ValidationError as error:
            fields = ", ".join(".".join(map(str, item["loc"])) for item in error.errors(include_input=False))
            why = f"NodePool {name} cannot be used: {fields}"
            return await self._deferrals.without_places(key, pod, DeferralReason.NO_CANDIDATE, why, pool=name)
        if unusable := explain.unusable(pool.spec):
            why = f"NodePool {name} can serve no Pod: {unusable}"
            return await self._deferrals.without_places(key, pod, DeferralReason.NO_CANDIDATE, why, pool=name)
        if namespace is None and pool.spec.namespace_selector is not None:
            return Again(self._settings.backoff_base_s)  # it exists, and the watch is about to show it
        return await self._choose(key, pod, request, pool)

    async def _choose(self, key: Key, pod: Obj, request: PlacementRequest, pool: NodePool) -> Again | None:
        self._take_back(key)
        name, pool_name = self._claim_name(key, pod, request), pool.metadata.name
        owner = controller_of(pod)

        def judge(seen: Seen) -> tuple[tuple[list[Place] | Backoff, datetime], Decision]:
            if owner is not None and (wait := seen.backoffs.get(owner["uid"])) is not None:
                why = owner_waits(wait)
                reason = DeferralReason.OWNER_BACKOFF
                return (wait, seen.now), decision_without_places(key, pod, reason, why, pool=pool_name)
            avoided = self._reserve.avoided(key, seen, template=request.template)
            places = self._ranking.places(
                request,
                pool,
                blocks=(*seen.blocks, *avoided),
                usage=seen.promises.usage(
                    pool_name, namespace=request.namespace, team=request.team, labels=request.labels
                ),
                history=seen.history,
                now=seen.now,
            )
            if (first := chosen(places)) is not None:
                promise = objects.promised(request, first, pool=pool_name, name=name)
                self._book.promise(key, promise)
                seen.promises.reserve(promise)
            return (places, seen.now), explain.decision_of(request, pool_name, places)

        try:
            places, database_now = await self._desk.look(judge, pool=pool_name)
        except MayNotPlace as error:
            return await self._deferrals.hold(key, pod, str(error))
        self._deferrals.decided(key)
        if isinstance(places, Backoff):
            return await self._deferrals.for_owner(key, pod, pool_name, places, database_now=database_now)
        metrics.skipped(places)
        candidate = chosen(places)
        if candidate is None:
            return await self._deferrals.for_places(key, pod, pool_name, places, database_now=database_now)
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
        self._book.remember(key, claim)
        return await self._go_on(key, pod, claim, fresh=True)

    async def _name_taken(self, key: Key, pod: Obj, name: str) -> Again | None:
        """A claim of this name that the watch has not shown: ours from a lost answer, or somebody else's."""
        claim = await self._kube.find(paths.nodeclaim(name))
        if claim is None:
            return Again(0.0)
        if claim["spec"]["podRef"]["uid"] == uid_of(pod) and not leaving(claim):
            self._reserve.made(key, pod)
            self._book.remember(key, claim)
            return await self._go_on(key, pod, claim)
        if pod_of(claim) == key:
            return await self._deferrals.for_older(key, pod, claim)
        raise KubeError(409, message=f"NodeClaim {name} is another Pod's; the watch will show it")

    async def _go_on(self, key: Key, pod: Obj, stored: Obj, *, fresh: bool = False) -> Again | None:
        """From a claim to the lifted gate, or to the machine that comes before it."""
        if self._reserve.wants(pod, self._pools.get("", stored["spec"].get("poolRef") or "")):
            self._deferrals.waiting.drop(key)
            self._reserve.take(key, pod, stored)
            return None
        if not fresh:
            try:
                await self._permit()
            except MayNotPlace as error:
                return await self._deferrals.hold(key, pod, str(error))
        return await self._gate.lift(key, pod, stored)

    async def _lift_for(self, key: Key, pod: Obj, stored: Obj, bound: bool) -> Again | None:
        """For Reserve: the machine is in hand."""
        await self._permit()
        return await self._gate.lift(key, pod, stored, bound=bound)

    async def _permit(self) -> None:
        """Raises `MayNotPlace` while nothing may be placed."""
        await self._desk.look(lambda seen: (None, None))

    # --- small things ---------------------------------------------------------------------------

    def _may_begin(self, key: Key, pod: Obj) -> bool:
        """Whether there is still no claim but those of which nothing more can be had."""
        own = self._book.shown(pod)
        return not self._book.others(key, pod) and (not own or self._reserve.may_choose(key, own))

    async def _give_back(self, pod: Obj) -> Again | None:
        """A Pod that was let go by somebody else, or is leaving: what is rented for it serves nobody."""
        for claim in objects.unneeded(self._book.shown(pod), pod):
            if not self._term.valid():
                return Again(self._settings.stale_retry_s)
            await self._book.delete(claim, why="its Pod goes another way")
        return None

    def _take_back(self, key: Key) -> None:
        """What was promised and led to no claim is given back; who waits for that room is woken."""
        pool = self._book.take_back(key)
        if pool is not None:
            self._wake(self._deferrals.waiting.on_limit(pool))

    def _claim_name(self, key: Key, pod: Obj, request: PlacementRequest) -> str:
        """The same until a claim has it: a lost answer must not make a second one."""
        tried = self._reserve.tried(key, pod, known=len(self._book.shown(pod)))
        name = keys.claim_name(request.namespace, request.name)
        if tried == 0 and not self._book.has_name(name):
            return name
        return keys.hashed_claim_name(request.namespace, request.name, uid=request.uid, candidate=tried + 1)
