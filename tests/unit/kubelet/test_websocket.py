"""WebSocket messages, the server's side."""

import os
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.kubelet import websocket
from app.kubelet.websocket import Closed, Message, Parser, Pinged, ProtocolError


def framed(kind: int, data: bytes, *, final: bool = True, mask: bytes = b"abcd") -> bytes:
    length = len(data)
    first = (0x80 if final else 0) | kind
    if length < 126:
        head = struct.pack(">BB", first, 0x80 | length)
    elif length < 1 << 16:
        head = struct.pack(">BBH", first, 0x80 | 126, length)
    else:
        head = struct.pack(">BBQ", first, 0x80 | 127, length)
    return head + mask + bytes(byte ^ mask[index % 4] for index, byte in enumerate(data))


def test_the_key_of_the_standard_is_answered_as_there():
    assert websocket.accept_key("dGhlIHNhbXBsZSBub25jZQ==") == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65535, 65536, 200_001])
def test_messages_of_every_length_arrive_in_pieces_and_whole(size: int):
    data = os.urandom(size)
    whole, pieces = Parser(), Parser()
    frame = framed(2, data)

    assert whole.feed(frame) == [Message(data, False)]
    events = [event for at in range(0, len(frame), 997) for event in pieces.feed(frame[at : at + 997])]
    assert events == [Message(data, False)]


def test_a_message_in_parts_is_one_and_a_ping_may_come_between():
    frames = framed(1, b"a", final=False) + framed(9, b"p") + framed(0, b"b")
    assert Parser().feed(frames) == [Pinged(b"p"), Message(b"ab", True)]


def test_a_close_tells_its_code():
    assert Parser().feed(framed(8, struct.pack(">H", 1001))) == [Closed(1001)]


@pytest.mark.parametrize(
    "frame",
    [
        b"\x82\x01x",  # not masked
        b"\xf2\x80abcd",  # reserved bits
        framed(0, b"x"),  # goes on with nothing
        framed(3, b"x"),
        b"\x89\xfe\x00\xff",  # a long ping
        b"\x82\xff" + struct.pack(">Q", 1 << 40),
    ],
    ids=["unmasked", "reserved", "continued", "unknown", "long-ping", "huge"],
)
def test_what_breaks_the_rules_closes_the_connection(frame: bytes):
    with pytest.raises(ProtocolError):
        Parser().feed(frame)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=12))
def test_whatever_comes_does_no_harm(pieces: list[bytes]):
    parser = Parser(limit_bytes=1000)
    try:
        for piece in pieces:
            parser.feed(piece)
            assert len(parser._buffer) + len(parser._message) <= 3000
    except ProtocolError:
        return
