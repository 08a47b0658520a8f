"""The whole product in one process, beside a real cluster."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.api import keys
from app.api.crds import load_crds
from hack.cluster import Cluster
from hack.controller import Controller
from tests.cluster.whole.owners_world import POOLS, Owners
from tests.support.clouds import SMALL, FakeCloud
from tests.support.cluster import Kubectl

SCENARIOS = {"again": SMALL | {"restarts": True}, "once": SMALL | {"restarts": False}}


@pytest.fixture
async def owners(
    cluster: Cluster, kubectl: Kubectl, database_url: str, tmp_path: Path
) -> AsyncIterator[Owners]:
    """A controller, two clouds and a namespace of this test's own."""
    async with running(
        kubectl,
        kubeconfig=cluster.kubeconfig,
        database_url=database_url,
        folder=tmp_path,
        webhook_url=cluster.webhook_url,
    ) as made:
        yield made


class running:  # noqa: N801 (used like a function)
    """Everything of a whole test; it leaves the cluster as it was, but for the CRDs."""

    def __init__(
        self,
        kubectl: Kubectl,
        *,
        kubeconfig: Path,
        database_url: str,
        folder: Path,
        webhook_url: str | None = None,
        options: dict[str, str] | None = None,
    ) -> None:
        self._kubectl = kubectl
        self._clouds = {name: FakeCloud(folder / name, scenario=SCENARIOS[name]) for name in SCENARIOS}
        self._made: Owners | None = None
        self._args = (folder / "controller", kubeconfig, database_url, webhook_url, options or {})

    async def __aenter__(self) -> Owners:
        folder, kubeconfig, database_url, webhook_url, options = self._args
        kubectl = self._kubectl
        for crd in load_crds():
            kubectl("apply", "-f", "-", stdin=json.dumps(crd))
            kubectl("wait", "--for=condition=Established", f"crd/{crd['metadata']['name']}", "--timeout=30s")
        kubectl.run("create", "namespace", keys.SYSTEM_NAMESPACE)
        for cloud in self._clouds.values():
            await cloud.start()
        controller = Controller(
            folder,
            kubeconfig=kubeconfig,
            database_url=database_url,
            clouds={name: cloud.url for name, cloud in self._clouds.items()},
            webhook_url=webhook_url,
            # On a busy machine a Lease of three seconds is lost now and then; nothing here is about that.
            options={"NEBULA_LEASE_DURATION_S": "20", "NEBULA_LEASE_DEADLINE_S": "15"} | options,
        )
        self._made = Owners(kubectl_=kubectl, controller=controller, clouds=self._clouds)
        kubectl("create", "namespace", self._made.namespace)
        for name in POOLS:
            spec = {"providers": [{"name": name}], "failover": {"blocklistTTL": "1s"}}
            pool = {
                "apiVersion": keys.API_VERSION,
                "kind": keys.NODE_POOL,
                "metadata": {"name": name},
                "spec": spec,
            }
            kubectl("apply", "-f", "-", stdin=json.dumps(pool))
        await asyncio.to_thread(controller.start)
        return self._made

    async def __aexit__(self, *_: object) -> None:
        made, kubectl = self._made, self._kubectl
        if made is not None:
            await asyncio.to_thread(_tidy, kubectl, made)
        for cloud in self._clouds.values():
            await cloud.close()


def _tidy(kubectl: Kubectl, made: Owners) -> None:
    """Owners first, so that nothing is made again; then what keeps objects from going is taken off."""
    space = ("-n", made.namespace)
    for kind in ("deployments", "statefulsets", "jobs", "daemonsets"):
        kubectl.run("delete", kind, "--all", *space, "--wait=false")
    kubectl.run("delete", "pods", "--all", *space, "--wait=false", "--grace-period=1")
    made.controller.stop()
    for kind, name in (
        ("mutatingwebhookconfiguration", keys.MUTATING_WEBHOOK_CONFIGURATION),
        ("validatingwebhookconfiguration", keys.VALIDATING_WEBHOOK_CONFIGURATION),
        *(("node", keys.node_name(name)) for name in POOLS),
    ):
        kubectl.run("delete", kind, name, "--ignore-not-found")
    kubectl.run("delete", "pods", "--all", *space, "--force", "--grace-period=0")
    for name in kubectl("get", "nodeclaims", "-o", "name").split():
        kubectl.run("patch", name, "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
        kubectl.run("delete", name, "--ignore-not-found", "--wait=false")
    for name in POOLS:
        kubectl.run("delete", "nodepool", name, "--ignore-not-found", "--wait=false")
        kubectl.run("patch", "nodepool", name, "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
    kubectl.run("delete", "namespace", made.namespace, "--wait=false")
