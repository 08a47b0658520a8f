"""The scene of the sweep: a machine that nobody remembers is found, explained and ended."""

import tempfile
from pathlib import Path
from typing import Any

import orjson

from hack.demo.stage import NAMESPACE, Stage

HAND_MADE = "ada-debugging"


def orphan(stage: Stage) -> None:
    """An orphan made on purpose: held, explained, swept, its cost told; a person's machine stays."""
    modal = stage.clouds["modal"]
    earlier = modal.machines()
    modal.has("H100", units=64)
    hand_made = modal.plant(HAND_MADE)
    stage.say("Somebody has a machine of their own there. The store is backed up; then a Job rents one.")
    with tempfile.TemporaryDirectory() as folder:
        dump = str(Path(folder) / "store.dump")
        stage.show_nebula("backup", dump)
        stage.make(_pool(), _job())
        stage.until("the Job's Pod is Ready on modal", lambda: len(stage.ready_on("modal")) == 1)
        (ours,) = [one for one in modal.made_since(earlier) if one["id"] != hand_made]

        stage.say("A disaster: the controller stops, Job, Pod and claim vanish without a finalizer, and the")
        print(
            "store is put back to the backup. Nobody remembers the machine, and it goes on billing.",
            flush=True,
        )
        stage.controller.stop()
        stage.kubectl("delete", "job/forgotten", "-n", NAMESPACE, "--cascade=orphan")
        for pod in stage.pods():
            name = pod["metadata"]["name"]
            stage.kubectl("delete", "pod", name, "-n", NAMESPACE, "--grace-period=0", "--force")
        for claim in stage.kubectl("get", "nodeclaims", "-o", "name").split():
            stage.kubectl("patch", claim, "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
            stage.kubectl("delete", claim, "--ignore-not-found")
        stage.show_nebula("restore", dump, "--replace", "--by", "ada")
    stage.controller.start()

    stage.say("The cloud's own list shows it. Nothing is ended: the store is older than the world.")
    stage.until("it is a finding", lambda: _found(stage, ours["id"]) is not None, within_s=60)
    stage.show_nebula("orphans", code=2)
    stage.show_nebula("orphans", "explain", ours["id"])
    stage.check("it is there, and costs", ours["id"] in {one["id"] for one in modal.alive()})

    stage.say("Somebody has looked, and confirms. The sweep does the rest, under all its other rails.")
    stage.show_nebula("hold", "release", "--yes")
    stage.until(
        "the orphan is gone", lambda: ours["id"] not in {one["id"] for one in modal.alive()}, within_s=90
    )
    stage.until("its end is proven", lambda: _found(stage, ours["id"]) is None, within_s=60)
    stage.show_nebula("orphans", "--since", "1h")
    (after,) = [one for one in modal.machines() if one["id"] == ours["id"]]
    stage.check(f"modal's own books: it was on the bill for ${after['bill_usd']}", after["state"] == "gone")
    stage.check(
        "the person's machine was not touched",
        any(one["id"] == hand_made and one["terminates"] == 0 for one in modal.alive()),
    )
    modal.end(hand_made)
    stage.show("delete", "nodepool", "modal-only")
    for cloud in stage.clouds.values():
        stage.check(f"{cloud.name}'s own list is empty", not cloud.alive())


def _found(stage: Stage, resource: str) -> dict[str, Any] | None:
    found = orjson.loads(stage.nebula("orphans", "-o", "json", code=None))
    findings: list[dict[str, Any]] = found["findings"]
    return next((one for one in findings if one["resource"] == resource), None)


def _pool() -> dict[str, Any]:
    return {
        "apiVersion": "nebula.inftyai.com/v1alpha1",
        "kind": "NodePool",
        "metadata": {"name": "modal-only"},
        "spec": {"providers": [{"name": "modal"}], "capacityTypes": ["Spot", "OnDemand"]},
    }


def _job() -> dict[str, Any]:
    container = {
        "name": "workload",
        "image": "nvidia/cuda:12.4.1-base-ubuntu22.04",
        "resources": {"limits": {"nvidia.com/gpu": "1"}},
    }
    labels = {
        "nebula.inftyai.com/enabled": "true",
        "nebula.inftyai.com/nodepool": "modal-only",
        "nebula.inftyai.com/accelerator-type": "h100",
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "forgotten"},
        "spec": {
            "template": {
                "metadata": {"labels": labels},
                "spec": {"restartPolicy": "Never", "containers": [container]},
            }
        },
    }
