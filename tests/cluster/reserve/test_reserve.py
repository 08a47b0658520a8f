"""A Pod that is reserved for stays gated until it has a machine, and never fails for want of one."""

import asyncio
from datetime import timedelta

import pytest

from app.api import keys
from app.kube import paths
from tests.cluster.reserve.world import World, leaving, path_of, uid_of
from tests.support.clouds import SMALL
from tests.support.composed import until

ONE_PLACEMENT = ["POST nodeclaims", "PATCH nodeclaims/status", "POST cloudpodbindings", "PATCH pods"]
LOST = ["POST nodeclaims", "PATCH nodeclaims/status", "DELETE nodeclaims"]


# --- the plain way -------------------------------------------------------------------------------


@pytest.mark.behaviour(31, 85, 150)
@pytest.mark.parametrize("owned", [False, True], ids=["bare", "pool-in-mode-Reserve"])
async def test_the_machine_is_rented_before_the_gate_goes_and_the_node_takes_it_over(
    world: World, owned: bool
):
    await world.make_pool(mode="Reserve" if owned else "Replace")
    held = await world.one.pause(verb="create", when="after")

    async with world.leading() as leading:
        pod = await world.pod("reserved", owned=owned)
        await world.one.until(lambda truth: len(truth["machines"]) == 1)
        assert await world.is_gated(pod)
        await world.one.resume(held)
        living = await world.until_running(pod)

        written = [write for write in leading.wire.writes if write != "PATCH pods/status"]
        assert written == ONE_PLACEMENT

    (machine,) = await world.one.machines()
    (claim,) = await world.claims_of(pod)
    assert claim["status"]["instanceID"] == machine["id"]
    assert living["metadata"]["annotations"][keys.INSTANCE_ID_ANNOTATION] == machine["id"]
    assert await world.one.creates() == {machine["name"]: 1}
    assert await world.two.machines() == []


async def test_a_machine_that_comes_at_once_costs_the_writes_of_one_placement(world: World):
    await world.make_pool()

    async with world.leading() as leading:
        warm = await world.pod("warm")
        await world.until_running(warm)
        leading.wire.writes.clear()
        pod = await world.pod("measured")
        await world.until_running(pod)

        assert leading.wire.writes == ONE_PLACEMENT


async def test_an_owned_pod_of_a_pool_in_mode_replace_is_let_go_before_its_machine_is_rented(world: World):
    await world.make_pool()
    held = await world.one.pause(verb="create", when="before")

    async with world.leading() as leading:
        pod = await world.pod("replaced", owned=True)

        async def lifted() -> bool:
            return not await world.is_gated(pod)

        await until(lifted)
        assert leading.wire.writes == ["POST nodeclaims", "POST cloudpodbindings", "PATCH pods"]
        await world.one.resume(held)


@pytest.mark.behaviour(98)
@pytest.mark.field_case("FC-064")
async def test_nothing_is_rented_before_ours_is_the_last_gate(world: World):
    await world.make_pool()

    async with world.leading():
        pod = await world.pod("quota", gates=("example.com/quota", keys.SCHEDULING_GATE))
        message = await world.until_told(pod, "OtherGates")
        assert "example.com/quota" in message
        assert await world.claims_of(pod) == []
        gates = {"spec": {"schedulingGates": [{"name": keys.SCHEDULING_GATE}]}}
        await world.kube.patch(path_of(pod), gates, kind="merge")
        await world.until_running(pod)


@pytest.mark.field_case("FC-079")
async def test_a_create_that_hangs_holds_up_no_other_pod(world: World):
    """More Pods than placement has workers wait for an answer; another one is placed meanwhile."""
    await world.make_pool(world.first)
    held = await world.one.pause(verb="create", when="before")

    async with world.leading(call_timeout_s=30.0):
        pods = await asyncio.gather(*(world.pod(f"slow-{n}") for n in range(12)))
        await world.until_told(pods[-1], "Renting", f"renting at {world.first} r1 OnDemand")
        quick = await world.pod("quick", owned=True)

        async def lifted() -> bool:
            return not await world.is_gated(quick)

        await until(lifted)
        assert all([await world.is_gated(pod) for pod in pods])
        await world.one.resume(held)
        for pod in pods:
            await world.until_running(pod)


# --- lost candidates -----------------------------------------------------------------------------


@pytest.mark.behaviour(54, 139, 388)
async def test_a_refusal_costs_its_claims_create_mark_and_delete_and_the_next_candidate_gets_the_pod(
    world: World,
):
    await world.make_pool()
    await world.sell_out(world.one)

    async with world.leading() as leading:
        pod = await world.pod("moved")
        living = await world.until_running(pod)

        written = [write for write in leading.wire.writes if write != "PATCH pods/status"]
        assert written == [*LOST, *ONE_PLACEMENT]
        (machine,) = await world.two.alive()

        async def one_left() -> bool:
            return len(await world.claims_of(pod)) == 1

        await until(one_left)

    assert living["spec"]["nodeName"] == keys.node_name(world.second)
    (claim,) = await world.claims_of(pod)
    assert claim["status"]["instanceID"] == machine["id"]
    assert claim["metadata"]["name"] == keys.hashed_claim_name(
        world.namespace, "moved", uid=uid_of(pod), candidate=2
    )
    blocked = await world.rows("select provider, pod_name, kind from block")
    assert [tuple(row) for row in blocked] == [(world.first, "moved", "capacity")]


