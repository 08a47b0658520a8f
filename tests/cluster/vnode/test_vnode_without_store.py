"""A new leader whose database does not answer: nothing is rented, and everything else goes on."""

import pytest

from app.api import keys
from app.kube import paths
from app.kube.client import Obj
from tests.cluster.vnode.vnode_world import World, state_of


async def bound(world: World) -> tuple[Obj, str]:
    """A ready Pod whose claim names its machine, as the claims room would have written."""
    async with world.running():
        pod = await world.pod()
        machine = await world.machine_of(pod)
    claim = keys.claim_name(world.namespace, pod["metadata"]["name"])
    status = {"status": {"phase": "Bound", "instanceID": machine, "account": "default", "region": "r1"}}
    await world.kube.patch(paths.nodeclaim_status(claim), status, kind="merge")
    world.wire.writes.clear()
    return pod, machine


async def test_an_end_is_shown_by_what_the_claims_status_names(world: World) -> None:
    pod, machine = await bound(world)

    async with world.running(store=False):
        await world.cloud.exit(machine, code=3)

        over = await world.until(pod, lambda seen: seen["status"]["phase"] == "Failed")
    assert state_of(over)["terminated"]["exitCode"] == 3
    assert world.wire.about(pod["metadata"]["name"])[0] == "PATCH pods/status"


async def test_a_deleted_pod_goes_with_its_machine(world: World) -> None:
    pod, _ = await bound(world)

    async with world.running(store=False):
        await world.kube.delete(paths.pod(world.namespace, pod["metadata"]["name"]))

        await world.until_gone(pod)
    assert await world.cloud.alive() == []


@pytest.mark.behaviour(389, 390)
async def test_nothing_is_rented_and_the_pod_says_why(world: World) -> None:
    async with world.running(store=False):
        pod = await world.pod()

        shown = await world.until_reason(pod, "Provisioning")
        assert await world.cloud.creates() == {}
    assert shown["status"]["message"].startswith("retrying: ")
