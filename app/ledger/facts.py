"""The columns of one run -> the facts that billing rules work on. Pure.

A cloud's time counts where it is sane, else our own, marked estimated. Times of the two clocks meet on ours:
a cloud's clock that is known to be off is shifted as a whole, so that what lies between two of its own times
is exactly what the cloud says. Times never run backwards, whatever either clock did.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal

from app.ledger.rules import Facts, Moment, Phase, Rate, Source, Tariff
from app.store.ledger_values import Commitment, LedgerRun, MeterFact, Override
from providers.base import EndReason, MeterKind

SLACK = timedelta(minutes=5)  # a cloud's time further outside of what we saw is not believed
NOISE_S = 2.0  # a Date header has whole seconds: a smaller offset says nothing
ABSURD_TIMES = 100  # a price so many times the listed one, or so small a part of it, is not believed
_WHOLE = (MeterKind.GPU, MeterKind.MACHINE)  # other meters may be free: a disk that is included


@dataclass(frozen=True, slots=True, kw_only=True)
class _Clocks:
    """The cloud's clock made ours, and the bounds of what is believed."""

    shift: timedelta
    earliest: datetime | None
    latest: datetime

    def sane(self, at: datetime | None, *, after: datetime | None = None) -> datetime | None:
        """``at`` on our clock, None unless it can be true."""
        if at is None:
            return None
        ours = at - self.shift
        if ours > self.latest or (self.earliest is not None and ours < self.earliest):
            return None
        return None if after is not None and ours < after else ours


def facts_of(
    run: LedgerRun, *, overrides: Sequence[Override], commitments: Sequence[Commitment], now: datetime
) -> Facts | None:
    """What is known of the run by ``now`` of the database; None while it is not known to have begun."""
    offset_s = run.clock_offset_s or 0.0
    shift = timedelta(microseconds=round(offset_s * 1e6)) if abs(offset_s) >= NOISE_S else timedelta()
    first_heard = min(
        (at for at in (run.requested_at, run.accepted_at, run.first_seen_at) if at is not None), default=None
    )
    clocks = _Clocks(
        shift=shift,
        # A machine that was found, and not ordered by an attempt we know, may be as old as it says.
        earliest=run.requested_at - SLACK if run.requested_at is not None else None,
        latest=now + SLACK,
    )
    begun = clocks.sane(run.provider_created_at)
    if begun is None and first_heard is None:
        return None
    start = Moment(phase=Phase.BOOTING, at=begun or first_heard or now, estimated=begun is None)
    timeline = [start, *_middle(run, clocks, start)]
    end, end_estimated = _end(run, clocks, timeline)
    if end is not None:
        timeline = [each for each in timeline if each.at < end] or [start]
        end = max(end, timeline[-1].at)
    return Facts(
        timeline=tuple(timeline),
        tariffs=_tariffs(run, overrides, commitments, begun=start.at, shift=shift),
        end=end,
        end_estimated=end_estimated,
        end_reason=run.end_reason,
    )


def _middle(run: LedgerRun, clocks: _Clocks, start: Moment) -> list[Moment]:
    """Running, every stop that was undone by a restart, the last stop, and the request for the end."""
    found: list[Moment] = []
    started = clocks.sane(run.provider_started_at, after=start.at)
    running = started or run.running_at
    if running is not None:
        found.append(Moment(phase=Phase.RUNNING, at=running, estimated=started is None))
    for stop, again in run.stops:
        found.append(Moment(phase=Phase.STOPPED, at=stop - clocks.shift, estimated=True))
        found.append(Moment(phase=Phase.RUNNING, at=again, estimated=True))
    ended = clocks.sane(run.provider_ended_at, after=start.at)
    over = ended or run.exited_at
    asked = run.terminate_asked_at
    # With a code it was the workload that ended, asked to or not; without one it was the machine.
    if over is not None and run.end_reason == EndReason.TERMINATED.value and run.exit_code is None:
        found.append(Moment(phase=Phase.ENDING, at=over, estimated=ended is None))
        asked = None
    elif over is not None:
        found.append(Moment(phase=Phase.STOPPED, at=over, estimated=ended is None))
    if asked is not None:
        found.append(Moment(phase=Phase.ENDING, at=asked, estimated=True))
    rising: list[Moment] = [start]
    for each in found:
        if each.phase is Phase.STOPPED and asked is not None and each.at > asked and not each.estimated:
            continue  # a stop that came of the end we asked for
        at = max(each.at, rising[-1].at)
        rising.append(Moment(phase=each.phase, at=at, estimated=each.estimated or at != each.at))
    return rising[1:]


def _end(run: LedgerRun, clocks: _Clocks, timeline: Sequence[Moment]) -> tuple[datetime | None, bool]:
    """When nothing of it was there any more, and whether that is our own word."""
    if run.gone_at is None:
        return None, False
    by_itself = run.terminate_asked_at is None
    over = clocks.sane(run.provider_ended_at, after=timeline[0].at)
    left_nothing = (EndReason.PREEMPTED.value, EndReason.LIFETIME.value, EndReason.TERMINATED.value)
    if by_itself and over is not None and run.end_reason in left_nothing and run.exit_code is None:
        return over, False
    if by_itself and over is None and run.last_seen_at is not None:
        # It vanished while nobody looked: what is certain is when it was last there.
        return min(run.gone_at, max(run.last_seen_at, timeline[-1].at)), True
    return run.gone_at, True


