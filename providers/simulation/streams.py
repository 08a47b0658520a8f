"""Long streams of a simulated cloud: output, a session with a process, a connection to a port.

A call of the cloud's API, which passes the faults like any other, gives a ticket; a plain TCP connection to
the streams' own port begins with that ticket and a line feed. Then come frames: one byte of kind, four of
length, and the content (a connection to a port carries bare bytes). A stream whose last frame is not ``END``
has broken.
"""

import asyncio
import contextlib
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from enum import IntEnum
from typing import Any

import orjson

from providers.simulation.faults import Fault
from providers.simulation.processes import Process, Processes, read
from providers.simulation.sockets import LOOPBACK, listening

HEAD = struct.Struct(">BI")
STAMP = struct.Struct(">Q")
_TICKET_S = 30.0
_FRAME_BYTES_MAX = 1 << 20
_BUFFER_BYTES = 256 * 1024
_LOOK_S = 0.5
_ESTABLISHED, _CLOSED = 1, 7  # states of TCP
_KEEPALIVE_S = 5
_DRAIN_S = 0.5  # for what a background child of an ended process may still say


class Frame(IntEnum):
    STDIN = 0
    STDOUT = 1
    STDERR = 2
    END = 3  # a JSON object with ``code``, where there is one
    RESIZE = 4  # ``columns`` and ``rows``
    INPUT_END = 5


class _Broken(Exception):
    """The stream is over for one side: the other has gone, or a fault has cut it."""


_ENDS = (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, _Broken)
Serve = Callable[["Wire"], Awaitable[None]]


class Streams:
    """All streams of one cloud, on a port of their own that opens with the first one."""

    def __init__(self, host: str = LOOPBACK) -> None:
        self._host = host
        self._pending: dict[bytes, tuple[Serve, Sequence[Fault]]] = {}
        self._socket: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def ticket(self, serve: Serve, faults: Sequence[Fault]) -> dict[str, str | int]:
        """What a client needs to begin: port and ticket, for ``_TICKET_S``."""
        loop = asyncio.get_running_loop()
        if self._socket is None:
            self._socket = listening(self._host, 0, backlog=512)
            self._socket.setblocking(False)
            self._keep(loop.create_task(self._listen(self._socket), name="streams"))
        ticket = secrets.token_hex(16)
        self._pending[ticket.encode()] = (serve, faults)
        loop.call_later(_TICKET_S, self._pending.pop, ticket.encode(), None)
        return {"port": self._socket.getsockname()[1], "ticket": ticket}

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._socket is not None:
            self._socket.close()
        for task in self._tasks:
            task.cancel()

    async def _listen(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()

        def protocol() -> asyncio.StreamReaderProtocol:
            return asyncio.StreamReaderProtocol(_Reader(limit=_BUFFER_BYTES, loop=loop), self._accept)

        self._server = await loop.create_server(protocol, sock=sock)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        assert isinstance(reader, _Reader)
        self._keep(task)
        try:
            with contextlib.suppress(
                OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, _Broken
            ):
                found = self._pending.pop((await reader.readuntil(b"\n")).strip(), None)
                if found is not None:
                    serve, faults = found
                    await serve(Wire(reader, writer, faults))
        finally:
            writer.close()

    def _keep(self, task: "asyncio.Task[None]") -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Reader(asyncio.StreamReader):
    """Tells that the client has left at once, also while what it sent before is not read yet."""

    def __init__(self, *, limit: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(limit=limit, loop=loop)
        self.left = asyncio.Event()

    def feed_eof(self) -> None:
        super().feed_eof()
        self.left.set()

    def set_exception(self, exc: Exception) -> None:
        super().set_exception(exc)
        self.left.set()


class Wire:
    """One stream, with the faults that it suffers from."""

    def __init__(self, reader: _Reader, writer: asyncio.StreamWriter, faults: Sequence[Fault]) -> None:
        self.reader, self._writer = reader, writer
        self._faults = {fault.kind: fault for fault in faults}
        self._sent = 0
        self._lock = asyncio.Lock()

    async def send(self, kind: Frame, content: bytes) -> None:
        await self.put(HEAD.pack(kind, len(content)) + content)

    async def put(self, data: bytes) -> None:
        """Send bytes as they are.

        Raises:
            _Broken: a fault has cut the stream. OSError: the other side has gone.
        """
        async with self._lock:  # two streams of a process share it
            if (slow := self._faults.get("stream_slow")) is not None:
                await asyncio.sleep(slow.delay_s)
            for kind in ("stream_cut", "stream_stall"):
                fault = self._faults.get(kind)
                if fault is not None and self._sent + len(data) > fault.keep:
                    self._writer.write(data[: fault.keep - self._sent])
                    await self._writer.drain()
                    if kind == "stream_stall":
                        await asyncio.Event().wait()
                    self._writer.transport.abort()
                    raise _Broken
            self._sent += len(data)
            self._writer.write(data)
            await self._writer.drain()

    async def frame(self) -> tuple[int, bytes]:
        """The next frame of the client.

        Raises:
            asyncio.IncompleteReadError: it has gone. _Broken: that was none of ours.
        """
        kind, length = HEAD.unpack(await self.reader.readexactly(HEAD.size))
        if length > _FRAME_BYTES_MAX:
            raise _Broken
        return kind, await self.reader.readexactly(length)

    async def left(self) -> None:
        """Return when the client has left, also while so much waits to be read that nothing more is taken."""
        sock = self._writer.get_extra_info("socket")
        while not self.reader.left.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.reader.left.wait(), timeout=_LOOK_S)
            with contextlib.suppress(OSError):
                if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _ESTABLISHED:
                    return

    async def dead(self) -> None:
        """Return when the client can hear nothing any more: that it has said its last is not enough.

        After its end of input nobody reads from it, so that its end is seen in the connection's state alone;
        one that closed in order, and not by a reset, is found out by keep-alive, within about a minute.
        """
        sock = self._writer.get_extra_info("socket")
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S)
            while True:
                if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CLOSED:
                    return
                await asyncio.sleep(_LOOK_S)

    async def gone(self) -> None:
        """Return when the client has left; whatever it says until then is ignored."""
        with contextlib.suppress(OSError):
            while await self.reader.read(4096):
                pass

    def end_output(self) -> None:
        with contextlib.suppress(OSError):
            self._writer.write_eof()


