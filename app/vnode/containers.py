"""What a Pod's status says of its container, from what is known of its machine. Pure; the time is passed in.

A state is a function of the state before it: when a run began is known from there where the cloud is silent.
"""

from datetime import datetime
from typing import Any

from app.kube.client import Obj
from app.kube.patches import timestamp
from app.vnode.probes import HEALTHY, Health
from app.vnode.restarts import between_runs, last_state
from providers.base import End, Machine

LOST_CODE = 137
LOST_REASON = "ContainerStatusUnknown"  # what a kubelet says when it cannot tell how a container ended


def container_statuses(
    pod: Obj,
    *,
    state: Any,
    up: bool = False,
    health: Health = HEALTHY,
    machine: Machine | None = None,
    another: bool = False,
) -> list[Obj]:
    """One status for each container of the spec: all mirror the one machine. ``state`` gets the old state.

    ``image`` is what runs: one that is edited in later changes nothing on a machine that is rented already. A
    restart is counted when a run follows one whose end the status tells: seen up, or over (``another``).
    """
    held = {each["name"]: each for each in (pod.get("status") or {}).get("containerStatuses") or ()}
    statuses = []
    for container in sorted(pod["spec"]["containers"], key=lambda each: str(each["name"])):
        name = container["name"]
        before = held.get(name, {})
        again = between_runs(before) and (up or another)
        status: Obj = {
            "name": name,
            "state": state(before.get("state") or {}),
            "lastState": last_state(before) if again else before.get("lastState") or {},
            "ready": up and health.ready,
            "started": up and health.started,
            "restartCount": before.get("restartCount", 0) + (1 if again else 0),
            "image": (before.get("containerID") and before.get("image")) or container.get("image", ""),
            "imageID": before.get("imageID", ""),
        }
        id_ = _container_id(machine) if machine else before.get("containerID")
        if id_:
            status["containerID"] = id_
        statuses.append(status)
    return statuses


def own_end_state(machine: Machine, end: End, *, now: datetime) -> Any:
    """The terminated state of a run that ended by itself, or was cut off by a probe."""
    known = end.exit_code is not None
    code = LOST_CODE if end.exit_code is None else end.exit_code
    reason = LOST_REASON if not known else "Completed" if code == 0 else "Error"
    return terminated_state(machine, code=code, reason=reason, message=end.message, at=end.at or now)


def code_of(machine: Machine | None) -> tuple[int | None, datetime | None]:
    """Code and time of the machine's end, as far as the cloud tells."""
    end = machine.end if machine is not None else None
    return (None, None) if end is None else (end.exit_code, end.at)


def terminated_state(machine: Machine | None, *, code: int, reason: str, message: str, at: datetime) -> Any:
    finished = timestamp(at)

    def state(before: Obj) -> Obj:
        told = timestamp(machine.started_at) if machine is not None and machine.started_at else None
        started = told or before.get("running", {}).get("startedAt")
        ended: Obj = {"exitCode": code, "reason": reason, "finishedAt": finished}
        if message:
            ended["message"] = str(message)
        if started:
            ended["startedAt"] = started
        if machine is not None:
            ended["containerID"] = _container_id(machine)
        return {"terminated": ended}

    return state


def _container_id(machine: Machine) -> str:
    return f"{machine.ref.provider}://{machine.ref.resource_id}"
