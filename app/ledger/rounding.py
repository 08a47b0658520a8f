"""Exact amounts -> amounts that people read. Rounding happens here and nowhere else, and its parts add up."""

from collections.abc import Sequence
from decimal import ROUND_FLOOR, ROUND_HALF_EVEN, Decimal, localcontext

from app.ledger.rules import total
from app.store.ledger_values import EXACT

_HOUR = Decimal(3600)


def digits_for(dollar_seconds: Decimal) -> int:
    """Cents for what costs dollars, more where cents would hide everything."""
    dollars = abs(dollar_seconds) / _HOUR
    return 2 if dollars >= 100 else 4 if dollars >= 1 else 6


def rounded(dollar_seconds: Decimal, *, digits: int) -> Decimal:
    """Dollars to so many decimals, half to even."""
    with localcontext(EXACT):
        return (dollar_seconds / _HOUR).quantize(Decimal(1).scaleb(-digits), rounding=ROUND_HALF_EVEN)


def shares(parts: Sequence[Decimal], *, digits: int) -> list[Decimal]:
    """Each part in dollars, so rounded that they add up to the rounded total (largest remainder)."""
    step = Decimal(1).scaleb(-digits)
    with localcontext(EXACT):
        exact = [part / _HOUR for part in parts]
        floors = [each.quantize(step, rounding=ROUND_FLOOR) for each in exact]
        missing = int((rounded(total(parts), digits=digits) - total(floors)) / step)
        by_remainder = sorted(range(len(parts)), key=lambda index: (floors[index] - exact[index], index))
        for index in by_remainder[:missing]:
            floors[index] += step
    return floors
