"""Who made a Pod, and from what: the name under which its blocks and its owner's waits are kept."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from app.api.keys import ATTRIBUTION_ANNOTATION, COST_CENTER_LABELS, GROUP, TEAM_LABELS

_OURS_KEPT = frozenset({*TEAM_LABELS, *COST_CENTER_LABELS})
_REVISION_LABELS = ("controller-revision-hash", "pod-template-hash")


def controller_of(pod: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The owner reference of the controller that would replace this Pod, if it has one."""
    owners = pod["metadata"].get("ownerReferences") or ()
    return next((owner for owner in owners if owner.get("controller")), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """Who a Pod's machine is paid for: what made the Pod, and the Pod's labels without ours."""

    kind: str
    name: str
    labels: Mapping[str, str] = field(default_factory=dict)


def attribution_of(pod: Mapping[str, Any]) -> Attribution:
    """As it is now. A ReplicaSet that carries a Deployment's hash counts as the Deployment."""
    metadata = pod["metadata"]
    labels = dict(metadata.get("labels") or {})
    owner = controller_of(pod)
    maker = {"kind": "Pod", "name": metadata.get("name")} if owner is None else owner
    kind, name = str(maker.get("kind") or ""), str(maker.get("name") or "")
    revision = labels.get("pod-template-hash")
    if kind == "ReplicaSet" and revision and name.endswith(f"-{revision}"):
        kind, name = "Deployment", name.removesuffix(f"-{revision}")
    kept = {
        key: value
        for key, value in sorted(labels.items())
        if key not in _REVISION_LABELS and not (key.startswith(f"{GROUP}/") and key not in _OURS_KEPT)
    }
    return Attribution(kind=kind, name=name, labels=kept)


def team_of(labels: Mapping[str, str]) -> str:
    """The team that a Pod's labels name; "" for none."""
    return next((labels[label] for label in TEAM_LABELS if labels.get(label)), "")


def labels_said(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The Pod's labels as a claim's annotation has kept them; empty where it cannot be read."""
    text = (metadata.get("annotations") or {}).get(ATTRIBUTION_ANNOTATION)
    try:
        said = json.loads(text) if text else {}
        return {str(key): str(value) for key, value in (said.get("labels") or {}).items()}
    except (ValueError, AttributeError):
        return {}


def template_of(pod: Mapping[str, Any]) -> str:
    """Namespace, owner and revision, or the Pod's own UID: equal for two Pods made from one template.

    A Pod's author may write any owner reference: with the namespace in it, nobody can have another
    namespace's template blocked.
    """
    metadata = pod["metadata"]
    owner = controller_of(pod)
    if owner is None:
        return str(metadata["uid"])
    labels = metadata.get("labels") or {}
    revision = next((labels[label] for label in _REVISION_LABELS if labels.get(label)), "")
    name = f"{metadata.get('namespace', '')}/{owner['uid']}"
    return f"{name}/{revision}" if revision else name
