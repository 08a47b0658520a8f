"""The runs of one Pod's workload on its machine, and how its work comes to an end: what to do, and when.

Nothing here asks a cloud: what is to be asked is noted in the Pod's `Care`, and its queue is told.
"""

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta

from app.api.reasons import PodEvent, PodMessage, PodReason
from app.inventory.rounds import AccountKey
from app.kube.client import Obj
from app.kube.events import Recorder
from app.kube.queue import Again
from app.provisioning.model import ClaimSpec, View
from app.provisioning.service import Provisioning
from app.settings import Settings
from app.store.backoffs import Failure
from app.vnode import restarts, status
from app.vnode.care import Cut, Loop
from app.vnode.course import Course, name_of
from app.vnode.status import Wanted
from app.vnode.words import shown
from app.workload.owners import controller_of
from providers.base import End, Machine, MachineState

CUT_OFF_BEFORE = "the workload was to be cut off before its controller was started again"


class Runs:
    """One node's. ``write`` brings a status about; ``care`` and ``end`` queue a Pod's UID for its calls."""

    def __init__(
        self,
        *,
        key: AccountKey,
        provisioning: Provisioning,
        settings: Settings,
        events: Recorder,
        write: Callable[[Obj, Course, Wanted], Awaitable[Obj]],
        care: Callable[[str], None],
        end: Callable[[str], None],
        now: Callable[[], datetime],
        clock: Callable[[], float],
    ) -> None:
        self._key, self._provisioning, self._settings, self._events = key, provisioning, settings, events
        self._write, self._care, self._end = write, care, end
        self._now, self._clock = now, clock

    def machine(self, course: Course) -> Machine | None:
        """The Pod's machine as last shown, with its cloud's words as they may be shown."""
        held = self._provisioning.view(course.claim_uid).machine if course.claim_uid else None
        return shown(held, course.hide)

    def end_of_run(self, pod: Obj, course: Course, view: View) -> End | None:
        """How a run ended that another may follow; None while it goes on, and where its end is the Pod's."""
        machine, care = view.machine, course.care
        if machine is None or view.gone:
            return None
        if (own := restarts.own_end(machine)) is not None:
            return own if restarts.wants_restart(pod, own) else None
        if machine.state is not MachineState.RUNNING:
            return None
        if care.loop is not None and machine.started_at is not None:
            if care.loop.run == machine.started_at:
                return care.loop.end  # an old sight, or a run that is only being cut off
        elif care.loop is None and care.killed is None and machine.started_at is not None:
            container = restarts.container_of(pod)
            if restarts.tells_of(container, machine):  # a former leader meant to cut it off
                care.killed, care.killed_at = CUT_OFF_BEFORE, self._now()
        return restarts.killed(care.killed, now=care.killed_at or self._now()) if care.killed else None

    async def after_a_run(
        self, pod: Obj, course: Course, spec: ClaimSpec, machine: Machine, end: End
    ) -> Again | None:
        """The workload has ended, or is to: start it again on its machine, or else that was the last run."""
        able, care, settings = self._provisioning.keep.restarts(self._key), course.care, self._settings
        if able is None:
            return Again(settings.backoff_max_s)  # unknown changes nothing
        if not able or care.unable or not restarts.wants_restart(pod, end):
            return await self._after_the_last_run(pod, course, spec, machine, end)
        loop, clock = care.loop, self._clock()
        if loop is None or loop.run != machine.started_at:
            container = restarts.container_of(pod)
            another = loop is not None or not restarts.tells_of(container, machine)
            crashes = container.get("restartCount", 0) if care.crashes is None else care.crashes
            if restarts.ran_s(machine, end) >= settings.restart_reset_s:
                crashes = 0
            wait_s = restarts.wait_s(crashes, base_s=settings.restart_base_s, max_s=settings.restart_max_s)
            waited_s = 0.0
            if care.crashes is None and end.at is not None:  # a former leader may have waited for some of it
                waited_s = max(0.0, (self._now() - end.at).total_seconds())
            loop = care.loop = Loop(
                run=machine.started_at,
                end=end,
                wait_s=wait_s,
                due_at=clock + max(0.0, wait_s - waited_s),
                told=not another,
            )
            care.crashes = crashes + 1
        if not loop.told:
            another = restarts.between_runs(restarts.container_of(pod))
            wanted = status.between(
                pod, machine, loop.end, wait_s=loop.wait_s, another=another, now=self._now()
            )
            pod = await self._write(pod, course, wanted)
            loop.told = True
            if loop.wait_s > 0:
                self._events.note(pod, type="Warning", reason=PodEvent.BACK_OFF, message=status.RESTARTING)
        if loop.asked:
            return None
        if (left_s := loop.due_at - clock) > 0:
            return Again(left_s)
        self._care(pod["metadata"]["uid"])
        return None

    async def _after_the_last_run(
        self, pod: Obj, course: Course, spec: ClaimSpec, machine: Machine, end: End
    ) -> Again | None:
        """No further run on this machine. An owner that would have had one waits for its next machine."""
        care, owner = course.care, controller_of(pod)
        if restarts.wants_restart(pod, end) and owner is not None and not care.counted:
            code = "an unknown code" if end.exit_code is None else f"code {end.exit_code}"
            care.failure = Failure(
                owner_uid=owner["uid"],
                claim_uid=spec.uid,
                message=f"{name_of(pod)} ended with {code}",
                ran_s=restarts.ran_s(machine, end),
            )
            self._care(pod["metadata"]["uid"])
            return None
        if care.killed is None:
            await self._write(pod, course, status.ended(pod, machine, now=self._now()))
            return None
        since = care.killed_at or self._now()
        care.cut = Cut(reason=PodReason.FAILED, message=care.killed, since=since, grace_s=care.killed_grace_s)
        return await self.cut(pod, course, care.cut)

    def deadline(self, pod: Obj, course: Course) -> float | None:
        """Seconds until ``activeDeadlineSeconds`` is over; once it is, the Pod's work is cut off."""
        deadline, machine = restarts.deadline_of(pod), self.machine(course)
        if deadline is None or course.care.cut is not None:
            return None
        left_s = (deadline - self._now()).total_seconds()
        own = restarts.own_end(machine)
        if left_s <= 0 and (own is None or restarts.wants_restart(pod, own)):
            course.care.cut = Cut(
                reason=PodReason.DEADLINE_EXCEEDED, message=PodMessage.DEADLINE, since=deadline
            )
        return max(0.05, left_s)

    async def cut(self, pod: Obj, course: Course, cut: Cut) -> Again | None:
        """End the Pod's work within its grace, and say so once the machine's end is accepted."""
        if not course.let_go:
            grace_s = restarts.grace_s(pod) if cut.grace_s is None else cut.grace_s
            return self.end_gently(pod, course, since=cut.since, grace_s=grace_s)
        wanted = status.cut_off(
            pod,
            self.machine(course),
            reason=cut.reason,
            message=cut.message,
            disrupted=cut.disrupted,
            now=self._now(),
        )
        await self._write(pod, course, wanted)
        return None

    def end_gently(self, pod: Obj, course: Course, *, since: datetime, grace_s: float) -> Again | None:
        """Release the machine, but not while a workload that can hear of its end may still use its grace.

        What the hook does, and its sleep, is a part of the grace. A grace that got shorter meanwhile is told
        to the cloud, too.
        """
        uid, care, machine = pod["metadata"]["uid"], course.care, self.machine(course)
        if course.release is not None:
            return None
        stop_by = since + timedelta(seconds=grace_s)
        now = self._now()
        left_s = min(grace_s, (stop_by - now).total_seconds())
        up = machine is not None and machine.state is MachineState.RUNNING
        hook = restarts.hook_of(pod)
        if hook and up and left_s > 0 and not care.hook_done:
            care.hook, care.hook_by = hook, stop_by
            self._care(uid)
            return Again(left_s)
        if care.hook_trouble is not None:
            self._events.note(pod, type="Warning", reason="FailedPreStopHook", message=care.hook_trouble)
            care.hook_trouble = None
        if left_s <= 0 or not up or care.stop_useless or not self._provisioning.keep.stops(self._key):
            self._end(uid)
            return None
        sleep_left_s = (since + timedelta(seconds=restarts.sleep_s(pod)) - now).total_seconds()
        if sleep_left_s > 0:
            return Again(min(sleep_left_s, left_s))
        if care.stop_by is None or stop_by < care.stop_by:
            care.stop_by, care.stop_told = stop_by, False
        if not care.stop_told:
            self._care(uid)
        return Again(left_s)
