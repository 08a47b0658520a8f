"""The tables of money, written by ledger/; people write overrides, budgets and prepayments.

Amounts are dollar-seconds (dollars an hour x units x seconds), never rounded: whoever shows dollars divides
by 3600, once. Periods are half-open. What may not happen is a constraint here: two prices for one thing at
one time, one second of a meter billed twice, a closed segment changed, an adjustment taken back.
"""

from datetime import date, datetime
from decimal import Decimal
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Computed,
    Date,
    ForeignKey,
    Identity,
    Index,
    Integer,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import (
    ARRAY,
    JSONB,
    TSTZMULTIRANGE,
    TSTZRANGE,
    ExcludeConstraint,
    Range,
)
from sqlalchemy.orm import Mapped, mapped_column

from app.store import ledger_guards as _ledger_guards  # noqa: F401 (they are made with the tables)
from app.store import ledger_sum_tables as _ledger_sum_tables  # noqa: F401 (they join the metadata)
from app.store.tables import NOW, Base

_PERIOD = TSTZRANGE()
_CURRENCY = "currency = 'USD'"  # one currency: what comes in another is refused, never added up


def _id() -> Any:
    return mapped_column(BigInteger, Identity(always=True), primary_key=True)


class LabelSet(Base):
    """Who a second of a machine is put down to, as it was when the money was spent."""

    __tablename__ = "label_set"
    __table_args__ = (
        UniqueConstraint("hash"),
        {"comment": "One row for each distinct attribution. Never changed. Written by ledger/."},
    )

    id: Mapped[int] = _id()
    hash: Mapped[str] = mapped_column(comment="of all other columns: equal attributions share a row")
    namespace: Mapped[str] = mapped_column(comment="of the Pod; empty: nobody's, a machine without a claim")
    workload_kind: Mapped[str] = mapped_column(comment="of what controls the Pod, Pod for a bare one")
    workload_name: Mapped[str]
    team: Mapped[str] = mapped_column(comment="the Pod's team label; empty without one")
    cost_center: Mapped[str] = mapped_column(comment="the Pod's cost centre label; empty without one")
    pool: Mapped[str]
    provider: Mapped[str]
    account: Mapped[str]
    account_id: Mapped[str] = mapped_column(comment="the cloud's own id of the account; empty if not told")
    region: Mapped[str] = mapped_column(comment="the machine's own")
    sku: Mapped[str] = mapped_column(comment="the cloud's id of the shape; empty if not known")
    tier: Mapped[str] = mapped_column(comment="Spot or OnDemand, as it was bought")
    accelerator: Mapped[str] = mapped_column(comment="empty: none")
    accelerator_count: Mapped[int] = mapped_column(Integer)
    tags: Mapped[dict[str, Any]] = mapped_column(
        JSONB, server_default=text("'{}'::jsonb"), comment="the Pod's own labels, flat"
    )


class LedgerRun(Base):
    """What the ledger has made of a run so far."""

    __tablename__ = "ledger_run"
    __table_args__ = (
        Index("ledger_run_open_idx", "run_id", postgresql_where=text("closed_at is null")),
        Index(
            "ledger_run_waste_idx",
            "run_id",
            postgresql_where=text("closed_at is not null and waste_at is null"),
        ),
        Index("ledger_run_unbilled_idx", "closed_at", postgresql_where=text("billed_at is null")),
        {"comment": "One row a run that has been derived. Written by ledger/."},
    )

    run_id: Mapped[int] = mapped_column(
        BigInteger, ForeignKey("run.id", ondelete="RESTRICT"), primary_key=True, autoincrement=False
    )
    label_set_id: Mapped[int] = mapped_column(BigInteger, ForeignKey("label_set.id"))
    facts_at: Mapped[datetime] = mapped_column(comment="run.changed_at of the facts that were read")
    prices_at: Mapped[datetime] = mapped_column(comment="when overrides and prepayments were read")
    derived_at: Mapped[datetime] = mapped_column(server_default=NOW)
    closed_at: Mapped[datetime | None] = mapped_column(
        comment="its segments are frozen: from then on there are adjustments only"
    )
    ended_at: Mapped[datetime | None] = mapped_column(comment="the last billed instant of a closed run")
    billed_at: Mapped[datetime | None] = mapped_column(
        comment="its cloud's own, final bill was compared with it"
    )
    dropped_at: Mapped[datetime | None] = mapped_column(
        comment="segments of it are past their retention: never derived again"
    )
    rules: Mapped[list[Any]] = mapped_column(comment="the cloud's billing rules that were used")
    begun_at: Mapped[datetime | None] = mapped_column(comment="the machine's first instant, as derived")
    over_at: Mapped[datetime | None] = mapped_column(comment="its last; null: it goes on")
    waste_at: Mapped[datetime | None] = mapped_column(
        comment="when its waste was added to the counters, once it was over"
    )
    covered: Mapped[list[Any]] = mapped_column(
        server_default=text("'[]'::jsonb"), comment="by prepayments: commitment, start, end"
    )


