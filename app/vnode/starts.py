"""Machines whose workload never came to run: broken at the start, booting for ever, or without their image.

Each costs money, and the next machine of the same offer would do the same, so what failed is put on record
before the Pod is told to be over: the place (the host alone, where the cloud names one) is passed over for
the pool's time, and where the workload itself may be the cause its owner's next Pod waits, longer after each
failure. Whoever dies in between finds the same machine again and writes the same. A machine that is only not
heard of is never given up: its deadline counts up to the newest list that showed it booting. Nor is one that
came up while its lateness was put on record. A new leader counts from its own first look.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from app.api.reasons import PodMessage, PodReason, never_started_message
from app.inventory.rounds import AccountKey
from app.kube.client import Obj
from app.provisioning.keep import FalseStart
from app.provisioning.model import ClaimSpec, View
from app.provisioning.service import Provisioning
from app.settings import Settings
from app.store.backoffs import Failure
from app.vnode import restarts
from app.vnode.care import Cut
from app.vnode.course import Course, name_of
from app.vnode.status import NEVER_STARTED, has_started
from app.workload.owners import controller_of
from providers.base import EndReason, Machine, MachineState


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """``held``: it is put on record first; look again then. ``left_s``: until one that boots is late."""

    held: bool = False
    left_s: float | None = None


class Starts:
    """One node's. ``care`` queues a Pod's UID for its calls; ``block_ttl_s`` is a pool's time, by name."""

    def __init__(
        self,
        *,
        key: AccountKey,
        provisioning: Provisioning,
        settings: Settings,
        care: Callable[[str], None],
        block_ttl_s: Callable[[str], float],
        now: Callable[[], datetime],
        clock: Callable[[], float],
    ) -> None:
        self._key, self._provisioning, self._settings = key, provisioning, settings
        self._care, self._block_ttl_s, self._now, self._clock = care, block_ttl_s, now, clock

    def look(self, pod: Obj, course: Course, spec: ClaimSpec, view: View) -> Look:
        """Whether the machine came to nothing at its start. One that is late is cut off once it is noted."""
        care, machine = course.care, view.machine
        if machine is None or view.gone:
            return Look()
        noted = care.start is not None and care.start.late and care.start_noted and care.cut is None
        if noted and machine.state is not MachineState.BOOTING:  # it came up, or ended, at the last moment
            care.start, care.start_noted, care.booting_since = None, False, None
        if care.start is not None:
            if care.start_noted and care.start.late and care.cut is None:
                care.cut = Cut(
                    reason=PodReason.FAILED,
                    message=care.start.message,
                    since=self._now(),
                    grace_s=0.0,
                    disrupted=NEVER_STARTED,
                )
            return Look(held=not care.start_noted)
        if machine.end is not None:
            if _came_to_nothing(machine, short_s=self._settings.restart_reset_s):
                return self._note(pod, course, spec, machine, machine.end.message or PodMessage.FAILED.value)
            return Look()
        if machine.state is not MachineState.BOOTING or has_started(pod):
            care.booting_since = None
            return Look()
        deadline_s = self._provisioning.keep.boot_deadline_s(self._key)
        if deadline_s is None:
            return Look()
        if care.booting_since is None:
            care.booting_since = self._clock()
        known = self._provisioning.inventory.known(machine.ref)
        if known is not None and known.shown_at - care.booting_since >= deadline_s:
            return self._note(pod, course, spec, machine, never_started_message(deadline_s))
        left_s = care.booting_since + deadline_s - self._clock()
        return Look(left_s=max(left_s, self._settings.list_busy_s))

    def _note(self, pod: Obj, course: Course, spec: ClaimSpec, machine: Machine, message: str) -> Look:
        image, late, owner = machine.end is not None and machine.end.image, machine.end is None, None
        if image or late:  # any other place might do the same with this workload
            owner = controller_of(pod)
        course.care.start = FalseStart(
            claim=spec,
            host=machine.host,
            message=message,
            late=late,
            blocks=not image,
            block_ttl_s=self._block_ttl_s(spec.pool),
            failure=None
            if owner is None
            else Failure(
                owner_uid=owner["uid"],
                claim_uid=spec.uid,
                message=f"{name_of(pod)} never ran: {message}",
                ran_s=0.0,
            ),
        )
        self._care(pod["metadata"]["uid"])
        return Look(held=True)


def _came_to_nothing(machine: Machine, *, short_s: float) -> bool:
    """Whether it ended before much work could have come of it, and not by the workload's own doing."""
    end = machine.end
    if end is None or end.exit_code is not None:
        return False
    return end.image or (end.reason is EndReason.FAILED and restarts.ran_s(machine, end) < short_s)
