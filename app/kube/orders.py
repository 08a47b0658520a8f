"""What is asked of a cloud for a Pod: its workload, and what its pool says about renting.

Two rooms rent: the virtual node for a bound Pod, and placement for one that it keeps gated (Reserve). Both
build the order here, so that a machine rented by the one is the machine that the other would have rented.
What is rented comes from the claim, never from what the Pod's author can still edit; only what runs on it is
read from the Pod.
"""

import dataclasses
import ipaddress
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from app.api.nodeclaim import NodeClaim
from app.api.nodepool import NodePool
from app.kube.client import Obj
from app.provisioning.model import ClaimPort, ClaimSpec, LiveClaim, Mark, Policy
from app.workload.shapes import Unsupported
from app.workload.transform import build
from providers.base import ClaimUid, Egress, EgressMode, Workload

_REVISION_LABELS = ("controller-revision-hash", "pod-template-hash")


class Unusable(Exception):
    """The Pod refers to, or asks for, something that cannot be used now: ConfigError, nothing is rented."""


def workload_of(pod: Obj, claim_obj: Obj, claim: ClaimSpec) -> Workload:
    """The Pod's container on the claim's machine, under the egress policy frozen on the claim.

    Raises:
        Unusable: the Pod's shape cannot run on a rented machine.
    """
    try:
        workload = build(pod, accelerator=claim.accelerator, options=claim.options)
    except Unsupported as error:
        raise Unusable(str(error)) from error
    return dataclasses.replace(workload, egress=_egress(claim_obj))


def pool_of(pool: Obj | None, name: str) -> NodePool:
    """The pool that the claim names.

    Raises:
        Unusable: there is none of that name, or it cannot be read.
    """
    if pool is None:
        raise Unusable(f"NodePool {name!r} does not exist")
    try:
        return NodePool.model_validate(pool)
    except ValidationError as error:
        raise Unusable(f"NodePool {name!r} cannot be read: {error.errors()[0]['msg']}") from error


def policy_of(pool: NodePool, pod: Obj, *, jitter_s: float) -> Policy:
    """The pool's time for blocks, plus ``jitter_s`` so that not all waiters come at once."""
    ttl_s = pool.spec.failover.blocklist_ttl.total_seconds()
    return Policy(block_ttl_s=ttl_s + jitter_s, template=template_of(pod))


def controller_of(pod: Obj) -> Mapping[str, Any] | None:
    """The owner reference of the controller that would replace this Pod, if it has one."""
    owners = pod["metadata"].get("ownerReferences") or ()
    return next((owner for owner in owners if owner.get("controller")), None)


def template_of(pod: Obj) -> str:
    """The name of the template that the Pod was made from: placement's own, so that its blocks match."""
    owner = controller_of(pod)
    if owner is None:
        return str(pod["metadata"]["uid"])
    labels = pod["metadata"].get("labels") or {}
    revision = next((labels[label] for label in _REVISION_LABELS if labels.get(label)), "")
    return f"{owner['uid']}/{revision}" if revision else str(owner["uid"])


class WatchedPort:
    """A claim port that notes when a request was about to be sent: the moment of the mark."""

    def __init__(self, port: ClaimPort, *, clock: Any) -> None:
        self._port, self._clock = port, clock
        self.marked_at: float | None = None

    async def look(self, claim: ClaimSpec) -> LiveClaim | None:
        return await self._port.look(claim)

    async def mark(self, claim: ClaimSpec, mark: Mark, *, live: LiveClaim) -> None:
        await self._port.mark(claim, mark, live=live)
        self.marked_at = self._clock()

    async def find(self, uid: ClaimUid) -> bool:
        return await self._port.find(uid)


def _egress(claim_obj: Obj) -> Egress:
    policy = NodeClaim.model_validate(claim_obj).spec.egress
    if policy is None:
        return Egress()
    cidrs: list[str] = []
    domains: list[str] = []
    for target in policy.targets or ():
        try:
            cidrs.append(str(ipaddress.ip_network(target, strict=False)))
        except ValueError:
            domains.append(target)
    return Egress(mode=EgressMode(policy.mode.value), cidrs=tuple(cidrs), domains=tuple(domains))
