"""What a Pod's status should say, from what is known of its machine. Pure; the time is passed in.

Invariants: a phase that is over is never left; a code that the cloud did not tell is never shown as 0; times
are the cloud's where it tells them, else the moment of the look; what nobody can know (no answer, no list
yet) changes nothing. ``qosClass`` and conditions of other types are never named, so never touched.
"""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from app.api import keys
from app.api.reasons import PodEvent, PodMessage, PodReason, claim_deleted_message
from app.kube.client import Obj
from app.kube.patches import POD_STATUS_KEYS, condition, diff, pod_status, timestamp, whole_list
from app.provisioning.model import View
from app.vnode.containers import (
    LOST_CODE,
    LOST_REASON,
    code_of,
    container_statuses,
    own_end_state,
    terminated_state,
)
from app.vnode.probes import HEALTHY, Health
from app.vnode.restarts import BY_ITSELF
from providers.base import End, EndReason, Machine, MachineState

DISRUPTED = "DisruptionTarget"  # Jobs may be told not to count such an end
CRASH_LOOP = "CrashLoopBackOff"
PULL_PROBLEM = "ErrImagePull"
RESTARTING = "the workload has ended, and is started again on its machine"
CLAIM_DELETED = PodEvent.CLAIM_DELETED.value  # reason of `DISRUPTED` when a person took the machine away
NEVER_STARTED = "NeverStarted"  # reason of `DISRUPTED` when the machine did not start in its time
UNANSWERED = "ProvisionUnknown"  # reason of `DISRUPTED` when the cloud never said whether it rented


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A status to bring about. ``final``: its phase is terminal, so it is written under a resourceVersion."""

    reason: PodReason | None
    message: str
    status: Mapping[str, Any]
    annotations: Mapping[str, str] = field(default_factory=dict)
    final: bool = False


def is_over(pod: Obj) -> bool:
    """Whether the phase is one that no Pod comes back from."""
    return _status(pod).get("phase") in ("Succeeded", "Failed")


def is_leaving(pod: Obj) -> bool:
    """Whether somebody has asked for the Pod's deletion."""
    return "deletionTimestamp" in pod["metadata"]


def is_running(pod: Obj) -> bool:
    return _status(pod).get("phase") == "Running"


def has_started(pod: Obj) -> bool:
    """Whether a machine was once reported for it, so that a missing one means an end, not a beginning."""
    annotations = pod["metadata"].get("annotations") or {}
    return is_running(pod) or keys.INSTANCE_ID_ANNOTATION in annotations


def was_placed(pod: Obj) -> bool:
    """Whether placement has lifted its gate, so that it had a claim then. Admission clears the annotation."""
    return keys.CAPACITY_TYPE_ANNOTATION in (pod["metadata"].get("annotations") or {})


def says_something(pod: Obj) -> bool:
    """Whether we have written a reason already: then the next one need not wait."""
    return bool(_status(pod).get("reason"))


def is_retrying(pod: Obj) -> bool:
    """Whether it says already that renting did not work out yet."""
    held = _status(pod)
    message = held.get("message") or PodMessage.ALLOCATING
    return held.get("reason") == PodReason.PROVISIONING and message != PodMessage.ALLOCATING


def is_retry(wanted: Wanted) -> bool:
    return wanted.reason is PodReason.PROVISIONING and wanted.message != PodMessage.ALLOCATING


def up(view: View) -> Machine | None:
    """The machine, while it is known to run."""
    machine = view.machine
    return machine if machine and machine.state is MachineState.RUNNING and not view.gone else None


def project(pod: Obj, view: View, *, health: Health = HEALTHY, now: datetime) -> Wanted | None:
    """The status of a Pod whose machine is recorded; None when what is known changes nothing.

    ``health`` is what its probes say while it runs.
    """
    machine = view.machine
    if (reachable := up(view)) is not None:
        return running(pod, reachable, health=health, now=now)
    if machine is not None and (machine.state is MachineState.EXITED or machine.end is not None):
        return ended(pod, machine, now=now)
    if view.gone:
        return ended(pod, None, now=now)
    if is_running(pod) or (machine is not None and machine.state is MachineState.GONE):
        return None  # not shown to this process yet, or not proven: unknown is never absent
    if not view.reserved or (machine is not None and machine.state is MachineState.QUEUED):
        return provisioning(pod, message=PodMessage.ALLOCATING, now=now)
    return initializing(pod, now=now)


def provisioning(pod: Obj, *, message: str, now: datetime) -> Wanted:
    return _pending(pod, PodReason.PROVISIONING, message, now=now)


def initializing(pod: Obj, *, now: datetime) -> Wanted:
    return _pending(pod, PodReason.INITIALIZING, PodMessage.INITIALIZING, now=now)


