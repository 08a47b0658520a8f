"""Pods that cannot be placed now: each is recorded, counted, told why, and waits for what could help it."""

from collections.abc import Callable
from datetime import datetime

import structlog

from app.api.reasons import DeferralReason, PlacedReason, PoolEvent, SkipReason
from app.kube.cache import Cache
from app.kube.client import Obj
from app.kube.patches import timestamp
from app.kube.queue import Again
from app.placement import explain, metrics
from app.placement.desk import Desk, MayNotPlace
from app.placement.objects import uid_of
from app.placement.rank import Place, Skip
from app.placement.request import pool_name
from app.placement.telling import Events, Teller
from app.placement.waiting import Key, Mark, Wait, Waiting, offset_s
from app.settings import Settings
from app.store.backoffs import Backoff
from app.store.decisions import Decision

log = structlog.get_logger()
BUDGET_RETRY_S = 15.0

_CONDITION_REASONS = {
    DeferralReason.NO_POOL: PlacedReason.NO_POOL,
    DeferralReason.INVALID_REQUEST: PlacedReason.INVALID_REQUEST,
    DeferralReason.ALL_BLOCKED: PlacedReason.ALL_BLOCKED,
    DeferralReason.NO_CANDIDATE: PlacedReason.NO_CANDIDATE,
    DeferralReason.STALE_CLAIM: PlacedReason.STALE_CLAIM,
    DeferralReason.OWNER_BACKOFF: PlacedReason.OWNER_BACKOFF,
}


class Deferrals:
    """``wake``: look at these Pods again. ``rests``: no candidate of the Pod is left for now."""

    def __init__(
        self,
        *,
        desk: Desk,
        teller: Teller,
        pools: Cache,
        settings: Settings,
        events: Events,
        wake: Callable[[list[Key]], None],
        rests: Callable[[Key], None],
    ) -> None:
        self._desk, self._teller, self._pools, self._settings = desk, teller, pools, settings
        self._events, self._wake, self._rests = events, wake, rests
        self.waiting = Waiting()
        self._looked: dict[Key, Mark] = {}  # the Pods under a look, and what had changed when it began
        self._held: dict[Key, str] = {}  # UIDs of Pods that met a time when nothing may be placed

    def clear(self) -> None:
        """A new term: nobody waits yet."""
        self.waiting = Waiting()
        self._held.clear()

    def begin(self, key: Key) -> None:
        """A look at the Pod begins."""
        self._looked[key] = self.waiting.mark

    def end(self, key: Key) -> None:
        self._looked.pop(key, None)

    def forget(self, key: Key) -> None:
        """The Pod waits for nothing any more."""
        self.waiting.drop(key)
        self._held.pop(key, None)

    def decided(self, key: Key) -> None:
        """Pods may be placed again."""
        self._held.pop(key, None)

    # --- why a Pod waits ------------------------------------------------------------------------

    async def for_older(self, key: Key, pod: Obj, claim: Obj) -> Again | None:
        """A Pod of the same name, or what it rented, is not gone yet."""
        why = f"claim {claim['metadata']['name']} of an earlier Pod of this name is not released yet"
        return await self.for_claim(key, pod, why)

    async def for_claim(self, key: Key, pod: Obj, why: str) -> Again | None:
        name = pool_name(pod)
        known = name if name and self._pools.get("", name) else None
        await self.without_places(key, pod, DeferralReason.STALE_CLAIM, why, pool=known)
        return Again(self._settings.stale_retry_s)

    async def for_places(
        self, key: Key, pod: Obj, pool: str, places: list[Place], *, database_now: datetime
    ) -> Again | None:
        """None of its pool's places can be tried; the decision is on record already."""
        reason = explain.deferral_of(places)
        skips = [place for place in places if isinstance(place, Skip)]
        # Ids below 0 are no rows: what only this Pod avoids, which no person can clear.
        blocks = {row: skip.until for skip in skips if skip.until for row in skip.blocks if row > 0}
        met = frozenset(skip.reason for skip in skips)
        self._tell_pool(pool, skips)
        await self._tell(key, pod, reason, explain.sentence(places), pool=pool, blocks=blocks, met=met)
        end = explain.soonest_expiry(places)
        if end is None:  # a budget has room again when its period is over, which nobody tells
            return Again(BUDGET_RETRY_S) if SkipReason.BUDGET in met else None
        spread_s = offset_s(uid_of(pod), spread_s=self._settings.retry_offset_s)
        return Again((end - database_now).total_seconds() + spread_s)

    async def for_owner(
        self, key: Key, pod: Obj, pool: str, wait: Backoff, *, database_now: datetime
    ) -> Again | None:
        """A loop buys no machines: its owner's Pods wait, each longer than the one before."""
        await self._tell(key, pod, DeferralReason.OWNER_BACKOFF, owner_waits(wait), pool=pool)
        return Again(max(0.05, (wait.until - database_now).total_seconds()))

    async def without_places(
        self, key: Key, pod: Obj, reason: DeferralReason, why: str, *, pool: str | None = None
    ) -> Again | None:
        """Leave the Pod gated for a reason that only a change of something else can end."""
        row = decision_without_places(key, pod, reason, why, pool=pool)
        try:
            await self._desk.look(lambda seen: (None, row))
        except MayNotPlace as error:
            log.debug("deferral not recorded", error=str(error))
        await self._tell(key, pod, reason, why, pool=pool)
        return None

    async def hold(self, key: Key, pod: Obj, why: str) -> Again:
        """Nothing may be placed now, whatever the Pod asks for. It is told if that lasts: a new leader's
        first moments, or a dropped connection, are no news."""
        self.waiting.drop(key)
        log.debug("placement waits", why=why)
        if key not in self._held:
            self._held[key] = uid_of(pod)
            return Again(min(self._settings.backoff_base_s, self._settings.stale_retry_s))
        await self._teller.say(
            key, pod, placed=False, reason=PlacedReason.ON_HOLD, message=f"nothing is placed now: {why}"
        )
        return Again(self._settings.stale_retry_s)

    def _tell_pool(self, pool: str, skips: list[Skip]) -> None:
        """A limit that is reached is news to whoever has set it."""
        stored = self._pools.get("", pool)
        over = next((skip for skip in skips if skip.reason is SkipReason.LIMIT), None)
        if stored is not None and over is not None:
            message = f"a Pod waits for the pool's limit: {over.detail}"
            self._events.note(stored, type="Warning", reason=PoolEvent.LIMIT_REACHED, message=message)

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
        self._rests(key)
        wait = Wait(reason=reason, blocks=blocks or {}, pool=pool, met=met)
        if self.waiting.put(key, wait, since=self._looked.pop(key, Mark())):
            self._wake([key])
        await self._teller.say(key, pod, placed=False, reason=_CONDITION_REASONS[reason], message=why)


def decision_without_places(
    key: Key, pod: Obj, reason: DeferralReason, why: str, *, pool: str | None
) -> Decision:
    """The row for a look that came to no candidates."""
    return Decision(
        pod_namespace=key[0],
        pod_name=key[1],
        pod_uid=uid_of(pod),
        pool=pool,
        outcome=reason.value,
        message=why,
    )


def owner_waits(wait: Backoff) -> str:
    """Until when an owner's Pods wait, and why, for people."""
    return (
        f"nothing is rented for its owner before {timestamp(wait.until)}: {wait.message}"
        f" ({wait.failures} in a row)"
    )
