"""Releases: each claim that must give its machine back, again and again until it has; then its finalizer.

The finalizer goes strictly after `Released`. Each provider account has workers of its own, so that a cloud
that hangs keeps only its own claims waiting.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

import structlog

from app.api.keys import CLAIM_FINALIZER
from app.api.reasons import ClaimPhase, ClaimReason
from app.claims import metrics
from app.claims.projection import Finding
from app.claims.telling import Telling
from app.claims.track import Track, Tracks, leaving
from app.kube import paths
from app.kube.claims import UnreadableClaim, claim_spec
from app.kube.client import Kube, Obj
from app.kube.errors import KubeError, Replaced
from app.kube.events import Recorder
from app.kube.patches import without_finalizer
from app.kube.queue import Again, WorkQueue, run_workers
from app.provisioning.model import ClaimPort, ClaimSpec, Release, Released, Releasing, Why
from app.provisioning.steps import reach
from app.settings import Settings
from providers.base import ClaimUid

log = structlog.get_logger()
WORKERS = 32  # of one account: its call budget is what really limits them
AccountKey = tuple[str, str]


class Releaser(Protocol):
    """What is needed of `app.provisioning.service.Provisioning`."""

    async def release(self, claim: ClaimSpec, *, port: ClaimPort, reason: str) -> Release: ...
    def forget(self, uid: ClaimUid) -> None: ...


class Releases:
    """``changed`` is called with the UID of a claim whose status may have something new to show."""

    def __init__(
        self,
        *,
        kube: Kube,
        provisioning: Releaser,
        port: ClaimPort,
        tracks: Tracks,
        settings: Settings,
        events: Recorder,
        telling: Telling,
        changed: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._kube, self._provisioning, self._port, self._tracks = kube, provisioning, port, tracks
        self._settings, self._events, self._changed, self._clock = settings, events, changed, clock
        self._telling = telling
        self._configured = {entry.key for entry in settings.providers}
        self._queues: dict[AccountKey, WorkQueue[str]] = {}
        self._tasks: asyncio.TaskGroup | None = None

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Work in this group until it is cancelled."""
        self._tasks = tasks

    def add(self, uid: str, key: AccountKey) -> None:
        """Release this claim, of that account, as soon as a worker is free."""
        queue = self._queues.get(key)
        if queue is None:
            assert self._tasks is not None, "not started"
            settings = self._settings
            queue = WorkQueue(base_delay_s=settings.backoff_base_s, max_delay_s=settings.backoff_max_s)
            self._queues[key] = queue
            work = run_workers(
                queue, self._release, workers=WORKERS, name=f"release-{key[0]}", expected=(KubeError,)
            )
            self._tasks.create_task(work, name=f"release-{key[0]}-{key[1]}")
        queue.add(uid)

    async def _release(self, uid: str) -> Again | None:
        obj = self._tracks.newest(uid)
        if obj is None:
            return None
        track = self._tracks.of(uid, now=self._clock())
        if track.let_go or not (leaving(obj) or track.finished):
            return None
        try:
            spec = claim_spec(obj)
        except UnreadableClaim:
            return None  # said where its status is made
        with structlog.contextvars.bound_contextvars(
            claim=spec.name, claim_uid=uid, pod=f"{spec.pod_namespace}/{spec.pod_name}"
        ):
            release = await self._provisioning.release(spec, port=self._port, reason=track.reason)
            self._judge(obj, spec, track, release)
            if isinstance(release, Releasing):
                return Again(release.after_s)
            assert isinstance(release, Released)
            if not track.released and (obj.get("status") or {}).get("phase") != ClaimPhase.TERMINATED:
                self._telling.released(obj, reason=track.reason)
            track.released = True
            if leaving(obj):
                await self._let_go(obj, track)
            self._changed(uid)
            return None

    def _judge(self, obj: Obj, spec: ClaimSpec, track: Track, release: Release) -> None:
        """Whether only a person can help: the machine's account is in nobody's configuration, or not ours, or
        what may be its machine may as well be somebody's copy.
        """
        finding = None
        if isinstance(release, Released):
            pass
        elif release.why is Why.NO_ACCOUNT and spec.key not in self._configured:
            finding = Finding(
                reason=ClaimReason.PROVIDER_NOT_CONFIGURED,
                message=f"provider {spec.provider} (account {spec.account}) is not configured any more: its"
                " machine can neither be ended nor shown to be gone; configure it again, and the claim goes",
            )
        elif release.why is Why.WRONG_ACCOUNT:
            finding = Finding(
                reason=ClaimReason.PROVIDER_NOT_CONFIGURED,
                message=f"{release.message}: it can neither be ended nor shown to be gone; give"
                f" {spec.provider} that account's credential again, and the claim goes",
            )
        elif release.why is Why.UNKNOWN:
            finding = Finding(
                reason=ClaimReason.MACHINE_IN_DOUBT,
                message=f"{release.message}, and the claim goes; until then it may cost money",
            )
        if finding == track.finding:
            return
        if finding is not None:
            why = finding.message
            log.error("a claim cannot be released", provider=spec.provider, account=spec.account, why=why)
            self._events.note(obj, type="Warning", reason=finding.reason, message=why)
            if track.finding is None:
                metrics.KEPT.labels(spec.provider).inc()
        elif track.finding is not None:
            metrics.KEPT.labels(spec.provider).dec()
        track.finding = finding
        self._changed(spec.uid)

    async def _let_go(self, obj: Obj, track: Track) -> None:
        """Take the finalizer off: what follows `Released`, and nothing else does."""
        uid, name = ClaimUid(obj["metadata"]["uid"]), obj["metadata"]["name"]
        ops = without_finalizer(obj, CLAIM_FINALIZER)
        if ops is not None:
            reach("finalizer.before")
            try:
                await self._kube.patch(paths.nodeclaim(name), ops, kind="json", metadata_only=True)
            except Replaced:
                log.debug("the claim is gone already")
            reach("finalizer.after")
            log.info("claim released")
        track.let_go = True
        self._provisioning.forget(uid)
