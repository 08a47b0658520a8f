"""Port-forward: many connections over one of the client's, each two streams that carry one request id.

Each half ends on its own: the client's end of input reaches the port, the port's end reaches the client. What
goes wrong with one connection is said on its error stream and hurts no other.
"""

import asyncio
import base64
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import structlog

from app.kubelet import spdy, websocket
from app.kubelet.peers import OPEN_S, STREAMS_MAX, Inbox, Lost, SpdyPeer, SpdyStream, WebSocketPeer
from providers.base import ProviderError
from providers.capabilities import Pipe

log = structlog.get_logger()
VERSION = "portforward.k8s.io"
TUNNEL = "SPDY/3.1+portforward.k8s.io"
WEBSOCKET_VERSIONS = ("v4.channel.k8s.io", "v4.base64.channel.k8s.io")
Dial = Callable[[int], Awaitable[Pipe]]
"""A connection to a port of the Pod.

Raises:
    ProviderError: there is none; the message is for people.
"""


@dataclass(slots=True)
class _Pair:
    port: int
    error: SpdyStream | None = None
    data: SpdyStream | None = None
    due: asyncio.TimerHandle | None = None


async def serve(peer: SpdyPeer, dial: Dial, *, pod: str, ended: "asyncio.Future[str]") -> None:
    """Carry connections until the client leaves or ``ended`` says why it must."""
    pairs: dict[str, _Pair] = {}
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.TaskGroup() as tasks:
            ending = tasks.create_task(_end(peer, ended))
            try:
                while True:
                    stream = await peer.accept()
                    port = _port(stream.headers.get("port"))
                    kind = stream.headers.get("streamtype")
                    if port is None or kind not in ("error", "data"):
                        stream.reset(1)
                        continue
                    # Without an id the pair is known by the error stream's number, as old clients have it.
                    number = stream.number if kind == "error" else stream.number - 2
                    key = stream.headers.get("requestid") or f"#{number}"
                    pair = pairs.get(key)
                    if pair is None and len(pairs) >= STREAMS_MAX:
                        stream.reset(spdy.REFUSED_STREAM)
                        continue
                    if pair is None:
                        pair = pairs[key] = _Pair(port)
                        pair.due = loop.call_later(OPEN_S, _give_up, pairs, key)
                    if kind == "error" and pair.error is None:
                        pair.error = stream
                    elif kind == "data" and pair.data is None:
                        pair.data = stream
                    else:
                        stream.reset(1)
                        continue
                    if pair.error is not None and pair.data is not None:
                        del pairs[key]
                        if pair.due is not None:
                            pair.due.cancel()
                        tasks.create_task(_carry(pair.error, pair.data, dial, port=port, pod=pod))
            except Lost:
                ending.cancel()
            if not peer.lost.done():  # it is going, and may still wait for what is under way
                return
    finally:
        for pair in pairs.values():
            if pair.due is not None:
                pair.due.cancel()
        peer.close()


async def _end(peer: SpdyPeer, ended: "asyncio.Future[str]") -> None:
    await asyncio.shield(ended)
    peer.say_goodbye()


def _give_up(pairs: dict[str, _Pair], key: str) -> None:
    """Half of a pair, and the other has not come."""
    pair = pairs.pop(key)
    for stream in (pair.error, pair.data):
        if stream is not None:
            stream.reset()


async def _carry(error: SpdyStream, data: SpdyStream, dial: Dial, *, port: int, pod: str) -> None:
    error.inbox.end()
    pipe: Pipe | None = None
    try:
        try:
            pipe = await dial(port)
        except ProviderError as refusal:
            raise _Refused(str(refusal)) from refusal
        await _both_ways(_SpdyEnd(data), pipe)
        data.finish()
    except Lost:
        data.reset()
    except (_Refused, ProviderError) as refusal:
        text = f"error forwarding port {port} to pod {pod}: {refusal}"
        try:
            await error.write(text.encode())
        except Lost:
            log.debug("nobody hears of it", error=text)
        data.reset()
    except Exception as defect:
        log.exception("port-forward failed")
        with contextlib.suppress(Lost):
            await error.write(f"error forwarding port {port} to pod {pod}: {type(defect).__name__}".encode())
        data.reset()
    finally:
        error.finish()
        if pipe is not None:
            await pipe.aclose()
        for stream in (error, data):
            stream.forget()


class _Refused(Exception):
    pass


class _SpdyEnd:
    def __init__(self, stream: SpdyStream) -> None:
        self._stream = stream
        self.gone = stream.gone

    async def read(self) -> bytes:
        data = await self._stream.inbox.get()
        if not data and self._stream.broken:
            raise Lost
        return data

    async def write(self, data: bytes) -> None:
        await self._stream.write(data)

    def finish(self) -> None:
        self._stream.finish()


