"""What the API server makes of our CRDs: accepted, explained, defaulted, and refusing what it must."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from app.api.crds import KINDS, load_crds
from app.api.not_built import NOT_BUILT, refusals

SAMPLES = Path(__file__).parents[3] / "docs" / "samples"
API_VERSION = "nebula.inftyai.com/v1alpha1"


def a_pool(name="rules", **spec) -> dict[str, Any]:
    body = {"providers": [{"name": "modal"}], **spec}
    return {"apiVersion": API_VERSION, "kind": "NodePool", "metadata": {"name": name}, "spec": body}


def a_claim(name, **spec) -> dict[str, Any]:
    body = {
        "podRef": {"namespace": "default", "name": "p", "uid": "u-1"},
        "poolRef": "gpu",
        "provider": "modal",
        "region": "us-east",
        "capacityType": "Spot",
        "accelerator": "H100:8",
        **spec,
    }
    return {"apiVersion": API_VERSION, "kind": "NodeClaim", "metadata": {"name": name}, "spec": body}


def a_binding(name, **spec) -> dict[str, Any]:
    body = {
        "podRef": {"name": "p", "uid": "u-1"},
        "claimName": name,
        "provider": "modal",
        "region": "eu",
        **spec,
    }
    return {
        "apiVersion": API_VERSION,
        "kind": "CloudPodBinding",
        "metadata": {"name": name, "namespace": "default"},
        "spec": body,
    }


def a_condition(kind, status, reason) -> dict[str, str]:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": "",
        "lastTransitionTime": "2026-01-02T03:04:05Z",
    }


def cells(table: str) -> list[dict[str, str]]:
    """The rows of what ``kubectl get`` printed, by column; columns start where their heading does."""
    head, *lines = table.splitlines()
    starts = [match.start() for match in re.finditer(r"\S+", head)]
    ends = [*starts[1:], None]
    return [
        {head[a:b].strip(): line[a:b].strip() for a, b in zip(starts, ends, strict=True)} for line in lines
    ]


def set_status(api, kind, name, status) -> dict[str, Any]:
    return api.json(
        "patch", kind, name, "--subresource=status", "--type=merge", "-p", json.dumps({"status": status})
    )


@pytest.mark.parametrize("crd", load_crds(), ids=lambda crd: crd["spec"]["names"]["kind"])
def test_a_crd_is_established_and_structural(api, crd):
    seen = api.json("get", "crd", crd["metadata"]["name"])

    conditions = {each["type"]: each["status"] for each in seen["status"]["conditions"]}
    assert conditions == {"NamesAccepted": "True", "Established": "True"}
    assert seen["spec"]["versions"] == crd["spec"]["versions"]  # nothing was dropped or filled in


def test_our_kinds_have_their_short_names_scopes_and_category(api):
    lines = api.run("api-resources", "--categories=nebula", "--no-headers").splitlines()

    rows = {tuple(line.split()) for line in lines}
    assert rows >= {
        ("cloudpodbindings", "cpb", API_VERSION, "true", "CloudPodBinding"),
        ("nodeclaims", "nc", API_VERSION, "false", "NodeClaim"),
        ("nodepools", "np", API_VERSION, "false", "NodePool"),
    }


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("nodepool.spec.failover.blocklistTTL", "How long a candidate that refused is passed over"),
        ("nodeclaim.status.attempt.sendBy", "The moment after which nothing of the attempt is sent"),
        ("cloudpodbinding.status.pricePerHour", "Dollars an hour that the provider quoted"),
    ],
)
def test_kubectl_explains_a_field(api, path, says):
    assert says in " ".join(api.published("explain", path).split())


def test_a_pool_that_says_only_its_provider_is_filled_in(api):
    spec = api.create(a_pool(), dry=True)["spec"]

    assert spec == {
        "providers": [{"name": "modal", "account": "default"}],
        "capacityTypes": ["OnDemand", "Spot"],
        "strategy": "Ordered",
    }


@pytest.mark.parametrize(
    "spec",
    [
        {"strategy": "LowestPrice"},
        {"strategy": "Weighted", "providers": [{"name": "a", "weight": 3}, {"name": "b", "weight": 1}]},
        {"maxPrice": "25", "spotMaxPrice": "9.5"},
        {"limits": {"gpus": 16, "usdPerHour": "50"}},
        {"namespaceSelector": {"matchExpressions": [{"key": "team", "operator": "In", "values": ["a"]}]}},
    ],
    ids=lambda spec: next(iter(spec)),
)
def test_what_a_pool_says_of_order_price_and_limits_is_accepted(api, spec):
    stored = api.create(a_pool(**spec), dry=True)["spec"]

    assert all(stored[name] == spec[name] for name in spec if name != "providers")


def test_an_empty_failover_is_filled_in(api):
    spec = api.create(a_pool(failover={}), dry=True)["spec"]

    assert spec["failover"] == {
        "mode": "Replace",
        "blocklistTTL": "30s",
        "reserveTimeout": "15m",
        "unknownTimeout": "5m",
    }


NOT_SUPPORTED: dict[str, dict[str, Any]] = {
    "spec.providers[].account": {"providers": [{"name": "modal", "account": "two"}]},
    "spec.egress.mode": {"egress": {"mode": "Blocked"}},
    "spec.egress.mode ": {"egress": {"mode": "Allowlist", "targets": ["10.0.0.0/8"]}},
}


@pytest.mark.parametrize("field", NOT_SUPPORTED)
def test_a_field_that_would_be_ignored_is_refused_by_its_name(api, field):
    pool = a_pool(**NOT_SUPPORTED[field])

    said = api.refused("create", "--dry-run=server", "-f", "-", obj=pool)

    (message,) = refusals(pool)
    assert message in said
    assert message.startswith(field.strip())
    assert "Forbidden" in said


def test_every_row_of_the_table_is_tried_on_the_api_server():
    assert {row.message.split(" ")[0] for row in NOT_BUILT} == {field.strip() for field in NOT_SUPPORTED}


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"strategy": "Weighted"}, "strategy Weighted requires a weight on every provider"),
        ({"egress": {"mode": "Open", "targets": ["a.b"]}}, "targets is only valid with mode Allowlist"),
        (
            {"egress": {"mode": "Allowlist", "targets": []}},
            "mode Allowlist requires at least one target; use mode Blocked to permit nothing",
        ),
        (
            {"egress": {"mode": "Allowlist", "targets": ["a.b,c.d"]}},
            "a target must not contain a comma; list each target as its own entry",
        ),
        ({"egress": {"targets": ["a.b"]}}, "spec.egress.mode: Required value"),
        ({"egress": {"mode": "Allowlist", "targets": ["a"] * 65}}, "must have at most 64 items"),
        ({"egress": {"mode": "Allowlist", "targets": ["a" * 254]}}, "may not be more than 253 bytes"),
        ({"providers": []}, "spec.providers in body should have at least 1 items"),
        ({"providers": [{"name": f"p{n}"} for n in range(9)]}, "must have at most 8 items"),
        ({"providers": [{"name": "modal"}, {"name": "modal"}]}, "spec.providers[1]: Duplicate value"),
        ({"providers": [{"name": "aws", "regions": ["r" * 33]}]}, "may not be more than 32 bytes"),
        ({"providers": [{"name": "aws", "weight": 0}]}, "should be greater than or equal to 1"),
        ({"capacityTypes": []}, "should have at least 1 items"),
        ({"capacityTypes": ["Spot", "Spot"]}, "a capacity type must not be listed twice"),
        ({"capacityTypes": ["Reserved"]}, 'supported values: "Spot", "OnDemand"'),
        ({"strategy": "Random"}, 'supported values: "Ordered", "LowestPrice", "Weighted"'),
        ({"maxPrice": "0.00"}, "must be more than 0 dollars"),
        ({"maxPrice": "$3"}, "spec.maxPrice in body should match"),
        ({"spotMaxPrice": "-1"}, "spec.spotMaxPrice in body should match"),
        ({"limits": {}}, "limits needs gpus or usdPerHour"),
        ({"limits": {"gpus": 1.5}}, 'spec.limits.gpus: Invalid value: "float64"'),
        ({"limits": {"usdPerHour": "0"}}, "must be more than 0 dollars"),
        (
            {"namespaceSelector": {"matchExpressions": [{"key": "a", "operator": "In"}]}},
            "values must be given for operators In and NotIn, and for no other",
        ),
        (
            {
                "namespaceSelector": {
                    "matchExpressions": [{"key": "a", "operator": "Exists", "values": ["b"]}]
                }
            },
            "values must be given for operators In and NotIn, and for no other",
        ),
        (
            {"namespaceSelector": {"matchExpressions": [{"key": "a", "operator": "Is"}]}},
            'supported values: "In", "NotIn", "Exists", "DoesNotExist"',
        ),
        ({"limits": {"gpus": 0}}, "spec.limits.gpus in body should be greater than or equal to 1"),
        ({"budget": {"amount": "5", "period": "year"}}, 'supported values: "day", "week", "month", "total"'),
    ],
)
def test_a_malformed_pool_is_refused(api, spec, says):
    assert says in api.refused("create", "--dry-run=server", "-f", "-", obj=a_pool(**spec))


@pytest.mark.parametrize("text", ["10m", "1h30m", "1.5s", "500ms"])
def test_a_duration_is_accepted_as_written(api, text):
    spec = api.create(a_pool(failover={"blocklistTTL": text, "unknownTimeout": text}), dry=True)["spec"]

    assert (spec["failover"]["blocklistTTL"], spec["failover"]["unknownTimeout"]) == (text, text)


@pytest.mark.parametrize("text", ["0s", "-5m", "10", "1d", "", "1us", "9999999999999h"])
def test_what_is_no_positive_duration_is_refused_by_the_api_server_too(api, text):
    said = api.refused("create", "--dry-run=server", "-f", "-", obj=a_pool(failover={"blocklistTTL": text}))

    assert "spec.failover.blocklistTTL" in said


def test_an_unknown_field_is_refused_under_strict_validation(api):
    assert 'unknown field "spec.stratgy"' in api.refused(
        "create", "--dry-run=server", "--validate=strict", "-f", "-", obj=a_pool(stratgy="Ordered")
    )


@pytest.mark.field_case("FC-027")
def test_a_pool_name_that_no_label_can_hold_is_refused(api):
    said = api.refused("create", "--dry-run=server", "-f", "-", obj=a_pool(name="p" * 64))

    assert "metadata.name must have at most 63 characters" in said


def test_the_spec_of_a_claim_cannot_be_changed(api, made):
    made.append("nodeclaim api-immutable")
    api.create(a_claim("api-immutable", maxPrice="3"))

    for spec in ({"provider": "aws"}, {"maxPrice": "30"}, {"podRef": {"uid": "u-2"}}, {"region": None}):
        patch = json.dumps({"spec": spec})
        said = api.refused("patch", "nodeclaim", "api-immutable", "--type=merge", "-p", patch)
        assert "spec is immutable: a claim is one candidate, made for one Pod" in said

    api.run("label", "nodeclaim", "api-immutable", "x=y")  # everything but the spec may change


def test_the_spec_of_a_binding_cannot_be_changed(api, made):
    made.append("cloudpodbinding api-immutable -n default")
    api.create(a_binding("api-immutable"))

    patch = json.dumps({"spec": {"provider": "aws"}})
    said = api.refused(
        "patch", "cloudpodbinding", "api-immutable", "-n", "default", "--type=merge", "-p", patch
    )

    assert "spec is immutable: a binding records one placement" in said


def test_a_mark_is_stored_to_the_last_digit_and_never_goes_back_or_away(api, made):
    made.append("nodeclaim api-mark")
    api.create(a_claim("api-mark"))
    mark = {"sequence": 2**62 + 1, "sendBy": "2026-01-02T03:04:05.678901Z"}

    stored = set_status(api, "nodeclaim", "api-mark", {"phase": "Provisioning", "attempt": mark})

    assert stored["status"] == {"phase": "Provisioning", "attempt": mark}
    for patch, says in (
        ({"attempt": {"sequence": 2**62}}, "the sequence of an attempt must not go back"),
        ({"attempt": None}, "status.attempt must not be removed: a machine may have been asked for"),
    ):
        said = api.refused(
            *("patch", "nodeclaim", "api-mark", "--subresource=status", "--type=merge"),
            *("-p", json.dumps({"status": patch})),
        )
        assert says in said
    removed = json.dumps([{"op": "remove", "path": "/status"}])
    assert "status.attempt must not be removed" in api.refused(
        *("patch", "nodeclaim", "api-mark", "--subresource=status", "--type=json", "-p", removed)
    )
    again = {"attempt": {"sequence": 2**62 + 1, "sendBy": "2026-01-02T03:05:00.000001Z"}, "phase": "Bound"}
    assert set_status(api, "nodeclaim", "api-mark", again)["status"] == again  # a replay, and other fields


def test_a_status_write_changes_no_spec_and_a_spec_write_no_status(api, made):
    made.append("nodepool api-status")
    api.create(a_pool(name="api-status"))
    set_status(api, "nodepool", "api-status", {"placed": {"modal": 2}})

    patch = json.dumps({"spec": {"capacityTypes": ["Spot"]}, "status": {"placed": {"modal": 9}}})
    pool = api.json("patch", "nodepool", "api-status", "--type=merge", "-p", patch)

    assert pool["spec"]["capacityTypes"] == ["Spot"]
    assert pool["status"] == {"placed": {"modal": 2}}


def test_the_columns_of_a_pool_are_printed(api, made):
    made.append("nodepool api-columns")
    api.create(a_pool(name="api-columns", providers=[{"name": "modal"}, {"name": "aws"}]))
    ready = a_condition("Ready", "True", "Valid")
    set_status(api, "nodepool", "api-columns", {"providers": "modal,aws", "conditions": [ready]})

    (row,) = cells(api.run("get", "np", "api-columns"))

    assert row.pop("AGE")
    assert row == {"NAME": "api-columns", "STRATEGY": "Ordered", "PROVIDERS": "modal,aws", "READY": "True"}


def test_the_columns_of_a_claim_are_printed(api, made):
    made.append("nodeclaim api-columns")
    api.create(a_claim("api-columns"))
    set_status(api, "nodeclaim", "api-columns", {"phase": "Bound", "instanceID": "i-1"})

    (row,) = cells(api.run("get", "nc", "api-columns"))

    assert row.pop("AGE")
    assert row == {
        "NAME": "api-columns",
        "PROVIDER": "modal",
        "REGION": "us-east",
        "ACCELERATOR": "H100:8",
        "CAPACITY_TYPE": "Spot",
        "PHASE": "Bound",
        "INSTANCE": "i-1",
    }


def test_the_columns_of_a_binding_are_printed(api, made):
    made.append("cloudpodbinding api-columns -n default")
    api.create(a_binding("api-columns"))
    patch = json.dumps(
        {
            "status": {
                "instanceID": "i-1",
                "pricePerHour": "31.92",
                "conditions": [a_condition("Ready", "False", "Initializing")],
            }
        }
    )
    api.run(
        *("patch", "cpb", "api-columns", "-n", "default", "--subresource=status", "--type=merge", "-p", patch)
    )

    (row,) = cells(api.run("get", "cpb", "api-columns", "-n", "default"))

    assert row.pop("AGE")
    assert row == {
        "NAME": "api-columns",
        "POD": "p",
        "PROVIDER": "modal",
        "REGION": "eu",
        "INSTANCE": "i-1",
        "PRICE/H": "31.92",
        "READY": "False",
    }


def test_a_wide_list_says_more_of_each_kind(api, made):
    made += ["nodepool api-wide", "nodeclaim api-wide", "cloudpodbinding api-wide -n default"]
    limits = {"gpus": 16, "usdPerHour": "80"}
    api.create(a_pool(name="api-wide", maxPrice="25", failover={"mode": "Reserve"}, limits=limits))
    unready = a_condition("Ready", "False", "UnknownProvider")
    set_status(api, "nodepool", "api-wide", {"placed": {"modal": 2}, "conditions": [unready]})
    api.create(a_claim("api-wide", maxPrice="22.00"))
    set_status(api, "nodeclaim", "api-wide", {"phase": "Bound", "endpoint": "54.1.2.3"})
    api.create(a_binding("api-wide", capacityType="Spot"))
    patch = {"phase": "Bound", "conditions": [a_condition("Ready", "True", "Running")]}
    api.run(
        *("patch", "cpb", "api-wide", "-n", "default", "--subresource=status", "--type=merge"),
        *("-p", json.dumps({"status": patch})),
    )

    (pool,) = cells(api.run("get", "np", "api-wide", "-o", "wide"))
    (claim,) = cells(api.run("get", "nc", "api-wide", "-o", "wide"))
    (binding,) = cells(api.run("get", "cpb", "api-wide", "-n", "default", "-o", "wide"))

    assert (pool["REASON"], pool["MODE"], pool["PLACED"]) == ("UnknownProvider", "Reserve", '{"modal":2}')
    assert (pool["GPUS"], pool["USD/H"], pool["MAXPRICE"]) == ("16", "80", "25")
    assert (claim["POOL"], claim["NAMESPACE"], claim["POD"]) == ("gpu", "default", "p")
    assert (claim["MAXPRICE"], claim["ENDPOINT"]) == ("22.00", "54.1.2.3")
    assert (binding["PHASE"], binding["CAPACITY_TYPE"], binding["REASON"]) == ("Bound", "Spot", "Running")
    assert binding["CLAIM"] == "api-wide"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_kubectl_explains_every_field_of_every_kind(api, kind):
    """Each level is read by people, so no field may be bare, and none may speak of how it was made."""
    text = api.published("explain", kind.plural, "--recursive=false")
    for part in ("spec", "status"):
        text += api.published("explain", f"{kind.plural}.{part}")

    assert "<no description>" not in text
    for word in ("pydantic", "StrEnum", "Annotated", "Decimal", "None"):
        assert word not in text


def test_describe_shows_a_pool_without_the_clutter_of_defaults(api, made):
    made.append("nodepool api-described")
    api.create(a_pool(name="api-described", maxPrice="25.00"))
    ready = a_condition("Ready", "False", "UnknownProvider") | {"message": "no registered adapter for: aws"}
    set_status(api, "nodepool", "api-described", {"conditions": [ready]})

    described = api.run("describe", "nodepool", "api-described")

    assert re.search(r"Max Price:\s+25\.00", described)
    assert re.search(r"Reason:\s+UnknownProvider", described)
    assert "no registered adapter for: aws" in described
    assert "Managed Fields" not in described


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_what_the_api_server_stores_is_read_by_our_models(api, kind):
    make = {"NodePool": a_pool, "NodeClaim": a_claim, "CloudPodBinding": a_binding}[kind.kind]

    stored = api.create(make("api-models"), dry=True)
    model = kind.model.model_validate(stored)

    assert model.metadata.name == "api-models"
    assert model.to_json()["spec"] == stored["spec"]


def test_the_samples_are_applied_with_exactly_the_values_of_the_readme(api, made):
    made.append("nodepool gpu")

    api.run("apply", "-f", str(SAMPLES / "nodepool.yaml"))
    pool = api.json("get", "nodepool", "gpu")
    # The API server's whole answer without a Pod coming of it: somebody else's tests share the namespace.
    deployment = api.json("apply", "--dry-run=server", "-f", str(SAMPLES / "deployment.yaml"))
    template = deployment["spec"]["template"]

    assert pool["apiVersion"] == "nebula.inftyai.com/v1alpha1"
    assert pool["spec"] == {
        "providers": [
            {"name": "modal", "account": "default"},
            {"name": "aws", "account": "default", "regions": ["us", "eu-west-1"]},
        ],
        "capacityTypes": ["Spot", "OnDemand"],
        "strategy": "Ordered",
        "failover": {
            "mode": "Replace",
            "blocklistTTL": "10m",
            "reserveTimeout": "15m",
            "unknownTimeout": "5m",
        },
    }
    assert template["metadata"]["labels"] == {
        "nebula.inftyai.com/enabled": "true",
        "nebula.inftyai.com/nodepool": "gpu",
        "nebula.inftyai.com/accelerator-type": "h100",
    }
    (container,) = template["spec"]["containers"]
    assert container["name"] == "workload"
    assert container["image"] == "nvidia/cuda:12.4.1-base-ubuntu22.04"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
