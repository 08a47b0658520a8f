"""The Pods of one virtual node, from bound to gone. Level-triggered: every look starts from what is true now.

Four queues, all keyed by Pod UID, so that nothing waits for what it does not need: ``follow`` decides and
writes status and asks no cloud; ``rent`` calls ``ensure``; ``end`` calls ``release``; ``care`` asks a running
workload to stop or to start again. So a Pod is let go while its create still waits for an answer, and a cloud
that hangs delays no other Pod's status.

Invariants: nothing is rented without a claim that carries this Pod's UID, provider and account; a terminal
phase and a delete are only written for the very version of the Pod that was looked at; a Pod leaves only
when the end of every machine known for it was accepted; nothing is ever given up; no restart of a workload
rents a machine. Where the cloud cannot start a workload again, its Pod is over whatever its restartPolicy,
and its owner's next one waits (a row that placement reads).
"""

import asyncio
import random
from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import datetime, timedelta

import structlog

from app.api import keys
from app.api.reasons import PodEvent, PodMessage, PodReason, retrying_message
from app.inventory.rounds import AccountKey, Judged
from app.kube import paths
from app.kube.cache import Cache
from app.kube.claims import ClaimDoor, UnreadableClaim, claim_spec
from app.kube.client import Kube, Obj
from app.kube.environment import Note
from app.kube.errors import Conflict, KubeError, Replaced
from app.kube.events import Recorder
from app.kube.orders import (
    CONFIG_PROBLEM,
    Order,
    Unusable,
    WatchedPort,
    order_of,
    policy_of,
    pool_of,
)
from app.kube.queue import Again, WorkQueue, run_workers
from app.provisioning import metrics
from app.provisioning.model import (
    ClaimSpec,
    Outcome,
    Over,
    Refused,
    Released,
    Releasing,
    Rented,
    Waiting,
    Why,
)
from app.provisioning.release import POD_DELETED
from app.provisioning.service import Provisioning
from app.settings import Settings
from app.store.blocks import DEFAULT_TTL_S
from app.store.together import Together
from app.vnode import restarts, status
from app.vnode.care import attend
from app.vnode.course import Course, name_of
from app.vnode.order import is_daemon, is_replaced_by_owner
from app.vnode.probes import HEALTHY, Prober
from app.vnode.runs import Runs
from app.vnode.starts import Starts
from app.vnode.status import Wanted, has_started, is_leaving, is_over, is_running
from app.vnode.words import has_words, hiding, hiding_again, shown
from providers.base import ClaimUid

log = structlog.get_logger()

CLAIMS_BY_POD = "vnode-pod-uid"
FOLLOWERS, RENTERS, ENDERS, CARERS = 16, 64, 64, 32  # a create may take 90 s, so many are under way at once
CLAIM_LAG_S = 2.0  # two watches: a bound Pod may be seen before the claim that was made for it
RENT_QUIET_S = 1.0  # a request that is answered sooner is not worth a write of its own
BOOT_QUIET_S = 0.5  # beside two rounds of the list: a machine that boots at once costs one write, Ready
BACKLOG_QUIET_S, QUIET_MAX_S = 0.05, 30.0  # more for each Pod in a burst: its writes would delay all Readys
RETRY_TEXT_S = 30.0  # how often the reason why nothing happens yet may change its words
CONFLICT_S = 0.2
PROBLEM_RETRY_MAX_S = 15.0  # what the Pod refers to is looked for again at least so often
TROUBLE_AFTER = 3  # releases in a row without an accepted terminate, before people are told


