"""Virtual nodes on real parts. See `vnode_world`."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from app.api import keys
from app.api.crds import load_crds
from app.inventory.identity import new_installation
from app.kube import paths
from app.kube.client import Kube
from app.kube.errors import KubeError
from app.store.engine import create_engine
from hack.cluster import Cluster
from tests.cluster.vnode.vnode_world import World
from tests.support.clouds import SMALL, FakeCloud


@pytest.fixture(scope="session")
async def kube(cluster: Cluster) -> AsyncIterator[Kube]:
    async with await Kube.connect(kubeconfig=str(cluster.kubeconfig)) as client:
        for crd in load_crds():
            await client.patch(paths.crd(crd["metadata"]["name"]), crd, kind="apply")
        for path in (paths.nodeclaims(), paths.nodepools()):
            await _served(client, path)
        yield client


async def _served(client: Kube, path: str) -> None:
    """Wait for a kind that was only just declared: until then its path is not known."""
    async with asyncio.timeout(30):
        while True:
            try:
                await client.get(path)
                return
            except KubeError:
                await asyncio.sleep(0.05)


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    made = create_engine(database_url)
    yield made
    await made.dispose()


@pytest.fixture
def scenario() -> dict[str, Any]:
    """What the cloud is like; a test overrides it by parametrizing."""
    return SMALL


@pytest.fixture
async def cloud(tmp_path: Path, scenario: dict[str, Any]) -> AsyncIterator[FakeCloud]:
    async with FakeCloud.running(tmp_path / "cloud", scenario=scenario) as running:
        yield running


@pytest.fixture
async def world(kube: Kube, engine: AsyncEngine, cloud: FakeCloud) -> AsyncIterator[World]:
    made = await kube.create(
        paths.namespaces(),
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"generateName": "vnode-test-"}},
    )
    world = World(
        kube=kube,
        engine=engine,
        cloud=cloud,
        installation=new_installation(),
        namespace=made["metadata"]["name"],
        pool=f"pool-{uuid4().hex[:8]}",
    )
    pool = {
        "apiVersion": keys.API_VERSION,
        "kind": keys.NODE_POOL,
        "metadata": {"name": world.pool},
        "spec": {"providers": [{"name": world.provider}]},
    }
    await kube.create(paths.nodepools(), pool)
    yield world
    await world.clean()