async def _both_ways(client: "_SpdyEnd | _WebSocketEnd", pipe: Pipe) -> None:
    """Carry until both directions have ended.

    A client that has closed its half is read no more: that it has gone is heard from ``gone`` alone, and a
    port that stays open and silent would keep the connection for ever.

    Raises:
        Lost: the client has gone. ProviderError: the connection to the port broke.
    """

    async def there() -> None:
        while data := await client.read():
            await pipe.write(data)
        await pipe.end_output()

    async def back() -> None:
        while data := await pipe.read():
            await client.write(data)
        client.finish()

    tasks = [asyncio.create_task(there()), asyncio.create_task(back())]
    both = asyncio.gather(*tasks)
    watched: list[asyncio.Future[Any]] = [both, client.gone]
    try:
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        if not both.done():
            raise Lost
        both.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, both, return_exceptions=True)


# --- over WebSocket ----------------------------------------------------------------------------------


class TunnelPeer(WebSocketPeer):
    """SPDY inside binary messages, whose borders mean nothing: ``inner`` speaks to a transport of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = SpdyPeer()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.inner.connection_made(_Tunnel(self))

    def take(self, content: bytes, *, text: bool) -> None:
        self.inner.data_received(content)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.inner.resume_writing()

    def _over(self) -> None:
        self.inner.connection_lost(None)


class _Tunnel(asyncio.Transport):
    """What the inner protocol takes for its connection."""

    def __init__(self, outer: TunnelPeer) -> None:
        super().__init__()
        self._outer = outer

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._outer.put(websocket.message(bytes(data)))

    def get_write_buffer_size(self) -> int:
        return 0  # the outer connection watches its own

    def is_closing(self) -> bool:
        return self._outer._closing or self._outer.lost.done()

    def close(self) -> None:
        self._outer.say_goodbye()

    def abort(self) -> None:
        self._outer.abort()

    def pause_reading(self) -> None:
        self._outer.hold(1 << 30)

    def resume_reading(self) -> None:
        self._outer.let_go(1 << 30)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """The outer connection has its own."""


class ChannelsPeer(WebSocketPeer):
    """The older form: two channels for each port of the query, and one connection to each."""

    def __init__(self, ports: list[int], *, version: str) -> None:
        super().__init__()
        self.ports = ports
        self.inboxes = [Inbox(self) for _ in ports]
        self._base64 = "base64" in version

    def begin(self) -> None:
        """Each channel's first message is its port."""
        for index, port in enumerate(self.ports):
            for channel in (2 * index, 2 * index + 1):
                self.put(self.message(channel, port.to_bytes(2, "little")))

    def take(self, content: bytes, *, text: bool) -> None:
        if not content:
            return
        channel, rest = content[0], content[1:]
        if self._base64:
            channel -= ord("0")
            try:
                rest = base64.b64decode(rest, validate=True)
            except ValueError:
                self.say_goodbye(websocket.PROTOCOL)
                return
        if channel % 2 == 0 and channel // 2 < len(self.inboxes):
            self.inboxes[channel // 2].put(rest)

    def message(self, channel: int, data: bytes) -> bytes:
        if self._base64:
            return websocket.message(b"%d" % channel + base64.b64encode(data), text=True)
        return websocket.message(bytes([channel]) + data)

    def _over(self) -> None:
        for inbox in self.inboxes:
            inbox.drop()


class _WebSocketEnd:
    def __init__(self, peer: ChannelsPeer, index: int) -> None:
        self._peer, self._index = peer, index
        self.gone = peer.lost

    async def read(self) -> bytes:
        return await self._peer.inboxes[self._index].get()

    async def write(self, data: bytes) -> None:
        await self._peer.send(self._peer.message(2 * self._index, data))

    def finish(self) -> None:
        """There is no half of a channel that could be closed."""


async def serve_channels(peer: ChannelsPeer, dial: Dial, *, pod: str, ended: "asyncio.Future[str]") -> None:
    """One connection to each port, until all are over or the client leaves."""
    peer.begin()

    async def one(index: int, port: int) -> None:
        pipe: Pipe | None = None
        try:
            pipe = await dial(port)
            await _both_ways(_WebSocketEnd(peer, index), pipe)
        except ProviderError as refusal:
            text = f"error forwarding port {port} to pod {pod}: {refusal}"
            peer.put(peer.message(2 * index + 1, text.encode()))
        except Lost:
            return
        finally:
            if pipe is not None:
                await pipe.aclose()

    async def all_of_them() -> None:
        await asyncio.gather(*(one(index, port) for index, port in enumerate(peer.ports)))

    work = asyncio.create_task(all_of_them())
    try:
        await asyncio.wait([work, _plain(peer.lost), _plain(ended)], return_when=asyncio.FIRST_COMPLETED)
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        peer.say_goodbye()


def _plain(future: "asyncio.Future[str] | asyncio.Future[None]") -> "asyncio.Future[None]":
    return future  # type: ignore[return-value]


def _port(text: str | None) -> int | None:
    if text is None or not text.isascii() or not text.isdecimal() or len(text) > 5:
        return None
    return int(text) if 1 <= int(text) <= 65535 else None


def ports(texts: list[str]) -> list[int] | None:
    """The ports of a query, repeated or apart by commas; None when one of them is none."""
    found = [_port(word) for text in texts for word in text.split(",")]
    return [port for port in found if port is not None] if found and None not in found else None
