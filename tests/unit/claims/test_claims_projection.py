"""What the statuses say, case by case."""

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from app.api.reasons import ClaimReason
from app.claims.pools import pool_status
from app.claims.projection import Finding, Sight, binding_status, claim_status, phase
from app.provisioning.model import ClaimSpec, Refused, View
from providers.base import (
    ClaimUid,
    Machine,
    MachineState,
    Meter,
    MeterKind,
    Ref,
    RejectionKind,
    ResourceId,
    Tier,
)

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
REF = Ref(provider="modal", account="default", region="r1", resource_id=ResourceId("m-1"))
SPEC = ClaimSpec(
    uid=ClaimUid("u-1"),
    name="ns-a",
    pod_namespace="ns",
    pod_name="a",
    pod_uid="p-1",
    pool="gpu",
    provider="modal",
    account="default",
    region="r1",
    tier=Tier.ON_DEMAND,
    accelerator=None,
)


def a_machine(state: MachineState = MachineState.RUNNING, **more: Any) -> Machine:
    return Machine(ref=REF, identity="nb", state=state, endpoint="10.0.0.1:80", **more)


def a_sight(
    *, shown: bool = True, leaving: bool = False, finding: Finding | None = None, **view: Any
) -> Sight:
    return Sight(
        view=View(**{"state": "live", "ref": REF, "machine": a_machine(), **view}),
        shown=shown,
        leaving=leaving,
        finding=finding,
    )


def a_claim(**status: Any) -> dict[str, Any]:
    return {"metadata": {"uid": "u-1", "name": "ns-a"}, **({"status": status} if status else {})}


