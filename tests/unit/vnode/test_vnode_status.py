"""The status of a Pod, from what is known of its machine."""

from datetime import timedelta
from typing import Any

import pytest

from app.api import keys
from app.kube.client import Obj
from app.vnode import status
from app.vnode.status import Wanted
from providers.base import EndReason, MachineState
from tests.unit.vnode.vnode_makers import ENDED, NOW, STARTED, a_machine, a_pod, a_view, after, exited

RUNNING_POD = a_pod(
    status={"phase": "Running", "reason": "Running", "startTime": "2026-01-02T02:00:00Z"},
    metadata={"annotations": {keys.INSTANCE_ID_ANNOTATION: "m-1"}},
)


def projected(pod: Obj, **view: Any) -> Wanted:
    wanted = status.project(pod, a_view(**view), now=NOW)
    assert wanted is not None
    return wanted


def container(wanted: Wanted) -> Obj:
    held: Obj = wanted.status["containerStatuses"][0]
    return held


def condition(wanted: Wanted, kind: str) -> Obj | None:
    return next((each for each in wanted.status["conditions"] if each["type"] == kind), None)


@pytest.mark.behaviour(129, 183, 184, 185, 186)
@pytest.mark.parametrize(
    ("view", "phase", "reason"),
    [
        ({"machine": None}, "Pending", "Initializing"),
        ({"machine": None, "reserved": False}, "Pending", "Provisioning"),
        ({"machine": a_machine(MachineState.QUEUED)}, "Pending", "Provisioning"),
        ({"machine": a_machine(MachineState.BOOTING)}, "Pending", "Initializing"),
        ({"machine": a_machine(MachineState.RUNNING)}, "Running", "Running"),
        ({"machine": exited(EndReason.COMPLETED, 0)}, "Succeeded", None),
        ({"machine": exited(EndReason.UNKNOWN, 0)}, "Succeeded", None),
        ({"machine": exited(EndReason.COMPLETED, 3)}, "Failed", "Failed"),
        ({"machine": exited(EndReason.COMPLETED)}, "Failed", "Terminated"),
        ({"machine": exited(EndReason.UNKNOWN)}, "Failed", "Terminated"),
        ({"machine": exited(EndReason.TERMINATED, 0)}, "Failed", "Terminated"),
        ({"machine": exited(EndReason.PREEMPTED, 0)}, "Failed", "Preempted"),
        ({"machine": exited(EndReason.FAILED)}, "Failed", "Failed"),
        ({"machine": exited(EndReason.LIFETIME)}, "Failed", "Terminated"),
        ({"machine": a_machine(MachineState.EXITED)}, "Failed", "Terminated"),
        ({"machine": None, "gone": True}, "Failed", "Terminated"),
        ({"machine": a_machine(MachineState.RUNNING), "gone": True}, "Failed", "Terminated"),
    ],
)
def test_phase_and_reason_follow_the_machine(view: dict[str, Any], phase: str, reason: str | None) -> None:
    wanted = projected(a_pod(), **view)

    assert (wanted.status["phase"], wanted.status["reason"]) == (phase, reason)
    assert wanted.final is (phase in ("Succeeded", "Failed"))


@pytest.mark.parametrize(
    "machine",
    [None, a_machine(MachineState.BOOTING), a_machine(MachineState.QUEUED), a_machine(MachineState.GONE)],
    ids=["never-shown", "booting", "queued", "gone-but-not-proven"],
)
def test_a_running_pod_is_not_changed_by_what_proves_nothing(machine: Any) -> None:
    assert status.project(RUNNING_POD, a_view(machine), now=NOW) is None


