"""An exec or attach, from the first byte to the exit code: a provider's `Session` on a client's `Channels`.

Bytes pass as they are, with back-pressure both ways. The exit code is told after the last byte of output; a
client that leaves ends the command, as far as the provider can. Whatever happens, the provider's session is
let go.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import structlog

from app.kubelet.channels import Channels, Obj, Sizes, Wanted
from app.kubelet.peers import Lost
from providers.base import ProviderError
from providers.capabilities import Session

log = structlog.get_logger()
DRAIN_S = 2.0  # for output that the cloud still owes when the exit code is there already

SUCCESS: Obj = {"metadata": {}, "status": "Success"}


def exited(code: int) -> Obj:
    """The status of a command that has ended."""
    if code == 0:
        return SUCCESS
    return {
        "metadata": {},
        "status": "Failure",
        "message": f"command terminated with non-zero exit code: exit status {code}",
        "reason": "NonZeroExitCode",
        "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
    }


def failed(message: str) -> Obj:
    """The status of a session that broke: never an exit code, since nobody knows one."""
    return {
        "metadata": {},
        "status": "Failure",
        "message": f"Internal error occurred: {message}",
        "reason": "InternalError",
        "details": {"causes": [{"message": message}]},
        "code": 500,
    }


class _Copy:
    """One output on its way; ``busy`` while a piece of it waits for the client."""

    def __init__(self, source: AsyncIterator[bytes], put: Callable[[bytes], Awaitable[None]]) -> None:
        self.moved_at = time.monotonic()
        self.busy = False
        self.task = asyncio.create_task(self._run(source, put))

    async def _run(self, source: AsyncIterator[bytes], put: Callable[[bytes], Awaitable[None]]) -> None:
        wanted = True
        async for data in source:
            self.busy = True
            if wanted:
                try:
                    await put(data)
                except Lost:  # of this stream alone, maybe: the command must not stand still for it
                    wanted = False
            self.busy, self.moved_at = False, time.monotonic()


async def serve(
    session: Session,
    channels: Channels,
    wanted: Wanted,
    *,
    attached: bool,
    ended: "asyncio.Future[str]",
) -> None:
    """Carry the session until it is over. ``ended``: somebody else ends it, and why."""
    copies = [_Copy(session.stdout, channels.stdout)]
    if not wanted.terminal:
        copies.append(_Copy(session.stderr, channels.stderr))
    helpers: list[asyncio.Task[None]] = []
    if wanted.stdin:
        helpers.append(asyncio.create_task(_input(session, channels)))
    if wanted.terminal:
        helpers.append(asyncio.create_task(_sizes(session, channels)))
    waiting = asyncio.create_task(session.wait())
    try:
        watched: set[asyncio.Future[object]] = {waiting, channels.peer.lost, ended}  # type: ignore[arg-type]
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        if channels.peer.lost.done():
            return
        if ended.done() and not waiting.done():
            status = failed(ended.result())
        else:
            status = await _verdict(waiting, attached=attached)
            await _drain(copies, channels)
        await channels.finish(status)
        await asyncio.wait([channels.peer.lost], timeout=DRAIN_S)
    except Lost:
        return
    finally:
        tasks = [waiting, *helpers, *(copy.task for copy in copies)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await session.aclose()
        channels.peer.close()


async def _verdict(waiting: "asyncio.Task[int]", *, attached: bool) -> Obj:
    try:
        code = waiting.result()
    except ProviderError as error:
        return failed(f"the session broke: {error}")
    except Exception as error:  # an adapter's defect
        log.exception("session failed")
        return failed(f"the session broke: {type(error).__name__}")
    return SUCCESS if attached else exited(code)


async def _drain(copies: list[_Copy], channels: Channels) -> None:
    """All output, however slowly the client reads; but not for ever what the cloud does not end."""
    while True:
        late = [copy for copy in copies if not copy.task.done()]
        if not late or channels.peer.lost.done():
            return
        await asyncio.wait([*(copy.task for copy in late), channels.peer.lost], timeout=DRAIN_S)
        newest = max(copy.moved_at for copy in late)
        if not any(copy.busy for copy in late) and time.monotonic() - newest >= DRAIN_S:
            return


async def _input(session: Session, channels: Channels) -> None:
    try:
        while data := await channels.stdin():
            await session.write(data)
        if not channels.peer.lost.done():
            await session.end_input()
    except ProviderError as error:  # a command that reads no more may go on writing
        log.debug("input not taken", error=str(error))
        while await channels.stdin():
            pass


async def _sizes(session: Session, channels: Channels) -> None:
    sizes, last = Sizes(), None
    try:
        while data := await channels.sizes():
            size = sizes.feed(data)
            if size is not None and size != last:
                last = size
                await session.resize(columns=size[0], rows=size[1])
    except ProviderError as error:
        log.debug("size not taken", error=str(error))
        while await channels.sizes():
            pass
