"""What an operator reads in the Events of claims and pools."""

import asyncio
from typing import Any
from uuid import uuid4

from app.api import keys
from app.kube import paths
from app.kube.claims import claim_spec
from app.kube.client import Obj
from app.provisioning.model import Refused
from providers.base import ClaimUid
from tests.cluster.claims.conftest import World
from tests.support.cluster import Kubectl
from tests.support.composed import until


async def a_pool(world: World) -> str:
    name = f"gpu-{uuid4().hex[:8]}"
    body = {
        "apiVersion": keys.API_VERSION,
        "kind": keys.NODE_POOL,
        "metadata": {"name": name},
        "spec": {"providers": [{"name": "modal"}]},
    }
    await world.kube.create(paths.nodepools(), body)
    return name


async def event(world: World, uid: str, reason: str) -> Obj:
    """The Event of that reason about one object, once it is there."""

    async def found() -> Obj | None:
        query = f"involvedObject.uid={uid},reason={reason}"
        items = (await world.kube.get(paths.events(), fieldSelector=query))["items"]
        return items[0] if items else None

    seen: Obj = await until(found, what=f"Event {reason}")
    return seen


def said(event: Obj) -> tuple[Any, ...]:
    return event["type"], event["message"]


async def test_a_claim_tells_of_its_machine_with_the_price_and_of_its_release(world: World):
    async with world.leading() as term:
        pod = await world.pod("a")
        claim = await world.claim(pod)
        machine, uid = await term.rent(claim), claim["metadata"]["uid"]

        rented = await event(world, uid, "Rented")
        assert said(rented) == (
            "Normal",
            f"machine {machine} is rented at modal r1 OnDemand, for $4.00 an hour",
        )

        await world.remove_pod(pod)
        released = await event(world, uid, "Released")
        assert said(released) == ("Normal", f"machine {machine} is gone for good (pod gone)")


async def test_a_refusal_is_told_of_the_claim_and_once_with_a_count_of_its_pool(
    world: World, kubectl: Kubectl
):
    pool = await a_pool(world)
    await world.cloud.set_capacity(0, region="r1", tier="OnDemand", accelerator="H100")
    async with world.leading() as term:
        claims = []
        for name in ("a", "b"):
            claims.append(await world.claim(await world.pod(name, pool=pool)))
            assert isinstance(await term.ensure(claims[-1]), Refused)

        one = await event(world, claims[0]["metadata"]["uid"], "Refused")
        assert said(one)[0] == "Warning"
        assert said(one)[1].startswith("modal r1 OnDemand refused H100:1, capacity: ")

        uid = (await world.kube.get(paths.nodepool(pool)))["metadata"]["uid"]
        assert said(await event(world, uid, "Refused")) == said(one)
        described = await asyncio.to_thread(kubectl, "describe", "nodepool", pool)
        assert "modal r1 OnDemand refused H100:1" in described.partition("Events:")[2]


async def test_a_machine_that_the_cloud_took_back_is_told_as_lost(world: World):
    pool = await a_pool(world)
    async with world.leading() as term:
        claim = await world.claim(await world.pod("a", pool=pool))
        machine = await term.rent(claim)
        await world.until_phase(claim, "Bound")

        await world.cloud.preempt(machine)

        lost = await event(world, claim["metadata"]["uid"], "Lost")
        assert lost["type"] == "Warning"
        assert (
            f"machine {machine} at modal r1 OnDemand is lost: the provider has taken it back"
            in lost["message"]
        )
        uid = (await world.kube.get(paths.nodepool(pool)))["metadata"]["uid"]
        assert machine not in (await event(world, uid, "Lost"))["message"]


async def test_a_machine_that_stops_because_its_pod_is_deleted_is_not_told_as_lost(world: World):
    async with world.leading() as term:
        pod = await world.pod("a")
        claim = await world.claim(pod)
        machine, uid = await term.rent(claim), claim["metadata"]["uid"]
        await world.until_phase(claim, "Bound")

        await world.kube.delete(paths.pod(world.namespace, pod["metadata"]["name"]))
        live = await world.live(claim)
        assert live is not None
        await term.provisioning.keep.stop(claim_spec(live), grace_s=0)

        async def over() -> bool:
            seen = term.provisioning.view(ClaimUid(uid)).machine
            return seen is not None and seen.end is not None

        await until(over, what="its end is seen before anything is released")
        await world.until_phase(claim, "Terminating")  # a look that came after that
        await world.remove_pod(pod)
        await event(world, uid, "Released")
        await term.events.flush()

    query = f"involvedObject.uid={uid}"
    told = {each["reason"] for each in (await world.kube.get(paths.events(), fieldSelector=query))["items"]}
    assert told == {"Rented", "Released"}, machine


async def test_a_new_leader_tells_nothing_again(world: World):
    async with world.leading() as term:
        claim = await world.claim(await world.pod("a"))
        await term.rent(claim)
        await world.until_phase(claim, "Bound")
        await event(world, claim["metadata"]["uid"], "Rented")

    async with world.leading() as term:
        other = await world.claim(await world.pod("b"))
        await term.rent(other)
        await event(world, other["metadata"]["uid"], "Rented")
        await term.events.flush()

    assert (await event(world, claim["metadata"]["uid"], "Rented"))["count"] == 1
