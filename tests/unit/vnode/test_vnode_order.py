"""What is asked for a Pod, and what renting counts."""

import random
from typing import Any

import pytest
from prometheus_client import REGISTRY

from app.api import keys
from app.kube import orders
from app.kube.environment import Resolved
from app.provisioning import metrics
from app.provisioning.model import ClaimSpec, Outcome, Over, Refused, Rented, Waiting, Why
from app.vnode import order
from app.workload.environment import Environment
from providers.base import Accelerator, ClaimUid, EgressMode, RejectionKind, Tier
from tests.unit.vnode.vnode_makers import REF, a_pod

NOTHING = Resolved(environment=Environment())
OWNER = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "rs", "uid": "rs-uid", "controller": True}
SANDBOX = {
    "apiVersion": keys.API_VERSION,
    "kind": "Sandbox",
    "name": "s",
    "uid": "s-uid",
    "controller": True,
}


def a_claim(provider: str = "fake", **changes: Any) -> ClaimSpec:
    return ClaimSpec(
        **{
            "uid": ClaimUid("c"),
            "name": "c",
            "pod_namespace": "ns",
            "pod_name": "p",
            "pod_uid": "pod-uid",
            "pool": "gpu",
            "provider": provider,
            "account": "default",
            "region": "",
            "tier": Tier.SPOT,
            "accelerator": Accelerator(type="H100", count=8),
            **changes,
        }
    )


def a_claim_object(**spec: Any) -> dict[str, Any]:
    pod = {"namespace": "ns", "name": "p", "uid": "pod-uid"}
    return {"metadata": {"name": "c", "uid": "c"}, "spec": {"podRef": pod, "provider": "fake", **spec}}


@pytest.mark.parametrize(
    ("owners", "replaced"), [([OWNER], True), ([SANDBOX], False), ([], False)], ids=["set", "sandbox", "bare"]
)
def test_only_a_pod_whose_owner_makes_another_is_reaped(owners: list[Any], replaced: bool) -> None:
    assert order.is_replaced_by_owner(a_pod(metadata={"ownerReferences": owners})) is replaced


def test_the_machine_comes_from_the_claim_and_not_from_the_pod() -> None:
    pod = a_pod(metadata={"labels": {keys.ACCELERATOR_TYPE_LABEL: "A100"}})

    workload = orders.workload_of(pod, a_claim_object(), a_claim(options={"disk": "5"}), resolved=NOTHING)

    assert str(workload.accelerator) == "H100:8"
    assert workload.options == {"disk": "5"}


def test_the_claims_egress_policy_is_not_lost_on_the_way() -> None:
    policy = {"mode": "Allowlist", "targets": ["10.0.0.0/8", "1.2.3.4", "*.example.com"]}

    egress = orders.workload_of(a_pod(), a_claim_object(egress=policy), a_claim(), resolved=NOTHING).egress

    assert egress.mode is EgressMode.ALLOWLIST
    assert egress.cidrs == ("10.0.0.0/8", "1.2.3.4/32")
    assert egress.domains == ("*.example.com",)


def test_a_block_holds_for_the_pools_time_and_the_jitter() -> None:
    spec = {"providers": [{"name": "fake"}], "failover": {"blocklistTTL": "10m"}}
    pool = orders.pool_of({"metadata": {"name": "gpu"}, "spec": spec}, "gpu")

    assert orders.policy_of(pool, a_pod(), jitter_s=7.5).block_ttl_s == 607.5


def test_a_pool_that_is_not_there_is_named() -> None:
    with pytest.raises(orders.Unusable, match="gpu"):
        orders.pool_of(None, "gpu")


@pytest.mark.behaviour(142, 143, 352, 353)
@pytest.mark.parametrize(
    ("outcome", "result", "reason"),
    [
        (Rented(ref=REF), "success", None),
        (Refused(kind=RejectionKind.CAPACITY, message="sold out"), "failure", "capacity"),
        (Refused(kind=RejectionKind.UNSUPPORTED, message="no"), "failure", "unsupported_accelerator"),
        (Refused(kind=RejectionKind.PRICE, message="dear"), "failure", "other"),
        (Waiting(why=Why.UNKNOWN, message="TimeoutError", after_s=1.0), "failure", "timeout"),
        (Waiting(why=Why.UNKNOWN, message="reset by peer", after_s=1.0), "failure", "unreachable"),
        (Waiting(why=Why.RETRY, message="too late to send", after_s=1.0), None, None),
        (Over(), None, None),
    ],
    ids=["rented", "sold-out", "unsupported", "dear", "timeout", "lost", "not-sent", "over"],
)
@pytest.mark.behaviour(221)
def test_every_attempt_is_counted_once_and_every_failure_files_one_reason(
    outcome: Outcome, result: str | None, reason: str | None
) -> None:
    claim = a_claim(provider=f"m-{random.randrange(10**12)}")
    labels = metrics.candidate_labels(claim)

    metrics.attempted(claim, outcome, took_s=1.0)

    attempts = {
        each: REGISTRY.get_sample_value("nebula_provision_attempts_total", {**labels, "result": each})
        for each in ("success", "failure")
    }
    assert {each: count for each, count in attempts.items() if count} == ({result: 1.0} if result else {})
    name = "nebula_provision_failures_total"
    filed = {
        sample.labels["reason"]: sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == name and sample.labels["provider"] == claim.provider
    }
    assert filed == ({reason: 1.0} if reason else {})


def test_what_a_claim_does_not_carry_is_none_in_labels() -> None:
    assert metrics.candidate_labels(a_claim(accelerator=None)) == {
        "provider": "fake",
        "region": "none",
        "capacity_type": "Spot",
        "accelerator": "none",
        "accelerator_count": "none",
    }
