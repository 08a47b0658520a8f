"""Restarts on the same machine, graceful ends and deadlines: what a kubelet does, on a rented machine."""

from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text

from app.api import keys
from app.kube import paths
from app.kube.client import Obj
from app.store import standing
from app.store.engine import begin
from tests.cluster.vnode.vnode_world import World, condition_of, is_ready, state_of
from tests.support.clouds import SMALL

ONCE = SMALL | {"restarts": False}
OWNER = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "none"}


def container_of(pod: Obj) -> Obj:
    held: Obj = (pod["status"].get("containerStatuses") or [{}])[0]
    return held


def restarts_of(pod: Obj) -> int:
    return int(container_of(pod).get("restartCount", 0))


def is_back(pod: Obj, count: int) -> bool:
    return is_ready(pod) and restarts_of(pod) == count


async def owned(world: World) -> Obj:
    """A reference to a controller that makes no Pods, and is there, so that nothing is collected."""
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "owner"}}
    made = await world.kube.create(f"/api/v1/namespaces/{world.namespace}/configmaps", body)
    ref = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": made["metadata"]["uid"]}
    return ref | {"controller": True}


async def delete(world: World, pod: Obj, **options: Any) -> None:
    await world.kube.delete(paths.pod(world.namespace, pod["metadata"]["name"]), **options)


# --- restarts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "code"), [("Always", 0), ("Always", 3), ("OnFailure", 3)])
@pytest.mark.field_case("FX-09")
async def test_a_workload_that_its_policy_restarts_runs_again_on_the_same_machine(
    world: World, policy: str, code: int
) -> None:
    async with world.running():
        pod = await world.pod(restartPolicy=policy)
        machine = await world.machine_of(pod)

        await world.cloud.exit(machine, code=code)

        back = await world.until(pod, lambda seen: is_back(seen, 1))
        truth = await world.cloud.machines()
    last = container_of(back)["lastState"]["terminated"]
    assert (last["exitCode"], last["reason"]) == (code, "Completed" if code == 0 else "Error")
    assert last["startedAt"] <= last["finishedAt"] <= state_of(back)["running"]["startedAt"]
    assert back["metadata"]["annotations"][keys.INSTANCE_ID_ANNOTATION] == machine
    assert [(one["id"], one["restarts"]) for one in truth] == [(machine, 1)]


@pytest.mark.parametrize(("policy", "code"), [("OnFailure", 0), ("Never", 3)])
async def test_a_workload_that_its_policy_does_not_restart_is_over(
    world: World, policy: str, code: int
) -> None:
    async with world.running():
        pod = await world.pod(restartPolicy=policy)
        machine = await world.machine_of(pod)

        await world.cloud.exit(machine, code=code)

        over = await world.until(pod, lambda seen: seen["status"]["phase"] in ("Succeeded", "Failed"))
        (truth,) = await world.cloud.machines()
    assert over["status"]["phase"] == ("Succeeded" if code == 0 else "Failed")
    assert truth["restarts"] == 0


async def test_a_crash_loop_backs_off_and_stays_one_running_pod_on_one_machine(world: World) -> None:
    async with world.running(restart_base_s=1.0, restart_max_s=600.0):
        pod = await world.pod(restartPolicy="Always")
        machine = await world.machine_of(pod)
        await world.cloud.exit(machine, code=3)
        await world.until(pod, lambda seen: is_back(seen, 1))
        await world.cloud.exit(machine, code=3)

        held = await world.until(pod, lambda seen: "waiting" in state_of(seen))
        await world.until(pod, lambda seen: is_back(seen, 2))
        await world.until_event(pod, "BackOff")

    assert held["status"]["phase"] == "Running"
    assert state_of(held)["waiting"] == {
        "reason": "CrashLoopBackOff",
        "message": "back-off 1s restarting failed container",
    }
    assert container_of(held)["lastState"]["terminated"]["exitCode"] == 3
    assert (container_of(held)["ready"], container_of(held)["started"]) == (False, False)
    assert condition_of(held, "Ready")["reason"] == "ContainersNotReady"  # type: ignore[index]
    assert len(await world.cloud.machines()) == 1


