"""What this version would ignore is refused by name, also where the API server let it through."""

import pytest

from app.api.not_built import NOT_BUILT, annotation_refusals, refusals

REFUSED = {
    "spec.providers[].account": {"providers": [{"name": "a", "account": "two"}]},
    "spec.egress.mode": {"egress": {"mode": "Blocked"}},
}


def a_pool(**spec):
    return {"spec": {"providers": [{"name": "a"}], **spec}}


@pytest.mark.parametrize("field", REFUSED)
def test_a_pool_stored_with_an_unsupported_field_is_refused_by_its_name(field):
    (message,) = refusals(a_pool(**REFUSED[field]))

    assert message.startswith(f"{field.strip()} ")
    assert "not supported by this version of Nebula" in message


def test_every_row_of_the_table_has_its_case_here():
    assert {row.message.split(" ")[0] for row in NOT_BUILT} == {field.strip() for field in REFUSED}


def test_every_refused_field_is_named_at_once():
    assert len(refusals(a_pool(providers=[{"name": "a", "account": "two"}], egress={"mode": "Blocked"}))) == 2


def test_the_values_that_are_supported_are_accepted():
    spec = {
        "providers": [{"name": "a", "account": "default", "regions": ["us"], "weight": 1}],
        "strategy": "LowestPrice",
        "maxPrice": "25",
        "spotMaxPrice": "9",
        "limits": {"gpus": 16, "usdPerHour": "50"},
        "namespaceSelector": {"matchLabels": {"team": "a"}},
        "failover": {"mode": "Reserve", "blocklistTTL": "10m", "reserveTimeout": "1h"},
        "egress": {"mode": "Open"},
        "budget": {"amount": "500", "period": "month", "action": "RefuseNew"},
    }

    assert refusals({"spec": spec}) == ()


def test_a_pod_annotation_that_would_be_ignored_is_refused_by_its_name():
    (message,) = annotation_refusals({"nebula.inftyai.com/regions": "us", "other": "x"})

    assert message.startswith("annotation nebula.inftyai.com/regions is not supported")
    assert annotation_refusals({"cloud.aibrix.ai/max-price": "2", "other": "x"}) == ()
