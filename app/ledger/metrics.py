"""The ledger's series, all from the database: they survive restarts and changes of leader; only the leader
shows them. No label is a Pod's name: what one Pod costs is a question for SQL.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

BURN = ("provider", "nodepool", "namespace", "accelerator", "capacity_type", "phase")
COST = ("provider", "nodepool", "namespace", "accelerator", "capacity_type")


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What was read in one transaction; each row has its labels and ``value``."""

    burn: Sequence[Mapping[str, Any]] = ()
    cost: Sequence[Mapping[str, Any]] = ()
    credit: Sequence[Mapping[str, Any]] = ()
    waste: Sequence[Mapping[str, Any]] = ()
    gpu_seconds: Sequence[Mapping[str, Any]] = ()
    balance: Sequence[Mapping[str, Any]] = ()
    health: Sequence[Mapping[str, Any]] = ()
    budgets: Sequence[Mapping[str, Any]] = ()
    reconciliation: Sequence[Mapping[str, Any]] = ()


@dataclass(slots=True, eq=False)
class Shown(Collector):
    """Holds the newest snapshot while its term lasts."""

    snapshot: Snapshot = field(default_factory=Snapshot)
    registered: bool = False

    def collect(self) -> Iterator[Metric]:
        found = self.snapshot
        yield _gauge(
            "nebula_burn_rate_usd_per_hour",
            "What runs now, dollars an hour.",
            BURN,
            found.burn,
            "usd_per_hour",
        )
        for name, words, column in (
            ("nebula_cost_usd", "Dollars spent since the ledger began.", "cost"),
            ("nebula_list_cost_usd", "The same at the listed price on demand.", "list_cost"),
        ):
            yield _counter(name, words, COST, found.cost, column)
        yield _counter(
            "nebula_cost_credit_usd", "Dollars taken off again.", ("provider", "kind"), found.credit, "value"
        )
        yield _counter(
            "nebula_waste_usd",
            "Dollars of machines that are over, paid while no workload ran.",
            ("reason", "provider"),
            found.waste,
            "value",
        )
        yield _counter(
            "nebula_gpu_seconds",
            "GPU seconds paid for.",
            ("provider", "accelerator", "phase"),
            found.gpu_seconds,
            "value",
        )
        for name, words, column in (
            ("nebula_provider_balance_usd", "Left of an account that is paid in advance.", "usd"),
            ("nebula_provider_runway_seconds", "Until that is used up, as things run now.", "runway_s"),
        ):
            yield _gauge(name, words, ("provider", "account"), found.balance, column)
        for name, words, column in (
            ("nebula_ledger_open_segments", "Segments that go on.", "open"),
            ("nebula_ledger_unpriced_segments", "Segments without a price.", "unpriced"),
            ("nebula_price_age_seconds", "Since the oldest listed price in use was seen.", "price_age_s"),
            ("nebula_ledger_lag_seconds", "The oldest change of a run that is not in the ledger.", "lag_s"),
        ):
            yield _gauge(name, words, ("provider",), found.health, column)
        for name, words, column in (
            ("nebula_budget_used_ratio", "Spent of the amount, in this period.", "used_ratio"),
            ("nebula_budget_exhausted_seconds", "Until it is spent, as things run now.", "exhausted_s"),
        ):
            yield _gauge(name, words, ("budget",), found.budgets, column)
        for name, words, column in (
            (
                "nebula_reconciliation_delta_usd",
                "The ledger minus the cloud's own bill, over machines that both know.",
                "delta",
            ),
            ("nebula_reconciliation_age_seconds", "Since a cloud's bill was last fetched.", "age_s"),
        ):
            yield _gauge(name, words, ("provider",), found.reconciliation, column)


SHOWN = Shown()


def show() -> None:
    """From now on this process shows them."""
    if not SHOWN.registered:
        REGISTRY.register(SHOWN)
        SHOWN.registered = True


def hide() -> None:
    """Another replica leads."""
    SHOWN.snapshot = Snapshot()
    if SHOWN.registered:
        REGISTRY.unregister(SHOWN)
        SHOWN.registered = False


def _gauge(
    name: str, words: str, labels: Sequence[str], rows: Iterable[Mapping[str, Any]], column: str
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, words, labels=labels)
    for row in rows:
        if row[column] is not None:
            family.add_metric([str(row[label] or "none") for label in labels], _float(row[column]))
    return family


def _counter(
    name: str, words: str, labels: Sequence[str], rows: Iterable[Mapping[str, Any]], column: str
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, words, labels=labels)
    for row in rows:
        family.add_metric([str(row[label] or "none") for label in labels], _float(row[column]))
    return family


def _float(value: Decimal | float | int) -> float:
    return float(value)  # a picture of the money; the money itself stays in the ledger
