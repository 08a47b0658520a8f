"""What is not rented, and what becomes of its Pod."""

import asyncio

import pytest

from app.api import keys
from app.kube import paths
from app.kube.client import Obj
from tests.cluster.vnode.vnode_world import DEADLINE_S, World, condition_of, state_of


async def sold_out(world: World) -> None:
    await world.cloud.set_capacity(0, tier="OnDemand", accelerator="H100", region="r1")


@pytest.mark.behaviour(139, 141, 392)
@pytest.mark.field_case("FC-077")
async def test_a_refused_pod_fails_with_the_clouds_own_words_and_stays_when_nobody_replaces_it(
    world: World,
) -> None:
    await sold_out(world)
    async with world.running():
        pod = await world.pod()

        failed = await world.until_reason(pod, "ProvisionFailed")
        other = await world.pod(claim={"region": "r2"})
        await world.until_ready(other)
        still = await world.see(pod)

    assert failed["status"]["phase"] == "Failed"
    assert failed["status"]["message"]
    assert "waiting" in state_of(failed)  # it never ran, so no code is made up
    assert still is not None
    assert still["status"] == failed["status"]


@pytest.mark.behaviour(140)
async def test_a_refused_pod_of_an_owner_is_reaped(world: World) -> None:
    await sold_out(world)
    # Of a kind that the cluster does not serve, so that no other controller has a hand in it.
    owner = {"apiVersion": "tests.local/v1", "kind": "Set", "name": "s", "uid": "u", "controller": True}
    async with world.running():
        pod = await world.pod(owner=owner)
        await world.until_gone(pod)
        seen = world.wire.about(pod["metadata"]["name"])

    assert seen[0] == "PATCH pods/status"
    assert seen[-1] == "DELETE pods"
    assert await world.cloud.machines() == []


@pytest.mark.behaviour(107, 108)
@pytest.mark.parametrize("replaced", [True, False])
async def test_reaping_takes_no_pod_but_the_refused_one(world: World, replaced: bool) -> None:
    """The refused Pod goes, and perhaps a new one of its name comes, just before it is to be deleted."""
    await sold_out(world)
    name = "phoenix"
    owner = {"apiVersion": "tests.local/v1", "kind": "Set", "name": "s", "uid": "u", "controller": True}
    replacement: asyncio.Future[Obj | None] = asyncio.get_running_loop().create_future()

    async def replace(what: str, whose: str) -> None:
        if (what, whose) == ("DELETE pods", name):
            world.wire.before = None
            await world.kube.delete(paths.pod(world.namespace, name), grace_s=0)
            replacement.set_result(await world.pod(name=name, claimed=False) if replaced else None)

    async with world.running():
        world.wire.before = replace
        old = await world.pod(name=name, owner=owner)
        new = await asyncio.wait_for(replacement, DEADLINE_S)
        if new is None:
            await world.until_gone(old)
        else:
            after = await world.until_reason(new, "ConfigError")
            assert after["metadata"]["uid"] != old["metadata"]["uid"]
            assert "deletionTimestamp" not in after["metadata"]


@pytest.mark.behaviour(105)
async def test_a_running_pod_of_an_owner_is_never_reaped(world: World) -> None:
    owner = {"apiVersion": "tests.local/v1", "kind": "Set", "name": "s", "uid": "u", "controller": True}
    async with world.running():
        running = await world.pod(owner=owner)
        await world.until_ready(running)
        await sold_out(world)
        await world.until_gone(await world.pod(owner=owner))  # one beside it is refused, and reaped
        still = await world.see(running)

    assert still is not None
    assert still["status"]["phase"] == "Running"


@pytest.mark.behaviour(110)
async def test_a_refused_sandbox_pod_is_not_reaped(world: World) -> None:
    await sold_out(world)
    owner = {"apiVersion": keys.API_VERSION, "kind": "Sandbox", "name": "s", "uid": "u", "controller": True}
    async with world.running():
        pod = await world.pod(owner=owner)
        await world.until_reason(pod, "ProvisionFailed")
        other = await world.pod(claim={"region": "r2"})
        await world.until_ready(other)

    assert "DELETE pods" not in world.wire.about(pod["metadata"]["name"])


