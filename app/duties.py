"""What watches over the long tasks of a replica: none ends unnoticed, and a watch that stands still is told.

A task group ends when a task raises. One that returned, or that something cancelled, would be missed by
nobody: its work would just not be done any more, in a process that looks healthy.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from prometheus_client import Gauge

from app.kube.cache import Cache

# A healthy watch hears a bookmark each minute and is given up after 80 s of silence. Without an API server
# the lead is lost long before this, and the watches with it.
STALE_S = 300.0

SILENCE = Gauge(
    "nebula_watch_silence_seconds", "Since anything was heard by a watch of the leader.", ["watch"]
)


def _silent_s(cache: Cache) -> float:
    return cache.silent_s


class DutyEnded(Exception):
    """A task that is to last as long as its replica, or its term, was over before."""


async def watch_over(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Wait until cancelled, or until one of the tasks is over.

    Raises:
        DutyEnded: with the names of those that are over.
    """
    over, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    raise DutyEnded(", ".join(sorted(task.get_name() for task in over)))


class Watches:
    """The leader's watches, as liveness and metrics see them. Empty while nobody here leads."""

    def __init__(self) -> None:
        self._caches: tuple[Cache, ...] = ()

    @contextmanager
    def of_a_term(self, caches: Sequence[Cache]) -> Iterator[None]:
        self._caches = tuple(caches)
        for cache in caches:
            SILENCE.labels(watch=cache.path).set_function(partial(_silent_s, cache))
        try:
            yield
        finally:
            self._caches = ()
            SILENCE.clear()

    def stale(self) -> str | None:
        """Which watches have stood still for so long that only a restart helps; None for none.

        One that the server refuses (a right that was taken, a kind that was deleted) is no such: the next
        leader would be refused as well.
        """
        silent = [
            f"{cache.path} for {cache.unanswered_s:.0f} s"
            for cache in self._caches
            if cache.unanswered_s > STALE_S
        ]
        return f"nothing was heard of {', '.join(silent)}" if silent else None
