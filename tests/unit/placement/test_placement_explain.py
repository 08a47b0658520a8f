"""The sentence on a gated Pod."""

import pytest
from placement_makers import LATER, a_block, a_pool, nodes, offers, ranked, view

from app.api.reasons import DeferralReason
from app.placement.explain import deferral_of, sentence, soonest_expiry


def test_it_counts_every_place_by_reason_and_names_a_few():
    places = ranked(
        pool=a_pool("modal", "gone", {"name": "aws", "regions": ["us"]}, capacityTypes=["Spot"]),
        offerings=view(offers("modal"), offers("aws")),
        nodes=nodes("modal", "aws"),
        blocks=[a_block("modal"), a_block("aws", id=2, kind="quota")],
    )

    assert sentence(places) == (
        "0 of 6 candidates: 5 blocked until 12:05:00 UTC (modal Spot: capacity; aws Spot us-east-1: quota;"
        " aws Spot us-east-2: quota; …), 1 not configured (gone Spot: no such account is open)"
    )
    assert deferral_of(places) is DeferralReason.ALL_BLOCKED
    assert soonest_expiry(places) == LATER


@pytest.mark.behaviour(57)
def test_without_a_block_waiting_alone_ends_nothing():
    places = ranked(pool=a_pool("gone"), offerings={}, nodes={})

    assert deferral_of(places) is DeferralReason.NO_CANDIDATE
    assert soonest_expiry(places) is None
