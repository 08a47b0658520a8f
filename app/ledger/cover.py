"""What each prepayment covers: which machines, from when to when. Pure.

A prepayment covers so many machines at once as it has, those first that began first, and a machine that is
covered stays so until it ends or the term does; then the next one takes its place. It covers none any more
from the very microsecond in which its amount is used up. What a person has set a price for is not covered;
where several prepayments fit a machine, the most special one covers it, and another one only what is left.
A machine whose books are shut (the cloud has billed it) keeps what covers it, place and money, and gets none.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import ROUND_FLOOR, Decimal

from app.ledger.rules import seconds, total
from app.store.ledger_values import EXACT, Commitment, Covered, Fitting, Override

_EVER = datetime.max.replace(tzinfo=UTC)
_MILLION = Decimal(1_000_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """When a machine is there as far as is known; ``end`` None: it goes on.

    ``kept``: what covers it for good, since nothing of it is written any more; None: that is to be found.
    """

    run: Fitting
    start: datetime
    end: datetime | None
    kept: Covered | None = None


@dataclass(frozen=True, slots=True, order=True)
class _Span:
    start: datetime
    run_id: int
    end: datetime


def cover(
    stays: Iterable[Stay], *, commitments: Sequence[Commitment], overrides: Sequence[Override]
) -> Mapping[int, tuple[Commitment, ...]]:
    """By run, the pieces of prepayments that cover it: each as one with that piece for its term."""
    runs: dict[int, Fitting] = {}
    found: dict[int, list[Commitment]] = {}
    free: dict[int, list[_Span]] = {}
    kept: dict[int, list[_Span]] = {}  # by commitment
    for stay in stays:
        if stay.kept is not None:
            for number, start, end in stay.kept:
                kept.setdefault(number, []).append(_Span(start, stay.run.id, end))
            continue
        runs[stay.run.id] = stay.run
        whole = [_Span(stay.start, stay.run.id, stay.end or _EVER)]
        for price in overrides:
            if price.fits(stay.run):
                whole = list(_without(whole, price.starts_at, price.ends_at or _EVER))
        free[stay.run.id] = whole
    for each in commitments:
        asked = [
            _Span(max(span.start, each.starts_at), span.run_id, min(span.end, each.ends_at))
            for run_id, spans in free.items()
            if each.fits(runs[run_id])
            for span in spans
            if span.start < each.ends_at and span.end > each.starts_at
        ]
        mine = kept.get(each.id, [])
        for piece in mine:
            found.setdefault(piece.run_id, []).append(replace(each, starts_at=piece.start, ends_at=piece.end))
        for piece in _served(asked, kept=mine, machines=each.machines, limit_s=_limit_s(each)):
            found.setdefault(piece.run_id, []).append(replace(each, starts_at=piece.start, ends_at=piece.end))
            free[piece.run_id] = list(_without(free[piece.run_id], piece.start, piece.end))
    return {run_id: tuple(pieces) for run_id, pieces in found.items()}


def _limit_s(each: Commitment) -> Decimal | None:
    """Machine-seconds that its amount is good for; None: it takes nothing from it."""
    if not each.usd_per_hour:
        return None
    return EXACT.divide(each.amount_usd * 3600, each.usd_per_hour)


def _served(
    asked: Sequence[_Span], *, kept: Sequence[_Span], machines: int | None, limit_s: Decimal | None
) -> Iterator[_Span]:
    """The parts of what is asked for that there is room and money for, beside those that are kept."""
    waiting = deque(sorted(asked))
    active: dict[_Span, datetime] = {}  # since when it is covered
    queue: list[_Span] = []  # began, and found no room; the first first
    left = None if limit_s is None else limit_s - total([seconds(span.start, span.end) for span in kept])
    taken = 0  # places of those that are kept
    edges = deque(sorted([(span.start, 1) for span in kept] + [(span.end, -1) for span in kept]))
    now = waiting[0].start if waiting else _EVER
    while waiting or queue or active:
        if not active and not queue:
            now = max(now, waiting[0].start)
        while edges and edges[0][0] <= now:
            taken += edges.popleft()[1]
        while waiting and waiting[0].start <= now:
            queue.append(waiting.popleft())
        queue = [span for span in queue if span.end > now]
        while queue and (machines is None or len(active) + taken < machines):
            active[queue.pop(0)] = now
        if not active:
            if queue:
                now = edges[0][0]  # every place is taken by one that is kept, until this one ends
            continue
        until = min(span.end for span in active)
        if edges:
            until = min(until, edges[0][0])
        if waiting:
            until = min(until, waiting[0].start)
        if left is not None:
            takes = seconds(now, until) * len(active)
            if takes > left:
                step_us = (max(left, Decimal(0)) * _MILLION / len(active)).to_integral_value(ROUND_FLOOR)
                last = now + timedelta(microseconds=int(step_us))
                for span, since in active.items():
                    if since < last:
                        yield replace(span, start=since, end=last)
                return
            left -= takes
        now = until
        for span in [span for span in active if span.end <= now]:
            yield replace(span, start=active.pop(span))


def _without(spans: Sequence[_Span], low: datetime, high: datetime) -> Iterator[_Span]:
    for span in spans:
        if high <= span.start or low >= span.end:
            yield span
            continue
        if span.start < low:
            yield replace(span, end=low)
        if span.end > high:
            yield replace(span, start=high)