class Lifecycle:
    """One node's Pods. `touch` when anything about one may have changed; `run` does the work."""

    def __init__(
        self,
        *,
        node: str,
        address: Callable[[], str | None],
        key: AccountKey,
        kube: Kube,
        pods: Cache,
        foreign: Cache,
        claims: Cache,
        pools: Cache,
        provisioning: Provisioning,
        settings: Settings,
        events: Recorder,
        now: Callable[[], datetime],
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._node, self._address, self._key = node, address, key
        self._kube = kube.room("vnode")
        self._door = ClaimDoor(self._kube)
        self._pods, self._foreign, self._claims, self._pools = pods, foreign, claims, pools
        self._provisioning, self._settings, self._events = provisioning, settings, events
        self._now, self._clock, self._rng = now, clock, rng
        self._courses: dict[str, Course] = {}
        self._existing = Together(self._claims_exist)
        self._follow, self._rent, self._end, self._care = (self._queue() for _ in range(4))
        self._probes = Prober(
            changed=self.touch,
            dead=self.kill,
            failing=self._unhealthy,
            clock=clock,
            now=now,
            rng=rng,
            run_command=lambda ref, command, within_s: provisioning.keep.command(
                key, ref, command, within_s=within_s
            ),
        )
        provisioning.inventory.on_round(self._listed)
        self._runs = Runs(
            key=key,
            provisioning=provisioning,
            settings=settings,
            events=events,
            write=self._write,
            care=self._care.add,
            end=self._end.add,
            now=now,
            clock=clock,
        )
        self._starts = Starts(
            key=key,
            provisioning=provisioning,
            settings=settings,
            care=self._care.add,
            block_ttl_s=self._block_ttl_s,
            now=now,
            clock=clock,
        )

    def touch(self, uid: str) -> None:
        """Look at the Pod again; any UID may be given."""
        self._follow.add(uid)

    def nudge(self, uid: str) -> None:
        """More is known of the Pod's machine: look again, and repeat a call that waited for that."""
        course = self._courses.get(uid)
        if course is not None and isinstance(course.outcome, Rented) and self._is_forgotten(course):
            course.outcome, course.queued = None, False
        if course is not None and isinstance(course.outcome, Waiting):
            self._rent.add(uid)
        if course is not None and isinstance(course.release, Releasing):
            self._end.add(uid)
        self._follow.add(uid)

    def _is_forgotten(self, course: Course) -> bool:
        """Whether the store has lost what it knew of the machine: asked again, it is written down anew."""
        return course.claim_uid is not None and self._provisioning.view(course.claim_uid).state is None

    def kill(self, uid: str, message: str, grace_s: float | None = None) -> None:
        """A probe has found the workload dead: cut its run off, and do what its restartPolicy says.

        ``message`` is shown as how the run ended; ``grace_s`` is the probe's own grace, None: the Pod's. Of
        no effect while an earlier kill is under way.
        """
        course = self._courses.get(uid)
        if course is not None and course.care.killed is None:
            course.care.killed, course.care.killed_at = message, self._now()
            course.care.killed_grace_s = grace_s
            self._follow.add(uid)

    def pools_changed(self) -> None:
        """A pool has come or changed: try what failed for want of one."""
        for uid, course in self._courses.items():
            if course.problem is not None:
                self._rent.add(uid)

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._probes.run(), name=f"vnode-probes {self._node}")
            for queue, work, workers, name in (
                (self._follow, self._follow_one, FOLLOWERS, "follow"),
                (self._rent, self._rent_one, RENTERS, "rent"),
                (self._end, self._end_one, ENDERS, "end"),
                (self._care, self._care_one, CARERS, "care"),
            ):
                label = f"vnode-{name}"
                working = run_workers(queue, work, workers=workers, name=label, expected=(KubeError,))
                tasks.create_task(working, name=f"{label} {self._node}")

    def _queue(self) -> WorkQueue[str]:
        return WorkQueue(base_delay_s=self._settings.backoff_base_s, max_delay_s=self._settings.backoff_max_s)

    # --- what is true now ---

    def _pod(self, uid: str) -> Obj | None:
        """The newest sight of the Pod, if it is bound to this node: our own last write may be ahead."""
        held = self._pods.by_uid(uid) or self._foreign.by_uid(uid)
        if held is None or held["spec"].get("nodeName") != self._node:
            return None
        course = self._courses.get(uid)
        if course is not None and course.written is not None:
            if _version(course.written) > _version(held):
                return course.written
            course.written = None
        return held

    def _claims_of(self, pod: Obj) -> list[Obj]:
        """Every claim of this Pod's UID on this node's account."""
        return [
            claim
            for claim in self._claims.by_index(CLAIMS_BY_POD, pod["metadata"]["uid"])
            if (claim["spec"]["provider"], claim["spec"].get("account") or keys.DEFAULT_ACCOUNT) == self._key
        ]

    # --- follow ---

    async def _follow_one(self, uid: str) -> Again | None:
        pod = self._pod(uid)
        if pod is None:
            self._courses.pop(uid, None)
            self._probes.forget(uid)
            return None
        course = self._courses.get(uid)
        if course is None:
            course = self._courses[uid] = Course(seen_at=self._clock())
        claims = self._claims_of(pod)
        with structlog.contextvars.bound_contextvars(pod=name_of(pod), claim=_names(claims)):
            try:
                return await self._look(pod, course, claims)
            except Replaced:
                log.info("the Pod is gone")
            except Conflict:
                return Again(CONFLICT_S)
        return None

    async def _look(self, pod: Obj, course: Course, claims: list[Obj]) -> Again | None:
        if is_daemon(pod) and not claims:
            return await self._leave_alone(pod, course)
        serving = next((claim for claim in claims if not is_leaving(claim)), None)
        if claims and (course.claim_uid is None or serving is not None):
            course.serve(ClaimUid((serving or claims[0])["metadata"]["uid"]))
        if claims and not is_over(pod):
            await self._learn_to_hide(pod, course, serving or claims[0])
        if is_leaving(pod) or is_over(pod) or course.care.cut is not None:
            self._probes.forget(pod["metadata"]["uid"])
        if is_leaving(pod):
            return await self._let_go(pod, course, claims)
        if is_over(pod):
            return await self._after_the_end(pod, course, claims)
        left_s = self._runs.deadline(pod, course)
        if course.care.cut is not None:
            return await self._runs.cut(pod, course, course.care.cut)
        if serving is not None:
            return _sooner(await self._serve(pod, course, serving), left_s)
        if claims:
            return await self._lose(pod, course, deleted=claims[0]["metadata"]["name"])
        return await self._without_claim(pod, course)

    async def _learn_to_hide(self, pod: Obj, course: Course, claim: Obj) -> None:
        """Before words of the Pod's cloud are shown, know what must not be in them."""
        if course.hide is not None or course.claim_uid is None:
            return
        if has_words(self._provisioning.view(course.claim_uid).machine):
            for spec in _readable([claim]):
                course.hide = await hiding_again(self._kube, pod, claim, spec)

    async def _leave_alone(self, pod: Obj, course: Course) -> Again | None:
        """A DaemonSet's Pod: no machine, no status; only its deletion is confirmed, as nobody else would."""
        if is_leaving(pod):
            await self._delete(pod, course)
        return None

    async def _let_go(self, pod: Obj, course: Course, claims: list[Obj]) -> Again | None:
        """Deleted: let the workload end within its grace, give the machine back, then confirm."""
        if claims and not course.let_go:
            grace_s = restarts.grace_s(pod)
            since = datetime.fromisoformat(pod["metadata"]["deletionTimestamp"]) - timedelta(seconds=grace_s)
            return self._runs.end_gently(pod, course, since=since, grace_s=grace_s)
        if pod["metadata"].get("finalizers") and not is_over(pod):
            wanted = status.terminated(
                pod, self._runs.machine(course), stopped=course.care.stopped, now=self._now()
            )
            pod = await self._write(pod, course, wanted)
        await self._delete(pod, course)
        return None

    async def _after_the_end(self, pod: Obj, course: Course, claims: list[Obj]) -> Again | None:
        """Finished or failed: a machine that serves nobody goes at once; a Pod nobody could rent for, too."""
        if claims and course.release is None:
            self._end.add(pod["metadata"]["uid"])
        if claims and not course.let_go:
            return None
        refused = pod["status"].get("reason") == PodReason.PROVISION_FAILED
        if refused and is_replaced_by_owner(pod) and not course.deleted:
            log.info("reaping a Pod that could not be provisioned")
            await self._delete(pod, course)
        return None

    async def _serve(self, pod: Obj, course: Course, claim: Obj) -> Again | None:
        """A live Pod with its claim: rent, and show what is known."""
        uid = pod["metadata"]["uid"]
        try:
            spec = claim_spec(claim)
        except UnreadableClaim as error:
            return await self._hold(pod, course, str(error))
        if course.outcome is None:
            self._provisioning.adopt_status(spec)
            if not course.queued:
                course.queued = True
                self._rent.add(uid)
        view = self._provisioning.view(spec.uid)
        outcome, now = course.outcome, self._now()
        left_s: float | None = None
        if isinstance(outcome, Refused):
            await self._write(pod, course, status.provision_failed(pod, message=outcome.message, now=now))
            return None
        if course.unanswered and isinstance(outcome, Waiting):
            message = f"no answer from {spec.provider} whether a machine was rented: {outcome.message}"
            await self._write(pod, course, status.unanswered(pod, message=message, now=now))
            return None
        if isinstance(outcome, Over) or view.state in ("ending", "ended"):
            return await self._lose(pod, course)
        if view.ref is not None:
            view = replace(view, machine=shown(view.machine, course.hide))
            if view.machine is not None and (end := self._runs.end_of_run(pod, course, view)) is not None:
                self._probes.forget(uid)
                return await self._runs.after_a_run(pod, course, spec, view.machine, end)
            start = self._starts.look(pod, course, spec, view)
            if course.care.cut is not None:
                return await self._runs.cut(pod, course, course.care.cut)
            if start.held:
                return None
            left_s = start.left_s
            health = HEALTHY
            if (machine := status.up(view)) is not None:
                health = self._probes.follow(pod, machine)
                self._tell_of_edits(pod, course)
            else:
                self._probes.forget(uid)
            wanted = status.project(pod, view, health=health, now=now)
        elif has_started(pod):
            wanted = None  # it runs as far as anybody knows, and this process is still finding out
        elif course.problem is not None:
            return await self._hold(pod, course, str(course.problem), waiting=course.problem.waiting)
        elif isinstance(outcome, Waiting):
            wanted = status.provisioning(pod, message=retrying_message(outcome.message), now=now)
        else:
            wanted = status.provisioning(pod, message=PodMessage.ALLOCATING, now=now)
        if wanted is None:
            return _sooner(None, left_s)
        if status.patch(pod, wanted) is not None and (wait_s := self._quiet_s(pod, course, wanted)) > 0:
            return _sooner(Again(wait_s), left_s)
        before = is_running(pod)
        await self._write(pod, course, wanted)
        if wanted.reason is PodReason.RUNNING:
            course.care.loop = None
        if wanted.reason is PodReason.RUNNING and not before:
            made = datetime.fromisoformat(claim["metadata"]["creationTimestamp"])
            metrics.became_ready(spec, took_s=(now - made).total_seconds())
        return _sooner(None, left_s)

    async def _lose(self, pod: Obj, course: Course, *, deleted: str | None = None) -> Again | None:
        """The claim is in release, so the Pod must not run: it is over once the machine's end is accepted.

        ``deleted``: the name of a claim that somebody has deleted under the Pod.
        """
        if deleted is not None:
            self._tell_of_deletion(pod, course, deleted)
        if course.let_go:
            machine, now = self._runs.machine(course), self._now()
            wanted = status.terminated(pod, machine, now=now)
            if course.claim_deleted is not None:
                wanted = status.claim_deleted(pod, machine, claim=course.claim_deleted, now=now)
            await self._write(pod, course, wanted)
        elif course.release is None:
            self._end.add(pod["metadata"]["uid"])
        return None

    async def _care_one(self, uid: str) -> Again | None:
        pod, course = self._pod(uid), self._courses.get(uid)
        if pod is None or course is None or is_over(pod) or course.release is not None:
            return None
        claim = next(
            (one for one in self._claims_of(pod) if one["metadata"]["uid"] == course.claim_uid), None
        )
        specs = _readable([claim]) if claim is not None else []
        if not specs:
            return None
        if is_leaving(pod) or course.care.cut is not None:
            course.care.loop = None  # its last run is over
        with structlog.contextvars.bound_contextvars(
            pod=name_of(pod), claim=_names([claim] if claim else [])
        ):
            try:
                return await attend(
                    course.care,
                    specs[0],
                    keeper=self._provisioning.keep,
                    settings=self._settings,
                    now=self._now,
                    clock=self._clock,
                )
            finally:
                self._follow.add(uid)

    async def _without_claim(self, pod: Obj, course: Course) -> Again | None:
        """No claim names this Pod and this account: nothing may be rented, whatever the Pod says."""
        if (wait_s := course.seen_at + CLAIM_LAG_S - self._clock()) > 0:
            return Again(wait_s)
        uid, (provider, account) = pod["metadata"]["uid"], self._key
        others = self._claims.by_index(CLAIMS_BY_POD, uid)
        if has_started(pod) or (status.was_placed(pod) and not others):
            if await self._existing.answer(uid):
                return Again(CLAIM_LAG_S)
            # No claim of a living Pod goes but by a person's hand, who may have done it while nobody led.
            # Nobody makes another: a Pod that waited for one would wait for ever.
            gone = status.claim_deleted(
                pod, self._runs.machine(course), claim=course.claim_deleted or "", now=self._now()
            )
            await self._write(pod, course, gone)
            return None
        message = f"no NodeClaim for this Pod on {provider}/{account}: nothing is rented"
        if others:
            message += f" (NodeClaim {_names(others)} is for another provider or account)"
        return await self._hold(pod, course, message)

    async def _claims_exist(self, pod_uids: Collection[str]) -> dict[str, bool]:
        """Whether any claim names each Pod, by one live list for all: what follows cannot be undone."""
        exist = dict.fromkeys(pod_uids, False)
        async for page in self._kube.list_pages(paths.nodeclaims()):
            for item in page["items"]:
                if (uid := item["spec"]["podRef"]["uid"]) in exist:
                    exist[uid] = True
        return exist

    async def _hold(
        self, pod: Obj, course: Course, message: str, *, waiting: str = CONFIG_PROBLEM
    ) -> Again | None:
        if not has_started(pod):
            wanted = status.config_error(pod, message=message, waiting=waiting, now=self._now())
            await self._write(pod, course, wanted)
        return None

    def _quiet_s(self, pod: Obj, course: Course, wanted: Wanted) -> float:
        """How long a status that only says "not yet" may still wait for a better one."""
        if status.is_retrying(pod) and status.is_retry(wanted):
            return course.written_at + RETRY_TEXT_S - self._clock()
        if status.says_something(pod):
            return 0.0
        stats = self._rent.stats()
        burst_s = min(QUIET_MAX_S, BACKLOG_QUIET_S * (stats.depth + stats.active))
        if wanted.reason is PodReason.PROVISIONING:
            return course.seen_at + RENT_QUIET_S + burst_s - self._clock()
        if wanted.reason is PodReason.INITIALIZING:
            since = course.rented_at if course.rented_at is not None else course.seen_at
            return since + BOOT_QUIET_S + 2 * self._settings.list_busy_s + burst_s - self._clock()
        return 0.0

    # --- writes ---

    async def _write(self, pod: Obj, course: Course, wanted: Wanted) -> Obj:
        """Bring the status about; the Pod as it is then.

        Raises:
            Replaced: the Pod is gone, or another has its name. Conflict: it changed (terminal phases only).
        """
        body = status.patch(pod, wanted, host_ip=self._address())
        if body is None:
            return pod
        metadata = pod["metadata"]
        path = paths.pod_status(metadata["namespace"], metadata["name"])
        after = await self._kube.patch(path, body, kind="strategic")
        after["metadata"].pop("managedFields", None)
        course.written, course.written_at = after, self._clock()
        log.info("status", reason=wanted.reason, phase=wanted.status["phase"], message=wanted.message or None)
        self._tell(pod, wanted)
        return after

    async def _delete(self, pod: Obj, course: Course) -> None:
        """The last delete, sent until it is done: until only finalizers of others keep the object.

        A grace of 0 on the Pod says no more than that the API server began: it writes the grace, then removes
        the object, and whoever dies or hangs up in between (a client, too) leaves the Pod there for good.
        """
        metadata = pod["metadata"]
        if course.deleted or (metadata.get("finalizers") and metadata.get("deletionGracePeriodSeconds") == 0):
            return
        await self._kube.delete(
            paths.pod(metadata["namespace"], metadata["name"]),
            uid=metadata["uid"],
            grace_s=0,
            resource_version=metadata["resourceVersion"],
        )
        course.deleted = True
        log.info("the Pod is let go")

    def _tell(self, pod: Obj, wanted: Wanted) -> None:
        """Events for what people must act on or wait for; a Pod whose machine boots at once causes none."""
        reason, message = wanted.reason, wanted.message
        match reason:
            case PodReason.INITIALIZING:
                self._events.note(pod, type="Normal", reason=PodEvent.PROVISIONED, message=message)
            case PodReason.PROVISIONING if message != PodMessage.ALLOCATING:
                self._events.note(pod, type="Warning", reason=PodEvent.PROVISION_RETRYING, message=message)
            case (
                PodReason.CONFIG_ERROR
                | PodReason.PROVISION_FAILED
                | PodReason.FAILED
                | PodReason.PREEMPTED
                | PodReason.TERMINATED
            ) if not is_leaving(pod):
                self._events.note(pod, type="Warning", reason=reason.value, message=message)

    def _tell_of_deletion(self, pod: Obj, course: Course, claim: str) -> None:
        """At once: its machine may take a while to go."""
        if course.claim_deleted is None:
            message = f"NodeClaim {claim} was deleted: its machine is given back, and the Pod is over then"
            self._events.note(pod, type="Warning", reason=PodEvent.CLAIM_DELETED, message=message)
        course.claim_deleted = claim

    def _unhealthy(self, uid: str, message: str) -> None:
        if (pod := self._pod(uid)) is not None:
            self._events.note(pod, type="Warning", reason=PodEvent.UNHEALTHY, message=message)

    def _tell_of_edits(self, pod: Obj, course: Course) -> None:
        """Once for each edit: a node would run the new image, a rented machine goes on with the old one."""
        wanted, held = pod["spec"]["containers"][0]["image"], restarts.container_of(pod).get("image")
        if held and wanted != held and "running" in (restarts.container_of(pod).get("state") or {}):
            if course.edited_to != wanted:
                message = f"image {wanted} is not used: this Pod's machine runs {held}; replace the Pod"
                self._events.note(pod, type="Warning", reason=PodEvent.IMAGE_CHANGE_IGNORED, message=message)
            course.edited_to = wanted

    def _listed(self, judged: Judged) -> None:
        """A whole list of our account: the way to the cloud is open, whatever its machines do."""
        if judged.unknown is None and (judged.place.provider, judged.place.account) == self._key:
            self._probes.heard()

    def _note(self, pod: Obj, course: Course, notes: tuple[Note, ...]) -> None:
        """Each once a process: the same order is made up again for every try."""
        for note in notes:
            if note not in course.noted:
                self._events.note(pod, type="Warning", reason=note.reason, message=note.message)
        course.noted |= frozenset(notes)

    # --- rent ---

    async def _rent_one(self, uid: str) -> Again | None:
        pod, course = self._pod(uid), self._courses.get(uid)
        if pod is None or course is None or is_over(pod) or is_leaving(pod):
            return None
        claim = next((claim for claim in self._claims_of(pod) if not is_leaving(claim)), None)
        if claim is None or course.claim_uid != claim["metadata"]["uid"]:
            course.queued = False
            self._follow.add(uid)
            return None
        if course.unanswered or isinstance(course.outcome, Rented | Refused | Over):
            return None
        with structlog.contextvars.bound_contextvars(pod=name_of(pod), claim=claim["metadata"]["name"]):
            try:
                return await self._ensure(pod, course, claim)
            finally:
                self._follow.add(uid)

    def _block_ttl_s(self, pool: str) -> float:
        """How long a place is passed over, by what the pool says now."""
        jitter_s = self._rng.uniform(0.0, self._settings.block_jitter_s)
        try:
            ttl_s = pool_of(self._pools.get("", pool), pool).spec.failover.blocklist_ttl.total_seconds()
        except Unusable:
            ttl_s = DEFAULT_TTL_S
        return ttl_s + jitter_s

    async def _ensure(self, pod: Obj, course: Course, claim: Obj) -> Again | None:
        spec, settings = claim_spec(claim), self._settings
        try:
            pool = pool_of(self._pools.get("", spec.pool), spec.pool)
        except Unusable as error:
            if spec.instance is not None:  # rented already: what could not be asked for again goes on
                course.outcome = Rented(ref=spec.instance)
                return None
            course.problem = error
            return Again(settings.backoff_max_s)
        policy = policy_of(pool, pod, jitter_s=self._rng.uniform(0.0, settings.block_jitter_s))
        port = WatchedPort(self._door, clock=self._clock)
        order: Order | None = None
        problem: Unusable | None = None
        outcome: Outcome | None = None
        if spec.instance is not None:  # rented already: nothing that it was rented with matters any more
            outcome = await self._provisioning.ensure(spec, None, port=port, policy=policy)
        if outcome is None or _needs_workload(outcome):
            try:
                order = await order_of(self._kube, pod, claim, spec)
            except Unusable as error:
                problem = error
            # Without an order, too: an earlier call's request may still have to be found.
            workload = order.workload if order is not None else None
            outcome = await self._provisioning.ensure(spec, workload, port=port, policy=policy)
        if port.marked_at is not None:
            metrics.attempted(spec, outcome, took_s=self._clock() - port.marked_at)
        if course.claim_uid != spec.uid:
            return None
        course.outcome = outcome
        if order is not None:
            course.hide = hiding(order.workload)
            self._note(pod, course, order.notes)
        if problem is not None and _needs_workload(outcome):
            course.problem = problem
            wait_s = settings.backoff_base_s * 2.0 ** min(course.problems, 16)
            course.problems += 1
            return Again(min(wait_s, settings.backoff_max_s, PROBLEM_RETRY_MAX_S))
        course.problem, course.problems = None, 0
        match outcome:
            case Rented():
                course.rented_at = self._clock()
            case Waiting():
                course.unanswered = outcome.why is Why.UNKNOWN and outcome.for_s >= max(
                    pool.spec.failover.unknown_timeout.total_seconds(), settings.unknown_timeout_floor_s
                )
                return None if course.unanswered else Again(outcome.after_s)
        return None

    # --- end ---

    async def _end_one(self, uid: str) -> Again | None:
        pod, course = self._pod(uid), self._courses.get(uid)
        if pod is None or course is None or isinstance(course.release, Released):
            return None
        claims = self._claims_of(pod)
        with structlog.contextvars.bound_contextvars(pod=name_of(pod), claim=_names(claims)):
            try:
                return await self._release(pod, course, claims)
            finally:
                self._follow.add(uid)

    async def _release(self, pod: Obj, course: Course, claims: list[Obj]) -> Again | None:
        """Release every claim of the Pod here; the one that is furthest from its end counts."""
        cut = course.care.cut
        reason = POD_DELETED if is_leaving(pod) else "pod over" if is_over(pod) else "claim in release"
        if cut is not None and not is_leaving(pod):
            reason = str(cut.message)
        pending: list[Releasing] = []
        readable = _readable(claims)
        if len(readable) < len(claims):  # whatever it has rented is there still
            message = "a claim of it cannot be read by this version"
            retry_s = self._settings.backoff_max_s
            pending.append(Releasing(accepted=False, why=Why.RETRY, message=message, after_s=retry_s))
        for spec in readable:
            release = await self._provisioning.release(spec, port=self._door, reason=reason)
            if isinstance(release, Releasing):
                pending.append(release)
        if not pending:
            course.release, course.troubles = Released(), 0
            return None
        slowest = min(pending, key=lambda each: each.accepted)
        course.release = slowest
        course.troubles = 0 if slowest.accepted else course.troubles + 1
        if course.troubles >= TROUBLE_AFTER:
            text = f"the machine is not given back yet, and will be: {slowest.message}"
            self._events.note(pod, type="Warning", reason=PodEvent.TERMINATE_RETRYING, message=text)
        return Again(min(each.after_s for each in pending))


def _sooner(again: Again | None, left_s: float | None) -> Again | None:
    """The earlier of two moments to look again."""
    if left_s is None:
        return again
    return Again(left_s if again is None else min(left_s, again.after_s))


def _needs_workload(outcome: Outcome) -> bool:
    """Whether nothing stands in the way of a request but that nobody said what to run."""
    return isinstance(outcome, Waiting) and outcome.why is Why.NO_WORKLOAD


def _readable(claims: list[Obj]) -> list[ClaimSpec]:
    """Those that this version can read. The others keep their finalizer, so no machine is forgotten."""
    specs = []
    for claim in claims:
        try:
            specs.append(claim_spec(claim))
        except UnreadableClaim as error:
            log.error("claim not readable", error=str(error))
    return specs


def _version(obj: Obj) -> int:
    """The resourceVersion as a number, which the API server lets compare within one kind; 0 if it is none."""
    text = obj["metadata"]["resourceVersion"]
    return int(text) if text.isdecimal() else 0


def _names(claims: list[Obj]) -> str:
    return ",".join(claim["metadata"]["name"] for claim in claims)
