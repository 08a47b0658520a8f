"""Two hundred sessions with abrupt ends leave nothing behind."""

import asyncio
import contextlib
import ssl
import time
from pathlib import Path

import aiohttp
import psutil
import pytest

from tests.cluster.kubelet.conftest import Bench
from tests.cluster.kubelet.test_endpoint import client_tls
from tests.support.composed import until

SESSIONS, AT_ONCE = 200, 20
_GROWTH_BYTES = 24 << 20
_COMMANDS = (["yes"], ["cat"])  # the Pod's own is a sleep, and so are some of the sessions
_MORE_WORK = 0.3  # of a core: a loop that goes on takes all of one
_POOLED = 40  # idle connections to the API server, the store and the clouds come and go


@pytest.mark.slow
@pytest.mark.field_case("FC-044")
async def test_fc_114_two_hundred_torn_sessions_leave_no_socket_process_memory_or_work(
    bench: Bench, tmp_path: Path
):
    await bench.shell("p", "sleep 600")
    controller = psutil.Process(bench.controller.pid)
    context = client_tls(bench, tmp_path)
    pooled = _connections(bench, controller)  # the API server keeps those of earlier requests for a while
    await _torn(bench, context, count=SESSIONS // 2)  # what is loaded and cached once is there then
    machine = str((await bench.machine("p"))["id"])
    await _quiet(bench, controller, machine, pooled=pooled)
    before = (controller.num_fds(), controller.num_threads(), controller.memory_info().rss)
    work = await _work(controller)

    await _torn(bench, context, count=SESSIONS)

    await _quiet(bench, controller, machine, pooled=pooled)
    fds, threads, rss = controller.num_fds(), controller.num_threads(), controller.memory_info().rss
    assert fds <= before[0] + _POOLED
    assert threads <= before[1] + 2
    assert rss <= before[2] + _GROWTH_BYTES
    assert await _work(controller) <= work + _MORE_WORK


async def _torn(bench: Bench, context: ssl.SSLContext, *, count: int) -> None:
    """Sessions in every state: before a byte, in the middle of output, while input is not read, with a
    terminal whose size changes all the time.
    """
    path = f"{bench.controller.kubelet_url}/exec/{bench.namespace}/p/work?input=1&output=1&error=1"
    commands = ("command=sleep&command=600", "command=yes", "command=cat", "command=cat&tty=1")
    places = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with places, aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as http:
            ws = await http.ws_connect(f"{path}&{commands[number % 4]}", protocols=["v4.channel.k8s.io"])
            if number % 4 == 1:
                await ws.receive()
            if number % 4 == 2:
                await ws.send_bytes(b"\0" + b"x" * 100_000)
            if number % 4 == 3:
                for width in range(100):  # none at all is among them, as clients send it at their end
                    await ws.send_bytes(b'\4{"Width":%d,"Height":%d}\n' % (width, width))
            if number // 4 % 2:
                await ws.close()
            else:
                transport = ws._writer.transport
                assert transport is not None
                transport.abort()

    await asyncio.gather(*(one(number) for number in range(count)))


async def _work(controller: psutil.Process) -> float:
    """What it does by itself, in cores."""
    before, began = sum(controller.cpu_times()[:2]), time.monotonic()
    await asyncio.sleep(2)
    return (sum(controller.cpu_times()[:2]) - before) / (time.monotonic() - began)


def _connections(bench: Bench, controller: psutil.Process) -> set[int]:
    """The ports at the other end of the endpoint's connections."""
    port = int(bench.controller.kubelet_url.rpartition(":")[2])
    over = (psutil.CONN_LISTEN, psutil.CONN_TIME_WAIT)
    found = (each for each in controller.net_connections(kind="tcp") if each.laddr.port == port)
    return {each.raddr.port for each in found if each.status not in over and each.raddr}


async def _quiet(bench: Bench, controller: psutil.Process, machine: str, *, pooled: set[int]) -> None:
    """Wait until no session has a connection or a process any more."""

    def left() -> list[str]:
        found = [f"a connection from port {port}" for port in _connections(bench, controller) - pooled]
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("FAKE_MACHINE") == machine and process.cmdline() in _COMMANDS:
                    found.append(" ".join(process.cmdline()))
        return found

    try:
        await until(lambda: not left())
    except AssertionError as error:
        raise AssertionError(f"of the sessions are left: {left()}") from error