async def test_a_refused_candidate_takes_nothing_from_the_limits_of_the_pool_any_more(world: World):
    """Its claim is still in release, because the cloud does not answer, when the next candidate begins."""
    await world.make_pool()
    await world.edit_pool(limits={"gpus": 1})
    await world.sell_out(world.one)

    async with world.leading():
        lists = await world.one.pause(verb="list")
        pod = await world.pod("limited")
        await world.until_running(pod)
        assert [leaving(claim) for claim in await world.claims_of(pod)] == [True, False]
        await world.one.resume(lists)


@pytest.mark.behaviour(55, 57)
async def test_when_all_refuse_the_pod_stays_gated_and_says_so_and_capacity_that_returns_serves_it(
    world: World,
):
    await world.make_pool(blocklistTTL="1s")
    await world.sell_out(world.one, world.two)

    async with world.leading():
        pod = await world.pod("patient")
        message = await world.until_told(pod, "AllBlocked")
        assert message.startswith("0 of 2 candidates: 2 blocked until ")
        await world.until_event(pod, "AllBlocked")
        assert await world.is_gated(pod)
        await world.set_capacity(world.two, None)
        living = await world.until_running(pod)

    assert living["spec"]["nodeName"] == keys.node_name(world.second)
    assert await world.one.machines() == []
    assert len(await world.two.machines()) == 1


async def test_a_pod_that_goes_from_refusal_to_refusal_is_told_where_it_is_now_and_then(world: World):
    """Each candidate refuses at once, and none stays blocked long enough for all to be."""
    await world.make_pool(blocklistTTL="300ms")
    entries = [{"name": name, "regions": ["r1", "r2"]} for name in (world.first, world.second)]
    await world.edit_pool(providers=entries, capacityTypes=["Spot", "OnDemand"])
    for region in ("r1", "r2"):
        for cloud in world.clouds:
            for tier in ("Spot", "OnDemand"):
                await cloud.set_capacity(0, tier=tier, accelerator="H100", region=region)

    async with world.leading(block_jitter_s=0.05):
        pod = await world.pod("restless")
        await world.until_told(pod, "Renting", "renting at ", ", candidate ")
        await world.set_capacity(world.two, None)
        await world.until_running(pod)


async def test_a_refusal_that_nobody_blocks_is_not_asked_for_again_and_again(world: World):
    """The price was right when the candidate was chosen, and is not any more when it is asked for."""
    await world.make_pool()
    await world.edit_pool(maxPrice="4.00")

    async with world.leading() as leading:
        await world.until_running(await world.pod("warm"))
        held = await world.one.pause(verb="create", when="before")
        pod = await world.pod("dear")
        await world.until_called(world.one, "create", times=2)
        await world.one.set_price("9.00", tier="OnDemand", accelerator="H100", region="r1")
        await world.one.resume(held)
        living = await world.until_running(pod)

        assert leading.wire.writes.count("DELETE nodeclaims") == 1
    assert living["spec"]["nodeName"] == keys.node_name(world.second)


# --- queued orders -------------------------------------------------------------------------------

QUEUES = {
    "cloud": "fake",
    "account": "acct-1",
    "regions": ["r1", "r2"],
    "life": {"boot_s": 0},
    "on_no_capacity": "queue",
    "offers": [
        {
            "accelerator": "H100",
            "counts": [1],
            "usd_per_hour": {"Spot": "2.00", "OnDemand": "4.00"},
            "capacity": {"Spot": 0, "OnDemand": 0},
        }
    ],
}


@pytest.mark.behaviour(129)
@pytest.mark.parametrize("first_cloud", [QUEUES], ids=["queues"])
async def test_a_queued_order_keeps_the_gate_until_its_capacity_is_committed(world: World):
    await world.make_pool()

    async with world.leading():
        pod = await world.pod("queued")
        await world.until_told(
            pod, "Renting", f"renting at {world.first} r1 OnDemand: queued by the provider"
        )
        assert await world.is_gated(pod)
        await world.set_capacity(world.one, 1)
        await world.until_running(pod)

    assert len(await world.one.machines()) == 1
    assert await world.two.machines() == []


@pytest.mark.parametrize("first_cloud", [QUEUES], ids=["queues"])
async def test_after_reserve_timeout_the_order_is_ended_first_and_only_then_the_next_candidate_begins(
    world: World,
):
    await world.make_pool(reserveTimeout="1s")
    held = await world.one.pause(verb="terminate", when="before")

    async with world.leading(call_timeout_s=30.0):
        pod = await world.pod("impatient")
        await world.until_called(world.one, "terminate")
        (claim,) = await world.claims_of(pod)
        assert leaving(claim)
        assert await world.two.creates() == {}
        await world.one.resume(held)
        living = await world.until_running(pod)

        assert living["spec"]["nodeName"] == keys.node_name(world.second)
        await world.one.until(lambda truth: all(m["state"] == "gone" for m in truth["machines"]))
    (machine,) = await world.one.machines()
    assert await world.one.creates() == {machine["name"]: 1}
    assert len(await world.two.machines()) == 1


