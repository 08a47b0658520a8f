"""The mirror on real parts: objects of a real API server, the real cache, a Postgres that comes and goes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.api.crds import load_crds
from app.kube import paths
from app.kube.cache import Cache
from app.kube.client import Kube, Obj
from app.kube.errors import KubeError
from app.mirror.mirror import Mirror
from app.mirror.rows import binding_row, claim_row
from app.store.devserver import DevPostgres
from app.store.engine import StoreUnavailable, begin, create_engine
from app.store.migrate import migrate
from hack.cluster import Cluster

LABEL = "nebula.test/mirror"
DEADLINE_S = 30.0


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.02)


class World:
    """One test's own claims and bindings on the API server, its caches of them, and its database."""

    def __init__(self, kube: Kube, engine: AsyncEngine) -> None:
        self.kube, self.engine = kube, engine
        self.mark = uuid4().hex[:12]
        selector = f"{LABEL}={self.mark}"
        self.claims = Cache(kube, paths.nodeclaims(), label_selector=selector)
        self.bindings = Cache(kube, paths.cloudpodbindings(), label_selector=selector)

    def mirror(self, **options: Any) -> Mirror:
        return Mirror(
            engine=self.engine, claims=self.claims, bindings=self.bindings, base_s=0.02, max_s=0.1, **options
        )

    async def claim(self, name: str) -> Obj:
        return await self.kube.create(
            paths.nodeclaims(),
            {
                "apiVersion": "nebula.inftyai.com/v1alpha1",
                "kind": "NodeClaim",
                "metadata": {"name": f"{name}-{self.mark}", "labels": {LABEL: self.mark}},
                "spec": {
                    "podRef": {"namespace": "default", "name": name, "uid": f"pod-{name}"},
                    "poolRef": "gpu",
                    "provider": "modal",
                    "region": "us-east",
                    "capacityType": "Spot",
                    "accelerator": "H100:8",
                },
            },
        )

    async def binding(self, claim: Obj) -> Obj:
        return await self.kube.create(
            paths.cloudpodbindings("default"),
            {
                "apiVersion": "nebula.inftyai.com/v1alpha1",
                "kind": "CloudPodBinding",
                "metadata": {"name": claim["metadata"]["name"], "labels": {LABEL: self.mark}},
                "spec": {
                    "podRef": {"name": "p", "uid": "pod-p"},
                    "claimName": claim["metadata"]["name"],
                    "provider": "modal",
                },
            },
        )

    async def phase(self, obj: Obj, phase: str) -> None:
        await self.kube.patch(
            paths.nodeclaim(obj["metadata"]["name"]) + "/status", {"status": {"phase": phase}}, kind="merge"
        )

    async def delete(self, obj: Obj) -> None:
        await self.kube.delete(paths.nodeclaim(obj["metadata"]["name"]))

    async def rows(self, table: str = "claim") -> dict[str, Any]:
        async with begin(self.engine) as conn:
            found = await conn.execute(text(f"select xmin::text as xmin, * from {table}"))
            return {row["uid"]: row for row in found.mappings()}

    async def phases(self) -> dict[str, str]:
        """By Pod's name; what is gone has a minus before it."""
        return {
            row["pod_name"]: ("-" if row["gone_at"] else "") + row["phase"]
            for row in (await self.rows()).values()
        }

    async def shows(self, **phases: str) -> None:
        async def so() -> bool:
            with suppress(StoreUnavailable):
                return await self.phases() == phases
            return False

        await until(so)

    async def cached(self, count: int) -> None:
        async def so() -> bool:
            return len(self.claims) == count

        await until(so)


@asynccontextmanager
async def running(*runs: Awaitable[None]) -> AsyncIterator[None]:
    tasks = [asyncio.ensure_future(run) for run in runs]
    try:
        yield
        for task in tasks:
            assert not task.done(), task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture(scope="session")
