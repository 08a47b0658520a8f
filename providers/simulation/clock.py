"""The cloud's clock: the machine's own, optionally faster and optionally wrong by a fixed skew.

Times inside the engine are whole microseconds since 1970 (`int`), so that a bill is exact. A scaled clock is
anchored once, in the state on disk, and goes on from there after a restart.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

MICROS_PER_S = 1_000_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def micros(seconds: float) -> int:
    return round(seconds * MICROS_PER_S)


def as_datetime(at: int) -> datetime:
    return _EPOCH + timedelta(microseconds=at)


def from_datetime(at: datetime) -> int:
    """Raises:
    TypeError: ``at`` has no zone.
    """
    return (at - _EPOCH) // timedelta(microseconds=1)


def as_text(at: int | None) -> str | None:
    """RFC 3339 with microseconds, as the wire shows it."""
    return None if at is None else as_datetime(at).isoformat(timespec="microseconds")


def as_http_date(at: int) -> str:
    return format_datetime(as_datetime(at).replace(microsecond=0), usegmt=True)


def real_time() -> int:
    return time.time_ns() // 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """``anchor`` is the real time at which simulated and real time agreed; both run from there."""

    anchor: int
    scale: float = 1.0
    skew_s: float = 0.0
    real: Callable[[], int] = real_time

    def now(self) -> int:
        real = self.real()
        return self.anchor + round((real - self.anchor) * self.scale) + micros(self.skew_s)
