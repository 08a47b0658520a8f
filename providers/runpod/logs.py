"""RunPod's log stream: server-sent events that never end by themselves.

There is no switch for "no more than there is now", so a silence ends a read that does not follow; and a
container's lines are forgotten about two minutes after it is removed.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from datetime import datetime

from pydantic import ValidationError

from providers.base import End, EndReason, Unavailable
from providers.capabilities import LogChunk
from providers.runpod.client import NoAnswer, NotSent, Reply, RunPodClient
from providers.runpod.orders import END_MARK
from providers.runpod.refusals import failure
from providers.runpod.wire import LogLine

_SILENCE_S = 2.0
_STILL_THERE_S = 10.0  # how often a silent follower asks whether the pod is
_TAIL_MAX = 5000
_SYSTEM_TAIL = 20
_CONNECT_S = 10.0


async def chunks(
    client: RunPodClient,
    pod_id: str,
    *,
    follow: bool,
    since: datetime | None,
    tail_lines: int | None,
    over: Callable[[], Awaitable[bool]],
    connect_s: float,
) -> AsyncIterator[LogChunk]:
    """What the container wrote, a chunk a line. A follower ends once the pod is ``over`` and silent.

    Raises:
        Unavailable, Throttled: the stream broke, or there was none.
    """
    query = {"source": "container", "tail": str(min(tail_lines or _TAIL_MAX, _TAIL_MAX))}
    if since is not None:
        query |= {"since": since.isoformat()}
    quiet_s = _STILL_THERE_S if follow else _SILENCE_S
    ending = False
    async with aclosing(_lines(client, pod_id, query=query, connect_s=connect_s)) as lines:
        reader = _Patient(lines)
        try:
            while True:
                line = await reader.next(within_s=_SILENCE_S if ending else quiet_s)
                if line is not None:
                    yield LogChunk(data=line.line.encode() + b"\n", at=line.ts)
                elif not follow or ending:
                    return
                else:
                    ending = await over()
        finally:
            await reader.close()


async def system_lines(client: RunPodClient, pod_id: str) -> list[str]:
    """The last lines that the host wrote about the pod: pulls, starts and stops.

    Raises:
        Unavailable, Throttled: they cannot be read.
    """
    query = {"source": "system", "tail": str(_SYSTEM_TAIL)}
    found: list[str] = []
    async with aclosing(_lines(client, pod_id, query=query, connect_s=_CONNECT_S)) as lines:
        reader = _Patient(lines)
        try:
            while len(found) < _SYSTEM_TAIL and (line := await reader.next(within_s=_SILENCE_S / 2)):
                found.append(line.line)
        finally:
            await reader.close()
    return found


async def reported_end(
    client: RunPodClient, pod_id: str, *, since: datetime | None, identity: str | None
) -> End | None:
    """How the command of a pod ended, as its shell says in the log since its last start; None: not yet.

    A line counts only with the pod's own identity in it, so that a program's output is not taken for it.

    Raises:
        Unavailable, Throttled: it cannot be read.
    """
    query = {"source": "container"}
    query |= {"tail": str(_SYSTEM_TAIL)} if since is None else {"since": since.isoformat()}
    end: End | None = None
    async with aclosing(_lines(client, pod_id, query=query, connect_s=_CONNECT_S)) as lines:
        reader = _Patient(lines)
        try:
            while end is None and (line := await reader.next(within_s=_SILENCE_S / 2)) is not None:
                words = line.line.split()
                if len(words) == 3 and words[:2] == [END_MARK, identity] and words[2].isdecimal():
                    code = int(words[2])
                    reason = EndReason.FAILED if code else EndReason.COMPLETED
                    end = End(reason=reason, exit_code=code, at=line.ts)
        finally:
            await reader.close()
    return end


async def _lines(
    client: RunPodClient, pod_id: str, *, query: dict[str, str], connect_s: float
) -> AsyncGenerator[LogLine, None]:
    try:
        async with client.events(f"/pods/{pod_id}/logs", query=query, connect_s=connect_s) as events:
            if isinstance(events, Reply):
                raise failure(events)
            async for data in events:
                with suppress(ValidationError):  # an event of a kind that we do not know
                    yield LogLine.model_validate_json(data)
    except (NotSent, NoAnswer) as error:
        raise Unavailable(str(error)) from error


class _Patient:
    """Waits for the next line without giving it up when the wait is over: cancelling would end the stream."""

    def __init__(self, lines: AsyncIterator[LogLine]) -> None:
        self._lines = lines
        self._next: asyncio.Task[LogLine] | None = None

    async def next(self, *, within_s: float) -> LogLine | None:
        """None: nothing came in time."""
        if self._next is None:
            self._next = asyncio.ensure_future(_following(self._lines))
        await asyncio.wait({self._next}, timeout=within_s)
        if not self._next.done():
            return None
        done, self._next = self._next, None
        return done.result()

    async def close(self) -> None:
        if self._next is not None:
            self._next.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await self._next


async def _following(lines: AsyncIterator[LogLine]) -> LogLine:
    return await anext(lines)
