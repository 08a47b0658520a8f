"""A pod as RunPod shows it -> a `Machine`. Pure.

``RUNNING`` of RunPod is what its owner wants, not what is: a pod says so before it has a container. It runs
for us once the container reports and every TCP port that was asked for has its address outside.
"""

from decimal import Decimal
from typing import Final

from providers.base import (
    End,
    EndReason,
    Machine,
    MachineState,
    Meter,
    MeterKind,
    PortAddress,
    Ref,
)
from providers.capabilities import SshAddress
from providers.runpod.wire import IDENTITY_VARIABLE, SSH_VARIABLE, Pod

SSH_PORT: Final = 22
SSH_ADDED: Final = "added"
PROXY_DOMAIN: Final = "proxy.runpod.net"
_USD_A_GPU_MAX = Decimal(1000)  # an hour; a price above it is a mistake of somebody's
_STATES = {
    "PROVISIONING": MachineState.QUEUED,
    "STARTING": MachineState.BOOTING,
    "RUNNING": MachineState.RUNNING,
    "EXITED": MachineState.EXITED,
    "ERROR": MachineState.EXITED,
    "TERMINATED": MachineState.GONE,
}


def is_over(pod: Pod) -> bool:
    return _STATES.get(pod.status) in (MachineState.EXITED, MachineState.GONE)


def state_of(pod: Pod) -> MachineState:
    state = _STATES.get(pod.status, MachineState.BOOTING)
    if state is MachineState.RUNNING and (pod.runtime is None or not _mapped(pod)):
        return MachineState.BOOTING
    return state


def machine_of(
    pod: Pod, *, ref: Ref, disk_usd: Decimal, end: End | None, trouble: str | None, image_failed: bool = False
) -> Machine:
    """``end`` is why it is over, or its command is. ``image_failed``: its image can plainly not be pulled.

    RunPod would try that for ever, and bill for it; so such a pod counts as over, and is still there.
    """
    state = state_of(pod)
    if image_failed and state in (MachineState.QUEUED, MachineState.BOOTING):
        state, end = MachineState.EXITED, End(reason=EndReason.FAILED, message=trouble or "", image=True)
    if end is not None and state is MachineState.RUNNING:
        state = MachineState.EXITED  # its command has ended; the pod is there and bills as before
    if pod.status not in _STATES:
        trouble = f"RunPod says {pod.status!r}"
    over = state in (MachineState.EXITED, MachineState.GONE)
    ports = _ports(pod) if state is MachineState.RUNNING else ()
    return Machine(
        ref=ref,
        identity=pod.identity,
        maybe=pod.maybe,
        state=state,
        created_at=pod.created_at,
        started_at=pod.started_at if over or pod.runtime is not None else None,
        end=(end or End(reason=EndReason.UNKNOWN)) if over else None,
        endpoint=ports[0].address if ports else None,
        meters=meters_of(pod, state=state, disk_usd=disk_usd),
        ports=ports,
        location=pod.data_center,
        trouble=None if over else trouble,
    )


def meters_of(pod: Pod, *, state: MachineState, disk_usd: Decimal) -> tuple[Meter, ...]:
    """What runs now. ``disk_usd`` is dollars an hour for a GB.

    ``cost`` is for the cards alone, as the prices are. It is not looked at once a pod has exited: it was seen
    to stay there, and the cards are free again all the same.
    """
    if state is MachineState.GONE:
        return ()
    disk = Meter(kind=MeterKind.DISK, quantity=Decimal(pod.disk_gb), usd=disk_usd)
    exited = pod.status in ("EXITED", "ERROR")
    return (disk,) if exited else (gpu_meter(pod), disk)


def gpu_meter(pod: Pod) -> Meter:
    count = Decimal(max(pod.gpu.count if pod.gpu else 1, 1))
    usd = None if pod.cost is None else pod.cost / count
    believable = usd is not None and 0 < usd <= _USD_A_GPU_MAX
    return Meter(kind=MeterKind.GPU, quantity=count, usd=usd if believable else None)


def end_of(status: str, said: str | None) -> End:
    """Why a pod is over, from the free text that only the older API has; None where it did not tell.

    An interruption is believed only where RunPod says so: a person's stop in the console looks the same.
    """
    failed = status == "ERROR"
    if not said:
        return End(reason=EndReason.FAILED if failed else EndReason.UNKNOWN, message="RunPod tells no reason")
    who, _, why = said.partition(": ")
    lower, why = said.lower(), why or said
    if "outbid" in lower:
        return End(reason=EndReason.PREEMPTED, message=said)
    if "balance" in lower:
        return End(reason=EndReason.TERMINATED, message=f"RunPod ended it, the balance is used up: {why}")
    if who.lower() in ("exited by user", "terminated by user"):
        return End(reason=EndReason.TERMINATED, message=f"ended by a person or a program: {said}")
    if failed or who.lower() == "exited by runpod":
        return End(reason=EndReason.FAILED, message=why)
    return End(reason=EndReason.UNKNOWN, message=said)


def ssh_of(pod: Pod, *, identity: str) -> SshAddress | None:
    """Where its sshd listens, as RunPod tells or as its port is mapped; None until then."""
    direct = pod.ssh.direct if pod.ssh else None
    if direct is not None:
        host, port, user = direct.host, direct.port, direct.username
    elif mapped := _tcp(pod, SSH_PORT):
        host, _, number = mapped.rpartition(":")
        port, user = int(number), ""
    else:
        return None
    return SshAddress(
        host=host, port=port, user=user or "root", identity=identity, variable=IDENTITY_VARIABLE
    )


def _wanted(pod: Pod) -> list[tuple[int, str]]:
    """The ports of the workload; the one that was added for us alone has nothing to do with it."""
    found = []
    for text in pod.ports or ():
        number, _, kind = text.partition("/")
        if number.isdecimal() and not (int(number) == SSH_PORT and pod.env.get(SSH_VARIABLE) == SSH_ADDED):
            found.append((int(number), kind))
    return found


def _tcp(pod: Pod, port: int) -> str | None:
    for row in pod.runtime.ports if pod.runtime else ():
        if row.private == port and row.type == "tcp" and row.ip and row.public:
            return f"{row.ip}:{row.public}"
    return None


def _mapped(pod: Pod) -> bool:
    return all(kind != "tcp" or _tcp(pod, port) for port, kind in _wanted(pod))


def _ports(pod: Pod) -> tuple[PortAddress, ...]:
    """Each port that was asked for, in that order; rows that nobody asked for are left out."""
    found = []
    for port, kind in _wanted(pod):
        address = _tcp(pod, port) if kind == "tcp" else f"https://{pod.id}-{port}.{PROXY_DOMAIN}"
        if address is not None:
            found.append(PortAddress(port=port, address=address))
    return tuple(found)
