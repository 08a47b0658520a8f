"""``kubectl port-forward`` through the real API server."""

import asyncio
import hashlib
import os
import re
import struct
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from app.kubelet import forward, spdy
from tests.cluster.kubelet.conftest import Bench
from tests.cluster.kubelet.test_endpoint import calling, client_tls
from tests.support.composed import until

# Answers each connection, once its other half has ended, with what it heard.
ECHO = """
import os, socket, threading
server = socket.create_server(("127.0.0.1", int(os.environ["FAKE_PORT_8000"])), backlog=64)
def serve(one):
    heard = b"".join(iter(lambda: one.recv(65536), b""))
    one.sendall(heard)
    one.close()
while True:
    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
"""
_PORT = re.compile(rb"Forwarding from 127\.0\.0\.1:(\d+) -> (\d+)")


@pytest.fixture(scope="module")
async def echo(whole: Bench) -> AsyncIterator[Bench]:
    """A Pod ``p`` whose port 8000 answers, and 8001 does not."""
    mine = Bench(
        cluster=whole.cluster, controller=whole.controller, clouds=whole.clouds, database=whole.database
    )
    await mine.ok("create", "namespace", mine.namespace)
    await mine.pod("p", ["python3", "-c", ECHO], ports=(8000, 8001))
    async with forwarded(mine, "p", 8000) as port:
        await until(lambda: exchanged(port, b"up"))
    yield mine
    await mine.close()
    await mine.run("delete", "pod", "p", "--force", "--grace-period=0", "--wait=false")
    await mine.run("delete", "namespace", mine.namespace, "--wait=false")


