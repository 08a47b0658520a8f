"""``kubectl port-forward`` through the real API server."""

import asyncio
import hashlib
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.cluster.kubelet.conftest import Bench
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


async def echoing(bench: Bench) -> None:
    await bench.pod("p", ["python3", "-c", ECHO], ports=(8000, 8001))


@asynccontextmanager
async def forwarded(bench: Bench, pod: str, port: int) -> AsyncIterator[int]:
    """The local port that leads to the Pod's."""
    process = await bench.start("port-forward", "--address=127.0.0.1", f"pod/{pod}", f":{port}")
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


async def test_half_closed_connections_carry_their_answer(bench: Bench):
    await echoing(bench)
    async with forwarded(bench, "p", 8000) as port:
        await until(lambda: exchanged(port, b"hello"))

        assert await exchanged(port, b"hello") == b"hello"


async def test_many_connections_at_once_are_kept_apart(bench: Bench):
    await echoing(bench)
    async with forwarded(bench, "p", 8000) as port:
        await until(lambda: exchanged(port, b"up"))
        sent = [os.urandom(100_000) for _ in range(20)]

        assert await asyncio.gather(*(exchanged(port, data) for data in sent)) == sent


@pytest.mark.slow
async def test_a_hundred_megabytes_pass_whole(bench: Bench):
    await echoing(bench)
    async with forwarded(bench, "p", 8000) as port:
        await until(lambda: exchanged(port, b"up"))
        data = os.urandom(1 << 20) * 50  # there and back again

        answer = await exchanged(port, data)

        assert hashlib.sha256(answer).digest() == hashlib.sha256(data).digest()


async def test_a_refused_port_is_said_so(bench: Bench):
    await echoing(bench)
    process = await bench.start("port-forward", "--address=127.0.0.1", "pod/p", ":8001")
    assert process.stdout is not None
    assert process.stderr is not None
    found = _PORT.match(await process.stdout.readline())
    assert found is not None

    assert await exchanged(int(found[1]), b"hello") == b""

    async with asyncio.timeout(20):
        assert b"connection refused" in await process.stderr.readline()
