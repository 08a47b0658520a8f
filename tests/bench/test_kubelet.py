"""What the kubelet endpoint costs, beside a plain TLS pipe of the same bytes in the same run; only prints."""

import asyncio
import ssl
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import psutil

from app.kube.pki import mint_ca, mint_leaf
from tests.cluster.kubelet.conftest import Bench, bench, whole  # noqa: F401 (fixtures)
from tests.cluster.kubelet.test_endpoint import anonymous_tls, client_tls

BYTES = 64 << 20
FOLLOWERS = 200
_PIECE = b"x" * 65536


async def test_kubelet_endpoint(bench: Bench, tmp_path: Path):  # noqa: F811
    await bench.shell("p", "while :; do sleep 600; done")
    context = client_tls(bench, tmp_path)
    path = f"{bench.controller.kubelet_url}/exec/{bench.namespace}/p/work?output=1"
    rows: list[tuple[str, str]] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context, limit=0)) as http:

        async def session(command: str, *, send_bytes: int = 0) -> int:
            query = "".join(f"&command={word}" for word in command.split())
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

        took = [await _timed(lambda: session("true")) for _ in range(40)]
        rows.append(("exec round trip, endpoint alone, p50", f"{1000 * statistics.median(took[5:]):.1f} ms"))
        kubectl = [await _timed(lambda: bench.run("exec", "p", "--", "true")) for _ in range(10)]
        rows.append(("exec round trip, kubectl whole, p50", f"{1000 * statistics.median(kubectl):.1f} ms"))
        pipe_s = await _timed(lambda: _plain_pipe(tmp_path, BYTES))
        rows.append(("plain TLS pipe in one process", f"{BYTES / pipe_s / 1e6:.0f} MB/s"))
        down_s = await _timed(lambda: session(f"head -c {BYTES} /dev/zero"))
        rows.append(("exec, output, endpoint alone", f"{BYTES / down_s / 1e6:.0f} MB/s"))
        up_s = await _timed(lambda: session("wc -c", send_bytes=BYTES))
        rows.append(("exec, input, endpoint alone", f"{BYTES / up_s / 1e6:.0f} MB/s"))
        size = str(BYTES)
        whole_s = await _timed(lambda: bench.run("exec", "p", "--", "head", "-c", size, "/dev/zero"))
        rows.append(("exec, output, kubectl whole", f"{BYTES / whole_s / 1e6:.0f} MB/s"))
        rows += await _followers(bench, http)
    width = max(len(name) for name, _ in rows)
    print()
    for name, value in rows:
        print(f"{name:<{width}}  {value}")


async def _timed(work: Callable[[], "asyncio.Future[object] | object"]) -> float:
    began = time.perf_counter()
    await work()  # type: ignore[misc]
    return time.perf_counter() - began


async def _followers(bench: Bench, http: aiohttp.ClientSession) -> list[tuple[str, str]]:  # noqa: F811
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
    return [
        (f"{FOLLOWERS} idle logs -f, of one core", f"{100 * idle:.1f} % (without them {100 * base:.1f} %)"),
        (
            "line written until seen, p50 and most",
            f"{1000 * statistics.median(late):.0f} and {1000 * max(late):.0f} ms",
        ),
    ]


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