class BillingRuleRow(Base):
    """How a cloud turns a run into billed seconds, as its adapter declares it."""

    __tablename__ = "billing_rule"
    __table_args__ = ({"comment": "One row a provider account: its adapter's rules. Written by ledger/."},)

    provider: Mapped[str] = mapped_column(primary_key=True)
    account: Mapped[str] = mapped_column(primary_key=True)
    rules: Mapped[list[Any]] = mapped_column(
        comment="kind (null: all others), starts, until, step_s, minimum_s, reclaim_free_s, stopped_times"
    )
    bills: Mapped[bool] = mapped_column(Boolean, comment="whether the cloud tells afterwards what it charged")
    observed_at: Mapped[datetime] = mapped_column(server_default=NOW)
    bill_at: Mapped[datetime | None] = mapped_column(comment="when its bill was fetched last")


class PricePoint(Base):
    """One listed price over the time in which it was listed."""

    __tablename__ = "price_point"
    __table_args__ = (
        ExcludeConstraint(
            ("provider", "="),
            ("account", "="),
            ("sku", "="),
            ("region", "="),
            ("tier", "="),
            ("meter", "="),
            ("valid", "&&"),
            using="gist",
            name="price_point_one_price_excl",
        ),
        Index(
            "price_point_listed_idx",
            "provider",
            "account",
            "sku",
            "region",
            "tier",
            postgresql_where=text("upper_inf(valid)"),
        ),
        CheckConstraint("usd is null or usd >= 0", name="usd"),
        CheckConstraint(_CURRENCY, name="currency"),
        CheckConstraint("not isempty(valid)", name="valid"),
        {"comment": "What clouds and the catalogue list, each price with its time. Written by ledger/."},
    )

    id: Mapped[int] = _id()
    provider: Mapped[str]
    account: Mapped[str]
    sku: Mapped[str] = mapped_column(comment="the cloud's id of the shape")
    region: Mapped[str]
    tier: Mapped[str]
    meter: Mapped[str] = mapped_column(comment="kind, or kind:label")
    unit: Mapped[str] = mapped_column(comment="unit-hour, or GiB for bytes")
    quantity: Mapped[Decimal] = mapped_column(comment="how many units the shape has")
    usd: Mapped[Decimal | None] = mapped_column(comment="dollars a unit; null: listed without a price")
    currency: Mapped[str] = mapped_column(server_default=text("'USD'"))
    valid: Mapped[Range[datetime]] = mapped_column(_PERIOD, comment="unbounded above: listed now")
    source: Mapped[str] = mapped_column(comment="catalog: the file's row or the cloud's own list")
    observed_at: Mapped[datetime] = mapped_column(server_default=NOW, comment="when it was seen last")


