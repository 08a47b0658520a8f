"""The channels of an exec or attach, whatever carries them: input, outputs, sizes, and the last word.

SPDY has a stream for each, WebSocket a first byte of each message. `Channels` is all that `session` sees.
"""

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import orjson

from app.kubelet import websocket
from app.kubelet.peers import OPEN_S, Inbox, Lost, Peer, SpdyPeer, SpdyStream, WebSocketPeer

Obj = dict[str, Any]
SPDY_VERSIONS: Final = ("v4.channel.k8s.io", "v3.channel.k8s.io", "v2.channel.k8s.io", "channel.k8s.io")
WEBSOCKET_VERSIONS: Final = (
    "v5.channel.k8s.io",
    "v4.channel.k8s.io",
    "v4.base64.channel.k8s.io",
    "channel.k8s.io",
    "base64.channel.k8s.io",
)
_STDIN, _STDOUT, _STDERR, _ERROR, _RESIZE, _CLOSED = 0, 1, 2, 3, 4, 255
_SIZES_BYTES_MAX = 4096
_PIECE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which channels a session has."""

    stdin: bool
    stdout: bool
    stderr: bool
    terminal: bool


class Channels(Protocol):
    """One client's side of a session."""

    peer: Peer

    async def stdin(self) -> bytes:
        """The next piece; empty at its end."""
        ...

    async def sizes(self) -> bytes:
        """The next piece of what says the terminal's sizes; empty at its end."""
        ...

    async def stdout(self, data: bytes) -> None:
        """Raises:
        Lost: the client has gone.
        """
        ...

    async def stderr(self, data: bytes) -> None: ...

    async def finish(self, status: Obj) -> None:
        """Everything written so far, then the status, then the end of the connection."""
        ...


class SpdyChannels:
    """Made by `open`, once the client has opened all streams."""

    def __init__(self, peer: SpdyPeer, streams: dict[str, SpdyStream], *, structured: bool) -> None:
        self.peer: Peer = peer
        self._spdy, self._streams, self._structured = peer, streams, structured

    @classmethod
    async def open(cls, peer: SpdyPeer, wanted: Wanted, *, version: str) -> "SpdyChannels":
        """Wait for the streams that these options mean.

        Raises:
            Lost: the client has gone, or has not opened them in time.
        """
        names = ["error"]
        names += [
            name
            for name, on in (
                ("stdin", wanted.stdin),
                ("stdout", wanted.stdout),
                ("stderr", wanted.stderr and not wanted.terminal),
                ("resize", wanted.terminal and version in SPDY_VERSIONS[:2]),
            )
            if on
        ]
        found: dict[str, SpdyStream] = {}
        try:
            async with asyncio.timeout(OPEN_S):
                while len(found) < len(names):
                    stream = await peer.accept()
                    name = stream.headers.get("streamtype", "")
                    if name not in names or name in found:
                        stream.reset(1)
                    else:
                        found[name] = stream
        except TimeoutError:
            peer.abort()
            raise Lost from None
        return cls(peer, found, structured=version == SPDY_VERSIONS[0])

    async def stdin(self) -> bytes:
        stream = self._streams.get("stdin")
        return await stream.inbox.get() if stream is not None else b""

    async def sizes(self) -> bytes:
        stream = self._streams.get("resize")
        return await stream.inbox.get() if stream is not None else b""

    async def stdout(self, data: bytes) -> None:
        if (stream := self._streams.get("stdout")) is not None:
            await stream.write(data)

    async def stderr(self, data: bytes) -> None:
        stream = self._streams.get("stderr")
        if stream is not None:
            await stream.write(data)

    async def finish(self, status: Obj) -> None:
        """In the order that clients need: outputs, status, GOAWAY; after that they read nothing more."""
        for name in ("stdout", "stderr"):
            if name in self._streams:
                self._streams[name].finish()
        text = _text(status) if not self._structured else orjson.dumps(status)
        if text:
            await self._streams["error"].write(text)
        for name in ("error", "stdin", "resize"):
            if name in self._streams:
                self._streams[name].finish()
        self._spdy.say_goodbye()


class WebSocketChannels(WebSocketPeer):
    """A client whose messages begin with the number of their channel."""

    def __init__(self, wanted: Wanted, *, version: str) -> None:
        super().__init__()
        self.peer: Peer = self
        self._wanted = wanted
        self._base64 = "base64" in version
        self._structured = version.startswith(("v4.", "v5."))
        self._halves = version.startswith("v5.")
        self._stdin, self._sizes = Inbox(self), Inbox(self)

    def begin(self) -> None:
        """An empty message on the first channel that can be written: old clients take it for readiness."""
        first = _STDOUT if self._wanted.stdout else _STDERR if self._wanted.stderr else _ERROR
        self.put(self._message(first, b""))

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
        match channel:
            case 0 if self._wanted.stdin:
                self._stdin.put(rest)
            case 4:
                self._sizes.put(rest)
            case 255 if self._halves and rest[:1] == bytes([_STDIN]):
                self._stdin.end()

    async def stdin(self) -> bytes:
        return await self._stdin.get()

    async def sizes(self) -> bytes:
        return await self._sizes.get()

    async def stdout(self, data: bytes) -> None:
        if self._wanted.stdout:
            await self._send(_STDOUT, data)

    async def stderr(self, data: bytes) -> None:
        if self._wanted.stderr:
            await self._send(_STDERR, data)

    async def finish(self, status: Obj) -> None:
        if text := orjson.dumps(status) if self._structured else _text(status):
            await self.send(self._message(_ERROR, text))
        self.say_goodbye()

    async def _send(self, channel: int, data: bytes) -> None:
        for start in range(0, len(data), _PIECE_BYTES):
            await self.send(self._message(channel, data[start : start + _PIECE_BYTES]))

    def _message(self, channel: int, data: bytes) -> bytes:
        if self._base64:
            return websocket.message(b"%d" % channel + base64.b64encode(data), text=True)
        return websocket.message(bytes([channel]) + data)

    def _over(self) -> None:
        self._stdin.end()
        self._sizes.end()


class Sizes:
    """Terminal sizes out of a stream of JSON objects that may come in any pieces."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> tuple[int, int] | None:
        """The newest size, columns and rows, if one is whole and says anything."""
        self._buffer = (self._buffer + data)[-_SIZES_BYTES_MAX:]
        found = None
        while b"}" in self._buffer:
            text, _, self._buffer = self._buffer.partition(b"}")
            try:
                size = orjson.loads(text[text.index(b"{") :] + b"}")
                columns, rows = int(size["Width"]), int(size["Height"])
            except (ValueError, KeyError, TypeError):
                continue
            if 0 < columns < 1 << 16 and 0 < rows < 1 << 16:
                found = (columns, rows)
        return found


def chosen(offered: Sequence[str], known: Sequence[str]) -> str | None:
    """The first of ours that the client offers."""
    return next((version for version in known if version in offered), None)


def _text(status: Obj) -> bytes:
    """What older protocols say of an end: nothing of a good one."""
    return b"" if status["status"] == "Success" else str(status.get("message", "")).encode()
