"""The seeded fault machine: as many seeds as there is time for, on one cluster. What a seed is: `seeds`.

``SEED=n`` runs that one alone; ``SEEDS=n`` so many, from ``FIRST`` (1) on, however long it takes; without
either, as many as begin within two minutes. ``BESIDE=n`` (8) run side by side; ``TELL=1`` prints every seed's
story. A seed that fails does not stop the others; its story, and the ends of the logs, go to the report.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.api import keys
from app.kube import paths
from app.kube.client import Kube
from app.processes import free_ports
from app.store.devserver import DevPostgres
from hack.cluster import Cluster
from tests.chaos import liar, store_faults
from tests.chaos.conftest import create_database
from tests.chaos.disasters import LEASE_S
from tests.chaos.flock import run_seeds
from tests.chaos.seeds import POOLS
from tests.chaos.world import CLOUD, PROVIDER, TEMPLATE, World
from tests.support.clouds import FakeCloud

BUDGET_S = 120.0

# "An hour" is twenty back-off steps. What is looked at every so often costs the most: half as often as in the
# fast profile is soon enough.
OPTIONS = {
    "NEBULA_BACKOFF_MAX_S": "0.1",
    "NEBULA_LEASE_DURATION_S": str(LEASE_S),
    "NEBULA_LEASE_DEADLINE_S": str(LEASE_S - 2),
    "NEBULA_LEASE_RENEW_S": "1",
    "NEBULA_UNBOUND_AFTER_S": "60",
    "NEBULA_LIST_BUSY_S": "0.5",
    "NEBULA_OFFERS_EVERY_S": "5",
    "NEBULA_LEDGER_EVERY_S": "1",
    "NEBULA_SWEEP_EVERY_S": "1",
}


@pytest.fixture
async def arena(
    kube: Kube, breakable: Cluster, postgres: DevPostgres, the_cloud: FakeCloud, tmp_path: Path
) -> AsyncIterator[World]:
    """One installation for all seeds: its namespace, database and pools."""
    await the_cloud.reset(CLOUD | {"idempotent_for_s": 20})
    system, database = "seeds-system", "chaos_seeds"
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": system}}
    await kube.create(paths.namespaces(), body)
    await create_database(postgres, database, template=TEMPLATE)
    for name, mode in POOLS.items():
        spec = {
            "providers": [{"name": PROVIDER}],
            "capacityTypes": ["OnDemand"],
            "strategy": "Ordered",
            "failover": {"mode": mode, "blocklistTTL": "1s", "unknownTimeout": "5s", "reserveTimeout": "10s"},
        }
        pool = {
            "apiVersion": keys.API_VERSION,
            "kind": keys.NODE_POOL,
            "metadata": {"name": name},
            "spec": spec,
        }
        await kube.create(paths.nodepools(), pool)
    made = World(
        kube=kube,
        cluster=breakable,
        postgres=postgres,
        cloud=the_cloud,
        folder=tmp_path,
        namespace="seeds",
        system=system,
        database=database,
        webhook=f"127.0.0.1:{free_ports(1)[0]}",
    )
    await store_faults.let_in(made)
    try:
        yield made
    finally:
        postgres.start()
        await the_cloud.clear_faults()
        await made.close()
        for name in POOLS:
            await made.take_away(paths.nodepool(name))


async def test_seeds_double_nothing_leave_nothing_and_the_books_agree(arena: World, tmp_path: Path):
    replicas = {
        name: arena.controller(name, options=OPTIONS, webhook=_webhook(name), url=store_faults.url_of(arena))
        for name in ("one", "two")
    }
    await run_seeds(arena, replicas, lie=liar.built(tmp_path), budget_s=BUDGET_S)


def _webhook(name: str) -> str | None:
    """The second one serves where the configurations point; the first has an address of its own."""
    return None if name == "two" else f"127.0.0.1:{free_ports(1)[0]}"