class PriceOverride(Base):
    """A price that a person has set, a contract's for example."""

    __tablename__ = "price_override"
    __table_args__ = (
        ExcludeConstraint(
            ("provider", "="),
            ("account", "="),
            ("sku", "="),
            ("tier", "="),
            ("valid", "&&"),
            using="gist",
            name="price_override_one_price_excl",
        ),
        CheckConstraint("usd_per_hour >= 0", name="usd"),
        CheckConstraint(_CURRENCY, name="currency"),
        CheckConstraint("not isempty(valid) and not lower_inf(valid)", name="valid"),
        {"comment": "Prices that people have set: used exactly, zero too. Written by nebula cost override."},
    )

    id: Mapped[int] = _id()
    provider: Mapped[str]
    account: Mapped[str] = mapped_column(comment="* for every account of the provider")
    sku: Mapped[str] = mapped_column(comment="* for every shape; else the cloud's id or type:count")
    tier: Mapped[str] = mapped_column(comment="* for both")
    usd_per_hour: Mapped[Decimal] = mapped_column(comment="for the whole machine")
    currency: Mapped[str] = mapped_column(server_default=text("'USD'"))
    valid: Mapped[Range[datetime]] = mapped_column(_PERIOD)
    set_by: Mapped[str]
    reason: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    changed_at: Mapped[datetime] = mapped_column(server_default=NOW)


class Commitment(Base):
    """Something bought in advance: usage that it covers is not billed again."""

    __tablename__ = "commitment"
    __table_args__ = (
        CheckConstraint("amount_usd >= 0 and usd_per_hour >= 0", name="usd"),
        CheckConstraint("machines > 0", name="machines"),
        CheckConstraint(_CURRENCY, name="currency"),
        CheckConstraint("not isempty(valid) and not lower_inf(valid) and not upper_inf(valid)", name="valid"),
        CheckConstraint("(voided_at is null) = (reversed_at is null)", name="void"),
        {"comment": "Prepayments and reservations. Written by nebula cost commitment."},
    )

    id: Mapped[int] = _id()
    provider: Mapped[str]
    account: Mapped[str]
    sku: Mapped[str] = mapped_column(comment="what it covers: * for every shape; else its id or type:count")
    tier: Mapped[str] = mapped_column(comment="* for both")
    amount_usd: Mapped[Decimal] = mapped_column(comment="paid, once, when the term begins")
    usd_per_hour: Mapped[Decimal] = mapped_column(
        comment="what an hour of a covered machine takes from the amount"
    )
    machines: Mapped[int | None] = mapped_column(
        Integer, comment="how many it covers at once; null: any number, until the amount is used"
    )
    purchased_at: Mapped[datetime] = mapped_column(
        server_default=NOW, comment="the instant in which it is billed: its beginning, unless that is closed"
    )
    currency: Mapped[str] = mapped_column(server_default=text("'USD'"))
    valid: Mapped[Range[datetime]] = mapped_column(_PERIOD, comment="the term")
    label_set_id: Mapped[int] = mapped_column(
        BigInteger, ForeignKey("label_set.id"), comment="nobody's, of that account"
    )
    set_by: Mapped[str]
    reason: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    changed_at: Mapped[datetime] = mapped_column(server_default=NOW)
    voided_at: Mapped[datetime | None] = mapped_column(
        comment="since when it counts as noted by mistake, and covers nothing; null: it holds"
    )
    voided_by: Mapped[str | None]
    void_reason: Mapped[str | None]
    reversed_at: Mapped[datetime | None] = mapped_column(
        comment="the instant in which a void one is taken off: that of its purchase, unless that was closed"
    )
    unused_reversed_at: Mapped[datetime | None] = mapped_column(
        comment="the same of what was unused, where the end of its term was closed; null: there is none of it"
    )


