"""Pods and machines for tests of pure functions; a test names only what it is about."""

from datetime import UTC, datetime, timedelta
from typing import Any

from app.kube.client import Obj
from app.provisioning.model import View
from providers.base import End, EndReason, Machine, MachineState, Ref, ResourceId

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
STARTED = NOW - timedelta(hours=1)
ENDED = NOW - timedelta(minutes=1)
REF = Ref(provider="fake", account="default", region="r1", resource_id=ResourceId("m-1"))


def a_pod(
    *, status: Obj | None = None, metadata: Obj | None = None, containers: tuple[str, ...] = ("workload",)
) -> Obj:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "p",
            "namespace": "ns",
            "uid": "pod-uid",
            "resourceVersion": "7",
            "generation": 2,
            **(metadata or {}),
        },
        "spec": {"containers": [{"name": name, "image": f"{name}:1"} for name in containers]},
        "status": status if status is not None else {"phase": "Pending"},
    }


def a_machine(state: MachineState = MachineState.RUNNING, **changes: Any) -> Machine:
    fields: dict[str, Any] = {"started_at": STARTED, "endpoint": "198.18.0.1", **changes}
    return Machine(ref=REF, identity="nb", state=state, **fields)


def exited(reason: EndReason, code: int | None = None, **changes: Any) -> Machine:
    return a_machine(MachineState.EXITED, end=End(reason=reason, exit_code=code, at=ENDED, **changes))


def a_view(machine: Machine | None = None, **changes: Any) -> View:
    return View(**{"state": "live", "ref": REF, "machine": machine, **changes})


def after(pod: Obj, patch: Obj) -> Obj:
    """The Pod as the server would have it after a strategic merge patch of its status."""
    status = {**pod["status"]}
    for key, value in patch["status"].items():
        if key == "conditions":
            held = {each["type"]: each for each in status.get("conditions") or ()}
            for each in value:
                merged = {**held.get(each["type"], {}), **each}
                held[each["type"]] = {name: text for name, text in merged.items() if text != ""}
            status["conditions"] = list(held.values())
        elif value is None:
            status.pop(key, None)
        else:
            status[key] = value
    metadata = {**pod["metadata"]}
    annotations = {**(metadata.get("annotations") or {}), **(patch["metadata"].get("annotations") or {})}
    return {**pod, "metadata": {**metadata, "annotations": annotations}, "status": status}