async def kube(cluster: Cluster) -> AsyncIterator[Kube]:
    async with await Kube.connect(kubeconfig=str(cluster.kubeconfig)) as client:
        for crd in load_crds():
            await client.patch(paths.crd(crd["metadata"]["name"]), crd, kind="apply")
        for path in (paths.nodeclaims(), paths.cloudpodbindings()):

            async def served(path: str = path) -> bool:
                with suppress(KubeError):  # a CRD is served some moments after it was stored
                    return await client.find(path) is not None
                return False

            await until(served)
        yield client


@asynccontextmanager
async def a_world(kube: Kube, engine: AsyncEngine) -> AsyncIterator[World]:
    made = World(kube, engine)
    async with running(made.claims.run(), made.bindings.run()):
        await made.claims.synced()
        await made.bindings.synced()
        yield made
        for path in (paths.nodeclaims(), paths.cloudpodbindings("default")):
            async for page in kube.list_pages(path, labelSelector=f"{LABEL}={made.mark}"):
                for obj in page["items"]:
                    await kube.delete(f"{path}/{obj['metadata']['name']}")


@pytest.fixture
async def world(kube: Kube, engine: AsyncEngine) -> AsyncIterator[World]:
    async with a_world(kube, engine) as made:
        yield made


@pytest.fixture
async def own_world(kube: Kube, own_server: DevPostgres) -> AsyncIterator[World]:
    """With a database whose server the test may stop."""
    await migrate(own_server.url)
    engine = create_engine(own_server.url)
    async with a_world(kube, engine) as made:
        yield made
    await engine.dispose()


async def test_a_claims_life_is_followed(world: World) -> None:
    async with running(world.mirror().run()):
        claim = await world.claim("a")
        await world.shows(a="")
        await world.phase(claim, "Bound")
        await world.shows(a="Bound")
        await world.delete(claim)
        await world.shows(a="-Bound")

    [row] = (await world.rows()).values()
    assert row["uid"] == claim["metadata"]["uid"]
    assert (row["pool"], row["provider"], row["account"]) == ("gpu", "modal", "default")
    assert (row["region"], row["tier"], row["accelerator"]) == ("us-east", "Spot", "H100:8")
    assert row["created_at"].isoformat() == claim["metadata"]["creationTimestamp"].replace("Z", "+00:00")


