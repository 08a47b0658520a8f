"""When a workload that ended is to run again on its machine, and after how long. Pure.

As on a node: the Pod's restartPolicy decides, the first restart comes at once, each later one after a wait
that doubles, and a run of some length begins the count anew. What the Pod's own status says of its last run
is the memory, so that a new leader goes on where the former one stood.
"""

from datetime import datetime, timedelta

from app.kube.client import Obj
from app.kube.patches import timestamp
from providers.base import End, EndReason, Machine, MachineState

KILLED_CODE = 137
BY_ITSELF = (EndReason.COMPLETED, EndReason.FAILED, EndReason.UNKNOWN)


def policy_of(pod: Obj) -> str:
    return str(pod["spec"].get("restartPolicy") or "Always")


def own_end(machine: Machine | None) -> End | None:
    """How the workload ended by itself, if it did: with a code, or the cloud says that it completed."""
    end = machine.end if machine is not None else None
    if machine is None or end is None or machine.state is not MachineState.EXITED:
        return None
    told = end.exit_code is not None or end.reason is EndReason.COMPLETED
    return end if told and end.reason in BY_ITSELF else None


def wants_restart(pod: Obj, end: End) -> bool:
    """Whether the policy answers such an end with another run. A code that nobody knows is no reason."""
    match policy_of(pod):
        case "Always":
            return True
        case "OnFailure":
            return end.exit_code not in (None, 0)
        case _:
            return False


def killed(message: str, *, now: datetime) -> End:
    """The end of a run that we cut off, since a probe found it dead."""
    return End(reason=EndReason.FAILED, exit_code=KILLED_CODE, message=message, at=now)


def ran_s(machine: Machine, end: End) -> float:
    """How long the run lasted, by the cloud's clock; 0 where it does not tell."""
    if machine.started_at is None or end.at is None:
        return 0.0
    return max(0.0, (end.at - machine.started_at).total_seconds())


def wait_s(crashes: int, *, base_s: float, max_s: float) -> float:
    """How long the next run waits after so many that ended soon: not at all, then ``base_s``, doubling."""
    return 0.0 if crashes == 0 else min(max_s, base_s * 2.0 ** min(crashes - 1, 30))


def last_state(container: Obj) -> Obj:
    """The terminated state of the run before this one, as the Pod's status has it; {} if there is none."""
    state: Obj = container.get("state") or {}
    if "terminated" in state:
        return {"terminated": state["terminated"]}
    return dict(container.get("lastState") or {})


def between_runs(container: Obj) -> bool:
    """Whether the status says that a run is over and another is to come."""
    state = container.get("state") or {}
    return "terminated" in state or (
        "waiting" in state and "terminated" in (container.get("lastState") or {})
    )


def tells_of(container: Obj, machine: Machine) -> bool:
    """Whether the status tells the end of the run that the machine shows, as far as seconds tell apart."""
    if not between_runs(container):
        return False
    before = last_state(container)["terminated"]
    return machine.started_at is None or timestamp(machine.started_at) == before.get("startedAt")


def container_of(pod: Obj) -> Obj:
    """The status of the Pod's one container; {} before there is any."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or [{}]
    return dict(statuses[0])


def deadline_of(pod: Obj) -> datetime | None:
    """When ``activeDeadlineSeconds`` is over, counted from the Pod's start; None without either."""
    seconds, start = pod["spec"].get("activeDeadlineSeconds"), (pod.get("status") or {}).get("startTime")
    if seconds is None or start is None:
        return None
    return datetime.fromisoformat(start) + timedelta(seconds=seconds)


def grace_s(pod: Obj) -> float:
    """The whole grace of the Pod's end: what its deletion said, else what its spec says."""
    given = pod["metadata"].get("deletionGracePeriodSeconds")
    if given is None:
        given = pod["spec"].get("terminationGracePeriodSeconds")
    return float(30 if given is None else given)


def hook_of(pod: Obj) -> tuple[str, ...]:
    """The command of the Pod's preStop hook; () without one."""
    for container in pod["spec"]["containers"]:
        hook = (container.get("lifecycle") or {}).get("preStop") or {}
        if command := (hook.get("exec") or {}).get("command"):
            return tuple(command)
    return ()


def sleep_s(pod: Obj) -> float:
    """How long the Pod's preStop hook sleeps before the workload is asked to stop."""
    hooks = (
        ((container.get("lifecycle") or {}).get("preStop") or {}) for container in pod["spec"]["containers"]
    )
    return max((float((hook.get("sleep") or {}).get("seconds") or 0) for hook in hooks), default=0.0)
