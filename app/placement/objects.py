"""The objects of one placement: NodeClaim, CloudPodBinding, and the patch that lifts the gate. Pure.

Everything is made from the claim once that exists: a replica that finds a claim after a crash goes on exactly
where the one before it stopped, whatever has changed in pool, prices or blocks meanwhile.
"""

import json
from datetime import datetime
from decimal import Decimal
from typing import Any

from app.api import keys
from app.api.binding import BindingPodRef, CloudPodBindingSpec
from app.api.model import CapacityType
from app.api.nodeclaim import ClaimPodRef, NodeClaim, NodeClaimSpec
from app.api.nodepool import NodePool
from app.api.reasons import PLACED_CONDITION
from app.inventory.identity import Identity
from app.placement.rank import Candidate
from app.placement.request import PlacementRequest
from app.store.reservations import Reservation
from app.workload.owners import labels_said, team_of
from providers.base import Accelerator, ClaimUid, Tier

Obj = dict[str, Any]


def claim_of(
    request: PlacementRequest, candidate: Candidate, *, pool: NodePool, name: str, installation: str
) -> Obj:
    """The claim to create, with its finalizer: from the first moment it cannot vanish behind our back."""
    spec = NodeClaimSpec(
        pod_ref=ClaimPodRef(namespace=request.namespace, name=request.name, uid=request.uid),
        pool_ref=pool.metadata.name,
        provider=candidate.provider,
        account=candidate.account,
        region=candidate.region or None,
        capacity_type=CapacityType(candidate.tier.value),
        accelerator=str(candidate.accelerator) if candidate.accelerator else None,
        max_price=candidate.max_usd_per_hour,
        provider_options=request.options_for(candidate.provider),
        egress=pool.spec.egress,
    )
    return {
        "apiVersion": keys.API_VERSION,
        "kind": keys.NODE_CLAIM,
        "metadata": {
            "name": name,
            "labels": keys.claim_labels(
                pool=pool.metadata.name,
                provider=candidate.provider,
                account=candidate.account,
                installation=installation,
            ),
            **_attribution(request),
            "finalizers": [keys.CLAIM_FINALIZER],
        },
        "spec": spec.to_json(),
    }


def _attribution(request: PlacementRequest) -> Obj:
    """Who will be paying, frozen with the claim: labels change, and last month's report must not."""
    if (found := request.attribution) is None:
        return {}
    text = json.dumps({"kind": found.kind, "name": found.name, "labels": dict(found.labels)}, sort_keys=True)
    return {"annotations": {keys.ATTRIBUTION_ANNOTATION: text}}


def candidate_on(claim: NodeClaim) -> Candidate:
    """The candidate that a claim records, for metrics and the Pod; without offerings."""
    spec = claim.spec
    kind, _, count = (spec.accelerator or "").rpartition(":")
    return Candidate(
        provider=spec.provider,
        account=spec.account,
        region=spec.region or "",
        tier=Tier((spec.capacity_type or CapacityType.ON_DEMAND).value),
        accelerator=Accelerator(type=kind, count=int(count)) if kind else None,
        max_usd_per_hour=spec.max_price,
    )


def reservation_of(claim: Obj) -> Reservation:
    """What a claim takes from its pool's limits, by what is frozen on it."""
    spec = claim["spec"]
    count = str(spec.get("accelerator") or "").rpartition(":")[2]
    return Reservation(
        pod_uid=spec["podRef"]["uid"],
        claim_name=claim["metadata"]["name"],
        pool=spec.get("poolRef") or "",
        provider=spec["provider"],
        account=spec.get("account") or keys.DEFAULT_ACCOUNT,
        gpus=int(count) if count.isascii() and count.isdecimal() else 0,
        usd_per_hour=Decimal(spec["maxPrice"]) if spec.get("maxPrice") else None,
        claim_uid=claim["metadata"]["uid"],
        namespace=spec["podRef"]["namespace"],
        team=team_of(labels := labels_said(claim["metadata"])),
        labels=labels,
    )


