"""The way to the API server, or etcd behind it, is slow or silent: what is decided is decided once."""

import asyncio

import pytest

from tests.chaos.disasters import stumbling
from tests.chaos.world import PATIENT, World
from tests.support.disturbed import api_server_of, kubeconfig_through
from tests.support.proxy import Proxy


@pytest.mark.parametrize("how", ["silent", "cut"])
@pytest.mark.field_case("FC-042")
async def test_watches_that_hear_nothing_any_more_are_begun_again_and_nothing_is_missed(
    world: World, how: str
):
    """Silent: half open, every connection of ours at once. Only what is connected anew is answered, so this
    takes as long as a watch may be quiet (80 s), unless the Lease is lost first. Cut: as by a load balancer
    that restarts."""
    async with Proxy.running(api_server_of(world.cluster.kubeconfig)) as proxy:
        kubeconfig = kubeconfig_through(proxy, world.cluster.kubeconfig, world.folder)
        controller = world.controller(kubeconfig=kubeconfig)
        await world.start(controller)
        await world.create_pods("kept", "deleted")
        await world.until_ready("kept", "deleted")
        before = (await world.pod("kept"))["status"]

        if how == "silent":
            assert proxy.silence() >= 6  # the watches, at least
        else:
            await proxy.cut()
        await world.create_pod("new")
        await world.delete_pods("deleted")

        await world.until_ready("new", within_s=240)
        await world.until_gone("deleted")
        await world.until("the deleted one's claim goes", lambda: _claims_are(world, 2))
        assert (await world.pod("kept"))["status"] == before
        await world.one_machine_for_each_pod(ever=3)
        await world.each_attempt_was_sent_once()
        await world.delete_pods("kept", "new")
        await world.until_nothing_is_left()


@pytest.mark.field_case("FC-011")
async def test_a_slow_way_to_the_api_server_doubles_nothing(world: World):
    """Each answer takes half a second, so that everything is decided on what is old."""
    async with Proxy.running(api_server_of(world.cluster.kubeconfig)) as proxy:
        kubeconfig = kubeconfig_through(proxy, world.cluster.kubeconfig, world.folder)
        await world.start(world.controller(kubeconfig=kubeconfig))
        proxy.delay_s = 0.25

        names = [f"p{n}" for n in range(4)]
        await world.create_pods(*names)
        await world.until_ready(*names)
        await world.one_machine_for_each_pod(ever=4)
        await world.each_attempt_was_sent_once()
        await world.delete_pods(*names)
        await world.until_nothing_is_left()


@pytest.mark.field_case("FC-122")
async def test_an_etcd_that_stands_still_again_and_again_doubles_nothing_and_loses_nothing(world: World):
    """Writes hang for a second, time out, and may have happened: while Pods come and go."""
    plane = world.cluster.control_plane
    assert plane is not None
    controller = world.controller(options=PATIENT)
    await world.start(controller)
    await world.create_pods("kept", "gone-1", "gone-2")
    await world.until_ready("kept", "gone-1", "gone-2")
    before = (await world.pod("kept"))["status"]

    async with stumbling(plane):
        await asyncio.gather(world.create_pods("new-1", "new-2"), world.delete_pods("gone-1", "gone-2"))
        await world.until_ready("new-1", "new-2", within_s=180)
        await world.until_gone("gone-1", "gone-2")

    await world.until("the claims of the deleted ones go", lambda: _claims_are(world, 3))
    assert (await world.pod("kept"))["status"] == before
    await world.one_machine_for_each_pod(ever=5)
    await world.each_attempt_was_sent_once()
    await world.delete_pods("kept", "new-1", "new-2")
    await world.until_nothing_is_left()


async def _claims_are(world: World, count: int) -> bool:
    return len(await world.claims()) == count
