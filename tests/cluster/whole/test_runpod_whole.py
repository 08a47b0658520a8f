"""The whole product over RunPod's own protocol: a Pod's life, and what its users are told."""

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pytest_postgresql.executors import NoopExecutor

from app.api import keys
from app.api.crds import load_crds
from app.store.devserver import DevPostgres
from hack.cluster import Cluster
from hack.controller import Controller
from tests.providers.rows import RUNPOD
from tests.support import postgres
from tests.support.clouds import ROOT, FakeCloud
from tests.support.cluster import Kubectl
from tests.support.composed import until

KEY = "rpa_canary_31f0"
POOL, NAMESPACE = "runpod-only", "runpod-whole"
WITHIN_S = 60.0


@dataclass(slots=True, kw_only=True)
class World:
    kubectl: Kubectl
    controller: Controller
    cloud: FakeCloud

    async def pods(self) -> list[dict[str, Any]]:
        shown = await asyncio.to_thread(self.kubectl, "get", "pods", "-n", NAMESPACE, "-o", "json")
        return list(json.loads(shown)["items"])

    async def one(self, holds: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """The Pod for which it is true, once there is one."""

        async def found() -> dict[str, Any] | None:
            return next((pod for pod in await self.pods() if holds(pod)), None)

        pod: dict[str, Any] = await until(found, within_s=WITHIN_S, what=what)
        return pod

    async def apply(self, *objects: dict[str, Any]) -> None:
        for obj in objects:
            await asyncio.to_thread(self.kubectl, "apply", "-n", NAMESPACE, "-f", "-", stdin=json.dumps(obj))

    async def delete(self, kind: str, name: str) -> None:
        await asyncio.to_thread(
            self.kubectl, "delete", kind, name, "-n", NAMESPACE, "--wait=false", "--ignore-not-found"
        )

    async def events(self) -> str:
        return await asyncio.to_thread(self.kubectl, "get", "events", "-n", NAMESPACE, "-o", "json")

    async def nothing_left(self) -> None:
        async def empty() -> bool:
            claims = await asyncio.to_thread(self.kubectl, "get", "nodeclaims", "-o", "name")
            return not claims and not await self.pods() and not await self.cloud.alive()

        await until(empty, within_s=WITHIN_S, what="no Pod, no claim and no machine is left")


@pytest.fixture(scope="module")
async def world(
    cluster: Cluster,
    kubectl: Kubectl,
    postgres_server: DevPostgres,
    database_template: NoopExecutor,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[World]:
    for crd in load_crds():
        kubectl("apply", "-f", "-", stdin=json.dumps(crd))
        kubectl("wait", "--for=condition=Established", f"crd/{crd['metadata']['name']}", "--timeout=30s")
    for name in (keys.SYSTEM_NAMESPACE, NAMESPACE):
        kubectl.run("create", "namespace", name)
    folder = tmp_path_factory.mktemp("runpod")
    scenario = RUNPOD | {
        "credential": KEY,
        "life": {"boot_s": 0.5, "exit_restarts": True},
        "quirks": {"lifecycle": "observed", "ports_after_s": 0.3},
        "serve": {},
        "images": {"missing": ["nowhere/app:1"]},
    }
    # The key is in the Secret that earlier installations have, and in no variable.
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "aibrix-neocloud-node-runpod", "namespace": keys.SYSTEM_NAMESPACE},
        "stringData": {"RUNPOD_API_KEY": KEY},
    }
    kubectl("apply", "-f", "-", stdin=json.dumps(secret))
    pool = {
        "apiVersion": keys.API_VERSION,
        "kind": keys.NODE_POOL,
        "metadata": {"name": POOL},
        "spec": {
            "providers": [{"name": "runpod"}],
            "capacityTypes": ["OnDemand"],
            "failover": {"blocklistTTL": "2s"},
        },
    }
    kubectl("apply", "-f", "-", stdin=json.dumps(pool))
    with postgres.clone(postgres_server, database_template) as url:
        async with FakeCloud.running(folder, scenario=scenario, simulator="runpod") as cloud:
            controller = Controller(
                folder / "controller",
                kubeconfig=cluster.kubeconfig,
                database_url=url,
                clouds={},
                others=[
                    f"runpod,url={cloud.url},list_every_s=0.2,calls_per_s=100,pull_window_s=2,job_every_s=0.5"
                ],
                webhook_url=cluster.webhook_url,
                options={"NEBULA_LEASE_DURATION_S": "20", "NEBULA_LEASE_DEADLINE_S": "15"},
            )
            made = World(kubectl=kubectl, controller=controller, cloud=cloud)
            try:
                await asyncio.to_thread(controller.start)
                yield made
            finally:
                await asyncio.to_thread(_tidy, kubectl, controller)


