"""The identity codec: what we make parses exactly, and nothing else does."""

import re
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.inventory.identity import Identity, new_installation, parse
from providers.base import ClaimUid

UID = "0b1253e3-dd06-43e2-92e0-fbad8710a0fc"


def an_identity(**changes: object) -> Identity:
    fields: dict = {
        "installation": "tla76j4n44",
        "claim_uid": ClaimUid(UID),
        "attempt": 1,
        "sequence": 7,
    } | changes
    return Identity(**fields)


@given(
    uid=st.uuids(),
    attempt=st.integers(min_value=1, max_value=9999),
    sequence=st.integers(min_value=1, max_value=999_999_999),
)
@pytest.mark.field_case("FC-026")
def test_every_identity_survives_the_way_to_a_cloud_and_back(uid: UUID, attempt: int, sequence: int):
    identity = an_identity(
        installation=new_installation(), claim_uid=ClaimUid(str(uid)), attempt=attempt, sequence=sequence
    )

    text = str(identity)

    assert parse(text) == identity
    assert len(text) <= 60
    assert re.fullmatch(r"[a-z0-9-]+", text)


@given(st.text(max_size=70))
def test_no_other_text_is_taken_for_ours(text: str):
    assert parse(text) is None


@pytest.mark.parametrize("position", range(len(str(an_identity()))))
def test_one_wrong_character_anywhere_is_not_ours(position: int):
    text = str(an_identity())
    other = "b" if text[position] != "b" else "c"

    assert parse(text[:position] + other + text[position + 1 :]) is None


@pytest.mark.parametrize(
    "text", [None, "", "nb-", "training-7", str(an_identity()).upper(), f" {an_identity()}"]
)
def test_what_only_resembles_an_identity_is_not_ours(text: str | None):
    assert parse(text) is None


def test_two_attempts_of_a_claim_have_two_names():
    assert str(an_identity(attempt=1)) != str(an_identity(attempt=2))


def test_the_last_attempt_that_has_a_name_parses_and_the_next_does_not():
    last, over = an_identity(attempt=9999, sequence=999_999_999), an_identity(attempt=10_000)

    assert parse(str(last)) == last
    assert parse(str(over)) is None
