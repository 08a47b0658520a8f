"""The Node object and its Lease, on a real API server with its own controllers at work."""

from datetime import datetime
from typing import Any

from app.api import keys
from app.kube import paths
from app.kube.client import Obj
from app.kube.errors import Conflict
from app.vnode.node import CAPACITY
from tests.cluster.vnode.vnode_world import World, is_ready


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


async def test_the_node_of_an_account_has_room_for_any_pod_and_a_taint_that_keeps_others_off(
    world: World,
) -> None:
    async with world.running():
        found = await ready(world)

    labels, status = found["metadata"]["labels"], found["status"]
    assert labels.items() >= keys.node_labels(world.provider).items()
    assert labels[keys.INSTALLATION_LABEL] == world.installation
    assert labels["node.kubernetes.io/exclude-disruption"] == "true"
    assert found["spec"]["providerID"] == f"nebula://{world.provider}/default"
    assert keys.node_taint(world.provider) in found["spec"]["taints"]
    assert status["capacity"] == status["allocatable"] == dict(CAPACITY)
    assert "addresses" not in status
    assert status["nodeInfo"]["operatingSystem"] == "linux"


async def test_a_healthy_node_is_written_once_and_then_only_its_lease(world: World) -> None:
    async with world.running(node_lease_s=0.1):
        await ready(world)
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


async def test_a_node_that_somebody_deletes_is_made_again_and_its_lease_follows(world: World) -> None:
    async with world.running(node_lease_s=0.2):
        old = await ready(world)
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
