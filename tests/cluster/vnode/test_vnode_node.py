"""The Node object and its Lease, on a real API server with its own controllers at work."""

import asyncio
import re
from datetime import datetime
from typing import Any

import pytest

from app.api import keys
from app.api.reasons import MACHINES_KNOWN_CONDITION
from app.kube import paths
from app.kube.cache import Cache
from app.kube.client import Obj
from app.kube.errors import Conflict
from app.vnode.node import CAPACITY
from app.vnode.retire import Retirement
from tests.cluster.vnode.vnode_world import DEADLINE_S, World, is_ready

# How autoscalers and cloud controllers recognise their own machines: AWS, GCE, Azure, Cluster API, Hetzner.
OTHERS_PROVIDER_IDS = (
    r"^aws:///[-0-9a-z]*/[-0-9a-z]*(/[-0-9a-z.]*)?$",
    r"^gce://[^/]+/[^/]+/[^/]+$",
    r"^azure:///subscriptions/",
    r"^(kubemark|openstack|vsphere|metal3|capi)://",
    r"^(hcloud|hrobot)://",
)


async def node(world: World) -> Obj | None:
    return await world.kube.find(paths.node(world.node))


async def ready(world: World) -> Obj:
    async def look() -> Obj | None:
        found = await node(world)
        return found if found is not None and is_ready(found) and not _untrusted(found) else None

    found: Obj = await world.until_true(look)
    return found


def _untrusted(found: Obj) -> bool:
    return any(taint["key"].startswith("node.kubernetes.io/") for taint in found["spec"].get("taints") or ())


@pytest.mark.behaviour(111, 117)
@pytest.mark.field_case("FC-040", "FC-050")
async def test_the_node_of_an_account_has_room_for_any_pod_and_a_taint_that_keeps_others_off(
    world: World,
) -> None:
    async with world.running():
        found = await ready(world)

    labels, status = found["metadata"]["labels"], found["status"]
    assert labels.items() >= keys.node_labels(world.provider).items()
    assert labels[keys.INSTALLATION_LABEL] == world.installation
    assert labels["node.kubernetes.io/exclude-disruption"] == "true"
    assert labels["node.kubernetes.io/exclude-from-external-load-balancers"] == "true"
    assert found["spec"]["providerID"] == f"nebula://{world.provider}/default"
    assert not any(re.match(form, found["spec"]["providerID"]) for form in OTHERS_PROVIDER_IDS)
    assert keys.node_taint(world.provider) in found["spec"]["taints"]
    assert status["capacity"] == status["allocatable"] == dict(CAPACITY)
    assert "addresses" not in status
    assert status["nodeInfo"]["operatingSystem"] == "linux"


@pytest.mark.behaviour(116)
async def test_a_node_leads_to_the_leader_and_a_takeover_moves_it_before_anything_else(world: World) -> None:
    async with world.running(kubelet_address="127.0.0.7", kubelet_bind="127.0.0.7:10777"):
        await world.until_true(lambda: leads_to(world, "127.0.0.7", 10777))
    world.wire.writes.clear()

    async with world.running(kubelet_address="127.0.0.8", kubelet_bind="127.0.0.8:10888"):
        await world.until_true(lambda: leads_to(world, "127.0.0.8", 10888))

    assert world.wire.writes[0] == ("PATCH nodes/status", world.node)


async def leads_to(world: World, address: str, port: int) -> bool:
    status = ((await node(world)) or {}).get("status") or {}
    return status.get("addresses") == [{"type": "InternalIP", "address": address}] and status.get(
        "daemonEndpoints"
    ) == {"kubeletEndpoint": {"Port": port}}


async def test_a_healthy_node_is_written_once_and_then_only_its_lease(world: World) -> None:
    async with world.running(node_lease_s=0.1):
        await ready(world)
        await world.until_true(lambda: known(world))  # the first whole list is news, too
        world.wire.writes.clear()
        pod = await world.pod()
        await world.until_ready(pod)

        async def renewed() -> bool:
            return sum(what == "PATCH leases" for what, _ in world.wire.writes) >= 3

        await world.until_true(renewed)

    assert [what for what, _ in world.wire.writes if "nodes" in what] == []


async def test_the_status_is_written_again_when_its_time_has_come(world: World) -> None:
    async with world.running(node_status_s=1.0):
        first = _heartbeat(await ready(world))

        async def later() -> bool:
            found = await node(world)
            return found is not None and _heartbeat(found) > first

        await world.until_true(later)


