"""RunPod's own account of what pods have cost, by the hour -> bill lines. Pure.

The history lags by about an hour, and nobody says by how much at most. A line counts as final a day after its
hour: by then the last hour of the same pod is there, too, which would be missed otherwise.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from decimal import Decimal

from providers.base import ResourceId
from providers.capabilities import BillLine
from providers.runpod.wire import BillRecords

FINAL_AFTER = timedelta(hours=24)
_DIGITS_MAX = 12


def lines_of(body: BillRecords, *, since: datetime, until: datetime, now: datetime) -> Sequence[BillLine]:
    """Whole hours inside the window; ``now`` is RunPod's.

    Numbers come without the zeros at their end. How they are rounded shows in the longest of them, and each
    line is written so: whoever compares takes a line's digits for its exactness.
    """
    digits = min(_DIGITS_MAX, max((_digits(each.total) for each in body.records), default=0))
    return [
        BillLine(
            resource_id=ResourceId(each.pod_id),
            identity=None,
            kind=None,
            start=each.start,
            end=each.end,
            usd=each.total.quantize(Decimal(1).scaleb(-digits)),
            final=each.end + FINAL_AFTER <= now,
        )
        for each in body.records
        if each.pod_id and since <= each.start and each.end <= min(until, now)
    ]


def _digits(amount: Decimal) -> int:
    exponent = amount.as_tuple().exponent
    return max(0, -exponent) if isinstance(exponent, int) else 0
