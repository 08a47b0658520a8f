"""What is counted, and under which labels."""

import pytest
from placement_makers import H100X8, a_block, a_pool, a_request, nodes, offers, ranked, view
from prometheus_client import REGISTRY

from app.api.nodepool import NodePool
from app.api.reasons import DeferralReason
from app.kube.claims import claim_spec
from app.placement import metrics, objects
from app.placement.rank import chosen
from app.provisioning import metrics as renting


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


@pytest.mark.behaviour(60)
def test_a_placement_is_counted_once_with_its_wait():
    places = ranked(pool=a_pool("counted"), offerings=view(offers("counted", "r1")), nodes=nodes("counted"))
    labels = {
        "provider": "counted",
        "region": "r1",
        "capacity_type": "Spot",
        "accelerator": "h100",
        "accelerator_count": "8",
    }

    metrics.placed(chosen(places), waited_s=7.0)

    assert value("nebula_placement_decisions_total", **labels) == 1
    assert value("nebula_placement_wait_duration_seconds_sum", **labels) == 7
    assert value("nebula_placement_wait_duration_seconds_bucket", le="5.0", **labels) == 0
    assert value("nebula_placement_wait_duration_seconds_bucket", le="10.0", **labels) == 1


@pytest.mark.behaviour(350)
def test_what_a_request_does_not_carry_is_none():
    places = ranked(
        a_request(accelerator=None),
        pool=a_pool("plain"),
        offerings=view(offers("plain", needs_accelerator=False)),
        nodes=nodes("plain"),
    )

    assert metrics.candidate_labels(chosen(places)) == {
        "provider": "plain",
        "region": "none",
        "capacity_type": "Spot",
        "accelerator": "none",
        "accelerator_count": "none",
    }


@pytest.mark.behaviour(40, 62, 352)
def test_every_skip_is_counted_under_its_reason():
    places = ranked(
        pool=a_pool("full", "unknown", capacityTypes=["Spot"]),
        offerings=view(offers("full", "r1")),
        nodes=nodes("full"),
        blocks=[a_block("full")],
    )

    metrics.skipped(places)

    name = "nebula_placement_candidate_skips_total"
    assert value(name, provider="full", capacity_type="Spot", region="r1", reason="blocked") == 1
    unregistered = {"capacity_type": "Spot", "region": "none", "reason": "provider_unregistered"}
    assert value(name, provider="unknown", **unregistered) == 1


@pytest.mark.behaviour(33, 351)
def test_a_pool_that_does_not_exist_is_no_label():
    before = value("nebula_placement_deferrals_total", pool="none", reason="no_pool")

    metrics.deferred(DeferralReason.NO_POOL, pool=None)

    assert value("nebula_placement_deferrals_total", pool="none", reason="no_pool") == before + 1


@pytest.mark.behaviour(349)
@pytest.mark.parametrize("accelerator", [H100X8, None], ids=["gpu", "cpu"])
@pytest.mark.parametrize("region", ["", "r1"])
def test_the_series_of_placement_and_of_renting_of_one_claim_have_equal_labels(accelerator, region):
    account = offers("equal", *filter(None, [region]), accelerator=accelerator, needs_accelerator=False)
    request = a_request(accelerator=accelerator)
    candidate = chosen(ranked(request, pool=a_pool("equal"), offerings=view(account), nodes=nodes("equal")))
    pool = NodePool.model_validate({"metadata": {"name": "gpu"}, "spec": a_pool("equal").to_json()})

    claim = objects.claim_of(request, candidate, pool=pool, name="team-pod", installation="aaaaaaaaaa")
    claim["metadata"]["uid"] = "u-1"

    assert renting.candidate_labels(claim_spec(claim)) == metrics.candidate_labels(candidate)
