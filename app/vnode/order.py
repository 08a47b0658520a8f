"""What a Pod's owner means to its virtual node: who replaces the Pod, and whether it is ours at all."""

from app.api import keys
from app.kube.client import Obj
from app.workload.owners import controller_of


def is_replaced_by_owner(pod: Obj) -> bool:
    """Whether a Pod that failed to be provisioned may be deleted, because its owner makes another.

    Not a Sandbox's: that is one run, and its failure is to be seen.
    """
    owner = controller_of(pod)
    if owner is None:
        return False
    ours = str(owner.get("apiVersion", "")).startswith(f"{keys.GROUP}/")
    return not (ours and owner.get("kind") == "Sandbox")


def is_daemon(pod: Obj) -> bool:
    """Whether it is a DaemonSet's Pod, or a mirror of a static one: nothing for a rented machine."""
    owner = controller_of(pod)
    return owner is not None and owner.get("kind") in ("DaemonSet", "Node")