def promised(request: PlacementRequest, candidate: Candidate, *, pool: str, name: str) -> Reservation:
    """What a claim of this name, to be made for the candidate, will take."""
    return Reservation(
        pod_uid=request.uid,
        claim_name=name,
        pool=pool,
        provider=candidate.provider,
        account=candidate.account,
        gpus=candidate.accelerator.count if candidate.accelerator else 0,
        usd_per_hour=candidate.ceiling_usd_per_hour,
        namespace=request.namespace,
        team=request.team,
        labels=request.labels,
    )


def is_promised(found: Reservation, promised: Reservation) -> bool:
    """Whether a claim takes what was promised for it, so that nothing has to be written again."""
    same_place = (found.key, found.pool, found.provider, found.account, found.gpus) == (
        promised.key,
        promised.pool,
        promised.provider,
        promised.account,
        promised.gpus,
    )
    return same_place and found.usd_per_hour in (None, promised.usd_per_hour)


def binding_of(claim: NodeClaim, *, installation: str) -> Obj:
    """The claim's binding, owned by it and so collected with it."""
    spec, metadata = claim.spec, claim.metadata
    binding = CloudPodBindingSpec(
        pod_ref=BindingPodRef(name=spec.pod_ref.name, uid=spec.pod_ref.uid),
        claim_name=metadata.name,
        provider=spec.provider,
        account=spec.account,
        region=spec.region,
        capacity_type=spec.capacity_type,
        external_name=external_name(installation, ClaimUid(metadata.uid)),
    )
    return {
        "apiVersion": keys.API_VERSION,
        "kind": keys.CLOUD_POD_BINDING,
        "metadata": {
            "name": keys.binding_name(metadata.name),
            "namespace": spec.pod_ref.namespace,
            "labels": keys.claim_labels(
                pool=spec.pool_ref or "",
                provider=spec.provider,
                account=spec.account,
                installation=installation,
            ),
            "ownerReferences": [
                {
                    "apiVersion": keys.API_VERSION,
                    "kind": keys.NODE_CLAIM,
                    "name": metadata.name,
                    "uid": metadata.uid,
                    "controller": True,
                }
            ],
        },
        "spec": binding.to_json(),
    }


def external_name(installation: str, claim_uid: ClaimUid) -> str:
    """What the names of all machines of one claim begin with: the identity without attempt and sequence."""
    any_attempt = Identity(installation=installation, claim_uid=claim_uid, attempt=1, sequence=1)
    return str(any_attempt).rsplit("-", 3)[0]


def ungate_patch(pod: Obj, claim: NodeClaim) -> Obj:
    """The one merge patch that selects the node and lifts our gate, of this very version of the Pod.

    Other gates and selectors stay. Annotations that only we may set become ours or go: what a Pod's author
    has put there would be read as the truth by people.
    """
    spec, metadata = claim.spec, pod["metadata"]
    tier = spec.capacity_type.value if spec.capacity_type else None
    ours: dict[str, str | None] = {keys.CAPACITY_TYPE_ANNOTATION: tier, keys.REGION_ANNOTATION: spec.region}
    present = metadata.get("annotations") or {}
    annotations = {key: ours.get(key) for key in keys.OWN_POD_ANNOTATIONS if ours.get(key) or key in present}
    gates = [
        gate for gate in pod["spec"].get("schedulingGates") or () if gate["name"] != keys.SCHEDULING_GATE
    ]
    return {
        "metadata": {
            "uid": metadata["uid"],
            "resourceVersion": metadata["resourceVersion"],
            "annotations": annotations,
        },
        "spec": {
            "nodeSelector": keys.placement_labels(spec.provider, spec.account),
            "schedulingGates": gates,
        },
    }


def is_gated(pod: Obj) -> bool:
    """Whether our own gate is on the Pod."""
    return any(gate["name"] == keys.SCHEDULING_GATE for gate in pod["spec"].get("schedulingGates") or ())


def other_gates(pod: Obj) -> list[str]:
    """The names of the gates that hold the Pod besides ours."""
    gates = (gate["name"] for gate in pod["spec"].get("schedulingGates") or ())
    return [name for name in gates if name != keys.SCHEDULING_GATE]


def is_waiting_for_node(pod: Obj) -> bool:
    """Whether we have placed the Pod, no gate holds it, and the scheduler has not bound it."""
    spec = pod["spec"]
    return (
        not spec.get("schedulingGates")
        and not spec.get("nodeName")
        and keys.PROVIDER_LABEL in (spec.get("nodeSelector") or {})
    )


