"""Failover, refusals and blocks, as other people met them."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import text

from app.api import keys
from app.kube import paths
from app.store.engine import begin
from tests.cluster.reserve.test_reserve import QUEUES
from tests.cluster.reserve.world import World, leaving, path_of, uid_of
from tests.support.clouds import SMALL
from tests.support.composed import until

pytestmark = pytest.mark.slow

GATE = keys.SCHEDULING_GATE
BOOTS = SMALL | {"life": {"boot_s": 3600}}


@pytest.mark.parametrize("first_cloud", [QUEUES], ids=["queues"])
async def test_fc_004_a_teardown_that_fails_holds_the_next_candidate_back_and_is_seen_until_it_is_done(
    world: World,
):
    """Stronger than the case asks: two orders of one Pod are never out at once because an end failed."""
    await world.make_pool(reserveTimeout="1s")
    broken = await world.one.add_fault("status", verb="terminate", unlimited=True)

    async with world.leading():
        pod = await world.pod("stuck")
        await world.until_called(world.one, "terminate", times=5)
        (claim,) = await world.claims_of(pod)
        assert leaving(claim)
        assert keys.CLAIM_FINALIZER in claim["metadata"]["finalizers"]
        assert await world.two.creates() == {}
        message = await world.until_told(pod, "Renting", "calling off the order at")
        assert world.first in message
        await world.one.clear_faults(broken)
        living = await world.until_running(pod)

        assert living["spec"]["nodeName"] == keys.node_name(world.second)
        await world.one.until(lambda truth: all(m["state"] == "gone" for m in truth["machines"]))
    assert len(await world.one.machines()) == len(await world.two.machines()) == 1


async def test_fc_065_one_bad_object_of_each_kind_stops_none_of_the_others(world: World):
    await world.make_pool()
    await world.one.plant(name="", region="r1")
    await world.one.plant(name="nb-\N{SNOWMAN}" + "x" * 300, region="r1")

    dear = await world.pod("dear")
    annotations = {"metadata": {"annotations": {"cloud.aibrix.ai/max-price": "two"}}}
    await world.kube.patch(path_of(dear), annotations, kind="merge")

    async with world.leading():
        torn = await world.pod("torn")
        claim = {
            "apiVersion": keys.API_VERSION,
            "kind": keys.NODE_CLAIM,
            "metadata": {"name": f"{world.namespace}-torn-x", "finalizers": [keys.CLAIM_FINALIZER]},
            "spec": {
                "podRef": {"namespace": world.namespace, "name": "torn", "uid": uid_of(torn)},
                "poolRef": world.pool,
                "provider": world.first,
                "capacityType": "OnDemand",
                "accelerator": "many H100s",
            },
        }
        await world.kube.create(paths.nodeclaims(), claim)
        good = [await world.pod(f"good-{n}") for n in range(3)]
        for pod in good:
            await world.until_running(pod)
        message = await world.until_told(dear, "InvalidRequest")

    assert "max-price" in message


async def test_fc_070_a_login_that_expired_sends_pods_elsewhere_and_ends_nothing_there(world: World):
    await world.make_pool()
    async with world.leading():
        old = await world.pod("old")
        before = await world.until_running(old)
        assert before["spec"]["nodeName"] == keys.node_name(world.first)
        await world.one.add_fault("expired", unlimited=True)

        new = await world.pod("new")
        living = await world.until_running(new)
        blocked = await world.rows("select provider, everything, kind from block")
        calls = (await world.one.truth())["calls"]["list"]
        await world.until_called(world.one, "list", times=calls + 5)
        after = await world.read(old)

    assert living["spec"]["nodeName"] == keys.node_name(world.second)
    assert [tuple(row) for row in blocked] == [(world.first, True, "auth")]
    assert after["status"] == before["status"]
    assert len(await world.one.alive()) == 1


async def test_fc_074_a_request_that_is_wrong_is_told_at_once_and_blocks_no_offer_for_others(world: World):
    """And "at once" is: one order at each place that might see it otherwise, not one at each of 40 offers."""
    await world.make_pool()
    for cloud in world.clouds:
        await cloud.add_fault(
            "refuse", verb="create", code="invalid", message="field gpuCuont is unknown", unlimited=True
        )

    async with world.leading():
        wrong = await world.pod("wrong", owned=False)
        message = await world.until_told(wrong, "AllBlocked")
        lists = (await world.one.truth())["calls"]["list"]
        await world.until_called(world.one, "list", times=lists + 5)
        sent = [sum((await cloud.creates()).values()) for cloud in world.clouds]
        blocked = await world.rows("select kind, template, accelerator, region, tier, message from block")
        for cloud in world.clouds:
            await cloud.clear_faults()
        right = await world.pod("right", command=["another"])
        living = await world.until_running(right)

    assert "blocked" in message
    assert sent == [1, 1]
    assert {row.kind for row in blocked} == {"invalid"}
    assert all(row.template and (row.accelerator, row.region, row.tier) == (None,) * 3 for row in blocked)
    assert all("gpuCuont" in row.message for row in blocked)
    assert living["spec"]["nodeName"] == keys.node_name(world.first)


async def test_fc_068_a_shortage_is_asked_about_once_and_burdens_nobody_else(world: World):
    """Eight Pods, every offer full. What is refused once is not asked for again before its time."""
    await world.make_pool()
    await world.sell_out(world.one, world.two)
    names = [f"p-{n}" for n in range(8)]

    async with world.leading() as leading:
        pods = await asyncio.gather(*(world.pod(name) for name in names))
        for pod in pods:
            await world.until_told(pod, "AllBlocked")
        asked = [sum((await cloud.creates()).values()) for cloud in world.clouds]
        claims = leading.wire.writes.count("POST nodeclaims")
        lists = (await world.one.truth())["calls"]["list"]
        await world.until_called(world.one, "list", times=lists + 10)

        assert [sum((await cloud.creates()).values()) for cloud in world.clouds] == asked
        assert leading.wire.writes.count("POST nodeclaims") == claims
        other = await world.pod("other", resources={"limits": {"cpu": "1"}}, gates=("tests/hold", GATE))
        labels = {"metadata": {"labels": {keys.ACCELERATOR_TYPE_LABEL: None}}}
        await world.kube.patch(path_of(other), labels, kind="merge")
        gates = {"spec": {"schedulingGates": [{"name": GATE}]}}
        await world.kube.patch(path_of(other), gates, kind="merge")
        await world.until_running(other)

        for cloud in world.clouds:
            await world.set_capacity(cloud, None)
        async with begin(world.engine) as conn:
            await conn.execute(text("update block set expires_at = clock_timestamp()"))
        for pod in pods:
            await world.until_running(pod)
    machines = [*await world.one.machines(), *await world.two.machines()]
    assert len(machines) == len(names) + 1


@pytest.mark.parametrize("first_cloud", [BOOTS], ids=["slow-boot"])
async def test_fx_08_a_pod_whose_machine_is_still_booting_is_served_already(world: World):
    """However often it is looked at meanwhile, by whoever leads."""
    await world.make_pool(world.first)

    async def touch(pod: dict[str, Any], n: int) -> None:
        await world.kube.patch(path_of(pod), {"metadata": {"annotations": {"n": str(n)}}}, kind="merge")

    async with world.leading():
        pod = await world.pod("booting")
        await world.one.until(lambda truth: len(truth["machines"]) == 1)
        for n in range(10):
            await touch(pod, n)
            await world.edit_pool(maxPrice=f"{90 + n}.00")
        other = await world.pod("other")
        await world.one.until(lambda truth: len(truth["machines"]) == 2)

    async with world.leading():
        await touch(pod, 11)
        lists = (await world.one.truth())["calls"]["list"]
        await world.until_called(world.one, "list", times=lists + 5)
        assert len(await world.claims_of(pod)) == len(await world.claims_of(other)) == 1
    assert sum((await world.one.creates()).values()) == 2


@pytest.mark.parametrize("first_cloud", [BOOTS], ids=["slow-boot"])
async def test_fc_071_fc_012_after_a_machine_that_broke_at_its_start_the_next_pod_goes_elsewhere(
    world: World,
):
    """The first place is the one that the pool names first, and it would break the next one, too."""
    await world.make_pool()

    async with world.leading():
        first = await world.pod("first", owned=True)
        await world.one.until(lambda truth: len(truth["machines"]) == 1)
        (machine,) = await world.one.machines()
        await world.one.fail(machine["id"], message="a layer of the image is broken here")

        async def failed() -> bool:
            return (await world.read(first))["status"].get("phase") == "Failed"

        await until(failed)
        second = await world.until_running(await world.pod("second", owned=True))
        await world.one.until(lambda truth: truth["machines"][0]["state"] == "gone")

    assert second["spec"]["nodeName"] == keys.node_name(world.second)
    assert len(await world.one.machines()) == 1