def config_error(pod: Obj, *, message: str, waiting: str, now: datetime) -> Wanted:
    """Something the Pod needs cannot be read or done; nothing was asked of any cloud.

    ``waiting`` is the container's reason, in a kubelet's own words, which tools know.
    """
    return _pending(pod, PodReason.CONFIG_ERROR, message, now=now, waiting=waiting)


def running(pod: Obj, machine: Machine, *, health: Health = HEALTHY, now: datetime) -> Wanted:
    """Reachable: Ready where no probe objects, with id and endpoint in the same request.

    A known endpoint is not taken back.
    """
    since = timestamp(machine.started_at or now)
    annotations = {keys.INSTANCE_ID_ANNOTATION: str(machine.ref.resource_id)}
    if machine.endpoint:
        annotations[keys.ENDPOINT_ANNOTATION] = machine.endpoint

    def state(before: Obj) -> Obj:
        held = before.get("running", {}).get("startedAt") if machine.started_at is None else None
        return {"running": {"startedAt": held or since}}

    status = _of(
        pod,
        phase="Running",
        reason=PodReason.RUNNING,
        message=PodMessage.RUNNING,
        now=now,
        containers=container_statuses(pod, state=state, up=True, health=health, machine=machine),
        conditions={
            "PodReadyToStartContainers": ("True", ""),
            "Initialized": ("True", ""),
            **_readiness(pod, health),
        },
    )
    if address := _literal_ip(machine.endpoint):
        status |= {"podIP": address, "podIPs": [{"ip": address}]}
    return Wanted(
        reason=PodReason.RUNNING, message=PodMessage.RUNNING, status=status, annotations=annotations
    )


def ended(pod: Obj, machine: Machine | None, *, now: datetime) -> Wanted:
    """The end as the cloud tells it. ``machine`` None: it is gone, and nobody knows why."""
    end = machine.end if machine is not None and machine.end is not None else End(reason=EndReason.UNKNOWN)
    by_itself = end.reason in BY_ITSELF
    if end.image:
        message = end.message or "the image could not be pulled"
        return _never_ran(pod, PodReason.FAILED, message, now=now, waiting=PULL_PROBLEM)
    if by_itself and end.exit_code is not None:
        return _exited(pod, machine, end, end.exit_code, now=now)
    match end.reason:
        case EndReason.PREEMPTED:
            reason, message = PodReason.PREEMPTED, _told("the provider took the spot machine back", end)
        case EndReason.FAILED:
            reason, message = PodReason.FAILED, _told(PodMessage.FAILED, end)
        case EndReason.LIFETIME:
            reason, message = PodReason.TERMINATED, _told("the provider's longest lifetime was reached", end)
        case _ if machine is None:
            reason, message = PodReason.TERMINATED, PodMessage.GONE.value
        case _:
            reason, message = PodReason.TERMINATED, _told(PodMessage.TERMINATED, end)
    # Somebody's request ended it: the code then tells how it took that, not whether its work was done.
    code = None if end.exit_code == 0 else end.exit_code
    disrupted = reason if end.reason is EndReason.PREEMPTED else None
    return _failed(pod, reason, message, now=now, machine=machine, code=code, at=end.at, disrupted=disrupted)


def between(pod: Obj, machine: Machine, end: End, *, wait_s: float, another: bool, now: datetime) -> Wanted:
    """A run is over, and the next begins on the same machine in ``wait_s``: the Pod itself stays Running.

    ``another``: the last run that the status tells of is not this one, and was followed by it.
    """
    terminated = own_end_state(machine, end, now=now)
    back_off = {"reason": CRASH_LOOP, "message": f"back-off {wait_s:g}s restarting failed container"}
    containers = container_statuses(pod, state=terminated, machine=machine, another=another)
    if wait_s > 0:
        for container in containers:
            container["lastState"], container["state"] = container["state"], {"waiting": back_off}
    status = _of(
        pod,
        phase="Running",
        reason=PodReason.RUNNING,
        message=RESTARTING,
        now=now,
        containers=containers,
        conditions={
            "PodReadyToStartContainers": ("True", ""),
            "Initialized": ("True", ""),
            **{
                kind: said
                for kind, said in _not_ready(pod, "ContainersNotReady").items()
                if kind in ("ContainersReady", "Ready")
            },
        },
    )
    return Wanted(reason=PodReason.RUNNING, message=RESTARTING, status=status)


