"""The whole product in one process, beside a real cluster."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from pytest_postgresql.executors import NoopExecutor

from app.api import keys
from app.api.crds import load_crds
from app.store.devserver import DevPostgres
from hack.cluster import Cluster
from hack.controller import Controller
from tests.cluster.whole.owners_world import POOLS, Owners
from tests.support import postgres
from tests.support.clouds import SMALL, FakeCloud
from tests.support.cluster import Kubectl

NO_IMAGE = "registry.example.com/missing:1"
SCENARIOS = {
    "again": SMALL | {"restarts": True},
    "once": SMALL | {"restarts": False, "account": "acct-2", "images": {"missing": [NO_IMAGE]}},
}


@pytest.fixture(scope="module")
async def whole(
    cluster: Cluster,
    kubectl: Kubectl,
    postgres_server: DevPostgres,
    database_template: NoopExecutor,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Owners]:
    """A controller and two clouds, for all tests of a module."""
    with postgres.clone(postgres_server, database_template) as url:
        folder = tmp_path_factory.mktemp("whole")
        async with running(
            kubectl, folder, kubeconfig=cluster.kubeconfig, database=url, webhook_url=cluster.webhook_url
        ) as made:
            yield made


@pytest.fixture
async def owners(whole: Owners, kubectl: Kubectl) -> AsyncIterator[Owners]:
    """The same, with a namespace of this test's own, and clouds as they were at first."""
    for cloud in whole.clouds.values():
        await cloud.set_life(boot_s=0, stop_s=0)
    mine = Owners(kubectl_=kubectl, controller=whole.controller, clouds=whole.clouds)
    await asyncio.to_thread(kubectl, "create", "namespace", mine.namespace)
    yield mine
    await asyncio.to_thread(_empty, kubectl, mine)


@asynccontextmanager
async def running(
    kubectl: Kubectl,
    folder: Path,
    *,
    kubeconfig: Path,
    database: str,
    webhook_url: str | None = None,
    options: dict[str, str] | None = None,
) -> AsyncIterator[Owners]:
    """Everything of a whole test; it leaves the cluster as it was, but for the CRDs."""
    for crd in load_crds():
        kubectl("apply", "-f", "-", stdin=json.dumps(crd))
        kubectl("wait", "--for=condition=Established", f"crd/{crd['metadata']['name']}", "--timeout=30s")
    kubectl.run("create", "namespace", keys.SYSTEM_NAMESPACE)
    clouds = {name: FakeCloud(folder / name, scenario=scenario) for name, scenario in SCENARIOS.items()}
    made: Owners | None = None
    try:
        for cloud in clouds.values():
            await cloud.start()
        controller = Controller(
            folder / "controller",
            kubeconfig=kubeconfig,
            database_url=database,
            clouds={name: cloud.url for name, cloud in clouds.items()},
            webhook_url=webhook_url,
            # On a busy machine a Lease of three seconds is lost now and then; nothing here is about that.
            options={"NEBULA_LEASE_DURATION_S": "20", "NEBULA_LEASE_DEADLINE_S": "15"} | (options or {}),
        )
        made = Owners(kubectl_=kubectl, controller=controller, clouds=clouds)
        for name in POOLS:
            pool = {
                "apiVersion": keys.API_VERSION,
                "kind": keys.NODE_POOL,
                "metadata": {"name": name},
                "spec": {"providers": [{"name": name}], "failover": {"blocklistTTL": "1s"}},
            }
            kubectl("apply", "-f", "-", stdin=json.dumps(pool))
        await asyncio.to_thread(kubectl, "create", "namespace", made.namespace)
        await asyncio.to_thread(controller.start)
        yield made
    finally:
        if made is not None:
            await asyncio.to_thread(_empty, kubectl, made)
            await asyncio.to_thread(made.controller.stop)
            await asyncio.to_thread(_tidy, kubectl)
        for cloud in clouds.values():
            await cloud.close()


def _empty(kubectl: Kubectl, made: Owners) -> None:
    """Owners first, so that nothing is made again."""
    for kind in ("deployments", "statefulsets", "jobs", "daemonsets"):
        kubectl.run("delete", kind, "--all", "-n", made.namespace, "--wait=false")
    kubectl.run(
        "delete", "pods", "--all", "-n", made.namespace, "--force", "--grace-period=0", "--wait=false"
    )
    kubectl.run("delete", "namespace", made.namespace, "--wait=false")


def _tidy(kubectl: Kubectl) -> None:
    """What keeps objects from going is taken off: nobody is there any more to do it."""
    for kind, name in (
        ("mutatingwebhookconfiguration", keys.MUTATING_WEBHOOK_CONFIGURATION),
        ("validatingwebhookconfiguration", keys.VALIDATING_WEBHOOK_CONFIGURATION),
        *(("node", keys.node_name(name)) for name in POOLS),
    ):
        kubectl.run("delete", kind, name, "--ignore-not-found")
    for name in kubectl("get", "nodeclaims", "-o", "name").split():
        kubectl.run("patch", name, "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
        kubectl.run("delete", name, "--ignore-not-found", "--wait=false")
    for name in POOLS:
        kubectl.run("delete", "nodepool", name, "--ignore-not-found", "--wait=false")
        kubectl.run("patch", "nodepool", name, "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