@pytest.mark.behaviour(419)
@pytest.mark.parametrize(
    ("machine", "code", "reason"),
    [
        (exited(EndReason.COMPLETED, 0), 0, "Completed"),
        (exited(EndReason.COMPLETED, 3), 3, "Error"),
        (exited(EndReason.PREEMPTED, 143), 143, "Error"),
        (exited(EndReason.PREEMPTED, 0), 137, "ContainerStatusUnknown"),
        (exited(EndReason.UNKNOWN), 137, "ContainerStatusUnknown"),
        (exited(EndReason.FAILED), 137, "ContainerStatusUnknown"),
    ],
)
def test_a_code_is_the_clouds_or_is_shown_as_lost(machine: Any, code: int, reason: str) -> None:
    state = container(projected(RUNNING_POD, machine=machine))["state"]["terminated"]

    assert (state["exitCode"], state["reason"]) == (code, reason)


def test_times_are_the_clouds_where_it_tells_them() -> None:
    state = container(projected(RUNNING_POD, machine=exited(EndReason.COMPLETED, 0)))["state"]["terminated"]

    assert state["startedAt"] == STARTED.strftime("%Y-%m-%dT%H:%M:%SZ")
    assert state["finishedAt"] == ENDED.strftime("%Y-%m-%dT%H:%M:%SZ")


@pytest.mark.behaviour(417)
def test_only_a_reclaim_is_a_disruption() -> None:
    reclaimed = projected(RUNNING_POD, machine=exited(EndReason.PREEMPTED))
    gone = projected(RUNNING_POD, gone=True)

    assert condition(reclaimed, "DisruptionTarget")["status"] == "True"  # type: ignore[index]
    assert condition(gone, "DisruptionTarget") is None


@pytest.mark.behaviour(418)
def test_an_end_by_lifetime_says_so() -> None:
    assert "lifetime" in projected(RUNNING_POD, machine=exited(EndReason.LIFETIME)).message


@pytest.mark.behaviour(130, 192)
def test_id_and_endpoint_ride_in_the_patch_that_says_ready() -> None:
    patch = status.patch(a_pod(), projected(a_pod(), machine=a_machine()))

    assert patch is not None
    assert patch["metadata"]["annotations"] == {
        keys.INSTANCE_ID_ANNOTATION: "m-1",
        keys.ENDPOINT_ANNOTATION: "198.18.0.1",
    }
    assert patch["metadata"]["uid"] == "pod-uid"
    assert "resourceVersion" not in patch["metadata"]
    assert patch["status"]["podIPs"] == [{"ip": "198.18.0.1"}]


@pytest.mark.behaviour(187, 188)
@pytest.mark.parametrize(
    "endpoint", ["host.example:443", "https://a.example", "198.18.0.1:22", None], ids=str
)
def test_only_a_bare_address_becomes_the_pods_ip(endpoint: str | None) -> None:
    wanted = projected(a_pod(), machine=a_machine(endpoint=endpoint))

    assert "podIP" not in wanted.status
    assert wanted.annotations.get(keys.ENDPOINT_ANNOTATION) == endpoint


@pytest.mark.behaviour(157, 189)
def test_a_known_endpoint_is_kept_when_the_cloud_shows_none() -> None:
    ready = after(a_pod(), status.patch(a_pod(), projected(a_pod(), machine=a_machine())) or {})

    assert status.patch(ready, projected(ready, machine=a_machine(endpoint=None))) is None


def test_an_address_that_changed_replaces_the_list() -> None:
    ready = after(a_pod(), status.patch(a_pod(), projected(a_pod(), machine=a_machine())) or {})

    patch = status.patch(ready, projected(ready, machine=a_machine(endpoint="198.18.0.2")))

    assert patch is not None
    assert patch["status"]["podIPs"] == [{"$patch": "replace"}, {"ip": "198.18.0.2"}]


@pytest.mark.behaviour(191, 197, 394)
@pytest.mark.parametrize(
    "machine",
    [a_machine(), a_machine(MachineState.BOOTING), a_machine(started_at=None), None],
    ids=["running", "booting", "start-not-told", "not-shown"],
)
def test_what_is_so_already_is_not_written_again_however_much_later(machine: Any) -> None:
    pod = a_pod()
    ready = after(pod, status.patch(pod, projected(pod, machine=machine)) or {})

    again = status.project(ready, a_view(machine), now=NOW + timedelta(hours=5))

    assert again is None or status.patch(ready, again) is None


