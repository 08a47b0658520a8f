"""What is read from a Pod."""

from decimal import Decimal

import pytest

from app.placement.request import InvalidRequest, pool_name, request_of
from app.workload.owners import template_of

TYPE = "nebula.inftyai.com/accelerator-type"
GPU = "nvidia.com/gpu"


def a_container(limit=None, request=None, **changes):
    resources = {}
    if limit is not None:
        resources["limits"] = {GPU: limit}
    if request is not None:
        resources["requests"] = {GPU: request}
    return {"name": "workload", "image": "app:1", "resources": resources} | changes


def a_pod(*containers, labels=None, annotations=None, owners=(), **spec):
    metadata = {"namespace": "team", "name": "pod", "uid": "u-1", "ownerReferences": list(owners)}
    return {
        "metadata": metadata | {"labels": labels or {}, "annotations": annotations or {}},
        "spec": {"containers": list(containers) or [a_container()]} | spec,
    }


def accelerator_in(pod):
    return request_of(pod).accelerator


@pytest.mark.parametrize(
    ("containers", "kind", "wanted"),
    [
        ([a_container()], None, None),
        ([a_container("8")], "h100", "h100:8"),
        ([a_container()], "H100", "H100:1"),
        ([a_container(request="2")], "h100", "h100:2"),
        ([a_container("4", "2")], "h100", "h100:4"),
        ([a_container("1"), a_container("2")], "h100", "h100:2"),
        ([a_container("1"), a_container(request="3")], "h100", "h100:3"),
        ([a_container("0")], None, None),
        ([a_container(" 2".strip())], " h100 ", "h100:2"),
        ([a_container("1k")], "h100", "h100:1000"),
    ],
    ids=[
        "cpu",
        "both",
        "type-alone",
        "request",
        "limit-wins",
        "maximum",
        "per-container",
        "zero",
        "blanks",
        "1k",
    ],
)
def test_type_comes_from_the_label_and_count_from_the_containers(containers, kind, wanted):
    accelerator = accelerator_in(a_pod(*containers, labels={TYPE: kind} if kind else {}))

    assert (str(accelerator) if accelerator else None) == wanted


def test_init_containers_are_not_read():
    pod = a_pod(a_container("1"), labels={TYPE: "h100"}, initContainers=[a_container("8")])

    assert str(accelerator_in(pod)) == "h100:1"


@pytest.mark.parametrize(
    ("limit", "kind", "says"),
    [
        ("8", "", "without a type"),
        ("0", "h100", "at least 1"),
        ("500m", "h100", "whole"),
        ("x", "h100", "no quantity"),
    ],
)
def test_a_count_that_cannot_be_meant_is_an_invalid_request(limit, kind, says):
    with pytest.raises(InvalidRequest, match=says):
        accelerator_in(a_pod(a_container(limit), labels={TYPE: kind}))


def test_an_annotation_that_would_be_ignored_is_an_invalid_request():
    with pytest.raises(InvalidRequest, match="regions"):
        request_of(a_pod(annotations={"nebula.inftyai.com/regions": "us"}))


@pytest.mark.parametrize("text", ["$2", "", "0", "-1", "1e3", "two", "2,50"])
def test_a_ceiling_that_is_no_price_is_an_invalid_request(text):
    with pytest.raises(InvalidRequest, match=r"annotation cloud\.aibrix\.ai/max-price: .* dollars"):
        request_of(a_pod(annotations={"cloud.aibrix.ai/max-price": text}))


def test_the_authors_own_ceiling_is_read_exactly():
    request = request_of(a_pod(annotations={"cloud.aibrix.ai/max-price": "2.123456789"}))

    assert request.max_usd_per_hour == Decimal("2.123456789")
    assert request_of(a_pod()).max_usd_per_hour is None


@pytest.mark.parametrize(
    ("owner", "needed"),
    [
        ({"apiVersion": "batch/v1", "kind": "Job", "uid": "j", "controller": True}, True),
        ({"apiVersion": "batch/v1", "kind": "Job", "uid": "j"}, False),
        ({"apiVersion": "example.com/v1", "kind": "Job", "uid": "j", "controller": True}, False),
        ({"apiVersion": "apps/v1", "kind": "ReplicaSet", "uid": "r", "controller": True}, False),
    ],
    ids=["job", "not-its-controller", "another-job", "replicaset"],
)
def test_only_a_job_needs_the_exit_code(owner, needed):
    assert request_of(a_pod(owners=[owner])).needs_exit_code is needed


def test_prices_are_asked_for_with_what_would_run():
    container = a_container("8", resources={"limits": {GPU: "8", "ephemeral-storage": "20Gi"}})

    workload = request_of(a_pod(container, labels={TYPE: "h100"})).workload

    assert workload.disk_bytes == 20 * 2**30
    assert workload.accelerator.key == "h100:8"


def test_a_pod_that_cannot_run_anywhere_is_still_a_request():
    assert request_of(a_pod(a_container(), a_container())).workload is None


def test_an_option_too_long_for_a_claim_is_an_invalid_request():
    with pytest.raises(InvalidRequest, match="vast-offer-id"):
        request_of(a_pod(annotations={"cloud.aibrix.ai/vast-offer-id": "x" * 1025}))


def test_a_provider_gets_only_the_options_that_name_it():
    request = request_of(
        a_pod(
            annotations={"cloud.aibrix.ai/vast-disk-gb": "40", "cloud.aibrix.ai/runpod-x": "1", "other": "2"}
        )
    )

    assert request.options_for("vast") == {"disk-gb": "40"}
    assert request.options_for("modal") == {}


def test_pods_of_one_template_share_its_key_and_another_revision_does_not():
    owner = {"uid": "rs-1", "controller": True}
    first = a_pod(owners=[owner], labels={"pod-template-hash": "a"})
    second = a_pod(owners=[owner], labels={"pod-template-hash": "a"})
    changed = a_pod(owners=[owner], labels={"pod-template-hash": "b"})
    bare = a_pod(owners=[{"uid": "somebody"}])

    assert template_of(first) == template_of(second) != template_of(changed)
    assert template_of(bare) == "u-1"


def test_a_forged_owner_blocks_no_other_namespaces_template():
    owner = {"uid": "rs-1", "controller": True}
    victim, forger = a_pod(owners=[owner]), a_pod(owners=[owner])
    forger["metadata"]["namespace"] = "elsewhere"

    assert template_of(victim) != template_of(forger)


@pytest.mark.behaviour(32)
@pytest.mark.parametrize(("labels", "name"), [({}, None), ({"nebula.inftyai.com/nodepool": ""}, None)])
def test_a_pod_without_a_pool_label_names_none(labels, name):
    assert pool_name(a_pod(labels=labels)) is name
