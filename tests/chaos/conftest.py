"""What the chaos tests share: a cluster and a Postgres that may be broken, and one cloud that begins anew."""

import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from app.kube import paths
from app.kube.client import Kube
from app.processes import free_ports
from app.store.devserver import DevPostgres
from app.store.migrate import migrate
from hack.cluster import Cluster, ControlPlane
from tests.chaos.shared_account import SharedCloud
from tests.chaos.world import CLOUD, TEMPLATE, World, the_pool
from tests.support import composed
from tests.support.clouds import FakeCloud

_numbers = itertools.count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here is slow."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def breakable(cluster: Cluster) -> Iterator[Cluster]:
    """A control plane of ours, even where the other tests use somebody's own cluster: it is broken here."""
    if cluster.ours:
        yield cluster
        return
    with ControlPlane() as plane:
        yield Cluster(kubeconfig=plane.kubeconfig, kubectl=plane.kubectl, control_plane=plane)


@pytest.fixture(scope="session")
async def kube(breakable: Cluster) -> AsyncIterator[Kube]:
    async with await Kube.connect(kubeconfig=str(breakable.kubeconfig)) as client:
        await composed.serve_our_kinds(client)
        yield client.room("tests")


@pytest.fixture(scope="session")
async def postgres() -> AsyncIterator[DevPostgres]:
    """A server that tests may stop and kill, with a migrated template."""
    with DevPostgres(durable=False) as server:
        await create_database(server, TEMPLATE, template="template1")
        await migrate(server.url_of(TEMPLATE))
        yield server


async def create_database(server: DevPostgres, name: str, *, template: str) -> None:
    connection = await asyncpg.connect(server.dsn)
    try:
        await connection.execute(f'create database "{name}" template "{template}"')
    finally:
        await connection.close()


@pytest.fixture(scope="session")
async def the_cloud(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SharedCloud]:
    async with SharedCloud.running(tmp_path_factory.mktemp("cloud"), scenario=CLOUD) as running:
        yield running


@pytest.fixture
def scenario() -> dict[str, Any]:
    """What the cloud is like; a test overrides it by parametrizing."""
    return CLOUD


@pytest.fixture
async def world(
    kube: Kube,
    breakable: Cluster,
    postgres: DevPostgres,
    the_cloud: FakeCloud,
    scenario: dict[str, Any],
    tmp_path: Path,
) -> AsyncIterator[World]:
    number = next(_numbers)
    await the_cloud.reset(scenario)
    name = f"chaos-{number}"
    for namespace in (name, f"{name}-system"):
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
        await kube.create(paths.namespaces(), body)
    await create_database(postgres, f"chaos_{number}", template=TEMPLATE)
    await kube.create(paths.nodepools(), the_pool())
    made = World(
        kube=kube,
        cluster=breakable,
        postgres=postgres,
        cloud=the_cloud,
        folder=tmp_path,
        namespace=name,
        system=f"{name}-system",
        database=f"chaos_{number}",
        webhook=f"127.0.0.1:{free_ports(1)[0]}",
    )
    try:
        yield made
    finally:
        postgres.start()
        await the_cloud.clear_faults()
        await made.close()
        if isinstance(the_cloud, SharedCloud) and the_cloud.runs:  # RunPod's simulator has no strangers
            await the_cloud.check_strangers()
