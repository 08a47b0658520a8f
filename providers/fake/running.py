"""The fake cloud where machines run processes: output, commands, connections and usage.

A call gives a port and a ticket, and a connection to that port of the cloud's host carries the stream: one
byte of kind, four of length, the content. A stream that ends without its end frame has broken.
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import orjson

from providers.base import Ref, Unavailable
from providers.capabilities import (
    Attaches,
    Dials,
    Executes,
    KeepsPreviousRun,
    LogChunk,
    Pipe,
    ReportsUsage,
    Session,
    StreamsLogs,
    Usage,
)
from providers.fake import wire
from providers.fake.adapter import FakeProvider, RestartingFakeProvider, parsed
from providers.pipes import PIECE_BYTES, TcpPipe

_HEAD, _STAMP = struct.Struct(">BI"), struct.Struct(">Q")
_STDIN, _STDOUT, _STDERR, _END, _RESIZE, _INPUT_END = range(6)
_NAMES = {_STDOUT: "stdout", _STDERR: "stderr"}
_FRAME_BYTES_MAX = 1 << 20
_BUFFER_BYTES = 256 * 1024
_CONNECT_S = 10.0
_PIECES = 16  # of each stream, held until somebody reads them
_RESET = struct.pack("ii", 1, 0)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_BROKEN = (OSError, asyncio.IncompleteReadError)


class RunningFakeProvider(FakeProvider):
    """One whose machines run something."""

    async def logs(
        self, ref: Ref, *, follow: bool, since: datetime | None, tail_lines: int | None
    ) -> AsyncIterator[LogChunk] | None:
        return await self._output(ref, follow=follow, previous=False)

    async def previous_logs(self, ref: Ref) -> AsyncIterator[LogChunk] | None:
        return await self._output(ref, follow=False, previous=True)

    async def exec(self, ref: Ref, command: Sequence[str], *, stdin: bool, terminal: bool) -> Session | None:
        body = {"command": list(command), "stdin": stdin, "terminal": terminal}
        streams = await self._open(ref, "exec", body)
        return None if streams is None else FakeSession(*streams)

    async def attach(self, ref: Ref, *, stdin: bool, terminal: bool) -> Session | None:
        streams = await self._open(ref, "attach", {"stdin": stdin, "terminal": terminal})
        return None if streams is None else FakeSession(*streams)

    async def dial(self, ref: Ref, *, port: int) -> Pipe | None:
        streams = await self._open(ref, "connect", {"port": port})
        if streams is None:
            return None
        reader, writer = streams
        try:
            answer = await reader.readexactly(1)
        except _BROKEN as error:
            writer.close()
            raise Unavailable("the connection broke") from error
        if answer != b"\1":
            writer.close()
            raise Unavailable("connection refused")
        return TcpPipe(reader, writer)

    async def usage(self, ref: Ref) -> Usage | None:
        reply = await self._ask("GET", ref, action="/usage")
        if reply is None:
            return None
        body = parsed(wire.UsageBody, reply)
        return Usage(at=body.at, cpu_s=body.cpu_s, memory_bytes=body.memory_bytes)

    async def _output(self, ref: Ref, *, follow: bool, previous: bool) -> AsyncIterator[LogChunk] | None:
        streams = await self._open(ref, "logs", {"follow": follow, "previous": previous})
        return None if streams is None else _chunks(*streams)

    async def _open(
        self, ref: Ref, what: str, body: dict[str, Any]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """A stream; None when the cloud has no such machine, or nothing of the kind."""
        reply = await self._ask("POST", ref, action=f"/{what}", body=body)
        if reply is None:
            return None
        place = parsed(wire.StreamBody, reply)
        host = urlsplit(self.url).hostname or "127.0.0.1"
        try:
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await asyncio.open_connection(host, place.port, limit=_BUFFER_BYTES)
        except (OSError, TimeoutError) as error:
            raise Unavailable(f"{what}: no connection to the stream") from error
        writer.write(place.ticket.encode() + b"\n")
        return reader, writer


class RestartingRunningFakeProvider(RunningFakeProvider, RestartingFakeProvider):
    """Both."""


class FakeSession:
    """A process's streams over one connection. A task deals out what comes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._pieces: dict[int, asyncio.Queue[bytes]] = {
            kind: asyncio.Queue(_PIECES) for kind in (_STDOUT, _STDERR)
        }
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._deal(), name="fake session")

    @property
    def stdout(self) -> AsyncIterator[bytes]:
        return self._stream(_STDOUT)

    @property
    def stderr(self) -> AsyncIterator[bytes]:
        return self._stream(_STDERR)

    async def write(self, data: bytes) -> None:
        for start in range(0, len(data), PIECE_BYTES):
            await self._send(_STDIN, data[start : start + PIECE_BYTES])

    async def end_input(self) -> None:
        await self._send(_INPUT_END, b"")

    async def resize(self, *, columns: int, rows: int) -> bool:
        await self._send(_RESIZE, orjson.dumps({"columns": columns, "rows": rows}))
        return True

    async def wait(self) -> int:
        return await asyncio.shield(self._code)

    async def aclose(self) -> None:
        self._task.cancel()
        # Input that nobody takes would keep the connection open: it is reset, and not closed in order.
        with contextlib.suppress(OSError):
            sock = self._writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._writer.transport.abort()
        await asyncio.gather(self._task, return_exceptions=True)
        if not self._code.done():
            self._code.set_exception(Unavailable("the session was left"))
        self._code.exception()  # told to whoever asked; nobody else is owed it

    async def _send(self, kind: int, content: bytes) -> None:
        try:
            self._writer.write(_HEAD.pack(kind, len(content)) + content)
            await self._writer.drain()
        except OSError as error:
            raise Unavailable("the way to the process broke") from error

    async def _deal(self) -> None:
        try:
            async for kind, content in _frames(self._reader):
                if kind == _END:
                    self._code.set_result(int(orjson.loads(content)["code"]))
                    break
                if kind in self._pieces and content:
                    await self._pieces[kind].put(content)
        except Unavailable as error:
            self._code.set_exception(error)
        except asyncio.CancelledError:
            for pieces in self._pieces.values():  # nobody will read the rest
                while not pieces.empty():
                    pieces.get_nowait()
                pieces.put_nowait(b"")
            raise
        for pieces in self._pieces.values():
            await pieces.put(b"")

    async def _stream(self, kind: int) -> AsyncIterator[bytes]:
        while data := await self._pieces[kind].get():
            yield data


