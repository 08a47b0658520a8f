"""A keyed work queue: one worker per key at a time, and the newest state wins.

Keys, not events, are queued: a worker always looks the object up again, so ten quick changes to one Pod cost
one reconcile. A key that is added while it is worked on is worked on again afterwards. All durations are
seconds on the event loop's clock. Nothing here knows Kubernetes.
"""

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

import structlog

from app.kube.bucket import TokenBucket

log = structlog.get_logger()
K = TypeVar("K", bound=Hashable)

BASE_DELAY_S = 0.5
MAX_DELAY_S = 300.0


@dataclass(frozen=True, slots=True)
class Again:
    """A reconcile result: look at this key again in ``after_s`` seconds. Not a failure: no back-off grows."""

    after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """What a queue is doing (gauges) and has done since its start (counters)."""

    depth: int
    """Keys that wait for a worker."""
    oldest_s: float
    """How long the first of them has waited."""
    active: int
    """Keys in work."""
    delayed: int
    """Keys that wait for their time."""
    added: int
    done: int
    failed: int
    busy_s: float
    """Seconds spent in reconciles, all workers together."""


class Closed(Exception):
    """The queue is drained: there will be no more keys."""


class WorkQueue(Generic[K]):
    def __init__(
        self,
        *,
        base_delay_s: float = BASE_DELAY_S,
        max_delay_s: float = MAX_DELAY_S,
        limiter: TokenBucket | None = None,
    ) -> None:
        """``limiter`` bounds how often a key is handed out at all, whatever the reason."""
        self._base_s, self._max_s = base_delay_s, max_delay_s
        self._limiter = limiter
        self._ready: dict[K, float] = {}  # insertion order is the order of work; value: since when
        self._again: set[K] = set()  # added while active
        self._active: dict[K, float] = {}
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._failures: dict[K, int] = {}
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._closed = False
        self._added = self._done = self._failed = 0
        self._busy_s = 0.0

    def add(self, key: K) -> None:
        """Mark ``key`` dirty. Cheap and idempotent; safe to call per watch event."""
        if timer := self._timers.pop(key, None):
            timer.cancel()
        if self._closed or key in self._ready:
            return
        if key in self._active:
            self._again.add(key)
            return
        self._added += 1
        self._ready[key] = _now()
        self._wake()

    def add_after(self, key: K, delay_s: float) -> None:
        """Add ``key`` once ``delay_s`` has passed, unless something adds it sooner."""
        if self._closed:
            return
        if delay_s <= 0:
            self.add(key)
            return
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if timer and timer.when() <= loop.time() + delay_s:
            return
        if timer:
            timer.cancel()
        self._timers[key] = loop.call_later(delay_s, self.add, key)

    def add_failed(self, key: K) -> None:
        """Add ``key`` after a delay that doubles with each failure in a row, half of it left to chance."""
        tries = self._failures[key] = self._failures.get(key, 0) + 1
        ceiling_s = min(self._max_s, self._base_s * 2 ** min(tries - 1, 30))
        self.add_after(key, random.uniform(0.5, 1.0) * ceiling_s)

    def forget(self, key: K) -> None:
        """Count failures of ``key`` from zero again."""
        self._failures.pop(key, None)

    def failures(self, key: K) -> int:
        """How often in a row ``key`` has failed."""
        return self._failures.get(key, 0)

    @asynccontextmanager
    async def take(self) -> AsyncIterator[K]:
        """Lend out the next dirty key; nobody else gets it inside the block.

        Raises:
            Closed: the queue was closed.
        """
        key = await self._next()
        self._active[key] = _now()
        try:
            yield key
        finally:
            self._busy_s += _now() - self._active.pop(key)
            self._done += 1
            if key in self._again:
                self._again.discard(key)
                self.add(key)

    def close(self) -> None:
        """Hand out nothing more, and forget what waits: the next start looks at everything anyway."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._ready.clear()
        self._again.clear()
        while self._waiters:
            self._wake()

    def count_failure(self) -> None:
        self._failed += 1

    def stats(self) -> Stats:
        return Stats(
            depth=len(self._ready),
            oldest_s=_now() - next(iter(self._ready.values())) if self._ready else 0.0,
            active=len(self._active),
            delayed=len(self._timers),
            added=self._added,
            done=self._done,
            failed=self._failed,
            busy_s=self._busy_s,
        )

    async def _next(self) -> K:
        while True:
            if self._limiter:
                await self._wait_ready()
                await self._limiter.wait()
            await self._wait_ready()
            # Nothing is awaited between here and the return, so the key cannot be lost.
            key = next(iter(self._ready))
            del self._ready[key]
            return key

    async def _wait_ready(self) -> None:
        while not self._ready:
            if self._closed:
                raise Closed
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._wake()  # the wake-up was ours; pass it on
                else:
                    with suppress(ValueError):  # a wake-up passed over it, when several are cancelled at once
                        self._waiters.remove(waiter)
                raise
        if self._closed:
            raise Closed

    def _wake(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return


async def run_workers(
    queue: WorkQueue[K],
    reconcile: Callable[[K], Awaitable[Again | None]],
    *,
    workers: int,
    name: str = "reconcile",
    expected: tuple[type[Exception], ...] = (),
) -> None:
    """Reconcile until the queue is closed (each worker ends its key first) or this is cancelled.

    One bad key backs off; it never stops the rest. Errors of an ``expected`` type are logged as a line,
    others with their traceback.
    """
    async with asyncio.TaskGroup() as tasks:
        for n in range(workers):
            tasks.create_task(_work(queue, reconcile, name=name, expected=expected), name=f"{name}-{n}")


async def _work(
    queue: WorkQueue[K],
    reconcile: Callable[[K], Awaitable[Again | None]],
    *,
    name: str,
    expected: tuple[type[Exception], ...],
) -> None:
    structlog.contextvars.bind_contextvars(queue=name)  # once: the task's context is its own
    while True:
        try:
            async with queue.take() as key:
                with structlog.contextvars.bound_contextvars(key=str(key)):
                    await _one(queue, reconcile, key, expected=expected)
        except Closed:
            return


async def _one(
    queue: WorkQueue[K],
    reconcile: Callable[[K], Awaitable[Again | None]],
    key: K,
    *,
    expected: tuple[type[Exception], ...],
) -> None:
    try:
        again = await reconcile(key)
    except expected as error:
        log.info("reconcile put off", error=f"{type(error).__name__}: {error}"[:256])
        queue.count_failure()
        queue.add_failed(key)
    except Exception:
        log.exception("reconcile failed")
        queue.count_failure()
        queue.add_failed(key)
    else:
        queue.forget(key)
        if again:
            queue.add_after(key, again.after_s)


def _now() -> float:
    return asyncio.get_running_loop().time()
