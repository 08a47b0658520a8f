"""A token bucket: so many at once, so many a second on average. Seconds of a monotonic clock."""

import asyncio
import time
from collections.abc import Callable


class TokenBucket:
    def __init__(self, *, per_s: float, burst: float, now: Callable[[], float] = time.monotonic) -> None:
        """Full at first: ``burst`` tokens, refilled by ``per_s`` a second."""
        self._per_s, self._burst, self._now = per_s, burst, now
        self._tokens = burst
        self._at = now()

    def take(self) -> bool:
        """Take a token if there is one."""
        self._refill()
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    async def wait(self) -> None:
        """Take the next token, waiting for it in turn."""
        self._refill()
        self._tokens -= 1  # in debt at once, so that those who come later wait longer
        if self._tokens < 0:
            await asyncio.sleep(-self._tokens / self._per_s)

    @property
    def full(self) -> bool:
        """Whether nothing has been taken for so long that a new bucket would be the same."""
        self._refill()
        return self._tokens >= self._burst

    def _refill(self) -> None:
        now = self._now()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._per_s)
        self._at = now