async def test_a_restart_costs_two_writes(world: World) -> None:
    async with world.running():
        pod = await world.pod(restartPolicy="Always")
        machine = await world.machine_of(pod)
        world.wire.writes.clear()

        await world.cloud.exit(machine, code=3)
        await world.until(pod, lambda seen: is_back(seen, 1))

    assert world.wire.about(pod["metadata"]["name"]) == ["PATCH pods/status", "PATCH pods/status"]


async def test_a_new_leader_goes_on_with_a_restart_where_the_former_one_stood(world: World) -> None:
    async with world.running(restart_base_s=600.0, restart_max_s=600.0):
        pod = await world.pod(restartPolicy="Always")
        machine = await world.machine_of(pod)
        await world.cloud.exit(machine, code=3)
        await world.until(pod, lambda seen: is_back(seen, 1))
        await world.cloud.exit(machine, code=4)
        held = await world.until(pod, lambda seen: "waiting" in state_of(seen))
    world.wire.writes.clear()

    async with world.running(restart_base_s=0.1, restart_max_s=0.1):
        back = await world.until(pod, lambda seen: is_back(seen, 2))

    assert container_of(back)["lastState"] == container_of(held)["lastState"]
    assert world.wire.about(pod["metadata"]["name"]) == ["PATCH pods/status"]
    assert len(await world.cloud.machines()) == 1


async def test_a_restart_whose_answer_was_lost_is_made_once(world: World) -> None:
    async with world.running():
        pod = await world.pod(restartPolicy="Always")
        machine = await world.machine_of(pod)
        await world.cloud.add_fault("lost", verb="restart")

        await world.cloud.exit(machine, code=3)

        await world.until(pod, lambda seen: is_back(seen, 1))
        (truth,) = await world.cloud.machines()
    assert truth["restarts"] == 1


async def test_a_cloud_that_does_not_answer_delays_a_restart_and_ends_nothing(world: World) -> None:
    async with world.running():
        pod = await world.pod(restartPolicy="Always")
        machine = await world.machine_of(pod)
        fault = await world.cloud.add_fault("status", verb="restart", unlimited=True)
        await world.cloud.exit(machine, code=3)
        await world.cloud.until(lambda truth: truth["calls"].get("restart", 0) >= 2, what="two tries")

        waiting = await world.see(pod)
        await world.cloud.clear_faults(fault)
        await world.until(pod, lambda seen: is_back(seen, 1))

    assert waiting is not None
    assert waiting["status"]["phase"] == "Running"


@pytest.mark.behaviour(419)
async def test_the_run_on_record_is_open_again_after_a_restart(world: World) -> None:
    async with world.running():
        pod = await world.pod(restartPolicy="Always")
        machine = await world.machine_of(pod)
        await world.cloud.exit(machine, code=3)
        await world.until(pod, lambda seen: is_back(seen, 1))

        async def is_open() -> bool:
            async with begin(world.engine) as conn:
                found = await conn.execute(
                    text("select exited_at, exit_code, end_reason from run where resource_id = :id"),
                    {"id": machine},
                )
                return tuple(found.one()) == (None, None, None)

        await world.until_true(is_open)


@pytest.mark.parametrize("scenario", [ONCE], ids=["a-cloud-without-restarts"])
@pytest.mark.parametrize("code", [0, 3])
async def test_where_the_cloud_cannot_restart_the_pod_is_over_and_its_owner_waits(
    world: World, code: int
) -> None:
    owner = await owned(world)
    async with world.running(restart_base_s=600.0, restart_max_s=600.0):
        pod = await world.pod(restartPolicy="Always", owner=owner)
        await world.cloud.exit(await world.machine_of(pod), code=code)

        over = await world.until(pod, lambda seen: seen["status"]["phase"] in ("Succeeded", "Failed"))
        async with begin(world.engine) as conn:
            waiting = (await standing.read(conn)).backoffs

    assert over["status"]["phase"] == ("Succeeded" if code == 0 else "Failed")
    assert waiting[owner["uid"]].failures == 1
    assert waiting[owner["uid"]].message.endswith(f"ended with code {code}")


