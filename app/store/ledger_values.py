"""The values of the ledger: what is read of runs, and what is written of money. Amounts are exact.

Times are aware UTC. What is the cloud's word, what ours and what a person's is in the names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Context, Decimal
from typing import Any, Protocol

from providers.base import BillingRule, MeterKind

ANY = "*"
EXACT = Context(prec=200)
"""Sums and products of prices, quantities and microseconds fit many times over."""
Covered = Sequence[tuple[int, datetime, datetime]]
"""Pieces of prepayments that cover a run: commitment, start, end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeterFact:
    """One meter as it was told: ``quantity`` units at ``usd`` dollars a unit-hour, None when not told."""

    kind: MeterKind
    label: str
    quantity: Decimal
    usd: Decimal | None

    @property
    def key(self) -> tuple[MeterKind, str]:
        return (self.kind, self.label)


class Fitting(Protocol):
    """What says whether a price that a person has set is one of a machine."""

    @property
    def id(self) -> int: ...
    @property
    def provider(self) -> str: ...
    @property
    def account(self) -> str: ...
    @property
    def sku(self) -> str: ...
    @property
    def accelerator(self) -> str: ...
    @property
    def tier(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRun:
    """One run with all that its money depends on. Times named ``provider_`` are the cloud's clock.

    ``listed``: the shape's on-demand meters as listed when it began; ``catalog``: those of its own tier.
    ``stops``: (ended, again); ``repriced``: (at, meters). ``last_seen_at``: the last complete list with it.
    """

    id: int
    claim_uid: str
    provider: str
    account: str
    resource_id: str
    region: str
    tier: str
    accelerator: str
    sku: str
    meters: tuple[MeterFact, ...] = ()
    repriced: tuple[tuple[datetime, tuple[MeterFact, ...]], ...] = ()
    stops: tuple[tuple[datetime, datetime], ...] = ()
    listed: tuple[MeterFact, ...] = ()
    catalog: tuple[MeterFact, ...] = ()
    clock_offset_s: float | None = None
    requested_at: datetime | None = None
    accepted_at: datetime | None = None
    first_seen_at: datetime | None = None
    running_at: datetime | None = None
    exited_at: datetime | None = None
    terminate_asked_at: datetime | None = None
    gone_at: datetime | None = None
    last_seen_at: datetime | None = None
    provider_created_at: datetime | None = None
    provider_started_at: datetime | None = None
    provider_ended_at: datetime | None = None
    end_reason: str | None = None
    exit_code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """The columns of one attribution."""

    namespace: str
    workload_kind: str
    workload_name: str
    team: str
    cost_center: str
    pool: str
    provider: str
    account: str
    account_id: str
    region: str
    sku: str
    tier: str
    accelerator: str
    accelerator_count: int
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRow:
    """One row of ``billing_segment``, as text of the wire where that keeps it exact."""

    meter: str
    phase: str
    start: datetime
    end: datetime | None
    quantity: Decimal
    usd: Decimal | None
    list_usd: Decimal | None
    price_source: str
    confidence: str
    why: str
    commitment_id: int | None
    gpus: int = 0
    frozen: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdjustmentRow:
    """One row of ``billing_adjustment``.

    ``unpriced_seconds``: those of ``seconds`` that have no price. ``unpriced``: what of its meter's frozen
    time has none from now on, as Postgres writes a multirange; None: as before.
    """

    key: str
    meter: str
    phase: str
    kind: str
    at: datetime
    seconds: Decimal
    dollar_seconds: Decimal | None
    list_dollar_seconds: Decimal | None
    reason: str
    unpriced_seconds: Decimal = Decimal(0)
    unpriced: str | None = None
    commitment_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjusted:
    """Sums of what was adjusted: seconds, dollar-seconds as far as priced, and as listed."""

    seconds: Decimal = Decimal(0)
    dollar_seconds: Decimal = Decimal(0)
    list_dollar_seconds: Decimal = Decimal(0)
    unpriced_seconds: Decimal = Decimal(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What is written of a run: its segments, and the sums of the adjustments that were derived.

    ``adjusted``: by meter and commitment. ``billed``: the cloud's own final bill was compared with it, and
    has the last word.
    """

    segments: tuple[SegmentRow, ...]
    adjusted: Mapping[tuple[str, int | None], Adjusted]
    adjustments: int
    closed: bool
    label_set_id: int | None
    ended_at: datetime | None
    billed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """One run that must be derived again."""

    run: LedgerRun
    labels: Mapping[str, Any]  # of the claim and the run: see `app.ledger.labels`
    changed_at: datetime
    rules: tuple[BillingRule, ...]
    held: Held
    is_current: bool = False  # what is written was made from these very facts
    closed_month: date | None = None  # the newest closed one: nothing before its end is written any more

    @property
    def closed_until(self) -> datetime | None:
        """The end of the closed months."""
        month = self.closed_month
        if month is None:
            return None
        return datetime(month.year + month.month // 12, month.month % 12 + 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """A price that a person has set for whole machines, ``ends_at`` None: until further notice."""

    id: int
    provider: str
    account: str
    sku: str
    tier: str
    usd_per_hour: Decimal
    starts_at: datetime
    ends_at: datetime | None

    def fits(self, run: Fitting) -> bool:
        return _fits(self, run)

    def holds(self, at: datetime) -> bool:
        return self.starts_at <= at and (self.ends_at is None or at < self.ends_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class Commitment:
    """What a term that was paid for in advance covers: so many ``machines`` at once, None for any number."""

    id: int
    provider: str
    account: str
    sku: str
    tier: str
    usd_per_hour: Decimal
    amount_usd: Decimal
    machines: int | None
    starts_at: datetime
    ends_at: datetime

    def fits(self, run: Fitting) -> bool:
        return _fits(self, run)

    def holds(self, at: datetime) -> bool:
        return self.starts_at <= at < self.ends_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Everything that people have set, most special first; ``void``: prepayments that were none."""

    overrides: tuple[Override, ...]
    commitments: tuple[Commitment, ...]
    changed_at: datetime
    void: frozenset[int] = frozenset()


def _fits(each: Override | Commitment, run: Fitting) -> bool:
    return (
        each.provider == run.provider
        and each.account in (ANY, run.account)
        and (each.sku == ANY or each.sku.lower() in (run.sku.lower(), run.accelerator.lower()))
        and each.tier in (ANY, run.tier)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """One run's part of a tick. ``gone`` and ``new`` are the segments that differ, by their starts."""

    run_id: int
    changed_at: datetime
    closed_month: date | None
    labels: Labels
    label_hash: str
    rules: Sequence[BillingRule]
    gone: Sequence[SegmentRow]
    new: Sequence[SegmentRow]
    adjustments: Sequence[AdjustmentRow]
    closed: bool
    ended_at: datetime | None
    begun_at: datetime | None
    over_at: datetime | None
    covered: Covered
