"""What is shown of claims as a whole. Labels are providers and phases, never a claim's or a Pod's name."""

from collections.abc import Iterable

from prometheus_client import Gauge

from app.kube.client import Obj

NO_PHASE = "none"
CLAIMS = Gauge(
    "nebula_claims", "NodeClaims there are, by the phase that their status shows.", ("provider", "phase")
)
KEPT = Gauge(
    "nebula_claims_unreleasable",
    "NodeClaims that only a person can let go (account not configured, machine in doubt): machines may run.",
    ("provider",),
)


def begin(claims: Iterable[Obj]) -> None:
    """Count anew: what an earlier term has counted is forgotten."""
    clear()
    for claim in claims:
        CLAIMS.labels(*_labels(claim)).inc()


def changed(old: Obj | None, new: Obj | None) -> None:
    """Follow one change of the claims' cache."""
    before, after = (_labels(obj) if obj is not None else None for obj in (old, new))
    if before == after:
        return
    if before is not None:
        CLAIMS.labels(*before).dec()
    if after is not None:
        CLAIMS.labels(*after).inc()


def clear() -> None:
    """Show nothing: another replica leads, and shows it."""
    CLAIMS.clear()
    KEPT.clear()


def _labels(claim: Obj) -> tuple[str, str]:
    return claim["spec"]["provider"], (claim.get("status") or {}).get("phase") or NO_PHASE
