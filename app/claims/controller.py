"""NodeClaims and CloudPodBindings: their status, how long a claim lives, and its release.

The status is a projection of what provisioning knows of the rental, never of the Pod's annotations; the mark
(``attempt``) is not ours. A claim lives as long as its Pod, by UID; that the Pod is gone is believed of a
live GET only, because a DELETED event may merely mean that a label was taken off: a Pod that runs loses
nothing by that, but one that is still gated is placed by nobody any more, and its machine would wait for
ever. Nothing is written that is so already, and what lasts only for a moment is not written at all: writes
are the budget (design section 14).
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any

import structlog

from app.api import keys
from app.api.reasons import ClaimReason
from app.claims import metrics
from app.claims.pools import Pools
from app.claims.projection import Sight, binding_status, claim_status, committed, machine_over
from app.claims.release import Releases
from app.claims.telling import Telling, why_lost
from app.claims.track import Shown, Track, Tracks, leaving, newer
from app.kube import paths
from app.kube.cache import Cache
from app.kube.claims import ClaimDoor, UnreadableClaim, claim_spec, forget
from app.kube.client import Kube, Obj
from app.kube.errors import KubeError, Replaced
from app.kube.events import Recorder
from app.kube.patches import status_ops
from app.kube.queue import Again, WorkQueue, run_workers
from app.provisioning.model import ClaimSpec, View
from app.provisioning.service import Provisioning
from app.settings import Settings
from providers.base import ClaimUid

log = structlog.get_logger()
WORKERS = 32
LINGER_S = 1.0  # an ending that takes less is not worth a write: the objects go anyway
BACKLOG_S, LINGER_MAX_S = 0.1, 30.0  # more for each claim that ends at the same time: they only take longer
# How long Bound waits for two whole lists that began after the create: what they show is in the same write.
SIGHT_MAX_S = 15.0

_BY_POD = "claims: pod uid"
_BY_OWNER = "claims: owner uid"
_TERMINAL = ("Succeeded", "Failed")


class Claims:
    """The controller of one term; the caches are the caller's to run. ``pods`` holds the opted-in Pods."""

    def __init__(
        self,
        *,
        kube: Kube,
        claims: Cache,
        bindings: Cache,
        pods: Cache,
        pools: Cache,
        provisioning: Provisioning,
        accounts_names: Callable[[], frozenset[str]],
        settings: Settings,
        events: Recorder,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """``accounts_names``: the configured providers. ``clock`` is monotonic, ``now`` dates conditions."""
        self._kube = kube.room("claims")
        self._claims, self._bindings, self._pods = claims, bindings, pods
        self._provisioning, self._settings, self._events = provisioning, settings, events
        self._clock, self._now = clock, now
        self._running = False
        self._ending: set[str] = set()  # claims that will be gone soon
        self._queue: WorkQueue[str] = WorkQueue(
            base_delay_s=settings.backoff_base_s, max_delay_s=settings.backoff_max_s
        )
        self._tracks = Tracks(claims)
        self._telling = Telling(events=events, pools=pools)
        self._releases = Releases(
            kube=self._kube,
            provisioning=provisioning,
            port=ClaimDoor(self._kube),
            tracks=self._tracks,
            settings=settings,
            events=events,
            telling=self._telling,
            changed=self._wake,
            clock=clock,
        )
        self._pools = Pools(
            kube=self._kube,
            pools=pools,
            claims=claims,
            provider_names=accounts_names,
            settings=settings,
            events=events,
            clock=clock,
            now=now,
        )
        claims.add_index(_BY_POD, lambda claim: [claim["spec"]["podRef"]["uid"]])
        bindings.add_index(_BY_OWNER, _owners)
        claims.on_change(self._claim_changed)
        bindings.on_change(self._binding_changed)
        pods.on_change(self._pod_changed)
        provisioning.on_change(self._wake)

    async def run(self) -> None:
        """Work until cancelled. Begins, when the caches are synced, with a look at every claim and pool."""
        for cache in (self._claims, self._bindings, self._pods):
            await cache.synced()
        self._running = True
        metrics.begin(self._claims)
        try:
            async with asyncio.TaskGroup() as tasks:
                self._releases.start(tasks)
                for claim in self._claims:
                    self._wake(claim["metadata"]["uid"])
                work = run_workers(
                    self._queue, self._reconcile, workers=WORKERS, name="claims", expected=(KubeError,)
                )
                tasks.create_task(work, name="claims-workers")
                tasks.create_task(self._pools.run(), name="pools")
        finally:
            self._running = False
            metrics.clear()

    # --- what wakes a claim ---------------------------------------------------------------------

    def _wake(self, uid: str) -> None:
        if self._running:
            self._queue.add(uid)

    def _claim_changed(self, old: Obj | None, new: Obj | None) -> None:
        if self._running:
            metrics.changed(old, new)
        if new is not None:
            self._wake(new["metadata"]["uid"])
        elif old is not None:
            self._gone(old)

    def _gone(self, claim: Obj) -> None:
        """The object is no more. Whatever machine it may have left, provisioning finds by its rows."""
        uid = claim["metadata"]["uid"]
        track = self._tracks.drop(uid)
        self._ending.discard(uid)
        if track is not None and track.finding is not None:
            metrics.KEPT.labels(claim["spec"]["provider"]).dec()
        self._provisioning.forget(ClaimUid(uid))
        forget(uid)

    def _binding_changed(self, old: Obj | None, new: Obj | None) -> None:
        for uid in _owners(new) if new is not None else ():
            self._wake(uid)

    def _pod_changed(self, old: Obj | None, new: Obj | None) -> None:
        if old is not None and new is not None and _life(old) == _life(new):
            return
        pod = new if new is not None else old
        if pod is not None:
            for claim in self._claims.by_index(_BY_POD, pod["metadata"]["uid"]):
                if new is None and self._running:
                    track = self._tracks.of(claim["metadata"]["uid"], now=self._clock())
                    track.pod_gone = track.pod_gone or _was_let_go(pod)
                self._wake(claim["metadata"]["uid"])

    # --- one look at one claim ------------------------------------------------------------------

    async def _reconcile(self, uid: str) -> Again | None:
        claim = self._tracks.newest(uid)
        if claim is None:
            return None
        track = self._tracks.of(uid, now=self._clock())
        if track.let_go:
            return None
        name = claim["metadata"]["name"]
        with structlog.contextvars.bound_contextvars(claim=name, claim_uid=uid):
            try:
                spec = claim_spec(claim)
            except UnreadableClaim as error:
                message = f"{error}; it keeps its finalizer until it can be read"[:1000]
                log.error("unreadable claim", error=str(error)[:512])
                self._events.note(claim, type="Warning", reason=ClaimReason.UNREADABLE, message=message)
                return None
            with structlog.contextvars.bound_contextvars(pod=f"{spec.pod_namespace}/{spec.pod_name}"):
                return await self._look(claim, spec, track)

    async def _look(self, claim: Obj, spec: ClaimSpec, track: Track) -> Again | None:
        if spec.instance is not None:
            self._provisioning.adopt_status(spec)
        waits: list[float] = []
        pod: Obj | None = None
        if not leaving(claim):
            pod = await self._pod(spec, track, waits)
            if pod is None:
                wait_s = self._grace_left_s(claim, track)
                if wait_s <= 0:
                    left = await self._delete(claim, spec, track)
                    if left is None:
                        return None
                    claim = left
                else:
                    waits.append(wait_s)
        finished = pod is not None and _phase(pod) in _TERMINAL
        if finished and pod is not None and not track.finished:
            track.finished, track.reason = True, f"pod {_phase(pod).lower()}"
        view = self._provisioning.view(spec.uid)
        asked = leaving(claim) or (pod is not None and leaving(pod))
        self._tell(claim, spec, track, view, asked=asked)
        if leaving(claim) or (finished and view.state != "ended"):
            self._releases.add(spec.uid, spec.key)
        ending = asked or finished
        if ending and not finished:  # finished ones stay, and hold nobody up
            self._ending.add(spec.uid)
        track.leaving_since = self._since(track.leaving_since, ending or view.state in ("ending", "ended"))
        track.over_since = self._since(track.over_since, machine_over(view))
        lasting = self._lasts(track.leaving_since, waits)
        sight = Sight(
            view=view,
            shown=self._shown(claim, view, track, waits, leaving=lasting),
            leaving=lasting,
            over=self._lasts(track.over_since, waits),
            finding=track.finding,
        )
        await self._show(claim, spec, track, sight)
        return Again(min(waits)) if waits else None

    async def _pod(self, spec: ClaimSpec, track: Track, waits: list[float]) -> Obj | None:
        """The Pod that the claim serves; None when the server says that there is none with its UID.

        Nor does it serve one that is gated and opted out. One that has left the watch after its last grace
        was over is gone without asking; any other may only have lost its label.
        """
        if track.pod_gone:
            return None
        pod = self._pods.get(spec.pod_namespace, spec.pod_name)
        if pod is None or pod["metadata"]["uid"] != spec.pod_uid:
            pod = await self._kube.find(paths.pod(spec.pod_namespace, spec.pod_name))
            if pod is None or pod["metadata"]["uid"] != spec.pod_uid:
                return None
            if _waits_in_vain(pod):
                track.pod_seen = True
                return None
            # It lives, and no watch of ours shows it (any more): its end will not be told either.
            waits.append(self._settings.stale_retry_s)
        track.pod_seen = True
        return pod

    def _grace_left_s(self, claim: Obj, track: Track) -> float:
        """How long a claim without its Pod may stay: a claim whose Pod was ever seen, not at all."""
        if track.pod_seen or (claim.get("status") or {}).get("phase"):
            return 0.0
        return track.first_seen + self._settings.first_seen_grace_s - self._clock()

    async def _delete(self, claim: Obj, spec: ClaimSpec, track: Track) -> Obj | None:
        """Delete the claim, its Pod being gone; the claim as it lives on, None if it does not."""
        track.reason = "pod gone"
        try:
            answer = await self._kube.delete(paths.nodeclaim(spec.name), uid=spec.uid)
        except Replaced:
            return None
        log.info("claim deleted: its pod is gone, or opted out before it was placed")
        if answer.get("kind") != claim.get("kind"):
            return None  # without a finalizer it went at once
        track.claim = answer
        return answer

    def _shown(self, claim: Obj, view: View, track: Track, waits: list[float], *, leaving: bool) -> bool:
        """Whether the recorded machine is shown now, or in a moment, with its address in the same write."""
        if view.ref is None or view.state is None:
            return False
        if leaving or (claim.get("status") or {}).get("instanceID"):
            return True
        if view.state != "live":
            return False  # it goes before anybody has seen it
        if view.machine is not None or not committed(view):
            return True
        inventory = self._provisioning.inventory
        if track.rented_since is None:
            track.rented_since = inventory.now()
        since, busy_s = track.rented_since, self._settings.list_busy_s
        place = inventory.place((view.ref.provider, view.ref.account), view.ref.region)
        if place is None or inventory.two_complete(place, first_after=since, later_after=since) is not None:
            return True
        left_s = since + max(SIGHT_MAX_S, 2.5 * busy_s) - inventory.now()
        if left_s > 0:
            waits.append(min(left_s, busy_s))
        return left_s <= 0

    def _since(self, before: float | None, now: bool) -> float | None:
        """Since when something has been so, None while it is not."""
        return (self._clock() if before is None else before) if now else None

    def _lasts(self, since: float | None, waits: list[float]) -> bool:
        """Whether an ending has lasted so long that people should see it."""
        if since is None:
            return False
        linger_s = min(LINGER_MAX_S, LINGER_S + BACKLOG_S * len(self._ending))
        left_s = since + linger_s - self._clock()
        if left_s > 0:
            waits.append(left_s)
        return left_s <= 0

    # --- what is written ------------------------------------------------------------------------

    def _tell(self, claim: Obj, spec: ClaimSpec, track: Track, view: View, *, asked: bool) -> None:
        """Events of what its status does not show, or only for a moment. ``asked``: its end is wanted here,
        and a workload that stops on request ends the machine before anything is released.
        """
        if view.refusal is not None and view.refusal != track.refusal:
            track.refusal = view.refusal
            self._telling.refused(claim, spec, view.refusal)
        if not asked and not track.lost and (why := why_lost(view)) is not None:
            track.lost = True
            self._telling.lost(claim, spec, view, why)

    async def _show(self, claim: Obj, spec: ClaimSpec, track: Track, sight: Sight) -> None:
        bindings = self._bindings.by_index(_BY_OWNER, spec.uid)
        # Most looks of a burst find what the last one has found: by the profile, comparing again took 2 %.
        if track.shown is not None and track.shown.covers(claim, bindings, sight):
            return
        wanted = claim_status(claim, spec, sight, now=self._now())
        if (ops := status_ops(claim, wanted)) is not None:
            try:
                track.claim = await self._patch(paths.nodeclaim_status(spec.name), ops)
            except Replaced as error:  # another claim has the name, or none
                log.info("claim status not written", why=error.message)
                return
            log.info("claim status", phase=wanted["phase"])
            if "instanceID" in wanted and not (claim.get("status") or {}).get("instanceID"):
                self._telling.rented(claim, spec, sight.view)
        for binding in bindings:
            held = newer(binding, track.binding)
            if held is binding:
                track.binding = None
            said = binding_status(held, wanted["phase"], sight, now=self._now())
            if (ops := status_ops(held, said)) is None:
                continue
            metadata = binding["metadata"]
            path = paths.cloudpodbinding_status(metadata["namespace"], metadata["name"])
            try:
                track.binding = await self._patch(path, ops)
            except Replaced:
                log.debug("the binding is gone")
        track.shown = Shown(claim, tuple(bindings), sight)

    async def _patch(self, path: str, ops: list[Obj]) -> Obj:
        return await self._kube.patch(path, ops, kind="json")


def _owners(obj: Obj) -> Iterable[str]:
    return [owner["uid"] for owner in obj["metadata"].get("ownerReferences") or ()]


def _waits_in_vain(pod: Obj) -> bool:
    """Whether our gate is on it, and the label is not that would make somebody lift it."""
    gates = (gate["name"] for gate in pod["spec"].get("schedulingGates") or ())
    return (
        keys.SCHEDULING_GATE in gates
        and (pod["metadata"].get("labels") or {}).get(keys.ENABLED_LABEL) != keys.ENABLED
    )


def _was_let_go(pod: Obj) -> bool:
    """Whether this was the Pod's last state: a deletion without grace or finalizer is never taken back."""
    metadata = pod["metadata"]
    return leaving(pod) and metadata.get("deletionGracePeriodSeconds") == 0 and not metadata.get("finalizers")


def _phase(pod: Obj) -> str:
    return (pod.get("status") or {}).get("phase") or ""


def _life(pod: Obj) -> tuple[Any, ...]:
    """What of a Pod matters here."""
    return pod["metadata"]["uid"], leaving(pod), _phase(pod) in _TERMINAL
