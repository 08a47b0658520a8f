"""Shapes of Pods that went wrong for other people; the numbers are those of the field cases."""

import pytest
from admission_makers import a_stock, applied, opted_in, sells

from app import workload
from app.admission.rules import mutate, validate
from app.api.quantities import parse_quantity
from app.vnode.node import CAPACITY
from app.workload.environment import Environment

TYPE = "nebula.inftyai.com/accelerator-type"
GPU = "nvidia.com/gpu"
GIB = 2**30
WORK = {"name": "work", "emptyDir": {}}
SIDECAR = {"name": "fetch", "image": "app:1", "restartPolicy": "Always"}


def a_container(name="main", *, gpus=None, **changes):
    resources = {"resources": {"limits": {GPU: gpus}}} if gpus is not None else {}
    return {"name": name, "image": "app:1", **resources, **changes}


def a_pod(*containers, kind="h100", **spec):
    pod = opted_in(labels={TYPE: kind} if kind else {}, **spec)
    if containers:
        pod["spec"]["containers"] = list(containers)
    return pod


def refused(pod, stock=None):
    """Every reason, of either webhook, in the order in which they are asked."""
    known = {} if stock is None else {"stock": stock}
    return mutate(pod, **known).refusals or validate(applied(pod), **known).refusals


def built(pod):
    return workload.build(pod, environment=Environment(), accelerator=None, options={})


@pytest.mark.parametrize("init", [{"name": "fetch", "image": "app:1"}, SIDECAR], ids=["init", "sidecar"])
def test_fc_029_a_container_that_would_not_run_first_is_refused_by_the_field(init):
    pod = a_pod(a_container(gpus="1"), initContainers=[init])

    (reason,) = refused(pod)

    assert reason.startswith("spec.initContainers ")


def test_fc_030_a_second_container_is_refused_by_its_name_whichever_asks_for_the_gpu():
    build, helper = a_container("build", gpus="1"), a_container("helper")

    (first,) = refused(a_pod(build, helper))
    (second,) = refused(a_pod(helper, build))

    assert first.startswith("spec.containers[helper] ")
    assert second.startswith("spec.containers[build] ")


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_fc_031_containers_whose_ends_could_hide_each_other_never_run_together(names):
    pod = a_pod(*(a_container(name, gpus="1") for name in names), restartPolicy="Never")

    (reason,) = refused(pod)

    assert reason.startswith(f"spec.containers[{names[1]}] ")


@pytest.mark.parametrize("quantity", ["1k", "1e1", "2.0", "9223372036854775807"])
def test_fc_032_a_count_is_read_exactly_and_one_that_no_cloud_has_ends_at_once(quantity):
    pod = a_pod(a_container(gpus=quantity))
    exact = int(parse_quantity(quantity))

    assert workload.accelerator_of(pod).count == exact
    (reason,) = refused(pod, a_stock(acme=sells("acme", "H100", counts=(1, 8))))
    assert reason.startswith(f"{exact} {GPU} of type h100")


def test_fc_032_a_gpu_in_requests_only_counts_as_one_in_limits():
    pod = a_pod({"name": "main", "image": "app:1", "resources": {"requests": {GPU: "2"}}})

    assert workload.accelerator_of(pod).count == 2
    assert refused(pod) == ()


def test_fc_032_no_gpu_is_a_machine_without_one_unless_a_type_is_asked_for():
    assert refused(a_pod(a_container(gpus="0"), kind=None)) == ()
    assert refused(a_pod(a_container(), kind=None)) == ()
    (reason,) = refused(a_pod(a_container(gpus="0")))
    assert reason.startswith(f"0 {GPU} of type h100")


@pytest.mark.parametrize("quantity", ["0.5", "500m", "1.5", "-1"])
def test_fc_033_a_part_of_a_gpu_is_refused_and_never_rounded(quantity):
    (reason,) = refused(a_pod(a_container(gpus=quantity)))

    assert f"container main: resources.limits of {GPU}" in reason


