"""The session's real API server as our own client sees it, and ways to disturb the connection to it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.api.crds import load_crds
from app.kube import paths
from app.kube.client import Kube
from hack.cluster import Cluster
from tests.cluster.kube.scripted import ScriptedServer, kubeconfig_for, serving
from tests.cluster.kube.waiting import until
from tests.support.disturbed import api_server_of, kubeconfig_through
from tests.support.proxy import Proxy


@pytest.fixture(scope="session")
async def kube(cluster: Cluster) -> AsyncIterator[Kube]:
    async with await Kube.connect(kubeconfig=str(cluster.kubeconfig)) as connected:
        yield connected.room("tests")


@pytest.fixture(scope="session")
async def our_kinds(kube: Kube) -> None:
    """The API server serves our CRDs."""
    for crd in load_crds():
        await kube.patch(paths.crd(crd["metadata"]["name"]), crd, kind="apply")

    async def established() -> bool:
        for crd in load_crds():
            held = await kube.get(paths.crd(crd["metadata"]["name"]))
            conditions = {
                each["type"]: each["status"] for each in held.get("status", {}).get("conditions", ())
            }
            if conditions.get("Established") != "True":
                return False
        return True

    await until(established)


@pytest.fixture
async def namespace(kube: Kube) -> AsyncIterator[str]:
    """A namespace that this test alone uses."""
    made = await kube.create(
        paths.namespaces(),
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"generateName": "kube-test-"}},
    )
    name: str = made["metadata"]["name"]
    yield name
    await kube.delete(paths.namespace(name))


@pytest.fixture
async def proxy(cluster: Cluster) -> AsyncIterator[Proxy]:
    """A TCP forwarder in front of the API server that can be told to misbehave."""
    async with Proxy.running(api_server_of(cluster.kubeconfig)) as running:
        yield running


@pytest.fixture
async def through(cluster: Cluster, proxy: Proxy, tmp_path: Path) -> AsyncIterator[Kube]:
    """A client whose every byte passes the proxy."""
    path = kubeconfig_through(proxy, cluster.kubeconfig, tmp_path)
    async with await Kube.connect(kubeconfig=str(path)) as connected:
        yield connected


@pytest.fixture
async def scripted() -> AsyncIterator[ScriptedServer]:
    async with serving() as server:
        yield server


@pytest.fixture
async def told(scripted: ScriptedServer, tmp_path: Path) -> AsyncIterator[Kube]:
    """A client of the scripted server."""
    async with await Kube.connect(kubeconfig=str(kubeconfig_for(scripted, tmp_path))) as connected:
        yield connected