def cut_off(
    pod: Obj,
    machine: Machine | None,
    *,
    reason: PodReason,
    message: str,
    disrupted: str | None = None,
    now: datetime,
) -> Wanted:
    """We ended it before its work was done: past its deadline, found dead by a probe, or never started."""
    if not has_started(pod) and (machine is None or machine.started_at is None):
        return _never_ran(pod, reason, message, now=now, disrupted=disrupted)
    code, at = code_of(machine)
    return _failed(
        pod, reason, message, now=now, machine=machine, code=code or None, at=at, disrupted=disrupted
    )


def provision_failed(pod: Obj, *, message: str, now: datetime) -> Wanted:
    """Refused: no container ever ran, so none is shown as ended."""
    return _never_ran(pod, PodReason.PROVISION_FAILED, message, now=now)


def unanswered(pod: Obj, *, message: str, now: datetime) -> Wanted:
    """Nobody knows whether a machine was rented, and that for too long: the workload moves on."""
    return _never_ran(pod, PodReason.FAILED, message, now=now, disrupted=UNANSWERED)


def claim_deleted(pod: Obj, machine: Machine | None, *, claim: str, now: datetime) -> Wanted:
    """Somebody has deleted its claim: as an eviction, by a person and not by the cloud."""
    code, at = code_of(machine)
    if (
        machine is not None
        and machine.end is not None
        and machine.end.reason in BY_ITSELF
        and code is not None
    ):
        return ended(pod, machine, now=now)
    return _failed(
        pod,
        PodReason.TERMINATED,
        claim_deleted_message(claim),
        now=now,
        machine=machine,
        code=code or None,
        at=at,
        disrupted=CLAIM_DELETED,
    )


def terminated(pod: Obj, machine: Machine | None, *, stopped: bool = False, now: datetime) -> Wanted:
    """We ended the machine, or never rented one. An end of its own that came first counts instead.

    ``stopped``: the workload was asked to stop, so that a code is its own answer to that, as on a node.
    """
    code, at = code_of(machine)
    if machine is not None and machine.end is not None and code is not None:
        if machine.end.reason in BY_ITSELF:
            return ended(pod, machine, now=now)
        if stopped and code == 0:
            return _exited(pod, machine, machine.end, code, now=now)
    return _failed(
        pod, PodReason.TERMINATED, PodMessage.TERMINATED, now=now, machine=machine, code=code or None, at=at
    )


def patch(pod: Obj, wanted: Wanted, *, host_ip: str | None = None) -> Obj | None:
    """The strategic merge patch that brings ``wanted`` about for exactly this Pod; None: it is so already.

    ``host_ip``: the node's address, None while it has none. It travels with a write that is due, and is never
    worth one: it changes with every leader, and would then cost a write for each running Pod.
    """
    if is_over(pod):
        return None  # the first terminal reason stays
    current = _status(pod)
    status = diff(current, wanted.status, keyed=POD_STATUS_KEYS) or {}
    if "podIPs" in status and current.get("podIPs"):
        status["podIPs"] = whole_list(status["podIPs"])
    held = pod["metadata"].get("annotations") or {}
    annotations = {key: value for key, value in wanted.annotations.items() if held.get(key) != value}
    if not status and not annotations:
        return None
    if (address := _literal_ip(host_ip)) and current.get("hostIP") != address:
        status["hostIP"] = address
        status["hostIPs"] = [{"ip": address}]
        if current.get("hostIPs"):
            status["hostIPs"] = whole_list(status["hostIPs"])
    version = pod["metadata"]["resourceVersion"] if wanted.final else None
    return pod_status(
        pod["metadata"]["uid"], status, annotations=annotations or None, resource_version=version
    )


# --- parts ---


def _pending(
    pod: Obj, reason: PodReason, message: str, *, now: datetime, waiting: str | None = None
) -> Wanted:
    state = {"waiting": {"reason": waiting or reason.value, "message": message}}
    status = _of(
        pod,
        phase="Pending",
        reason=reason,
        message=message,
        now=now,
        containers=container_statuses(pod, state=lambda _: state),
        conditions=_not_ready(pod, "ContainersNotReady"),
    )
    return Wanted(reason=reason, message=message, status=status)


def _exited(pod: Obj, machine: Machine | None, end: End, code: int, *, now: datetime) -> Wanted:
    if code != 0:
        message = _told(f"the workload ended with exit code {code}", end)
        return _failed(pod, PodReason.FAILED, message, now=now, machine=machine, code=code, at=end.at)
    state = terminated_state(machine, code=0, reason="Completed", message=end.message, at=end.at or now)
    status = _of(
        pod,
        phase="Succeeded",
        reason=None,
        message="",
        now=now,
        containers=container_statuses(pod, state=state, machine=machine),
        conditions=_not_ready(pod, "PodCompleted"),
    )
    return Wanted(reason=None, message="", status=status, annotations=_id_of(machine), final=True)