class BillingSegment(Base):
    """One run x meter x phase x price."""

    __tablename__ = "billing_segment"
    __table_args__ = (
        ExcludeConstraint(
            ("run_id", "="),
            ("meter", "="),
            ("period", "&&"),
            using="gist",
            name="billing_segment_once_excl",
        ),
        Index("billing_segment_period_idx", "period", postgresql_using="gist"),
        Index("billing_segment_begins_idx", text("lower(period)")),
        Index("billing_segment_open_idx", "run_id", postgresql_where=text("upper_inf(period)")),
        Index("billing_segment_unpriced_idx", "run_id", postgresql_where=text("usd is null")),
        Index(
            "billing_segment_commitment_idx",
            "commitment_id",
            postgresql_where=text("commitment_id is not null"),
        ),
        CheckConstraint("not isempty(period) and not lower_inf(period)", name="period"),
        CheckConstraint("usd >= 0 and list_usd >= 0 and quantity >= 0", name="usd"),
        CheckConstraint("(usd is null) = (confidence = 'unpriced')", name="unpriced"),
        CheckConstraint("not (frozen and upper_inf(period))", name="frozen"),
        CheckConstraint("phase in ('booting', 'running', 'stopped', 'ending')", name="phase"),
        CheckConstraint(
            "price_source in ('quoted', 'catalog', 'override', 'commitment', 'none')", name="price_source"
        ),
        CheckConstraint("confidence in ('firm', 'estimated', 'guessed', 'unpriced')", name="confidence"),
        {"comment": "Every second of every meter, once. Derived from run. Written by ledger/."},
    )

    id: Mapped[int] = _id()
    run_id: Mapped[int] = mapped_column(BigInteger, ForeignKey("run.id", ondelete="RESTRICT"))
    label_set_id: Mapped[int] = mapped_column(BigInteger, ForeignKey("label_set.id"))
    meter: Mapped[str] = mapped_column(comment="kind, or kind:label")
    phase: Mapped[str] = mapped_column(comment="booting, running, stopped (workload over) or ending")
    period: Mapped[Range[datetime]] = mapped_column(_PERIOD, comment="unbounded above while it runs")
    quantity: Mapped[Decimal] = mapped_column(comment="units")
    usd: Mapped[Decimal | None] = mapped_column(comment="dollars a unit-hour; null: unpriced, not free")
    list_usd: Mapped[Decimal | None] = mapped_column(comment="the same on demand, as listed")
    price_source: Mapped[str]
    confidence: Mapped[str] = mapped_column(comment="firm, estimated, guessed or unpriced")
    why: Mapped[str] = mapped_column(server_default=text("''"), comment="why there is no price")
    commitment_id: Mapped[int | None] = mapped_column(
        BigInteger, ForeignKey("commitment.id"), comment="it is covered by: billed nothing here"
    )
    gpus: Mapped[int] = mapped_column(
        Integer, server_default=text("0"), comment="of the machine; 0 on all its meters but one"
    )
    frozen: Mapped[bool] = mapped_column(Boolean, comment="its run is closed: never changed any more")
    seconds: Mapped[Decimal | None] = mapped_column(
        Computed(
            "case when upper_inf(period) then null"
            " else extract(epoch from upper(period) - lower(period)) end",
            persisted=True,
        ),
        comment="exact; null while it runs",
    )
    dollar_seconds: Mapped[Decimal | None] = mapped_column(
        Computed(
            "case when upper_inf(period) then null"
            " else quantity * usd * extract(epoch from upper(period) - lower(period)) end",
            persisted=True,
        ),
        comment="null while it runs, and without a price",
    )


class BillingSegmentArchive(Base):
    """Frozen segments of months that are long closed, a partition each."""

    __tablename__ = "billing_segment_archive"
    __table_args__ = (
        Index(None, "run_id"),
        Index(
            "billing_segment_archive_times_idx",
            text("lower(period)"),
            text("upper(period)"),
            postgresql_using="brin",
        ),
        Index("billing_segment_archive_unpriced_idx", "run_id", postgresql_where=text("usd is null")),
        Index(
            "billing_segment_archive_commitment_idx",
            "commitment_id",
            postgresql_where=text("commitment_id is not null"),
        ),
        {
            "comment": "Segments of closed months, moved here whole. Never changed; a month is dropped as a"
            " partition. Written by ledger/.",
            "postgresql_partition_by": "RANGE (month)",
        },
    )

    id: Mapped[int] = mapped_column(
        BigInteger, primary_key=True, autoincrement=False, comment="as in billing_segment"
    )
    month: Mapped[date] = mapped_column(
        Date, primary_key=True, comment="the first day of the month in which all of it lies"
    )
    run_id: Mapped[int] = mapped_column(BigInteger)
    label_set_id: Mapped[int] = mapped_column(BigInteger)
    meter: Mapped[str]
    phase: Mapped[str]
    period: Mapped[Range[datetime]] = mapped_column(_PERIOD, comment="cut at the edges of the month")
    quantity: Mapped[Decimal]
    usd: Mapped[Decimal | None]
    list_usd: Mapped[Decimal | None]
    price_source: Mapped[str]
    confidence: Mapped[str]
    why: Mapped[str]
    commitment_id: Mapped[int | None] = mapped_column(BigInteger)
    gpus: Mapped[int] = mapped_column(Integer)
    seconds: Mapped[Decimal]
    dollar_seconds: Mapped[Decimal | None]


