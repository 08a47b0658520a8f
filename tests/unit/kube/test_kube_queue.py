"""The work queue: what is worked on, how often, and by how many at once."""

import asyncio

import pytest

from app.kube import queue as queues
from app.kube.bucket import TokenBucket
from app.kube.queue import Again, Closed, WorkQueue, run_workers


class Workers:
    """Workers that run for the length of a block; ``close`` is the graceful end."""

    def __init__(self, queue, reconcile, *, workers=2, expected=()):
        self._queue = queue
        self._run = run_workers(queue, reconcile, workers=workers, expected=expected)

    async def __aenter__(self):
        self.task = asyncio.create_task(self._run)
        return self

    async def __aexit__(self, *_):
        self._queue.close()
        await asyncio.wait_for(self.task, timeout=5)


class Work:
    """A reconcile that can be held up, and a record of what it was asked to do."""

    def __init__(self):
        self.seen: list[str] = []
        self.at_once = self.most_at_once = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.answers: dict[str, list] = {}
        self._progress = asyncio.Condition()

    async def __call__(self, key):
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        async with self._progress:
            self.seen.append(key)
            self._progress.notify_all()
        try:
            await self.gate.wait()
            answers = self.answers.get(key)
            answer = answers.pop(0) if answers else None
            if isinstance(answer, Exception):
                raise answer
            return answer
        finally:
            self.at_once -= 1

    async def begun(self, count):
        async with asyncio.timeout(5), self._progress:
            await self._progress.wait_for(lambda: len(self.seen) >= count)


async def test_a_key_that_is_added_often_is_worked_on_once():
    queue, work = WorkQueue(), Work()
    for _ in range(10):
        queue.add("a")
    queue.add("b")

    async with Workers(queue, work, workers=1):
        await work.begun(2)

    assert work.seen == ["a", "b"]


async def test_a_key_that_is_added_while_in_work_is_worked_on_again_and_never_by_two():
    queue, work = WorkQueue(), Work()
    work.gate.clear()
    queue.add("a")

    async with Workers(queue, work, workers=4):
        await work.begun(1)
        for _ in range(5):
            queue.add("a")
        work.gate.set()
        await work.begun(2)

    assert work.seen == ["a", "a"]
    assert work.most_at_once == 1


async def test_different_keys_are_worked_on_side_by_side():
    queue, work = WorkQueue(), Work()
    work.gate.clear()
    for key in "abc":
        queue.add(key)

    async with Workers(queue, work, workers=3):
        await work.begun(3)
        assert work.at_once == 3
        work.gate.set()


@pytest.mark.field_case("FC-065")
async def test_a_bad_key_backs_off_and_stops_nobody():
    queue, work = WorkQueue(base_delay_s=0.01, max_delay_s=0.02), Work()
    work.answers["bad"] = [RuntimeError("x"), RuntimeError("y")]
    queue.add("bad")
    queue.add("good")

    async with Workers(queue, work, workers=1):
        await work.begun(4)
        assert queue.failures("bad") <= 2

    assert work.seen.count("bad") == 3
    assert work.seen.count("good") == 1
    assert queue.failures("bad") == 0  # forgotten after the success
    assert queue.stats().failed == 2


async def test_the_back_off_doubles_up_to_its_maximum(monkeypatch):
    queue = WorkQueue(base_delay_s=1.0, max_delay_s=60.0)
    delays = []
    monkeypatch.setattr(queue, "add_after", lambda key, delay_s: delays.append(delay_s))

    for _ in range(100):
        queue.add_failed("a")

    assert 0.5 <= delays[0] <= 1.0
    assert 4.0 <= delays[3] <= 8.0
    assert all(30.0 <= delay <= 60.0 for delay in delays[10:])
    assert len(set(delays[10:])) > 1  # jitter


async def test_a_key_that_asks_for_it_is_looked_at_again():
    queue, work = WorkQueue(), Work()
    work.answers["a"] = [Again(after_s=0.001), Again(after_s=0)]
    queue.add("a")

    async with Workers(queue, work):
        await work.begun(3)

    assert work.seen == ["a", "a", "a"]
    assert queue.stats().failed == 0


async def test_an_event_comes_before_a_timer_and_cancels_it():
    queue = WorkQueue()
    queue.add_after("a", 3600)
    queue.add_after("a", 7200)
    assert queue.stats().delayed == 1

    queue.add("a")

    assert queue.stats().delayed == 0
    assert queue.stats().depth == 1


