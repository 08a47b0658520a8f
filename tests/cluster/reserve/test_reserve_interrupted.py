"""Reserve when something happens meanwhile: crashes at each write, pools edited, Pods deleted or let go."""

import asyncio

import pytest

from app.api import keys
from app.kube import paths
from app.kube.client import Obj
from tests.cluster.reserve.test_reserve import QUEUES
from tests.cluster.reserve.world import World, leaving, path_of, uid_of
from tests.support.composed import until

pytestmark = pytest.mark.slow

# --- crashes -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.behaviour(87, 88, 149, 150, 152)
@pytest.mark.parametrize("after_effect", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "what", ["POST nodeclaims", "PATCH nodeclaims/status", "POST cloudpodbindings", "PATCH pods"]
)
async def test_a_crash_at_any_write_goes_on_from_the_claim_with_one_machine(
    world: World, what: str, after_effect: bool
):
    await world.make_pool()
    async with world.leading() as leading:
        leading.wire.break_at(what, after_effect=after_effect)
        pod = await world.pod("crashed")
        await asyncio.wait_for(leading.wire.broken.wait(), timeout=20)
    before = await world.claims_of(pod)

    async with world.leading():
        await world.until_running(pod)

        (claim,) = await world.claims_of(pod)
        assert [uid_of(each) for each in before] in ([], [uid_of(claim)])
        machines = [*await world.one.machines(), *await world.two.machines()]
        assert [machine["id"] for machine in machines] == [
            claim["status"].get("instanceID", machines[0]["id"])
        ]
        (binding,) = (await world.kube.get(paths.cloudpodbindings(world.namespace)))["items"]
        assert binding["metadata"]["ownerReferences"][0]["uid"] == uid_of(claim)


@pytest.mark.slow
@pytest.mark.parametrize("after_effect", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("what", "nth"), [("DELETE nodeclaims", 1), ("POST nodeclaims", 2), ("PATCH nodeclaims/status", 2)]
)
async def test_a_crash_between_two_candidates_ends_with_one_machine_at_the_second(
    world: World, what: str, nth: int, after_effect: bool
):
    await world.make_pool()
    await world.sell_out(world.one)
    async with world.leading() as leading:
        leading.wire.break_at(what, nth=nth, after_effect=after_effect)
        pod = await world.pod("crashed")
        await asyncio.wait_for(leading.wire.broken.wait(), timeout=20)

    async with world.leading():
        living = await world.until_running(pod)

        assert living["spec"]["nodeName"] == keys.node_name(world.second)
        await until(lambda: _only_claim(world, pod))
    assert await world.one.machines() == []
    assert len(await world.two.machines()) == 1
    assert sum((await world.two.creates()).values()) == 1


async def _only_claim(world: World, pod: Obj) -> bool:
    return len(await world.claims_of(pod)) == 1


@pytest.mark.parametrize("first_cloud", [QUEUES], ids=["queues"])
async def test_a_crash_while_a_timed_out_order_is_called_off_waits_for_that_before_the_next_one(world: World):
    await world.make_pool(reserveTimeout="1s")
    held = await world.one.pause(verb="terminate", when="before")
    async with world.leading():
        pod = await world.pod("crashed")
        await world.until_called(world.one, "terminate")

    asked = (await world.one.truth())["calls"]["terminate"]
    async with world.leading(call_timeout_s=30.0):
        await world.until_called(world.one, "terminate", times=asked + 1)
        assert await world.two.creates() == {}
        await world.one.resume(held)
        living = await world.until_running(pod)

    assert living["spec"]["nodeName"] == keys.node_name(world.second)
    assert sum((await world.one.creates()).values()) == 1


# --- pools ---------------------------------------------------------------------------------------


@pytest.mark.behaviour(410)
async def test_the_pool_is_read_again_before_the_gate_goes_and_a_machine_it_does_not_allow_goes_back(
    world: World,
):
    await world.make_pool()
    held = await world.one.pause(verb="create", when="after")

    async with world.leading(call_timeout_s=30.0) as leading:
        pod = await world.pod("edited")
        await world.one.until(lambda truth: len(truth["machines"]) == 1)
        leading.term.blind(leading.term.pools)  # what the watch would tell comes too late
        await world.edit_pool(providers=[{"name": world.second, "regions": ["r1"]}])
        await world.one.resume(held)
        await world.one.until(lambda truth: truth["machines"][0]["state"] == "gone")

        assert await world.is_gated(pod)

    async with world.leading():
        living = await world.until_running(pod)
    assert living["spec"]["nodeName"] == keys.node_name(world.second)


async def test_a_pool_that_goes_while_a_machine_is_being_rented_takes_the_machine_back(world: World):
    await world.make_pool()
    held = await world.one.pause(verb="create", when="after")

    async with world.leading(call_timeout_s=30.0):
        pod = await world.pod("poolless")
        await world.one.until(lambda truth: len(truth["machines"]) == 1)
        await world.kube.delete(paths.nodepool(world.pool))
        await world.one.resume(held)
        await world.until_told(pod, "NoPool")
        await world.one.until(lambda truth: truth["machines"][0]["state"] == "gone")

        assert await world.is_gated(pod)
        await world.until_no_claim(pod)


