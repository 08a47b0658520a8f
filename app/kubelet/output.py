"""Answers ``kubectl logs``: from the cloud while there is a machine, from the kept tail afterwards.

A stream that breaks is taken up again where it stopped, since every provider begins at the first byte; one
that cannot be is broken off, so that an outage never reads as an empty log.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine
from starlette.types import Receive, Scope, Send

from app.inventory.budget import Urgency
from app.kube.errors import KubeError
from app.kubelet.find import Finder, Target
from app.kubelet.handover import break_off
from app.kubelet.lines import CUT, Filter, Line, Splitter, Tail
from app.kubelet.options import LogOptions
from app.machines import tail as kept
from app.store import outputs
from app.store.engine import StoreUnavailable, connect
from providers.base import ProviderError, Ref
from providers.capabilities import KeepsPreviousRun, LogChunk, StreamsLogs

log = structlog.get_logger()
TRIES = 5  # of a broken stream, without a byte in between
RETRY_S, RETRY_MAX_S = 0.2, 5.0
LOOK_S, LOOK_MAX_S = 0.5, 5.0  # how often a Pod that waits is looked at

Counts = dict[str | None, int]


class NoLog(Exception):
    """There is nothing to answer with, and this is what a kubelet says then."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Outputs:
    """Finds where a container's output is. One for the endpoint."""

    def __init__(
        self,
        *,
        finder: Finder,
        engine: AsyncEngine,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._finder, self._engine, self._now = finder, engine, now

    async def open(self, target: Target, container: str, options: LogOptions) -> "Answer":
        """The answer to one request.

        Raises:
            NoLog: see there. ProviderError: the cloud could not be asked.
        """
        if not target.has(container):
            name = target.pod["metadata"]["name"]
            raise NoLog(404, f'container "{container}" not found in pod "{name}"')
        if options.previous:
            return self._answer(await self._previous(target, container), options)
        if not target.over and not target.has_run(container):
            if not options.follow:
                raise _waiting(target, container)
            return self._answer(self._awaited(target, container, options), options)
        source = await self._source(target, container, options)
        return self._answer(source, options)

    def _answer(self, source: AsyncIterator[LogChunk], options: LogOptions) -> "Answer":
        return Answer(source, options, now=self._now)

    async def _source(self, target: Target, container: str, options: LogOptions) -> AsyncIterator[LogChunk]:
        """Where a workload that runs, or has run, is heard."""
        if target.over and (held := await self._kept(target)) is not None:
            if options.follow and options.tail_lines is not None:
                return self._tail(held, options.tail_lines)
            return held
        if target.account is None or target.ref is None:
            if target.over:
                raise self._nothing(target, container)
            raise NoLog(500, f"the machine of pod {target.name} is not known to this replica yet")
        provider = target.provider
        if not isinstance(provider, StreamsLogs):
            raise NoLog(404, f'provider "{target.ref.provider}" shows no output of its machines')
        if options.follow and options.tail_lines is not None:
            return self._tail_then_follow(target, provider, target.ref, options.tail_lines)
        first = await self._open(target, provider, target.ref, options)
        if first is None and target.over:
            raise self._nothing(target, container)
        return self._resumed(target, provider, target.ref, options, first=first, counts={})

    def _nothing(self, target: Target, container: str) -> NoLog:
        name = target.pod["metadata"]["name"]
        return NoLog(
            400,
            f'container "{container}" in pod "{name}" is not available: its machine is gone, and none of its'
            " output was kept",
        )

    async def _previous(self, target: Target, container: str) -> AsyncIterator[LogChunk]:
        name = target.pod["metadata"]["name"]
        missing = NoLog(400, f'previous terminated container "{container}" in pod "{name}" not found')
        provider = target.provider
        if target.ref is None or not isinstance(provider, KeepsPreviousRun):
            raise missing
        found = await provider.previous_logs(target.ref)
        if found is None:
            raise missing
        return found

    async def _kept(self, target: Target) -> AsyncIterator[LogChunk] | None:
        try:
            async with connect(self._engine) as conn:
                records = await outputs.load(conn, target.uid)
        except StoreUnavailable as error:
            log.info("store not asked for output", error=str(error)[:200])
            return None
        if records is None:
            return None
        return _iterated(list(kept.unpacked(records)))

    async def _open(
        self, target: Target, provider: StreamsLogs, ref: Ref, options: LogOptions
    ) -> AsyncIterator[LogChunk] | None:
        assert target.account is not None
        await target.account.budget.take(Urgency.RENT)
        hints = not options.follow  # a followed stream is counted from its first byte, to be taken up again
        return await provider.logs(
            ref,
            follow=options.follow,
            since=options.since if hints else None,
            tail_lines=options.tail_lines if hints else None,
        )

    async def _resumed(
        self,
        target: Target,
        provider: StreamsLogs,
        ref: Ref,
        options: LogOptions,
        *,
        first: AsyncIterator[LogChunk] | None,
        counts: Counts,
    ) -> AsyncIterator[LogChunk]:
        """The stream without what ``counts`` says was delivered already, however often it breaks."""
        failures, stream, wait_s = 0, first, LOOK_S
        while True:
            try:
                if stream is None:
                    stream = await self._open(target, provider, ref, options)
                if stream is not None:
                    async for chunk in _without(stream, dict(counts)):
                        failures = 0
                        counts[chunk.stream] = counts.get(chunk.stream, 0) + len(chunk.data)
                        yield chunk
                    return
                if not options.follow or await self._is_over(target):
                    return
                await asyncio.sleep(wait_s)  # it has said nothing yet
                wait_s = min(LOOK_MAX_S, wait_s * 1.5)
            except ProviderError as error:
                failures += 1
                if failures >= TRIES or (not options.follow and (options.since or options.tail_lines)):
                    raise
                log.info("output taken up again", pod=target.name, error=str(error))
                await asyncio.sleep(min(RETRY_MAX_S, RETRY_S * 2.0**failures))
            stream = None

    async def _tail_then_follow(
        self, target: Target, provider: StreamsLogs, ref: Ref, count: int
    ) -> AsyncIterator[LogChunk]:
        """The last lines of what is there, then what comes.

        Read twice: only the end of a stream says what is there already.
        """
        counts: Counts = {}
        backlog = self._resumed(target, provider, ref, LogOptions(), first=None, counts=counts)
        async for chunk in self._tail(backlog, count):
            yield chunk
        follow = LogOptions(follow=True)
        async for chunk in self._resumed(target, provider, ref, follow, first=None, counts=counts):
            yield chunk

    async def _tail(self, source: AsyncIterator[LogChunk], count: int) -> AsyncIterator[LogChunk]:
        """The last lines of a stream that ends."""
        splitter, tail = Splitter(), Tail(count)
        async for chunk in source:
            for line in splitter.feed(chunk, arrived=self._now()):
                tail.add(line)
        for line in splitter.rest():
            tail.add(line)
        if tail.cut:
            yield LogChunk(data=CUT)
        for line in tail.lines():
            yield LogChunk(data=line.data, stream=line.stream, at=line.at)

    async def _awaited(self, target: Target, container: str, options: LogOptions) -> AsyncIterator[LogChunk]:
        """A follower that came before the machine: it waits for it, as long as the Pod lives."""
        wait_s = LOOK_S
        while not target.over and not target.has_run(container):
            await asyncio.sleep(wait_s)
            wait_s = min(LOOK_MAX_S, wait_s * 1.2)
            newer = await self._look(target)
            if newer is None:
                return
            target = newer
        if target.over and not target.has_run(container):
            status = target.pod["status"]
            words = f"{status.get('reason') or status['phase']}: {status.get('message') or 'it never ran'}"
            yield LogChunk(data=f"[{words}]\n".encode())
            return
        try:
            source = await self._source(target, container, options)
        except NoLog as error:
            yield LogChunk(data=f"[{error}]\n".encode())
            return
        async for chunk in source:
            yield chunk

    async def _look(self, target: Target) -> Target | None:
        """The same Pod as it is now; None when it is gone."""
        metadata = target.pod["metadata"]
        try:
            newer = await self._finder.pod(metadata["namespace"], metadata["name"])
        except KubeError:
            return target
        return newer if newer is not None and newer.uid == target.uid else None

    async def _is_over(self, target: Target) -> bool:
        newer = await self._look(target)
        return newer is None or newer.over


class Answer:
    """The response, as the options want it."""

    def __init__(
        self, source: AsyncIterator[LogChunk], options: LogOptions, *, now: Callable[[], datetime]
    ) -> None:
        self._source, self._options, self._now = source, options, now
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/plain"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def put(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        await put(b"")  # the head leaves now, whenever the first line comes
        work = asyncio.create_task(self._write(put))
        gone = asyncio.create_task(_disconnected(receive))
        watched: set[asyncio.Future[object]] = {work, gone, self.ended}  # type: ignore[arg-type]
        try:
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            if work.done() and work.exception() is None:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            elif not gone.done():
                if work.done() and not isinstance(work.exception(), ProviderError):
                    log.error("output failed", exc_info=work.exception())
                break_off(scope)
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _write(self, put: Callable[[bytes], Awaitable[None]]) -> None:
        options, splitter, chosen = self._options, Splitter(), Filter(self._options)
        # A followed tail was cut where it was gathered.
        tail = Tail(options.tail_lines) if options.tail_lines is not None and not options.follow else None

        async def take(lines: list[Line]) -> None:
            wanted = [line for line in lines if chosen.wants(line)]
            if tail is not None:
                for line in wanted:
                    tail.add(line)
            elif data := b"".join(chosen.shown(line) for line in wanted):
                await put(data)

        source = self._source
        try:
            async for chunk in source:
                await take(list(splitter.feed(chunk, arrived=self._now())))
                if chosen.full:
                    return
            await take(list(splitter.rest()))
            if tail is not None:
                if tail.cut:
                    await put(chosen.limited(CUT))
                for line in tail.lines():
                    if data := chosen.shown(line):
                        await put(data)
        finally:
            close = getattr(source, "aclose", None)
            if close is not None:
                await close()


async def _without(stream: AsyncIterator[LogChunk], skip: Counts) -> AsyncIterator[LogChunk]:
    try:
        async for chunk in stream:
            left = skip.get(chunk.stream, 0)
            if left >= len(chunk.data):
                skip[chunk.stream] = left - len(chunk.data)
                continue
            skip[chunk.stream] = 0
            yield LogChunk(data=chunk.data[left:], stream=chunk.stream, at=chunk.at)
    finally:
        close = getattr(stream, "aclose", None)
        if close is not None:
            await close()


async def _iterated(chunks: list[LogChunk]) -> AsyncIterator[LogChunk]:
    for chunk in chunks:
        yield chunk


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _waiting(target: Target, container: str) -> NoLog:
    reason = (target.state(container).get("waiting") or {}).get("reason") or "ContainerCreating"
    name = target.pod["metadata"]["name"]
    return NoLog(400, f'container "{container}" in pod "{name}" is waiting to start: {reason}')
