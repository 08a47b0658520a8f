"""The session's API server with our kinds, two clouds that begin anew for each test, and a `World`."""

from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import pytest

from app.kube import paths
from app.kube.client import Kube
from app.store.engine import create_engine
from hack.cluster import Cluster
from tests.cluster.reserve.world import World
from tests.support import composed
from tests.support.clouds import SMALL, FakeCloud

OTHER = SMALL | {"account": "acct-2"}


@pytest.fixture(scope="session")
async def kube(cluster: Cluster) -> AsyncIterator[Kube]:
    async with await Kube.connect(kubeconfig=str(cluster.kubeconfig)) as client:
        await composed.serve_our_kinds(client)
        yield client.room("tests")


@pytest.fixture(scope="session")
async def both_clouds(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[FakeCloud, FakeCloud]]:
    folder = tmp_path_factory.mktemp("reserve")
    async with (
        FakeCloud.running(folder / "one", scenario=SMALL) as one,
        FakeCloud.running(folder / "two", scenario=OTHER) as two,
    ):
        yield one, two


@pytest.fixture
def first_cloud() -> dict[str, Any]:
    """What the first cloud is like; a test overrides it by parametrizing. The second one is `OTHER`."""
    return SMALL


@pytest.fixture
async def world(
    kube: Kube, database_url: str, both_clouds: tuple[FakeCloud, FakeCloud], first_cloud: dict[str, Any]
) -> AsyncIterator[World]:
    one, two = both_clouds
    await one.reset(first_cloud)
    await two.reset(OTHER)
    engine = create_engine(database_url, pool_size=12)
    name = f"reserve-{uuid4().hex[:8]}"
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    await kube.create(paths.namespaces(), body)
    made = World(kube=kube, engine=engine, namespace=name, clouds=both_clouds)
    try:
        yield made
    finally:
        for cloud in both_clouds:
            await cloud.clear_faults()
        await made.close()
        await engine.dispose()
