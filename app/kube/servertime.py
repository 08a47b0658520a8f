"""The API server's time. Deadlines of Pods are its: graces, activeDeadlineSeconds, ages.

The Date header of its answers tells how far our own clock is off. It has whole seconds and the way is part of
it, so that a difference below `TOLERATED_S` is none. Intervals that begin and end with us are monotonic, and
none of this room's; moments of rows are the database's.
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

import structlog

log = structlog.get_logger()

TOLERATED_S = 2.0
EVERY_S = 30.0  # parsing a date costs more than the rest of an answer's head


class ServerTime:
    """`now` is aware, UTC, and as the API server's clock goes since the last `hear`."""

    def __init__(self, *, own: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._own = own
        self._offset = timedelta(0)
        self._due: datetime | None = None

    def now(self) -> datetime:
        return self._own() + self._offset

    def hear(self, date: str | None) -> None:
        """The Date header of an answer that has just come; of none is looked at more often than need be."""
        here = self._own()
        # A clock that was set back would else not be noticed for as long as it was set back.
        due = self._due
        if date is None or (due is not None and due - timedelta(seconds=EVERY_S) <= here < due):
            return
        try:
            there = parsedate_to_datetime(date)
        except ValueError:
            return
        self._due = here + timedelta(seconds=EVERY_S)
        off = there + timedelta(seconds=0.5) - here  # the header leaves out the part of a second
        wrong = abs(off.total_seconds()) > TOLERATED_S
        if wrong != bool(self._offset):
            log.warning(
                "our clock against the API server's", ahead_s=round(-off.total_seconds(), 1), wrong=wrong
            )
        self._offset = off if wrong else timedelta(0)
