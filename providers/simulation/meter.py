"""The true bill, from the history of a machine's states and rates alone, so that no client can bend it.

Money is `Decimal`; seconds come from whole microseconds. Nothing is rounded but the billed time, by the
scenario's own rule.
"""

from collections.abc import Iterator
from decimal import ROUND_CEILING, Decimal

from providers.simulation.clock import MICROS_PER_S, micros
from providers.simulation.scenario import Billing
from providers.simulation.state import Machine

_HOUR = Decimal(3600)


def billed_spans(machine: Machine, *, billing: Billing, now: int) -> Iterator[tuple[int, int]]:
    """The (from, to) in which the meters ran, in microseconds, oldest first."""
    if machine.phantom:
        return
    ends = [at for _, at in machine.history[1:]] + [now]
    for (state, since), until in zip(machine.history, ends, strict=True):
        if state in billing.states and until > since:
            yield since, until


def billed_s(machine: Machine, *, billing: Billing, now: int) -> Decimal:
    """Seconds on the bill, rounded up and raised to the minimum as the cloud does."""
    if _reclaimed_free(machine, billing=billing):
        return Decimal(0)
    exact = sum(to - since for since, to in billed_spans(machine, billing=billing, now=now))
    if not exact:
        return Decimal(0)
    seconds = Decimal(exact) / MICROS_PER_S
    if billing.unit_s:
        unit = Decimal(str(billing.unit_s))
        seconds = (seconds / unit).to_integral_value(ROUND_CEILING) * unit
    return max(seconds, Decimal(str(billing.minimum_s)))


def bill_usd(machine: Machine, *, billing: Billing, now: int) -> Decimal | None:
    """Dollars so far; None if it ran at a rate that the cloud does not tell."""
    total_s = billed_s(machine, billing=billing, now=now)
    if not total_s:
        return Decimal(0)
    dollar_seconds, counted, last = Decimal(0), Decimal(0), Decimal(0)
    for since, to in billed_spans(machine, billing=billing, now=now):
        for start, end, rate in _rated(machine, since, to):
            if rate is None:
                return None
            seconds = Decimal(end - start) / MICROS_PER_S
            dollar_seconds += rate * seconds
            counted += seconds
            last = rate
    dollar_seconds += last * (total_s - counted)  # what rounding adds costs the last rate
    return dollar_seconds / _HOUR


def _rated(machine: Machine, since: int, to: int) -> Iterator[tuple[int, int, Decimal | None]]:
    changes = machine.rates
    for index, (start, meters) in enumerate(changes):
        end = changes[index + 1][0] if index + 1 < len(changes) else to
        low, high = (since if index == 0 else max(since, start)), min(to, end)
        if high > low:
            yield low, high, _rate(meters)


def _rate(meters: list[tuple[str, str, str | None]]) -> Decimal | None:
    total = Decimal(0)
    for _, quantity, usd in meters:
        if usd is None:
            return None
        total += Decimal(quantity) * Decimal(usd)
    return total


def _reclaimed_free(machine: Machine, *, billing: Billing) -> bool:
    running = machine.since("running")
    if not billing.reclaim_free_s or machine.end_reason != "preempted" or machine.ended_at is None:
        return False
    return running is None or machine.ended_at - running < micros(billing.reclaim_free_s)
