"""Names are pure, short enough, and never the same for two things that must not be mixed up."""

import hashlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api import keys

_LABEL = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", fullmatch=True)
_POD = st.lists(_LABEL, min_size=1, max_size=4).map(".".join).filter(lambda name: len(name) <= 253)
_OBJECT_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")


def test_a_claim_is_named_after_namespace_and_pod():
    assert keys.claim_name("team-a", "trainer-0") == "team-a-trainer-0"


@pytest.mark.behaviour(93)
def test_a_join_of_exactly_253_characters_is_not_hashed():
    pod = "p" * 250

    assert keys.claim_name("ns", pod) == f"ns-{pod}"
    assert len(keys.claim_name("ns", pod)) == 253


@pytest.mark.behaviour(92)
def test_a_longer_join_keeps_242_characters_and_ends_in_ten_digits_of_the_sha256_over_namespace_slash_name():
    pod = "p" * 251

    name = keys.claim_name("ns", pod)

    digest = hashlib.sha256(f"ns/{pod}".encode()).hexdigest()
    assert name == f"ns-{'p' * 239}-{digest[:10]}"
    assert len(name) == 253


def test_a_cut_right_after_a_dot_still_gives_a_valid_object_name():
    pod = "p" * 238 + "." + "q" * 14

    assert _OBJECT_NAME.fullmatch(keys.claim_name("ns", pod))


def test_two_pods_that_share_the_plain_name_have_different_hashed_names():
    assert keys.claim_name("a-b", "c") == keys.claim_name("a", "b-c")

    one = keys.hashed_claim_name("a-b", "c", uid="u1", candidate=1)
    other = keys.hashed_claim_name("a", "b-c", uid="u2", candidate=1)

    assert one != other
    assert one.startswith("a-b-c-")


def test_every_candidate_and_every_incarnation_of_a_pod_has_its_own_hashed_name():
    names = {
        keys.hashed_claim_name("ns", "pod", uid=uid, candidate=candidate)
        for uid in ("u1", "u2")
        for candidate in (1, 2, 3)
    }

    assert len(names) == 6


@given(namespace=_LABEL, pod=_POD, uid=st.uuids().map(str), candidate=st.integers(1, 99))
def test_claim_names_are_valid_object_names_and_the_same_at_every_call(namespace, pod, uid, candidate):
    plain = keys.claim_name(namespace, pod)
    hashed = keys.hashed_claim_name(namespace, pod, uid=uid, candidate=candidate)

    for name in (plain, hashed):
        assert len(name) <= 253
        assert _OBJECT_NAME.fullmatch(name)
    assert plain == keys.claim_name(namespace, pod)
    assert hashed == keys.hashed_claim_name(namespace, pod, uid=uid, candidate=candidate)


def test_the_default_account_has_the_plain_node_name_and_others_carry_theirs():
    assert keys.node_name("modal") == "nebula-modal"
    assert keys.node_name("modal", "research") == "nebula-modal-research"


@pytest.mark.parametrize("provider", ["Modal", "a_b", "", "x" * 60, "modal-", "a.b"])
def test_a_provider_that_cannot_name_a_node_is_refused(provider):
    with pytest.raises(ValueError, match="node name"):
        keys.node_name(provider)


def test_a_pod_selects_the_account_only_where_it_is_not_the_default():
    assert keys.placement_labels("aws") == {"nebula.inftyai.com/provider": "aws"}
    assert keys.placement_labels("aws", "two") == {
        "nebula.inftyai.com/provider": "aws",
        "nebula.inftyai.com/account": "two",
    }


def test_a_virtual_node_carries_what_its_pods_select_and_the_taint_that_they_tolerate():
    labels = keys.node_labels("aws", "two")
    taint = keys.node_taint("aws")

    assert labels.items() >= keys.placement_labels("aws", "two").items()
    assert labels["kubernetes.io/hostname"] == "nebula-aws-two"
    assert taint == {"key": "nebula.inftyai.com/provider", "value": "aws", "effect": "NoSchedule"}
    assert (keys.TOLERATION["key"], keys.TOLERATION["effect"]) == (taint["key"], taint["effect"])


def test_names_that_manifests_depend_on_never_change():
    assert (keys.SCHEDULING_GATE, keys.CLAIM_FINALIZER, keys.ENABLED_LABEL, keys.NODE_POOL_LABEL) == (
        "nebula.inftyai.com/provider-selection",
        "nebula.inftyai.com/terminate-instance",
        "nebula.inftyai.com/enabled",
        "nebula.inftyai.com/nodepool",
    )
    assert keys.ACCELERATOR_TYPE_LABEL == "nebula.inftyai.com/accelerator-type"
    assert keys.MAX_PRICE_ANNOTATION == "cloud.aibrix.ai/max-price"
    assert keys.connect_secret_name("web") == "web-connect"