async def test_a_machine_in_hand_waits_for_its_node_to_take_pods_again(world: World):
    await world.make_pool(world.first)
    node = paths.node(keys.node_name(world.first))
    held = await world.one.pause(verb="create", when="after")

    async with world.leading(call_timeout_s=30.0, unbound_after_s=60.0):
        pod = await world.pod("cordoned")
        await world.one.until(lambda truth: len(truth["machines"]) == 1)
        await world.kube.patch(node, {"spec": {"unschedulable": True}}, kind="merge")
        await world.one.resume(held)
        await world.until_told(pod, "Renting", "rented, but", "is cordoned")
        assert await world.is_gated(pod)
        await world.kube.patch(node, {"spec": {"unschedulable": False}}, kind="merge")
        await world.until_running(pod)

    assert len(await world.one.machines()) == 1


async def test_a_machine_whose_node_stays_closed_goes_back_in_the_end(world: World):
    await world.make_pool()
    node = paths.node(keys.node_name(world.first))
    held = await world.one.pause(verb="create", when="after")

    async with world.leading(call_timeout_s=30.0, unbound_after_s=1.0):
        pod = await world.pod("cordoned")
        await world.one.until(lambda truth: len(truth["machines"]) == 1)
        await world.kube.patch(node, {"spec": {"unschedulable": True}}, kind="merge")
        await world.one.resume(held)
        living = await world.until_running(pod)

        assert living["spec"]["nodeName"] == keys.node_name(world.second)
        await world.one.until(lambda truth: truth["machines"][0]["state"] == "gone")


# --- Pods ----------------------------------------------------------------------------------------


@pytest.mark.behaviour(29, 106)
@pytest.mark.parametrize("first_cloud", [QUEUES], ids=["queues"])
@pytest.mark.parametrize("finalizers", [(), ("example.com/keep",)], ids=["plain", "kept-by-a-finalizer"])
@pytest.mark.field_case("FC-055", "FC-063")
async def test_a_pod_deleted_while_it_is_gated_gives_everything_back(
    world: World, finalizers: tuple[str, ...]
):
    await world.make_pool()

    async with world.leading():
        pod = await world.pod("deleted", finalizers=finalizers)
        await world.until_told(pod, "Renting", "queued by the provider")
        await world.kube.delete(path_of(pod))
        await world.one.until(lambda truth: truth["machines"][0]["state"] == "gone")
        await world.until_no_claim(pod)

        assert (await world.kube.find(path_of(pod)) is not None) == bool(finalizers)
    assert await world.two.creates() == {}


@pytest.mark.behaviour(29, 301)
@pytest.mark.field_case("FC-006")
async def test_a_pod_deleted_while_its_order_is_on_its_way_leaves_no_machine(world: World):
    await world.make_pool()
    held = await world.one.pause(verb="create", when="after")

    async with world.leading(call_timeout_s=30.0):
        pod = await world.pod("deleted")
        await world.one.until(lambda truth: len(truth["machines"]) == 1)
        await world.kube.delete(path_of(pod))
        await world.one.resume(held)
        await world.one.until(lambda truth: truth["machines"][0]["state"] == "gone")
        await world.until_no_claim(pod)


@pytest.mark.behaviour(409)
@pytest.mark.parametrize("first_cloud", [QUEUES], ids=["queues"])
async def test_a_pod_whose_gate_somebody_else_takes_off_loses_its_claim(world: World):
    await world.make_pool()

    async with world.leading():
        pod = await world.pod("let-go")
        await world.until_told(pod, "Renting", "queued by the provider")
        for provider in (world.first, world.second):  # else the scheduler may happen to choose the claim's
            node = paths.node(keys.node_name(provider))
            await world.kube.patch(node, {"spec": {"unschedulable": True}}, kind="merge")
        await world.kube.patch(path_of(pod), {"spec": {"schedulingGates": []}}, kind="merge")
        await world.one.until(lambda truth: truth["machines"][0]["state"] == "gone")
        await world.until_no_claim(pod)

    assert await world.two.creates() == {}


async def test_a_machine_that_goes_before_the_gate_does_is_no_machine(world: World):
    """A queued order that the provider drops: the next candidate serves the Pod."""
    await world.make_pool()
    await world.one.reset(QUEUES)

    async with world.leading():
        pod = await world.pod("dropped")
        await world.until_told(pod, "Renting", "queued by the provider")
        (machine,) = await world.one.machines()
        await world.one.remove(machine["id"])
        living = await world.until_running(pod)

    assert living["spec"]["nodeName"] == keys.node_name(world.second)


@pytest.mark.behaviour(123, 124)
async def test_a_pod_that_lacks_a_secret_rents_nothing_until_it_is_there(world: World):
    await world.make_pool()
    source = {"secretKeyRef": {"name": "token", "key": "value"}}

    async with world.leading():
        pod = await world.pod("secretive", env=[{"name": "TOKEN", "valueFrom": source}])
        message = await world.until_told(pod, "ConfigError")
        assert "token" in message
        assert await world.one.creates() == {}
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "token"}}
        path = f"/api/v1/namespaces/{world.namespace}/secrets"
        await world.kube.create(path, {**secret, "stringData": {"value": "s3cret"}})
        await world.until_running(pod)

    assert "s3cret" not in str(await world.kube.get(paths.events(world.namespace)))


async def test_a_reserved_pod_that_is_never_bound_stays_and_its_machine_goes_back(world: World):
    await world.make_pool(world.first)

    async with world.leading(unbound_after_s=0.5):
        pod = await world.pod("too-large", resources={"limits": {keys.GPU_RESOURCE: "1", "cpu": "50M"}})
        await world.until_event(pod, "NotBound")
        await world.one.until(lambda truth: all(m["state"] == "gone" for m in truth["machines"]))

    assert uid_of(await world.read(pod)) == uid_of(pod)
    assert not [claim for claim in await world.claims_of(pod) if not leaving(claim)]