async def test_the_earlier_of_two_timers_holds():
    queue, work = WorkQueue(), Work()
    queue.add_after("a", 3600)
    queue.add_after("a", 0.001)

    async with Workers(queue, work):
        await work.begun(1)


async def test_closing_ends_keys_in_work_and_begins_no_others():
    queue, work = WorkQueue(), Work()
    work.gate.clear()
    queue.add("in work")
    task = asyncio.create_task(run_workers(queue, work, workers=1))
    await work.begun(1)
    queue.add("waiting")
    queue.add_after("later", 0.001)

    queue.close()
    queue.add("too late")
    assert not task.done()
    work.gate.set()
    await asyncio.wait_for(task, timeout=5)

    assert work.seen == ["in work"]
    with pytest.raises(Closed):
        async with queue.take():
            pass


async def test_cancelling_the_workers_cancels_the_work():
    queue, work = WorkQueue(), Work()
    work.gate.clear()
    queue.add("a")
    task = asyncio.create_task(run_workers(queue, work, workers=2))
    await work.begun(1)

    task.cancel()
    await asyncio.wait((task,), timeout=5)

    assert task.cancelled()
    assert work.at_once == 0


async def test_a_wake_up_is_not_lost_with_a_cancelled_worker():
    queue = WorkQueue()

    async def take():
        async with queue.take() as key:
            return key

    first, second = asyncio.create_task(take()), asyncio.create_task(take())
    await asyncio.sleep(0)
    queue.add("a")  # wakes the first
    first.cancel()

    assert await asyncio.wait_for(second, timeout=5) == "a"
    await asyncio.wait((first,))


async def test_all_workers_can_be_cancelled_in_the_moment_that_a_key_arrives():
    queue = WorkQueue()

    async def take():
        async with queue.take() as key:
            return key

    takers = [asyncio.create_task(take()) for _ in range(4)]
    await asyncio.sleep(0)
    queue.add("a")  # wakes the first, which passes it on over those that are being cancelled
    for taker in takers:
        taker.cancel()
    await asyncio.wait(takers, timeout=5)

    assert all(taker.cancelled() for taker in takers)
    assert await asyncio.wait_for(take(), timeout=5) == "a"


async def test_an_expected_error_backs_off_without_a_traceback(monkeypatch):
    lines = []
    monkeypatch.setattr(queues.log, "info", lambda event, **fields: lines.append(event), raising=False)
    monkeypatch.setattr(
        queues.log, "exception", lambda event, **fields: lines.append("TRACEBACK"), raising=False
    )
    queue, work = WorkQueue(base_delay_s=0.001), Work()
    work.answers["a"] = [LookupError("gone")]
    queue.add("a")

    async with Workers(queue, work, expected=(LookupError,)):
        await work.begun(2)

    assert lines == ["reconcile put off"]


async def test_the_limiter_bounds_every_reason_to_work():
    now = [0.0]
    bucket = TokenBucket(per_s=1000.0, burst=1, now=lambda: now[0])
    queue, work = WorkQueue(limiter=bucket), Work()
    for key in "abc":
        queue.add(key)

    async with Workers(queue, work, workers=1):
        await work.begun(3)

    assert work.seen == ["a", "b", "c"]
    assert not bucket.take()  # the clock stood still: all three were paid for


async def test_the_stats_tell_what_waits_and_what_works():
    queue, work = WorkQueue(), Work()
    work.gate.clear()
    for key in "abc":
        queue.add(key)
    queue.add_after("d", 3600)

    async with Workers(queue, work, workers=1):
        await work.begun(1)
        stats = queue.stats()
        assert (stats.depth, stats.active, stats.delayed, stats.added, stats.done) == (2, 1, 1, 3, 0)
        assert stats.oldest_s >= 0
        work.gate.set()
        await work.begun(3)

    assert queue.stats().done == 3


def test_a_bucket_gives_its_burst_and_then_its_rate():
    now = [0.0]
    bucket = TokenBucket(per_s=2.0, burst=3, now=lambda: now[0])

    assert [bucket.take() for _ in range(5)] == [True, True, True, False, False]
    now[0] += 0.5
    assert [bucket.take() for _ in range(2)] == [True, False]
    now[0] += 3600
    assert bucket.full
    assert [bucket.take() for _ in range(4)] == [True, True, True, False]
