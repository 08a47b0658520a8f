"""Output as lines with times: what every option of ``kubectl logs`` works on. Pure, and of bounded memory.

Bytes are never decoded. A line is what one stream has written up to a line feed, with the time of its first
byte; a line longer than `PIECE_BYTES` goes on in pieces that carry no time of their own.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from app.kubelet.options import LogOptions
from providers.capabilities import LogChunk

PIECE_BYTES: Final = 64 * 1024
TAIL_BYTES: Final = 4 << 20
CUT: Final = b"[earlier lines are left out: more than 4 MiB were asked for]\n"


@dataclass(frozen=True, slots=True)
class Line:
    """One line, or a piece of one. ``fresh``: its first piece; ``whole``: it ends here."""

    data: bytes
    at: datetime
    stream: str | None
    fresh: bool
    whole: bool


@dataclass(slots=True)
class _Partial:
    data: bytearray
    at: datetime
    fresh: bool = True


class Splitter:
    """Chunks in, lines out, each stream's apart."""

    def __init__(self) -> None:
        self._partial: dict[str | None, _Partial] = {}

    def feed(self, chunk: LogChunk, *, arrived: datetime) -> Iterator[Line]:
        """The lines that are whole now. ``arrived`` is the time where the cloud tells none."""
        at, start, data = chunk.at or arrived, 0, chunk.data
        while start < len(data):
            end = data.find(b"\n", start) + 1
            piece = data[start : end or len(data)]
            start += len(piece)
            partial = self._partial.get(chunk.stream)
            if partial is None:
                if end and len(piece) <= PIECE_BYTES:  # most lines
                    yield Line(piece, at, chunk.stream, True, True)
                    continue
                partial = self._partial[chunk.stream] = _Partial(bytearray(), at)
            partial.data += piece
            while len(partial.data) > PIECE_BYTES:
                yield self._cut(partial, chunk.stream)
            if end:
                del self._partial[chunk.stream]
                yield Line(bytes(partial.data), partial.at, chunk.stream, partial.fresh, True)

    def rest(self) -> Iterator[Line]:
        """What was written without a line feed at the end."""
        for stream, partial in self._partial.items():
            if partial.data:
                yield Line(bytes(partial.data), partial.at, stream, partial.fresh, True)
        self._partial.clear()

    @staticmethod
    def _cut(partial: _Partial, stream: str | None) -> Line:
        line = Line(bytes(partial.data[:PIECE_BYTES]), partial.at, stream, partial.fresh, False)
        del partial.data[:PIECE_BYTES]
        partial.fresh = False
        return line


class Filter:
    """Which lines are wanted, and how they look. The limit is the last thing that counts."""

    def __init__(self, options: LogOptions) -> None:
        self._options = options
        self._left = options.limit_bytes
        self._taking: dict[str | None, bool] = {}

    @property
    def full(self) -> bool:
        """Nothing more will come out."""
        return self._left == 0

    def wants(self, line: Line) -> bool:
        """The pieces of one line share its fate."""
        if not line.fresh:
            return self._taking.get(line.stream, True)
        options = self._options
        taken = (options.since is None or line.at >= options.since) and (
            options.stream is None or line.stream in (None, options.stream)
        )
        self._taking[line.stream] = taken
        return taken

    def shown(self, line: Line) -> bytes:
        """What is sent of a wanted line."""
        data = line.data
        if self._options.timestamps and line.fresh:
            data = stamp(line.at) + b" " + data
        return self.limited(data)

    def limited(self, data: bytes) -> bytes:
        if self._left is not None:
            data = data[: self._left]
            self._left -= len(data)
        return data


class Tail:
    """The last so many lines, within `TAIL_BYTES`."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._lines: deque[Line] = deque()
        self._whole = 0
        self._bytes = 0
        self.cut = False

    def add(self, line: Line) -> None:
        if not self._count:
            return
        self._lines.append(line)
        self._bytes += len(line.data)
        self._whole += line.whole
        open_ = not line.whole
        while self._whole + open_ > self._count:
            self._drop()
        while self._bytes > TAIL_BYTES:
            self.cut = True
            self._drop()

    def _drop(self) -> None:
        line = self._lines.popleft()
        self._bytes -= len(line.data)
        self._whole -= line.whole

    def lines(self) -> Iterator[Line]:
        yield from self._lines
        self._lines.clear()


def stamp(at: datetime) -> bytes:
    """RFC 3339 with nanoseconds, as a container runtime writes it."""
    return f"{at:%Y-%m-%dT%H:%M:%S}.{at.microsecond:06d}000Z".encode()