def _tidy(kubectl: Kubectl, controller: Controller) -> None:
    kubectl.run("delete", "deployments,jobs,pods", "--all", "-n", NAMESPACE, "--force", "--grace-period=0")
    controller.stop()
    for kind, name in (
        ("mutatingwebhookconfiguration", keys.MUTATING_WEBHOOK_CONFIGURATION),
        ("validatingwebhookconfiguration", keys.VALIDATING_WEBHOOK_CONFIGURATION),
        ("node", keys.node_name("runpod")),
    ):
        kubectl.run("delete", kind, name, "--ignore-not-found")
    for name in kubectl("get", "nodeclaims", "-o", "name").split():
        kubectl.run("patch", name, "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
        kubectl.run("delete", name, "--ignore-not-found", "--wait=false")
    kubectl.run("delete", "nodepool", POOL, "--ignore-not-found", "--wait=false")
    kubectl.run("patch", "nodepool", POOL, "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
    kubectl.run("delete", "namespace", NAMESPACE, "--wait=false")
    kubectl.run("delete", "secret", "aibrix-neocloud-node-runpod", "-n", keys.SYSTEM_NAMESPACE)


def a_deployment(name: str, *, image: str = "server:1", **annotations: str) -> dict[str, Any]:
    labels = {keys.ENABLED_LABEL: "true", keys.NODE_POOL_LABEL: POOL, keys.ACCELERATOR_TYPE_LABEL: "a40"}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": {"app": name}},
            "template": {
                "metadata": {"labels": labels | {"app": name}, "annotations": annotations},
                "spec": {
                    "containers": [
                        {
                            "name": "work",
                            "image": image,
                            "env": [{"name": "PASSWORD", "value": "canary-of-the-pod"}],
                            "ports": [{"containerPort": 8000}],
                            "readinessProbe": {"httpGet": {"path": "/", "port": 8000}, "periodSeconds": 1},
                            "resources": {"limits": {keys.GPU_RESOURCE: "1"}},
                        }
                    ]
                },
            },
        },
    }


def a_job(name: str, **annotations: str) -> dict[str, Any]:
    template = a_deployment(name, **annotations)["spec"]["template"]
    (container,) = template["spec"]["containers"]
    container["command"] = ["train"]
    del container["readinessProbe"]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {"template": {**template, "spec": {**template["spec"], "restartPolicy": "Never"}}},
    }


def _ready(pod: dict[str, Any]) -> bool:
    conditions = pod["status"].get("conditions") or ()
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


@pytest.mark.behaviour(376, 377, 378)
async def test_a_pods_life_on_runpod_from_gate_to_nothing_left(world: World):
    await world.apply(a_deployment("server", **{"cloud.aibrix.ai/runpod-disk-gb": "30"}))

    pod = await world.one(_ready, "the Pod is Ready, its probe answered at the mapped port")
    (machine,) = await world.cloud.alive()
    assert pod["spec"]["nodeName"] == keys.node_name("runpod")
    assert pod["metadata"]["annotations"][keys.ENDPOINT_ANNOTATION].startswith("127.0.0.1:")
    assert (machine["accelerator"], machine["count"], machine["tier"]) == ("A40", 1, "OnDemand")
    assert machine["name"].startswith("nb-")
    assert (await world.cloud.creates())[machine["name"]] == 1
    # A person deletes it in the console: the Pod is replaced, and the next one has a machine of its own.
    await world.cloud.remove(machine["id"])
    again = await world.one(
        lambda each: _ready(each) and each["metadata"]["uid"] != pod["metadata"]["uid"],
        "the next Pod is Ready",
    )
    await world.delete("deployment", "server")

    await world.nothing_left()
    assert again["metadata"]["name"] != pod["metadata"]["name"]
    assert set((await world.cloud.creates()).values()) == {1}
    log = world.controller.log.read_text()
    assert KEY not in log + await world.events()
    assert "canary-of-the-pod" not in log