async def test_a_binding_is_followed_with_its_price_and_conditions(world: World) -> None:
    condition = {
        "type": "Ready",
        "status": "True",
        "reason": "Up",
        "message": "it is up",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    async with running(world.mirror().run()):
        made = await world.binding(await world.claim("a"))
        path = f"{paths.cloudpodbindings('default')}/{made['metadata']['name']}/status"
        status = {"phase": "Bound", "instanceID": "i-1", "pricePerHour": "1.1", "conditions": [condition]}
        await world.kube.patch(path, {"status": status}, kind="merge")

        async def written() -> bool:
            rows = await world.rows("binding")
            return [row["phase"] for row in rows.values()] == ["Bound"]

        await until(written)

    [row] = (await world.rows("binding")).values()
    assert (row["instance_id"], str(row["usd_per_hour"])) == ("i-1", "1.1")
    assert row["conditions"] == [condition]


async def test_what_happened_while_nobody_mirrored_is_made_good(world: World) -> None:
    mirror = world.mirror()
    async with running(mirror.run()):
        stays, goes = await world.claim("stays"), await world.claim("goes")
        await world.shows(stays="", goes="")
    before = await world.rows()

    await world.delete(goes)
    await world.claim("new")
    await world.cached(2)

    async with running(mirror.run()):
        await world.shows(**{"stays": "", "goes": "-", "new": ""})
    assert (await world.rows())[stays["metadata"]["uid"]] == before[stays["metadata"]["uid"]]


async def test_a_new_process_marks_gone_what_its_synced_cache_does_not_have(
    world: World, kube: Kube, engine: AsyncEngine
) -> None:
    async with running(world.mirror().run()):
        goes = await world.claim("goes")
        await world.shows(goes="")
    await world.delete(goes)

    async with a_world(kube, engine) as later, running(later.mirror().run()):
        await later.shows(goes="-")


async def test_an_outage_loses_nothing(own_world: World, own_server: DevPostgres) -> None:
    world = own_world
    async with running(world.mirror().run()):
        stays, goes = await world.claim("stays"), await world.claim("goes")
        await world.shows(stays="", goes="")
        own_server.kill()
        await world.phase(stays, "Bound")
        await world.phase(goes, "Terminating")
        await world.delete(goes)
        passing = await world.claim("passing")
        await world.cached(2)
        await world.delete(passing)
        await world.claim("new")
        await world.cached(2)
        await asyncio.to_thread(own_server.start)

        await world.shows(**{"stays": "Bound", "goes": "-Terminating", "passing": "-", "new": ""})


async def test_what_waits_in_an_outage_is_bounded_and_made_good(
    own_world: World, own_server: DevPostgres
) -> None:
    """Past the bound the last state of deleted objects is forgotten, not that they are gone."""
    world = own_world
    mirror = world.mirror(keep=2)
    async with running(mirror.run()):
        first = [await world.claim(f"old{n}") for n in range(4)]
        await world.shows(old0="", old1="", old2="", old3="")
        own_server.kill()
        for claim in first:
            await world.delete(claim)
        for n in range(4):
            await world.claim(f"new{n}")
        await world.cached(4)
        waiting = [len(kind.live) + len(kind.deleted) for kind in mirror._kinds]
        await asyncio.to_thread(own_server.start)

        await world.shows(**{f"old{n}": "-" for n in range(4)}, **{f"new{n}": "" for n in range(4)})
    assert max(waiting) <= 6


async def test_a_stale_write_by_a_late_replica_is_mended(world: World) -> None:
    """Even one that no version number could refuse."""
    async with running(world.mirror(rewrite_s=0.05).run()):
        await world.claim("a")
        await world.shows(a="")
        async with begin(world.engine) as conn:
            await conn.execute(text("update claim set gone_at = now(), phase = 'Terminated'"))
        await world.shows(a="")


async def test_one_row_that_the_table_refuses_does_not_keep_the_others_out(world: World) -> None:
    async with begin(world.engine) as conn:
        await conn.execute(text("alter table claim add constraint bad_one check (pod_name <> 'bad')"))
    await world.claim("bad")
    await world.claim("good")
    await world.cached(2)

    async with running(world.mirror().run()):
        await world.shows(good="")


async def test_a_rewrite_of_what_is_there_already_writes_nothing(world: World) -> None:
    for name in ("a", "b"):
        await world.binding(await world.claim(name))
    async with running(world.mirror().run()):
        await world.shows(a="", b="")
    before = (await world.rows(), await world.rows("binding"))

    async with running(world.mirror().run()):
        await world.claim("c")
        await world.shows(a="", b="", c="")

    claims, bindings = await world.rows(), await world.rows("binding")
    assert {uid: row for uid, row in claims.items() if row["pod_name"] != "c"} == before[0]
    assert bindings == before[1]


def test_what_an_object_leaves_out_is_empty_and_a_bad_price_unknown() -> None:
    metadata = {
        "uid": "u",
        "name": "n",
        "namespace": "d",
        "resourceVersion": "7",
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    pod = {"namespace": "d", "name": "p", "uid": "pu"}
    claim = claim_row({"metadata": metadata, "spec": {"podRef": pod, "provider": "aws"}})
    binding = binding_row(
        {
            "metadata": metadata,
            "spec": {"podRef": pod, "claimName": "c", "provider": "aws"},
            "status": {"pricePerHour": "NaN", "conditions": [{"message": "a\0b"}], "instanceID": ""},
        }
    )

    assert (claim.region, claim.tier, claim.phase, claim.instance_id) == ("", "", "", None)
    assert claim.account == "default"
    assert binding.usd_per_hour is None
    assert binding.instance_id is None
    assert binding.conditions == ({"message": "ab"},)
