"""When a rented machine counts as in hand, and what a pool may still have against it."""

from datetime import UTC, datetime
from decimal import Decimal

import pytest

from app.api.nodeclaim import NodeClaim
from app.api.nodepool import NodePool
from app.api.reasons import SkipReason
from app.placement.rank import Candidate, Place, Skip
from app.placement.standing import Standing, objection_to, standing_of
from app.provisioning.model import View
from providers.base import Machine, MachineState, Ref, ResourceId, Tier

REF = Ref(provider="modal", account="default", region="r1", resource_id=ResourceId("m-1"))
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def a_view(shown: MachineState | None = None, *, started: bool = False, **changes: object) -> View:
    machine = None
    if shown is not None:
        machine = Machine(ref=REF, identity=None, state=shown, started_at=NOON if started else None)
    return View(**{"state": "live", "ref": REF, "machine": machine, **changes})


@pytest.mark.behaviour(128, 129)
@pytest.mark.parametrize(
    ("view", "standing"),
    [
        (a_view(answered=True), Standing.IN_HAND),
        (a_view(answered=True, reserved=False), Standing.QUEUED),
        (a_view(answered=False), Standing.UNSEEN),
        (a_view(MachineState.QUEUED, answered=True), Standing.QUEUED),
        (a_view(MachineState.QUEUED, reserved=False), Standing.QUEUED),
        (a_view(MachineState.BOOTING), Standing.IN_HAND),
        (a_view(MachineState.RUNNING), Standing.IN_HAND),
        (a_view(MachineState.EXITED), Standing.IN_HAND),
        (a_view(MachineState.GONE), Standing.UNSEEN),
        (a_view(MachineState.GONE, gone=True), Standing.LOST),
        (a_view(MachineState.GONE, gone=True, started=True), Standing.IN_HAND),
        (a_view(gone=True), Standing.LOST),
        (a_view(MachineState.RUNNING, state="ending"), Standing.LOST),
        (a_view(state="ended"), Standing.LOST),
    ],
    ids=[
        "answered",
        "queued",
        "from-before-a-restart",
        "listed-as-queued",
        "queued-and-listed-so",
        "booting",
        "running",
        "exited",
        "gone-but-not-proven",
        "gone",
        "gone-after-its-work-began",
        "never-seen-and-gone",
        "released-by-somebody",
        "ended",
    ],
)
def test_only_committed_capacity_is_a_machine_in_hand(view: View, standing: Standing) -> None:
    assert standing_of(view) is standing


def a_claim(**spec: object) -> NodeClaim:
    pod = {"namespace": "ns", "name": "p", "uid": "u"}
    body = {"podRef": pod, "poolRef": "gpu", "provider": "modal", "region": "r1", "capacityType": "Spot"}
    return NodeClaim.model_validate({"metadata": {"name": "c", "uid": "c"}, "spec": {**body, **spec}})


def a_pool(**spec: object) -> NodePool:
    body = {"providers": [{"name": "modal"}], **spec}
    return NodePool.model_validate({"metadata": {"name": "gpu"}, "spec": body})


def a_skip(reason: SkipReason, *, region: str | None = "r1") -> Skip:
    return Skip(
        provider="modal", account="default", region=region, tier=Tier.SPOT, reason=reason, detail="so it is"
    )


HERE = Candidate(provider="modal", account="default", region="r1", tier=Tier.SPOT, accelerator=None)
ELSEWHERE = Candidate(provider="modal", account="default", region="r2", tier=Tier.SPOT, accelerator=None)
DEARER = Candidate(provider="modal", account="default", region="r1", tier=Tier.ON_DEMAND, accelerator=None)


@pytest.mark.parametrize(
    ("places", "lasting"),
    [
        ([HERE], None),
        ([ELSEWHERE, HERE], None),
        ([ELSEWHERE, DEARER], True),
        ([], True),
        ([a_skip(SkipReason.NODE_UNAVAILABLE, region=None)], False),
        ([a_skip(SkipReason.NAMESPACE_NOT_ALLOWED, region=None)], True),
        ([a_skip(SkipReason.EGRESS_POLICY_UNSUPPORTED, region=None)], True),
        ([a_skip(SkipReason.LIMIT)], None),
        ([a_skip(SkipReason.BLOCKED)], None),
        ([a_skip(SkipReason.ACCELERATOR_UNSUPPORTED)], None),
        ([a_skip(SkipReason.PROVIDER_UNREGISTERED, region=None)], None),
    ],
    ids=[
        "the-choice",
        "not-the-first-choice-any-more",
        "region-and-tier-taken-out",
        "provider-taken-out",
        "node-unavailable",
        "namespace-not-allowed",
        "egress",
        "over-the-limit-with-it",
        "blocked",
        "sold-out-meanwhile",
        "account-not-open",
    ],
)
def test_only_what_the_pool_forbids_counts_against_a_machine_that_is_rented(
    places: list[Place], lasting: bool | None
) -> None:
    objection = objection_to(a_claim(), pool=a_pool(), places=places, usd_per_hour=Decimal(2), rented=True)

    assert (objection.lasting if objection else None) is lasting


@pytest.mark.parametrize(
    ("own", "ceiling", "price", "rented", "allowed"),
    [
        (None, None, None, True, True),
        (None, "3", Decimal("2"), True, True),
        (None, "3", Decimal("4"), True, False),
        (None, "3", None, True, False),
        ("5", "3", Decimal("2"), True, True),
        ("5", "3", None, False, False),
        ("3", "3", None, False, True),
        ("2", "3", None, True, True),
    ],
)
def test_a_ceiling_that_was_lowered_holds_for_what_is_not_let_go_yet(
    own: str | None, ceiling: str | None, price: Decimal | None, rented: bool, allowed: bool
) -> None:
    claim = a_claim(**({"maxPrice": own} if own else {}))
    pool = a_pool(**({"maxPrice": ceiling} if ceiling else {}))

    objection = objection_to(claim, pool=pool, places=[HERE], usd_per_hour=price, rented=rented)

    assert (objection is None) is allowed


def test_an_egress_policy_that_has_changed_takes_the_claim_back() -> None:
    objection = objection_to(
        a_claim(), pool=a_pool(egress={"mode": "Blocked"}), places=[HERE], usd_per_hour=None, rented=True
    )

    assert objection is not None
    assert objection.lasting