@pytest.mark.behaviour(196)
def test_conditions_of_others_and_the_scheduler_are_left_alone() -> None:
    held = [{"type": "PodScheduled", "status": "True"}, {"type": "example.com/lb", "status": "False"}]
    pod = a_pod(status={"phase": "Pending", "conditions": held})

    patch = status.patch(pod, projected(pod, machine=a_machine()))

    assert patch is not None
    kinds = {each["type"] for each in patch["status"]["conditions"]}
    assert kinds == {"PodReadyToStartContainers", "Initialized", "ContainersReady", "Ready"}


def test_a_readiness_gate_that_is_not_true_keeps_ready_false() -> None:
    pod = a_pod()
    pod["spec"]["readinessGates"] = [{"conditionType": "example.com/lb"}]

    wanted = projected(pod, machine=a_machine())

    assert condition(wanted, "Ready")["status"] == "False"  # type: ignore[index]
    assert condition(wanted, "ContainersReady")["status"] == "True"  # type: ignore[index]


def test_quality_of_service_is_never_sent() -> None:
    assert "qosClass" not in projected(a_pod(), machine=a_machine()).status


def test_the_generation_that_was_acted_on_is_told_where_there_is_one() -> None:
    old = a_pod()
    del old["metadata"]["generation"]

    assert projected(a_pod(), machine=a_machine()).status["observedGeneration"] == 2
    assert "observedGeneration" not in projected(old, machine=a_machine()).status


@pytest.mark.behaviour(197)
def test_the_start_time_is_set_once() -> None:
    wanted = projected(RUNNING_POD, machine=exited(EndReason.COMPLETED, 0))

    assert wanted.status["startTime"] == "2026-01-02T02:00:00Z"


def test_a_terminal_phase_is_written_for_the_version_that_was_looked_at() -> None:
    patch = status.patch(RUNNING_POD, projected(RUNNING_POD, gone=True))

    assert patch is not None
    assert patch["metadata"]["resourceVersion"] == "7"


@pytest.mark.behaviour(393)
@pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
def test_a_pod_that_is_over_is_never_written_again(phase: str) -> None:
    over = a_pod(status={"phase": phase, "reason": "ProvisionFailed"})

    assert status.patch(over, projected(over, machine=a_machine())) is None


def test_every_container_mirrors_the_machine_sorted_by_name() -> None:
    wanted = projected(a_pod(containers=("b", "a")), machine=a_machine())

    assert [(each["name"], each["ready"]) for each in wanted.status["containerStatuses"]] == [
        ("a", True),
        ("b", True),
    ]


def test_a_refused_pod_shows_no_code_since_nothing_ran() -> None:
    wanted = status.provision_failed(a_pod(), message="sold out", now=NOW)

    assert wanted.status["phase"] == "Failed"
    assert container(wanted)["state"] == {"waiting": {"reason": "ProvisionFailed", "message": "sold out"}}


def test_a_pod_that_we_end_is_never_a_success_unless_its_work_was_done_before() -> None:
    cut_off = status.terminated(RUNNING_POD, a_machine(), now=NOW)
    done = status.terminated(RUNNING_POD, exited(EndReason.COMPLETED, 0), now=NOW)

    assert (cut_off.status["phase"], container(cut_off)["state"]["terminated"]["exitCode"]) == ("Failed", 137)
    assert done.status["phase"] == "Succeeded"


def test_the_nodes_address_travels_with_a_write_and_causes_none():
    pod = a_pod()
    wanted = status.running(pod, a_machine(), now=NOW)

    written = status.patch(pod, wanted, host_ip="192.0.2.1")
    assert written is not None
    assert written["status"]["hostIPs"] == [{"ip": "192.0.2.1"}]
    so = after(pod, written)
    assert status.patch(so, status.running(so, a_machine(), now=NOW), host_ip="192.0.2.2") is None
    assert "hostIP" not in (status.patch(pod, wanted, host_ip="a.name") or {})["status"]
