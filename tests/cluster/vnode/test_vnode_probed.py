"""A Pod with probes: what its status says while its workload starts, answers, and stops answering."""

from typing import Any

import pytest

from app.api import keys
from app.kube import paths
from app.kube.client import Obj
from tests.cluster.vnode.vnode_world import World, condition_of, is_ready, state_of
from tests.support.clouds import SMALL

IMAGE = "nvidia/cuda:12.4.1-base-ubuntu22.04"
SERVING = SMALL | {"serve": {}}
STARTING_SLOWLY = SMALL | {"serve": {"ready_after_s": 2}}
OVERLOADED = SMALL | {"serve": {"status": 503}}
NEVER_AGAIN = SERVING | {"restarts": False}
EVERY_SECOND = {"periodSeconds": 1, "timeoutSeconds": 5}
HTTP = EVERY_SECOND | {"httpGet": {"path": "/healthz", "port": "web"}}

serving = pytest.mark.parametrize("scenario", [SERVING], ids=["serving"])


def probed(**probes: dict[str, Any]) -> dict[str, Any]:
    """A Pod's ``containers``, with one that has port 8000 and these probes."""
    ports = [{"name": "web", "containerPort": 8000}]
    fields = {f"{kind}Probe": spec for kind, spec in probes.items()}
    return {"containers": [{"name": "workload", "image": IMAGE, "ports": ports, **fields}]}


def container_of(pod: Obj) -> Obj:
    found: Obj = (pod["status"].get("containerStatuses") or [{}])[0]
    return found


@pytest.mark.parametrize("scenario", [OVERLOADED], ids=["overloaded"])
async def test_a_running_pod_is_ready_when_its_probe_passes_and_not_when_it_fails(world: World) -> None:
    async with world.running():
        pod = await world.pod(**probed(readiness=HTTP))
        unready = await world.until(pod, lambda seen: seen["status"]["phase"] == "Running")
        await world.until_event(pod, "Unhealthy")
        machine = unready["metadata"]["annotations"][keys.INSTANCE_ID_ANNOTATION]

        assert not is_ready(unready)
        assert container_of(unready)["started"]
        assert not container_of(unready)["ready"]
        assert condition_of(unready, "ContainersReady")["reason"] == "ContainersNotReady"  # type: ignore[index]
        await world.cloud.set_health(machine, status=200)
        ready = await world.until_ready(pod)
        assert container_of(ready)["ready"]

        await world.cloud.set_health(machine, status=500)
        again = await world.until(pod, lambda seen: not is_ready(seen))

    assert again["status"]["phase"] == "Running"
    assert container_of(again)["restartCount"] == 0


@serving
async def test_a_pod_that_stays_healthy_costs_no_write(world: World) -> None:
    async with world.running():
        pod = await world.pod(**probed(readiness=HTTP, liveness=HTTP))
        machine = await world.machine_of(pod)
        before = list(world.wire.about(pod["metadata"]["name"]))
        asked = len(await world.cloud.requests(machine))

        await world.cloud.until(
            lambda truth: len(truth["machines"][0]["requests"]) >= asked + 6, what="six more probes"
        )

        assert world.wire.about(pod["metadata"]["name"]) == before
    assert before == ["PATCH pods/status", "PATCH pods/status"]  # running, ready


@pytest.mark.parametrize("scenario", [STARTING_SLOWLY], ids=["starting-slowly"])
async def test_a_pod_has_started_when_its_startup_probe_passes(world: World) -> None:
    patient = {**EVERY_SECOND, "tcpSocket": {"port": 8000}, "failureThreshold": 60}
    async with world.running():
        pod = await world.pod(**probed(startup=patient, liveness=HTTP))
        starting = await world.until(pod, lambda seen: seen["status"]["phase"] == "Running")
        assert not container_of(starting)["started"]
        assert not is_ready(starting)

        started = await world.until_ready(pod)

    assert container_of(started)["started"]
    assert container_of(started)["restartCount"] == 0


