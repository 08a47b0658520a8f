"""The facts of one run and its cloud's billing rules -> billed segments and adjustments. Pure.

Money stays in dollar-seconds (dollars an hour, times units, times seconds), exact `Decimal`, never rounded:
whoever shows dollars divides by 3600, once. What is always true of the answer:

* segments of one meter never overlap, and together they are exactly the phases in which its rule bills;
* cutting a segment anywhere changes no sum, to the last digit;
* rounding, minimum and waiver of a cloud are adjustments that fall whole on the last billed instant, and
  exist only once the run is over: a stretched segment would overlap the next run;
* a price that is not known, or not believable, is None: the seconds are there all the same.

Nothing here knows a cloud: what differs between clouds is in `providers.base.BillingRule`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import ROUND_CEILING, Context, Decimal, localcontext
from enum import StrEnum

from app.store.ledger_values import EXACT
from providers.base import BillingRule, BillsFrom, BillsUntil, EndReason, MeterKind

_MICROSECOND = timedelta(microseconds=1)
_MILLION = Decimal(1_000_000)
# Where a cloud declares nothing, its bill can only be lower than this.
UNDECLARED = BillingRule(kind=None, starts=BillsFrom.ACCEPTED, until=BillsUntil.GONE, step_s=0)


class Phase(StrEnum):
    """What a machine was to its user while a meter ran."""

    BOOTING = "booting"  # ordered, not reachable yet
    RUNNING = "running"
    STOPPED = "stopped"  # its workload is over, and nobody has asked for its end yet
    ENDING = "ending"  # its end was asked for


class Source(StrEnum):
    """Where a price came from."""

    QUOTED = "quoted"  # the cloud named it for this machine
    CATALOG = "catalog"  # the price list; the cloud named none for this machine
    OVERRIDE = "override"  # a person set it
    COMMITMENT = "commitment"  # paid in advance
    NONE = "none"


class Confidence(StrEnum):
    """How much a row may be believed."""

    FIRM = "firm"  # price and times are the cloud's own, or a person's
    ESTIMATED = "estimated"  # a time is ours
    GUESSED = "guessed"  # the price is that of the list
    UNPRICED = "unpriced"  # no price: the dollars are null


class AdjustmentKind(StrEnum):
    """Why dollars are added to, or taken from, what segments say."""

    ROUNDING = "rounding"
    MINIMUM = "minimum"
    SPOT_INTERRUPT_FREE = "spot_interrupt_free"
    LATE_PRICE = "late_price"
    LATE_FACT = "late_fact"
    INVOICE_TRUE_UP = "invoice_true_up"
    CREDIT = "credit"
    REFUND = "refund"
    TAX = "tax"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The run entered ``phase`` at ``at``; ``estimated``: that is our own clock's word."""

    phase: Phase
    at: datetime
    estimated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """One meter's price: ``quantity`` units at ``usd`` dollars a unit-hour; ``list_usd`` is on demand."""

    kind: MeterKind
    quantity: Decimal
    usd: Decimal | None
    list_usd: Decimal | None = None
    label: str = ""
    why: str = ""  # of a missing price

    @property
    def meter(self) -> str:
        return f"{self.kind.value}:{self.label}" if self.label else self.kind.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Tariff:
    """The rates from ``since`` on; None: from the beginning. ``estimated``: ``since`` is our own clock's."""

    rates: tuple[Rate, ...]
    source: Source
    since: datetime | None = None
    estimated: bool = False
    commitment_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One run. ``timeline`` rises; ``end`` is when nothing of it existed any more, None while it does."""

    timeline: tuple[Moment, ...]
    tariffs: tuple[Tariff, ...]
    end: datetime | None = None
    end_estimated: bool = False
    end_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """``[start, end)`` of one meter in one phase at one price; ``end`` None: it goes on."""

    meter: str
    phase: Phase
    start: datetime
    end: datetime | None
    quantity: Decimal
    usd: Decimal | None
    list_usd: Decimal | None
    source: Source
    confidence: Confidence
    why: str = ""
    commitment_id: int | None = None
    leads: bool = False  # the one meter of the machine that stands for its GPUs

    @property
    def dollar_seconds(self) -> Decimal | None:
        """None while it is open or without a price."""
        if self.end is None or self.usd is None:
            return None
        return product(self.quantity, self.usd, seconds(self.start, self.end))


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustment:
    """A signed amount that falls whole on the instant ``at``. ``dollar_seconds`` None: there is no price.

    ``unpriced_seconds``: those of ``seconds`` that have none; a waiver takes both off, each by itself.
    """

    meter: str
    kind: AdjustmentKind
    phase: Phase
    at: datetime
    seconds: Decimal
    dollar_seconds: Decimal | None
    list_dollar_seconds: Decimal | None
    unpriced_seconds: Decimal = Decimal(0)
    commitment_id: int | None = None  # it is covered by, as the segments are to which it belongs


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """All that one run costs, as far as its facts tell."""

    segments: tuple[Segment, ...]
    adjustments: tuple[Adjustment, ...] = ()

    def dollar_seconds(self) -> Decimal:
        """Of what is closed and priced."""
        return total(
            [each.dollar_seconds for each in self.segments]
            + [each.dollar_seconds for each in self.adjustments]
        )


def derive(facts: Facts, *, rules: Sequence[BillingRule]) -> Derived:
    """What the run costs by these rules; adjustments only once it is over."""
    segments: list[Segment] = []
    adjustments: list[Adjustment] = []
    for rule in _used(facts, rules):
        billed = list(_billed(facts, rule))
        mine = [
            segment
            for start, phase in billed
            for segment in _segments(facts, rule, rules, start=start, phase=phase)
        ]
        segments += mine
        if facts.end is not None and mine:
            adjustments += _rounded(facts, rule, rules, mine)
            adjustments += _waived(facts, rule, mine, adjustments)
    segments.sort(key=lambda each: (each.start, each.meter))
    return Derived(segments=tuple(segments), adjustments=tuple(adjustments))


def rule_of(kind: MeterKind, rules: Sequence[BillingRule]) -> BillingRule:
    """The rule of a kind of meter: its own, else the one for all without a rule."""
    own = [rule for rule in rules if rule.kind is kind] or [rule for rule in rules if rule.kind is None]
    return own[0] if own else UNDECLARED


def seconds(start: datetime, end: datetime) -> Decimal:
    """Exact seconds between two moments."""
    return Decimal((end - start) // _MICROSECOND) / _MILLION


def product(*factors: Decimal) -> Decimal:
    """Exactly, however many digits that has."""
    result = Decimal(1)
    for factor in factors:
        result = EXACT.multiply(result, factor)
    return result


def total(amounts: Sequence[Decimal | None]) -> Decimal:
    """The exact sum of what is known."""
    result = Decimal(0)
    for amount in amounts:
        if amount is not None:
            result = EXACT.add(result, amount)
    return result


def dollars(dollar_seconds: Decimal) -> Decimal:
    """For showing, divided once, to the 28 digits of Python's own `Decimal` context."""
    with localcontext(Context(prec=28)):
        return dollar_seconds / Decimal(3600)


