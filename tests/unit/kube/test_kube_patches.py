"""Differences and conditions."""

from datetime import UTC, datetime

import pytest

from app.kube.patches import condition, diff, status_ops

NOW = datetime(2026, 5, 1, 12, 0, 0, 999, tzinfo=UTC)
LATER = datetime(2026, 5, 1, 13, tzinfo=UTC)


@pytest.mark.parametrize(
    ("current", "wanted", "changes"),
    [
        ({"a": 1}, {"a": 1}, None),
        ({"a": 1, "b": 2}, {"a": 1}, None),
        ({"a": 1}, {"a": 2}, {"a": 2}),
        ({}, {"a": 1}, {"a": 1}),
        (None, {"a": 1}, {"a": 1}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}, {"a": {"c": 3}}),
        ({"a": 1}, {"a": None}, {"a": None}),
        ({}, {"a": None}, None),
        ({"a": [1, 2]}, {"a": [2, 1]}, {"a": [2, 1]}),
        ({"a": "text"}, {"a": {"b": 1}}, {"a": {"b": 1}}),
        ({}, {"a": {}}, {"a": {}}),
        ({"a": {"running": {}}}, {"a": {"running": {}}}, None),
    ],
)
def test_only_what_differs_is_sent(current, wanted, changes):
    assert diff(current, wanted) == changes


@pytest.mark.parametrize("empty", ["", [], None])
def test_what_the_server_does_not_store_is_no_difference(empty):
    assert diff({}, {"message": empty}) is None
    assert diff({"list": [{"name": "c"}]}, {"list": [{"name": "c", "message": empty}]}) is None


def test_a_text_that_becomes_empty_is_a_difference():
    assert diff({"message": "x"}, {"message": ""}) == {"message": ""}


def test_of_a_keyed_list_only_the_changed_elements_are_sent():
    held = [{"type": "A", "status": "True", "extra": 1}, {"type": "B", "status": "True"}]
    wanted = [{"type": "A", "status": "True"}, {"type": "B", "status": "False"}, {"type": "C"}]

    changes = diff({"conditions": held}, {"conditions": wanted}, keyed={"conditions": "type"})

    assert changes == {"conditions": [{"type": "B", "status": "False"}, {"type": "C"}]}
    assert diff({"conditions": held}, {"conditions": held[:1]}, keyed={"conditions": "type"}) is None


def test_the_transition_time_moves_only_with_the_status():
    first = condition(None, type="Ready", status="False", reason="Wait", now=NOW)
    same = condition(first, type="Ready", status="False", reason="Other", message="m", now=LATER)
    turned = condition(same, type="Ready", status="True", reason="Up", now=LATER, observed_generation=3)

    assert first[0]["lastTransitionTime"] == same[0]["lastTransitionTime"] == "2026-05-01T12:00:00Z"
    assert (same[0]["reason"], same[0]["message"]) == ("Other", "m")
    assert turned[0]["lastTransitionTime"] == "2026-05-01T13:00:00Z"
    assert turned[0]["observedGeneration"] == 3


def test_other_conditions_keep_their_place():
    others = [{"type": "A", "status": "True"}, {"type": "Z", "status": "True"}]

    added = condition(others, type="Ready", status="True", reason="Up", now=NOW)
    changed = condition(added, type="A", status="False", reason="Down", now=NOW)

    assert [each["type"] for each in changed] == ["A", "Z", "Ready"]
    assert others[0]["status"] == "True"  # what was given is not changed


def test_an_unchanged_condition_is_no_difference():
    once = condition(None, type="Ready", status="True", reason="Up", now=NOW)

    assert condition(once, type="Ready", status="True", reason="Up", now=LATER) == once


def test_a_status_field_is_removed_only_where_it_is():
    obj = {"metadata": {"uid": "u"}, "status": {"a/b": 1}}

    assert status_ops(obj, {"a/b": None, "c": None}) == [
        {"op": "test", "path": "/metadata/uid", "value": "u"},
        {"op": "remove", "path": "/status/a~1b"},
    ]
