"""What a Pod's status says of probes, of readiness gates, and of an image that could not be pulled."""

import pytest

from app.kube.client import Obj
from app.vnode import status
from app.vnode.probes import HEALTHY, Health
from providers.base import EndReason
from tests.unit.vnode.vnode_makers import NOW, a_machine, a_pod, a_view, after, exited

GATE = "example.com/lb"


def shown(pod: Obj, health: Health = HEALTHY) -> Obj:
    """The Pod after the status of a running machine was written."""
    wanted = status.project(pod, a_view(a_machine()), health=health, now=NOW)
    assert wanted is not None
    patch = status.patch(pod, wanted)
    return pod if patch is None else after(pod, patch)


def conditions(pod: Obj) -> dict[str, tuple[str, str, str]]:
    return {
        each["type"]: (each["status"], each.get("reason", ""), each.get("message", ""))
        for each in pod["status"]["conditions"]
    }


def gated(*held: Obj) -> Obj:
    pod = a_pod(status={"phase": "Pending", "conditions": list(held)})
    pod["spec"]["readinessGates"] = [{"conditionType": GATE}]
    return pod


@pytest.mark.parametrize(
    ("health", "started", "ready"),
    [
        (Health(started=False, ready=False), False, False),
        (Health(started=True, ready=False), True, False),
        (HEALTHY, True, True),
    ],
    ids=["starting", "not-ready", "ready"],
)
def test_a_container_is_started_and_ready_as_its_probes_say(
    health: Health, started: bool, ready: bool
) -> None:
    pod = shown(a_pod(), health)

    (container,) = pod["status"]["containerStatuses"]
    assert (container["started"], container["ready"]) == (started, ready)
    assert pod["status"]["phase"] == "Running"
    assert conditions(pod)["Ready"][0] == conditions(pod)["ContainersReady"][0] == str(ready)
    assert conditions(pod)["PodReadyToStartContainers"][0] == "True"


def test_a_container_that_is_not_ready_is_named_and_outranks_the_gates() -> None:
    pod = shown(gated(), Health(started=True, ready=False))

    named = ("False", "ContainersNotReady", "containers with unready status: [workload]")
    assert conditions(pod)["Ready"] == conditions(pod)["ContainersReady"] == named


@pytest.mark.parametrize(
    ("held", "ready"),
    [
        (
            (),
            (
                "False",
                "ReadinessGatesNotReady",
                f'corresponding condition of pod readiness gate "{GATE}" does not exist.',
            ),
        ),
        (
            ({"type": GATE, "status": "False"},),
            (
                "False",
                "ReadinessGatesNotReady",
                f'the status of pod readiness gate "{GATE}" is not "True", but False',
            ),
        ),
        (({"type": GATE, "status": "True"},), ("True", "", "")),
    ],
    ids=["absent", "closed", "open"],
)
def test_a_gate_is_told_in_a_kubelets_words(held: tuple[Obj, ...], ready: tuple[str, str, str]) -> None:
    assert conditions(shown(gated(*held)))["Ready"] == ready


def test_the_same_health_again_is_no_write() -> None:
    pod = shown(a_pod(), Health(started=True, ready=False))

    wanted = status.project(pod, a_view(a_machine()), health=Health(started=True, ready=False), now=NOW)

    assert wanted is not None
    assert status.patch(pod, wanted) is None


def test_an_image_that_could_not_be_pulled_shows_no_run_that_ended() -> None:
    machine = exited(EndReason.FAILED, message="pull of app:1 failed: not found", image=True)

    wanted = status.project(a_pod(), a_view(machine), now=NOW)

    assert wanted is not None
    assert wanted.final
    assert (wanted.status["phase"], wanted.reason) == ("Failed", "Failed")
    (container,) = wanted.status["containerStatuses"]
    assert container["state"] == {
        "waiting": {"reason": "ErrImagePull", "message": "pull of app:1 failed: not found"}
    }


@pytest.mark.behaviour(158)
def test_the_image_that_runs_is_shown_whatever_the_spec_says_by_now() -> None:
    pod = shown(a_pod())
    pod["spec"]["containers"][0]["image"] = "edited:2"

    assert shown(pod)["status"]["containerStatuses"][0]["image"] == "workload:1"


def test_the_image_of_a_pod_that_does_not_run_yet_is_the_one_of_its_spec() -> None:
    pod = a_pod()
    pending = status.patch(pod, status.provisioning(pod, message="m", now=NOW))
    assert pending is not None
    pod = after(pod, pending)
    pod["spec"]["containers"][0]["image"] = "edited:2"

    assert shown(pod)["status"]["containerStatuses"][0]["image"] == "edited:2"
