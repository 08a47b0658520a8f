"""A connection that uvicorn hands over, on a real socket: what uvicorn's private names must go on meaning."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import cast

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from app.kube.client import Kube
from app.kubelet import session, spdy
from app.kubelet.channels import SpdyChannels, Wanted
from app.kubelet.find import Target
from app.kubelet.handover import HEAD_BYTES_MAX, HandoverProtocol, Taken, hand_over
from app.kubelet.open import Sessions
from app.kubelet.peers import HOLD_BYTES, Lost, SpdyPeer
from app.telemetry.health import serve
from tests.unit.kubelet.test_spdy import EXEC

HEAD = (
    b"POST /exec HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\nContent-Length: 0\r\n\r\n"
)
OPENING = EXEC[: EXEC.index(bytes.fromhex("000000030000000668656c6c6f0a"))]
WANTED = Wanted(stdin=True, stdout=True, stderr=True, terminal=False)


class Doubling:
    """A session that says its input twice, and ends with 3 when that ends. ``slow``: it reads nothing."""

    def __init__(self, *, slow: bool = False) -> None:
        self._slow = slow
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue()
        self._ended = asyncio.Event()
        self.closed = asyncio.Event()

    @property
    def stdout(self) -> AsyncIterator[bytes]:
        return self._stdout()

    @property
    def stderr(self) -> AsyncIterator[bytes]:
        return self._stderr()

    async def _stdout(self) -> AsyncIterator[bytes]:
        while data := await self._pieces.get():
            yield data + data

    async def _stderr(self) -> AsyncIterator[bytes]:
        yield b"begun"

    async def write(self, data: bytes) -> None:
        if self._slow:
            await asyncio.Event().wait()
        self._pieces.put_nowait(data)

    async def end_input(self) -> None:
        self._pieces.put_nowait(b"")
        self._ended.set()

    async def resize(self, *, columns: int, rows: int) -> bool:
        return True

    async def wait(self) -> int:
        await self._ended.wait()
        return 3

    async def aclose(self) -> None:
        self.closed.set()


class Served:
    """The endpoint's mechanics without an API server."""

    def __init__(self) -> None:
        self.session = Doubling()
        self.peer: SpdyPeer | None = None
        self.over = asyncio.Event()
        self.ended: asyncio.Future[str] | None = None
        self.port = 0

    async def exec(self, request: Request) -> Taken:
        self.peer = SpdyPeer()
        headers = {"Upgrade": "SPDY/3.1", "X-Stream-Protocol-Version": "v4.channel.k8s.io"}
        hand_over(request.scope, self.peer, headers=headers)
        try:
            channels = await SpdyChannels.open(self.peer, WANTED, version="v4.channel.k8s.io")
            self.ended = asyncio.get_running_loop().create_future()
            await session.serve(self.session, channels, WANTED, attached=False, ended=self.ended)
        except Lost:
            pass
        finally:
            self.over.set()
        return Taken()

    async def plain(self, _request: Request) -> PlainTextResponse:
        return PlainTextResponse("said", status_code=403)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    found = Served()
    app = Starlette(
        routes=[
            Route("/exec", found.exec, methods=["POST"]),
            Route("/plain", found.plain, methods=["GET", "POST"]),
        ]
    )
    config = uvicorn.Config(
        app,
        http=HandoverProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        timeout_graceful_shutdown=1,
    )
    sock = socket.create_server(("127.0.0.1", 0))
    found.port = sock.getsockname()[1]
    running = asyncio.create_task(serve(uvicorn.Server(config), sock))
    yield found
    running.cancel()
    await asyncio.wait([running])


