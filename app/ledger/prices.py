"""What can be rented -> the prices that are listed for it. Pure."""

from collections.abc import Iterable

from app.store.ledger_upkeep import Listed
from providers.base import MeterKind, Offering


def listed(offerings: Iterable[Offering]) -> list[Listed]:
    """Each meter of each shape; a price that is no price (below zero, no number) is listed as none."""
    found = []
    for offering in offerings:
        for meter in offering.meters:
            believable = meter.usd is not None and meter.usd.is_finite() and meter.usd >= 0
            found.append(
                Listed(
                    sku=offering.shape,
                    region=offering.region,
                    tier=offering.tier.value,
                    meter=f"{meter.kind.value}:{meter.label}" if meter.label else meter.kind.value,
                    unit="GiB" if meter.kind is MeterKind.BYTES else "unit-hour",
                    quantity=meter.quantity,
                    usd=meter.usd if believable else None,
                )
            )
    return found
