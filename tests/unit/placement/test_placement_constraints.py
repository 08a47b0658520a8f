"""The scheduler's hard rules, for virtual nodes."""

import pytest

from app.placement.constraints import constraints_of, node_view

TAINT = {"key": "nebula.inftyai.com/provider", "value": "aws", "effect": "NoSchedule"}
TOLERATION = {"key": "nebula.inftyai.com/provider", "operator": "Exists", "effect": "NoSchedule"}


def a_node(*, ready="True", taints=(TAINT,), **spec):
    return {
        "metadata": {"name": "nebula-aws", "labels": {"provider": "aws", "size": "10"}},
        "spec": {"taints": list(taints)} | spec,
        "status": {"conditions": [{"type": "Ready", "status": ready}]},
    }


def a_pod(*terms, tolerations=(TOLERATION,), **spec):
    if terms:
        required = {"nodeSelectorTerms": list(terms)}
        affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
        spec["affinity"] = affinity
    return {"spec": {"tolerations": list(tolerations)} | spec}


def verdict(pod, node):
    return constraints_of(pod).against(node_view(node))


def expression(key, operator, *values):
    return {"key": key, "operator": operator, "values": list(values)}


@pytest.mark.parametrize(
    ("requirement", "holds"),
    [
        (expression("provider", "In", "aws", "gcp"), True),
        (expression("provider", "In", "gcp"), False),
        (expression("absent", "In", "aws"), False),
        (expression("provider", "NotIn", "gcp"), True),
        (expression("provider", "NotIn", "aws"), False),
        (expression("absent", "NotIn", "aws"), True),
        (expression("provider", "Exists"), True),
        (expression("absent", "Exists"), False),
        (expression("absent", "DoesNotExist"), True),
        (expression("provider", "DoesNotExist"), False),
        (expression("size", "Gt", "9"), True),
        (expression("size", "Gt", "10"), False),
        (expression("size", "Lt", "11"), True),
        (expression("provider", "Lt", "11"), False),
        (expression("absent", "Gt", "1"), False),
        (expression("provider", "Resembles", "aws"), False),
    ],
    ids=lambda value: (
        "-".join([value["operator"], value["key"], *value["values"]]) if value and value is not True else ""
    ),
)
def test_an_expression_of_required_affinity(requirement, holds):
    assert (verdict(a_pod({"matchExpressions": [requirement]}), a_node()) is None) is holds


YES, NO = expression("provider", "Exists"), expression("absent", "Exists")


@pytest.mark.parametrize(
    ("terms", "holds"),
    [
        ([{"matchExpressions": [YES, NO]}], False),
        ([{"matchExpressions": [NO]}, {"matchExpressions": [YES]}], True),
        ([{}], False),
        ([{"matchFields": [expression("metadata.name", "In", "nebula-aws")]}], True),
        ([{"matchFields": [expression("metadata.name", "NotIn", "nebula-aws")]}], False),
        (
            [{"matchExpressions": [YES], "matchFields": [expression("metadata.name", "In", "other")]}],
            False,
        ),
    ],
    ids=["all-of-a-term", "any-term", "empty-term", "by-name", "not-by-name", "fields-and-labels"],
)
def test_terms_are_alternatives_whose_parts_must_all_hold(terms, holds):
    assert (verdict(a_pod(*terms), a_node()) is None) is holds


def test_preferred_affinity_excludes_nothing():
    preferred = [{"weight": 1, "preference": {"matchExpressions": [NO]}}]
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}

    assert verdict(a_pod(affinity=affinity), a_node()) is None


@pytest.mark.parametrize(("selector", "holds"), [({"provider": "aws"}, True), ({"provider": "gcp"}, False)])
def test_the_node_selector_must_match(selector, holds):
    assert (verdict(a_pod(nodeSelector=selector), a_node()) is None) is holds


@pytest.mark.parametrize(
    ("tolerations", "holds"),
    [
        ([TOLERATION], True),
        ([{"operator": "Exists"}], True),
        ([{"key": TAINT["key"], "value": "aws"}], True),
        ([{"key": TAINT["key"], "value": "gcp"}], False),
        ([{"key": TAINT["key"], "operator": "Exists", "effect": "NoExecute"}], False),
        ([], False),
    ],
    ids=["by-key", "all", "equal", "unequal", "other-effect", "none"],
)
def test_a_hard_taint_must_be_tolerated(tolerations, holds):
    assert (verdict(a_pod(tolerations=tolerations), a_node()) is None) is holds


def test_a_soft_taint_excludes_nothing():
    soft = {"key": "busy", "effect": "PreferNoSchedule"}

    assert verdict(a_pod(), a_node(taints=[TAINT, soft])) is None


@pytest.mark.parametrize("ready", ["False", "Unknown"])
def test_a_node_that_is_not_ready_is_unavailable(ready):
    assert "not Ready" in (verdict(a_pod(), a_node(ready=ready)) or "")


def test_a_cordoned_node_is_unavailable_even_to_a_pod_that_tolerates_everything():
    pod = a_pod(tolerations=[{"operator": "Exists"}])

    assert "cordoned" in (verdict(pod, a_node(unschedulable=True)) or "")
