"""SPDY/3.1 frames as the API server and kubectl speak them: bytes in, events out, no I/O.

Fed in pieces of any size; memory is bounded whatever comes: content of data frames is passed on as it
arrives, control frames and inflated headers have limits, and there is no flow control on either side (the
peers have none; back-pressure is TCP's). The zlib contexts live as long as the connection. A `ProtocolError`
ends the connection.
"""

import hashlib
import struct
import zlib
from dataclasses import dataclass
from typing import Final

PROTOCOL_ERROR, REFUSED_STREAM, CANCEL, INTERNAL_ERROR = 1, 3, 5, 6
CONTROL_BYTES_MAX: Final = 64 * 1024
HEADER_BYTES_MAX: Final = 64 * 1024
DATA_BYTES_MAX: Final = (1 << 24) - 1

_VERSION = 3
_SYN_STREAM, _SYN_REPLY, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _HEADERS, _WINDOW = 1, 2, 3, 4, 6, 7, 8, 9
_FIN = 0x01
_HEAD = struct.Struct(">II")
_U32 = struct.Struct(">I")
_WORDS = (
    "options head post put delete trace accept accept-charset accept-encoding accept-language accept-ranges"
    " age allow authorization cache-control connection content-base content-encoding content-language"
    " content-length content-location content-md5 content-range content-type date etag expect expires from"
    " host if-match if-modified-since if-none-match if-range if-unmodified-since last-modified location"
    " max-forwards pragma proxy-authenticate proxy-authorization range referer retry-after server te trailer"
    " transfer-encoding upgrade user-agent vary via warning www-authenticate method get status"
    " 200_OK version HTTP/1.1 url public set-cookie keep-alive origin"
)
_SECOND_PART = (
    "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505"
    "203 Non-Authoritative Information204 No Content301 Moved Permanently400 Bad Request401 Unauthorized"
    "403 Forbidden404 Not Found500 Internal Server Error501 Not Implemented503 Service Unavailable"
    "Jan Feb Mar Apr May Jun Jul Aug Sept Oct Nov Dec 00:00:00 Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMT"
    "chunked,text/html,image/png,image/jpg,image/gif,application/xml,application/xhtml+xml,text/plain,"
    "text/javascript,publicprivatemax-age=gzip,deflate,sdchcharset=utf-8charset=iso-8859-1,utf-,*,enq=0."
)
DICTIONARY: Final = (
    b"".join(_U32.pack(len(word)) + word.replace("_", " ").encode() for word in _WORDS.split(" "))
    + _SECOND_PART.encode()
)
_DIGEST = "51d27341373f923f3cd88e1eb7162aeaa3723d7585ff2399201dc06498407f02"
if hashlib.sha256(DICTIONARY).hexdigest() != _DIGEST:  # one wrong byte, and no header can be read
    raise AssertionError("the dictionary is not that of SPDY/3")


class ProtocolError(Exception):
    """The peer does not speak SPDY/3.1, or more of it than we hold."""


@dataclass(frozen=True, slots=True)
class Opened:
    """SYN_STREAM. ``fin``: the peer sends nothing on it."""

    stream: int
    headers: dict[str, str]
    fin: bool


@dataclass(frozen=True, slots=True)
class Data:
    """A piece of a data frame; ``fin`` with the last piece of the last frame."""

    stream: int
    data: bytes
    fin: bool


@dataclass(frozen=True, slots=True)
class Reset:
    stream: int
    status: int


@dataclass(frozen=True, slots=True)
class Pinged:
    number: int


@dataclass(frozen=True, slots=True)
class GoingAway:
    pass


Event = Opened | Data | Reset | Pinged | GoingAway


