"""A `World` for each test module, its webhooks started by the tests that need them."""

from collections.abc import AsyncIterator

import pytest
from admission_world import World, unconfigured_after, world

from app.kube.client import Kube
from hack.cluster import Cluster


@pytest.fixture(scope="module")
async def around(cluster: Cluster) -> AsyncIterator[World]:
    async with (
        await Kube.connect(kubeconfig=str(cluster.kubeconfig)) as kube,
        unconfigured_after(kube),
        world(cluster, kube) as made,
    ):
        yield made
