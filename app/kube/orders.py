"""What is asked of a cloud for a Pod: its workload, and what its pool says about renting.

Two rooms rent: the virtual node for a bound Pod, and placement for one that it keeps gated (Reserve). Both
build the order here, so that a machine rented by the one is the machine that the other would have rented.
What is rented comes from the claim, never from what the Pod's author can still edit; only what runs on it is
read from the Pod.
"""

import dataclasses
import ipaddress
from typing import Any

from pydantic import ValidationError

from app.api import keys
from app.api.nodeclaim import NodeClaim
from app.api.nodepool import NodePool
from app.kube.client import Kube, Obj
from app.kube.environment import Note, Resolved, UnreadableLogin, resolve
from app.provisioning.model import ClaimPort, ClaimSpec, LiveClaim, Mark, Policy
from app.workload.environment import Unresolved
from app.workload.owners import template_of
from app.workload.registries import is_image
from app.workload.shapes import Unsupported, unsupported
from app.workload.transform import build
from providers.base import ClaimUid, Egress, EgressMode, Workload

CONFIG_PROBLEM = "CreateContainerConfigError"
IMAGE_NAME_PROBLEM = "InvalidImageName"
PULL_PROBLEM = "ErrImagePull"


class Unusable(Exception):
    """The Pod refers to, or asks for, something that cannot be used now: ConfigError, nothing is rented.

    ``waiting`` is a kubelet's word for it, the reason why the container waits.
    """

    def __init__(self, message: str, *, waiting: str = CONFIG_PROBLEM) -> None:
        super().__init__(message)
        self.waiting = waiting


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """``notes`` are Warning Events for the Pod: what was left out on the way, as a kubelet leaves it out."""

    workload: Workload
    notes: tuple[Note, ...] = ()


async def order_of(kube: Kube, pod: Obj, claim_obj: Obj, claim: ClaimSpec) -> Order:
    """The Pod's container on the claim's machine, with everything it refers to as it is at this moment.

    Objects are read live: call it right before `Provisioning.ensure`, and again for each call.

    Raises:
        Unusable: the Pod's shape cannot run on a rented machine, or something it needs is missing.
    """
    if found := unsupported(pod):
        raise Unusable(str(found[0]))
    image = pod["spec"]["containers"][0]["image"]
    if not is_image(image):
        raise Unusable(f'couldn\'t parse image name "{image}"', waiting=IMAGE_NAME_PROBLEM)
    try:
        resolved = await resolve(kube, pod, node=keys.node_name(claim.provider, claim.account))
    except UnreadableLogin as error:
        raise Unusable(str(error), waiting=PULL_PROBLEM) from error
    except Unresolved as error:
        raise Unusable(str(error)) from error
    return Order(workload=workload_of(pod, claim_obj, claim, resolved=resolved), notes=resolved.notes)


def workload_of(pod: Obj, claim_obj: Obj, claim: ClaimSpec, *, resolved: Resolved) -> Workload:
    """The workload of what `resolve` has found, under the egress policy frozen on the claim.

    Raises:
        Unusable: the Pod's shape cannot run on a rented machine.
    """
    try:
        workload = build(
            pod, environment=resolved.environment, accelerator=claim.accelerator, options=claim.options
        )
    except Unsupported as error:
        raise Unusable(str(error)) from error
    return dataclasses.replace(workload, egress=_egress(claim_obj), registry=resolved.registry)


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

    async def remember(self, claim: ClaimSpec, memory: str, *, live: LiveClaim) -> None:
        await self._port.remember(claim, memory, live=live)

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
