"""One run's derivation held against what is written of it -> what is to be written. Pure.

An open run's segments are replaced where they differ. A closed run's never are: what its facts or its price
turned out to be later becomes one adjustment for each meter, so that reports before and after differ only by
it, and a second arrival of the same news writes nothing. So it is with what lies in closed months of a run
that is still open: it is cut off at their end, stays as it was, and is corrected by adjustments. What a
prepayment covers is corrected apart from what is billed; and once the cloud's own final bill was compared,
that has the last word.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from app.ledger.facts import facts_of
from app.ledger.labels import hash_of, labels_of
from app.ledger.rules import AdjustmentKind, Derived, Segment, derive, product, seconds, total
from app.store.ledger_values import (
    ANY,
    AdjustmentRow,
    Commitment,
    Covered,
    Due,
    LedgerRun,
    Override,
    Prices,
    SegmentRow,
    Written,
)
from providers.base import BillingRule

_NOTHING = Decimal(0)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def changes_of(
    due: Due, prices: Prices, *, now: datetime, rules: Sequence[BillingRule] | None = None
) -> Written:
    """What is to be written of one run by what is known ``now``; ``rules`` other than the cloud's now.

    The commitments of ``prices`` are the pieces that cover this very run: see `app.ledger.cover`.
    """
    rules = due.rules if rules is None else rules
    facts = facts_of(due.run, overrides=prices.overrides, commitments=prices.commitments, now=now)
    derived = derive(facts, rules=rules) if facts is not None else Derived(segments=())
    lasted = lasted_of(due.run, rules, now=now)
    labels = labels_of(due.run, due.labels)
    closed = facts is not None and facts.end is not None
    ends = [each.end for each in derived.segments if each.end is not None]
    gone: Sequence[SegmentRow] = ()
    new: Sequence[SegmentRow] = ()
    if due.held.closed:
        # What the cloud has billed is paid: a price that is set later must not be taken off once more; only
        # what a void prepayment covered is billed after all. A run that is open again is corrected once it
        # has its end.
        if due.held.billed:
            adjustments = _uncovered(due, prices.void)
        else:
            adjustments = _late(due, derived) if closed else []
    else:
        gpus = labels.accelerator_count
        before, after = _cut(derived.segments, due.closed_until)
        wanted = [_row(each, gpus=gpus) for each in after]
        held = {each for each in due.held.segments if not each.frozen}
        gone = [each for each in due.held.segments if each in held and each not in wanted]
        new = [each for each in wanted if each not in held]
        adjustments = _late(due, Derived(segments=before)) if due.closed_until is not None else []
        adjustments += [
            AdjustmentRow(
                key=f"run:{due.run.id}:{each.meter}:{each.kind.value}" + _paid_by(each.commitment_id),
                meter=each.meter,
                phase=each.phase.value,
                kind=each.kind.value,
                at=each.at,
                seconds=each.seconds,
                dollar_seconds=each.dollar_seconds,
                list_dollar_seconds=each.list_dollar_seconds,
                reason="the cloud's billing rule",
                unpriced_seconds=each.unpriced_seconds,
                unpriced="{}" if each.kind is AdjustmentKind.SPOT_INTERRUPT_FREE else None,
                commitment_id=each.commitment_id,
            )
            for each in derived.adjustments
        ]
    return Written(
        run_id=due.run.id,
        changed_at=due.changed_at,
        closed_month=due.closed_month,
        labels=labels,
        label_hash=hash_of(labels),
        rules=rules,
        gone=gone,
        new=new,
        adjustments=adjustments,
        closed=closed,
        ended_at=max(ends) if closed and ends else None,
        begun_at=lasted[0] if lasted is not None else None,
        over_at=lasted[1] if lasted is not None else None,
        covered=covered_by(prices.commitments),
    )


def lasted_of(
    run: LedgerRun, rules: Sequence[BillingRule], *, now: datetime
) -> tuple[datetime, datetime | None] | None:
    """When the machine as a whole is billed, whatever its price: begin, end; None while it is not."""
    always = Override(
        id=0,
        provider=run.provider,
        account=ANY,
        sku=ANY,
        tier=ANY,
        usd_per_hour=Decimal(1),
        starts_at=_EPOCH,
        ends_at=None,
    )
    facts = facts_of(run, overrides=(always,), commitments=(), now=now)
    segments = derive(facts, rules=rules).segments if facts is not None else ()
    if not segments:
        return None
    ends = [each.end for each in segments if each.end is not None]
    return min(each.start for each in segments), max(ends) if len(ends) == len(segments) else None


def covered_by(pieces: Sequence[Commitment]) -> Covered:
    """As it is kept."""
    return tuple(sorted((each.id, each.starts_at, each.ends_at) for each in pieces))


def _cut(
    segments: Sequence[Segment], until: datetime | None
) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
    """What lies before ``until``, and what after; what goes over it is in both, in part."""
    if until is None:
        return (), tuple(segments)
    before, after = [], []
    for each in segments:
        if each.start < until:
            before.append(each if each.end is not None and each.end <= until else replace(each, end=until))
        if each.end is None or each.end > until:
            after.append(each if each.start >= until else replace(each, start=until))
    return tuple(before), tuple(after)


@dataclass(slots=True)
class _Sum:
    """Of one meter. ``unpriced``: those of its seconds that have no price. ``listed`` as reports count it."""

    seconds: Decimal = _NOTHING
    dollar_seconds: Decimal = _NOTHING
    listed: Decimal = _NOTHING
    unpriced: Decimal = _NOTHING

    def add(
        self, more_s: Decimal, amount: Decimal | None, listed: Decimal | None, unpriced_s: Decimal
    ) -> None:
        self.seconds = total([self.seconds, more_s])
        self.dollar_seconds = total([self.dollar_seconds, amount])
        self.listed = total([self.listed, listed])
        self.unpriced = total([self.unpriced, unpriced_s])

    def add_time(
        self, length_s: Decimal, quantity: Decimal, usd: Decimal | None, list_usd: Decimal | None
    ) -> None:
        shown = usd if list_usd is None else list_usd
        self.add(
            length_s,
            None if usd is None else product(quantity, usd, length_s),
            None if shown is None else product(quantity, shown, length_s),
            length_s if usd is None else _NOTHING,
        )


def _late(due: Due, derived: Derived) -> list[AdjustmentRow]:
    """What makes the sums of what is frozen those of the derivation."""
    wanted: dict[tuple[str, int | None], _Sum] = {}
    for each in derived.segments:
        if each.end is not None:
            sum_ = wanted.setdefault((each.meter, each.commitment_id), _Sum())
            sum_.add_time(seconds(each.start, each.end), each.quantity, each.usd, each.list_usd)
    for extra in derived.adjustments:
        sum_ = wanted.setdefault((extra.meter, extra.commitment_id), _Sum())
        sum_.add(extra.seconds, extra.dollar_seconds, extra.list_dollar_seconds, extra.unpriced_seconds)
    held = _held(due)
    frozen = [row for row in due.held.segments if row.frozen and row.end is not None]
    at = _instant(due, [*(row.end for row in frozen), *(each.end for each in derived.segments)])
    phases = {row.meter: row.phase for row in reversed(frozen)}
    found = []
    for meter, commitment_id in sorted({*wanted, *held}, key=lambda each: (each[0], each[1] or 0)):
        paid = (meter, commitment_id)
        before, after = held.get(paid, _Sum()), wanted.get(paid, _Sum())
        more_s, amount = after.seconds - before.seconds, total([after.dollar_seconds, -before.dollar_seconds])
        more_unpriced_s = after.unpriced - before.unpriced
        if not more_s and not amount and not more_unpriced_s:
            continue
        kind = AdjustmentKind.LATE_PRICE if not more_s else AdjustmentKind.LATE_FACT
        found.append(
            AdjustmentRow(
                # The same news, heard by two leaders, is one row; the next news is another.
                key=f"run:{due.run.id}:{meter}:{kind.value}:{due.held.adjustments}" + _paid_by(commitment_id),
                meter=meter,
                phase=phases.get(
                    meter, next((each.phase.value for each in derived.segments if each.meter == meter), "")
                ),
                kind=kind.value,
                at=at,
                seconds=more_s,
                dollar_seconds=amount if not (after.unpriced and not amount) else None,
                list_dollar_seconds=total([after.listed, -before.listed]),
                reason="a price that came late" if not more_s else "a time that came late",
                unpriced_seconds=more_unpriced_s,
                # Only where some of it has none, or had: of all others nothing is to be told.
                unpriced=_unpriced(derived, meter) if before.unpriced or more_unpriced_s else None,
                commitment_id=commitment_id,
            )
        )
    return found


def _uncovered(due: Due, void: frozenset[int]) -> list[AdjustmentRow]:
    """What void prepayments covered, taken off them and billed as it is: the same sum as before."""
    found = []
    covered = {paid: sum_ for paid, sum_ in _held(due).items() if paid[1] in void}
    for (meter, commitment_id), sum_ in sorted(covered.items(), key=lambda each: str(each[0])):
        if not (sum_.seconds or sum_.dollar_seconds):
            continue
        for sign, paid in ((-1, commitment_id), (1, None)):
            found.append(
                AdjustmentRow(
                    key=f"run:{due.run.id}:{meter}:void:{commitment_id}" + _paid_by(paid),
                    meter=meter,
                    phase=next((row.phase for row in due.held.segments if row.meter == meter), ""),
                    kind=AdjustmentKind.LATE_PRICE.value,
                    at=_instant(due, [row.end for row in due.held.segments]),
                    seconds=sign * sum_.seconds,
                    dollar_seconds=sign * sum_.dollar_seconds,
                    list_dollar_seconds=sign * sum_.listed,
                    reason="what covered it was noted by mistake",
                    commitment_id=paid,
                )
            )
    return found


def _held(due: Due) -> dict[tuple[str, int | None], _Sum]:
    """The sums of what is frozen, its adjustments included, by meter and prepayment."""
    held: dict[tuple[str, int | None], _Sum] = {}
    for row in due.held.segments:
        if row.frozen and row.end is not None:
            sum_ = held.setdefault((row.meter, row.commitment_id), _Sum())
            sum_.add_time(seconds(row.start, row.end), row.quantity, row.usd, row.list_usd)
    for paid, more in due.held.adjusted.items():
        held.setdefault(paid, _Sum()).add(
            more.seconds, more.dollar_seconds, more.list_dollar_seconds, more.unpriced_seconds
        )
    return held


def _unpriced(derived: Derived, meter: str) -> str:
    """What of a meter's time has no price, as Postgres writes a multirange; a waiver leaves nothing."""
    kinds = {extra.kind for extra in derived.adjustments if extra.meter == meter}
    if AdjustmentKind.SPOT_INTERRUPT_FREE in kinds:
        return "{}"
    pieces = [
        f"[{each.start.isoformat()},{each.end.isoformat()})"
        for each in derived.segments
        if each.meter == meter and each.usd is None and each.end is not None
    ]
    return "{" + ",".join(pieces) + "}"


def _instant(due: Due, ends: Sequence[datetime | None]) -> datetime:
    """Where a correction falls, unless that is in a closed month: the last instant of what it corrects."""
    last = max((end for end in ends if end is not None), default=due.changed_at)
    if due.held.closed:
        return due.held.ended_at or last
    assert due.closed_until is not None
    return min(last, due.closed_until - _MICROSECOND)


def _paid_by(commitment_id: int | None) -> str:
    return "" if commitment_id is None else f":paid:{commitment_id}"


def _row(each: Segment, *, gpus: int) -> SegmentRow:
    return SegmentRow(
        meter=each.meter,
        phase=each.phase.value,
        start=each.start,
        end=each.end,
        quantity=each.quantity,
        usd=each.usd,
        list_usd=each.list_usd,
        price_source=each.source.value,
        confidence=each.confidence.value,
        why=each.why,
        commitment_id=each.commitment_id,
        gpus=gpus if each.leads else 0,
    )
