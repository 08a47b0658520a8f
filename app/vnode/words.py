"""What a cloud says of a machine after it was rented, made safe to show: it may quote from what it was sent.

The process that made the order keeps what to mask. Another one (after a restart, or where placement rented)
makes the order up again once there are words to show; where that cannot be done, the words are left out. A
Pod that refers to no Secret needs none of this.
"""

from collections.abc import Callable
from dataclasses import replace

from app.kube.client import Kube, Obj
from app.kube.orders import Unusable, order_of
from app.provisioning.model import ClaimSpec
from providers.base import Machine, Workload

Hide = Callable[[str], str]
WITHHELD = "(what the cloud says is left out: what it may quote from cannot be read any more)"


def hiding(workload: Workload) -> Hide:
    """Masks what the workload was given in confidence. Keeps it in memory only where there is any."""
    return workload.masked if workload.secret_env or workload.registry is not None else _as_it_is


async def hiding_again(kube: Kube, pod: Obj, claim_obj: Obj, claim: ClaimSpec) -> Hide:
    """The same for a Pod whose order this process has not made."""
    if not _is_confided_in(pod):
        return _as_it_is
    try:
        order = await order_of(kube, pod, claim_obj, claim)
    except Unusable:
        return _withheld
    return hiding(order.workload)


def has_words(machine: Machine | None) -> bool:
    return machine is not None and machine.end is not None and bool(machine.end.message)


def shown(machine: Machine | None, hide: Hide | None) -> Machine | None:
    """The machine with its words masked; without ``hide`` with none."""
    if machine is None or machine.end is None or not machine.end.message:
        return machine
    said = (hide or _withheld)(machine.end.message)
    return replace(machine, end=replace(machine.end, message=said))


def _is_confided_in(pod: Obj) -> bool:
    if pod["spec"].get("imagePullSecrets"):
        return True
    for container in pod["spec"]["containers"]:
        if any("secretRef" in each for each in container.get("envFrom") or ()):
            return True
        if any("secretKeyRef" in (each.get("valueFrom") or {}) for each in container.get("env") or ()):
            return True
    return False


def _as_it_is(text: str) -> str:
    return text


def _withheld(_text: str) -> str:
    return WITHHELD