class BillingAdjustment(Base):
    """A signed correction that falls whole on one instant."""

    __tablename__ = "billing_adjustment"
    __table_args__ = (
        UniqueConstraint("key"),
        Index(None, "run_id"),
        Index("billing_adjustment_instant_idx", text("tstzrange(at, at, '[]')"), postgresql_using="gist"),
        Index(
            "billing_adjustment_unpriced_idx",
            "run_id",
            "meter",
            "id",
            postgresql_where=text(
                "unpriced is not null or (unpriced_seconds is null and dollar_seconds is not null"
                " and (kind = 'late_price' or (kind = 'late_fact' and seconds < 0)))"
            ),
        ),
        CheckConstraint(
            "kind in ('rounding', 'minimum', 'spot_interrupt_free', 'late_price', 'late_fact',"
            " 'invoice_true_up', 'credit', 'refund', 'tax')",
            name="kind",
        ),
        CheckConstraint(_CURRENCY, name="currency"),
        {"comment": "Signed amounts beside the segments; only ever added. Written by ledger/ and people."},
    )

    id: Mapped[int] = _id()
    key: Mapped[str] = mapped_column(comment="what it is for: the same correction is never written twice")
    run_id: Mapped[int | None] = mapped_column(BigInteger, ForeignKey("run.id", ondelete="RESTRICT"))
    label_set_id: Mapped[int] = mapped_column(BigInteger, ForeignKey("label_set.id"))
    meter: Mapped[str] = mapped_column(server_default=text("''"))
    phase: Mapped[str] = mapped_column(server_default=text("''"))
    kind: Mapped[str]
    at: Mapped[datetime] = mapped_column(comment="the instant in which all of it counts")
    seconds: Mapped[Decimal] = mapped_column(server_default=text("0"), comment="billed more, or less")
    dollar_seconds: Mapped[Decimal | None] = mapped_column(comment="null: there is no price")
    list_dollar_seconds: Mapped[Decimal | None]
    unpriced_seconds: Mapped[Decimal | None] = mapped_column(
        comment="more without a price, or fewer; null: all of its seconds where it has no dollars"
    )
    unpriced: Mapped[Any | None] = mapped_column(
        TSTZMULTIRANGE(), comment="what of its meter's frozen time has no price from here on; null: as before"
    )
    commitment_id: Mapped[int | None] = mapped_column(
        BigInteger, ForeignKey("commitment.id"), comment="it is covered by: billed nothing here"
    )
    currency: Mapped[str] = mapped_column(server_default=text("'USD'"))
    corrects: Mapped[date | None] = mapped_column(
        Date, comment="the first day of the closed month that it corrects; null within an open one"
    )
    invoice: Mapped[str | None]
    reason: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)


