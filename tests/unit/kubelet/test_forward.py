"""Port-forward on a connection of our own making: whatever a client opens is bounded, and ends with it."""

import asyncio
import struct
import zlib
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.kubelet import forward, spdy
from app.kubelet.peers import HOLD_BYTES, STREAMS_MAX, SpdyPeer
from app.kubelet.spdy import Writer
from providers.base import Unavailable
from providers.capabilities import Pipe


class Wire(asyncio.Transport):
    """A connection whose other end only counts what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.peer: SpdyPeer | None = None
        self.sent = bytearray()
        self.reading = True
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += data

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            assert self.peer is not None
            asyncio.get_running_loop().call_soon(self.peer.connection_lost, None)

    abort = close


class Opening:
    """SYN_STREAM frames with one compression, as a connection has it."""

    def __init__(self) -> None:
        self._deflate = zlib.compressobj(zdict=spdy.DICTIONARY)

    def frame(self, stream: int, **headers: str) -> bytes:
        block = struct.pack(">I", len(headers))
        for word in (word for pair in headers.items() for word in pair):
            block += struct.pack(">I", len(word)) + word.encode()
        body = struct.pack(">IIBB", stream, 0, 0, 0)
        body += self._deflate.compress(block) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
        return struct.pack(">II", 0x80030001, len(body)) + body


class Silent:
    """A port that takes everything and says nothing until it is closed. ``full``: it takes nothing."""

    def __init__(self, *, full: bool = False) -> None:
        self._full, self._closed = full, asyncio.Event()

    async def read(self) -> bytes:
        await self._closed.wait()
        return b""

    async def write(self, data: bytes) -> None:
        if self._full:
            await asyncio.Event().wait()

    async def end_output(self) -> None:
        self._closed.set()

    async def aclose(self) -> None:
        self._closed.set()

    @property
    def closed(self) -> bool:
        return self._closed.is_set()


def connected() -> tuple[SpdyPeer, Wire]:
    peer, wire = SpdyPeer(), Wire()
    wire.peer = peer
    peer.connection_made(wire)
    return peer, wire


async def dialled(port: int) -> Pipe:
    if port == 1:
        raise Unavailable("connection refused")
    return Silent(full=port == 2)


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_streams_that_are_opened_and_reset_for_ever_fill_nothing():
    """A session that has all of its streams takes no more of them from the peer."""
    peer, wire = connected()
    opening = Opening()
    for number in range(1, 20 * STREAMS_MAX, 2):
        peer.data_received(opening.frame(number, streamtype="error"))
        peer.data_received(Writer.reset(number, spdy.CANCEL))

    assert peer._opened.qsize() <= STREAMS_MAX
    assert len(peer.streams) <= STREAMS_MAX
    assert not wire.closed


async def test_halves_of_pairs_without_end_are_refused():
    peer, wire = connected()
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(forward.serve(peer, dialled, pod="a/b", ended=ended))
    opening = Opening()
    for number in range(1, 8 * STREAMS_MAX, 2):
        headers = {"streamtype": "error", "port": "80", "requestid": str(number)}
        peer.data_received(opening.frame(number, **headers))
        await asyncio.sleep(0)
        peer.data_received(Writer.reset(number, spdy.CANCEL))

    refused = struct.pack(">III", 0x80030003, 8, 8 * STREAMS_MAX - 1) + struct.pack(">I", spdy.REFUSED_STREAM)
    assert refused in wire.sent
    peer.connection_lost(None)
    await asyncio.wait_for(serving, timeout=10)


def test_small_pieces_count_for_more_than_their_bytes():
    async def work() -> None:
        peer, wire = connected()
        peer.data_received(Opening().frame(1, streamtype="stdin"))
        for _ in range(HOLD_BYTES // 32):
            peer.data_received(Writer.data(1, b"x"))
        assert not wire.reading
        (stream,) = peer.streams.values()
        while not wire.reading:
            assert await stream.inbox.get() == b"x"
        stream.inbox.drop()
        assert peer._held == 0

    asyncio.run(work())


_step = st.one_of(
    st.tuples(
        st.just("open"),
        st.sampled_from(["error", "data", "stdin", ""]),
        st.sampled_from(["0", "1", "2", "80", "65536", "x", ""]),
        st.sampled_from(["0", "1", "2", ""]),
    ),
    st.tuples(st.sampled_from(["data", "fin", "reset"]), st.integers(0, 12), st.integers(0, 70_000)),
    st.tuples(st.sampled_from(["ping", "goaway", "garbage", "wait"])),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(_step, max_size=40))
def test_whatever_a_client_does_the_service_ends_with_it_and_leaves_nothing(steps: Sequence[tuple[str, ...]]):
    async def work() -> None:
        peer, wire = connected()
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        before = asyncio.all_tasks()
        serving = asyncio.create_task(forward.serve(peer, dialled, pod="a/b", ended=ended))
        opening, number = Opening(), -1
        for step in steps:
            if wire.closed:
                break
            match step:
                case ("open", kind, port, request):
                    number += 2
                    headers = {"streamtype": kind, "port": port, "requestid": request}
                    named = {name: value for name, value in headers.items() if value}
                    peer.data_received(opening.frame(number, **named))
                case ("data", stream, size):
                    peer.data_received(Writer.data(int(stream), bytes(int(size))))
                case ("fin", stream, _):
                    peer.data_received(Writer.data(int(stream), b"", fin=True))
                case ("reset", stream, _):
                    peer.data_received(Writer.reset(int(stream), spdy.CANCEL))
                case ("ping",):
                    peer.data_received(Writer.ping(1))
                case ("goaway",):
                    peer.data_received(Writer.goaway(0))
                case ("garbage",):
                    peer.data_received(b"\x80\x09 no SPDY")
                case _:
                    await settled()
        await settled()
        wire.close()
        await asyncio.wait_for(serving, timeout=10)
        await settled()

        assert peer._held == 0
        assert not peer.streams
        assert asyncio.all_tasks() <= before

    asyncio.run(work())


class Open(Silent):
    """A port that stays open and silent when its client has said its last, as one may."""

    async def end_output(self) -> None:
        """It has nothing to say to that."""


@pytest.mark.parametrize("how", ["goes", "resets the stream"])
async def test_a_client_that_closes_its_half_and_then_goes_takes_its_connection_with_it(how: str):
    peer, wire = connected()
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    before = asyncio.all_tasks()
    pipe = Open()

    async def dial(_: int) -> Pipe:
        return pipe

    serving = asyncio.create_task(forward.serve(peer, dial, pod="a/b", ended=ended))
    opening = Opening()
    peer.data_received(opening.frame(1, streamtype="error", port="80", requestid="0"))
    peer.data_received(opening.frame(3, streamtype="data", port="80", requestid="0"))
    peer.data_received(Writer.data(3, b"the whole of it", fin=True))
    await settled()
    assert not pipe.closed, "its own end must not cut what the port may still say"
    if how == "goes":
        wire.close()
        await settled()
    else:
        peer.data_received(Writer.reset(3, spdy.CANCEL))
        await settled()
        assert not serving.done(), "it may open others"
    assert pipe.closed

    wire.close()
    await asyncio.wait_for(serving, timeout=10)
    assert asyncio.all_tasks() <= before


@pytest.mark.parametrize("port", ["0", "65536", "http", "-1", "080808", ""])
async def test_a_stream_without_a_port_is_reset(port: str):
    peer, wire = connected()
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(forward.serve(peer, dialled, pod="a/b", ended=ended))
    peer.data_received(Opening().frame(1, streamtype="error", requestid="0", port=port))
    await settled()

    assert Writer.reset(1, 1) in wire.sent
    ended.set_result("the pod is gone")
    await asyncio.wait_for(serving, timeout=10)
    assert wire.sent.endswith(Writer.goaway(1))
