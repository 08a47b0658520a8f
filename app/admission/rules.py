"""What happens to an opted-in Pod when it is created, and which Pods are refused. Pure.

Refused is what no later change of the cluster can mend; what may become true (a missing pool, no capacity)
is for placement, which keeps the Pod gated. Every reason is given at once. Adding is idempotent: another
replica, or a second call after another webhook has changed the Pod, changes nothing more.

A Pod is looked at twice: when it is changed, and, in its last form, after every other webhook.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from app import workload
from app.admission import sold
from app.admission.spelling import misspelt
from app.api.keys import (
    ACCOUNT_LABEL,
    AIBRIX_GROUP,
    DEAD_MAN_ANNOTATION,
    DEAD_MAN_OFF,
    ENABLED,
    ENABLED_LABEL,
    OWN_POD_ANNOTATIONS,
    PROVIDER_LABEL,
    SCHEDULING_GATE,
    TAINT_EFFECT,
    TAINT_KEY,
    TOLERATION,
    VAST_DISK_GB_ANNOTATION,
    VAST_MACHINE_ID_ANNOTATION,
    VAST_OFFER_ID_ANNOTATION,
    VAST_VERIFIED_ANNOTATION,
)
from app.api.not_built import annotation_refusals
from catalog.catalogue import Catalogue
from catalog.offerings import Offerings
from catalog.stock import Stock

Obj = Mapping[str, Any]
Operation = dict[str, Any]

# The API server's own tolerations of a silent node end after five minutes. A rented machine outlives our
# silence, and nobody but us may conclude that it is lost.
NODE_TROUBLES: Final = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_NO_EXECUTE = "NoExecute"

_NOT_BUILT: Final = {
    VAST_VERIFIED_ANNOTATION: "an ignored demand would rent from an unverified host",
    VAST_MACHINE_ID_ANNOTATION: "an ignored demand would rent another machine",
    VAST_DISK_GB_ANNOTATION: "the disk would have another size",
    VAST_OFFER_ID_ANNOTATION: "an ignored demand would rent another machine",
}
"""Annotations that wait for the room of the Vast provider, beside those of `app.api.not_built`."""

SUBRESOURCES: Final = {
    "ephemeralcontainers": "a container cannot be added to a rented machine: a Pod there is one container",
    "resize": "a rented machine cannot be resized: change the owner's template, which makes another Pod",
}
"""What cannot be done to a Pod of ours, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What to answer. ``refusals`` empty: allowed. ``patch`` is a JSON patch of the object."""

    refusals: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    patch: tuple[Operation, ...] = ()


ALLOWED: Final = Verdict()
NOTHING_KNOWN: Final = Stock(offerings=Offerings(), catalogue=Catalogue(), configured=frozenset())
"""Nothing is refused for not being sold anywhere."""


def opted_in(pod: Obj) -> bool:
    """Whether the Pod says exactly ``true``; anything else leaves it alone."""
    return bool((pod["metadata"].get("labels") or {}).get(ENABLED_LABEL) == ENABLED)


def mutate(pod: Obj, *, stock: Stock = NOTHING_KNOWN) -> Verdict:
    """The gate, the toleration, and no annotation that only we may set, for a Pod about to be created."""
    if not opted_in(pod):
        return ALLOWED
    if refused := unmendable(pod, stock=stock):
        return Verdict(refusals=tuple(refused))
    spec, annotations = pod["spec"], pod["metadata"].get("annotations") or {}
    cleared = sorted(OWN_POD_ANNOTATIONS & annotations.keys())
    patch: list[Operation] = [
        {"op": "remove", "path": f"/metadata/annotations/{_pointer(key)}"} for key in cleared
    ]
    before = spec.get("tolerations") or []
    if (after := _tolerations(before)) != before:
        patch.append({"op": "add", "path": "/spec/tolerations", "value": after})
    gates = spec.get("schedulingGates") or []
    if not _gated(pod):
        patch.append(
            {"op": "add", "path": "/spec/schedulingGates", "value": [*gates, {"name": SCHEDULING_GATE}]}
        )
    warnings = tuple(f"annotation {key} is set by Nebula alone, and was taken off" for key in cleared)
    return Verdict(patch=tuple(patch), warnings=warnings)


def validate(pod: Obj, *, stock: Stock = NOTHING_KNOWN) -> Verdict:
    """Whether a new Pod, as it would be stored, can be rented for: it may have changed since `mutate`."""
    if not opted_in(pod):
        return ALLOWED
    found = [*unmendable(pod, stock=stock), *workload.refusals(pod)]
    annotations = pod["metadata"].get("annotations") or {}
    missing = [
        *([] if _gated(pod) else [f"the scheduling gate {SCHEDULING_GATE}"]),
        *(
            []
            if any(map(_ours, pod["spec"].get("tolerations") or ()))
            else [f"the toleration of {TAINT_KEY}"]
        ),
    ]
    found += [
        f"{what} is missing: another admission webhook removed it, or set the label {ENABLED_LABEL} too late"
        for what in missing
    ]
    found += [
        f"annotation {key} was set by another admission webhook; Nebula alone sets it"
        for key in sorted(OWN_POD_ANNOTATIONS & annotations.keys())
    ]
    if found:
        return Verdict(refusals=tuple(found))
    elsewhere = sold.not_sold_here(workload.accelerator_of(pod), stock=stock)
    return Verdict(warnings=(*workload.warnings(pod), *elsewhere))


def validate_subresource(pod: Obj, *, subresource: str) -> Verdict:
    """Whether this may be done to a living Pod of ours."""
    why = SUBRESOURCES.get(subresource)
    return Verdict(refusals=(why,)) if why and opted_in(pod) else ALLOWED


def unmendable(pod: Obj, *, stock: Stock = NOTHING_KNOWN) -> list[str]:
    """Why this Pod could never be placed, whatever becomes of pools and clouds."""
    spec, found = pod["spec"], []
    if spec.get("nodeName"):
        found.append("spec.nodeName is set: Nebula chooses where the Pod runs; remove it")
    for label in (PROVIDER_LABEL, ACCOUNT_LABEL):
        if label in (spec.get("nodeSelector") or {}):
            found.append(
                f"spec.nodeSelector[{label}] is set by Nebula alone: remove it, and name a NodePool that"
                " lists only the provider you want"
            )
    try:
        accelerator = workload.accelerator_of(pod)
    except workload.BadRequest as error:
        found.append(str(error))
    else:
        found += sold.unsold(pod, accelerator=accelerator, stock=stock)
    found += misspelt(pod["metadata"])
    return found + _annotations(pod["metadata"].get("annotations") or {}, stock=stock)


def _annotations(annotations: Mapping[str, str], *, stock: Stock) -> list[str]:
    found = list(annotation_refusals(annotations))
    found += [
        f"annotation {key} is not supported by this version of Nebula: {why}; remove it"
        for key, why in _NOT_BUILT.items()
        if key in annotations
    ]
    wish = annotations.get(DEAD_MAN_ANNOTATION, DEAD_MAN_OFF)
    if wish != DEAD_MAN_OFF:
        found.append(f'annotation {DEAD_MAN_ANNOTATION} is {wish!r}: write "off", or leave it out')
    try:
        workload.max_price_of(annotations)
    except workload.BadRequest as error:
        found.append(str(error))
    try:
        options = workload.options_of(annotations)
    except workload.BadRequest as error:
        return [*found, str(error)]
    refused = {key.removeprefix(f"{AIBRIX_GROUP}/") for key in _NOT_BUILT}
    others = {name: value for name, value in options.items() if name not in refused}
    return found + sold.bad_options(others, stock=stock)


def _gated(pod: Obj) -> bool:
    return any(gate["name"] == SCHEDULING_GATE for gate in pod["spec"].get("schedulingGates") or ())


def _tolerations(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``given``, in order, with node troubles tolerated for ever, and our taint tolerated."""
    kept = [
        {key: value for key, value in each.items() if key != "tolerationSeconds"}
        if each.get("key") in NODE_TROUBLES
        else each
        for each in given
    ]
    for trouble in NODE_TROUBLES:
        if not any(_covers(each, trouble) for each in kept):
            kept.append({"key": trouble, "operator": "Exists", "effect": _NO_EXECUTE})
    if not any(map(_ours, kept)):
        kept.append(dict(TOLERATION))
    return kept


def _covers(toleration: Obj, trouble: str) -> bool:
    """As the API server judges whether its own toleration is still needed."""
    key, effect = toleration.get("key"), toleration.get("effect")
    return (not key or key == trouble) and (not effect or effect == _NO_EXECUTE)


def _ours(toleration: Obj) -> bool:
    """Whether it lets the Pod on every virtual node: no provider is known yet, so the key alone counts."""
    return (
        toleration.get("key") == TAINT_KEY
        and toleration.get("operator") == TOLERATION["operator"]
        and (toleration.get("effect") or TAINT_EFFECT) == TAINT_EFFECT
    )


def _pointer(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
