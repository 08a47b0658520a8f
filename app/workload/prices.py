"""What a Pod's author lets its machine cost."""

from collections.abc import Mapping
from decimal import Decimal

from app.api.keys import MAX_PRICE_ANNOTATION
from app.api.quantities import parse_price
from app.workload.accelerators import BadRequest


def max_price_of(annotations: Mapping[str, str]) -> Decimal | None:
    """Dollars an hour for the whole machine, disk included; None when the author says nothing.

    Raises:
        BadRequest: the annotation is no amount of dollars above zero.
    """
    text = annotations.get(MAX_PRICE_ANNOTATION)
    if text is None:
        return None
    try:
        return parse_price(text.strip())
    except ValueError as error:
        raise BadRequest(f"annotation {MAX_PRICE_ANNOTATION}: {error}") from error
