"""SPDY/3.1 frames: real ones decode, and nothing that comes can crash, hang or fill the parser."""

import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.kubelet import spdy
from app.kubelet.spdy import Data, Event, Opened, Parser, Pinged, ProtocolError, Reset, Writer

# Captured from kubectl 1.33, one connection, in this order.
EXEC = bytes.fromhex(
    "80030001000000290000000100000000000078f9e3c6a7c26260606004a7b392a2d4c45c6851c29a0a0a6800000000ffff"
    "800300010000001700000003000000000000c22e555c92929907000000ffff"
    "800300010000001900000005000000000000c22ac5565c92925f5a02000000ffff"
    "800300010000001500000007000000000000c229975a5404000000ffff"
    "000000030000000668656c6c6f0a"
    "0000000301000000"
    "800300060000000400000001"
    "80030003000000080000000300000005"
)
EXEC_EVENTS: list[Event] = [
    Opened(1, {"streamtype": "error"}, False),
    Opened(3, {"streamtype": "stdin"}, False),
    Opened(5, {"streamtype": "stdout"}, False),
    Opened(7, {"streamtype": "stderr"}, False),
    Data(3, b"hello\n", False),
    Data(3, b"", True),
    Pinged(1),
    Reset(3, 5),
]
FORWARD = bytes.fromhex(
    "80030001000000400000000100000000000078f9e3c6a7c202253a060606ce2248fc6482d22da30138e59514a526e6420b17d6545"
    "0d0430aea2250a26635b430323000000000ffff"
    "80030001000000" + "1c0000000300000000000082ea46550b2a8812b12945b304000000ffff"
)


def test_frames_of_a_real_client_decode():
    assert Parser().feed(EXEC) == EXEC_EVENTS
    first, second = Parser().feed(FORWARD)
    assert first == Opened(1, {"requestid": "0", "streamtype": "error", "port": "18200"}, False)
    assert second == Opened(3, {"requestid": "0", "streamtype": "data", "port": "18200"}, False)


def test_byte_by_byte_is_the_same():
    parser, events = Parser(), []
    for byte in EXEC:
        events += parser.feed(bytes([byte]))
    merged = [event for event in events if not isinstance(event, Data)]
    data = b"".join(event.data for event in events if isinstance(event, Data))
    assert merged == [event for event in EXEC_EVENTS if not isinstance(event, Data)]
    assert data == b"hello\n"
    assert any(isinstance(event, Data) and event.fin for event in events)


def test_replies_share_one_compression():
    writer, inflate = Writer(), zlib.decompressobj()
    for number in (1, 3, 5):
        frame = writer.reply(number)
        kind, length = struct.unpack(">II", frame[:8])
        assert (kind, length) == (0x80030002, len(frame) - 8)
        assert frame[8:12] == struct.pack(">I", number)
        assert inflate.decompress(frame[12:]) == b"\0\0\0\0"


def test_control_frames_are_what_clients_expect():
    assert Writer.goaway(3) == bytes.fromhex("80030007000000080000000300000000")
    assert Writer.ping(1) == bytes.fromhex("800300060000000400000001")
    assert Writer.reset(3, 5) == bytes.fromhex("80030003000000080000000300000005")
    assert Writer.data(3, b"", fin=True) == bytes.fromhex("0000000301000000")


def test_headers_that_grow_when_inflated_are_refused():
    deflate = zlib.compressobj(zdict=spdy.DICTIONARY)
    bomb = deflate.compress(b"\0" * (10 << 20)) + deflate.flush(zlib.Z_SYNC_FLUSH)
    body = struct.pack(">IIBB", 1, 0, 0, 0) + bomb
    with pytest.raises(ProtocolError, match="too large"):
        Parser().feed(struct.pack(">II", 0x80030001, len(body)) + body)


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack(">II", 0x80020001, 10) + b"x" * 10,  # SPDY/2
        struct.pack(">II", 0x80030001, 1 << 20),  # a control frame of a megabyte
        struct.pack(">II", 0x80030001, 4) + b"abcd",  # too short
        struct.pack(">II", 0x80030003, 2) + b"ab",
    ],
    ids=["version", "long", "short-syn", "short-reset"],
)
def test_what_is_no_spdy_ends_the_connection(frame: bytes):
    with pytest.raises(ProtocolError):
        Parser().feed(frame)


def test_a_stream_is_opened_once():
    parser = Parser()
    parser.feed(EXEC)
    deflated = Parser()
    with pytest.raises(ProtocolError):
        deflated.feed(EXEC[:49] + EXEC[:49])


@settings(max_examples=400, deadline=None)
@given(st.lists(st.binary(max_size=300), max_size=12))
def test_whatever_comes_ends_in_events_or_in_a_refusal_and_little_is_held(pieces: list[bytes]):
    parser = Parser()
    _feed(parser, pieces)


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from([EXEC, FORWARD]),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=6),
    st.integers(1, 64),
)
def test_damaged_frames_of_a_real_client_do_no_harm(whole: bytes, damage: list[tuple[int, int]], size: int):
    broken = bytearray(whole)
    for at, value in damage:
        broken[at % len(broken)] = value
    _feed(Parser(), [bytes(broken[at : at + size]) for at in range(0, len(broken), size)])


def _feed(parser: Parser, pieces: list[bytes]) -> None:
    try:
        for piece in pieces:
            for event in parser.feed(piece):
                assert isinstance(event, Opened | Data | Reset | Pinged | spdy.GoingAway)
            assert len(parser._buffer) <= spdy.CONTROL_BYTES_MAX + 8
    except ProtocolError:
        return