def is_over(pod: Obj) -> bool:
    """Whether placement has no more business with the Pod: leaving, finished or bound."""
    phase = (pod.get("status") or {}).get("phase")
    return bool(
        pod["metadata"].get("deletionTimestamp")
        or phase in ("Succeeded", "Failed")
        or pod["spec"].get("nodeName")
    )


def extras(claims: list[Obj], pod: Obj) -> list[Obj]:
    """Of several claims of one placed Pod, those that its selector does not mean, and the younger ones."""
    wanted = pod["spec"].get("nodeSelector") or {}
    meant = [
        claim
        for claim in claims
        if keys.placement_labels(
            claim["spec"]["provider"], claim["spec"].get("account", keys.DEFAULT_ACCOUNT)
        )
        == {key: wanted[key] for key in (keys.PROVIDER_LABEL, keys.ACCOUNT_LABEL) if key in wanted}
    ]
    kept = (meant or claims)[:1]
    return [claim for claim in claims if claim not in kept]


def unneeded(claims: list[Obj], pod: Obj) -> list[Obj]:
    """Of a Pod's claims those that can never serve it: somebody else has let it go, or it is going unbound.

    (A Pod without finalizers is gone when it goes, and its claims follow it.)
    """
    staying = [claim for claim in claims if not leaving(claim)]
    if leaving(pod) and not pod["spec"].get("nodeName"):
        return staying if pod["metadata"].get("finalizers") else []
    if is_gated(pod):
        return []
    return [claim for claim in staying if not _is_meant(claim, pod)]


def _is_meant(claim: Obj, pod: Obj) -> bool:
    """Whether the Pod selects, or is on, the node of the claim's account."""
    account = (claim["spec"]["provider"], claim["spec"].get("account", keys.DEFAULT_ACCOUNT))
    selector = pod["spec"].get("nodeSelector") or {}
    wanted = keys.placement_labels(*account)
    if all(selector.get(key) == value for key, value in wanted.items()):
        return True
    return bool(pod["spec"].get("nodeName") == keys.node_name(*account))


def same_but_status(old: Obj, new: Obj) -> bool:
    """Whether only the status, or nothing that anybody decides by, differs."""
    ignored = {"resourceVersion", "generation"}
    before, after = (
        {field: value for field, value in obj["metadata"].items() if field not in ignored}
        for obj in (old, new)
    )
    return bool(old["spec"] == new["spec"] and before == after)


def placed_condition(pod: Obj) -> Obj | None:
    """Our own condition on a Pod, if it is there."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return next((each for each in conditions if each["type"] == PLACED_CONDITION), None)


def why_unbound(pod: Obj) -> str:
    """What the scheduler says of a Pod that it has not bound."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    scheduled = next((each for each in conditions if each["type"] == "PodScheduled"), None)
    return (scheduled or {}).get("message") or "the scheduler says nothing"


def pod_of(claim: Obj) -> tuple[str, str]:
    """Namespace and name of the Pod that a claim serves."""
    ref = claim["spec"]["podRef"]
    return ref["namespace"], ref["name"]


def owners(obj: Obj) -> set[str]:
    """The UIDs of an object's owners."""
    return {owner["uid"] for owner in obj["metadata"].get("ownerReferences") or ()}


def created(obj: Obj) -> datetime:
    """When the object was created, by the API server's clock."""
    return datetime.fromisoformat(obj["metadata"]["creationTimestamp"])


def age(obj: Obj) -> tuple[str, str]:
    """Sorts objects from the oldest on."""
    return obj["metadata"]["creationTimestamp"], obj["metadata"]["name"]


def uid_of(obj: Obj) -> str:
    """The object's UID."""
    return str(obj["metadata"]["uid"])


def leaving(obj: Obj) -> bool:
    """Whether the object is being deleted."""
    return bool(obj["metadata"].get("deletionTimestamp"))


def phase_of(claim: Obj) -> str | None:
    """The claim's phase, None until it has one."""
    return (claim.get("status") or {}).get("phase")


def labels_of(obj: Obj) -> dict[str, str]:
    """The object's labels."""
    return obj["metadata"].get("labels") or {}