class Parser:
    """One connection's incoming half."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._inflate = zlib.decompressobj(zdict=DICTIONARY)
        self._last_opened = 0
        self._stream = 0  # of the data frame under way
        self._left = 0
        self._fin = False

    def feed(self, data: bytes) -> list[Event]:
        """Every event that is whole now.

        Raises:
            ProtocolError: what came cannot be understood; nothing more may be fed.
        """
        events: list[Event] = []
        self._buffer += data
        at, size = 0, len(self._buffer)
        try:
            while True:
                if self._left:
                    if at >= size:
                        break
                    piece = bytes(memoryview(self._buffer)[at : at + self._left])
                    at += len(piece)
                    self._left -= len(piece)
                    events.append(Data(self._stream, piece, self._fin and not self._left))
                    continue
                if size - at < _HEAD.size:
                    break
                first, second = _HEAD.unpack_from(self._buffer, at)
                flags, length = second >> 24, second & DATA_BYTES_MAX
                if not first & 0x80000000:
                    at += _HEAD.size
                    self._stream, self._left, self._fin = first, length, bool(flags & _FIN)
                    if not length:
                        events.append(Data(first, b"", self._fin))
                    continue
                version, kind = (first >> 16) & 0x7FFF, first & 0xFFFF
                if version != _VERSION:
                    raise ProtocolError(f"version {version}")
                if length > CONTROL_BYTES_MAX:
                    raise ProtocolError(f"a control frame of {length} bytes")
                if size - at < _HEAD.size + length:
                    break
                body = bytes(memoryview(self._buffer)[at + _HEAD.size : at + _HEAD.size + length])
                at += _HEAD.size + length
                if (event := self._control(kind, flags, body)) is not None:
                    events.append(event)
        finally:
            del self._buffer[:at]
        return events

    def _control(self, kind: int, flags: int, body: bytes) -> Event | None:
        match kind:
            case 1:  # SYN_STREAM
                _need(body, 10)
                stream = _U32.unpack_from(body)[0] & 0x7FFFFFFF
                headers = self._headers(body[10:])
                if stream % 2 == 0 or stream <= self._last_opened:
                    raise ProtocolError(f"stream {stream} after {self._last_opened}")
                self._last_opened = stream
                return Opened(stream, headers, bool(flags & _FIN))
            case 2 | 8:  # SYN_REPLY, HEADERS: of no use, but the zlib context must have seen them
                _need(body, 4)
                self._headers(body[4:])
            case 3:
                _need(body, 8)
                stream, status = struct.unpack_from(">II", body)
                return Reset(stream & 0x7FFFFFFF, status)
            case 6:
                _need(body, 4)
                return Pinged(_U32.unpack_from(body)[0])
            case 7:
                return GoingAway()
        return None

    def _headers(self, block: bytes) -> dict[str, str]:
        try:
            plain = self._inflate.decompress(block, HEADER_BYTES_MAX)
        except zlib.error as error:
            raise ProtocolError(f"headers: {error}") from error
        if self._inflate.unconsumed_tail or self._inflate.eof:
            raise ProtocolError("headers are too large, or end the compression")
        _need(plain, 4)
        (count,) = _U32.unpack_from(plain)
        at, words = 4, []
        if count > len(plain) // 8:
            raise ProtocolError(f"{count} headers")
        for _ in range(2 * count):
            _need(plain, at + 4)
            (length,) = _U32.unpack_from(plain, at)
            at += 4
            _need(plain, at + length)
            words.append(plain[at : at + length].decode("latin-1"))
            at += length
        return dict(zip((word.lower() for word in words[::2]), words[1::2], strict=True))


class Writer:
    """One connection's outgoing half: frames as bytes."""

    def __init__(self) -> None:
        self._deflate = zlib.compressobj()

    def reply(self, stream: int) -> bytes:
        """SYN_REPLY without headers, which is what kubelets send."""
        block = self._deflate.compress(_U32.pack(0)) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
        return _control(_SYN_REPLY, _U32.pack(stream) + block)

    @staticmethod
    def data(stream: int, data: bytes, *, fin: bool = False) -> bytes:
        """At most `DATA_BYTES_MAX` bytes."""
        return _HEAD.pack(stream, (_FIN << 24 if fin else 0) | len(data)) + data

    @staticmethod
    def reset(stream: int, status: int) -> bytes:
        return _control(_RST_STREAM, struct.pack(">II", stream, status))

    @staticmethod
    def ping(number: int) -> bytes:
        return _control(_PING, _U32.pack(number))

    @staticmethod
    def goaway(last: int, status: int = 0) -> bytes:
        return _control(_GOAWAY, struct.pack(">II", last, status))


def _control(kind: int, body: bytes) -> bytes:
    return _HEAD.pack(0x80000000 | _VERSION << 16 | kind, len(body)) + body


def _need(data: bytes, size: int) -> None:
    if len(data) < size:
        raise ProtocolError("a frame is too short")