async def test_what_a_user_is_told_of_an_image_that_runpod_cannot_pull(world: World):
    await world.apply(a_deployment("broken", image="nowhere/app:1"))

    async def told() -> bool:
        return "manifest unknown" in await world.events()

    await until(told, within_s=WITHIN_S, what="an Event with the host's own words")
    await world.delete("deployment", "broken")
    await world.nothing_left()


@pytest.mark.slow
@pytest.mark.behaviour(222)
async def test_out_of_stock_is_said_and_waited_for_and_no_card_is_blamed_for_long(world: World):
    await world.cloud.set_capacity(0, tier="OnDemand", accelerator="A40")
    await world.apply(a_deployment("waiting"))

    async def told() -> bool:
        return "no longer any instances available" in await world.events()

    await until(told, within_s=WITHIN_S, what="RunPod's own words in an Event")
    await world.cloud.set_capacity(None, tier="OnDemand", accelerator="A40")
    await world.one(_ready, "a Pod is Ready once there is stock again")
    await world.delete("deployment", "waiting")
    await world.nothing_left()


async def test_a_job_runs_on_runpod_only_where_its_end_is_reported_and_then_completes(world: World):
    silent, told = a_job("silent"), a_job("told", **{"cloud.aibrix.ai/runpod-job": "report"})
    await world.apply(silent)
    waiting = await world.one(
        lambda pod: "end could not be seen" in json.dumps(pod["status"]), "the Job waits, and says for what"
    )
    assert waiting["spec"]["schedulingGates"]
    await world.delete("job", "silent")
    await world.apply(told)
    await world.one(lambda pod: pod["status"].get("phase") == "Running", "the Job's Pod runs")
    (machine,) = await world.cloud.alive()

    await world.cloud.exit(machine["id"], code=0)

    async def complete() -> bool:
        shown = await asyncio.to_thread(world.kubectl, "get", "job", "told", "-n", NAMESPACE, "-o", "json")
        return json.loads(shown)["status"].get("succeeded") == 1

    await until(complete, within_s=WITHIN_S, what="the Job has succeeded")
    await until(lambda: _none(world), within_s=WITHIN_S, what="its machine is given back")
    await world.delete("job", "told")
    await world.nothing_left()


async def _none(world: World) -> bool:
    return not await world.cloud.alive()


@pytest.mark.slow
@pytest.mark.behaviour(387)
async def test_the_smoke_script_rents_only_with_its_gate_and_proves_that_nothing_is_left(world: World):
    before = len(await world.cloud.machines())
    closed = await asyncio.to_thread(_smoke, world, RUNPOD_E2E="yes")
    assert closed.returncode == 0
    assert closed.stdout.startswith("skipped: this rents a machine")
    await world.cloud.set_capacity(0, tier="OnDemand", accelerator="A40")
    sold_out = await asyncio.to_thread(_smoke, world, RUNPOD_E2E="1", RUNPOD_E2E_CAPACITY_CHECK="1")
    assert sold_out.stdout.endswith("skipped: RunPod has none now\n")
    await world.cloud.set_capacity(None, tier="OnDemand", accelerator="A40")
    assert len(await world.cloud.machines()) == before

    passed = await asyncio.to_thread(_smoke, world, RUNPOD_E2E="1", RUNPOD_E2E_CAPACITY_CHECK="1")

    assert passed.returncode == 0, passed.stdout + passed.stderr
    assert passed.stdout.endswith("PASSED: rented, run, given back; nothing is left\n")
    assert len(await world.cloud.machines()) == before + 1
    assert KEY not in passed.stdout + passed.stderr


def _smoke(world: World, **env: str) -> subprocess.CompletedProcess[str]:
    program = Path(world.kubectl._program)
    return subprocess.run(
        [ROOT / "hack/e2e/runpod-smoke.sh"],
        env={
            "HOME": str(world.controller.log.parent),  # kubectl keeps a cache there
            "PATH": f"{program.parent}:{os.environ['PATH']}",
            "KUBECONFIG": str(world.kubectl._kubeconfig),
            "RUNPOD_API_KEY": KEY,
            "RUNPOD_API_URL": world.cloud.url,
            "RUNPOD_E2E_TIMEOUT_S": "60",
            **env,
        },
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
