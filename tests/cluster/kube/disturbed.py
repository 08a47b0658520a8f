"""A TCP forwarder before a real API server: it can stall, cut, refuse, and swallow answers."""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import yaml


class Proxy:
    """Forwards bytes while ``open``. Everything else is a fault that a test switches on."""

    def __init__(self, host: str, port: int) -> None:
        self._target = host, port
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._refusing = False
        self._swallow = 0
        self.swallowed = 0
        self.accepted = 0
        self.port = 0

    @classmethod
    @asynccontextmanager
    async def before(cls, kubeconfig: Path) -> AsyncIterator[Self]:
        url = urlsplit(_cluster(yaml.safe_load(kubeconfig.read_text()))["server"])
        assert url.hostname
        proxy = cls(url.hostname, url.port or 443)
        proxy._server = await asyncio.start_server(proxy._accepted, "127.0.0.1", 0)
        proxy.port = proxy._server.sockets[0].getsockname()[1]
        try:
            yield proxy
        finally:
            proxy._server.close()
            await proxy.cut()

    def stall(self) -> None:
        """Keep connections open and pass nothing on, as a network does that drops packets."""
        self._flowing.clear()

    def flow(self) -> None:
        """End every fault."""
        self._refusing = False
        self._swallow = 0
        self._flowing.set()

    async def refuse(self) -> None:
        """Cut all connections and close new ones at once, as a server does that is down."""
        self._refusing = True
        await self.cut()

    async def cut(self) -> None:
        """Break every connection of this moment."""
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def swallow_next_answer(self) -> None:
        """Let the next request through and break the connection when its answer comes."""
        self._swallow += 1

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._connections.add(task)
        self.accepted += 1
        try:
            if not self._refusing:
                await self._forward(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        # The answers of a TLS handshake must pass: only what follows a later request is swallowed.
        state = {"armed": False}

        async def up() -> None:
            while data := await reader.read(65536):
                await self._flowing.wait()
                if self._swallow and data[0] == 0x17:  # TLS application data
                    self._swallow -= 1
                    state["armed"] = True
                far_writer.write(data)
                await far_writer.drain()

        async def down() -> None:
            while data := await far_reader.read(65536):
                await self._flowing.wait()
                if state["armed"]:
                    self.swallowed += 1
                    return
                writer.write(data)
                await writer.drain()

        pumps = [asyncio.ensure_future(up()), asyncio.ensure_future(down())]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            with suppress(OSError):
                far_writer.transport.abort()


def kubeconfig_through(proxy: Proxy, kubeconfig: Path, folder: Path) -> Path:
    """A copy of ``kubeconfig`` whose server is the proxy; it must stay usable from another folder."""
    config = yaml.safe_load(kubeconfig.read_text())
    cluster = _cluster(config)
    cluster["tls-server-name"] = urlsplit(cluster["server"]).hostname
    cluster["server"] = f"https://127.0.0.1:{proxy.port}"
    for section in [cluster, *(user["user"] for user in config["users"])]:
        for field in ("certificate-authority", "client-certificate", "client-key"):
            if field in section:
                content = kubeconfig.parent.joinpath(section.pop(field)).read_bytes()
                section[f"{field}-data"] = base64.b64encode(content).decode()
    path = folder / "through-proxy.kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


def _cluster(config: dict) -> dict:
    context = next(
        each["context"] for each in config["contexts"] if each["name"] == config["current-context"]
    )
    return next(each["cluster"] for each in config["clusters"] if each["name"] == context["cluster"])