async def test_a_refusal_blocks_the_candidate(world: World) -> None:
    await sold_out(world)
    async with world.running():
        pod = await world.pod()
        await world.until_reason(pod, "ProvisionFailed")

    async with world.engine.connect() as conn:
        rows = list(await conn.exec_driver_sql("select provider, region, kind from block"))
    assert rows == [(world.provider, "r1", "capacity")]


@pytest.mark.behaviour(408)
@pytest.mark.field_case("FC-104")
async def test_a_pod_without_a_claim_gets_config_error_and_nothing_is_rented(world: World) -> None:
    async with world.running():
        pod = await world.pod(claimed=False)

        shown = await world.until_reason(pod, "ConfigError")
        await world.until_event(pod, "ConfigError")

        assert shown["status"]["phase"] == "Pending"
        assert await world.cloud.creates() == {}
        await world.claim(pod)  # once there is one, it goes on
        await world.until_ready(pod)


async def test_a_placed_pod_whose_claim_was_torn_out_before_it_was_rented_for_is_over(world: World) -> None:
    """Its owner replaces it; nobody would ever make another claim for this one."""
    placed = {"metadata": {"annotations": {keys.CAPACITY_TYPE_ANNOTATION: "OnDemand"}}}
    async with world.running():
        pod = await world.pod(claimed=False)
        path = paths.pod(world.namespace, pod["metadata"]["name"])
        await world.kube.patch(path, placed, kind="merge")

        shown = await world.until_reason(pod, "Terminated")

        assert shown["status"]["phase"] == "Failed"
        assert "NodeClaim" in shown["status"]["message"]
        assert await world.cloud.creates() == {}


@pytest.mark.behaviour(408)
async def test_a_claim_of_another_uid_rents_nothing_for_this_pod(world: World) -> None:
    async with world.running():
        pod = await world.pod(claim={"pod_uid": "00000000-0000-4000-8000-000000000000"})

        await world.until_reason(pod, "ConfigError")

    assert await world.cloud.creates() == {}


async def test_a_claim_for_another_account_rents_nothing_here(world: World) -> None:
    async with world.running():
        pod = await world.pod(claim={"account": "other"})

        shown = await world.until_reason(pod, "ConfigError")

    assert "is for another provider or account" in shown["status"]["message"]
    assert await world.cloud.creates() == {}


@pytest.mark.field_case("FC-055")
async def test_a_pod_without_a_claim_is_let_go_at_once(world: World) -> None:
    async with world.running():
        pod = await world.pod(claimed=False)
        await world.until_reason(pod, "ConfigError")

        await world.kube.delete(paths.pod(world.namespace, pod["metadata"]["name"]))

        await world.until_gone(pod)


async def test_a_pod_whose_claim_cannot_be_read_is_not_let_go_for_its_machine_may_be_there(
    world: World,
) -> None:
    async with world.running():
        pod = await world.pod(claim={"accelerator": "many H100s"})
        await world.until_reason(pod, "ConfigError")

        await world.kube.delete(paths.pod(world.namespace, pod["metadata"]["name"]))

        await world.until_event(pod, "TerminateRetrying")
        assert await world.kube.find(paths.pod(world.namespace, pod["metadata"]["name"])) is not None


@pytest.mark.behaviour(122)
async def test_a_missing_pool_is_a_config_error_until_it_appears(world: World) -> None:
    late = f"{world.pool}-late"
    async with world.running():
        pod = await world.pod(claim={"poolRef": late})
        shown = await world.until_reason(pod, "ConfigError")
        assert late in shown["status"]["message"]
        assert await world.cloud.creates() == {}

        body = {
            "apiVersion": keys.API_VERSION,
            "kind": keys.NODE_POOL,
            "metadata": {"name": late},
            "spec": {"providers": [{"name": world.provider}]},
        }
        await world.kube.create(paths.nodepools(), body)
        await world.until_ready(pod)
    await world.kube.delete(paths.nodepool(late))


