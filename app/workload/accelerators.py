"""Which accelerator a Pod asks for, and how many: the type from its label, the count from its containers."""

from collections.abc import Mapping
from typing import Any

from app.api.keys import ACCELERATOR_TYPE_LABEL, GPU_RESOURCE
from app.api.quantities import parse_count
from providers.base import Accelerator


class BadRequest(ValueError):
    """What the Pod says about its accelerator makes no sense, whatever the cluster does."""


def accelerator_of(pod: Mapping[str, Any]) -> Accelerator | None:
    """The accelerator of a Pod; None when it asks for a machine without one.

    In each container the limit counts, the request only where there is no limit; of several containers the
    largest count. Init containers are not read. A type without a count is one of it. Its casing is kept.

    Raises:
        BadRequest: a count is no whole number, or has no type, or is zero beside a type.
    """
    labels = pod["metadata"].get("labels") or {}
    kind = (labels.get(ACCELERATOR_TYPE_LABEL) or "").strip()
    counts = [
        count
        for container in (pod.get("spec") or {}).get("containers") or ()
        if (count := _count(container)) is not None
    ]
    if not kind:
        if any(counts):
            raise BadRequest(
                f"{max(counts)} {GPU_RESOURCE} without a type; set the label {ACCELERATOR_TYPE_LABEL}"
            )
        return None
    count = max(counts) if counts else 1
    if count == 0:
        raise BadRequest(f"0 {GPU_RESOURCE} of type {kind}; ask for at least 1, or take the label off")
    return Accelerator(type=kind, count=count)


def _count(container: Mapping[str, Any]) -> int | None:
    resources = container.get("resources") or {}
    for part in ("limits", "requests"):
        amount = (resources.get(part) or {}).get(GPU_RESOURCE)
        if amount is not None:
            try:
                return parse_count(amount)
            except ValueError as error:
                raise BadRequest(
                    f"container {container.get('name')}: resources.{part} of {GPU_RESOURCE}: {error}"
                ) from error
    return None
