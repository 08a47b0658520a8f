"""What the API server sends is read whole, and what we write back is what was meant."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from pydantic import ValidationError

from app.api.binding import CloudPodBinding, CloudPodBindingStatus
from app.api.model import CapacityType, find_condition
from app.api.nodeclaim import Mark, NodeClaim, NodeClaimStatus
from app.api.nodepool import Egress, EgressMode, FailoverMode, NodePool, Strategy


def a_pool(**spec):
    return {"metadata": {"name": "gpu", "uid": "u"}, "spec": {"providers": [{"name": "modal"}], **spec}}


def a_claim(**changes):
    spec = {"podRef": {"namespace": "ns", "name": "p", "uid": "u"}, "provider": "modal"}
    return {"metadata": {"name": "ns-p"}, "spec": spec, **changes}


def test_a_pool_that_says_only_its_provider_has_the_documented_defaults():
    pool = NodePool.model_validate(a_pool())

    assert pool.spec.capacity_types == (CapacityType.ON_DEMAND, CapacityType.SPOT)
    assert pool.spec.strategy is Strategy.ORDERED
    assert pool.spec.failover.mode is FailoverMode.REPLACE
    assert pool.spec.failover.blocklist_ttl == timedelta(seconds=30)
    assert pool.spec.failover.reserve_timeout == timedelta(minutes=15)
    assert pool.spec.failover.unknown_timeout == timedelta(minutes=5)
    assert pool.spec.providers[0].account == "default"
    assert pool.spec.egress is None


def test_a_pool_with_every_field_is_read_whole():
    pool = NodePool.model_validate(
        a_pool(
            providers=[{"name": "aws", "account": "two", "regions": ["us"], "weight": 3}],
            capacityTypes=["Spot"],
            strategy="Weighted",
            failover={
                "mode": "Reserve",
                "blocklistTTL": "10m",
                "reserveTimeout": "1h",
                "unknownTimeout": "90s",
            },
            egress={"mode": "Allowlist", "targets": ["10.0.0.0/8"]},
            maxPrice="25.5",
            spotMaxPrice="9",
            limits={"gpus": 64, "usdPerHour": "200"},
            budget={"amount": "5000", "period": "month"},
            namespaceSelector={
                "matchLabels": {"team": "a"},
                "matchExpressions": [{"key": "k", "operator": "Exists"}],
            },
        )
    )

    assert pool.spec.providers[0].weight == 3
    assert pool.spec.failover.blocklist_ttl == timedelta(minutes=10)
    assert pool.spec.max_price == Decimal("25.5")
    assert pool.spec.limits is not None
    assert pool.spec.limits.usd_per_hour == Decimal(200)
    assert pool.spec.budget is not None
    assert pool.spec.budget.thresholds == (50, 80, 100)
    assert pool.spec.egress == Egress(mode=EgressMode.ALLOWLIST, targets=("10.0.0.0/8",))
    assert pool.spec.namespace_selector is not None
    assert pool.spec.namespace_selector.match_expressions[0].operator == "Exists"


def test_regions_are_trimmed_and_neither_blank_nor_repeated():
    pool = NodePool.model_validate(a_pool(providers=[{"name": "aws", "regions": [" us ", "", "eu", "us"]}]))

    assert pool.spec.providers[0].region_tokens == ("us", "eu")


def test_the_spot_ceiling_falls_back_to_the_general_one():
    both = NodePool.model_validate(a_pool(maxPrice="3", spotMaxPrice="1"))
    general = NodePool.model_validate(a_pool(maxPrice="3"))

    assert both.spot_ceiling_usd_per_hour == Decimal(1)
    assert general.spot_ceiling_usd_per_hour == Decimal(3)


def test_money_that_went_through_a_float_is_refused():
    with pytest.raises(ValidationError, match="string"):
        NodePool.model_validate(a_pool(maxPrice=2.5))


def test_fields_of_a_newer_version_are_ignored():
    pool = NodePool.model_validate(a_pool(later={"x": 1}))

    assert pool.metadata.name == "gpu"


def test_a_model_cannot_be_changed():
    pool = NodePool.model_validate(a_pool())

    with pytest.raises(ValidationError):
        pool.spec = pool.spec  # type: ignore[misc]


def test_a_claim_without_a_status_has_no_mark():
    claim = NodeClaim.model_validate(a_claim())

    assert claim.status.attempt is None
    assert claim.status.phase is None
    assert claim.metadata.deletion_timestamp is None


def test_a_mark_is_written_to_the_microsecond_in_utc_and_read_back_the_same():
    mark = Mark(sequence=2**62, send_by=datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC))

    written = NodeClaimStatus(attempt=mark).to_json()

    assert written == {"attempt": {"sequence": 2**62, "sendBy": "2026-01-02T03:04:05.678901Z"}}
    assert NodeClaim.model_validate(a_claim(status=written)).status.attempt == mark


def test_a_mark_of_another_zone_is_the_same_moment_in_utc():
    status = {"attempt": {"sequence": 1, "sendBy": "2026-01-02T05:04:05+02:00"}}

    claim = NodeClaim.model_validate(a_claim(status=status))

    assert claim.status.attempt == Mark(sequence=1, send_by=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))


def test_a_mark_without_a_zone_is_refused():
    with pytest.raises(ValidationError):
        Mark(sequence=1, send_by=datetime(2026, 1, 2))  # noqa: DTZ001


def test_what_was_not_given_is_not_written():
    status = CloudPodBindingStatus(instance_id="i-1", price_per_hour=Decimal("2.50"), endpoint=None)

    assert status.to_json() == {"instanceID": "i-1", "pricePerHour": "2.50"}


def test_a_binding_is_read_with_its_conditions():
    condition = {
        "type": "Capacity",
        "status": "False",
        "lastTransitionTime": "2026-01-02T03:04:05Z",
        "reason": "NoCapacity",
        "message": "none left",
    }
    binding = CloudPodBinding.model_validate(
        {
            "metadata": {"name": "ns-p", "namespace": "ns"},
            "spec": {"podRef": {"name": "p", "uid": "u"}, "claimName": "ns-p", "provider": "modal"},
            "status": {"conditions": [condition]},
        }
    )

    found = find_condition(binding.status.conditions, "Capacity")

    assert found is not None
    assert found.status == "False"
    assert find_condition(binding.status.conditions, "Ready") is None