@pytest.mark.parametrize("name", ["nvidia.com/mig-1g.5gb", "amd.com/gpu", "nvidia.com/GPU"])
def test_fc_033_a_resource_of_another_name_is_not_taken_for_a_gpu(name):
    pod = a_pod({"name": "main", "image": "app:1", "resources": {"limits": {name: "1"}}}, kind=None)

    (reason,) = refused(pod)

    assert reason.startswith(f"spec.containers[main].resources[{name}] ")


VOLUMES = {
    "persistentVolumeClaim": {"claimName": "data"},
    "hostPath": {"path": "/data"},
    "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"},
    "csi": {"driver": "secrets.example.com"},
    "ephemeral": {"volumeClaimTemplate": {"spec": {}}},
}


@pytest.mark.parametrize("kind", VOLUMES)
def test_fc_034_a_volume_that_cannot_be_delivered_is_refused_before_any_money_is_spent(kind):
    (reason,) = refused(a_pod(volumes=[{"name": "data", kind: VOLUMES[kind]}]))

    assert reason.startswith(f"spec.volumes[data].{kind} ")


def test_fc_035_the_api_server_s_own_token_volume_is_left_out_and_another_is_refused():
    token = {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}}
    default = {"name": "kube-api-access-abcde", "projected": {"sources": [token]}}
    explicit = {"name": "vault", "projected": {"sources": [token]}}
    other_audience = {"serviceAccountToken": {"audience": "vault", "path": "token"}}
    disguised = {"name": "kube-api-access-mine", "projected": {"sources": [other_audience]}}

    assert refused(a_pod(volumes=[default])) == ()
    assert refused(a_pod(automountServiceAccountToken=False)) == ()
    for volume in (explicit, disguised):
        (reason,) = refused(a_pod(volumes=[volume]))
        assert reason.startswith(f"spec.volumes[{volume['name']}].projected ")


BURSTABLE = {
    "limits-above": ({"limits": {"cpu": "2", "memory": "1Gi"}, "requests": {"cpu": "500m"}}, "2", GIB),
    "limits-only": ({"limits": {"cpu": "1500m", "memory": "1G"}}, "1.5", 10**9),
    "requests-only": ({"requests": {"cpu": "1500m", "memory": "1Gi"}}, "1.5", GIB),
    "none": ({}, None, None),
}


@pytest.mark.parametrize("name", BURSTABLE)
def test_fc_036_a_machine_is_as_large_as_the_limit_and_else_the_request(name):
    resources, cpu, memory = BURSTABLE[name]
    pod = a_pod(a_container(resources=resources), kind=None)

    assert refused(pod) == ()
    made = built(pod)
    assert (made.cpu, made.memory_bytes) == (parse_quantity(cpu) if cpu else None, memory)


ARGUMENTS = ["two words", "", "$(HOME_)", "$$(HOME_)", '"', "é\n"]


@pytest.mark.parametrize(
    ("command", "args"), [(None, ARGUMENTS), (ARGUMENTS, None), (None, None), (["run"], ARGUMENTS)]
)
def test_fc_037_the_argument_vector_arrives_as_written_and_the_image_s_own_stays(command, args):
    given = {name: value for name, value in (("command", command), ("args", args)) if value is not None}
    pod = a_pod(a_container(**given), kind=None)

    assert refused(pod) == ()
    made = built(pod)
    expected = tuple("$(HOME_)" if word == "$$(HOME_)" else word for word in ARGUMENTS)
    assert made.args == (expected if args else ())
    assert made.command == (tuple(command) if command == ["run"] else expected if command else ())


@pytest.mark.behaviour(3, 408)
def test_fc_038_a_pod_that_names_its_node_is_refused():
    (reason,) = refused(a_pod(nodeName="nebula-aws"))

    assert reason.startswith("spec.nodeName is set")


def test_fc_040_a_virtual_node_is_never_the_limit():
    """200 machines of 96 cores, 1 TiB and 8 GPUs, and 1,200 small Pods, at the same time on one node."""
    asked = {"cpu": 200 * 96 + 1200, "memory": 200 * 1024 * GIB + 1200 * GIB, GPU: 200 * 8, "pods": 1400}

    for name, amount in asked.items():
        assert parse_quantity(CAPACITY[name]) > 10 * amount
