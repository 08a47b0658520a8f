"""What the kubelet endpoint costs, beside a plain TLS pipe of the same bytes in the same run; only prints.

Beside each rate stands what each program spends on it: on two cores that five programs share, that is what
bounds the rate.
"""

import asyncio
import contextlib
import os
import resource
import ssl
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import psutil

from app.kube.pki import mint_ca, mint_leaf
from providers.base import DEFAULT_ACCOUNT, ProviderConfig, Ref, ResourceId
from providers.capabilities import Executes
from providers.fake.adapter import FakeProvider
from tests.cluster.kubelet.conftest import Bench, bench, whole  # noqa: F401 (fixtures)
from tests.cluster.kubelet.test_endpoint import anonymous_tls, client_tls
from tests.cluster.kubelet.test_ports import forwarded
from tests.support.composed import until

os.environ["NEBULA_SIMULATOR_NODELAY"] = "1"  # the cloud's own 40 ms are not what is measured here

BYTES = 64 << 20
FOLLOWERS = 200
ROUNDS = 40
_PIECE = b"x" * 65536
# The first byte of a connection says which way: "d" is answered with BYTES, all else is read to its end.
_SERVE = f"""
import os, socket, threading
server = socket.create_server(("127.0.0.1", int(os.environ["FAKE_PORT_8000"])), backlog=8)
def serve(one):
    if one.recv(1) == b"d":
        for _ in range({BYTES // len(_PIECE)}):
            one.sendall(b"x" * {len(_PIECE)})
    else:
        while one.recv(1 << 18):
            pass
        one.sendall(b"done")
    one.close()
while True:
    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
"""


@dataclass(slots=True)
class Rows:
    """What was measured. ``watched``: programs whose CPU time is told beside a rate."""

    watched: dict[str, psutil.Process]
    rows: list[tuple[str, str]] = field(default_factory=list)

    def add(self, name: str, value: str) -> None:
        self.rows.append((name, value))

    def spread(self, name: str, took_s: list[float]) -> None:
        self.add(name, f"p50 {1000 * statistics.median(took_s):.1f} ms, least {1000 * min(took_s):.1f} ms")

    @contextlib.asynccontextmanager
    async def rate(
        self, name: str, *, size: int = BYTES, also: psutil.Process | None = None
    ) -> AsyncIterator[None]:
        """Time the block, which moves ``size`` bytes. ``also``: a kubectl that outlives it."""
        before, began = self._cpu(also), time.perf_counter()
        yield
        took_s = time.perf_counter() - began
        spent = {each: after - before[each] for each, after in self._cpu(also).items()}
        shown = ", ".join(f"{each} {1e8 * cpu_s / size:.2f}" for each, cpu_s in spent.items() if cpu_s > 0.01)
        self.add(name, f"{size / took_s / 1e6:.0f} MB/s (CPU-s per 100 MB: {shown})")

    def _cpu(self, also: psutil.Process | None) -> dict[str, float]:
        """Of a kubectl that ends in between its time is known, too."""
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        kubectl = ended.ru_utime + ended.ru_stime if also is None else sum(also.cpu_times()[:2])
        spent = {name: sum(process.cpu_times()[:2]) for name, process in self.watched.items()}
        return spent | {"kubectl": kubectl, "this test": time.process_time()}

    def print(self) -> None:
        width = max(len(name) for name, _ in self.rows)
        print()
        for name, value in self.rows:
            print(f"{name:<{width}}  {value}")


