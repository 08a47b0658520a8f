"""Patches that write only what differs, and only on the object that is meant.

A Pod's status goes as strategic merge patch that carries ``metadata.uid``: the server refuses it (422) for a
Pod of the same name. On the status of custom resources the server ignores a ``uid`` in the patch and writes
(seen on 1.36), so there it is a JSON patch with a ``test``.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from app.kube.client import Obj

POD_STATUS_KEYS = {"conditions": "type"}
"""Lists in a Pod's status that several writers share, and the field that tells the elements apart."""


def diff(current: Any, wanted: Mapping[str, Any], *, keyed: Mapping[str, str] | None = None) -> Obj | None:
    """What of ``wanted`` differs from ``current``; None when nothing does.

    Fields that ``wanted`` does not name are left alone; None in ``wanted`` stands for "absent", and so do an
    empty text and list: the server does not store them, and would be sent them again for ever. Objects are
    compared field by field, lists as wholes, except those named in ``keyed``: of these only the elements that
    differ are returned, for a strategic merge by that key.
    """
    keyed = keyed or {}
    base = current if isinstance(current, Mapping) else {}
    changes: Obj = {}
    for field, value in wanted.items():
        held = base.get(field)
        if isinstance(value, Mapping):
            inner = diff(held, value, keyed=keyed)
            if inner is not None:
                changes[field] = inner
            elif not isinstance(held, Mapping):
                changes[field] = {}
        elif field in keyed and isinstance(value, list):
            if elements := _changed_elements(held or [], value, key=keyed[field]):
                changes[field] = elements
        elif _stored(value) != _stored(held):
            changes[field] = value
    return changes or None


def pod_status(
    uid: str,
    status: Mapping[str, Any],
    *,
    annotations: Mapping[str, str | None] | None = None,
    resource_version: str | None = None,
) -> Obj:
    """A strategic merge patch for ``pods/status``, refused unless the Pod has ``uid``.

    Annotations ride along (the Pod's status subresource takes them). ``resource_version`` is for what cannot
    be undone: a terminal phase.
    """
    metadata: Obj = {"uid": uid}
    if annotations:
        metadata["annotations"] = dict(annotations)
    if resource_version is not None:
        metadata["resourceVersion"] = resource_version
    return {"metadata": metadata, "status": dict(status)}


def whole_list(elements: Iterable[Mapping[str, Any]]) -> list[Obj]:
    """In a strategic merge patch: replace the list (an IP, say) instead of adding to it."""
    return [{"$patch": "replace"}, *(dict(element) for element in elements)]


def status_ops(current: Obj, wanted: Mapping[str, Any], *, guard_version: bool = False) -> list[Obj] | None:
    """A JSON patch that makes the status fields ``wanted`` true of this very object; None: they are.

    Fields are written as wholes, and None removes one, so two writers of one status must own different
    fields. The patch fails (`Replaced`) on another UID and (`Conflict`) when the status has come into being
    since ``current`` was read, or, with ``guard_version``, when anything at all has changed.
    """
    status = current.get("status")
    held = status or {}
    differing = {
        field: value for field, value in wanted.items() if _stored(value) != _stored(held.get(field))
    }
    if not differing:
        return None
    ops = guards(current, version=guard_version)
    if status is None:
        present = {field: value for field, value in differing.items() if value is not None}
        # A missing path equals null in a test: nobody's fields are overwritten by the whole new status.
        return [*ops, {"op": "test", "path": "/status", "value": None}, _set("/status", present)]
    for field, value in differing.items():
        path = f"/status/{_escaped(field)}"
        ops.append({"op": "remove", "path": path} if value is None else _set(path, value))
    return ops


def guards(obj: Obj, *, version: bool = False) -> list[Obj]:
    """The ``test`` operations that tie a JSON patch to this object, and to this version of it."""
    metadata = obj["metadata"]
    ops = [{"op": "test", "path": "/metadata/uid", "value": metadata["uid"]}]
    if version:
        test = {"op": "test", "path": "/metadata/resourceVersion", "value": metadata["resourceVersion"]}
        ops.append(test)
    return ops


def without_finalizer(obj: Obj, finalizer: str) -> list[Obj] | None:
    """A JSON patch that takes ``finalizer`` off this very version of the object; None if it has none."""
    finalizers = obj["metadata"].get("finalizers") or []
    if finalizer not in finalizers:
        return None
    # By position, so the value there is tested too: somebody may have put another one in front.
    path = f"/metadata/finalizers/{finalizers.index(finalizer)}"
    return [
        *guards(obj),
        {"op": "test", "path": path, "value": finalizer},
        {"op": "remove", "path": path},
    ]


def condition(
    conditions: list[Obj] | None,
    *,
    type: str,
    status: str,
    reason: str,
    message: str = "",
    now: datetime,
    observed_generation: int | None = None,
) -> list[Obj]:
    """The conditions with one set. ``lastTransitionTime`` moves only when its status does.

    Returns equal conditions when there is nothing to change: `diff` and `status_ops` then find no difference.
    """
    before = next((held for held in conditions or () if held["type"] == type), None)
    since = before.get("lastTransitionTime") if before and before.get("status") == status else None
    after: Obj = {
        "type": type,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": since or timestamp(now),
    }
    if observed_generation is not None:
        after["observedGeneration"] = observed_generation
    if before is None:
        return [*(conditions or ()), after]
    return [after if held is before else held for held in conditions or ()]


def timestamp(moment: datetime) -> str:
    """The API's time format, whole seconds of UTC."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def _changed_elements(held: list[Obj], wanted: list[Obj], *, key: str) -> list[Obj]:
    by_key = {element.get(key): element for element in held}
    changed: list[Obj] = []
    for element in wanted:
        before = by_key.get(element.get(key))
        if before is None or diff(before, element) is not None:
            changed.append(element)
    return changed


def _stored(value: Any) -> Any:
    """``value`` without what the server leaves out of core objects: null, empty texts and lists."""
    if isinstance(value, Mapping):
        kept = ((key, _stored(inner)) for key, inner in value.items())
        return {key: inner for key, inner in kept if inner is not None}
    if isinstance(value, list):
        return [_stored(inner) for inner in value] or None
    return None if value == "" else value


def _set(path: str, value: Any) -> Obj:
    return {"op": "add", "path": path, "value": value}  # adding to an object also replaces


def _escaped(field: str) -> str:
    return field.replace("~", "~0").replace("/", "~1")