# --- prices --------------------------------------------------------------------------------------


def _tariffs(
    run: LedgerRun,
    overrides: Sequence[Override],
    commitments: Sequence[Commitment],
    *,
    begun: datetime,
    shift: timedelta,
) -> tuple[Tariff, ...]:
    """The prices one after another: the cloud's, and over them what a person has set or paid for before."""
    changes = [(begun, run.meters, False)]
    changes += [(max(at, begun), meters, True) for at, meters in run.repriced]
    set_by_people = [each for each in overrides if each.fits(run)]
    paid_before = [each for each in commitments if each.fits(run)]
    edges = {begun, *(at for at, _, _ in changes)}
    terms = [(each.starts_at, each.ends_at) for each in set_by_people]
    terms += [(each.starts_at, each.ends_at) for each in paid_before]
    edges |= {edge for term in terms for edge in term if edge is not None and edge > begun}
    found: list[Tariff] = []
    for edge in sorted(edges):
        _, meters, estimated = [change for change in changes if change[0] <= edge][-1]
        estimated = estimated and any(at == edge for at, _, _ in changes)
        tariff = _tariff(run, meters, set_by_people, paid_before, at=edge, estimated=estimated)
        if not found or (tariff.rates, tariff.source, tariff.commitment_id) != (
            found[-1].rates,
            found[-1].source,
            found[-1].commitment_id,
        ):
            found.append(tariff)
    return tuple(found)


def _tariff(
    run: LedgerRun,
    meters: Sequence[MeterFact],
    overrides: Sequence[Override],
    commitments: Sequence[Commitment],
    *,
    at: datetime,
    estimated: bool,
) -> Tariff:
    override = next((each for each in overrides if each.holds(at)), None)
    if override is not None:
        rate = _machine(override.usd_per_hour, list_usd=_sum(run.listed) or _sum(meters))
        return Tariff(rates=(rate,), source=Source.OVERRIDE, since=at)
    paid = next((each for each in commitments if each.holds(at)), None)
    if paid is not None:
        rate = _machine(paid.usd_per_hour, list_usd=_sum(run.listed) or _sum(meters))
        return Tariff(rates=(rate,), source=Source.COMMITMENT, since=at, commitment_id=paid.id)
    rates = _apart([_rate(meter, run.listed, run.catalog) for meter in meters])
    if any(rate.usd is None for rate in rates) or not rates:
        listed = _apart([_rate(meter, run.listed, ()) for meter in run.catalog])
        if listed and all(rate.usd is not None for rate in listed):
            return Tariff(rates=listed, source=Source.CATALOG, since=at, estimated=estimated)
    if not rates:
        rates = (Rate(kind=MeterKind.MACHINE, quantity=Decimal(1), usd=None, why="no price was told"),)
    return Tariff(rates=rates, source=Source.QUOTED, since=at, estimated=estimated)


def _rate(meter: MeterFact, listed: Sequence[MeterFact], catalog: Sequence[MeterFact]) -> Rate:
    """The meter as told, its price left out where nobody can believe it."""
    usd, why = meter.usd, "" if meter.usd is not None else "no price was told"
    on_demand = next((each.usd for each in listed if each.key == meter.key), None)
    known = next((each.usd for each in catalog if each.key == meter.key), on_demand)
    if usd is not None and not _is_amount(usd):
        usd, why = None, f"absurd price {meter.usd}: below zero, or no number"
    elif usd is not None and known and usd > ABSURD_TIMES * known:
        usd, why = None, f"absurd price {usd}: more than {ABSURD_TIMES} times the listed {known}"
    elif usd is not None and known and meter.kind in _WHOLE and usd * ABSURD_TIMES < known:
        usd, why = None, f"absurd price {usd}: less than a hundredth of the listed {known}"
    counted = _is_amount(meter.quantity)
    if not counted:
        usd, why = None, f"absurd quantity {meter.quantity}: below zero, or no number"
    list_usd = on_demand if on_demand is not None else usd
    return Rate(
        kind=meter.kind,
        label=meter.label,
        quantity=meter.quantity if counted else Decimal(1),
        usd=usd,
        list_usd=list_usd if counted else None,
        why=why,
    )


def _is_amount(value: Decimal) -> bool:
    return value.is_finite() and value >= 0


def _apart(rates: Sequence[Rate]) -> tuple[Rate, ...]:
    """Two meters told by one name are two: each has its own seconds."""
    seen: Counter[str] = Counter()
    found = []
    for rate in rates:
        seen[rate.meter] += 1
        number = seen[rate.meter]
        found.append(rate if number == 1 else replace(rate, label=f"{rate.label}#{number}"))
    return tuple(found)


def _machine(usd: Decimal, *, list_usd: Decimal | None) -> Rate:
    return Rate(
        kind=MeterKind.MACHINE,
        quantity=Decimal(1),
        usd=usd,
        list_usd=usd if list_usd is None else list_usd,
    )


def _sum(meters: Sequence[MeterFact]) -> Decimal | None:
    """Dollars an hour of the whole machine; None unless all of it is known."""
    amount = Decimal(0)
    hourly = [meter for meter in meters if meter.kind is not MeterKind.BYTES]
    for meter in hourly:
        if meter.usd is None or not _is_amount(meter.usd) or not _is_amount(meter.quantity):
            return None
        amount += meter.quantity * meter.usd
    return amount if hourly else None
