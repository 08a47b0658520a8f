"""WebSocket messages (RFC 6455), the server's side: bytes in, events out, no I/O.

Only what the channels of Kubernetes need: no extensions. A message is held whole, up to a limit; whatever
breaks the rules is a `ProtocolError` with the close code that says so.
"""

import base64
import hashlib
import struct
from dataclasses import dataclass
from typing import Final

MESSAGE_BYTES_MAX: Final = 4 << 20  # clients send stdin in pieces of 32 KiB; some in far larger ones
NORMAL, PROTOCOL, TOO_BIG, INTERNAL = 1000, 1002, 1009, 1011
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_CONTINUED, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0, 1, 2, 8, 9, 10


class ProtocolError(Exception):
    """The connection is to be closed with ``code``."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Message:
    data: bytes
    text: bool


@dataclass(frozen=True, slots=True)
class Pinged:
    data: bytes


@dataclass(frozen=True, slots=True)
class Closed:
    code: int


Event = Message | Pinged | Closed


def accept_key(key: str) -> str:
    """The answer to ``Sec-WebSocket-Key``."""
    return base64.b64encode(hashlib.sha1(key.encode() + _GUID).digest()).decode()


class Parser:
    """One connection's incoming half."""

    def __init__(self, *, limit_bytes: int = MESSAGE_BYTES_MAX) -> None:
        self._limit_bytes = limit_bytes
        self._buffer = bytearray()
        self._message = bytearray()
        self._kind: int | None = None

    def feed(self, data: bytes) -> list[Event]:
        """Every event that is whole now.

        Raises:
            ProtocolError: nothing more may be fed.
        """
        self._buffer += data
        events: list[Event] = []
        while (frame := self._frame()) is not None:
            if (event := self._take(*frame)) is not None:
                events.append(event)
        return events

    def _frame(self) -> tuple[bool, int, bytes] | None:
        """Whether it is the last of its message, its kind, its content."""
        buffer = self._buffer
        if len(buffer) < 2:
            return None
        final, kind = bool(buffer[0] & 0x80), buffer[0] & 0x0F
        if buffer[0] & 0x70:
            raise ProtocolError(PROTOCOL, "reserved bits")
        if not buffer[1] & 0x80:
            raise ProtocolError(PROTOCOL, "a frame of a client must be masked")
        length, at = buffer[1] & 0x7F, 2
        if kind >= _CLOSE and (length > 125 or not final):
            raise ProtocolError(PROTOCOL, "a control frame that is long or in parts")
        if length >= 126:
            form = ">H" if length == 126 else ">Q"
            size = struct.calcsize(form)
            if len(buffer) < at + size:
                return None
            (length,) = struct.unpack_from(form, buffer, at)
            at += size
        if length + len(self._message) > self._limit_bytes:
            raise ProtocolError(TOO_BIG, "the message is too big")
        if len(buffer) < at + 4 + length:
            return None
        mask = bytes(buffer[at : at + 4])
        content = _unmasked(bytes(memoryview(buffer)[at + 4 : at + 4 + length]), mask)
        del buffer[: at + 4 + length]
        return final, kind, content

    def _take(self, final: bool, kind: int, content: bytes) -> Event | None:
        match kind:
            case 9:
                return Pinged(content)
            case 10:
                return None
            case 8:
                return Closed(struct.unpack_from(">H", content)[0] if len(content) >= 2 else NORMAL)
            case 0 if self._kind is not None:
                self._message += content
            case 1 | 2 if self._kind is None:
                self._kind = kind
                self._message[:] = content
            case _:
                raise ProtocolError(PROTOCOL, "a frame out of order")
        if not final:
            return None
        text, self._kind = self._kind == _TEXT, None
        whole = bytes(self._message)
        self._message.clear()
        return Message(whole, text)


def message(data: bytes, *, text: bool = False) -> bytes:
    return _framed(_TEXT if text else _BINARY, data)


def pong(data: bytes) -> bytes:
    return _framed(_PONG, data)


def close(code: int = NORMAL) -> bytes:
    return _framed(_CLOSE, struct.pack(">H", code))


def _framed(kind: int, data: bytes) -> bytes:
    length = len(data)
    if length < 126:
        head = struct.pack(">BB", 0x80 | kind, length)
    elif length < 1 << 16:
        head = struct.pack(">BBH", 0x80 | kind, 126, length)
    else:
        head = struct.pack(">BBQ", 0x80 | kind, 127, length)
    return head + data


def _unmasked(data: bytes, mask: bytes) -> bytes:
    """As one long number: many times faster than byte by byte."""
    length = len(data)
    if not length or mask == b"\0\0\0\0":
        return data
    whole = (mask * (length // 4 + 1))[:length]
    return (int.from_bytes(data, "big") ^ int.from_bytes(whole, "big")).to_bytes(length, "big")
