"""What people do to our objects with kubectl: no machine leaks, none doubles, and no bystander is touched."""

import pytest

from app.api import keys
from app.kube import paths
from app.kube.client import Obj
from tests.chaos.world import POOL, World


async def test_claims_and_bindings_edited_by_hand_leak_nothing_and_double_nothing(world: World):
    await world.start(world.controller())
    names = ("bystander", "unfinalized", "torn", "unbound", "painted", "renamed")
    await world.create_pods(*names)
    await world.until_ready(*names)
    machines = {one["name"]: one["id"] for one in await world.cloud.alive()}
    bystander = (await world.pod("bystander"))["status"]

    # The finalizer alone: the claim serves on, and its end is made good by the rows.
    none = {"metadata": {"finalizers": None}}
    await world.kube.patch(await _path(world, "unfinalized"), none, kind="merge")
    # Finalizer and claim: the machine must not outlive what names it.
    torn = await _path(world, "torn")
    await world.kube.patch(torn, none, kind="merge")
    await world.kube.delete(torn)
    # The binding is for people to read, and comes back.
    binding = (await world.claim_of("unbound"))["metadata"]["name"]
    await world.kube.delete(paths.cloudpodbinding(world.namespace, binding))
    # A status that lies, of claim and binding.
    lie = {"status": {"phase": "Provisioning", "instanceID": "i-of-somebody", "endpoint": "203.0.113.9"}}
    await world.kube.patch(f"{await _path(world, 'painted')}/status", lie, kind="merge")
    name = (await world.claim_of("painted"))["metadata"]["name"]
    await world.kube.patch(paths.cloudpodbinding_status(world.namespace, name), lie, kind="merge")
    labels = {"metadata": {"labels": {keys.INSTALLATION_LABEL: "abcdefghij", keys.NODE_POOL_LABEL: "other"}}}
    await world.kube.patch(await _path(world, "renamed"), labels, kind="merge")

    async def torn_is_over() -> bool:
        return "torn" not in await world.ready() and len(await world.cloud.alive()) == 5

    async def painted_is_true() -> bool:
        claim = (await world.claim_of("painted"))["status"]
        binding = await world.kube.get(paths.cloudpodbinding(world.namespace, name))
        return {claim["instanceID"], binding["status"]["instanceID"]} <= set(machines.values())

    async def unbound_is_bound() -> bool:
        found = await world.kube.find(paths.cloudpodbinding(world.namespace, binding))
        return found is not None and found.get("status", {}).get("instanceID") == machine_of_unbound

    machine_of_unbound = (await world.claim_of("unbound"))["status"]["instanceID"]
    await world.until("the deleted binding is there again, with its status", unbound_is_bound)
    await world.until("the torn Pod is over and its machine gone", torn_is_over)
    await world.until("the painted statuses are true again", painted_is_true)
    lists = (await world.cloud.truth())["calls"]["list"]
    await world.cloud.until(lambda truth: truth["calls"]["list"] > lists + 6, what="six more lists")
    assert {"bystander", "unfinalized", "unbound", "painted", "renamed"} <= await world.ready()
    assert (await world.pod("bystander"))["status"] == bystander
    assert len(await world.cloud.machines()) == 6

    await world.delete_pods(*names)

    async def all_ended() -> bool:  # without a finalizer, the rows come after the claims
        return not await world.rows("select 1 from rental where state <> 'ended'")

    await world.until("every rental has ended", all_ended)
    await world.until_nothing_is_left()


@pytest.mark.field_case("FC-020")
async def test_a_pool_deleted_in_use_keeps_its_machines_until_their_pods_end_also_over_a_restart(
    world: World,
):
    controller = world.controller()
    await world.start(controller)
    await world.create_pods("one", "two")
    await world.until_ready("one", "two")
    before = {pod["metadata"]["name"]: pod["status"] for pod in await world.pods()}

    await world.kube.delete(paths.nodepool(POOL))
    await world.kill(controller)
    await world.start(controller)
    lists = (await world.cloud.truth())["calls"]["list"]
    await world.cloud.until(lambda truth: truth["calls"]["list"] > lists + 6, what="six more lists")

    assert {pod["metadata"]["name"]: pod["status"] for pod in await world.pods()} == before
    await world.one_machine_for_each_pod(ever=2)
    await world.delete_pods("one", "two")
    await world.until_nothing_is_left()

    async def gone() -> bool:
        return await world.kube.find(paths.nodepool(POOL)) is None

    await world.until("the pool goes with its last claim", gone)


@pytest.mark.field_case("FC-028")
async def test_a_pod_made_again_under_its_name_and_one_without_its_label_each_keep_to_their_own_machine(
    world: World,
):
    """Force-deleted and made again while nobody looks; and a label taken off while nobody looks."""
    controller = world.controller()
    await world.start(controller)
    await world.create_pods("again", "unlabelled")
    await world.until_ready("again", "unlabelled")
    first = (await world.pod("again"))["metadata"]["uid"]
    await world.kill(controller)

    path = paths.pod(world.namespace, "unlabelled")
    await world.kube.patch(path, {"metadata": {"labels": {keys.ENABLED_LABEL: None}}}, kind="merge")
    await world.kube.delete(paths.pod(world.namespace, "again"), grace_s=0)
    await world.start(controller)
    await world.create_pod("again")
    await world.until_ready("again")

    second: Obj = await world.pod("again")
    assert second["metadata"]["uid"] != first
    assert len(await world.cloud.machines()) == 3
    await world.until("the first one's claim is gone", lambda: _claims_are(world, 2))
    assert len(await world.cloud.alive()) == 2
    assert (await world.pod("unlabelled"))["status"]["phase"] == "Running"
    await world.delete_pods("again", "unlabelled")
    await world.until_nothing_is_left()


async def _path(world: World, pod: str) -> str:
    return paths.nodeclaim((await world.claim_of(pod))["metadata"]["name"])


async def _claims_are(world: World, count: int) -> bool:
    return len(await world.claims()) == count
