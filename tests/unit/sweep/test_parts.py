"""Which keys, templates, groups, logins and volumes nothing needs any more; data is never one of them."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from app.inventory.identity import Identity, SharedPart, parse_part
from app.sweep.model import By, Facts, Finding, Limits, Next
from app.sweep.parts import PartList, judge_parts
from providers.base import Ref, ResourceId
from providers.capabilities import Part, PartKind
from tests.unit.sweep.sweep_makers import (
    KEY,
    NOON,
    THEM,
    US,
    a_claim,
    a_machine,
    a_rental,
    facts,
    seen_before,
    uid_of,
)

DAYS = timedelta(days=3)
OWN = str(Identity(installation=US, claim_uid=uid_of(1), attempt=1, sequence=7))
SHARED = str(SharedPart(installation=US, what="login", digest="0123456789abcdef"))


def a_part(kind: PartKind = PartKind.KEY, identity: str | None = OWN, **more: Any) -> Part:
    ref = Ref(provider="fake", account="default", region="r1", resource_id=ResourceId("k-1"))
    return Part(**({"ref": ref, "kind": kind, "identity": identity, "created_at": NOON - DAYS} | more))


def judged(
    part: Part, found: Facts | None = None, *, unknown: str | None = None, unused: timedelta = DAYS
) -> tuple[Finding, ...]:
    """At the second sight, the first ``unused`` ago."""
    known = found or facts()
    lists = [PartList(key=KEY, region="r1", parts=(part,), unknown=unknown)]
    before = seen_before(*judge_parts(known, lists)).items()
    memory = {key: replace(one, first_seen_at=NOON - unused) for key, one in before}
    return judge_parts(replace(known, memory=memory), lists)


@pytest.mark.parametrize(
    "part",
    [
        a_part(),
        a_part(PartKind.REGISTRY_LOGIN, SHARED, in_use=False),
        a_part(PartKind.TEMPLATE, SHARED, in_use=None),  # and nothing of ours is left in the account
    ],
    ids=["a claim's key", "a login that nobody uses", "the last template"],
)
def test_orphans_o13_a_part_of_ours_that_nothing_needs_is_dropped(part: Part):
    (finding,) = judged(part)

    assert finding.next is Next.TERMINATE
    assert finding.resource_id == f"{part.kind.value}/k-1"


def test_orphans_o13_a_claims_own_volume_is_told_and_goes_only_by_policy():
    kept = judged(a_part(PartKind.VOLUME))
    dropped = judged(a_part(PartKind.VOLUME), facts(limits=Limits(volumes=True)))
    shared = judged(a_part(PartKind.VOLUME, SHARED, in_use=False), facts(limits=Limits(volumes=True)))

    assert [(one.by, one.next) for one in kept] == [(By.PERSON, Next.REPORT)]
    assert [(one.by, one.next) for one in dropped] == [(By.SWEEP, Next.TERMINATE)]
    assert shared == ()


@pytest.mark.parametrize(
    ("part", "found"),
    [
        (a_part(identity=None), None),
        (a_part(identity="train-data"), None),
        (a_part(identity=OWN.replace(US, THEM)), None),
        (a_part(identity=SHARED.replace(US, THEM)), None),
        (a_part(identity=f"nb-{US}-account"), None),
        (a_part(PartKind.VOLUME, SHARED, in_use=False), None),
        (a_part(PartKind.VOLUME, "datasets"), None),
        (a_part(in_use=True), None),
        (a_part(), facts(claims=[a_claim()])),
        (a_part(), facts(a_machine())),
        (a_part(), facts(rentals=[a_rental(state="ending")])),
        (a_part(), facts(rentals=[a_rental(state="ended", unsettled=True)])),
        (a_part(PartKind.REGISTRY_LOGIN, SHARED, in_use=True), None),
        (a_part(PartKind.REGISTRY_LOGIN, SHARED, in_use=None), facts(claims=[a_claim(5)])),
    ],
)
def test_what_is_used_or_is_not_ours_or_is_data_is_no_finding(part: Part, found: Facts | None):
    assert judged(part, found) == ()


def test_a_part_has_a_grace_of_its_own_and_wants_a_whole_list():
    (young,) = judged(a_part(created_at=NOON - timedelta(hours=23)))
    (unlisted,) = judged(a_part(), unknown="429")

    assert (young.blocked_by, unlisted.blocked_by) == ("grace", "list")


@pytest.mark.parametrize("in_use", [False, None])
def test_the_grace_of_a_shared_part_begins_when_it_is_first_seen_unused_however_old_it_is(
    in_use: bool | None,
):
    """Else the login of every account that is idle for two sweeps would go, and somebody may just want it."""
    old = a_part(PartKind.REGISTRY_LOGIN, SHARED, in_use=in_use)

    (finding,) = judged(old, unused=timedelta(minutes=10))

    assert (finding.next, finding.blocked_by) == (Next.WAIT, "grace")


def test_a_shared_parts_name_is_read_exactly():
    assert parse_part(SHARED) == SharedPart(installation=US, what="login", digest="0123456789abcdef")
    for text in (None, "", f"x{SHARED}", SHARED + "0", SHARED.upper(), f"nb-{US}-login-0123", OWN):
        assert parse_part(text) is None