class ProviderBillLine(Base):
    """One line of what a cloud says it has charged."""

    __tablename__ = "provider_bill_line"
    __table_args__ = (
        UniqueConstraint("provider", "account", "resource_id", "meter", "starts_at", "ends_at"),
        CheckConstraint(_CURRENCY, name="currency"),
        CheckConstraint("ends_at >= starts_at", name="period"),
        {"comment": "The clouds' own bills, each line once. Written by ledger/."},
    )

    id: Mapped[int] = _id()
    provider: Mapped[str]
    account: Mapped[str]
    resource_id: Mapped[str] = mapped_column(comment="empty: of the account as a whole")
    meter: Mapped[str] = mapped_column(comment="empty: of all meters together")
    starts_at: Mapped[datetime] = mapped_column(comment="the cloud's clock")
    ends_at: Mapped[datetime]
    usd: Mapped[Decimal]
    currency: Mapped[str] = mapped_column(server_default=text("'USD'"))
    identity: Mapped[str | None] = mapped_column(comment="our name, where the bill carries it")
    claim_uid: Mapped[str | None] = mapped_column(comment="parsed from identity, if it is ours")
    final: Mapped[bool] = mapped_column(Boolean, comment="the cloud does not change it any more")
    fetched_at: Mapped[datetime] = mapped_column(server_default=NOW)


class Budget(Base):
    """What may be spent by whom in a period."""

    __tablename__ = "budget"
    __table_args__ = (
        CheckConstraint("amount_usd > 0", name="amount"),
        CheckConstraint("period in ('day', 'week', 'month', 'total')", name="period"),
        CheckConstraint("action in ('Alert', 'RefuseNew', 'RefuseOnDemand', 'Drain')", name="action"),
        CheckConstraint(
            "case when labels = '{}'::jsonb then label_action is null else action = 'Alert' and label_action"
            " in ('Alert', 'RefuseNew', 'RefuseOnDemand', 'Drain') and label_action is not null end",
            name="label_action",
        ),
        CheckConstraint("look_ahead_s >= 0", name="look_ahead"),
        {"comment": "Budgets, those of NodePools among them. Written by ledger/ and nebula budget."},
    )

    name: Mapped[str] = mapped_column(primary_key=True, comment="nodepool/NAME for that of a NodePool")
    namespace: Mapped[str | None] = mapped_column(comment="null: any")
    team: Mapped[str | None] = mapped_column(comment="null: any")
    pool: Mapped[str | None] = mapped_column(comment="null: any; of all four nothing: everything")
    labels: Mapped[dict[str, Any]] = mapped_column(
        JSONB, server_default=text("'{}'::jsonb"), comment="labels that the Pod must have, all of them"
    )
    amount_usd: Mapped[Decimal] = mapped_column(comment="dollars in a period")
    period: Mapped[str] = mapped_column(comment="day, week (from Monday), month or total, UTC")
    thresholds: Mapped[list[int]] = mapped_column(ARRAY(Integer), comment="percentages that are told of")
    action: Mapped[str] = mapped_column(comment="at the full amount; Alert for one with labels")
    label_action: Mapped[str | None] = mapped_column(
        comment="that of one with labels: versions before 0011 would take it for a budget of everything"
    )
    look_ahead_s: Mapped[int] = mapped_column(
        Integer, comment="what runs and what is promised counts for so much longer"
    )
    set_by: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)


class BudgetTold(Base):
    """A threshold that was told of, so that it is told once."""

    __tablename__ = "budget_told"
    __table_args__ = ({"comment": "Thresholds passed, one row each. Written by ledger/."},)

    budget: Mapped[str] = mapped_column(ForeignKey("budget.name", ondelete="CASCADE"), primary_key=True)
    period_start: Mapped[datetime] = mapped_column(primary_key=True)
    threshold: Mapped[int] = mapped_column(Integer, primary_key=True)
    told_at: Mapped[datetime] = mapped_column(server_default=NOW)


class ProviderBalance(Base):
    """What is left of an account that is paid in advance."""

    __tablename__ = "provider_balance"
    __table_args__ = (
        {"comment": "The newest balance of each account whose cloud tells one. Written by ledger/."},
    )

    provider: Mapped[str] = mapped_column(primary_key=True)
    account: Mapped[str] = mapped_column(primary_key=True)
    usd: Mapped[Decimal] = mapped_column(comment="left, as the cloud told it")
    usd_per_hour: Mapped[Decimal | None] = mapped_column(comment="what it says is being spent")
    observed_at: Mapped[datetime] = mapped_column(server_default=NOW)
