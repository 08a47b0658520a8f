"""How much of what a machine has, and a workload asks for: does the one go into the other. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from providers.base import Offering, Workload

_GIB: Final = 2**30
RESOURCES: Final = {"cpu": "cpu", "memory_bytes": "memory", "disk_bytes": "ephemeral-storage"}
"""The names of amounts here, and what a Pod calls them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """What a workload asks of a machine, or a machine has. None: it is not said, and so no hindrance."""

    cpu: Decimal | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None

    @classmethod
    def of(cls, thing: Offering | Workload) -> "Amounts":
        return cls(cpu=thing.cpu, memory_bytes=thing.memory_bytes, disk_bytes=thing.disk_bytes)

    def exceeding(self, most: "Amounts") -> list[str]:
        """The names of the amounts that are above ``most``."""
        return [
            name
            for name in RESOURCES
            if (asked := getattr(self, name)) is not None
            and (has := getattr(most, name)) is not None
            and asked > has
        ]

    def shown(self, name: str) -> str:
        """One amount as a Pod would write it, whole GiB at least: ``8``, ``64Gi``, ``14.8Gi``."""
        amount = getattr(self, name)
        if name == "cpu":
            return f"{Decimal(amount).normalize():f}"
        gib = (Decimal(amount) / _GIB).quantize(Decimal("0.1"))
        return f"{gib.normalize():f}Gi"


def roomy(rows: Iterable[Offering], asked: Amounts | None) -> tuple[Offering, ...]:
    """Those that have room for what is asked; all of them when nobody knows what that is."""
    return tuple(row for row in rows if asked is None or not asked.exceeding(Amounts.of(row)))


def largest(rows: Iterable[Offering]) -> Amounts:
    """The most of each that any of them has; no one machine need have all of it."""
    sizes = [Amounts.of(row) for row in rows]
    return Amounts(
        cpu=max((size.cpu for size in sizes if size.cpu is not None), default=None),
        memory_bytes=max(
            (size.memory_bytes for size in sizes if size.memory_bytes is not None), default=None
        ),
        disk_bytes=max((size.disk_bytes for size in sizes if size.disk_bytes is not None), default=None),
    )


def too_small(rows: Iterable[Offering], asked: Amounts, *, what: str) -> str:
    """Why none of ``rows`` has room, in words; ``what``: how to call them, ``h100:8 machines``."""
    most = largest(rows)
    above = asked.exceeding(most)
    if not above:
        return f"none of its {what} has all that the Pod asks for together"
    parts = [
        f"{RESOURCES[name]} {most.shown(name)} at most, and {asked.shown(name)} is asked for"
        for name in above
    ]
    return f"its {what} have {'; '.join(parts)}"
