"""What one Pod's workload is asked while its machine runs: to stop, to start again. A queue of its own.

A call may hang as long as its cloud does, and delays nothing but itself. Nothing here writes to the Pod: the
caller looks at `Care` again and decides.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

import structlog

from app.api.reasons import PodReason
from app.kube.queue import Again
from app.provisioning.keep import FalseStart, Keeper, Kept
from app.provisioning.model import ClaimSpec
from app.settings import Settings
from app.store.backoffs import Failure
from providers.base import End

log = structlog.get_logger()
LOOK_AGAIN_S = 5.0  # beside some rounds of the list: a restart that shows nowhere by then is asked for again


@dataclass(slots=True)
class Loop:
    """The end of one run that another is to follow. ``run``: when that one began, by the cloud's clock.

    ``due_at`` is monotonic. ``told``: the Pod's status says it. ``asked``: the cloud has taken the restart.
    """

    run: datetime | None
    end: End
    wait_s: float
    due_at: float
    told: bool = False
    asked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """We end the Pod's work, from ``since`` on, and this is what its status will say.

    ``grace_s``: the grace of whatever ends it; None: the Pod's own. ``disrupted``: the reason of a condition
    ``DisruptionTarget``, for an end that is not the workload's doing.
    """

    reason: PodReason
    message: str
    since: datetime
    grace_s: float | None = None
    disrupted: str | None = None


@dataclass(slots=True)
class Care:
    """What this process knows of one Pod's runs.

    ``crashes``: runs in a row that ended soon, None before the first is seen. ``stop_by``: the end of the
    grace that the workload was told of, or is to be.
    """

    loop: Loop | None = None
    crashes: int | None = None
    unable: bool = False  # to be started again on this machine
    killed: str | None = None  # why its run is to be cut off
    killed_at: datetime | None = None
    killed_grace_s: float | None = None  # the probe's own grace, if it has one
    counted: bool = False  # its end, for its owner's wait
    failure: Failure | None = None
    booting_since: float | None = None  # monotonic, of this process's looks
    start: FalseStart | None = None  # its machine came to nothing
    start_noted: bool = False  # and that is on record
    hook: tuple[str, ...] = ()  # to be run before the workload is asked to stop
    hook_by: datetime | None = None
    hook_done: bool = False
    hook_trouble: str | None = None
    stop_by: datetime | None = None
    stop_told: bool = False
    stop_useless: bool = False
    cut: Cut | None = None

    @property
    def stopped(self) -> bool:
        """Whether the workload heard that it was to stop, so that its code is its own answer."""
        return self.stop_by is not None and self.stop_told


async def attend(
    care: Care,
    spec: ClaimSpec,
    *,
    keeper: Keeper,
    settings: Settings,
    now: Callable[[], datetime],
    clock: Callable[[], float],
) -> Again | None:
    """Make the call that is due, if any; `Again` until it is made. Called too early, it asks nothing."""
    if care.failure is not None and not care.counted:
        await keeper.note(care.failure)
        care.counted = True
    if care.start is not None and not care.start_noted:
        await keeper.note_start(care.start)
        care.start_noted = True
    if care.hook and care.hook_by is not None and not care.hook_done:
        left_s = (care.hook_by - now()).total_seconds()
        if left_s > 0:
            care.hook_trouble = await keeper.hook(spec, care.hook, within_s=left_s)
        care.hook_done = True
        return None
    if care.stop_by is not None and not care.stop_told and not care.stop_useless:
        left_s = (care.stop_by - now()).total_seconds()
        if left_s <= 0:
            return None
        stop_by = care.stop_by
        match await keeper.stop(spec, grace_s=max(1, math.ceil(left_s))):
            case Kept.ASKED:
                care.stop_told = care.stop_by == stop_by  # it may have got shorter meanwhile
            case Kept.UNABLE:
                care.stop_useless = True
            case Kept.AGAIN:
                return Again(settings.backoff_base_s)
        return None if care.stop_told or care.stop_useless else Again(0.0)
    loop = care.loop
    if loop is not None and loop.told and loop.due_at <= clock() and not care.unable:
        match await keeper.restart(spec, running=care.killed is not None):
            case Kept.ASKED:
                loop.asked, care.killed = True, None
                return Again(LOOK_AGAIN_S + 4 * settings.list_busy_s)
            case Kept.UNABLE:
                care.unable = True
            case Kept.AGAIN:
                return Again(settings.backoff_base_s)
    return None