# --- inside --------------------------------------------------------------------------------------


def _used(facts: Facts, rules: Sequence[BillingRule]) -> list[BillingRule]:
    kinds = {rate.kind for tariff in facts.tariffs for rate in tariff.rates}
    found: list[BillingRule] = []
    for kind in sorted(kinds, key=lambda each: each.value):
        # Bytes are counted by the cloud, not by a clock: they come with its bill.
        if kind is not MeterKind.BYTES and (rule := rule_of(kind, rules)) not in found:
            found.append(rule)
    return found


def _bills_in(rule: BillingRule, phase: Phase) -> bool:
    match phase:
        case Phase.BOOTING:
            return rule.starts is BillsFrom.ACCEPTED
        case Phase.RUNNING:
            return True
        case Phase.STOPPED:
            return rule.until is not BillsUntil.ENDED
        case Phase.ENDING:
            return rule.until is BillsUntil.GONE


def _billed(facts: Facts, rule: BillingRule) -> Iterator[tuple[Moment, Moment | None]]:
    """The (begin, end) of each phase in which the rule bills; end None: it goes on."""
    started = rule.starts is BillsFrom.ACCEPTED
    ends: list[Moment | None] = [*facts.timeline[1:]]
    last = None
    if facts.timeline and facts.end is not None:
        last = Moment(phase=Phase.ENDING, at=facts.end, estimated=facts.end_estimated)
    for begin, end in zip(facts.timeline, [*ends, last], strict=True):
        started = started or begin.phase is Phase.RUNNING
        if started and _bills_in(rule, begin.phase) and (end is None or end.at > begin.at):
            yield begin, end


def _segments(
    facts: Facts,
    rule: BillingRule,
    rules: Sequence[BillingRule],
    *,
    start: Moment,
    phase: Moment | None,
) -> Iterator[Segment]:
    """One phase, cut where the price changes."""
    end = phase
    for index, tariff in enumerate(facts.tariffs):
        after = facts.tariffs[index + 1] if index + 1 < len(facts.tariffs) else None
        low, low_estimated = start.at, start.estimated
        if index and tariff.since is not None and tariff.since > low:
            low, low_estimated = tariff.since, tariff.estimated
        high, high_estimated = (end.at, end.estimated) if end is not None else (None, False)
        if after is not None and after.since is not None and (high is None or after.since < high):
            high, high_estimated = after.since, after.estimated
        if high is not None and high <= low:
            continue
        for rate in tariff.rates:
            if rate.kind is MeterKind.BYTES or rule_of(rate.kind, rules) is not rule:
                continue
            times = rule.stopped_times if start.phase in (Phase.STOPPED, Phase.ENDING) else Decimal(1)
            yield Segment(
                meter=rate.meter,
                phase=start.phase,
                start=low,
                end=high,
                quantity=rate.quantity,
                usd=None if rate.usd is None else product(rate.usd, times),
                list_usd=None if rate.list_usd is None else product(rate.list_usd, times),
                source=tariff.source if rate.usd is not None else Source.NONE,
                confidence=_confidence(rate, tariff, estimated=low_estimated or high_estimated),
                why=rate.why,
                commitment_id=tariff.commitment_id,
                leads=rate is _leading(tariff),
            )


