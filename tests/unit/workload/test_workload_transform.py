"""A Pod's container becomes a Workload, by the rules that a node would follow."""

from decimal import Decimal

import pytest
from workload_makers import a_container, a_pod

from app import workload
from app.api.keys import DEAD_MAN_ANNOTATION
from app.workload.environment import compose
from providers.base import Accelerator, Workload


def built(pod, **changes):
    environment = compose(pod, pod["spec"]["containers"][0], {})
    return workload.build(pod, **{"environment": environment, "accelerator": None, "options": {}, **changes})


def test_everything_a_cloud_needs_is_taken_from_the_pod_and_the_claim():
    container = a_container(
        image="app:1",
        command=["serve"],
        args=["--port", "$(PORT)"],
        env=[{"name": "PORT", "value": "8000"}],
        ports=[{"containerPort": 8000, "protocol": "TCP"}, {"containerPort": 9000, "protocol": "TCP"}],
        workingDir="/srv",
        resources={"limits": {"cpu": "1500m", "memory": "2Gi", "ephemeral-storage": "10G"}},
    )
    pod = a_pod(
        container, restartPolicy="OnFailure", terminationGracePeriodSeconds=7, activeDeadlineSeconds=60
    )
    h100s = Accelerator(type="H100", count=8)

    assert built(pod, accelerator=h100s, options={"cloud": "COMMUNITY"}) == Workload(
        image="app:1",
        command=("serve",),
        args=("--port", "8000"),
        env={"PORT": "8000"},
        ports=(8000, 9000),
        working_dir="/srv",
        cpu=Decimal("1.5"),
        memory_bytes=2 * 1024**3,
        disk_bytes=10 * 1000**3,
        accelerator=h100s,
        restart_policy="OnFailure",
        grace_s=7,
        active_deadline_s=60,
        options={"cloud": "COMMUNITY"},
        dead_man=True,
    )


def test_what_a_pod_leaves_open_has_the_defaults_of_kubernetes():
    assert built(a_pod(a_container(image="app:1"))) == Workload(
        image="app:1", restart_policy="Always", grace_s=30
    )


@pytest.mark.parametrize(
    ("policy", "wish", "limited"),
    [("Never", None, True), ("OnFailure", None, True), ("Always", None, False), ("Never", "off", False)],
)
def test_what_is_meant_to_end_has_a_limit_unless_its_author_says_no(policy, wish, limited):
    pod = a_pod(a_container(), restartPolicy=policy)
    if wish is not None:
        pod["metadata"].setdefault("annotations", {})[DEAD_MAN_ANNOTATION] = wish

    assert built(pod).dead_man is limited


def test_a_grace_period_of_zero_is_kept():
    assert built(a_pod(terminationGracePeriodSeconds=0)).grace_s == 0


@pytest.mark.parametrize(
    ("resources", "cpu"),
    [
        ({"limits": {"cpu": "4"}, "requests": {"cpu": "1"}}, Decimal(4)),
        ({"limits": {"memory": "1Gi"}, "requests": {"cpu": "1"}}, Decimal(1)),
        ({"limits": {"cpu": "0"}, "requests": {"cpu": "0"}}, None),
        ({}, None),
    ],
    ids=["limit-over-request", "request-without-limit", "zero-is-nothing", "nothing"],
)
def test_an_amount_is_the_limit_and_else_the_request(resources, cpu):
    assert built(a_pod(a_container(resources=resources))).cpu == cpu


def test_a_port_named_twice_is_one_port():
    ports = [{"name": "a", "containerPort": 80}, {"name": "b", "containerPort": 80}]

    assert built(a_pod(a_container(ports=ports))).ports == (80,)


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("$(A)", "one"),
        ("x$(A)y$(A)", "xoneyone"),
        ("$(UNKNOWN)", "$(UNKNOWN)"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$one"),
        ("$$", "$"),
        ("$(A", "$(A"),
        ("$A ${A} $", "$A ${A} $"),
        ("$(A$(A)", "$(A$(A)"),
        ("$(B)", "$(A)"),
        ("$()", "$()"),
    ],
)
@pytest.mark.field_case("FC-037")
def test_references_are_expanded_as_on_a_node(text, expanded):
    env = [{"name": "A", "value": "one"}, {"name": "B", "value": "$$(A)"}]
    pod = a_pod(a_container(env=env, command=[text], args=[text]))

    assert built(pod).command == (expanded,)
    assert built(pod).args == (expanded,)


def test_a_variable_sees_only_those_before_it_and_the_last_of_a_name_wins():
    env = [
        {"name": "LATE", "value": "$(A)"},
        {"name": "A", "value": "one"},
        {"name": "B", "value": "$(A)"},
        {"name": "A", "value": "$(A)+two"},
        {"name": "EMPTY"},
    ]

    assert built(a_pod(a_container(env=env))).env == {
        "LATE": "$(A)",
        "A": "one+two",
        "B": "one",
        "EMPTY": "",
    }


def test_a_shape_that_cannot_run_is_not_built_and_the_error_names_the_field():
    with pytest.raises(workload.Unsupported, match="host") as raised:
        built(a_pod(hostNetwork=True))

    assert raised.value.field == "spec.hostNetwork"


def test_an_amount_that_cannot_be_read_is_unsupported():
    with pytest.raises(workload.Unsupported) as raised:
        built(a_pod(a_container(resources={"limits": {"memory": "many"}})))

    assert raised.value.field == "spec.containers[main].resources[memory]"


def test_the_values_of_the_environment_are_not_in_its_text():
    pod = a_pod(a_container(env=[{"name": "TOKEN", "value": "s3cret"}]))

    assert "s3cret" not in repr(built(pod))
