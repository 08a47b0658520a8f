"""Reserve: first the machine, then the gate. So no Pod fails for want of capacity.

For pools that ask for it, and for every Pod that no owner would replace. From the claim on, the Pod is worked
on here: one candidate at a time is rented for, a lost one's claim is deleted, and the controller is asked for
the next one only when nothing of the lost one can be had any more: it was refused, or the cloud has taken the
order to end it, or nobody has known for `failover.unknownTimeout` whether it exists. The gate is lifted only
with a machine in hand whose capacity is committed.

All that must survive a crash is in the claims (found by the Pod's UID) and in provisioning's rows; what is
remembered here only keeps a Pod from running twice into the same wall. A create may take a minute and a half,
so the work has a queue and workers of its own.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import structlog

from app.api import keys
from app.api.nodeclaim import NodeClaim
from app.api.nodepool import FailoverMode
from app.kube import paths
from app.kube.cache import Cache
from app.kube.claims import ClaimDoor, UnreadableClaim, claim_spec
from app.kube.client import Kube, Obj
from app.kube.errors import KubeError, Replaced
from app.kube.orders import Order, Unusable, WatchedPort, order_of, policy_of, pool_of
from app.kube.queue import Again, WorkQueue, run_workers
from app.placement import objects
from app.placement.courses import Course, Lost
from app.placement.desk import MayNotPlace, Seen
from app.placement.objects import leaving, uid_of
from app.placement.progress import Progress
from app.placement.ranking import Ranking
from app.placement.standing import Standing, standing_of
from app.placement.telling import Events, Teller
from app.placement.terms import Terms
from app.placement.waiting import Key
from app.provisioning import metrics
from app.provisioning.model import (
    ClaimSpec,
    Outcome,
    Over,
    Refused,
    Release,
    Released,
    Releasing,
    Waiting,
    Why,
)
from app.provisioning.service import Provisioning
from app.settings import Settings
from app.store.blocks import Block, Cause
from app.workload.owners import controller_of
from providers.base import ClaimUid

log = structlog.get_logger()

WORKERS = 64  # as many creates may wait for their answer at once
# What a claim of which nothing was sent waits for, and may wait for in vain.
_NOT_SENT = frozenset({Why.RETRY, Why.NO_ACCOUNT, Why.THROTTLED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Hands:
    """What is needed of the controller. ``valid``: do we still lead.

    ``permit`` raises `MayNotPlace` while nothing may be placed. ``give_back``: the claim takes nothing from
    limits any more. ``lift`` is told whether the claim has its binding; ``choose`` asks for the Pod's next
    candidate.
    """

    valid: Callable[[], bool]
    claims: Callable[[Key, Obj], Awaitable[list[Obj]]]
    permit: Callable[[], Awaitable[None]]
    give_back: Callable[[Obj], None]
    bind: Callable[[NodeClaim], Awaitable[None]]
    lift: Callable[[Key, Obj, Obj, bool], Awaitable[Again | None]]
    hold: Callable[[Key, Obj, str], Awaitable[Again]]
    choose: Callable[[Key], None]


class Reserve:
    """The Pods that are rented for while they are gated. Made with the controller, and run by it."""

    def __init__(
        self,
        *,
        kube: Kube,
        pods: Cache,
        pools: Cache,
        namespaces: Cache,
        ranking: Ranking,
        provisioning: Provisioning,
        settings: Settings,
        teller: Teller,
        events: Events,
        hands: Hands,
        now: Callable[[], datetime],
        clock: Callable[[], float],
        rng: random.Random | None = None,
    ) -> None:
        self._kube, self._pods, self._pools = kube, pods, pools
        self._provisioning, self._settings = provisioning, settings
        self._events, self._hands = events, hands
        self._now, self._clock = now, clock
        self._progress = Progress(teller=teller, clock=clock)
        self._terms = Terms(
            pools=pools,
            namespaces=namespaces,
            ranking=ranking,
            provisioning=provisioning,
            settings=settings,
            now=now,
            rng=rng or random.Random(),
        )
        self._door = ClaimDoor(kube)
        self._queue: WorkQueue[Key] | None = None
        self._courses: dict[Key, Course] = {}
        self._keys: dict[str, Key] = {}  # by the UIDs of claims in work or in release
        provisioning.on_change(self._machine_changed)

    async def run(self) -> None:
        """Work until cancelled; what was remembered of an earlier term is forgotten."""
        settings = self._settings
        self._courses.clear()
        self._keys.clear()
        self._queue = WorkQueue(base_delay_s=settings.backoff_base_s, max_delay_s=settings.backoff_max_s)
        try:
            await run_workers(
                self._queue, self._reconcile, workers=WORKERS, name="reserve", expected=(KubeError,)
            )
        finally:
            self._queue.close()
            self._queue = None

    # --- what the controller asks ---------------------------------------------------------------

    def wants(self, pod: Obj, pool: Obj | None) -> bool:
        """Whether the Pod stays gated until it has a machine: no owner replaces it, or its pool says so."""
        owner = controller_of(pod)
        if owner is None:
            return True
        if owner.get("kind") == "Sandbox" and str(owner.get("apiVersion", "")).startswith(f"{keys.GROUP}/"):
            return True
        failover = ((pool or {}).get("spec") or {}).get("failover") or {}
        return bool(failover.get("mode") == FailoverMode.RESERVE)

    def take(self, key: Key, pod: Obj, claim: Obj | None = None) -> None:
        """Work on the Pod, for this claim; without one: see what becomes of its claims in release."""
        course = self._course(key, pod)
        if claim is not None:
            course.serve(claim, now=self._clock())
            self._keys[uid_of(claim)] = key
        if self._queue is not None:
            self._queue.add(key)

    def gave_up(self, key: Key, claim: Obj) -> bool:
        """Whether we have deleted the claim, whatever a watch that lags behind still shows."""
        course = self._courses.get(key)
        return course is not None and uid_of(claim) in course.given_up

    def may_choose(self, key: Key, claims: Iterable[Obj]) -> bool:
        """Whether the next candidate may begin beside these claims in release."""
        course = self._courses.get(key)
        return course is not None and all(uid_of(claim) in course.free for claim in claims)

    def tried(self, key: Key, pod: Obj, *, known: int) -> int:
        """How many candidates the Pod has had, of which ``known`` have a claim; it never gets less."""
        course = self._course(key, pod)
        course.tried = max(course.tried, known)
        return course.tried

    def made(self, key: Key, pod: Obj) -> None:
        """A claim for one more candidate exists."""
        self._course(key, pod).tried += 1

    def rests(self, key: Key) -> None:
        """No candidate is left for now, and the Pod is told so."""
        if (course := self._courses.get(key)) is not None:
            course.trying_since = None

    def avoided(self, key: Key, seen: Seen, *, template: str) -> list[Block]:
        """The places that this one Pod has lost and that nothing else blocks, as blocks with ids below 0."""
        course, clock = self._courses.get(key), self._clock()
        if course is None:
            return []
        for uid, lost in list(course.lost.items()):
            if lost.until <= clock or (lost.refused and lost.is_covered(seen.blocks, template=template)):
                del course.lost[uid]
        return [
            Block(
                id=-number,
                scope=lost.scope,
                cause=Cause(
                    kind=lost.kind,
                    message="",
                    pool=lost.claim.pool,
                    pod_namespace=key[0],
                    pod_name=key[1],
                    claim_uid=lost.claim.uid,
                ),
                created_at=seen.now,
                expires_at=seen.now + timedelta(seconds=lost.until - clock),
            )
            for number, lost in enumerate(course.lost.values(), start=1)
        ]

    async def wait_for_gates(self, key: Key, pod: Obj, others: Sequence[str]) -> None:
        """Nothing is rented yet: somebody else holds the Pod back."""
        await self._progress.waits_for_gates(key, pod, others)

    def forget(self, key: Key) -> None:
        """The Pod is gone, or not gated any more."""
        course = self._courses.pop(key, None)
        if course is not None:
            for uid in [uid for uid, held in self._keys.items() if held == key]:
                del self._keys[uid]

    def _course(self, key: Key, pod: Obj) -> Course:
        course = self._courses.get(key)
        if course is None or course.pod_uid != uid_of(pod):
            self.forget(key)
            course = self._courses[key] = Course(pod_uid=uid_of(pod))
        return course

    def _machine_changed(self, uid: ClaimUid) -> None:
        key = self._keys.get(uid)
        if key is not None and self._queue is not None:
            self._queue.add(key)

    # --- one look at one Pod --------------------------------------------------------------------

    async def _reconcile(self, key: Key) -> Again | None:
        pod, course = self._pods.get(*key), self._courses.get(key)
        if pod is None or course is None or course.pod_uid != uid_of(pod) or course.lifted:
            return None
        if objects.is_over(pod) or not objects.is_gated(pod):
            return None
        if not self._hands.valid():
            return Again(self._settings.stale_retry_s)
        with structlog.contextvars.bound_contextvars(pod=f"{key[0]}/{key[1]}", pod_uid=uid_of(pod)):
            try:
                return await self._step(key, pod, course)
            except MayNotPlace as error:
                return await self._hands.hold(key, pod, str(error))
            except Replaced as error:
                log.info("pod is not the same any more", error=str(error))
                return None

    async def _step(self, key: Key, pod: Obj, course: Course) -> Again | None:
        own = await self._hands.claims(key, pod)
        if course.claim is not None and all(uid_of(claim) != course.claim_uid for claim in own):
            own.append(course.claim)
        staying = [claim for claim in own if not leaving(claim) and uid_of(claim) not in course.given_up]
        if staying:
            course.serve(staying[0], now=self._clock())
            self._keys[uid_of(staying[0])] = key
            if course.trying_since is None:
                course.trying_since = self._clock()
            return await self._serve(key, pod, course, staying[0])
        return await self._let_go(key, pod, course, own)

    async def _serve(self, key: Key, pod: Obj, course: Course, stored: Obj) -> Again | None:
        """From a claim to a machine in hand, and to the lifted gate."""
        if others := objects.other_gates(pod):
            await self._progress.waits_for_gates(key, pod, others)
            return None
        try:
            spec = claim_spec(stored)
        except UnreadableClaim as error:
            await self._progress.cannot_be_read(key, pod, str(error))
            return Again(self._settings.stale_retry_s)
        claim = NodeClaim.model_validate(stored)
        pool = self._pools.get("", spec.pool)
        if (objection := self._terms.objection(pod, claim, pool)) is not None and objection.lasting:
            pool = await self._kube.find(paths.nodepool(spec.pool))  # a cache may only be late
            if (objection := self._terms.objection(pod, claim, pool)) is not None and objection.lasting:
                return await self._give_up(key, pod, course, spec, kind="pool", why=objection.text)
        view = self._provisioning.view(spec.uid)
        if view.state != "live" or view.ref is None:
            await self._hands.permit()
            await self._progress.tries_long(key, pod, course, spec)
            outcome, problem = await self._rent(key, pod, course, stored, spec)
            if (again := await self._judge(key, pod, course, spec, outcome, problem)) is not None:
                return again
            if uid_of(stored) in course.given_up:
                return None
        return await self._stand(key, pod, course, stored, spec)

    async def _rent(
        self, key: Key, pod: Obj, course: Course, stored: Obj, spec: ClaimSpec
    ) -> tuple[Outcome, str | None]:
        """One call of ``ensure``; with what is wrong with the Pod, where nothing can be asked for it."""
        order: Order | None = None
        problem: str | None = None
        try:
            pool = pool_of(self._pools.get("", spec.pool), spec.pool)
            order = await order_of(self._kube, pod, stored, spec)
        except Unusable as error:
            problem = str(error)
            pool = self._terms.pool(spec)
        if order is not None and not course.noted:
            course.noted = True
            for note in order.notes:
                self._events.note(pod, type="Warning", reason=note.reason, message=note.message)
        policy = policy_of(pool, pod, jitter_s=self._terms.jitter_s())
        port = WatchedPort(self._door, clock=self._clock)
        async with asyncio.TaskGroup() as tasks:
            slow = tasks.create_task(self._progress.is_slow(key, pod, course, spec), name="reserve-tell")
            outcome = await self._provisioning.ensure(
                spec, order.workload if order is not None else None, port=port, policy=policy
            )
            slow.cancel()
        if port.marked_at is not None:
            metrics.attempted(spec, outcome, took_s=self._clock() - port.marked_at)
        return outcome, problem

    async def _judge(
        self, key: Key, pod: Obj, course: Course, spec: ClaimSpec, outcome: Outcome, problem: str | None
    ) -> Again | None:
        """What follows from an outcome that is no machine; None for one, or when nothing more is to do."""
        match outcome:
            case Refused(kind=kind, message=message):
                why = f"refused, {kind.value}: {message}"
                return await self._give_up(key, pod, course, spec, kind=kind.value, why=why, refused=True)
            case Over():
                why = "it is in release"
                return await self._give_up(key, pod, course, spec, kind="released", why=why, refused=True)
            case Waiting(why=Why.NO_WORKLOAD):
                await self._progress.lacks(key, pod, problem or outcome.message)
                return Again(self._settings.backoff_max_s)
            case Waiting(why=why, message=message, after_s=after_s):
                limit_s = self._terms.unknown_s(spec)
                if why is Why.UNKNOWN and outcome.for_s >= limit_s:
                    text = f"no answer for {outcome.for_s:.0f} s whether a machine was rented"
                    return await self._give_up(key, pod, course, spec, kind="unknown", why=text)
                if why in _NOT_SENT and self._clock() - course.began >= limit_s:
                    return await self._give_up(key, pod, course, spec, kind="unavailable", why=message)
                doubt = "no answer whether a machine was rented" if why is Why.UNKNOWN else "retrying"
                await self._progress.rents(key, pod, course, spec, f": {doubt}: {message}")
                return Again(after_s)
            case _:
                return None

    async def _stand(self, key: Key, pod: Obj, course: Course, stored: Obj, spec: ClaimSpec) -> Again | None:
        """A machine is recorded: lift the gate if it is in hand, else wait for that, or give it up."""
        view = self._provisioning.view(spec.uid)
        match standing_of(view):
            case Standing.IN_HAND:
                return await self._place(key, pod, course, stored, spec)
            case Standing.LOST:
                why = "the machine went before its workload began"
                return await self._give_up(key, pod, course, spec, kind="gone", why=why)
            case Standing.QUEUED:
                left_s = self._queue_left_s(course, stored, spec)
                if left_s <= 0:
                    why = "the provider queued it and committed no capacity in time"
                    return await self._give_up(key, pod, course, spec, kind="queued", why=why)
                await self._bind(course, stored)
                until = self._now() + timedelta(seconds=left_s)
                text = f": queued by the provider, which has until {until:%H:%M} UTC to commit capacity"
                await self._progress.rents(key, pod, course, spec, text)
                return Again(min(left_s, self._progress.quiet_left_s(course) or left_s))
            case Standing.UNSEEN:
                await self._progress.rents(
                    key, pod, course, spec, ": waiting for the provider to show the machine"
                )
                return Again(self._settings.list_busy_s)

    async def _place(self, key: Key, pod: Obj, course: Course, stored: Obj, spec: ClaimSpec) -> Again | None:
        """The pool is read once more, live: what it says when the gate goes is what counts."""
        pool = await self._kube.find(paths.nodepool(spec.pool))
        objection = self._terms.objection(pod, NodeClaim.model_validate(stored), pool)
        if objection is None:
            again = await self._hands.lift(key, pod, stored, course.bound)
            course.lifted = again is None
            return again
        if objection.lasting:
            return await self._give_up(key, pod, course, spec, kind="pool", why=objection.text)
        if course.unready_since is None:
            course.unready_since = self._clock()
        left_s = course.unready_since + self._settings.unbound_after_s - self._clock()
        if left_s <= 0:
            return await self._give_up(key, pod, course, spec, kind="node", why=objection.text)
        await self._progress.rents(key, pod, course, spec, f": rented, but {objection.text}")
        return Again(min(left_s, self._settings.stale_retry_s))

    # --- a lost candidate -----------------------------------------------------------------------

    async def _give_up(
        self,
        key: Key,
        pod: Obj,
        course: Course,
        spec: ClaimSpec,
        *,
        kind: str,
        why: str,
        refused: bool = False,
    ) -> Again | None:
        """Delete the claim of a candidate that came to nothing, and see that its order is called off."""
        log.info("candidate lost", claim=spec.name, claim_uid=spec.uid, kind=kind, why=why)
        try:
            await self._kube.delete(paths.nodeclaim(spec.name), uid=spec.uid)
        except Replaced:
            log.debug("the claim is gone already")
        course.given_up.add(spec.uid)
        if kind not in ("pool", "node"):  # of these placement itself knows
            self._lose(course, spec, kind=kind, refused=refused)
        return await self._let_go(key, pod, course, [course.claim] if course.claim is not None else [])

    def _lose(self, course: Course, spec: ClaimSpec, *, kind: str, refused: bool) -> None:
        until = self._clock() + self._terms.lost_s(spec)
        course.lost[spec.uid] = Lost(claim=spec, kind=kind, until=until, refused=refused)

    async def _let_go(self, key: Key, pod: Obj, course: Course, claims: Sequence[Obj]) -> Again | None:
        """Have what the claims may hold ended, and ask for the next candidate once that is so."""
        waits: list[tuple[float, str]] = []
        for claim in claims:
            uid, name = uid_of(claim), claim["metadata"]["name"]
            if uid in course.free:
                continue
            self._keys[uid] = key
            try:
                spec = claim_spec(claim)
            except UnreadableClaim as error:
                waits.append((self._settings.stale_retry_s, str(error)))
                continue
            lost = course.lost.get(uid)
            if lost is None and uid not in course.given_up:  # by an earlier leader, or by a person
                self._lose(course, spec, kind="released", refused=True)
            reason = f"candidate lost: {lost.kind}" if lost is not None else "claim deleted"
            release = await self._provisioning.release(spec, port=self._door, reason=reason)
            if self._is_off(course, release, spec):
                course.free.add(uid)
                if lost is not None and lost.refused and self._provisioning.view(spec.uid).ref is None:
                    self._hands.give_back(claim)
                log.info("next candidate may begin", claim=name, release=type(release).__name__)
            else:
                waits.append((release.after_s, f"{spec.place}: {release.message}"))  # type: ignore[union-attr]
        if self._courses.get(key) is not course:
            return None
        if waits:
            after_s, text = min(waits)
            await self._progress.calls_off(key, pod, course, text)
            return Again(after_s)
        course.claim = None
        self._hands.choose(key)
        return None

    def _is_off(self, course: Course, release: Release, spec: ClaimSpec) -> bool:
        """Whether nothing more is to be had of the claim, so that the next one cannot make a second machine.

        An order that nobody can even ask about (its account is not ours to open) is waited for as long as the
        pool says, counted from when that was so first; for the others see `off`.
        """
        if isinstance(release, Releasing) and release.why in (Why.NO_ACCOUNT, Why.WRONG_ACCOUNT):
            since = course.astray.setdefault(spec.uid, self._clock())
            return self._clock() - since >= self._terms.unknown_s(spec)
        course.astray.pop(spec.uid, None)
        return off(release, unknown_s=self._terms.unknown_s(spec))

    # --- small things ---------------------------------------------------------------------------

    async def _bind(self, course: Course, stored: Obj) -> None:
        """A machine is recorded: from now on people of the namespace see it, too."""
        if not course.bound:
            await self._hands.bind(NodeClaim.model_validate(stored))
            course.bound = True

    def _queue_left_s(self, course: Course, stored: Obj, spec: ClaimSpec) -> float:
        """How long the provider may still leave the order in its queue: counted from the mark on the claim,
        which was made right before the order and outlives us."""
        if course.queued_since is None:
            attempt = NodeClaim.model_validate(stored).status.attempt
            ago_s = 0.0
            if attempt is not None:
                ordered = attempt.send_by - timedelta(seconds=self._settings.send_window_s)
                ago_s = max(0.0, (self._now() - ordered).total_seconds())
            course.queued_since = self._clock() - ago_s
        return course.queued_since + self._terms.reserve_s(spec) - self._clock()


def off(release: Release, *, unknown_s: float) -> bool:
    """Whether the cloud has taken every terminate, and no order is left of which somebody may still hear.

    One of which nobody knows what came of it, or of which only a person can tell (`Why.UNKNOWN`), is waited
    for ``unknown_s`` seconds, counted from when it was made.
    """
    if isinstance(release, Released):
        return True
    if release.why not in (Why.TERMINATING, Why.UNKNOWN) or not release.accepted:
        return False
    return release.unknown_s == 0 or release.unknown_s >= unknown_s
