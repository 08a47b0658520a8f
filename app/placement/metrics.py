"""What placement counts. A value that a request does not carry is ``none``; no label is a Pod's name."""

from collections.abc import Iterable

from prometheus_client import Counter, Histogram

from app.api.reasons import DeferralReason
from app.placement.rank import Candidate, Place, Skip

NONE = "none"
CANDIDATE_LABELS = ("provider", "region", "capacity_type", "accelerator", "accelerator_count")
WAIT_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)

DECISIONS = Counter(
    "nebula_placement_decisions", "Pods placed: the gate was lifted towards this candidate.", CANDIDATE_LABELS
)
WAIT = Histogram(
    "nebula_placement_wait_duration_seconds",
    "From the Pod's creation to the lifted gate.",
    CANDIDATE_LABELS,
    buckets=WAIT_BUCKETS_S,
)
DEFERRALS = Counter(
    "nebula_placement_deferrals", "Looks at a gated Pod that left it gated.", ("pool", "reason")
)
SKIPS = Counter(
    "nebula_placement_candidate_skips",
    "Places passed over in a walk.",
    ("provider", "capacity_type", "region", "reason"),
)


def placed(candidate: Candidate, *, waited_s: float) -> None:
    """Count one lifted gate, ``waited_s`` after the Pod was created."""
    labels = candidate_labels(candidate)
    DECISIONS.labels(**labels).inc()
    WAIT.labels(**labels).observe(max(0.0, waited_s))


def deferred(reason: DeferralReason, *, pool: str | None) -> None:
    """Count one look without a placement; ``pool`` only if it exists, for free text is no label value."""
    DEFERRALS.labels(pool=pool or NONE, reason=reason.value).inc()


def skipped(places: Iterable[Place]) -> None:
    """Count every place that a walk passed over."""
    for place in places:
        if isinstance(place, Skip):
            SKIPS.labels(
                provider=place.provider,
                capacity_type=place.tier.value,
                region=place.region or NONE,
                reason=place.reason.value,
            ).inc()


def candidate_labels(candidate: Candidate) -> dict[str, str]:
    """The labels that all of one placement's series share."""
    accelerator = candidate.accelerator
    return {
        "provider": candidate.provider,
        "region": candidate.region or NONE,
        "capacity_type": candidate.tier.value,
        "accelerator": accelerator.type if accelerator else NONE,
        "accelerator_count": str(accelerator.count) if accelerator else NONE,
    }