async def serve_output(
    wire: Wire, processes: Processes, machine_id: str, *, follow: bool, run_back: int = 0
) -> None:
    """The records of a run, each with its time, then ``END``."""

    async def send() -> None:
        async for stamp, stream, data in processes.output(machine_id, follow=follow, run_back=run_back):
            await wire.send(Frame(stream), STAMP.pack(stamp) + data)
        await wire.send(Frame.END, b"{}")

    await _until_gone(wire, send())


async def serve_attached(wire: Wire, processes: Processes, machine_id: str, *, stdin: bool) -> None:
    """What the workload says from now on, then ``END`` with its code; its input, where it has one."""
    joined = processes.joined(machine_id, stdin=stdin)
    if joined is None:
        return
    process = joined.process

    async def send() -> None:
        async for _, stream, data in processes.output(machine_id, follow=True, from_end=True):
            await wire.send(Frame(stream), data)
        await wire.send(Frame.END, orjson.dumps({"code": await process.ended}))

    work = asyncio.create_task(send(), name="attached output")
    hearing = _hear(wire, process, takes=joined.takes, ends=joined.ends)
    hear = asyncio.create_task(hearing, name="attached input")
    left = asyncio.create_task(wire.left(), name="attached left")
    watched: list[asyncio.Task[Any]] = [work, hear, left]
    try:
        # Input that the workload does not read must not hide that the client has left.
        await asyncio.wait([work, left], return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
    finally:
        for task in watched:
            task.cancel()
        await asyncio.gather(*watched, return_exceptions=True)
        if joined.ends:
            process.close_input()


async def serve_process(wire: Wire, process: Process) -> None:
    """A process with its streams. It ends when the client leaves."""
    hear = asyncio.create_task(_hear(wire, process), name="session input")
    left = asyncio.create_task(wire.left(), name="session left")
    copying = [asyncio.create_task(_copy(process.stdout, wire, Frame.STDOUT), name="session output")]
    if process.stderr >= 0:
        copying.append(asyncio.create_task(_copy(process.stderr, wire, Frame.STDERR), name="session errors"))
    try:
        # Input that the process does not read must not hide that the client has left.
        watched: list[asyncio.Future[Any]] = [left, process.ended]
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        if not process.ended.done():
            return
        _, late = await asyncio.wait(copying, timeout=_DRAIN_S)
        while late and any(task.get_name() == "busy" for task in late):
            _, late = await asyncio.wait(late, timeout=_DRAIN_S)
        await wire.send(Frame.END, orjson.dumps({"code": process.ended.result()}))
        await asyncio.wait([left], timeout=_DRAIN_S)
    finally:
        process.kill()
        tasks: list[asyncio.Task[Any]] = [hear, left, *copying]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        process.close()  # last: the tasks give the numbers of its descriptors back


async def serve_port(wire: Wire, port: int | None) -> None:
    """Bare bytes both ways, each direction ended on its own; one byte first says whether anybody listens.

    It ends with the client also where the port stays open and says nothing.
    """
    try:
        if port is None:
            raise ConnectionRefusedError
        inner, writer = await asyncio.open_connection("127.0.0.1", port, limit=_BUFFER_BYTES)
    except OSError:
        await wire.put(b"\0")
        return
    await wire.put(b"\1")

    async def there() -> None:
        while data := await wire.reader.read(_BUFFER_BYTES):
            writer.write(data)
            await writer.drain()
        writer.write_eof()

    async def back() -> None:
        while data := await inner.read(_BUFFER_BYTES):
            await wire.put(data)
        wire.end_output()

    copying = [asyncio.create_task(there()), asyncio.create_task(back())]
    both, dead = asyncio.gather(*copying), asyncio.create_task(wire.dead())
    watched: list[asyncio.Future[Any]] = [both, dead]
    try:
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        if both.done():
            both.result()
    finally:
        for task in (*copying, dead):
            task.cancel()
        await asyncio.gather(*copying, both, dead, return_exceptions=True)
        writer.close()


async def _hear(wire: Wire, process: Process, *, takes: bool = True, ends: bool = True) -> None:
    """What the client sends, until it leaves: ``takes`` its input, and ``ends`` with it."""
    with contextlib.suppress(asyncio.IncompleteReadError, OSError, _Broken):
        while True:
            kind, content = await wire.frame()
            match kind:
                case Frame.STDIN if takes:
                    with contextlib.suppress(OSError):  # a process that reads no more may go on saying things
                        await process.feed(content)
                case Frame.INPUT_END if ends:
                    process.close_input()
                case Frame.RESIZE:
                    process.resize(**orjson.loads(content))


async def _copy(descriptor: int, wire: Wire, kind: Frame) -> None:
    task = asyncio.current_task()
    assert task is not None
    with contextlib.suppress(OSError):
        while data := await read(descriptor):
            task.set_name("busy")  # whoever drains must not cut what is still on its way
            await wire.send(kind, data)
            task.set_name("waits")


async def _until_gone(wire: Wire, sending: Coroutine[object, object, None]) -> None:
    work, gone = asyncio.ensure_future(sending), asyncio.ensure_future(wire.gone())
    try:
        await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)
