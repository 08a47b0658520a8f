"""What an opted-in Pod gets, and which Pods are refused. Numbers are those of the behaviour checklist."""

import copy

import pytest
from admission_makers import GATE, NOT_READY, OURS, UNREACHABLE, applied, opted_in, seconds

from app.admission import rules
from app.admission.rules import mutate, validate, validate_subresource

GROUP = "nebula.inftyai.com"


def tolerations_after(*given):
    return applied(opted_in(tolerations=list(given)))["spec"]["tolerations"]


@pytest.mark.behaviour(1, 15)
def test_01_an_opted_in_pod_gets_the_gate_and_the_toleration():
    spec = applied(opted_in())["spec"]

    assert spec["schedulingGates"] == [GATE]
    assert OURS in spec["tolerations"]


@pytest.mark.parametrize("value", [None, "false", "True", "1", ""])
@pytest.mark.behaviour(2)
def test_02_a_pod_that_does_not_say_true_is_left_alone(value):
    pod = opted_in(nodeName="n")
    pod["metadata"]["labels"] = {} if value is None else {f"{GROUP}/enabled": value}

    assert mutate(pod) == validate(pod) == rules.ALLOWED


@pytest.mark.behaviour(4)
def test_04_a_gate_that_is_there_is_not_added_again_and_a_missing_toleration_is():
    spec = applied(opted_in(schedulingGates=[GATE]))["spec"]

    assert spec["schedulingGates"] == [GATE]
    assert OURS in spec["tolerations"]


@pytest.mark.behaviour(5)
def test_05_other_gates_are_kept_in_order():
    gates = [{"name": "a.example/x"}, {"name": "b.example/y"}]

    assert applied(opted_in(schedulingGates=gates))["spec"]["schedulingGates"] == [*gates, GATE]


@pytest.mark.parametrize("effect", [{}, {"effect": ""}, {"effect": "NoSchedule"}])
@pytest.mark.behaviour(6)
def test_06_a_toleration_that_does_the_same_is_not_added_again(effect):
    same = {"key": f"{GROUP}/provider", "operator": "Exists", **effect}

    assert tolerations_after(NOT_READY, UNREACHABLE, same) == [NOT_READY, UNREACHABLE, same]


@pytest.mark.parametrize(
    "other",
    [
        {"key": f"{GROUP}/provider", "operator": "Equal", "value": "modal", "effect": "NoSchedule"},
        {"key": f"{GROUP}/provider", "value": "modal"},
        {"key": f"{GROUP}/provider", "operator": "Exists", "effect": "NoExecute"},
    ],
    ids=["equal", "equal-by-default", "no-execute"],
)
@pytest.mark.behaviour(7)
def test_07_a_toleration_that_does_less_does_not_count(other):
    assert tolerations_after(other)[-1] == OURS


@pytest.mark.behaviour(8)
def test_08_other_tolerations_are_kept_in_order():
    others = [{"key": "a", "operator": "Exists"}, {"key": "b", "operator": "Exists", "tolerationSeconds": 5}]

    assert tolerations_after(*others, NOT_READY, UNREACHABLE) == [*others, NOT_READY, UNREACHABLE, OURS]


@pytest.mark.behaviour(14)
def test_14_a_second_call_changes_nothing():
    assert mutate(applied(opted_in())).patch == ()


def test_the_pod_that_was_looked_at_is_not_itself_changed():
    pod = opted_in(tolerations=[seconds(NOT_READY, 300)])
    before = copy.deepcopy(pod)

    mutate(pod)

    assert pod == before


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([seconds(NOT_READY, 300), seconds(UNREACHABLE, 300)], [NOT_READY, UNREACHABLE]),
        ([seconds(UNREACHABLE, 0)], [UNREACHABLE, NOT_READY]),
        ([], [NOT_READY, UNREACHABLE]),
        ([{"operator": "Exists"}], [{"operator": "Exists"}]),
        ([{"operator": "Exists", "effect": "NoSchedule"}], None),
    ],
    ids=["defaults", "one", "none", "a-wildcard-covers-them", "another-effect-does-not"],
)
def test_a_silent_node_is_tolerated_for_ever(given, expected):
    expected = [*given, NOT_READY, UNREACHABLE] if expected is None else expected

    assert tolerations_after(*given) == [*expected, OURS]


