"""What a NodePool shows, and that it stays readable while a claim names it."""

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest

from app.api import keys
from app.claims.pools import EVERY_S, Pools
from app.kube import paths
from app.kube.client import Obj
from tests.cluster.claims.conftest import World, conditions
from tests.support import composed
from tests.support.cluster import Kubectl
from tests.support.composed import until


@pytest.fixture
async def pool(world: World) -> Obj:
    return await a_pool(world, ["modal"])


async def a_pool(world: World, providers: list[str]) -> Obj:
    body = {
        "apiVersion": keys.API_VERSION,
        "kind": keys.NODE_POOL,
        "metadata": {"name": f"gpu-{uuid4().hex[:8]}"},
        "spec": {"providers": [{"name": name} for name in providers]},
    }
    return await world.kube.create(paths.nodepools(), body)


async def pool_status(world: World, pool: Obj) -> dict[str, Any]:
    return (await world.kube.get(paths.nodepool(pool["metadata"]["name"]))).get("status") or {}


async def until_placed(world: World, pool: Obj, placed: dict[str, int] | None) -> None:
    async def shown() -> bool:
        status = await pool_status(world, pool)
        return "conditions" in status and status.get("placed") == placed

    await until(shown, what=f"placed {placed}")


@pytest.mark.behaviour(306, 307)
async def test_placed_counts_the_bound_claims_and_goes_with_the_last(world: World, pool: Obj):
    async with world.leading() as term:
        await until_placed(world, pool, None)
        pods = [await world.pod(name, pool=pool["metadata"]["name"]) for name in ("a", "b")]
        claims = [await world.claim(pod) for pod in pods]
        for claim in claims:
            await term.rent(claim)

        await until_placed(world, pool, {"modal": 2})

        for pod in pods:
            await world.remove_pod(pod)
        await until_placed(world, pool, None)
        status = await pool_status(world, pool)
        assert status["providers"] == "modal"
        assert status["conditions"][0]["observedGeneration"] == 1


@pytest.mark.behaviour(304, 305)
async def test_an_unknown_provider_makes_the_pool_not_ready_and_is_named(world: World):
    pool = await a_pool(world, ["zeta", "modal", "alpha"])
    async with world.leading():

        async def told() -> dict[str, Any]:
            return await pool_status(world, pool)

        status = await until(told)

        assert conditions(status) == {"Ready": ("False", "UnknownProvider")}
        assert status["conditions"][0]["message"] == "no registered adapter for provider(s): alpha, zeta"
        assert status["providers"] == "zeta,modal,alpha"


async def test_a_pool_in_use_stays_readable_until_its_last_claim_is_gone(world: World, pool: Obj):
    name = pool["metadata"]["name"]
    async with world.leading() as term:
        pod = await world.pod("a", pool=name)
        claim = await world.claim(pod)
        await term.rent(claim)
        await until_placed(world, pool, {"modal": 1})

        await world.kube.delete(paths.nodepool(name))
        live = await world.kube.get(paths.nodepool(name))
        assert live["metadata"]["finalizers"] == [keys.POOL_FINALIZER]

        await world.remove_pod(pod)
        await world.until_gone(claim)

        async def gone() -> bool:
            return await world.kube.find(paths.nodepool(name)) is None

        await until(gone)


@pytest.mark.field_case("FC-020")
async def test_a_deleted_pool_in_use_says_what_holds_it_and_its_event_does_too(
    world: World, pool: Obj, kubectl: Kubectl
):
    name = pool["metadata"]["name"]
    async with world.leading() as term:
        claims = []
        for pod_name in ("a", "b"):
            claims.append(await world.claim(await world.pod(pod_name, pool=name)))
            await term.rent(claims[-1])
        await until_placed(world, pool, {"modal": 2})

        await world.kube.delete(paths.nodepool(name))

        async def deleting() -> str | None:
            ready = (await pool_status(world, pool))["conditions"][0]
            return ready["message"] if ready["reason"] == "Deleting" else None

        names = ", ".join(sorted(claim["metadata"]["name"] for claim in claims))
        after = "nothing new is placed, and the pool goes with the last machine"
        assert await until(deleting) == f"2 claims left ({names}): {after}"
        assert conditions(await pool_status(world, pool))["Ready"][0] == "False"
        await term.events.flush()
        described = await asyncio.to_thread(kubectl, "describe", "nodepool", name)
        assert f"2 claims left ({names})" in described.partition("Events:")[2]

        await world.kube.delete(paths.nodeclaim(claims[0]["metadata"]["name"]))
        await world.until_gone(claims[0])
        await until(lambda: _says(world, pool, f"1 claim left ({claims[1]['metadata']['name']}): {after}"))


async def test_claims_of_pods_that_are_over_do_not_hold_a_deleted_pool(world: World, pool: Obj):
    """They stay with their Pods, as on a node, and their machines are gone: they ask nothing of a pool."""
    name = pool["metadata"]["name"]
    async with world.leading() as term:
        pod = await world.pod("over", pool=name)
        claim = await world.claim(pod)
        await term.rent(claim)
        await until_placed(world, pool, {"modal": 1})
        over = {"metadata": {"uid": pod["metadata"]["uid"]}, "status": {"phase": "Failed"}}
        await world.kube.patch(paths.pod_status(world.namespace, "over"), over, kind="strategic")
        await world.until_phase(claim, "Terminated")

        await world.kube.delete(paths.nodepool(name))

        async def gone() -> bool:
            return await world.kube.find(paths.nodepool(name)) is None

        await until(gone)
        assert (await world.status(claim))["phase"] == "Terminated"


async def _says(world: World, pool: Obj, message: str) -> bool:
    return bool((await pool_status(world, pool))["conditions"][0]["message"] == message)


async def test_a_pool_that_was_never_used_goes_at_once(world: World, pool: Obj):
    async with world.leading():
        await until_placed(world, pool, None)
        await world.kube.delete(paths.nodepool(pool["metadata"]["name"]))
        assert await world.kube.find(paths.nodepool(pool["metadata"]["name"])) is None


@dataclass(slots=True)
class Clock:
    """A monotonic clock that a test moves; ``asked`` tells that somebody has looked at it."""

    now: float = 1000.0
    asked: int = 0

    def __call__(self) -> float:
        self.asked += 1
        return self.now


async def test_a_pool_is_written_at_most_once_a_second(world: World, pool: Obj):
    name, clock = pool["metadata"]["name"], Clock()
    async with composed.composed(
        world.kube, world.engine, clouds={}, installation=world.installation
    ) as term:
        pools = Pools(
            kube=world.kube,
            pools=term.pools,
            claims=term.claims,
            provider_names=lambda: frozenset({"modal"}),
            settings=term.settings,
            events=term.events,
            clock=clock,
            now=lambda: datetime.now(UTC),
        )
        term.start(pools.run())
        await until_placed(world, pool, None)
        claim = await world.claim(await world.pod("a", pool=name))
        path = paths.nodeclaim_status(claim["metadata"]["name"])
        await world.kube.patch(path, {"status": {"phase": "Bound"}}, kind="merge")
        await until(lambda: any((each.get("status") or {}).get("phase") for each in term.claims))
        asked = clock.asked
        await until(lambda: clock.asked > asked)  # looked at again, and put off

        assert (await pool_status(world, pool)).get("placed") is None

        clock.now += EVERY_S
        await until_placed(world, pool, {"modal": 1})
