"""What renting counts. Labels are those of placement's series, so that both of one Pod can be joined.

An attempt is a request that was sent: the claim was marked for it. Every attempt is counted once, with one
duration from its mark to its outcome; a failure files exactly one reason of a closed set.
"""

from prometheus_client import Counter, Histogram

from app.api.reasons import ProvisionFailure
from app.provisioning.model import ClaimSpec, Outcome, Refused, Rented, Waiting, Why
from providers.base import RejectionKind

NONE = "none"
CANDIDATE_LABELS = ("provider", "region", "capacity_type", "accelerator", "accelerator_count")
DURATION_BUCKETS_S = (0.5, 1, 2.5, 5, 10, 20, 30, 45, 60, 90, 120, 180, 300)
READY_BUCKETS_S = (5, 10, 20, 30, 45, 60, 90, 120, 180, 300, 600, 900, 1800)

ATTEMPTS = Counter(
    "nebula_provision_attempts", "Requests to rent that were sent.", (*CANDIDATE_LABELS, "result")
)
FAILURES = Counter("nebula_provision_failures", "Those that failed.", (*CANDIDATE_LABELS, "reason"))
DURATION = Histogram(
    "nebula_provision_duration_seconds",
    "From the mark on the claim to the answer.",
    (*CANDIDATE_LABELS, "result"),
    buckets=DURATION_BUCKETS_S,
)
READY = Histogram(
    "nebula_instance_ready_duration_seconds",
    "From the claim's creation to a reachable machine.",
    CANDIDATE_LABELS,
    buckets=READY_BUCKETS_S,
)

TERMINATE_FAILURES = Counter(
    "nebula_terminate_failures", "Terminates that a cloud did not take.", ("provider", "reason")
)

_REJECTIONS = {
    RejectionKind.CAPACITY: ProvisionFailure.CAPACITY,
    RejectionKind.QUOTA: ProvisionFailure.QUOTA,
    RejectionKind.AUTH: ProvisionFailure.AUTH,
    RejectionKind.UNSUPPORTED: ProvisionFailure.UNSUPPORTED_ACCELERATOR,
}


def attempted(claim: ClaimSpec, outcome: Outcome, *, took_s: float) -> None:
    """Count one request that was sent. Whatever came after the mark without a send counts nothing."""
    reason = _failure(outcome)
    if reason is None and not isinstance(outcome, Rented):
        return
    labels = candidate_labels(claim)
    result = "success" if reason is None else "failure"
    ATTEMPTS.labels(**labels, result=result).inc()
    DURATION.labels(**labels, result=result).observe(max(0.0, took_s))
    if reason is not None:
        FAILURES.labels(**labels, reason=reason.value).inc()


def became_ready(claim: ClaimSpec, *, took_s: float) -> None:
    """Count a machine that was reachable for the first time, ``took_s`` after its claim was made."""
    READY.labels(**candidate_labels(claim)).observe(max(0.0, took_s))


def candidate_labels(claim: ClaimSpec) -> dict[str, str]:
    """The labels of one candidate; what the claim does not carry is ``none``."""
    return {
        "provider": claim.provider,
        "region": claim.region or NONE,
        "capacity_type": claim.tier.value,
        "accelerator": claim.accelerator.type if claim.accelerator else NONE,
        "accelerator_count": str(claim.accelerator.count) if claim.accelerator else NONE,
    }


def _failure(outcome: Outcome) -> ProvisionFailure | None:
    match outcome:
        case Refused(kind=kind):
            return _REJECTIONS.get(kind, ProvisionFailure.OTHER)
        case Waiting(why=Why.UNKNOWN, message=message):
            late = "timeout" in message.lower().replace("-", "").replace(" ", "")
            return ProvisionFailure.TIMEOUT if late else ProvisionFailure.UNREACHABLE
        case Waiting(why=Why.THROTTLED):
            return ProvisionFailure.QUOTA
        case _:
            return None