@pytest.mark.parametrize("scenario", [ONCE], ids=["a-cloud-without-restarts"])
async def test_a_reclaimed_machine_makes_no_owner_wait(world: World) -> None:
    owner = await owned(world)
    async with world.running():
        pod = await world.pod(restartPolicy="Always", owner=owner, claim={"capacityType": "Spot"})
        await world.cloud.preempt(await world.machine_of(pod))

        await world.until_reason(pod, "Preempted")
        async with begin(world.engine) as conn:
            assert (await standing.read(conn)).backoffs == {}


async def test_a_reclaimed_machine_is_not_restarted(world: World) -> None:
    async with world.running():
        pod = await world.pod(restartPolicy="Always", claim={"capacityType": "Spot"})
        await world.cloud.preempt(await world.machine_of(pod))

        over = await world.until_reason(pod, "Preempted")

    assert over["status"]["phase"] == "Failed"
    assert condition_of(over, "DisruptionTarget")["status"] == "True"  # type: ignore[index]


# --- a probe that fails --------------------------------------------------------------------------


async def test_a_workload_found_dead_is_cut_off_and_runs_again(world: World) -> None:
    async with world.running():
        pod = await world.pod(restartPolicy="Always")
        machine = await world.machine_of(pod)

        world.vnodes.kill(pod["metadata"]["uid"], "liveness probe failed: no answer")

        back = await world.until(pod, lambda seen: is_back(seen, 1))
        (truth,) = await world.cloud.machines()
    last = container_of(back)["lastState"]["terminated"]
    assert (last["exitCode"], last["message"]) == (137, "liveness probe failed: no answer")
    assert (truth["id"], truth["restarts"]) == (machine, 1)


@pytest.mark.parametrize("scenario", [SMALL, ONCE], ids=["restarts", "no-restarts"])
async def test_a_workload_found_dead_that_may_not_run_again_is_ended(world: World) -> None:
    async with world.running():
        pod = await world.pod(restartPolicy="Never")
        await world.machine_of(pod)

        world.vnodes.kill(pod["metadata"]["uid"], "liveness probe failed: no answer")

        over = await world.until_reason(pod, "Failed")
        assert await world.cloud.alive() == []
    assert over["status"]["message"] == "liveness probe failed: no answer"
    assert state_of(over)["terminated"]["exitCode"] == 143  # it heard that it was to stop


# --- grace ---------------------------------------------------------------------------------------


@pytest.mark.behaviour(160, 396)
@pytest.mark.field_case("FC-053")
async def test_a_deleted_workload_ends_by_itself_within_its_grace(world: World) -> None:
    async with world.running():
        pod = await world.pod(finalizers=("tests.local/keep",), terminationGracePeriodSeconds=600)
        await world.until_ready(pod)
        await world.cloud.set_life(stop_s=0.5)

        await delete(world, pod)

        over = await world.until(pod, lambda seen: seen["status"]["phase"] == "Failed")
        (truth,) = await world.cloud.machines()
    assert state_of(over)["terminated"]["exitCode"] == 143
    assert (truth["stops"], truth["exit_code"], truth["end_reason"]) == (1, 143, "terminated")


async def test_a_workload_that_answers_a_stop_with_0_has_succeeded(world: World) -> None:
    env = [{"name": "FAKE_STOP_CODE", "value": "0"}]
    async with world.running():
        pod = await world.pod(
            finalizers=("tests.local/keep",), containers=[{"name": "work", "image": "work:1", "env": env}]
        )
        await world.until_ready(pod)

        await delete(world, pod)

        over = await world.until(pod, lambda seen: seen["status"]["phase"] in ("Succeeded", "Failed"))
    assert over["status"]["phase"] == "Succeeded"
    assert state_of(over)["terminated"]["exitCode"] == 0