async def test_a_shape_that_cannot_run_there_is_a_config_error(world: World) -> None:
    two = [{"name": name, "image": "busybox"} for name in ("one", "two")]
    async with world.running():
        pod = await world.pod(containers=two)

        shown = await world.until_reason(pod, "ConfigError")

    assert [each["name"] for each in shown["status"]["containerStatuses"]] == ["one", "two"]
    assert await world.cloud.creates() == {}


async def test_an_unanswered_order_ends_the_pod_after_the_pools_time_and_its_machine_later(
    world: World,
) -> None:
    changes = {"spec": {"failover": {"unknownTimeout": "1s"}}}
    await world.kube.patch(paths.nodepool(world.pool), changes, kind="merge")
    await world.cloud.add_fault("lost", verb="create")
    blind = await world.cloud.add_fault("status", verb="list", unlimited=True)
    async with world.running(unknown_timeout_floor_s=0.5):
        pod = await world.pod()

        failed = await world.until(pod, lambda seen: seen["status"]["phase"] == "Failed")
        assert len(await world.cloud.alive()) == 1
        await world.cloud.clear_faults(blind)

        await world.cloud.until(
            lambda truth: all(machine["state"] == "gone" for machine in truth["machines"]),
            what="the end of the machine that nobody had seen",
        )
    assert condition_of(failed, "DisruptionTarget")["status"] == "True"  # type: ignore[index]
    assert len(await world.cloud.machines()) == 1


@pytest.mark.field_case("FC-051")
async def test_a_daemon_sets_pod_is_left_alone_but_can_be_deleted(world: World) -> None:
    labels = {"app": "daemon"}
    daemons = f"/apis/apps/v1/namespaces/{world.namespace}/daemonsets"
    body = {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": "daemon"},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "nodeSelector": keys.placement_labels(world.provider),
                    "tolerations": [{"operator": "Exists"}],
                    "containers": [{"name": "agent", "image": "agent"}],
                },
            },
        },
    }
    async with world.running():
        await world.kube.create(daemons, body)
        daemon = await world.until_true(lambda: _bound(world, "app=daemon"))
        later = await world.pod(claimed=False)
        await world.until_reason(later, "ConfigError")  # what the daemon would have had before it

        seen = await world.see(daemon)
        assert seen is not None
        assert "containerStatuses" not in seen["status"]
        assert world.wire.about(daemon["metadata"]["name"]) == []
        await world.kube.delete(f"{daemons}/daemon", propagation="Background")
        await world.until_gone(daemon)

    assert world.wire.about(daemon["metadata"]["name"]) == ["DELETE pods"]
    assert await world.cloud.creates() == {}


@pytest.mark.behaviour(104, 408, 409)
@pytest.mark.field_case("FC-104")
async def test_a_pod_that_came_without_opting_in_rents_nothing(world: World) -> None:
    async with world.running():
        pod = await world.pod(labels={"app": "sneaky"}, claimed=False)

        await world.until_reason(pod, "ConfigError")

    assert await world.cloud.creates() == {}


@pytest.mark.behaviour(156, 411)
async def test_a_pod_that_lost_its_label_is_still_looked_after(world: World) -> None:
    async with world.running():
        pod = await world.pod()
        machine = await world.machine_of(pod)
        off = {"metadata": {"labels": {keys.ENABLED_LABEL: None}}}
        await world.kube.patch(paths.pod(world.namespace, pod["metadata"]["name"]), off, kind="merge")

        await world.cloud.exit(machine, code=3)

        over = await world.until(pod, lambda seen: seen["status"]["phase"] == "Failed")
    assert state_of(over)["terminated"]["exitCode"] == 3


async def _bound(world: World, selector: str) -> Obj | None:
    page = await world.kube.get(paths.pods(world.namespace), labelSelector=selector)
    found: list[Obj] = [pod for pod in page["items"] if pod["spec"].get("nodeName") == world.node]
    return found[0] if found else None
