"""From declared regions to candidate tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog.regions import PLAIN, region_tokens, words_of

AWS = words_of("aws")
MODAL = words_of("modal")
ALL_AWS = (
    *("ap-northeast-1", "ap-northeast-2", "ap-northeast-3", "ap-south-1", "ap-southeast-1", "ap-southeast-2"),
    "ca-central-1",
    *("eu-central-1", "eu-north-1", "eu-west-1", "eu-west-2", "eu-west-3"),
    "sa-east-1",
    *("us-east-1", "us-east-2", "us-west-1", "us-west-2"),
)
US = ("us-east-1", "us-east-2", "us-west-1", "us-west-2")


@pytest.mark.parametrize(
    ("declared", "tokens"),
    [
        (["us"], US),
        (["US"], US),
        (["eu-west-1"], ("eu-west-1",)),
        (["us", "eu-west-1"], (*US, "eu-west-1")),
        (["us-west-1", "us"], ("us-west-1", "us-east-1", "us-east-2", "us-west-2")),
        ([" ca ", "", "  ", "ca"], ("ca-central-1",)),
        (["me-south-1"], ("me-south-1",)),
        (["mars-1"], ("mars-1",)),
    ],
    ids=["group", "any-case", "literal", "mixed", "repeated", "blanks", "opt-in", "unchecked"],
)
@pytest.mark.behaviour(360)
def test_declared_words_become_regions_in_their_order(declared, tokens):
    assert region_tokens(declared, served=ALL_AWS, words=AWS) == tokens


def test_without_declaration_all_served_regions_are_walked_in_the_order_of_the_groups():
    assert region_tokens((), served=ALL_AWS[::-1], words=AWS) == ALL_AWS


@pytest.mark.behaviour(52)
def test_a_list_of_blanks_counts_as_none_declared():
    assert region_tokens(["", " "], served=["us-east-1"], words=AWS) == ("us-east-1",)


def test_an_opt_in_region_is_not_walked_unless_declared():
    assert region_tokens((), served=["me-south-1", "us-east-1"], words=AWS) == ("us-east-1",)


def test_without_groups_served_regions_are_walked_as_listed():
    assert region_tokens((), served=["b", "a"]) == ("b", "a")


def test_regions_of_a_grouped_provider_that_are_in_no_group_are_walked_when_there_are_no_others():
    assert region_tokens((), served=["zone-2", "zone-1"], words=AWS) == ("zone-2", "zone-1")


@pytest.mark.behaviour(49)
@pytest.mark.parametrize("served", [(), ("",)], ids=["nothing-known", "no-regions"])
@pytest.mark.parametrize("words", [AWS, MODAL, PLAIN], ids=["aws", "modal", "other"])
def test_a_provider_without_regions_has_one_open_candidate(served, words):
    assert region_tokens((), served=served, words=words) == ("",)


@pytest.mark.behaviour(51)
def test_a_provider_that_chooses_among_regions_itself_gets_them_as_one_candidate():
    assert region_tokens(["us-east", "eu-west", "us-east"], served=[""], words=MODAL) == ("us-east|eu-west",)


def test_regions_are_not_joined_where_offerings_name_their_own():
    assert region_tokens(["r1", "r2"], served=["r1", "r2"], words=MODAL) == ("r1", "r2")


@given(
    declared=st.lists(st.sampled_from(["us", "EU", " sa", "", "x-1", "us-east-1"]), max_size=8),
    served=st.lists(st.sampled_from([*ALL_AWS, "", "x-1"]), max_size=8),
    words=st.sampled_from([AWS, MODAL, PLAIN]),
)
def test_there_is_always_a_token_and_never_twice_the_same(declared, served, words):
    tokens = region_tokens(declared, served=served, words=words)

    assert tokens
    assert len(set(tokens)) == len(tokens)
    assert all(token == token.strip() for token in tokens)