@pytest.mark.field_case("FC-053")
async def test_a_workload_that_does_not_stop_runs_until_its_grace_is_over(world: World) -> None:
    async with world.running():
        pod = await world.pod(terminationGracePeriodSeconds=2)
        await world.until_ready(pod)
        await world.cloud.set_life(stop_s=600)

        await delete(world, pod)
        await world.cloud.until(lambda truth: truth["machines"][0]["stops"] == 1, what="the stop")
        running = (await world.cloud.machines())[0]["state"]

        await world.until_gone(pod)
        assert await world.cloud.alive() == []
    assert running == "running"


@pytest.mark.behaviour(162)
@pytest.mark.field_case("FC-053")
async def test_a_grace_that_gets_shorter_is_noticed(world: World) -> None:
    async with world.running():
        pod = await world.pod(terminationGracePeriodSeconds=3600)
        await world.until_ready(pod)
        await world.cloud.set_life(stop_s=3600)
        await delete(world, pod)
        await world.cloud.until(lambda truth: truth["machines"][0]["stops"] == 1, what="the stop")

        await delete(world, pod, grace_s=1)

        await world.until_gone(pod)
        assert await world.cloud.alive() == []


@pytest.mark.behaviour(166)
@pytest.mark.field_case("FC-053")
async def test_a_force_deleted_pods_machine_goes_without_a_grace(world: World) -> None:
    async with world.running():
        pod = await world.pod(terminationGracePeriodSeconds=3600)
        await world.until_ready(pod)
        await world.cloud.set_life(stop_s=3600)
        await delete(world, pod)
        await world.cloud.until(lambda truth: truth["machines"][0]["stops"] == 1, what="the stop")

        await delete(world, pod, grace_s=0)

        await world.until_gone(pod)


@pytest.mark.field_case("FC-053")
async def test_a_hook_that_sleeps_is_waited_for_before_the_stop(world: World) -> None:
    hook = {"preStop": {"sleep": {"seconds": 2}}}
    async with world.running():
        pod = await world.pod(
            terminationGracePeriodSeconds=600,
            containers=[{"name": "work", "image": "work:1", "lifecycle": hook}],
        )
        await world.until_ready(pod)

        path = paths.pod(world.namespace, pod["metadata"]["name"])
        leaving = await world.kube.delete(path)

        await world.until_gone(pod)
        (truth,) = await world.cloud.machines()
    asked = datetime.fromisoformat(leaving["metadata"]["deletionTimestamp"]) - timedelta(seconds=600)
    assert datetime.fromisoformat(truth["ended_at"]) >= asked + timedelta(seconds=2)


# --- deadlines -----------------------------------------------------------------------------------


@pytest.mark.field_case("FC-066")
async def test_a_pod_past_its_deadline_fails_and_its_machine_goes(world: World) -> None:
    async with world.running():
        pod = await world.pod(activeDeadlineSeconds=2)
        await world.until_ready(pod)

        over = await world.until_reason(pod, "DeadlineExceeded")

        assert await world.cloud.alive() == []
    assert over["status"]["phase"] == "Failed"
    assert over["status"]["message"] == "Pod was active on the node longer than the specified deadline"


async def test_a_deadline_ends_a_crash_loop_too(world: World) -> None:
    async with world.running(restart_base_s=600.0, restart_max_s=600.0):
        pod = await world.pod(activeDeadlineSeconds=4, restartPolicy="OnFailure")
        machine = await world.machine_of(pod)
        await world.cloud.exit(machine, code=3)
        await world.until(pod, lambda seen: is_back(seen, 1))
        await world.cloud.exit(machine, code=3)

        await world.until_reason(pod, "DeadlineExceeded")


async def test_work_that_was_done_before_its_deadline_has_succeeded(world: World) -> None:
    async with world.running():
        pod = await world.pod(activeDeadlineSeconds=3)
        machine = await world.machine_of(pod)
        await world.cloud.exit(machine, code=0)

        over = await world.until(pod, lambda seen: seen["status"]["phase"] in ("Succeeded", "Failed"))

    assert over["status"]["phase"] == "Succeeded"
