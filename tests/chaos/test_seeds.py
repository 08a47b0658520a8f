"""The seeded fault machine: as many seeds as there is time for, on one cluster. What a seed is: `seeds`.

``SEED=n`` runs that one alone; ``SEEDS=n`` so many, from ``FIRST`` (1) on, however long it takes; without
either, as many as begin within two minutes. ``TELL=1`` prints every seed's story. A seed that fails does not
stop the others; its story, and the ends of the logs, go to the report.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.api import keys
from app.kube import paths
from app.kube.client import Kube
from app.processes import free_ports
from app.store.devserver import DevPostgres
from hack.cluster import Cluster
from tests.chaos.conftest import create_database
from tests.chaos.seeds import POOLS, Planted, Seed
from tests.chaos.world import CLOUD, PROVIDER, QUICK, TEMPLATE, World
from tests.support.clouds import FakeCloud

BUDGET_S = 120.0
FAILURES = 5  # after so many, the rest would say nothing new

# "An hour" is twenty back-off steps, and a cloud that forgets its answers is asked again soon.
OPTIONS = QUICK | {"NEBULA_BACKOFF_MAX_S": "0.5"}


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
    try:
        yield made
    finally:
        postgres.start()
        await the_cloud.clear_faults()
        await made.close()
        for name in POOLS:
            await made.take_away(paths.nodepool(name))


async def test_seeds_double_nothing_leave_nothing_and_the_books_agree(arena: World):
    replicas = {
        name: arena.controller(name, options=OPTIONS, webhook=_webhook(name)) for name in ("one", "two")
    }
    for replica in replicas.values():
        await arena.start(replica)
    await arena.until("somebody leads", lambda: _somebody_leads(arena, list(replicas)))
    planted = await Planted.into(arena)
    failures: list[str] = []
    began_s, done = time.monotonic(), 0
    for number in _numbers():
        if done and not _asked() and time.monotonic() - began_s > BUDGET_S:
            break
        arena.namespace = f"seed-{number}"
        seed_began_s = time.monotonic()
        seed = Seed(number, arena, replicas, planted)
        try:
            await seed.run()
        except AssertionError as error:
            failures.append(str(error))
            await arena.purge()
        except Exception as error:
            error.add_note("\n".join([f"SEED={number}", *seed.story]))
            raise
        done += 1
        print(
            f"seed {number}: {time.monotonic() - seed_began_s:.1f} s, {len(failures)} failed so far",
            flush=True,
        )
        await arena.kube.delete(paths.namespace(arena.namespace))
        if len(failures) >= FAILURES:
            break
    took_s = time.monotonic() - began_s
    print(f"{done} seeds in {took_s:.0f} s ({took_s / max(1, done):.1f} s each), {len(failures)} failed")
    assert not failures, "\n\n".join(failures)


def _asked() -> bool:
    return "SEED" in os.environ or "SEEDS" in os.environ


def _numbers() -> range:
    first = int(os.environ.get("SEED") or os.environ.get("FIRST") or 1)
    count = 1 if os.environ.get("SEED") else int(os.environ.get("SEEDS") or 1_000_000)
    return range(first, first + count)


def _webhook(name: str) -> str | None:
    """The second one serves where the configurations point; the first has an address of its own."""
    return None if name == "two" else f"127.0.0.1:{free_ports(1)[0]}"


async def _somebody_leads(world: World, names: list[str]) -> bool:
    """And has made the database this installation's."""
    leading = await asyncio.gather(*(world.leads(name) for name in names))
    return any(leading) and bool(await world.rows("select 1 from installation"))
