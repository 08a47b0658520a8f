"""What a Pod asks of placement, read from the Pod once. Pure.

Only what the Pod's author may say is read here; nothing that is rented or destroyed later comes from the Pod
again: it is frozen on the claim.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from app.api.keys import (
    AIBRIX_GROUP,
    MAX_PRICE_ANNOTATION,
    NODE_POOL_LABEL,
)
from app.api.not_built import annotation_refusals
from app.placement.constraints import NodeConstraints, Obj, constraints_of
from app.workload.accelerators import BadRequest, accelerator_of
from providers.base import Accelerator, PodUid

# What tells one revision of an owner's template from the next, where the owner itself lives on.
_REVISION_LABELS = ("controller-revision-hash", "pod-template-hash")
_OPTION_CHARS = 1024  # of a value in NodeClaim.spec.providerOptions
_OPTIONS = 64


class InvalidRequest(ValueError):
    """The Pod asks for something that cannot be placed, whatever the cluster does; the message says what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """One machine that is wanted. The parts with defaults are what a Pod may leave open.

    ``template`` is the owner's revision that the request was made from: a provider that called the request
    itself invalid is not asked again with the same one. ``options`` are what the author asked of providers.
    """

    namespace: str
    name: str
    uid: PodUid
    accelerator: Accelerator | None
    node: NodeConstraints = field(default_factory=NodeConstraints)
    template: str = ""
    restart_policy: str = "Always"
    active_deadline_s: int | None = None
    options: Mapping[str, str] = field(default_factory=dict)

    def options_for(self, provider: str) -> dict[str, str]:
        """The options of ``<provider>-NAME`` annotations, by NAME."""
        prefix = f"{provider}-"
        return {
            name.removeprefix(prefix): value
            for name, value in sorted(self.options.items())
            if name.startswith(prefix) and name != prefix
        }


def request_of(pod: Obj) -> PlacementRequest:
    """The request of a Pod as the API server has stored it.

    Raises:
        InvalidRequest: a count that is none, a count without a type, an option too long for a claim, or an
            annotation that this version would have to ignore.
    """
    metadata, spec = pod["metadata"], pod.get("spec") or {}
    annotations = metadata.get("annotations") or {}
    if refused := annotation_refusals(annotations):
        raise InvalidRequest("; ".join(refused))
    try:
        accelerator = accelerator_of(pod)
    except BadRequest as error:
        raise InvalidRequest(str(error)) from error
    return PlacementRequest(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=PodUid(metadata["uid"]),
        accelerator=accelerator,
        node=constraints_of(pod),
        template=template_of(pod),
        restart_policy=spec.get("restartPolicy") or "Always",
        active_deadline_s=spec.get("activeDeadlineSeconds"),
        options=_options(annotations),
    )


def pool_name(pod: Obj) -> str | None:
    """The NodePool that the Pod names, if any."""
    labels = pod["metadata"].get("labels") or {}
    return labels.get(NODE_POOL_LABEL) or None


def controller_of(pod: Obj) -> Mapping[str, Any] | None:
    """The owner reference of the controller that would replace this Pod, if it has one."""
    owners = pod["metadata"].get("ownerReferences") or ()
    return next((owner for owner in owners if owner.get("controller")), None)


def template_of(pod: Obj) -> str:
    """The owner's UID and revision, or the Pod's own UID: equal for two Pods made from one template."""
    owner = controller_of(pod)
    if owner is None:
        return str(pod["metadata"]["uid"])
    labels = pod["metadata"].get("labels") or {}
    revision = next((labels[label] for label in _REVISION_LABELS if labels.get(label)), "")
    return f"{owner['uid']}/{revision}" if revision else str(owner["uid"])


def _options(annotations: Mapping[str, str]) -> dict[str, str]:
    prefix = f"{AIBRIX_GROUP}/"
    options = {
        key.removeprefix(prefix): value
        for key, value in annotations.items()
        if key.startswith(prefix) and key != MAX_PRICE_ANNOTATION
    }
    if len(options) > _OPTIONS:
        raise InvalidRequest(f"{len(options)} annotations of {AIBRIX_GROUP}; at most {_OPTIONS} are taken")
    for name, value in sorted(options.items()):
        if len(value) > _OPTION_CHARS:
            raise InvalidRequest(f"annotation {prefix}{name} is longer than {_OPTION_CHARS} characters")
    return options
