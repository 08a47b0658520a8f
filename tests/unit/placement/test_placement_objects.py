"""The objects of one placement."""

from datetime import UTC, datetime

import pytest
from placement_makers import a_pool, a_request, nodes, offers, ranked, view

from app.api import keys
from app.api.nodeclaim import NodeClaim
from app.api.nodepool import NodePool
from app.inventory import identity
from app.placement import objects
from app.placement.rank import chosen
from providers.base import ClaimUid

UID = "6f3c1c59-3f0f-4f4e-9f0a-0d8f1f1f1f1f"


def a_claim(*, region="", **request) -> NodeClaim:
    spec = a_pool("acme")
    made = a_request(**request)
    places = ranked(made, pool=spec, offerings=view(offers("acme", region)), nodes=nodes("acme"))
    pool = NodePool.model_validate({"metadata": {"name": "gpu"}, "spec": spec.to_json()})
    obj = objects.claim_of(made, chosen(places), pool=pool, name="team-pod", installation="aaaaaaaaaa")
    return NodeClaim.model_validate(obj | {"metadata": obj["metadata"] | {"uid": UID}})


def a_pod(**spec):
    metadata = {"namespace": "team", "name": "pod", "uid": "u", "resourceVersion": "7"}
    return {"metadata": metadata, "spec": {"schedulingGates": [{"name": keys.SCHEDULING_GATE}]} | spec}


def test_a_claim_gives_back_the_candidate_that_it_was_made_from():
    candidate = objects.candidate_on(a_claim(region="r1"))

    assert str(candidate) == "acme Spot r1"
    assert str(candidate.accelerator) == "h100:8"


def test_a_claim_keeps_only_the_options_for_its_provider():
    claim = a_claim(options={"acme-disk-gb": "40", "other-x": "1"})

    assert claim.spec.provider_options == {"disk-gb": "40"}


def test_the_bindings_external_name_begins_the_name_of_every_machine_of_the_claim():
    machine = identity.Identity(
        installation="aaaaaaaaaa", claim_uid=ClaimUid(UID), attempt=12, sequence=345678
    )

    assert str(machine).startswith(objects.external_name("aaaaaaaaaa", ClaimUid(UID)) + "-12-")


@pytest.mark.behaviour(61, 96)
def test_lifting_the_gate_is_conditional_on_this_very_version_of_the_pod():
    patch = objects.ungate_patch(a_pod(), a_claim())

    assert (patch["metadata"]["uid"], patch["metadata"]["resourceVersion"]) == ("u", "7")
    assert patch["spec"] == {
        "nodeSelector": {keys.PROVIDER_LABEL: "acme"},
        "schedulingGates": [],
    }


@pytest.mark.behaviour(59, 406)
def test_an_empty_region_is_not_written_and_a_forged_one_taken_off():
    assert keys.REGION_ANNOTATION not in objects.ungate_patch(a_pod(), a_claim())["metadata"]["annotations"]
    forged = a_pod()
    forged["metadata"]["annotations"] = {keys.REGION_ANNOTATION: "mars"}

    patch = objects.ungate_patch(forged, a_claim())

    assert patch["metadata"]["annotations"][keys.REGION_ANNOTATION] is None


def a_stored(name, provider, second):
    at = datetime(2026, 1, 1, 0, 0, second, tzinfo=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"metadata": {"name": name, "creationTimestamp": at}, "spec": {"provider": provider}}


@pytest.mark.parametrize(
    ("providers", "extra"),
    [(["acme"], []), (["acme", "acme"], ["c1"]), (["other", "acme"], ["c0"]), (["other"], [])],
    ids=["one", "younger", "not-meant", "only-one"],
)
def test_of_several_claims_of_a_placed_pod_one_is_kept(providers, extra):
    pod = a_pod(nodeSelector={keys.PROVIDER_LABEL: "acme"}, schedulingGates=[])
    claims = [a_stored(f"c{n}", provider, n) for n, provider in enumerate(providers)]

    assert [claim["metadata"]["name"] for claim in objects.extras(claims, pod)] == extra


@pytest.mark.behaviour(30)
@pytest.mark.parametrize(
    ("spec", "status", "over", "waits"),
    [
        ({}, {}, False, False),
        ({"schedulingGates": [], "nodeSelector": {keys.PROVIDER_LABEL: "acme"}}, {}, False, True),
        (
            {"schedulingGates": [{"name": "other"}], "nodeSelector": {keys.PROVIDER_LABEL: "acme"}},
            {},
            False,
            False,
        ),
        ({"schedulingGates": [], "nodeName": "nebula-acme"}, {}, True, False),
        ({}, {"phase": "Failed"}, True, False),
    ],
    ids=["gated", "placed", "other-gate", "bound", "failed"],
)
def test_what_placement_has_to_do_with_a_pod(spec, status, over, waits):
    pod = a_pod(**spec) | {"status": status}

    assert objects.is_over(pod) is over
    assert objects.is_waiting_for_node(pod) is waits


OTHER_GATE = {"name": "example.com/quota"}


def test_other_gates_are_all_but_ours():
    assert objects.other_gates(a_pod()) == []
    assert objects.other_gates(a_pod(schedulingGates=[OTHER_GATE])) == ["example.com/quota"]


def a_stored_claim(provider="acme", **metadata):
    return {"metadata": {"name": "c", "uid": "c", **metadata}, "spec": {"provider": provider}}


def a_leaving_pod(*, finalizers=(), **spec):
    pod = a_pod(**spec)
    pod["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": list(finalizers)}
    return pod


@pytest.mark.parametrize(
    ("pod", "given_up"),
    [
        (a_pod(), False),
        (a_pod(schedulingGates=[], nodeSelector={keys.PROVIDER_LABEL: "acme"}), False),
        (a_pod(schedulingGates=[], nodeName="nebula-acme"), False),
        (a_pod(schedulingGates=[]), True),
        (a_pod(schedulingGates=[OTHER_GATE]), True),
        (a_pod(schedulingGates=[], nodeName="worker-1"), True),
        (a_pod(schedulingGates=[], nodeSelector={keys.PROVIDER_LABEL: "other"}), True),
        (a_leaving_pod(), False),
        (a_leaving_pod(finalizers=["x/y"]), True),
        (a_leaving_pod(finalizers=["x/y"], nodeName="nebula-acme", schedulingGates=[]), False),
    ],
    ids=[
        "gated",
        "placed",
        "bound-to-our-node",
        "let-go-by-somebody",
        "ours-taken-off",
        "bound-elsewhere",
        "selects-another-provider",
        "gone-in-a-moment",
        "held-by-a-finalizer",
        "the-nodes-business",
    ],
)
def test_a_claim_that_can_never_serve_its_pod_is_given_up(pod, given_up):
    claim = a_stored_claim()

    assert objects.unneeded([claim], pod) == ([claim] if given_up else [])
    assert objects.unneeded([a_stored_claim(deletionTimestamp="2026-01-01T00:00:00Z")], pod) == []
