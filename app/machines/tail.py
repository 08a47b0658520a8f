"""The end of a workload's output, taken from the cloud before its machine is given back.

A tail is bounded while it is gathered: the newest `LogChunk`s within ``limit_bytes``. Packed, it is zlib over
records of time (microseconds, -1: not told), stream and length.
"""

import struct
import zlib
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Final

from providers.capabilities import LogChunk

CUT: Final = b"[the beginning of this output is not kept]\n"
_RECORD = struct.Struct(">qBI")
_STREAMS: Final = (None, "stdout", "stderr")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICRO = timedelta(microseconds=1)


async def gather(chunks: AsyncIterator[LogChunk], *, limit_bytes: int) -> list[LogChunk]:
    """The last ``limit_bytes`` of the output; a line first that says so when there was more."""
    held: deque[LogChunk] = deque()
    size, cut = 0, False
    async for chunk in chunks:
        data = chunk.data
        if len(data) > limit_bytes:
            data, cut = data[-limit_bytes:], True
        held.append(LogChunk(data=data, stream=chunk.stream, at=chunk.at))
        size += len(data)
        while size > limit_bytes:
            size -= len(held.popleft().data)
            cut = True
    if cut and held:
        first = held[0]
        held.appendleft(LogChunk(data=CUT, stream=first.stream, at=first.at))
    return list(held)


def packed(chunks: Iterable[LogChunk]) -> bytes:
    pack = zlib.compressobj()
    parts = []
    for chunk in chunks:
        at = -1 if chunk.at is None else (chunk.at - _EPOCH) // _MICRO
        stream = _STREAMS.index(chunk.stream) if chunk.stream in _STREAMS else 0
        parts.append(pack.compress(_RECORD.pack(at, stream, len(chunk.data)) + chunk.data))
    return b"".join(parts) + pack.flush()


def unpacked(records: bytes) -> Iterator[LogChunk]:
    plain, start = zlib.decompress(records), 0
    while start < len(plain):
        at, stream, length = _RECORD.unpack_from(plain, start)
        start += _RECORD.size
        yield LogChunk(
            data=plain[start : start + length],
            stream=_STREAMS[stream],
            at=None if at < 0 else _EPOCH + at * _MICRO,
        )
        start += length
