"""A bound Pod gets its machine, tells of it, and gives it back."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from app.api import keys
from app.kube import paths
from app.kube.client import Obj
from app.kube.errors import Unreachable
from providers.base import MachineState
from tests.cluster.vnode.vnode_world import DEADLINE_S, World, condition_of, is_ready, state_of
from tests.support.clouds import SMALL

SLOW_BOOT = SMALL | {"life": {"boot_s": 3600}}


@pytest.mark.behaviour(130, 192, 193)
async def test_a_bound_pod_becomes_ready_with_endpoint_and_id_in_one_request(world: World) -> None:
    async with world.running():
        pod = await world.pod()

        ready = await world.until_ready(pod)

    (machine,) = await world.cloud.machines()
    annotations = ready["metadata"]["annotations"]
    assert annotations[keys.INSTANCE_ID_ANNOTATION] == machine["id"]
    assert annotations[keys.ENDPOINT_ANNOTATION] == ready["status"]["podIP"]
    assert ready["status"]["phase"] == "Running"
    assert ready["status"]["podIPs"] == [{"ip": ready["status"]["podIP"]}]
    assert ready["status"]["observedGeneration"] == ready["metadata"]["generation"]
    assert all(
        condition_of(ready, kind)["status"] == "True"  # type: ignore[index]
        for kind in ("PodScheduled", "Initialized", "ContainersReady", "PodReadyToStartContainers")
    )
    assert "running" in state_of(ready)


async def test_a_whole_life_with_a_machine_that_boots_at_once_costs_these_writes_and_no_more(
    world: World,
) -> None:
    async with world.running(list_busy_s=0.05):
        pod = await world.pod()
        await world.until_ready(pod)

        await world.kube.delete(paths.pod(world.namespace, pod["metadata"]["name"]))
        await world.until_gone(pod)

    assert world.wire.about(keys.claim_name(world.namespace, pod["metadata"]["name"])) == [
        "PATCH nodeclaims/status"  # the mark
    ]
    assert world.wire.about(pod["metadata"]["name"]) == ["PATCH pods/status", "DELETE pods"]


async def test_a_pod_with_a_finalizer_is_shown_as_ended_before_it_is_let_go(world: World) -> None:
    async with world.running():
        pod = await world.pod(finalizers=("tests.local/keep",))
        await world.until_ready(pod)
        await world.kube.delete(paths.pod(world.namespace, pod["metadata"]["name"]))

        ended = await world.until(pod, lambda seen: seen["status"]["phase"] == "Failed")
        await world.until(pod, lambda seen: seen["metadata"]["deletionGracePeriodSeconds"] == 0)

    assert ended["status"]["reason"] == "Terminated"
    assert (
        state_of(ended)["terminated"]["exitCode"] == 143
    )  # what the workload said when it was asked to stop
    assert world.wire.about(pod["metadata"]["name"]).count("DELETE pods") == 1


async def test_a_last_delete_that_was_cut_off_in_the_api_server_is_sent_again(world: World) -> None:
    """The API server writes a grace of 0 and then removes the Pod; who hangs up stops it in between."""

    async def refuse(what: str, _name: str) -> None:
        if what == "DELETE pods":
            raise Unreachable("kept back by the test")

    world.wire.before = refuse
    async with world.running():
        left_behind = [pod async for pod in _cut_off_deletes(world)]
        assert left_behind
        world.wire.before = None

        for pod in left_behind:
            await world.until_gone(pod)


async def _cut_off_deletes(world: World) -> AsyncIterator[Obj]:
    """Delete Pods and hang up at moments from too early to too late; the first left in between."""
    for n in range(600):
        name = f"cut-{n}"
        pod = await world.pod(name=name, claimed=False, nodeName=world.node, schedulingGates=[])
        path = paths.pod(world.namespace, name)
        await world.kube.delete(path)
        last = asyncio.create_task(world.kube.delete(path, grace_s=0))
        await asyncio.wait([last], timeout=0.001 + n % 20 * 0.0004)
        last.cancel()
        await asyncio.wait([last])
        seen = await world.see(pod)
        if seen is not None and seen["metadata"]["deletionGracePeriodSeconds"] == 0:
            await asyncio.sleep(0.2)  # the server may be about to remove it all the same
            if await world.see(pod) is not None:
                yield pod
                return


@pytest.mark.behaviour(160)
async def test_deleting_a_pod_gives_its_machine_back(world: World) -> None:
    async with world.running():
        pod = await world.pod()
        await world.until_ready(pod)

        await world.kube.delete(paths.pod(world.namespace, pod["metadata"]["name"]))

        await world.until_gone(pod)
        assert await world.cloud.alive() == []


@pytest.mark.behaviour(161, 168, 169)
async def test_a_pod_stays_until_its_cloud_has_taken_the_terminate(world: World) -> None:
    async with world.running():
        pod = await world.pod()
        await world.until_ready(pod)
        fault = await world.cloud.add_fault("status", verb="terminate", unlimited=True)
        await world.kube.delete(paths.pod(world.namespace, pod["metadata"]["name"]))

        await world.until_event(pod, "TerminateRetrying")
        assert await world.see(pod) is not None
        await world.cloud.clear_faults(fault)

        await world.until_gone(pod)
        assert await world.cloud.alive() == []


@pytest.mark.behaviour(125, 128, 397)
@pytest.mark.parametrize("scenario", [SLOW_BOOT], ids=["slow-boot"])
async def test_a_slow_boot_is_shown_and_told_once(world: World) -> None:
    async with world.running():
        pod = await world.pod()

        shown = await world.until_reason(pod, "Initializing")
        await world.until_event(pod, "Provisioned")

    assert shown["status"]["phase"] == "Pending"
    assert state_of(shown)["waiting"]["reason"] == "Initializing"
    assert not is_ready(shown)


@pytest.mark.behaviour(120, 164, 165)
@pytest.mark.field_case("FC-006", "FC-055")
async def test_a_pod_is_deleted_while_its_create_has_no_answer_yet(world: World) -> None:
    async with world.running(call_timeout_s=60.0):
        held = await world.cloud.pause(verb="create", when="after")
        pod = await world.pod()
        await world.cloud.until(lambda truth: bool(truth["machines"]), what="the create")
        await world.rounds(2)  # seen: a Pod may go before that, and then the claims' room ends what comes

        await world.kube.delete(paths.pod(world.namespace, pod["metadata"]["name"]))
        await world.until_gone(pod)
        await world.cloud.resume(held)

        truth = await world.cloud.until(
            lambda truth: all(machine["state"] == "gone" for machine in truth["machines"]),
            what="the end of the machine",
        )
    assert len(truth["machines"]) == 1


@pytest.mark.behaviour(415, 416, 419)
@pytest.mark.parametrize(
    ("code", "phase", "shown"),
    [(0, "Succeeded", "Completed"), (3, "Failed", "Error"), (137, "Failed", "Error")],
    ids=["success", "failure", "out-of-memory"],
)
@pytest.mark.field_case("FC-008")
async def test_a_workload_that_exits_ends_its_pod_by_its_code_and_its_machine_goes(
    world: World, code: int, phase: str, shown: str
) -> None:
    async with world.running():
        pod = await world.pod()
        machine = await world.machine_of(pod)

        await world.cloud.exit(machine, code=code)

        over = await world.until(pod, lambda seen: seen["status"]["phase"] == phase)
        await world.cloud.until(lambda truth: truth["machines"][0]["state"] == "gone", what="the end")
    terminated = state_of(over)["terminated"]
    assert (terminated["exitCode"], terminated["reason"]) == (code, shown)
    assert terminated["startedAt"] <= terminated["finishedAt"]
    assert over["status"].get("reason") == (None if code == 0 else "Failed")


@pytest.mark.behaviour(416)
@pytest.mark.parametrize("scenario", [SMALL | {"completion": "ended"}], ids=["a-cloud-that-tells-no-code"])
@pytest.mark.field_case("FC-061")
async def test_an_end_without_a_code_is_never_a_success(world: World) -> None:
    async with world.running():
        pod = await world.pod()
        await world.cloud.exit(await world.machine_of(pod), code=0)

        over = await world.until(pod, lambda seen: seen["status"]["phase"] not in ("Pending", "Running"))

    assert (over["status"]["phase"], over["status"]["reason"]) == ("Failed", "Terminated")
    assert state_of(over)["terminated"]["exitCode"] == 137
    assert state_of(over)["terminated"]["reason"] == "ContainerStatusUnknown"


@pytest.mark.behaviour(417)
@pytest.mark.field_case("FC-072")
async def test_a_reclaimed_spot_machine_is_a_disruption(world: World) -> None:
    async with world.running():
        pod = await world.pod(claim={"capacityType": "Spot"})
        await world.cloud.preempt(await world.machine_of(pod))

        over = await world.until_reason(pod, "Preempted")
        await world.until_event(pod, "Preempted")

    assert over["status"]["phase"] == "Failed"
    assert condition_of(over, "DisruptionTarget")["status"] == "True"  # type: ignore[index]


@pytest.mark.behaviour(182, 199)
@pytest.mark.field_case("FC-021", "FC-072")
async def test_a_machine_that_vanished_ends_its_pod_without_a_guess_at_the_cause(world: World) -> None:
    async with world.running():
        pod = await world.pod()
        await world.cloud.remove(await world.machine_of(pod))

        over = await world.until_reason(pod, "Terminated")

    assert over["status"]["phase"] == "Failed"
    assert over["status"]["message"] == "external instance is gone"
    assert condition_of(over, "DisruptionTarget") is None


@pytest.mark.behaviour(173, 181)
async def test_a_cloud_that_does_not_answer_changes_no_status(world: World) -> None:
    async with world.running():
        pod = await world.pod()
        before = await world.until_ready(pod)
        await world.cloud.kill()

        await world.unknown_rounds(4)

        after = await world.see(pod)
    assert after is not None
    assert after["status"] == before["status"]


@pytest.mark.behaviour(300)
async def test_a_claim_deleted_under_a_running_pod_ends_it_with_its_machine(world: World) -> None:
    async with world.running():
        pod = await world.pod()
        await world.until_ready(pod)

        await world.kube.delete(paths.nodeclaim(keys.claim_name(world.namespace, pod["metadata"]["name"])))

        over = await world.until_reason(pod, "Terminated")
        assert await world.cloud.alive() == []
        await world.until_event(pod, "ClaimDeleted")
    assert over["status"]["phase"] == "Failed"
    claim = keys.claim_name(world.namespace, pod["metadata"]["name"])
    assert over["status"]["message"] == f"NodeClaim {claim} was deleted, and its machine given back"
    disrupted = condition_of(over, "DisruptionTarget")
    assert (disrupted["status"], disrupted["reason"]) == ("True", "ClaimDeleted")  # type: ignore[index]


@pytest.mark.behaviour(176, 190, 191)
async def test_a_restart_writes_nothing_about_pods_that_are_as_they_should_be(world: World) -> None:
    async with world.running():
        pod = await world.pod()
        before = await world.until_ready(pod)
    world.wire.writes.clear()

    async with world.running():
        other = await world.pod()
        await world.until_ready(other)  # by then the first one was looked at, too
        claim = await world.kube.get(
            paths.nodeclaim(keys.claim_name(world.namespace, pod["metadata"]["name"]))
        )
        async with asyncio.timeout(DEADLINE_S):
            while not _is_live(world, claim["metadata"]["uid"]):
                await asyncio.sleep(0.02)
        after = await world.see(pod)

    assert world.wire.about(pod["metadata"]["name"]) == []
    assert after is not None
    assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]
    assert len(await world.cloud.machines()) == 2


@pytest.mark.behaviour(195)
@pytest.mark.parametrize("written", ["ready", "ended"])
async def test_a_status_never_lands_on_a_new_pod_of_the_same_name(world: World, written: str) -> None:
    """The Pod is replaced in the moment in which the status of the old one is sent."""
    name = "phoenix"
    replacement: asyncio.Future[Obj] = asyncio.get_running_loop().create_future()

    async def replace(what: str, whose: str) -> None:
        if (what, whose) == ("PATCH pods/status", name):
            world.wire.before = None
            await world.kube.delete(paths.pod(world.namespace, name), grace_s=0)
            replacement.set_result(await world.pod(name=name, claimed=False))

    async with world.running():
        if written == "ready":
            world.wire.before = replace
            await world.pod(name=name)
        else:
            machine = await world.machine_of(await world.pod(name=name))
            world.wire.before = replace
            await world.cloud.exit(machine, code=3)
        new = await asyncio.wait_for(replacement, DEADLINE_S)

        after = await world.until_reason(new, "ConfigError")

    assert after["status"]["phase"] == "Pending"
    assert keys.INSTANCE_ID_ANNOTATION not in after["metadata"].get("annotations", {})
    assert len(await world.cloud.machines()) == 1


def _is_live(world: World, uid: Any) -> bool:
    view = world.provisioning.view(uid)
    return view.state == "live" and view.machine is not None and view.machine.state is MachineState.RUNNING


async def test_the_nodes_address_is_on_the_pod_but_no_change_of_it_is_worth_a_write(world: World):
    async def move_to(address: str) -> None:
        status = {"addresses": [{"$patch": "replace"}, {"type": "InternalIP", "address": address}]}
        await world.kube.patch(paths.node_status(world.node), {"status": status}, kind="strategic")

    async with world.running():
        await world.until_true(lambda: world.kube.find(paths.node(world.node)))
        await move_to("192.0.2.1")
        first = await world.until_ready(await world.pod())
        await move_to("192.0.2.2")
        second = await world.until_ready(await world.pod())
        seen = await world.see(first)

    assert first["status"]["hostIPs"] == [{"ip": "192.0.2.1"}]
    assert second["status"]["hostIP"] == "192.0.2.2"
    assert seen is not None
    assert seen["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
