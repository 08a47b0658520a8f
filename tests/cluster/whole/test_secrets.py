"""What came from a Secret reaches the workload's machine, and nothing else: no log, no row, no API object."""

import asyncio
import base64
import hashlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import text

from app.api import keys
from app.api.crds import load_crds
from app.store.engine import create_engine
from hack.cluster import Cluster
from hack.controller import Controller
from tests.support.clouds import SMALL, FakeCloud
from tests.support.cluster import Kubectl
from tests.support.composed import until

PROVIDER = "hush"
TOKEN, PASSWORD = "canary-token-5f2d", "canary-pass-77aa"
FORMS = {
    form
    for each in (TOKEN, PASSWORD)
    for form in (each, base64.b64encode(each.encode()).decode().rstrip("="))
}
KINDS = "pods,events,nodes,nodepools,nodeclaims,cloudpodbindings,configmaps,leases"
IMAGE = "registry.example.com/team/app:1"
SCENARIO = SMALL | {
    "serve": {"status": 401},
    "images": {"private": {"registry.example.com": f"user:{PASSWORD}"}},
}


@dataclass
class World:
    kubectl_: Kubectl
    cloud: FakeCloud
    controller: Controller
    database_url: str
    namespace: str

    async def kubectl(self, *args: str, stdin: Any = None) -> str:
        given = None if stdin is None else json.dumps(stdin)
        return await asyncio.to_thread(self.kubectl_, "-n", self.namespace, *args, stdin=given)

    async def pod(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(await self.kubectl("get", "pod", name, "-o", "json"))
        return found

    async def until_reason(self, name: str, reason: str) -> dict[str, Any]:
        async def so() -> dict[str, Any] | None:
            pod = await self.pod(name)
            return pod if pod["status"].get("reason") == reason else None

        found: dict[str, Any] = await until(so, what=f"{name} {reason}")
        return found

    async def until_event(self, name: str, reason: str) -> None:
        async def so() -> bool:
            events = json.loads(await self.kubectl("get", "events", "-o", "json"))["items"]
            return any((e["involvedObject"]["name"], e["reason"]) == (name, reason) for e in events)

        await until(so, what=f"an Event {reason} of {name}")

    async def everything(self) -> dict[str, str]:
        """All that anybody could read of what we wrote: objects, rows, the log."""
        found = {"objects": await self.kubectl("get", KINDS, "-A", "-o", "json", "--show-managed-fields")}
        engine = create_engine(self.database_url)
        async with engine.connect() as conn:
            tables = await conn.execute(
                text("select table_name from information_schema.tables where table_schema = 'public'")
            )
            for table in tables.scalars().all():
                rows = await conn.execute(text(f'select row_to_json(t)::text from "{table}" t'))
                found[f"table {table}"] = "\n".join(rows.scalars())
        await engine.dispose()
        return found | {"log": self.controller.log.read_text()}


@pytest.fixture
async def world(
    cluster: Cluster, kubectl: Kubectl, database_url: str, tmp_path: Path
) -> AsyncIterator[World]:
    namespace = f"hush-{uuid4().hex[:8]}"
    for crd in load_crds():
        kubectl("apply", "-f", "-", stdin=json.dumps(crd))
        kubectl("wait", "--for=condition=Established", f"crd/{crd['metadata']['name']}", "--timeout=30s")
    kubectl.run("create", "namespace", keys.SYSTEM_NAMESPACE)
    kubectl("create", "namespace", namespace)
    async with FakeCloud.running(tmp_path / "cloud", scenario=SCENARIO) as cloud:
        controller = Controller(
            tmp_path / "controller",
            kubeconfig=cluster.kubeconfig,
            database_url=database_url,
            clouds={PROVIDER: cloud.url},
            webhook_url=cluster.webhook_url,
            options={
                "NEBULA_LEASE_DURATION_S": "20",
                "NEBULA_LEASE_DEADLINE_S": "15",
                "NEBULA_LOG_LEVEL": "debug",
            },
        )
        made = World(kubectl, cloud, controller, database_url, namespace)
        pool = {
            "apiVersion": keys.API_VERSION,
            "kind": keys.NODE_POOL,
            "metadata": {"name": PROVIDER},
            "spec": {"providers": [{"name": PROVIDER}]},
        }
        kubectl("apply", "-f", "-", stdin=json.dumps(pool))
        try:
            await asyncio.to_thread(controller.start)
            yield made
        finally:
            await asyncio.to_thread(_clean, made)


def _clean(world: World) -> None:
    kubectl, own = world.kubectl_, ("-n", world.namespace)
    kubectl.run(*own, "delete", "pods", "--all", "--force", "--grace-period=0", "--wait=false")
    world.controller.stop()
    for kind, name in (
        ("mutatingwebhookconfiguration", keys.MUTATING_WEBHOOK_CONFIGURATION),
        ("validatingwebhookconfiguration", keys.VALIDATING_WEBHOOK_CONFIGURATION),
        ("node", keys.node_name(PROVIDER)),
        ("namespace", world.namespace),
    ):
        kubectl.run("delete", kind, name, "--ignore-not-found", "--wait=false")
    for name in kubectl("get", "nodeclaims", "-o", "name").split():
        kubectl.run("patch", name, "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
        kubectl.run("delete", name, "--ignore-not-found", "--wait=false")
    kubectl.run("patch", "nodepool", PROVIDER, "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
    kubectl.run("delete", "nodepool", PROVIDER, "--ignore-not-found", "--wait=false")


def a_pod(name: str, *, owned: bool = True, **changes: Any) -> dict[str, Any]:
    """``owned``: by a kind that the cluster does not know; nobody's Pod is reserved for while it is gated."""
    container = {
        "name": "app",
        "image": IMAGE,
        "args": ["--token", "$(TOKEN)"],
        "env": [
            {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "app", "key": "token"}}},
            {"name": "URL", "value": "https://$(TOKEN)@example.com"},
        ],
        "ports": [{"containerPort": 8000}],
        "readinessProbe": {"periodSeconds": 1, "httpGet": {"port": 8000}},
    }
    labels = {
        keys.ENABLED_LABEL: keys.ENABLED,
        keys.NODE_POOL_LABEL: PROVIDER,
        keys.ACCELERATOR_TYPE_LABEL: "h100",
    }
    owner = {"apiVersion": "tests.local/v1", "kind": "Set", "name": "s", "uid": str(uuid4())}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": labels,
            "ownerReferences": [owner | {"controller": True}] if owned else [],
        },
        "spec": {
            "containers": [container | changes],
            "imagePullSecrets": [{"name": "registry"}],
            "restartPolicy": "Never",
        },
    }


