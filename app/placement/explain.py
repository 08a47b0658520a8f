"""What a ranking means: the reason that is counted, the sentence on the Pod, the row for the record. Pure.

The text depends on the ranking alone, so an unchanged situation gives an unchanged text and no write.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from app.api.nodepool import NodePoolSpec, Strategy
from app.api.reasons import DeferralReason, SkipReason
from app.placement.rank import Candidate, Place, Skip, chosen
from app.placement.request import PlacementRequest
from app.store.decisions import Decision

PLACED = "placed"  # the outcome of a decision that is no deferral
EXAMPLES = 3  # places named for each reason; the decision row has them all

NEVER = "the NodePool can never serve this Pod as both are now: change one of them"

WORDS = {
    SkipReason.PROVIDER_UNREGISTERED: "not configured",
    SkipReason.CAPACITY_TYPE_UNSUPPORTED: "without this capacity type",
    SkipReason.ACCELERATOR_UNSUPPORTED: "without the accelerator",
    SkipReason.EGRESS_POLICY_UNSUPPORTED: "unable to enforce the egress policy",
    SkipReason.BLOCKED: "blocked",
    SkipReason.PRICE: "too dear",
    SkipReason.LIMIT: "over the pool's limit",
    SkipReason.BUDGET: "over budget",
    SkipReason.LIFETIME: "too short-lived",
    SkipReason.COMPLETION: "unable to tell the end of the work",
    SkipReason.REQUEST_UNSUPPORTED: "unable to run the Pod",
    SkipReason.NODE_UNAVAILABLE: "without an available node",
    SkipReason.NAMESPACE_NOT_ALLOWED: "closed to the namespace",
}


def deferral_of(places: Sequence[Place]) -> DeferralReason:
    """Which deferral a ranking without candidate is: blocked if waiting alone can end it."""
    blocked = any(isinstance(place, Skip) and place.reason is SkipReason.BLOCKED for place in places)
    return DeferralReason.ALL_BLOCKED if blocked else DeferralReason.NO_CANDIDATE


def soonest_expiry(places: Sequence[Place]) -> datetime | None:
    """When the first blocked place becomes free again."""
    return min(
        (place.until for place in places if isinstance(place, Skip) and place.until is not None), default=None
    )


def unusable(pool: NodePoolSpec) -> str | None:
    """Why nothing can be placed from this pool, whatever is asked and offered; None if something can.

    The API server refuses such a pool; this is for one that was stored before it did.
    """
    if pool.strategy is Strategy.WEIGHTED and any(entry.weight is None for entry in pool.providers):
        return "strategy Weighted requires a weight on every provider"
    return None


def hopeless(places: Sequence[Place]) -> bool:
    """Whether no place can ever serve the request: only another pool, Pod or catalogue could mend that."""
    return bool(places) and all(isinstance(place, Skip) and place.for_good for place in places)


def sentence(places: Sequence[Place]) -> str:
    """``0 of 3 candidates: 2 blocked until 12:00:05 UTC (modal Spot: capacity; …), 1 not configured (…)``."""
    skips = [place for place in places if isinstance(place, Skip)]
    parts = []
    for reason in dict.fromkeys(skip.reason for skip in skips):
        parts.append(_part(reason, [skip for skip in skips if skip.reason is reason]))
    text = f"{len(places) - len(skips)} of {len(places)} candidates: {', '.join(parts)}"
    return f"{text}; {NEVER}" if hopeless(places) else text


def decision_of(request: PlacementRequest, pool: str, places: list[Place]) -> Decision:
    """The row for one ranking: every place, in the order of trying."""
    candidate = chosen(places)
    shown = [
        {
            "provider": place.provider,
            "account": place.account,
            "region": place.region,
            "tier": place.tier.value,
            "price": place.usd_per_hour,
            "skip": place.reason.value if isinstance(place, Skip) else None,
            "detail": place.detail if isinstance(place, Skip) else _record(place),
            **(_for_later(place) if isinstance(place, Skip) else {}),
        }
        for place in places
    ]
    return Decision(
        pod_namespace=request.namespace,
        pod_name=request.name,
        pod_uid=request.uid,
        pool=pool,
        outcome=PLACED if candidate else deferral_of(places).value,
        provider=candidate.provider if candidate else None,
        account=candidate.account if candidate else None,
        region=candidate.region if candidate else None,
        tier=candidate.tier.value if candidate else None,
        usd_per_hour=candidate.usd_per_hour if candidate else None,
        candidates=shown,
    )


def _for_later(skip: Skip) -> dict[str, Any]:
    """What `app.placement.remedies` wants to know. No times: an extended block is no new decision."""
    known: dict[str, Any] = {"for_good": True} if skip.for_good else {}
    # Ids below 0 are no rows: what only this Pod avoids.
    return known | ({"blocks": [row for row in skip.blocks if row > 0]} if skip.blocks else {})


def _record(candidate: Candidate) -> str:
    if not candidate.refusals:
        return ""
    return (
        f"its last {candidate.refusals} orders were refused"
        if candidate.refusals > 1
        else ("its last order was refused")
    )


def _part(reason: SkipReason, skips: Sequence[Skip]) -> str:
    examples = [f"{skip}: {skip.detail}" if skip.detail else str(skip) for skip in skips[:EXAMPLES]]
    if len(skips) > EXAMPLES:
        examples.append("…")
    until = soonest_expiry(skips)
    when = f" until {until:%H:%M:%S} UTC" if until else ""
    return f"{len(skips)} {WORDS[reason]}{when} ({'; '.join(examples)})"