async def test_kubelet_endpoint(bench: Bench, tmp_path: Path):  # noqa: F811
    assert bench.cluster.control_plane is not None
    await bench.pod("p", ["python3", "-c", _SERVE], ports=(8000,))
    watched = {"endpoint": psutil.Process(bench.controller.pid)}
    watched |= {"API server": psutil.Process(bench.cluster.control_plane.pids["kube-apiserver"])}
    rows = Rows(watched | {"fake cloud": psutil.Process(bench.cloud.pid)})
    connector = aiohttp.TCPConnector(ssl=client_tls(bench, tmp_path), limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        await _round_trips(bench, http, rows)
        async with rows.rate("plain TLS pipe in one process"):
            await _plain_pipe(tmp_path, BYTES)
        async with rows.rate("exec, output, endpoint alone"):
            await _session(bench, http, f"head -c {BYTES} /dev/zero")
        async with rows.rate("exec, input, endpoint alone"):
            await _session(bench, http, "wc -c", send_bytes=BYTES)
        await _through_kubectl(bench, rows)
        await _followers(bench, http, rows)
    rows.print()


async def _round_trips(bench: Bench, http: aiohttp.ClientSession, rows: Rows) -> None:  # noqa: F811
    """A command that does nothing, begun and ended; and what of it is not the endpoint's."""
    config = ProviderConfig(name="runs", installation="bench", options={"url": bench.cloud.url})
    provider = await FakeProvider.open(config)
    assert isinstance(provider, Executes)
    found = await bench.machine("p")
    ref = Ref(
        provider="runs",
        account=DEFAULT_ACCOUNT,
        region=str(found.get("region") or ""),
        resource_id=ResourceId(str(found["id"])),
    )

    async def alone() -> None:
        session = await provider.exec(ref, ["true"], stdin=False, terminal=False)
        assert session is not None
        assert await session.wait() == 0
        await session.aclose()

    endpoint = rows.watched["endpoint"]
    await _repeated(lambda: _session(bench, http, "true"), times=5)
    before = sum(endpoint.cpu_times()[:2])
    rows.spread(
        "exec of true, endpoint and fake cloud",
        await _repeated(lambda: _session(bench, http, "true"), times=ROUNDS),
    )
    spent_s = sum(endpoint.cpu_times()[:2]) - before
    rows.add("  CPU time of the whole controller for each", f"{1000 * spent_s / ROUNDS:.1f} ms")
    rows.spread("  of which the fake cloud", await _repeated(alone, times=ROUNDS))
    rows.spread(
        "exec of true, through kubectl",
        await _repeated(lambda: bench.ok("exec", "p", "--", "true"), times=10),
    )
    rows.spread(
        "  kubectl asking the API server for its health",
        await _repeated(lambda: bench.ok("get", "--raw", "/healthz"), times=10),
    )


async def _repeated(work: Callable[[], Awaitable[object]], *, times: int) -> list[float]:
    took: list[float] = []
    for _ in range(times):
        began = time.perf_counter()
        await work()
        took.append(time.perf_counter() - began)
    return took


async def _session(
    bench: Bench,  # noqa: F811
    http: aiohttp.ClientSession,
    command: str,
    *,
    send_bytes: int = 0,
) -> int:
    query = "".join(f"&command={word}" for word in command.split())
    path = f"{bench.controller.kubelet_url}/exec/{bench.namespace}/p/work?output=1"
    got = 0
    url = path + ("&input=1" if send_bytes else "") + query
    async with http.ws_connect(url, protocols=["v5.channel.k8s.io"], max_msg_size=0) as ws:
        if send_bytes:
            for _ in range(send_bytes // len(_PIECE)):
                await ws.send_bytes(b"\0" + _PIECE)
            await ws.send_bytes(b"\xff\0")
        async for message in ws:
            got += len(message.data) - 1
    return got


async def _through_kubectl(bench: Bench, rows: Rows) -> None:  # noqa: F811
    async with rows.rate("exec, output, through kubectl"):
        await bench.ok("exec", "p", "--", "head", "-c", str(BYTES), "/dev/zero")
    async with rows.rate("exec, input, through kubectl"):
        await bench.ok("exec", "-i", "p", "--", "wc", "-c", stdin=_PIECE * (BYTES // len(_PIECE)))

    async def moved(port: int, way: bytes) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        writer.write(way)
        if way == b"u":
            for _ in range(BYTES // len(_PIECE)):
                writer.write(_PIECE)
                await writer.drain()
            writer.write_eof()
        got = 0
        while data := await reader.read(1 << 18):
            got += len(data)
        writer.close()
        return got

    async with forwarded(bench, "p", 8000) as port:
        kubectl = psutil.Process(bench.started[-1].pid)
        await until(lambda: moved(port, b"d"))
        for name, way in (("output", b"d"), ("input", b"u")):
            async with rows.rate(f"port-forward, {name}, through kubectl", also=kubectl):
                assert await moved(port, way) == (BYTES if way == b"d" else len(b"done"))


async def _followers(bench: Bench, http: aiohttp.ClientSession, rows: Rows) -> None:  # noqa: F811
    script = "while :; do while [ ! -e $HOME/go ]; do sleep 0.02; done; date +%s.%N; sleep 0.2; done"
    await bench.shell("q", script)
    controller = psutil.Process(bench.controller.pid)
    url = f"{bench.controller.kubelet_url}/containerLogs/{bench.namespace}/q/work?follow=true"
    answers = [await http.get(url) for _ in range(FOLLOWERS)]
    await asyncio.sleep(2)
    before, began = sum(controller.cpu_times()[:2]), time.perf_counter()
    await asyncio.sleep(10)
    idle = (sum(controller.cpu_times()[:2]) - before) / (time.perf_counter() - began)
    for answer in answers[1:]:
        answer.close()
    await asyncio.sleep(2)
    before, base_began = sum(controller.cpu_times()[:2]), time.perf_counter()
    await asyncio.sleep(10)
    base = (sum(controller.cpu_times()[:2]) - before) / (time.perf_counter() - base_began)
    await bench.ok("exec", "q", "--", "sh", "-c", "touch $HOME/go")
    late = []
    for _ in range(20):
        line = await answers[0].content.readline()
        late.append(datetime.now(UTC).timestamp() - float(line))
    answers[0].close()
    rows.add(
        f"{FOLLOWERS} idle logs -f, of one core", f"{100 * idle:.1f} % (without them {100 * base:.1f} %)"
    )
    rows.add(
        "line written until seen, p50 and most",
        f"{1000 * statistics.median(late):.0f} and {1000 * max(late):.0f} ms",
    )


async def _plain_pipe(folder: Path, size: int) -> None:
    """The same bytes over TLS between two ends of one process."""
    now = datetime.now(UTC)
    ca = mint_ca(now=now, life=timedelta(hours=1))
    leaf = mint_leaf(ca, names=["127.0.0.1"], now=now, life=timedelta(hours=1))
    pair = folder / "pipe.pem"
    pair.write_bytes(leaf.certificate + leaf.key)
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(pair)

    async def pour(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(size // len(_PIECE)):
            writer.write(_PIECE)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(pour, "127.0.0.1", 0, ssl=served)
    async with server:
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=anonymous_tls())
        while await reader.read(65536):
            pass
        writer.close()
