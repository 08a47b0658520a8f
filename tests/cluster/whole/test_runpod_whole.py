"""The whole product over RunPod's own protocol: a Pod's life, and what its users are told."""

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
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
POOL, NOWHERE, SHELL, NAMESPACE = "runpod-only", "runpod-nowhere", "runpod-shell", "runpod-whole"
POOLS = {POOL: "runpod", NOWHERE: "runpod", SHELL: "shell"}
QUICK = "list_every_s=0.2,calls_per_s=100"
WITHIN_S = 60.0


@dataclass(slots=True, kw_only=True)
class World:
    kubectl: Kubectl
    controller: Controller
    cloud: FakeCloud
    shells: FakeCloud  # an account whose pods run processes, and have an sshd
    database: str

    async def rows_with(self, *texts: str) -> list[str]:
        """The tables in which a row holds one of these texts, whatever the column."""
        connection = await asyncpg.connect(self.database.replace("postgresql+asyncpg", "postgresql"))
        try:
            tables = await connection.fetch(
                "select format('%I.%I', schemaname, tablename) as name from pg_tables"
                " where schemaname not in ('pg_catalog', 'information_schema')"
            )
            found = []
            for table in tables:
                for text in texts:
                    query = f"select exists (select from {table['name']} t where strpos(t::text, $1) > 0)"
                    if await connection.fetchval(query, text):
                        found.append(f"{table['name']}: {text}")
            return found
        finally:
            await connection.close()

    async def told(self, text: str) -> None:
        async def holds() -> bool:
            return text in await self.events()

        await until(holds, within_s=WITHIN_S, what=f"an Event that says {text!r}")

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
            alive = await self.cloud.alive() or await self.shells.alive()
            return not claims and not await self.pods() and not alive

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
    for pool, provider in POOLS.items():
        spec = {
            "providers": [
                {"name": "runpod", "regions": ["XX-NO-1"]} if pool == NOWHERE else {"name": provider}
            ],
            "capacityTypes": ["OnDemand"],
            "failover": {"blocklistTTL": "2s"},
        }
        body = {
            "apiVersion": keys.API_VERSION,
            "kind": keys.NODE_POOL,
            "metadata": {"name": pool},
            "spec": spec,
        }
        kubectl("apply", "-f", "-", stdin=json.dumps(body))
    shell = RUNPOD | {"account": "acct-shell", "processes": {}, "quirks": {"sshd": True}}
    with postgres.clone(postgres_server, database_template) as url:
        async with (
            FakeCloud.running(folder, scenario=scenario, simulator="runpod") as cloud,
            FakeCloud.running(folder / "shell", scenario=shell, simulator="runpod") as shells,
        ):
            controller = Controller(
                folder / "controller",
                kubeconfig=cluster.kubeconfig,
                database_url=url,
                clouds={},
                others=[
                    f"runpod,url={cloud.url},{QUICK},pull_window_s=2,job_every_s=0.5",
                    f"shell=runpod,url={shells.url},key_env=SHELL_KEY,{QUICK}",
                ],
                webhook_url=cluster.webhook_url,
                options={
                    "NEBULA_LEASE_DURATION_S": "20",
                    "NEBULA_LEASE_DEADLINE_S": "15",
                    "SHELL_KEY": "any",
                },
            )
            made = World(kubectl=kubectl, controller=controller, cloud=cloud, shells=shells, database=url)
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
        ("node", keys.node_name("shell")),
    ):
        kubectl.run("delete", kind, name, "--ignore-not-found")
    for name in kubectl("get", "nodeclaims", "-o", "name").split():
        kubectl.run("patch", name, "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
        kubectl.run("delete", name, "--ignore-not-found", "--wait=false")
    for pool in POOLS:
        kubectl.run("delete", "nodepool", pool, "--ignore-not-found", "--wait=false")
        kubectl.run("patch", "nodepool", pool, "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
    kubectl.run("delete", "namespace", NAMESPACE, "--wait=false")
    kubectl.run("delete", "secret", "aibrix-neocloud-node-runpod", "-n", keys.SYSTEM_NAMESPACE)


def a_deployment(
    name: str, *, image: str = "server:1", pool: str = POOL, **annotations: str
) -> dict[str, Any]:
    labels = {keys.ENABLED_LABEL: "true", keys.NODE_POOL_LABEL: pool, keys.ACCELERATOR_TYPE_LABEL: "a40"}
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
    assert "canary-of-the-pod" not in log + await world.events()
    assert await world.rows_with(KEY, "canary-of-the-pod") == []


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


@pytest.mark.slow
async def test_exec_goes_through_the_images_sshd_where_it_is_asked_for_and_else_says_why_not(world: World):
    asking = a_deployment("asking", pool=SHELL, **{"cloud.aibrix.ai/shell-ssh": "image"})
    silent = a_deployment("silent", pool=SHELL)
    for body in (asking, silent):
        (container,) = body["spec"]["template"]["spec"]["containers"]
        container |= {"command": ["python3", "-m", "http.server", "8000"], "ports": []}
        del container["readinessProbe"]
    await world.apply(asking, silent)
    for name in ("asking", "silent"):
        await world.one(lambda pod, name=name: _ready(pod) and name in _name(pod), f"{name} is Ready")

    done = await _exec(world, "deployment/asking", "sh", "-c", 'echo "$PASSWORD"; echo no >&2; exit 7')
    assert (done.returncode, done.stdout) == (7, "canary-of-the-pod\n")
    assert "no\n" in done.stderr
    piped = await _exec(world, "deployment/asking", "cat", stdin="through and back")
    assert (piped.returncode, piped.stdout) == (0, "through and back")
    refused = await _exec(world, "deployment/silent", "true")
    assert refused.returncode != 0
    assert "RunPod has no exec" in refused.stderr
    assert "annotation cloud.aibrix.ai/shell-ssh" in refused.stderr
    attached = await asyncio.to_thread(
        world.kubectl.run, "attach", "deployment/asking", "-n", NAMESPACE, timeout_s=30
    )
    assert "lets nobody attach" in attached.stderr

    log = world.controller.log.read_text()
    assert "PRIVATE KEY" not in log
    assert "canary-of-the-pod" not in log
    for name in ("asking", "silent"):
        await world.delete("deployment", name)
    await world.nothing_left()


async def _exec(
    world: World, pod: str, *command: str, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    flags = ["-i"] if stdin is not None else []
    args = ("exec", *flags, pod, "-n", NAMESPACE, "--", *command)
    return await asyncio.to_thread(world.kubectl.run, *args, stdin=stdin, timeout_s=30)


def _name(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["name"])


@pytest.mark.slow
async def test_each_bad_input_is_told_to_its_user_and_rents_nothing(world: World):
    """Refused when it is created where nothing can mend it; else an Event, with RunPod's own words."""
    before = len(await world.cloud.machines())
    unknown, forbidden = a_deployment("unknown"), a_deployment("forbidden")
    unknown["spec"]["template"]["metadata"]["labels"][keys.ACCELERATOR_TYPE_LABEL] = "h1000"
    (container,) = forbidden["spec"]["template"]["spec"]["containers"]
    container["env"] = [{"name": "RUNPOD_POD_ID", "value": "x"}]
    lost = a_deployment("lost", pool=NOWHERE)
    await world.apply(unknown, forbidden, lost)
    await world.told("h1000")
    await world.told("env RUNPOD_POD_ID is not for workloads on RunPod")
    for name in ("unknown", "forbidden"):
        await world.delete("deployment", name)
    await world.told("XX-NO-1")
    await world.delete("deployment", "lost")

    for fault, fields, said in (
        ("refuse", {"code": "quota"}, "Your account balance is too low to rent a pod"),
        ("refuse", {"code": "unsupported"}, "you do not have access to this GPU pool"),
        ("expired", {}, "invalid API key"),
    ):
        await world.cloud.add_fault(fault, verb="create", unlimited=True, **fields)
        await world.apply(a_deployment("broke"))
        await world.told(said)
        await world.delete("deployment", "broke")
        await world.cloud.clear_faults()
        await world.nothing_left()

    assert len(await world.cloud.machines()) == before
    assert KEY not in world.controller.log.read_text() + await world.events()
    assert await world.rows_with(KEY) == []