@serving
async def test_a_workload_that_fails_its_liveness_probe_runs_again_on_its_machine(world: World) -> None:
    async with world.running():
        pod = await world.pod(**probed(liveness=HTTP), restartPolicy="Always")
        machine = await world.machine_of(pod)
        await world.cloud.set_health(machine, status=500)
        await world.cloud.until(lambda truth: truth["machines"][0]["restarts"] >= 1, what="the restart")
        await world.cloud.set_health(machine, status=200)

        again = await world.until(
            pod, lambda seen: is_ready(seen) and container_of(seen)["restartCount"] >= 1
        )
        await world.until_event(pod, "Unhealthy")

    assert "Liveness probe failed" in container_of(again)["lastState"]["terminated"]["message"]
    assert len(await world.cloud.machines()) == 1


@pytest.mark.parametrize("scenario", [NEVER_AGAIN], ids=["no-restarts"])
async def test_a_dead_workload_that_cannot_run_again_ends_its_pod(world: World) -> None:
    async with world.running():
        pod = await world.pod(**probed(liveness=HTTP), restartPolicy="Always")
        machine = await world.machine_of(pod)

        await world.cloud.set_health(machine, open_=False)

        failed = await world.until(pod, lambda seen: seen["status"]["phase"] == "Failed")
        await world.cloud.until(
            lambda truth: all(each["state"] == "gone" for each in truth["machines"]), what="the release"
        )
    assert state_of(failed)["terminated"]["exitCode"] != 0


@pytest.mark.parametrize("scenario", [NEVER_AGAIN], ids=["no-restarts"])
async def test_a_probes_own_grace_counts_for_what_it_finds_dead(world: World) -> None:
    """The Pod's own would keep a workload that does not stop for an hour."""
    async with world.running():
        liveness = HTTP | {"terminationGracePeriodSeconds": 1}
        pod = await world.pod(
            **probed(liveness=liveness), restartPolicy="Always", terminationGracePeriodSeconds=3600
        )
        machine = await world.machine_of(pod)
        await world.cloud.set_life(stop_s=3600)

        await world.cloud.set_health(machine, status=500)

        await world.until(pod, lambda seen: seen["status"]["phase"] == "Failed")
        assert (await world.cloud.machines())[0]["stops"] == 1


@serving
async def test_a_restart_of_ours_takes_no_readiness_back(world: World) -> None:
    async with world.running():
        pod = await world.pod(**probed(readiness=HTTP))
        before = await world.until_ready(pod)
    world.wire.writes.clear()

    async with world.running():
        machine = before["metadata"]["annotations"][keys.INSTANCE_ID_ANNOTATION]
        asked = len(await world.cloud.requests(machine))
        await world.cloud.until(
            lambda truth: len(truth["machines"][0]["requests"]) >= asked + 2, what="probes of the new leader"
        )
        after = await world.see(pod)

    assert after is not None
    assert after["status"] == before["status"]
    assert world.wire.about(pod["metadata"]["name"]) == []


@serving
async def test_a_workload_of_a_cloud_that_does_not_answer_is_not_killed_for_its_silence(world: World) -> None:
    async with world.running():
        pod = await world.pod(**probed(liveness=HTTP | {"timeoutSeconds": 1}))
        machine = await world.machine_of(pod)
        blind = await world.cloud.add_fault("status", verb="list", unlimited=True)
        await world.unknown_rounds(1)
        await world.cloud.set_health(machine, status=0)
        await world.until_event(pod, "Unhealthy")
        await world.unknown_rounds(2)
        seen = await world.see(pod)
        assert seen is not None
        assert is_ready(seen)

        await world.cloud.clear_faults(blind)  # heard again, and still silent: now it is the workload
        await world.until(pod, lambda seen: seen["status"]["phase"] == "Failed")


async def test_a_readiness_gate_keeps_a_pod_unready_until_somebody_opens_it(world: World) -> None:
    gate = "example.com/in-the-balancer"
    async with world.running():
        pod = await world.pod(readinessGates=[{"conditionType": gate}])
        closed = await world.until(pod, lambda seen: seen["status"]["phase"] == "Running")
        ready = condition_of(closed, "Ready")
        assert ready is not None
        assert (ready["status"], ready["reason"]) == ("False", "ReadinessGatesNotReady")
        assert gate in ready["message"]
        assert condition_of(closed, "ContainersReady")["status"] == "True"  # type: ignore[index]

        opened = {"status": {"conditions": [{"type": gate, "status": "True"}]}}
        path = paths.pod_status(world.namespace, pod["metadata"]["name"])
        await world.kube.patch(path, opened, kind="strategic")

        after = await world.until_ready(pod)
    assert condition_of(after, gate)["status"] == "True"  # type: ignore[index]