@pytest.mark.parametrize("name", ["capacity-type", "region", "endpoint", "instance-id"])
@pytest.mark.behaviour(405, 406, 407)
def test_an_annotation_that_only_we_may_set_is_taken_off_and_the_author_is_told(name):
    key = f"{GROUP}/{name}"
    pod = opted_in(annotations={key: "i-1", "mine": "kept"})

    assert applied(pod)["metadata"]["annotations"] == {"mine": "kept"}
    (warning,) = mutate(pod).warnings
    assert key in warning


REFUSED = {
    "03-node-name": (opted_in(nodeName="n"), "spec.nodeName"),
    "provider-selector": (
        opted_in(nodeSelector={f"{GROUP}/provider": "aws"}),
        f"spec.nodeSelector[{GROUP}/provider]",
    ),
    "account-selector": (
        opted_in(nodeSelector={f"{GROUP}/account": "two"}),
        f"spec.nodeSelector[{GROUP}/account]",
    ),
    "count-without-type": (opted_in(gpus="8"), "without a type"),
    "bad-count": (opted_in(gpus="0.5", labels={f"{GROUP}/accelerator-type": "h100"}), "no whole number"),
    "max-price": (opted_in(annotations={"cloud.aibrix.ai/max-price": "$2"}), "cloud.aibrix.ai/max-price"),
    "regions": (opted_in(annotations={f"{GROUP}/regions": "us"}), f"{GROUP}/regions"),
    "vast-verified": (opted_in(annotations={"cloud.aibrix.ai/vast-verified": "true"}), "vast-verified"),
    "vast-machine": (opted_in(annotations={"cloud.aibrix.ai/vast-machine-id": "1"}), "vast-machine-id"),
    "vast-disk": (opted_in(annotations={"cloud.aibrix.ai/vast-disk-gb": "40"}), "vast-disk-gb"),
    "vast-offer": (opted_in(annotations={"cloud.aibrix.ai/vast-offer-id": "1"}), "vast-offer-id"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.behaviour(3, 19, 408)
def test_what_nothing_can_mend_is_refused_before_and_after_other_webhooks(name):
    pod, words = REFUSED[name]
    final = copy.deepcopy(pod)
    final["spec"] |= {"schedulingGates": [GATE], "tolerations": [OURS]}

    for verdict in (mutate(pod), validate(final)):
        (reason,) = verdict.refusals
        assert words in reason
        assert verdict.patch == ()


def test_every_reason_is_given_at_once():
    pod = opted_in(nodeName="n", gpus="8", annotations={"cloud.aibrix.ai/max-price": "-2"})

    assert len(mutate(pod).refusals) == 3


def test_another_provider_s_option_is_not_refused():
    assert mutate(opted_in(annotations={"cloud.aibrix.ai/runpod-cloud": "COMMUNITY"})).refusals == ()


def test_what_mutation_made_of_an_ordinary_pod_is_valid():
    assert validate(applied(opted_in())) == rules.ALLOWED


@pytest.mark.parametrize("field", ["schedulingGates", "tolerations"])
def test_a_pod_that_lost_its_gate_or_toleration_to_another_webhook_is_refused(field):
    pod = applied(opted_in())
    del pod["spec"][field]

    (reason,) = validate(pod).refusals
    assert "missing" in reason


def test_an_annotation_of_ours_that_another_webhook_set_is_refused():
    pod = applied(opted_in())
    pod["metadata"]["annotations"] = {f"{GROUP}/instance-id": "i-1"}

    (reason,) = validate(pod).refusals
    assert f"{GROUP}/instance-id" in reason


def test_a_shape_that_cannot_run_is_refused_in_the_pod_s_last_form_only():
    pod = opted_in(hostNetwork=True)

    assert mutate(pod).refusals == ()
    (reason,) = validate(applied(pod)).refusals
    assert reason.startswith("spec.hostNetwork ")


def test_what_is_not_enforced_is_a_warning():
    (warning,) = validate(applied(opted_in(securityContext={"runAsNonRoot": True}))).warnings

    assert "spec.securityContext.runAsNonRoot" in warning


@pytest.mark.parametrize("subresource", ["ephemeralcontainers", "resize"])
def test_a_pod_of_ours_cannot_be_given_more_than_its_machine_has(subresource):
    other = opted_in()
    other["metadata"]["labels"] = {}

    assert len(validate_subresource(opted_in(), subresource=subresource).refusals) == 1
    assert validate_subresource(other, subresource=subresource) == rules.ALLOWED
