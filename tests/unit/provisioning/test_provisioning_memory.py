"""What a claim remembers becomes money: only what we wrote, for this claim, is believed."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from app.provisioning.core import run_facts, terminate_fact
from app.provisioning.follow import _aged, _merge
from app.provisioning.memory import decoded, encoded, merged
from app.provisioning.model import ClaimSpec, Unrecorded
from providers.base import ClaimUid, Meter, MeterKind, Ref, ResourceId, Tier, usd_per_hour

SECRET = b"of the installation"
T0 = datetime(2026, 1, 1, tzinfo=UTC)
CLAIM = ClaimSpec(
    uid=ClaimUid("11111111-1111-4111-8111-111111111111"),
    name="ns-p",
    pod_namespace="ns",
    pod_name="p",
    pod_uid="u",
    pool="gpu",
    provider="fake",
    account="default",
    region="r1",
    tier=Tier.ON_DEMAND,
    accelerator=None,
)


def a_machine(name: str = "m-1", *, shown: bool = True, asked_at: datetime | None = T0) -> Unrecorded:
    return Unrecorded(
        ref=Ref(provider="fake", account="default", region="r1", resource_id=ResourceId(name)),
        identity="nb-…",
        meters=(
            Meter(kind=MeterKind.GPU, quantity=Decimal(8), usd=Decimal("1.10")),
            Meter(kind=MeterKind.BYTES, quantity=Decimal(0), usd=None, label="out"),
        ),
        created_at=T0 - timedelta(hours=1),
        account_id=None,
        shown=shown,
        asked_at=asked_at,
    )


def test_what_was_written_is_read_again_to_the_last_digit():
    machines = (a_machine(), a_machine("m-2", shown=False, asked_at=None))

    assert decoded(encoded(machines, CLAIM, secret=SECRET), CLAIM, secret=SECRET) == machines


@pytest.mark.parametrize(
    "change",
    [
        {"instanceID": "x/y"},
        {"region": "elsewhere"},
        {"identity": "nb-another"},
        {"createdAt": "2020-01-01T00:00:00+00:00"},
        {"meters": [{"kind": "gpu", "quantity": "1e999999", "usd": "1e999999", "label": ""}]},
        {"meters": [{"kind": "gpu", "quantity": "sNaN", "usd": "1", "label": ""}]},
    ],
)
def test_what_somebody_has_edited_is_nothing(change: dict[str, object]):
    held = json.loads(encoded([a_machine()], CLAIM, secret=SECRET))
    held["machines"][0] |= change

    assert decoded(json.dumps(held), CLAIM, secret=SECRET) == ()


def test_what_another_claim_or_installation_remembers_is_nothing():
    text = encoded([a_machine()], CLAIM, secret=SECRET)

    assert decoded(text, replace(CLAIM, uid=ClaimUid("another")), secret=SECRET) == ()
    assert decoded(text, replace(CLAIM, account="another"), secret=SECRET) == ()
    assert decoded(text, CLAIM, secret=b"another") == ()


@pytest.mark.parametrize(
    "text", ["{", "[]", "1", "null", '[{"instanceID": 1}]', '{"machines": [], "seal": "é"}', '{"seal": 1}']
)
def test_what_cannot_be_read_is_nothing(text: str):
    assert decoded(text, CLAIM, secret=SECRET) == ()


def test_of_one_machine_the_last_showing_is_remembered_and_an_answer_never_in_its_place():
    answered = a_machine(shown=False, asked_at=None)
    early, late = a_machine(asked_at=T0), a_machine(asked_at=T0 + timedelta(hours=1))
    other = a_machine("m-2")

    assert merged([answered, other], [early]) == [early, other]
    assert merged([early], [late]) == [late]
    assert merged([early], [answered]) == [early]
    asked = a_machine(shown=False, asked_at=T0)
    assert merged([answered], [asked]) == [asked]


def test_a_terminate_that_waits_for_the_store_is_told_with_its_age():
    ref = a_machine().ref
    waiting: dict[tuple[str, str, str], dict[str, object]] = {}
    for fact in (
        terminate_fact(ref, at=100.0),
        run_facts(ref, None, gone=False),
        terminate_fact(ref, at=160.0),
        run_facts(ref, None, gone=True),
    ):
        _merge(waiting, fact)

    (row,) = waiting.values()
    assert row["gone"]
    assert _aged(row, 3700.0)["asked_ago_s"] == 3600.0


@pytest.mark.parametrize("quantity", ["NaN", "sNaN", "Infinity", "-1"])
def test_a_quantity_that_is_none_has_no_price(quantity: str):
    assert usd_per_hour([Meter(kind=MeterKind.GPU, quantity=Decimal(quantity), usd=Decimal(0))]) is None
