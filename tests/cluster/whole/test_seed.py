"""The seed's NodePool and Deployment on the whole system: two fake clouds, one controller, one scheduler."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.api import keys
from app.api.crds import load_crds
from hack.cluster import Cluster
from hack.controller import Controller
from tests.support.clouds import FakeCloud
from tests.support.cluster import Kubectl

SAMPLES = Path(__file__).resolve().parents[3] / "docs" / "samples"
NAMESPACE = "whole-path"
FINALIZER = ("patch", "nodeclaims", "")


class World:
    """The cluster, the clouds and the controller, as a person at a terminal has them."""

    def __init__(self, kubectl: Kubectl, controller: Controller, modal: FakeCloud, aws: FakeCloud) -> None:
        self._kubectl, self.controller, self.modal, self.aws = kubectl, controller, modal, aws

    async def kubectl(self, *args: str | Path, stdin: str | None = None) -> str:
        # In a thread: the API server asks webhooks while kubectl waits, and tests share this loop.
        return await asyncio.to_thread(self._kubectl, *args, stdin=stdin)

    async def items(self, kind: str) -> list[dict[str, Any]]:
        found = json.loads(await self.kubectl("get", kind, "-n", NAMESPACE, "-o", "json"))
        return list(found["items"])

    async def ready(self, provider: str | None = None) -> list[dict[str, Any]]:
        pods = await self.items("pods")
        return [
            pod for pod in pods if _ready(pod) and (provider is None or _node(pod) == f"nebula-{provider}")
        ]

    async def until_ready(self, count: int, *, provider: str | None = None) -> list[dict[str, Any]]:
        async with asyncio.timeout(60):
            while len(pods := await self.ready(provider)) != count:
                await asyncio.sleep(0.2)
            return pods

    async def until_gone(self) -> None:
        async with asyncio.timeout(60):
            while await self.items("pods") or await self.items("nodeclaims"):
                await asyncio.sleep(0.2)


@pytest.fixture
async def world(
    cluster: Cluster, kubectl: Kubectl, database_url: str, tmp_path: Path
) -> AsyncIterator[World]:
    for crd in load_crds():
        kubectl("apply", "-f", "-", stdin=json.dumps(crd))
        kubectl("wait", "--for=condition=Established", f"crd/{crd['metadata']['name']}", "--timeout=30s")
    for namespace in (NAMESPACE, keys.SYSTEM_NAMESPACE):
        kubectl.run("create", "namespace", namespace)
    clouds = [
        FakeCloud(tmp_path / name, scenario=SAMPLES / "scenarios" / f"{name}.yaml")
        for name in ("modal", "aws")
    ]
    controller: Controller | None = None
    try:
        for cloud in clouds:
            await cloud.start()
        controller = Controller(
            tmp_path / "controller",
            kubeconfig=cluster.kubeconfig,
            database_url=database_url,
            clouds={"modal": clouds[0].url, "aws": clouds[1].url},
            webhook_url=cluster.webhook_url,
            # On a busy machine a Lease of three seconds is lost now and then, and nothing here is about that.
            options={"NEBULA_LEASE_DURATION_S": "20", "NEBULA_LEASE_DEADLINE_S": "15"},
        )
        await asyncio.to_thread(controller.start)
        yield World(kubectl, controller, *clouds)
    finally:
        for kind in ("deployments", "jobs", "pods"):
            await asyncio.to_thread(
                kubectl.run, "delete", kind, "--all", "-n", NAMESPACE, "--wait=false", "--grace-period=1"
            )
        if controller is not None:
            await asyncio.to_thread(controller.stop)
        for kind, name in (
            ("mutatingwebhookconfiguration", keys.MUTATING_WEBHOOK_CONFIGURATION),
            ("validatingwebhookconfiguration", keys.VALIDATING_WEBHOOK_CONFIGURATION),
            ("node", "nebula-modal"),
            ("node", "nebula-aws"),
        ):
            await asyncio.to_thread(kubectl.run, "delete", kind, name, "--ignore-not-found")
        for cloud in clouds:
            await cloud.close()
        await asyncio.to_thread(_force_away, kubectl)


async def test_the_seed_gets_a_machine_and_gives_it_back(world: World):
    await world.kubectl("apply", "-n", NAMESPACE, "-f", SAMPLES / "nodepool.yaml")
    await world.kubectl("apply", "-n", NAMESPACE, "-f", SAMPLES / "deployment.yaml")

    (pod,) = await world.until_ready(1)

    (machine,) = await world.modal.alive()
    assert pod["metadata"]["annotations"][keys.INSTANCE_ID_ANNOTATION] == machine["id"]
    assert (machine["accelerator"], machine["count"], machine["tier"]) == ("H100", 8, "Spot")
    assert machine["image"] == "nvidia/cuda:12.4.1-base-ubuntu22.04"
    (claim,) = await world.items("nodeclaims")
    assert claim["spec"]["podRef"]["uid"] == pod["metadata"]["uid"]
    assert claim["status"]["instanceID"] == machine["id"]

    await world.kubectl("delete", "deployment", "gpu-workload", "-n", NAMESPACE)
    await world.until_gone()

    assert await world.modal.alive() == []
    assert await world.aws.machines() == []


async def test_a_refusal_moves_the_workload_to_the_second_provider(world: World):
    for tier in ("Spot", "OnDemand"):
        await world.modal.set_capacity(0, tier=tier, accelerator="H100")
    await world.kubectl("apply", "-n", NAMESPACE, "-f", SAMPLES / "nodepool.yaml")
    await world.kubectl("apply", "-n", NAMESPACE, "-f", SAMPLES / "deployment.yaml")

    await world.until_ready(1, provider="aws")

    assert await world.modal.machines() == []
    (machine,) = await world.aws.alive()
    assert (machine["region"], machine["tier"]) == ("us-east-1", "Spot")


async def test_a_bare_pod_and_a_job_end_as_their_workload_does(world: World):
    """Exit 0 is Succeeded and completes a Job; the machine goes as soon as the Pod is over."""
    await world.kubectl("apply", "-n", NAMESPACE, "-f", SAMPLES / "nodepool.yaml")
    template = {
        "metadata": {
            "labels": {
                keys.ENABLED_LABEL: "true",
                keys.NODE_POOL_LABEL: "gpu",
                keys.ACCELERATOR_TYPE_LABEL: "T4",
            }
        },
        "spec": {
            "restartPolicy": "Never",
            "containers": [
                {
                    "name": "work",
                    "image": "work:1",
                    "env": [{"name": "FAKE_EXIT_AFTER_S", "value": "0.5"}],
                    "resources": {"limits": {keys.GPU_RESOURCE: "1"}},
                }
            ],
        },
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "train"},
        "spec": {"template": template},
    }
    failing = json.loads(json.dumps(template))
    failing["spec"]["containers"][0]["env"].append({"name": "FAKE_EXIT_CODE", "value": "3"})
    bare = {"apiVersion": "v1", "kind": "Pod", **failing, "metadata": {"name": "bare", **failing["metadata"]}}

    await world.kubectl("create", "-n", NAMESPACE, "-f", "-", stdin=json.dumps(job))
    await world.kubectl("create", "-n", NAMESPACE, "-f", "-", stdin=json.dumps(bare))

    await world.kubectl("wait", "-n", NAMESPACE, "--for=condition=Complete", "job/train", "--timeout=60s")
    await world.kubectl(
        "wait", "-n", NAMESPACE, "--for=jsonpath={.status.phase}=Failed", "pod/bare", "--timeout=60s"
    )
    (pod,) = [pod for pod in await world.items("pods") if pod["metadata"]["name"] == "bare"]
    assert pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 3
    for cloud in (world.modal, world.aws):
        await cloud.until(lambda truth: all(machine["state"] == "gone" for machine in truth["machines"]))


async def test_one_pods_life_costs_the_writes_of_the_budget_and_no_more(world: World, cluster: Cluster):
    if cluster.control_plane is None:
        pytest.fail(
            "writes are counted in the audit log of our own control plane: unset NEBULA_TEST_KUBECONFIG"
        )
    await world.modal.set_life(boot_s=0)
    await world.kubectl("apply", "-n", NAMESPACE, "-f", SAMPLES / "nodepool.yaml")
    deployment = yaml.safe_load((SAMPLES / "deployment.yaml").read_text())
    deployment["metadata"]["name"] = "budget"  # so that its Pods and claims are told apart in the log
    await world.kubectl("create", "-n", NAMESPACE, "-f", "-", stdin=json.dumps(deployment))
    await world.until_ready(1)
    await world.kubectl("delete", "deployment", "budget", "-n", NAMESPACE)
    await world.until_gone()

    async with asyncio.timeout(20):  # the log is written in batches
        while not (writes := _writes(cluster.control_plane.audit_log, "budget-"))[FINALIZER]:
            await asyncio.sleep(0.2)

    allowed = {
        ("create", "nodeclaims", ""): 1,
        ("create", "cloudpodbindings", ""): 1,
        ("patch", "pods", ""): 1,  # selector, annotations and gate
        ("patch", "nodeclaims", "status"): 3,  # the mark, Bound, and Terminating of a graceful deletion
        ("patch", "cloudpodbindings", "status"): 2,  # Bound, and Ready where it was not yet in it
        ("patch", "pods", "status"): 3,  # Initializing of a slow boot, Ready, terminated
        ("delete", "pods", ""): 1,
        ("delete", "nodeclaims", ""): 1,
        FINALIZER: 1,
    }
    over = {key: (n, allowed.get(key, 0)) for key, n in writes.items() if n > allowed.get(key, 0)}
    assert over == {}
    assert sum(writes.values()) <= 13


def _writes(audit_log: Path, prefix: str) -> Counter[tuple[str, str, str]]:
    """Our writes to Pods of that name, their claims and bindings, as the API server saw them."""
    count: Counter[tuple[str, str, str]] = Counter()
    ours = ("pods", "nodeclaims", "cloudpodbindings")
    with audit_log.open() as lines:
        for line in lines:
            entry = json.loads(line)
            ref = entry.get("objectRef", {})
            if not entry.get("userAgent", "").startswith("nebula/") or entry["verb"] in (
                "get",
                "list",
                "watch",
            ):
                continue
            if ref.get("resource") in ours and ref.get("name", "").removeprefix(f"{NAMESPACE}-").startswith(
                prefix
            ):
                count[entry["verb"], ref["resource"], ref.get("subresource", "")] += 1
    return count


def _ready(pod: dict[str, Any]) -> bool:
    conditions = pod["status"].get("conditions", [])
    return "deletionTimestamp" not in pod["metadata"] and any(
        condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions
    )


def _node(pod: dict[str, Any]) -> str:
    return str(pod["spec"].get("nodeName"))


def _force_away(kubectl: Kubectl) -> None:
    """Take away what a failed test left, so that the next one begins with nothing."""
    kubectl.run("delete", "pods", "--all", "-n", NAMESPACE, "--force", "--grace-period=0")
    for name in kubectl("get", "nodeclaims", "-o", "name").split():
        kubectl.run("patch", name, "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
        kubectl.run("delete", name, "--ignore-not-found", "--wait=false")
    kubectl.run("delete", "nodepool", "gpu", "--ignore-not-found", "--wait=false")
    kubectl.run("patch", "nodepool", "gpu", "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