def _failed(
    pod: Obj,
    reason: PodReason,
    message: str,
    *,
    now: datetime,
    machine: Machine | None,
    code: int | None,
    at: datetime | None,
    disrupted: str | None = None,
) -> Wanted:
    message = str(message)
    known = code is not None
    state = terminated_state(
        machine,
        code=code if code is not None else LOST_CODE,
        reason="Error" if known else LOST_REASON,
        message=message,
        at=at or now,
    )
    conditions = _not_ready(pod, "PodFailed")
    if disrupted is not None:
        conditions[DISRUPTED] = ("True", disrupted, message)
    status = _of(
        pod,
        phase="Failed",
        reason=reason,
        message=message,
        now=now,
        containers=container_statuses(pod, state=state, machine=machine),
        conditions=conditions,
    )
    return Wanted(reason=reason, message=message, status=status, annotations=_id_of(machine), final=True)


def _never_ran(
    pod: Obj,
    reason: PodReason,
    message: str,
    *,
    now: datetime,
    disrupted: str | None = None,
    waiting: str | None = None,
) -> Wanted:
    state = {"waiting": {"reason": waiting or reason.value, "message": message}}
    conditions = _not_ready(pod, "PodFailed")
    if disrupted is not None:
        conditions[DISRUPTED] = ("True", disrupted, message)
    status = _of(
        pod,
        phase="Failed",
        reason=reason,
        message=message,
        now=now,
        containers=container_statuses(pod, state=lambda _: state),
        conditions=conditions,
    )
    return Wanted(reason=reason, message=message, status=status, final=True)


_Condition = tuple[str, str] | tuple[str, str, str]
"""Status, reason and, where there is one, message."""


def _of(
    pod: Obj,
    *,
    phase: str,
    reason: PodReason | None,
    message: str,
    now: datetime,
    containers: list[Obj],
    conditions: Mapping[str, _Condition],
) -> Obj:
    generation = pod["metadata"].get("generation")
    held = _status(pod)
    list_: list[Obj] = held.get("conditions") or []
    for type_, (status, why, *text) in conditions.items():
        list_ = condition(
            list_,
            type=type_,
            status=status,
            reason=why,
            message=text[0] if text else "",
            now=now,
            observed_generation=generation,
        )
    ours = [each for each in list_ if each["type"] in conditions]
    status_: Obj = {
        "phase": phase,
        "reason": reason.value if reason else None,
        "message": str(message) or None,
        "startTime": held.get("startTime") or timestamp(now),
        "conditions": ours,
        "containerStatuses": containers,
    }
    if generation is not None:
        status_["observedGeneration"] = generation
    return status_


def _not_ready(pod: Obj, why: str) -> dict[str, _Condition]:
    names = ", ".join(container["name"] for container in pod["spec"]["containers"])
    message = f"containers with unready status: [{names}]" if why == "ContainersNotReady" else ""
    return {
        "PodReadyToStartContainers": ("False", ""),
        "Initialized": ("True", "PodCompleted" if why == "PodCompleted" else ""),
        "ContainersReady": ("False", why, message),
        "Ready": ("False", why, message),
    }


def _readiness(pod: Obj, health: Health) -> dict[str, _Condition]:
    """Ready follows the containers first, and then the gates that others open."""
    if not health.ready:
        not_ready = _not_ready(pod, "ContainersNotReady")
        return {kind: not_ready[kind] for kind in ("ContainersReady", "Ready")}
    return {"ContainersReady": ("True", ""), "Ready": _gates(pod)}


def _gates(pod: Obj) -> _Condition:
    held = {each["type"]: each["status"] for each in _status(pod).get("conditions") or ()}
    missing = []
    for gate in (each["conditionType"] for each in pod["spec"].get("readinessGates") or ()):
        if gate not in held:
            missing.append(f'corresponding condition of pod readiness gate "{gate}" does not exist.')
        elif held[gate] != "True":
            missing.append(f'the status of pod readiness gate "{gate}" is not "True", but {held[gate]}')
    return ("False", "ReadinessGatesNotReady", ", ".join(missing)) if missing else ("True", "")


def _id_of(machine: Machine | None) -> dict[str, str]:
    return {keys.INSTANCE_ID_ANNOTATION: str(machine.ref.resource_id)} if machine is not None else {}


def _told(what: str, end: End) -> str:
    return f"{what}: {end.message}" if end.message else str(what)


def _literal_ip(endpoint: str | None) -> str | None:
    """The endpoint if it is a bare address: a name in podIP makes the server refuse the whole patch."""
    try:
        return str(ipaddress.ip_address(endpoint or ""))
    except ValueError:
        return None


def _status(pod: Obj) -> Obj:
    return pod.get("status") or {}