async def _frames(reader: asyncio.StreamReader) -> AsyncIterator[tuple[int, bytes]]:
    """Raises:
    Unavailable: the stream broke, as every end without an end frame is.
    """
    while True:
        try:
            kind, length = _HEAD.unpack(await reader.readexactly(_HEAD.size))
            if length > _FRAME_BYTES_MAX:
                raise Unavailable("the stream cannot be read")
            content = await reader.readexactly(length)
        except _BROKEN as error:
            raise Unavailable("the stream broke") from error
        yield kind, content


async def _chunks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> AsyncIterator[LogChunk]:
    try:
        async for kind, content in _frames(reader):
            if kind == _END:
                return
            (stamp,) = _STAMP.unpack_from(content)
            at = _EPOCH + timedelta(microseconds=stamp)
            yield LogChunk(data=content[_STAMP.size :], stream=_NAMES.get(kind), at=at)
    finally:
        writer.close()


_logs: type[StreamsLogs] = RunningFakeProvider
_previous: type[KeepsPreviousRun] = RunningFakeProvider
_executes: type[Executes] = RunningFakeProvider
_attaches: type[Attaches] = RunningFakeProvider
_dials: type[Dials] = RunningFakeProvider
_usage: type[ReportsUsage] = RunningFakeProvider