@pytest.mark.field_case("FC-047")
async def test_a_node_that_somebody_deletes_is_made_again_and_its_lease_follows(world: World) -> None:
    async with world.running(node_lease_s=0.2):
        old = await ready(world)
        pod = await world.pod()
        before = await world.until_ready(pod)
        await world.kube.delete(paths.node(world.node))

        async def made_again() -> Obj | None:
            found = await node(world)
            return found if found and found["metadata"]["uid"] != old["metadata"]["uid"] else None

        new: Obj = await world.until_true(made_again)

        async def owned() -> bool:
            lease = await world.kube.find(paths.lease("kube-node-lease", world.node))
            owners = (lease or {}).get("metadata", {}).get("ownerReferences") or ()
            return [owner["uid"] for owner in owners] == [new["metadata"]["uid"]]

        await world.until_true(owned)
        after = await world.see(pod)

    assert after is not None
    assert after["status"] == before["status"]
    assert len(await world.cloud.machines()) == 1


@pytest.mark.behaviour(113)
async def test_a_node_of_an_earlier_run_is_adopted_and_what_others_wrote_stays(world: World) -> None:
    foreign = {"key": "team", "value": "x", "effect": "NoSchedule"}
    body = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": world.node, "labels": {"team": "x"}},
        "spec": {"taints": [foreign], "unschedulable": True},
    }
    made = await world.kube.create(paths.nodes(), body)
    async with world.running():

        async def adopted() -> Obj | None:
            found = await node(world)
            taints = found["spec"].get("taints") or [] if found else []
            whole = found is not None and is_ready(found) and keys.node_taint(world.provider) in taints
            return found if whole else None

        found: Obj = await world.until_true(adopted)

    assert found["metadata"]["uid"] == made["metadata"]["uid"]
    assert found["metadata"]["labels"]["team"] == "x"
    assert found["metadata"]["labels"][keys.PROVIDER_LABEL] == world.provider
    assert foreign in found["spec"]["taints"]
    assert found["spec"]["unschedulable"] is True


async def test_our_taint_comes_back_when_somebody_takes_it_off(world: World) -> None:
    async with world.running():
        await ready(world)
        await _set_taints(world, [])

        async def tainted() -> bool:
            found = await node(world)
            return found is not None and keys.node_taint(world.provider) in (
                found["spec"].get("taints") or ()
            )

        await world.until_true(tainted)


async def test_the_lease_lasts_four_renewals_and_is_renewed(world: World) -> None:
    async with world.running(node_lease_s=0.5):
        await ready(world)
        path = paths.lease("kube-node-lease", world.node)

        async def there() -> Obj | None:
            return await world.kube.find(path)

        first: Obj = await world.until_true(there)

        async def later() -> bool:
            lease = await world.kube.get(path)
            return bool(lease["spec"]["renewTime"] > first["spec"]["renewTime"])

        await world.until_true(later)
    assert first["spec"]["leaseDurationSeconds"] == 2
    assert first["spec"]["holderIdentity"] == world.node


async def test_the_node_outlives_us_and_keeps_beating_while_its_cloud_is_away_at_the_next_start(
    world: World,
) -> None:
    async with world.running():
        await ready(world)
        pod = await world.pod()
        before = await world.until_ready(pod)
    assert await node(world) is not None
    await world.cloud.kill()
    path = paths.lease("kube-node-lease", world.node)
    old = await world.kube.get(path)

    async with world.running(node_lease_s=0.2):

        async def later() -> bool:
            return bool((await world.kube.get(path))["spec"]["renewTime"] > old["spec"]["renewTime"])

        await world.until_true(later)
        after = await world.see(pod)

    assert after is not None
    assert after["status"] == before["status"]


def _heartbeat(found: Obj) -> datetime:
    conditions = found["status"]["conditions"]
    stamp = next(each["lastHeartbeatTime"] for each in conditions if each["type"] == "Ready")
    return datetime.fromisoformat(stamp)


async def _set_taints(world: World, taints: list[dict[str, Any]]) -> None:
    """As ``kubectl taint`` would, whoever writes in between."""
    while True:
        found = await world.kube.get(paths.node(world.node))
        version = found["metadata"]["resourceVersion"]
        body = {"metadata": {"resourceVersion": version}, "spec": {"taints": taints}}
        try:
            await world.kube.patch(paths.node(world.node), body, kind="merge")
            return
        except Conflict:
            continue


