"""One token bucket an account, so that polling never starves a teardown: terminate, then rent, then list.

Rates are calls a second on the event loop's clock.
"""

import asyncio
import heapq
from enum import IntEnum


class Urgency(IntEnum):
    """Who goes first when calls are short."""

    TERMINATE = 0
    RENT = 1
    LIST = 2


class CallBudget:
    """At most ``burst`` calls at once and ``rate`` a second after that; waiters by urgency, then by order."""

    def __init__(self, *, rate: float, burst: int) -> None:
        self._rate, self._burst = rate, float(burst)
        self._tokens = float(burst)
        self._at: float | None = None
        self._order = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, urgency: Urgency) -> None:
        """Wait for the right to make one call."""
        self._refill()
        if not self._waiting and self._tokens >= 1:
            self._tokens -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._order += 1
        heapq.heappush(self._waiting, (urgency, self._order, turn))
        self._arm()
        await turn

    def pause(self, for_s: float) -> None:
        """The cloud asked for patience: no call before ``for_s`` has passed, whatever the urgency."""
        self._refill()
        self._tokens = min(self._tokens, 1 - for_s * self._rate)

    def charge(self, calls: int) -> None:
        """Calls that were made without a turn of their own: the further pages of a list."""
        self._refill()
        self._tokens -= calls

    def _refill(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._at is not None:
            self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now

    def _arm(self) -> None:
        if self._timer is None and self._waiting:
            wait_s = max(0.0, (1 - self._tokens) / self._rate)
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._serve)

    def _serve(self) -> None:
        self._timer = None
        self._refill()
        while self._waiting and self._tokens >= 1:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():  # a waiter that was cancelled gives its turn away
                turn.set_result(None)
                self._tokens -= 1
        self._arm()
