"""What a container asks of its machine: the limit of each resource, the request only where there is no limit.

A machine is the Pod's alone, so there is nothing to share above a request: it gets all that it may ever use.
"""

from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, NamedTuple, TypeVar

from app.api.quantities import parse_bytes, parse_quantity
from app.workload.shapes import Unsupported

_T = TypeVar("_T", int, Decimal)


class Amounts(NamedTuple):
    """Cores and bytes; None where nothing is asked for."""

    cpu: Decimal | None
    memory_bytes: int | None
    disk_bytes: int | None


def amounts_of(container: Mapping[str, Any]) -> Amounts:
    """The amounts of one container, exact.

    Raises:
        Unsupported: one is no quantity.
    """
    return Amounts(
        cpu=_amount(container, "cpu", parse_quantity),
        memory_bytes=_amount(container, "memory", parse_bytes),
        disk_bytes=_amount(container, "ephemeral-storage", parse_bytes),
    )


def _amount(container: Mapping[str, Any], name: str, parse: Callable[[str | int], _T]) -> _T | None:
    resources = container.get("resources") or {}
    text = (resources.get("limits") or {}).get(name)
    if text is None:
        text = (resources.get("requests") or {}).get(name)
    if text is None:
        return None
    try:
        return parse(text) or None
    except ValueError as error:
        field = f"spec.containers[{container.get('name')}].resources[{name}]"
        raise Unsupported(field, f"{field} cannot be read: {error}") from error