@pytest.mark.parametrize("first_cloud", [QUEUES], ids=["queues"])
async def test_a_restart_does_not_take_a_queued_order_for_a_machine_in_hand(world: World):
    await world.make_pool()
    async with world.leading():
        pod = await world.pod("queued")
        await world.until_told(pod, "Renting", "queued by the provider")
    listed = (await world.one.truth())["calls"].get("list", 0)

    async with world.leading():
        await world.until_called(world.one, "list", times=listed + 4)  # as long as Bound would wait for sight
        assert await world.is_gated(pod)
        await world.set_capacity(world.one, 1)
        await world.until_running(pod)

    assert sum((await world.one.creates()).values()) == 1


@pytest.mark.parametrize("first_cloud", [QUEUES], ids=["queues"])
async def test_reserve_timeout_goes_on_counting_over_a_restart(world: World):
    await world.make_pool(reserveTimeout="1h")
    async with world.leading():
        pod = await world.pod("queued")
        await world.until_told(pod, "Renting", "queued by the provider")
        assert await world.two.creates() == {}

    async with world.leading(ahead=timedelta(hours=2)):
        living = await world.until_running(pod)

    assert living["spec"]["nodeName"] == keys.node_name(world.second)


# --- unknown orders ------------------------------------------------------------------------------


@pytest.mark.behaviour(137)
@pytest.mark.field_case("FC-067")
async def test_an_order_that_nobody_answers_for_long_makes_way_and_both_are_visible_until_it_is_settled(
    world: World,
):
    await world.make_pool(unknownTimeout="1s")
    await world.one.add_fault("lost", verb="create")
    lists = await world.one.pause(verb="list")

    async with world.leading(unknown_timeout_floor_s=2.0):
        pod = await world.pod("unanswered")
        await world.until_told(pod, "Renting", "no answer whether a machine was rented")
        assert await world.is_gated(pod)
        living = await world.until_running(pod)

        assert living["spec"]["nodeName"] == keys.node_name(world.second)
        old, new = await world.claims_of(pod)
        assert (leaving(old), leaving(new)) == (True, False)
        assert old["spec"]["provider"] == world.first
        await world.one.resume(lists)  # now the machine that nobody heard of is found, and ended
        await world.one.until(lambda truth: all(m["state"] == "gone" for m in truth["machines"]))

        async def settled() -> bool:
            return [uid_of(claim) for claim in await world.claims_of(pod)] == [uid_of(new)]

        await until(settled)
    assert len(await world.one.machines()) == 1
    assert len(await world.two.alive()) == 1


@pytest.mark.slow
async def test_an_order_in_an_account_that_is_not_ours_any_more_makes_way_and_its_claim_stays(world: World):
    """The credential is another account's now, and an order was unknown then: nobody can ask any more."""
    await world.make_pool(unknownTimeout="1s")
    await world.one.add_fault("lost", verb="create")
    lists = await world.one.pause(verb="list")
    async with world.leading():
        pod = await world.pod("astray")
        await world.until_told(pod, "Renting", "no answer whether a machine was rented")
    await world.one.resume(lists)
    await world.one.reset(SMALL | {"account": "acct-9"})

    async with world.leading(unknown_timeout_floor_s=1.0):
        living = await world.until_running(pod)

        assert living["spec"]["nodeName"] == keys.node_name(world.second)
        old, _new = await world.claims_of(pod)
        assert (old["spec"]["provider"], leaving(old)) == (world.first, True)
    assert await world.one.creates() == {}


@pytest.mark.field_case("FC-001")
async def test_a_lost_answer_is_found_and_used_before_anybody_else_is_asked(world: World):
    await world.make_pool()
    await world.one.add_fault("lost", verb="create")

    async with world.leading():
        pod = await world.pod("found")
        living = await world.until_running(pod)

    assert living["spec"]["nodeName"] == keys.node_name(world.first)
    assert sum((await world.one.creates()).values()) == 1
    assert await world.two.creates() == {}


@pytest.mark.field_case("FC-006")
async def test_a_claim_deleted_by_hand_while_its_order_is_unknown_makes_no_second_machine_at_once(
    world: World,
):
    await world.make_pool()
    await world.one.add_fault("lost", verb="create", when="before")
    lists = await world.one.pause(verb="list")

    async with world.leading():
        pod = await world.pod("meddled")
        await world.until_told(pod, "Renting", "no answer whether a machine was rented")
        (claim,) = await world.claims_of(pod)
        await world.kube.delete(paths.nodeclaim(claim["metadata"]["name"]), uid=uid_of(claim))
        await world.until_told(pod, "Renting", "calling off the order at")
        assert await world.two.creates() == {}
        await world.one.resume(lists)
        await world.until_running(pod)

    machines = [*await world.one.machines(), *await world.two.machines()]
    assert len(machines) == 1