# --- a provider that is silent, and one that is configured no more -------------------------------


async def known(world: World) -> Obj | None:
    """The Node's condition about its machines, once there is one."""
    found = await node(world)
    conditions = ((found or {}).get("status") or {}).get("conditions") or ()
    return next((each for each in conditions if each["type"] == MACHINES_KNOWN_CONDITION), None)


async def test_a_silent_cloud_is_said_once_on_its_node_and_on_no_pod(world: World) -> None:
    async def says(status: str) -> Obj | None:
        found = await known(world)
        return found if found is not None and found["status"] == status else None

    async with world.running():
        pod = await world.pod()
        before = await world.until_ready(pod)
        await world.until_true(lambda: says("True"))
        world.wire.writes.clear()
        fault = await world.cloud.add_fault("status", verb="list", unlimited=True)

        silent: Obj = await world.until_true(lambda: says("Unknown"))
        await world.unknown_rounds(4)
        still = await known(world)
        during = await world.see(pod)
        outage = [what for what, _ in world.wire.writes if what != "PATCH leases"]
        await world.cloud.clear_faults(fault)
        await world.until_true(lambda: says("True"))

    assert during is not None
    assert during["status"] == before["status"]
    assert silent["reason"] == "ProviderSilent"
    assert still is not None
    assert still["lastTransitionTime"] == silent["lastTransitionTime"]  # since when
    assert outage == ["PATCH nodes/status"]


async def test_a_new_leader_keeps_the_moment_since_when_a_cloud_is_silent(world: World) -> None:
    async def unknown() -> Obj | None:
        found = await known(world)
        return found if found is not None and found["status"] == "Unknown" else None

    async with world.running():
        await ready(world)
        await world.cloud.kill()
        first: Obj = await world.until_true(unknown)
    async with world.running(node_status_s=0.5):
        beat = _heartbeat(await ready(world))

        async def later() -> bool:
            return _heartbeat(await world.kube.get(paths.node(world.node))) > beat

        await world.until_true(later)
        second = await known(world)

    assert second is not None
    assert second["lastTransitionTime"] == first["lastTransitionTime"]


@pytest.mark.behaviour(111)
@pytest.mark.field_case("FC-052")
async def test_the_node_of_a_former_provider_goes_when_no_pod_and_no_claim_needs_it(world: World) -> None:
    async with world.running():
        await ready(world)
        pod = await world.pod()
        await world.until_ready(pod)
        retirement = Retirement(
            kube=world.kube,
            claims=world.vnodes._claims,
            settings=world.settings().model_copy(update={"providers": (), "list_rest_s": 0.1}),
            installation=world.installation,
        )
        assert await retirement._retired() != []
        assert not await retirement._remove(await world.kube.get(paths.node(world.node)))
        await world.kube.delete(paths.pod(world.namespace, pod["metadata"]["name"]))
        await world.until_gone(pod)
    claim = paths.nodeclaim(keys.claim_name(world.namespace, pod["metadata"]["name"]))
    await world.kube.patch(claim, {"metadata": {"finalizers": None}}, kind="merge")
    await world.kube.delete(claim)
    claims = Cache(world.kube, paths.nodeclaims())
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(claims.run())
        await claims.synced()
        settings = world.settings().model_copy(update={"providers": (), "list_rest_s": 0.1})
        await asyncio.wait_for(
            Retirement(
                kube=world.kube, claims=claims, settings=settings, installation=world.installation
            ).run(),
            DEADLINE_S,
        )
        watching.cancel()

    assert await node(world) is None


async def test_the_node_of_another_installation_is_never_removed(world: World) -> None:
    async with world.running():
        await ready(world)
    claims = Cache(world.kube, paths.nodeclaims())
    settings = world.settings().model_copy(update={"providers": ()})

    other = Retirement(kube=world.kube, claims=claims, settings=settings, installation="b" * 10)
    await asyncio.wait_for(other.run(), DEADLINE_S)

    assert await node(world) is not None


@pytest.mark.behaviour(112)
async def test_there_is_no_node_before_its_pods_are_looked_after(world: World) -> None:
    seen_pods = asyncio.Event()
    async with world.running(pods_after=seen_pods):
        await world.rounds(6)  # the account has been open for a while
        before = await node(world)
        seen_pods.set()
        await ready(world)

    assert before is None
