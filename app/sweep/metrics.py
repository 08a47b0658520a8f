"""What is shown of sweeps. Labels are kinds, providers and rails, never the name of anything."""

from collections import Counter as Count
from collections import defaultdict
from collections.abc import Mapping
from decimal import Decimal

from prometheus_client import Counter, Gauge, Histogram

from app.sweep.model import Judgement, Kind

BUCKETS_S = (1, 5, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 14400, 86400)
ORPHANS = Gauge("nebula_orphans", "Open findings of the sweep.", ("kind", "provider"))
BURN = Gauge(
    "nebula_orphan_burn_rate_usd_per_hour",
    "What machines of ours without an owner cost an hour, those without a known price left out.",
    ("provider",),
)
RUNS = Counter(
    "nebula_sweep_runs", "Sweeps, by whether the provider's lists were whole.", ("provider", "result")
)
BLOCKED = Counter("nebula_sweep_blocked", "Findings that a rail has newly held back.", ("reason",))
BLOCKED_NOW = Gauge("nebula_sweep_blocked_findings", "Findings that a rail holds back now.", ("reason",))
LAST_COMPLETE = Gauge(
    "nebula_sweep_last_complete_timestamp_seconds", "The last sweep with whole lists.", ("provider",)
)
REPORT_ONLY = Gauge("nebula_sweep_report_only", "1 while nothing would be ended unapproved.")
OTHERS = Gauge(
    "nebula_sweep_other_installations", "Other installations with machines in the account.", ("provider",)
)
PROTECTED = Gauge(
    "nebula_sweep_protected_age_seconds", "The age of the oldest protected machine.", ("provider",)
)
DETECT = Histogram(
    "nebula_orphan_detect_seconds", "From a machine's birth to its finding.", buckets=BUCKETS_S
)
GONE = Histogram(
    "nebula_orphan_gone_seconds", "From a finding to the machine's proven end.", buckets=BUCKETS_S
)
UNEXPLAINED = Gauge(
    "nebula_unexplained_spend_usd", "Dollars on the clouds' bills of seven days that no machine explains."
)
UNEXPLAINED_SHARE = Gauge(
    "nebula_unexplained_spend_ratio",
    "The largest part of a closed day's bill, of seven days, that no machine explains.",
)
BOUND = Gauge(
    "nebula_orphan_bound_seconds", "Within so long an orphan of ours has ended.", ("provider", "account")
)

_BURNS = (
    Kind.NO_CLAIM,
    Kind.DUPLICATE,
    Kind.STALE_ATTEMPT,
    Kind.DAMAGED,
    Kind.TERMINATING_SLOW,
    Kind.STOPPED_BILLING,
)


def show(judgement: Judgement, *, whole: Mapping[str, bool], report_only: bool, now: float) -> None:
    """Show one sweep's result; ``whole``: of each provider, if all of its lists were; ``now``: unix time."""
    counts = Count((one.kind, one.provider) for one in judgement.findings)
    burn: dict[str, Decimal] = defaultdict(Decimal)
    protected: dict[str, float] = {}
    for one in judgement.findings:
        if one.kind in _BURNS:
            burn[one.provider] += one.usd_per_hour or 0
        if one.blocked_by == "protect":
            age_s = now - one.since.timestamp()
            protected[one.provider] = max(age_s, protected.get(one.provider, 0.0))
    ORPHANS.clear()
    BLOCKED_NOW.clear()
    OTHERS.clear()
    PROTECTED.clear()
    for (kind, provider), count in counts.items():
        ORPHANS.labels(kind=kind.value, provider=provider).set(count)
    for reason, count in judgement.blocked.items():
        BLOCKED_NOW.labels(reason=reason).set(count)
    for provider, age_s in protected.items():
        PROTECTED.labels(provider=provider).set(age_s)
    for provider, complete in whole.items():
        BURN.labels(provider=provider).set(float(burn[provider]))
        RUNS.labels(provider=provider, result="complete" if complete else "incomplete").inc()
        if complete:
            LAST_COMPLETE.labels(provider=provider).set(now)
        others = {one.installation for one in judgement.not_ours if one.provider == provider}
        OTHERS.labels(provider=provider).set(len(others - {None}))
    REPORT_ONLY.set(int(report_only))


def clear() -> None:
    """Show nothing: another replica leads, and shows it."""
    for gauge in (ORPHANS, BURN, BLOCKED_NOW, LAST_COMPLETE, OTHERS, PROTECTED, BOUND):
        gauge.clear()
    REPORT_ONLY.set(0)