async def connected(served: Served, first: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(first)
    await writer.drain()
    return reader, writer


def frames(data: bytes) -> dict[int, bytes]:
    """The content of data frames by stream; control frames are passed over."""
    found: dict[int, bytes] = {}
    while data:
        first = int.from_bytes(data[:4], "big")
        length = int.from_bytes(data[5:8], "big")
        if not first & 0x80000000:
            found[first] = found.get(first, b"") + data[8 : 8 + length]
        data = data[8 + length :]
    return found


@pytest.mark.parametrize("size", [10_000, 1], ids=["glued-to-the-head", "byte-by-byte"])
async def test_a_session_is_carried_however_its_bytes_arrive(served: Served, size: int):
    whole = HEAD + OPENING + spdy.Writer.data(3, b"hello") + spdy.Writer.data(3, b"", fin=True)
    reader, writer = await connected(served, b"")
    for at in range(0, len(whole), size):
        writer.write(whole[at : at + size])
        await writer.drain()

    async with asyncio.timeout(10):
        head = await reader.readuntil(b"\r\n\r\n")
        content = frames(await reader.read())

    assert head.startswith(b"HTTP/1.1 101 ")
    assert content[5] == b"hellohello"
    assert content[7] == b"begun"
    assert json.loads(content[1])["details"]["causes"][0] == {"reason": "ExitCode", "message": "3"}
    writer.close()
    await asyncio.wait_for(served.session.closed.wait(), timeout=10)


async def test_nothing_is_said_after_the_101_before_the_client_opens_a_stream(served: Served):
    reader, writer = await connected(served, HEAD)
    async with asyncio.timeout(10):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")

    reading = asyncio.ensure_future(reader.read(1))
    done, _ = await asyncio.wait([reading], timeout=0.2)

    assert not done
    writer.write(OPENING)
    async with asyncio.timeout(10):
        assert await reading == b"\x80"
    writer.close()


async def test_a_client_that_goes_ends_the_session(served: Served):
    _, writer = await connected(served, HEAD + OPENING)
    writer.transport.abort()

    async with asyncio.timeout(10):
        await served.over.wait()
    assert served.peer is not None
    assert served.peer._held == 0


async def test_input_that_nobody_reads_is_left_with_the_client(served: Served):
    served.session = Doubling(slow=True)
    _, writer = await connected(served, HEAD + OPENING)
    frame = spdy.Writer.data(3, b"x" * 65536)
    sent = 0
    try:
        async with asyncio.timeout(1):
            while sent < 64 << 20:
                writer.write(frame)
                await writer.drain()
                sent += len(frame)
    except TimeoutError:
        pass

    assert sent < 32 << 20  # the sockets' own buffers, and not much more
    assert served.peer is not None
    assert served.peer._held <= 2 * HOLD_BYTES
    writer.transport.abort()


async def test_a_head_without_end_is_refused_before_it_fills_the_memory(served: Served):
    reader, writer = await connected(served, b"GET /plain HTTP/1.1\r\n")

    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionError):
            for number in range(2 * HEAD_BYTES_MAX // 1024):
                writer.write(b"x-%08d: " % number + b"y" * 1010 + b"\r\n")
                await writer.drain()
        with contextlib.suppress(ConnectionError):
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 400 ") or not answer
    writer.close()


@pytest.mark.behaviour(268)
async def test_fc_114_fc_117_a_silent_client_is_told_and_left_and_nothing_goes_on(served: Served):
    reader, writer = await connected(served, HEAD + OPENING)
    async with asyncio.timeout(10):
        await reader.readuntil(b"\r\n\r\n")
        while served.ended is None:
            await asyncio.sleep(0.01)
    assert served.peer is not None
    target = cast("Target", None)  # nothing of it is asked
    sessions = Sessions(cast("Kube", Rooms()), idle_s=0.0)
    with sessions.kept(target, peer=served.peer, ended=served.ended):
        sessions._sweep()

    async with asyncio.timeout(10):
        content = frames(await reader.read())
        await served.over.wait()
        await served.session.closed.wait()
    status = json.loads(content[1])
    assert "nothing was heard of the client" in status["message"]
    assert status["reason"] == "InternalError"
    writer.close()


class Rooms:
    def room(self, _name: str) -> None: ...


async def test_a_refused_upgrade_is_answered_and_the_connection_closed(served: Served):
    reader, writer = await connected(served, HEAD.replace(b"/exec", b"/plain") + OPENING)

    async with asyncio.timeout(10):
        answer = await reader.read()

    assert answer.startswith(b"HTTP/1.1 403 ")
    assert answer.endswith(b"said")
    writer.close()


async def test_ordinary_requests_share_a_connection(served: Served):
    request = b"GET /plain HTTP/1.1\r\nHost: x\r\n\r\n"
    reader, writer = await connected(served, request)
    for _ in range(3):
        async with asyncio.timeout(10):
            assert (await reader.readuntil(b"said")).startswith(b"HTTP/1.1 403 ")
        writer.write(request)
    writer.close()