def _leading(tariff: Tariff) -> Rate:
    """The GPUs' own meter, else the machine's, else the first: GPU hours are counted by one meter only."""
    order = {MeterKind.GPU: 0, MeterKind.MACHINE: 1}
    return min(tariff.rates, key=lambda rate: order.get(rate.kind, 2))


def _confidence(rate: Rate, tariff: Tariff, *, estimated: bool) -> Confidence:
    if rate.usd is None:
        return Confidence.UNPRICED
    if tariff.source is Source.CATALOG:
        return Confidence.GUESSED
    return Confidence.ESTIMATED if estimated else Confidence.FIRM


def _rounded(
    facts: Facts, rule: BillingRule, rules: Sequence[BillingRule], segments: Sequence[Segment]
) -> Iterator[Adjustment]:
    """What the cloud bills beyond the exact time, at the last price of the run."""
    exact = total([seconds(begin.at, end.at) for begin, end in _billed(facts, rule) if end is not None])
    rounded = exact
    if rule.step_s:
        step = Decimal(rule.step_s)
        rounded = (exact / step).to_integral_value(ROUND_CEILING) * step
    at = max(segment.end for segment in segments if segment.end is not None)
    last = [segment for segment in segments if segment.end == at]
    for kind, extra in (
        (AdjustmentKind.ROUNDING, rounded - exact),
        (AdjustmentKind.MINIMUM, max(Decimal(0), Decimal(rule.minimum_s) - rounded)),
    ):
        if not extra:
            continue
        for segment in last:
            usd, list_usd = segment.usd, segment.list_usd
            yield Adjustment(
                meter=segment.meter,
                kind=kind,
                phase=segment.phase,
                at=at,
                seconds=extra,
                dollar_seconds=None if usd is None else product(segment.quantity, usd, extra),
                list_dollar_seconds=None if list_usd is None else product(segment.quantity, list_usd, extra),
                unpriced_seconds=extra if usd is None else Decimal(0),
                commitment_id=segment.commitment_id,
            )


def _waived(
    facts: Facts, rule: BillingRule, segments: Sequence[Segment], added: Sequence[Adjustment]
) -> Iterator[Adjustment]:
    """All of it comes off again where the cloud takes a machine back early and then bills nothing."""
    if facts.end_reason != EndReason.PREEMPTED.value or not rule.reclaim_free_s:
        return
    started = next((each.at for each in facts.timeline if each.phase is Phase.RUNNING), None)
    # The last stop: a workload that was started again on its machine has stopped before.
    over = next((each.at for each in reversed(facts.timeline) if each.phase is Phase.STOPPED), facts.end)
    assert over is not None  # asked only of runs that are over
    if started is not None and seconds(started, over) >= rule.reclaim_free_s:
        return
    at = max(segment.end for segment in segments if segment.end is not None)
    meters = {(segment.meter, segment.commitment_id): segment.phase for segment in segments}
    for (meter, commitment_id), phase in meters.items():
        mine = [each for each in segments if (each.meter, each.commitment_id) == (meter, commitment_id)]
        extra = [each for each in added if (each.meter, each.commitment_id) == (meter, commitment_id)]
        priced = [each for each in mine if each.usd is not None]
        yield Adjustment(
            meter=meter,
            kind=AdjustmentKind.SPOT_INTERRUPT_FREE,
            phase=phase,
            at=at,
            seconds=-total(
                [seconds(each.start, each.end) for each in mine if each.end is not None]
                + [each.seconds for each in extra]
            ),
            dollar_seconds=-total(
                [each.dollar_seconds for each in mine] + [each.dollar_seconds for each in extra]
            )
            if priced
            else None,
            unpriced_seconds=-total(
                [seconds(each.start, each.end) for each in mine if each.usd is None and each.end is not None]
                + [each.unpriced_seconds for each in extra]
            ),
            list_dollar_seconds=-total(
                [
                    product(each.quantity, each.list_usd, seconds(each.start, each.end))
                    for each in mine
                    if each.list_usd is not None and each.end is not None
                ]
                + [each.list_dollar_seconds for each in extra]
            ),
            commitment_id=commitment_id,
        )