def said(status: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {each["type"]: (each["status"], each["reason"]) for each in status.get("conditions") or ()}


@pytest.mark.behaviour(280, 282)
@pytest.mark.parametrize(
    ("held", "sight", "wanted"),
    [
        (None, a_sight(state="open", ref=None, machine=None), None),
        ("Provisioning", a_sight(), "Bound"),
        ("Provisioning", a_sight(shown=False), "Provisioning"),
        ("Provisioning", a_sight(machine=None), "Bound"),
        ("Provisioning", a_sight(machine=a_machine(MachineState.QUEUED)), "Provisioning"),
        ("Provisioning", a_sight(machine=None, reserved=False), "Provisioning"),
        ("Provisioning", a_sight(gone=True), "Provisioning"),
        ("Bound", a_sight(state="open", ref=None, machine=None), "Bound"),
        ("Bound", a_sight(leaving=True), "Terminating"),
        ("Bound", a_sight(leaving=True, state="ending"), "Terminating"),
        ("Bound", a_sight(leaving=True, state="ended"), "Terminated"),
        ("Bound", a_sight(state="ended"), "Bound"),
        ("Terminating", a_sight(), "Terminating"),
        ("Terminated", a_sight(leaving=True), "Terminated"),
        ("a later version's", a_sight(), "Bound"),
    ],
    ids=str,
)
def test_a_phase_follows_the_rental_and_never_goes_back(held: str | None, sight: Sight, wanted: str | None):
    assert phase(held, sight) == wanted


def test_an_unknown_machine_blanks_neither_endpoint_nor_price_nor_readiness():
    claim = claim_status(a_claim(phase="Bound"), SPEC, a_sight(machine=None), now=NOW)
    first = binding_status({}, "Bound", a_sight(), now=NOW)
    later = binding_status({"status": first}, "Bound", a_sight(machine=None), now=NOW)

    assert "endpoint" not in claim
    assert "endpoint" not in later
    assert "pricePerHour" not in later
    assert later["conditions"] == first["conditions"]


def test_the_mark_is_never_among_the_fields():
    assert "attempt" not in claim_status(a_claim(attempt={"sequence": 1}), SPEC, a_sight(), now=NOW)


def test_a_region_without_a_name_is_written_as_such():
    """Else the claim's own region would be read as the machine's."""
    ref = Ref(provider="modal", account="default", region="", resource_id=ResourceId("m-1"))
    assert claim_status(a_claim(), SPEC, a_sight(ref=ref), now=NOW)["region"] == ""


@pytest.mark.parametrize("reason", [ClaimReason.PROVIDER_NOT_CONFIGURED, ClaimReason.MACHINE_IN_DOUBT])
def test_a_finding_comes_as_a_condition_with_its_reason_and_goes_with_its_cause(reason: ClaimReason):
    finding = Finding(reason=reason, message="a person is needed")
    found = claim_status(a_claim(), SPEC, a_sight(finding=finding), now=NOW)
    mended = claim_status(a_claim(conditions=found["conditions"]), SPEC, a_sight(), now=NOW)

    assert said(found) == {"Released": ("False", reason.value)}
    assert mended["conditions"] == []
    assert "conditions" not in claim_status(a_claim(), SPEC, a_sight(), now=NOW)


@pytest.mark.parametrize(
    ("sight", "wanted"),
    [
        (a_sight(state="open", ref=None, machine=None), {}),
        (
            a_sight(),
            {
                "Capacity": ("True", "Available"),
                "Provisioned": ("True", "Provisioned"),
                "Ready": ("True", "Running"),
            },
        ),
        (
            a_sight(machine=a_machine(MachineState.BOOTING)),
            {
                "Capacity": ("True", "Available"),
                "Provisioned": ("True", "Provisioned"),
                "Ready": ("False", "Initializing"),
            },
        ),
        (
            a_sight(machine=a_machine(MachineState.QUEUED)),
            {"Provisioned": ("True", "Provisioned"), "Ready": ("False", "Initializing")},
        ),
        (
            a_sight(
                state="open",
                ref=None,
                machine=None,
                shown=False,
                refusal=Refused(kind=RejectionKind.CAPACITY, message="none left"),
            ),
            {"Capacity": ("False", "NoCapacity"), "Provisioned": ("False", "NoCapacity")},
        ),
        (
            a_sight(
                state="open",
                ref=None,
                machine=None,
                shown=False,
                refusal=Refused(kind=RejectionKind.AUTH, message="bad key"),
            ),
            {"Provisioned": ("False", "Rejected")},
        ),
        (a_sight(leaving=True, state="ending", ref=None, machine=None), {}),
        (
            a_sight(leaving=True, state="ended"),
            {"Provisioned": ("False", "Terminated")},
        ),
    ],
    ids=["open", "running", "booting", "queued", "no-capacity", "refused", "never-had-one", "ended"],
)
def test_the_binding_says_whether_there_is_a_machine_and_whether_it_is_reachable(
    sight: Sight, wanted: dict[str, tuple[str, str]]
):
    assert said(binding_status({}, "Bound", sight, now=NOW)) == wanted


@pytest.mark.parametrize(
    ("price", "shown"),
    [(Decimal("3.950"), "3.95"), (Decimal(1) / 3, "0.333333333"), (None, None), (Decimal(10) ** 12, None)],
    ids=["plain", "too-fine", "unknown", "absurd"],
)
def test_a_price_is_exact_text_or_absent(price: Decimal | None, shown: str | None):
    assert binding_status({}, "Bound", a_sight(usd_per_hour=price), now=NOW).get("pricePerHour") == shown


def test_what_an_exited_machine_still_costs_is_not_shown_as_its_price():
    disk = Meter(kind=MeterKind.DISK, quantity=Decimal(1), usd=Decimal("0.01"))
    over = a_sight(machine=a_machine(MachineState.EXITED, meters=(disk,)), usd_per_hour=Decimal("0.01"))
    assert "pricePerHour" not in binding_status({}, "Bound", over, now=NOW)


def test_a_pool_with_a_field_that_would_be_ignored_is_not_supported():
    pool = {
        "metadata": {"generation": 3},
        "spec": {"providers": [{"name": "modal"}], "egress": {"mode": "Blocked"}},
    }
    status = pool_status(pool, [], provider_names=frozenset({"modal"}), now=NOW)

    assert said(status) == {"Ready": ("False", "NotSupported")}
    assert "spec.egress.mode" in status["conditions"][0]["message"]


@pytest.mark.behaviour(309)
def test_an_unchanged_pool_has_an_equal_status():
    pool: dict[str, Any] = {"metadata": {"generation": 3}, "spec": {"providers": [{"name": "modal"}]}}
    first = pool_status(pool, [], provider_names=frozenset({"modal"}), now=NOW)
    pool["status"] = {field: value for field, value in first.items() if value is not None}
    later = pool_status(pool, [], provider_names=frozenset({"modal"}), now=NOW.replace(hour=23))

    assert later == first
    assert first["placed"] is None


@pytest.mark.parametrize("over", [False, True], ids=["for-a-moment", "lasting"])
def test_a_machine_that_is_over_only_for_a_moment_costs_the_binding_no_write(over: bool):
    before = binding_status({}, "Bound", a_sight(), now=NOW)
    sight = Sight(
        view=View(state="live", ref=REF, machine=a_machine(MachineState.EXITED)),
        shown=True,
        leaving=False,
        over=over,
    )

    after = binding_status({"status": before}, "Bound", sight, now=NOW)

    assert said(after)["Ready"] == (("False", "Terminated") if over else ("True", "Running"))