@pytest.mark.behaviour(144, 233, 238)
@pytest.mark.field_case("FC-101")
async def test_what_came_from_a_secret_is_in_no_log_no_row_and_no_object(world: World) -> None:
    await world.kubectl("create", "secret", "generic", "app", f"--from-literal=token={TOKEN}")
    await world.kubectl(
        *("create", "secret", "docker-registry", "registry", "--docker-server=registry.example.com"),
        *("--docker-username=user", f"--docker-password={PASSWORD}"),
    )
    quoting = f"env TOKEN={TOKEN} is not allowed, nor is {PASSWORD}"
    await world.cloud.add_fault("refuse", verb="create", code="invalid", message=quoting)
    await world.kubectl("create", "-f", "-", stdin=a_pod("refused"))
    await world.until_event("refused", "ProvisionFailed")
    await world.cloud.add_fault("refuse", verb="create", code="capacity", message=quoting)
    await world.kubectl("create", "-f", "-", stdin=a_pod("reserved", owned=False))
    await world.until_reason("reserved", "Running")
    missing = {"secretKeyRef": {"name": "app", "key": "missing"}}
    waits = a_pod("waits", env=[{"name": "A", "valueFrom": missing}], args=[])
    await world.kubectl("create", "-f", "-", stdin=waits)
    await world.until_reason("waits", "ConfigError")
    await world.kubectl("create", "-f", "-", stdin=a_pod("runs"))
    await world.until_reason("runs", "Running")
    await world.until_event("runs", "Unhealthy")

    found = await world.everything()

    said = "env TOKEN=[hidden] is not allowed, nor is [hidden]"
    assert said in found["objects"]  # what the cloud said was kept, but for that
    assert found["table provision_attempt"].count(said) == 2
    leaks = {(where, form) for where, held in found.items() for form in FORMS if form in held}
    assert leaks == set()
    machines = await world.cloud.alive()
    assert len(machines) == 2
    for machine in machines:
        assert machine["env_digests"]["TOKEN"] == hashlib.sha256(TOKEN.encode()).hexdigest()
        assert machine["args"] == ["--token", TOKEN]
