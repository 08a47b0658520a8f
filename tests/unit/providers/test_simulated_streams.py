"""Streams of a simulated cloud, over their own sockets."""

import asyncio
import socket
import struct

from providers.simulation.streams import Streams, Wire, serve_port

RESET = struct.pack("ii", 1, 0)


async def test_a_client_that_closes_its_half_and_then_goes_takes_its_connection_with_it():
    """Also from a port that stays open and silent when its client has said its last."""
    heard: asyncio.Queue[bytes] = asyncio.Queue()
    served = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.put_nowait(await reader.read())
        await served.wait()
        writer.close()

    port = await asyncio.start_server(silent, "127.0.0.1", 0)
    streams = Streams()

    async def serve(wire: Wire) -> None:
        await serve_port(wire, port.sockets[0].getsockname()[1])
        served.set()

    try:
        place = streams.ticket(serve, ())
        reader, writer = await asyncio.open_connection("127.0.0.1", int(place["port"]))
        writer.write(str(place["ticket"]).encode() + b"\nthe whole of it")
        writer.write_eof()
        assert await reader.readexactly(1) == b"\1"
        assert await asyncio.wait_for(heard.get(), timeout=10) == b"the whole of it"
        assert not served.is_set(), "its own end must not cut what the port may still say"

        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.transport.abort()

        await asyncio.wait_for(served.wait(), timeout=10)
    finally:
        streams.close()
        served.set()
        port.close()
