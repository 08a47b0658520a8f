"""Which of the rights that a replica needs a cluster's rules give."""

from typing import Any

import pytest

from app.kube.preflight import Right, _lacking

EVERY = Right(group="g", resource="things", verbs=("get", "patch"))
ONE = Right(group="g", resource="things", verbs=("get", "patch"), name="ours")


def rule(*verbs: str, names: tuple[str, ...] = ()) -> dict[str, Any]:
    more = {"resourceNames": list(names)} if names else {}
    return {"apiGroups": ["g"], "resources": ["things"], "verbs": list(verbs), **more}


@pytest.mark.parametrize(
    ("right", "rules", "lacks"),
    [
        (EVERY, [rule("get"), rule("patch")], None),
        (EVERY, [rule("get", "patch", names=("ours",))], "get, patch things.g cluster-wide"),
        (ONE, [rule("get"), rule("patch", names=("theirs", "ours"))], None),
        (ONE, [rule("*", names=("theirs",))], "get, patch things.g named ours cluster-wide"),
        (ONE, [rule("get", names=("ours",))], "patch things.g named ours cluster-wide"),
        (ONE, [], "get, patch things.g named ours cluster-wide"),
    ],
)
def test_a_rule_for_single_names_counts_only_for_them(
    right: Right, rules: list[dict[str, Any]], lacks: str | None
):
    assert _lacking(right, rules) == lacks
