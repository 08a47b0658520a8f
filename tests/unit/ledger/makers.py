"""Facts of runs for tests: a valid one, of which a test names only what it is about."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from app.ledger.rules import Facts, Moment, Phase, Rate, Source, Tariff
from providers.base import BillingRule, BillsFrom, BillsUntil, MeterKind

T0 = datetime(2026, 3, 1, 12, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


def a_rate(usd: str | None = "2.49", **changes: Any) -> Rate:
    values = {"kind": MeterKind.MACHINE, "quantity": Decimal(1), "usd": None if usd is None else Decimal(usd)}
    return Rate(**(values | changes))


def a_tariff(*rates: Rate, **changes: Any) -> Tariff:
    return Tariff(**({"rates": rates or (a_rate(),), "source": Source.QUOTED} | changes))


def a_run(*phases: tuple[str, float], end_s: float | None = None, **changes: Any) -> Facts:
    """``("booting", 0), ("running", 5)`` and so on, in seconds from `T0`."""
    timeline = tuple(Moment(phase=Phase(name), at=at(since)) for name, since in phases)
    values: dict[str, Any] = {
        "timeline": timeline or (Moment(phase=Phase.RUNNING, at=T0),),
        "tariffs": (a_tariff(),),
        "end": None if end_s is None else at(end_s),
    }
    return Facts(**(values | changes))


def a_rule(**changes: Any) -> BillingRule:
    values: dict[str, Any] = {
        "kind": None,
        "starts": BillsFrom.ACCEPTED,
        "until": BillsUntil.TERMINATE_ASKED,
        "step_s": 0,
    }
    return BillingRule(**(values | changes))
