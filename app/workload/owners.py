"""Who made a Pod, and from what: the name under which its blocks and its owner's waits are kept."""

from collections.abc import Mapping
from typing import Any

_REVISION_LABELS = ("controller-revision-hash", "pod-template-hash")


def controller_of(pod: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The owner reference of the controller that would replace this Pod, if it has one."""
    owners = pod["metadata"].get("ownerReferences") or ()
    return next((owner for owner in owners if owner.get("controller")), None)


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