@asynccontextmanager
async def forwarded(bench: Bench, pod: str, port: int, **env: str) -> AsyncIterator[int]:
    """The local port that leads to the Pod's."""
    process = await bench.start("port-forward", "--address=127.0.0.1", f"pod/{pod}", f":{port}", **env)
    assert process.stdout is not None
    async with asyncio.timeout(30):
        found = _PORT.match(await process.stdout.readline())
    assert found is not None
    try:
        yield int(found[1])
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def exchanged(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    writer.write_eof()
    await writer.drain()
    answer = await reader.read()
    writer.close()
    return answer


async def test_half_closed_connections_carry_their_answer(echo: Bench):
    async with forwarded(echo, "p", 8000) as port:
        assert await exchanged(port, b"hello") == b"hello"


async def test_many_connections_at_once_are_kept_apart(echo: Bench):
    async with forwarded(echo, "p", 8000) as port:
        sent = [os.urandom(100_000) for _ in range(20)]

        assert await asyncio.gather(*(exchanged(port, data) for data in sent)) == sent


@pytest.mark.parametrize("websockets", ["true", "false"], ids=["websocket", "spdy"])
async def test_clients_of_either_protocol_get_the_same(echo: Bench, websockets: str):
    async with forwarded(echo, "p", 8000, KUBECTL_PORT_FORWARD_WEBSOCKETS=websockets) as port:
        sent = [os.urandom(300_000) for _ in range(3)]

        assert await asyncio.gather(*(exchanged(port, data) for data in sent)) == sent


@pytest.mark.slow
async def test_a_hundred_megabytes_pass_whole(echo: Bench):
    async with forwarded(echo, "p", 8000) as port:
        data = os.urandom(1 << 20) * 50  # there and back again

        answer = await exchanged(port, data)

        assert hashlib.sha256(answer).digest() == hashlib.sha256(data).digest()


async def test_a_refused_port_is_said_so(echo: Bench):
    process = await echo.start("port-forward", "--address=127.0.0.1", "pod/p", ":8001")
    assert process.stdout is not None
    assert process.stderr is not None
    found = _PORT.match(await process.stdout.readline())
    assert found is not None

    assert await exchanged(int(found[1]), b"hello") == b""

    async with asyncio.timeout(20):
        assert b"connection refused" in await process.stderr.readline()


class Spdy:
    """The client's side of SPDY/3.1: frames with the dictionary, as Go's clients make them."""

    def __init__(self) -> None:
        self._deflate = zlib.compressobj(zdict=spdy.DICTIONARY)
        self.parser = ServerFrames()

    def opened(self, stream: int, **headers: str) -> bytes:
        block = struct.pack(">I", len(headers))
        for name, value in headers.items():
            for word in (name.encode(), value.encode()):
                block += struct.pack(">I", len(word)) + word
        body = struct.pack(">IIBB", stream, 0, 0, 0)
        body += self._deflate.compress(block) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
        return struct.pack(">II", 0x80030001, len(body)) + body


class ServerFrames:
    """What a server has sent: content of data frames by stream, which of them have ended, and resets."""

    def __init__(self) -> None:
        self._rest = b""
        self.content: dict[int, bytes] = {}
        self.ended: set[int] = set()
        self.reset: dict[int, int] = {}

    def feed(self, data: bytes) -> None:
        self._rest += data
        while len(self._rest) >= 8:
            first, second = struct.unpack_from(">II", self._rest)
            flags, length = second >> 24, second & 0xFFFFFF
            if len(self._rest) < 8 + length:
                return
            body, self._rest = self._rest[8 : 8 + length], self._rest[8 + length :]
            if not first & 0x80000000:
                self.content[first] = self.content.get(first, b"") + body
                if flags & 1:
                    self.ended.add(first)
            elif first & 0xFFFF == 3:
                stream, status = struct.unpack(">II", body)
                self.reset[stream] = status


async def test_the_tunnel_carries_connections_and_refuses_a_port_out_of_range(echo: Bench, tmp_path: Path):
    client = Spdy()
    frames, data = client.parser, os.urandom(200_000)
    async with (
        calling(echo, client_tls(echo, tmp_path)) as http,
        http.ws_connect(f"/portForward/{echo.namespace}/p", protocols=[forward.TUNNEL]) as ws,
    ):
        assert ws.protocol == forward.TUNNEL
        first = client.opened(1, streamtype="error", port="8000", requestid="0")
        await ws.send_bytes(first[:9])  # borders of messages mean nothing
        await ws.send_bytes(first[9:] + client.opened(3, streamtype="data", port="8000", requestid="0"))
        for at in range(0, len(data), 50_000):
            await ws.send_bytes(spdy.Writer.data(3, data[at : at + 50_000]))
        await ws.send_bytes(spdy.Writer.data(3, b"", fin=True))
        await ws.send_bytes(client.opened(5, streamtype="error", port="65536", requestid="1"))
        await ws.send_bytes(client.opened(7, streamtype="error", port="8001", requestid="2"))
        await ws.send_bytes(client.opened(9, streamtype="data", port="8001", requestid="2"))
        async with asyncio.timeout(20):
            while not {1, 3, 7} <= frames.ended or not {5, 9} <= frames.reset.keys():
                frames.feed(await ws.receive_bytes())

    assert frames.content[3] == data
    assert frames.content[1] == b""
    assert b"error forwarding port 8001" in frames.content[7]
    assert b"connection refused" in frames.content[7]
    assert frames.reset[5] == 1  # a protocol error, and no other connection has suffered from it


async def test_the_older_channels_carry_a_connection_to_each_port_of_the_query(echo: Bench, tmp_path: Path):
    said: dict[int, bytes] = {}
    path = f"/portForward/{echo.namespace}/p"
    async with calling(echo, client_tls(echo, tmp_path)) as http:
        for port in ("0", "65536", "http", ""):
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await http.ws_connect(f"{path}?port={port}", protocols=["v4.channel.k8s.io"])
            assert refused.value.status == 400
        async with (
            asyncio.timeout(20),
            http.ws_connect(f"{path}?port=8001,8002", protocols=["v4.channel.k8s.io"]) as ws,
        ):
            async for message in ws:
                said[message.data[0]] = said.get(message.data[0], b"") + message.data[1:]

    assert said[0] == said[1][:2] == (8001).to_bytes(2, "little")
    assert b"error forwarding port 8001" in said[1]
    assert said[3].startswith((8002).to_bytes(2, "little"))
    assert b"error forwarding port 8002" in said[3]
