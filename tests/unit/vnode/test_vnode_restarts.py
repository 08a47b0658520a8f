"""Which ends another run follows, after how long, and what of it the Pod's own status remembers."""

from datetime import timedelta
from typing import Any

import pytest

from app.kube.client import Obj
from app.vnode import restarts, status
from providers.base import End, EndReason, Machine, MachineState
from tests.unit.vnode.vnode_makers import ENDED, NOW, STARTED, a_machine, a_pod, after, exited


def pod_with(policy: str | None) -> Obj:
    pod = a_pod()
    pod["spec"]["restartPolicy"] = policy
    return pod


@pytest.mark.parametrize(
    ("policy", "code", "again"),
    [
        ("Always", 0, True),
        ("Always", 3, True),
        ("Always", None, True),
        (None, 0, True),
        ("OnFailure", 0, False),
        ("OnFailure", 3, True),
        ("OnFailure", None, False),
        ("Never", 3, False),
    ],
)
def test_the_policy_decides_by_the_code(policy: str | None, code: int | None, again: bool) -> None:
    end = End(reason=EndReason.COMPLETED, exit_code=code)

    assert restarts.wants_restart(pod_with(policy), end) is again


@pytest.mark.parametrize(
    ("machine", "own"),
    [
        (exited(EndReason.COMPLETED, 0), True),
        (exited(EndReason.COMPLETED), True),
        (exited(EndReason.FAILED, 3), True),
        (exited(EndReason.UNKNOWN, 3), True),
        (exited(EndReason.FAILED), False),
        (exited(EndReason.UNKNOWN), False),
        (exited(EndReason.PREEMPTED, 143), False),
        (exited(EndReason.TERMINATED, 0), False),
        (exited(EndReason.LIFETIME), False),
        (a_machine(), False),
        (None, False),
    ],
)
def test_only_a_workload_that_ended_by_itself_may_run_again(machine: Machine | None, own: bool) -> None:
    assert (restarts.own_end(machine) is not None) is own


def test_the_first_restart_comes_at_once_and_the_waits_double_up_to_the_most() -> None:
    waits = [restarts.wait_s(crashes, base_s=10, max_s=300) for crashes in range(9)]

    assert waits == [0, 10, 20, 40, 80, 160, 300, 300, 300]
    assert restarts.wait_s(10_000, base_s=10, max_s=300) == 300


def test_a_run_lasts_by_the_clouds_clock() -> None:
    end = End(reason=EndReason.COMPLETED, at=ENDED)

    assert restarts.ran_s(a_machine(), end) == (ENDED - STARTED).total_seconds()
    assert restarts.ran_s(a_machine(started_at=None), end) == 0


# --- what the status remembers -------------------------------------------------------------------


def told(pod: Obj, machine: Machine, *, wait_s: float = 0, another: bool = False) -> Obj:
    """The Pod after its status tells the end of the machine's run."""
    end = restarts.own_end(machine)
    assert end is not None
    wanted = status.between(pod, machine, end, wait_s=wait_s, another=another, now=NOW)
    return after(pod, status.patch(pod, wanted) or {})


def shown(pod: Obj, machine: Machine) -> Obj:
    return after(pod, status.patch(pod, status.running(pod, machine, now=NOW)) or {})


def container(pod: Obj) -> Obj:
    return restarts.container_of(pod)


def later(machine: Machine, seconds: float, **changes: Any) -> Machine:
    assert machine.started_at is not None
    return a_machine(started_at=machine.started_at + timedelta(seconds=seconds), **changes)


def test_a_run_that_follows_is_counted_and_the_last_one_remembered() -> None:
    pod = told(shown(a_pod(), a_machine()), exited(EndReason.FAILED, 3))
    assert (container(pod)["restartCount"], pod["status"]["phase"]) == (0, "Running")
    assert container(pod)["state"]["terminated"]["exitCode"] == 3

    pod = shown(pod, later(a_machine(), 3600))

    assert container(pod)["restartCount"] == 1
    assert container(pod)["lastState"]["terminated"]["exitCode"] == 3
    assert "running" in container(pod)["state"]


def test_a_wait_shows_as_crash_loop_back_off_with_the_end_beside_it() -> None:
    pod = told(shown(a_pod(), a_machine()), exited(EndReason.FAILED, 3), wait_s=20)

    assert container(pod)["state"]["waiting"]["reason"] == "CrashLoopBackOff"
    assert "20s" in container(pod)["state"]["waiting"]["message"]
    assert container(pod)["lastState"]["terminated"]["exitCode"] == 3


def test_a_run_that_nobody_saw_is_counted_by_its_end() -> None:
    pod = told(shown(a_pod(), a_machine()), exited(EndReason.FAILED, 3))
    unseen = later(
        a_machine(),
        3600,
        state=MachineState.EXITED,
        end=End(reason=EndReason.FAILED, exit_code=4, at=ENDED + timedelta(seconds=3600)),
    )

    pod = told(pod, unseen, another=True)

    assert container(pod)["restartCount"] == 1
    assert container(pod)["lastState"]["terminated"]["exitCode"] == 3
    assert container(pod)["state"]["terminated"]["exitCode"] == 4


def test_the_status_tells_which_run_it_is_about() -> None:
    before = shown(a_pod(), a_machine())
    pod = told(before, exited(EndReason.FAILED, 3), wait_s=10)

    assert not restarts.tells_of(container(before), a_machine())
    assert restarts.tells_of(container(pod), exited(EndReason.FAILED, 3))
    assert not restarts.tells_of(container(pod), later(a_machine(), 3600))


def test_nothing_is_counted_while_a_pod_just_runs() -> None:
    pod = shown(shown(a_pod(), a_machine()), a_machine(endpoint="198.18.0.9"))

    assert container(pod)["restartCount"] == 0
    assert "lastState" not in container(pod) or not container(pod)["lastState"]


# --- grace and deadlines -------------------------------------------------------------------------


def test_the_grace_is_what_the_deletion_said_else_what_the_spec_says() -> None:
    pod = a_pod()
    assert restarts.grace_s(pod) == 30
    pod["spec"]["terminationGracePeriodSeconds"] = 60
    assert restarts.grace_s(pod) == 60
    pod["metadata"]["deletionGracePeriodSeconds"] = 0
    assert restarts.grace_s(pod) == 0


def test_a_deadline_counts_from_the_pods_start() -> None:
    pod = a_pod(status={"phase": "Running", "startTime": "2026-01-02T02:00:00Z"})
    assert restarts.deadline_of(pod) is None
    pod["spec"]["activeDeadlineSeconds"] = 90

    deadline = restarts.deadline_of(pod)

    assert deadline is not None
    assert deadline.isoformat() == "2026-01-02T02:01:30+00:00"
