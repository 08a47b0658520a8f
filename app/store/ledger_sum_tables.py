"""The tables of sums: days, closed months, and what the counters of /metrics have shown. All but the counters
and the totals of closed months can be dropped and made again.
"""

from datetime import date, datetime
from decimal import Decimal

from sqlalchemy import BigInteger, Boolean, Date, ForeignKey, Text, text
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import Mapped, mapped_column

from app.store.tables import NOW, Base


class BillingPeriodClose(Base):
    """A month as it was when it was closed."""

    __tablename__ = "billing_period_close"
    __table_args__ = ({"comment": "Totals of closed months, UTC; never changed. Written by ledger/."},)

    month: Mapped[date] = mapped_column(Date, primary_key=True, comment="its first day")
    label_set_id: Mapped[int] = mapped_column(
        BigInteger, ForeignKey("label_set.id"), primary_key=True, autoincrement=False
    )
    billed_dollar_seconds: Mapped[Decimal]
    effective_dollar_seconds: Mapped[Decimal]
    list_dollar_seconds: Mapped[Decimal]
    unpriced_seconds: Mapped[Decimal]
    closed_at: Mapped[datetime] = mapped_column(server_default=NOW)


class ClosedMonth(Base):
    """A month that is closed: nothing that came before its end changes any more."""

    __tablename__ = "closed_month"
    __table_args__ = ({"comment": "Closed months, UTC, one after another. Written by ledger/."},)

    month: Mapped[date] = mapped_column(Date, primary_key=True, comment="its first day")
    closed_at: Mapped[datetime] = mapped_column(server_default=NOW)
    summed: Mapped[bool] = mapped_column(Boolean, comment="whether cost_monthly has all of it")
    dropped: Mapped[bool] = mapped_column(
        Boolean, server_default=text("false"), comment="past retention: its segments are gone, its sums stay"
    )


class CostMonthly(Base):
    """Closed months added up: recomputed, never counted on."""

    __tablename__ = "cost_monthly"
    __table_args__ = (
        {"comment": "Sums of closed UTC months; can be dropped and rebuilt. Written by ledger/."},
    )

    month: Mapped[date] = mapped_column(Date, primary_key=True)
    label_set_id: Mapped[int] = mapped_column(
        BigInteger, ForeignKey("label_set.id"), primary_key=True, autoincrement=False
    )
    meter: Mapped[str] = mapped_column(primary_key=True)
    phase: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True, comment="usage, or the kind of adjustments")
    seconds: Mapped[Decimal]
    gpu_seconds: Mapped[Decimal]
    billed_dollar_seconds: Mapped[Decimal]
    effective_dollar_seconds: Mapped[Decimal]
    list_dollar_seconds: Mapped[Decimal]
    guessed_dollar_seconds: Mapped[Decimal]
    estimated_dollar_seconds: Mapped[Decimal]
    unpriced_seconds: Mapped[Decimal]


class CostDaily(Base):
    """The ledger added up by day: recomputed, never counted on."""

    __tablename__ = "cost_daily"
    __table_args__ = (
        {"comment": "Sums of sealed UTC days; can be dropped and rebuilt. Written by ledger/."},
    )

    day: Mapped[date] = mapped_column(Date, primary_key=True)
    label_set_id: Mapped[int] = mapped_column(
        BigInteger, ForeignKey("label_set.id"), primary_key=True, autoincrement=False
    )
    meter: Mapped[str] = mapped_column(primary_key=True)
    phase: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True, comment="usage, or the kind of adjustments")
    seconds: Mapped[Decimal]
    gpu_seconds: Mapped[Decimal]
    billed_dollar_seconds: Mapped[Decimal]
    effective_dollar_seconds: Mapped[Decimal]
    list_dollar_seconds: Mapped[Decimal]
    guessed_dollar_seconds: Mapped[Decimal]
    estimated_dollar_seconds: Mapped[Decimal]
    unpriced_seconds: Mapped[Decimal]


class CostDay(Base):
    """Which days are added up, and which of them must be again."""

    __tablename__ = "cost_day"
    __table_args__ = ({"comment": "Sealed UTC days; a dirty one is not read. Written by ledger/."},)

    day: Mapped[date] = mapped_column(Date, primary_key=True)
    dirty: Mapped[bool] = mapped_column(Boolean, comment="something in it changed: add it up again")
    sealed_at: Mapped[datetime] = mapped_column(server_default=NOW)


class CostCounter(Base):
    """The highest that each series of cost has shown."""

    __tablename__ = "cost_counter"
    __table_args__ = (
        {"comment": "What the cost counters of /metrics show: they never fall. Written by ledger/."},
    )

    provider: Mapped[str] = mapped_column(primary_key=True)
    nodepool: Mapped[str] = mapped_column(primary_key=True)
    namespace: Mapped[str] = mapped_column(primary_key=True)
    accelerator: Mapped[str] = mapped_column(primary_key=True)
    capacity_type: Mapped[str] = mapped_column(primary_key=True)
    cost: Mapped[Decimal] = mapped_column(comment="dollars billed, credits not taken off")
    list_cost: Mapped[Decimal] = mapped_column(comment="dollars as listed on demand")
    gpu_seconds: Mapped[Decimal]


class ShownCounter(Base):
    """The highest that each other counter has shown."""

    __tablename__ = "shown_counter"
    __table_args__ = (
        {"comment": "What other counters of /metrics show: they never fall. Written by ledger/."},
    )

    series: Mapped[str] = mapped_column(primary_key=True)
    labels: Mapped[list[str]] = mapped_column(
        ARRAY(Text), primary_key=True, comment="values, in the series' order"
    )
    value: Mapped[Decimal]
