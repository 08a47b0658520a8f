"""An upgraded connection with its client: what is read waits for its reader, what is written for the wire.

Memory is bounded in both directions: with more than `HOLD_BYTES` unread nothing more is taken from the
socket, and a writer returns only when the transport has room. While nothing is read the end of the other side
shows nowhere but in the kernel, which `abandoned` asks.
"""

import asyncio
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections import deque

from app.kubelet import spdy, websocket

HOLD_BYTES = 512 * 1024
STREAMS_MAX = 512  # of one connection: each port-forward of kubectl takes two
UNREAD_BYTES_MAX = 4 << 20
PIECE_COST_BYTES = 64  # what a piece takes beside its content: many small ones must not count as nothing
OPEN_S = 30.0
_HIGH_WATER_BYTES = 256 * 1024
_PIECE_BYTES = 64 * 1024
_TCP_ESTABLISHED = 1


class Lost(Exception):
    """The client has gone: nothing more can be sent, and nothing will come."""


class Peer(asyncio.Protocol, ABC):
    """The part that both protocols share."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[None] = loop.create_future()
        self.active_at = time.monotonic()
        self._transport: asyncio.Transport | None = None
        self._room: asyncio.Future[None] | None = None
        self._held = 0
        self._paused = False

    # --- asyncio's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=_HIGH_WATER_BYTES)
        if (sock := transport.get_extra_info("socket")) is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)
        self.resume_writing()
        self._over()

    def pause_writing(self) -> None:
        if self._room is None:
            self._room = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._room is not None:
            self._room.set_result(None)
            self._room = None

    # --- ours ---

    async def send(self, data: bytes) -> None:
        """Write, and wait until there is room for more.

        Raises:
            Lost: the client has gone.
        """
        self.put(data)
        while self._room is not None:
            await asyncio.shield(self._room)
        if self.lost.done():
            raise Lost

    def put(self, data: bytes) -> None:
        """Write without waiting: for frames of a few bytes.

        A client that asks for answers (pings, streams) and reads none is cut off before they fill the memory.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if transport.get_write_buffer_size() > UNREAD_BYTES_MAX:
            transport.abort()
            return
        transport.write(data)

    def close(self) -> None:
        """Send what is written, then close."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def abandoned(self) -> bool:
        """Whether the client has closed its side while we were not reading."""
        if not self._paused or self._transport is None:
            return False
        sock = self._transport.get_extra_info("socket")
        if sock is None or not hasattr(socket, "TCP_INFO"):
            return False
        try:
            state = struct.unpack("B", sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1))[0]
        except OSError:
            return True
        return bool(state != _TCP_ESTABLISHED)

    def hold(self, size: int) -> None:
        """So many more bytes wait for their reader."""
        self._held += size
        if not self._paused and self._held > HOLD_BYTES and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def let_go(self, size: int) -> None:
        self._held -= size
        if self._paused and self._held <= HOLD_BYTES // 2 and self._transport is not None:
            self._paused = False
            if not self._transport.is_closing():
                self._transport.resume_reading()

    @abstractmethod
    def _over(self) -> None:
        """The connection has ended: tell whoever reads or waits."""


class Inbox:
    """What came on one stream and was not read yet. The end is sticky."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._pieces: deque[bytes] = deque()
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, data: bytes) -> None:
        if data and not self._ended:
            self._pieces.append(data)
            self._peer.hold(len(data) + PIECE_COST_BYTES)
            self._wake()

    def end(self) -> None:
        self._ended = True
        self._wake()

    def drop(self) -> None:
        """Nobody reads this any more."""
        while self._pieces:
            self._peer.let_go(len(self._pieces.popleft()) + PIECE_COST_BYTES)
        self.end()

    async def get(self) -> bytes:
        """The next piece; empty at the end. One reader at a time."""
        while not self._pieces:
            if self._ended:
                return b""
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        piece = self._pieces.popleft()
        self._peer.let_go(len(piece) + PIECE_COST_BYTES)
        return piece

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class SpdyStream:
    """One stream that the client has opened."""

    def __init__(self, peer: "SpdyPeer", number: int, headers: dict[str, str]) -> None:
        self.number, self.headers = number, headers
        self.inbox = Inbox(peer)
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when it was reset or the client has left."""
        self._peer = peer
        self._finished = False

    @property
    def broken(self) -> bool:
        return self.gone.done()

    def cut(self) -> None:
        """The client has no more use for it: whoever waits for the other side of the stream hears of it."""
        if not self.gone.done():
            self.gone.set_result(None)

    async def write(self, data: bytes) -> None:
        """Raises:
        Lost: the client has gone, or does not want this stream any more.
        """
        for start in range(0, len(data), _PIECE_BYTES):
            if self.broken:
                raise Lost
            await self._peer.send(spdy.Writer.data(self.number, data[start : start + _PIECE_BYTES]))

    def finish(self) -> None:
        """We write nothing more; may be repeated."""
        if not self._finished and not self.broken:
            self._finished = True
            self._peer.put(spdy.Writer.data(self.number, b"", fin=True))

    def reset(self, status: int = spdy.CANCEL) -> None:
        if not self.broken:
            self.cut()
            self._peer.put(spdy.Writer.reset(self.number, status))
        self.forget()

    def forget(self) -> None:
        """Done with it, whatever still comes."""
        self.inbox.drop()
        self._peer.streams.pop(self.number, None)


class SpdyPeer(Peer):
    """A client that speaks SPDY/3.1. `accept` gives its streams; nothing is sent before the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: dict[int, SpdyStream] = {}
        self._parser, self._writer = spdy.Parser(), spdy.Writer()
        self._opened: asyncio.Queue[SpdyStream | None] = asyncio.Queue()
        self._last = 0

    def data_received(self, data: bytes) -> None:
        self.active_at = time.monotonic()
        try:
            events = self._parser.feed(data)
        except spdy.ProtocolError:
            self.put(spdy.Writer.goaway(self._last, spdy.PROTOCOL_ERROR))
            self.close()
            return
        for event in events:
            self._take(event)

    async def accept(self) -> SpdyStream:
        """The next stream that the client opens.

        Raises:
            Lost: the client has gone, or is going.
        """
        stream = await self._opened.get()
        if stream is None:
            self._opened.put_nowait(None)
            raise Lost
        return stream

    def say_goodbye(self) -> None:
        """GOAWAY, after which the client reads nothing more, and the end of the connection."""
        self.put(spdy.Writer.goaway(self._last))
        self.close()

    def _take(self, event: spdy.Event) -> None:
        match event:
            case spdy.Opened(number, headers, fin):
                self._last = number
                # Those that were reset before anybody took them count, too: they are held until then.
                if max(len(self.streams), self._opened.qsize()) >= STREAMS_MAX:
                    self.put(spdy.Writer.reset(number, spdy.REFUSED_STREAM))
                    return
                stream = self.streams[number] = SpdyStream(self, number, headers)
                if fin:
                    stream.inbox.end()
                self.put(self._writer.reply(number))
                self._opened.put_nowait(stream)
            case spdy.Data(number, data, fin):
                stream_ = self.streams.get(number)
                if stream_ is not None:
                    stream_.inbox.put(data)
                    if fin:
                        stream_.inbox.end()
            case spdy.Reset(number):
                if (gone := self.streams.pop(number, None)) is not None:
                    gone.cut()
                    gone.inbox.drop()
            case spdy.Pinged(number):
                if number % 2:  # not an answer to one of ours
                    self.put(spdy.Writer.ping(number))
            case spdy.GoingAway():
                self._opened.put_nowait(None)

    def _over(self) -> None:
        for stream in list(self.streams.values()):
            stream.cut()
            stream.inbox.drop()
        self.streams.clear()
        self._opened.put_nowait(None)


class WebSocketPeer(Peer):
    """A client that speaks WebSocket. ``take`` is told each message."""

    def __init__(self) -> None:
        super().__init__()
        self._parser = websocket.Parser()
        self._closing = False

    def data_received(self, data: bytes) -> None:
        self.active_at = time.monotonic()
        if self._closing:
            return
        try:
            for event in self._parser.feed(data):
                match event:
                    case websocket.Message(content, text):
                        self.take(content, text=text)
                    case websocket.Pinged(content):
                        self.put(websocket.pong(content))
                    case websocket.Closed(code):
                        self.say_goodbye(code if 1000 <= code < 5000 else websocket.NORMAL)
                        return
        except websocket.ProtocolError as error:
            self.say_goodbye(error.code)

    @abstractmethod
    def take(self, content: bytes, *, text: bool) -> None:
        """One whole message, text or binary."""

    def say_goodbye(self, code: int = websocket.NORMAL) -> None:
        """The close frame, once, and the end of the connection."""
        if not self._closing:
            self._closing = True
            self.put(websocket.close(code))
            self.close()
