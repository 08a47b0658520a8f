"""Who waits for what, and for how long."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placement_makers import LATER, NOW

from app.api.reasons import DeferralReason, SkipReason
from app.placement.waiting import Wait, Waiting, offset_s

KEY, OTHER = ("team", "one"), ("team", "two")


@pytest.mark.behaviour(56)
@pytest.mark.parametrize(
    ("uid", "digest"),
    [("", 0xCBF29CE484222325), ("a", 0xAF63DC4C8601EC8C), ("foobar", 0x85944171F73967E8)],
)
def test_the_offset_is_the_published_64_bit_fnv_1a_of_the_uid(uid, digest):
    assert offset_s(uid, spread_s=30.0) == digest % 30_000_000_000 / 1e9


@pytest.mark.behaviour(56)
@given(uid=st.text(max_size=40), spread_s=st.floats(min_value=0.0, max_value=60.0))
def test_the_offset_is_the_same_at_every_call_and_never_beyond_the_spread(uid, spread_s):
    assert 0.0 <= offset_s(uid, spread_s=spread_s) <= spread_s
    assert offset_s(uid, spread_s=spread_s) == offset_s(uid, spread_s=spread_s)


def test_a_block_that_is_gone_before_its_end_frees_those_who_met_it():
    waiting = Waiting()
    waiting.put(KEY, Wait(reason=DeferralReason.ALL_BLOCKED, blocks={1: LATER, 2: LATER}), since=waiting.mark)
    waiting.put(OTHER, Wait(reason=DeferralReason.ALL_BLOCKED, blocks={2: LATER}), since=waiting.mark)

    assert waiting.freed([1, 2], now=NOW) == []
    assert waiting.freed([2], now=NOW) == [KEY]
    assert waiting.freed([], now=NOW) == [KEY, OTHER]


def test_a_block_that_has_lapsed_frees_nobody_before_their_own_moment():
    waiting = Waiting()
    waiting.put(KEY, Wait(reason=DeferralReason.ALL_BLOCKED, blocks={1: LATER}), since=waiting.mark)

    assert waiting.freed([], now=LATER + timedelta(seconds=1)) == []


def test_only_pods_that_lack_a_place_are_woken_by_a_new_one():
    waiting = Waiting()
    waiting.put(KEY, Wait(reason=DeferralReason.NO_CANDIDATE), since=waiting.mark)
    waiting.put(OTHER, Wait(reason=DeferralReason.INVALID_REQUEST), since=waiting.mark)

    assert waiting.for_a_place() == [KEY]
    assert not waiting.on_blocks
    waiting.drop(KEY)
    assert waiting.for_a_place() == []


@pytest.mark.parametrize(
    ("wait", "change"),
    [
        (Wait(reason=DeferralReason.NO_CANDIDATE), lambda waiting: waiting.for_a_place()),
        (
            Wait(reason=DeferralReason.NO_CANDIDATE, pool="p", met=frozenset({SkipReason.LIMIT})),
            lambda waiting: waiting.on_limit("p"),
        ),
        (
            Wait(reason=DeferralReason.INVALID_REQUEST, met=frozenset({SkipReason.NAMESPACE_NOT_ALLOWED})),
            lambda waiting: waiting.on_namespace("ns"),
        ),
    ],
    ids=["place", "limit", "namespace"],
)
def test_what_changes_during_a_look_is_not_missed(wait, change):
    waiting = Waiting()
    began = waiting.mark
    change(waiting)

    assert waiting.put(KEY, wait, since=began)
    assert not waiting.put(KEY, wait, since=waiting.mark)
