"""The seeded fault machine on RunPod's own protocol: no idempotent creates, one list for everything, no spot.

What a seed is: `seeds`. Here the same numbers draw the same workloads and faults, and the real adapter of
RunPod stands between. Jobs and Pods that end have its option ``job: report``, since nothing else ends there.
``SEED=n``, ``SEEDS=n`` and the rest as in `test_seeds`; without them, one flock.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

import pytest

from app.api import keys
from app.kube import paths
from app.kube.client import Kube, Obj
from app.processes import free_ports
from app.store.devserver import DevPostgres
from hack.cluster import Cluster
from tests.chaos import liar, store_faults
from tests.chaos.conftest import create_database
from tests.chaos.flock import run_seeds
from tests.chaos.seeds import POOLS, Seed
from tests.chaos.test_seeds import OPTIONS
from tests.chaos.world import PROVIDER, TEMPLATE, World
from tests.support.clouds import FakeCloud

BUDGET_S = 1.0  # the first flock takes longer

RUNPOD: dict[str, Any] = {
    "cloud": "runpod",
    "account": "acct-1",
    "disk_usd_per_gib_hour": "0.00013698630136986301",
    "life": {"boot_s": 0, "exit_restarts": True},
    "lag": {"list_create_s": 1.0, "get_create_s": 1.0, "list_terminate_s": 0.5},
    "billing": {"states": ["queued", "booting", "running"]},
    "quirks": {"lifecycle": "observed"},
    "offers": [{"accelerator": "H100", "counts": [1], "usd_per_hour": {"SECURE": "4.00"}}],
}


@dataclass(slots=True)
class RunPodSeed(Seed):
    """A seed whose workloads can end on RunPod. Its bill is an hour late, and so not held against ours."""

    usd_per_hour: ClassVar[Decimal] = 4 + 20 * (Decimal("0.10") / 730)
    tells_bills: ClassVar[bool] = False

    def _dressed(self, body: Obj) -> Obj:
        pod = body if body["kind"] == "Pod" else body["spec"]["template"]
        if pod["spec"].get("restartPolicy") == "Never":
            pod["metadata"]["annotations"] = {f"cloud.aibrix.ai/{PROVIDER}-job": "report"}
            container = pod["spec"]["containers"][0]
            container["command"] = ["train"]
            container["env"] = [
                {**one, "name": one["name"].replace("FAKE_", "SIM_")} for one in container["env"]
            ]
        return body


@pytest.fixture
async def arena(
    kube: Kube, breakable: Cluster, postgres: DevPostgres, tmp_path: Path
) -> AsyncIterator[World]:
    """One installation for all seeds, on an account of RunPod of its own."""
    system, database = "runpod-seeds-system", "chaos_runpod_seeds"
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": system}}
    await kube.create(paths.namespaces(), body)
    await create_database(postgres, database, template=TEMPLATE)
    for name, mode in POOLS.items():
        failover = {"mode": mode, "blocklistTTL": "1s", "unknownTimeout": "5s", "reserveTimeout": "10s"}
        spec = {"providers": [{"name": PROVIDER}], "capacityTypes": ["OnDemand"], "failover": failover}
        kind = {"apiVersion": keys.API_VERSION, "kind": keys.NODE_POOL}
        await kube.create(paths.nodepools(), kind | {"metadata": {"name": name}, "spec": spec})
    async with FakeCloud.running(tmp_path / "runpod", scenario=RUNPOD, simulator="runpod") as cloud:
        made = World(
            kube=kube,
            cluster=breakable,
            postgres=postgres,
            cloud=cloud,
            folder=tmp_path,
            namespace="runpod-seeds",
            system=system,
            database=database,
            webhook=f"127.0.0.1:{free_ports(1)[0]}",
            account_options=",job_every_s=0.3",
        )
        await store_faults.let_in(made)
        try:
            yield made
        finally:
            postgres.start()
            await cloud.clear_faults()
            await made.close()
            for name in POOLS:
                await made.take_away(paths.nodepool(name))


async def test_seeds_on_runpod_double_nothing_leave_nothing_and_the_books_agree(arena: World, tmp_path: Path):
    url = store_faults.url_of(arena)
    replicas = {
        "one": arena.controller("one", options=OPTIONS, webhook=f"127.0.0.1:{free_ports(1)[0]}", url=url),
        "two": arena.controller("two", options=OPTIONS, url=url),
    }
    await run_seeds(arena, replicas, lie=liar.built(tmp_path), budget_s=BUDGET_S, kind=RunPodSeed)
