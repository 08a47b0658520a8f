"""The session's API server with our kinds, and a `World` for each test."""

from collections.abc import AsyncIterator
from uuid import uuid4

import pytest
from placement_world import INSTALLATION, World, until

from app.api.crds import load_crds
from app.kube import paths
from app.kube.client import Kube
from app.store import installation
from app.store.engine import begin, create_engine
from hack.cluster import Cluster


@pytest.fixture(scope="session")
async def api_server(cluster: Cluster) -> AsyncIterator[Kube]:
    async with await Kube.connect(kubeconfig=str(cluster.kubeconfig)) as kube:
        crds = load_crds()
        for crd in crds:
            await kube.patch(paths.crd(crd["metadata"]["name"]), crd, kind="apply")

        async def established() -> bool:
            for crd in crds:
                held = await kube.get(paths.crd(crd["metadata"]["name"]))
                states = {each["type"]: each["status"] for each in held["status"].get("conditions") or ()}
                if states.get("Established") != "True":
                    return False
            return True

        await until(established)
        yield kube.room("tests")


@pytest.fixture
async def world(api_server: Kube, database_url: str) -> AsyncIterator[World]:
    engine = create_engine(database_url)
    async with begin(engine) as conn:
        await installation.get_or_create(conn, new_id=INSTALLATION)
        epoch = await installation.next_epoch(conn, 0)
    name = f"placement-{uuid4().hex[:8]}"
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    await api_server.create(paths.namespaces(), namespace)
    made = World(kube=api_server, engine=engine, namespace=name, epoch=epoch)
    try:
        yield made
    finally:
        await made.close()
        await engine.dispose()
