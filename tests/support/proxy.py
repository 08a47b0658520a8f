"""A TCP forwarder between two parts, for tests: it can go silent, cut, delay, refuse, and swallow answers.

It stands before an API server, a Postgres (a Unix socket, too) or a webhook. ``silence`` is a half-open
network: what is connected stays so and hears nothing any more, and what connects anew is served.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Self

Target = tuple[str, int] | str
"""Host and port, or the path of a Unix socket."""


@dataclass(eq=False, slots=True)
class _Connection:
    """One forwarded connection. ``flowing`` is cleared for one that has gone silent."""

    task: "asyncio.Task[None]"
    flowing: asyncio.Event = field(default_factory=asyncio.Event)


class Proxy:
    """Forwards bytes to the first target that can be reached, beginning with another one each time.

    Everything else is a fault that a test switches on.
    """

    def __init__(self, *targets: Target) -> None:
        self._targets: Sequence[Target] = targets
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._stalled = self._refusing = False
        self._swallow = 0
        self.delay_s = 0.0  # added to everything that passes, each way
        self.swallowed = 0
        self.accepted = 0
        self.port = 0

    @classmethod
    @asynccontextmanager
    async def running(cls, *targets: Target) -> AsyncIterator[Self]:
        """One that listens on a loopback ``port`` until the block ends."""
        proxy = cls(*targets)
        proxy._server = await asyncio.start_server(proxy._accepted, "127.0.0.1", 0)
        proxy.port = proxy._server.sockets[0].getsockname()[1]
        try:
            yield proxy
        finally:
            proxy._server.close()
            await proxy.cut()

    def silence(self) -> int:
        """Every connection of this moment passes nothing on any more; how many there were."""
        for connection in self._connections:
            connection.flowing.clear()
        return len(self._connections)

    def stall(self) -> None:
        """Connections of now and of later stay open and pass nothing on, as where packets are dropped."""
        self._stalled = True
        self.silence()

    def flow(self) -> None:
        """End every fault."""
        self._refusing = self._stalled = False
        self._swallow, self.delay_s = 0, 0.0
        for connection in self._connections:
            connection.flowing.set()

    async def refuse(self) -> None:
        """Cut all connections and close new ones at once, as a server does that is down."""
        self._refusing = True
        await self.cut()

    async def cut(self) -> None:
        """Break every connection of this moment."""
        tasks = [connection.task for connection in self._connections]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def swallow_next_answer(self) -> None:
        """Let the next request through and break the connection when its answer comes. For TLS."""
        self._swallow += 1

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        connection = _Connection(task)
        if not self._stalled:
            connection.flowing.set()
        self._connections.add(connection)
        self.accepted += 1
        try:
            if not self._refusing:
                await self._forward(connection, reader, writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(connection)
            writer.transport.abort()

    async def _dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        first = self.accepted % len(self._targets)
        for target in (*self._targets[first:], *self._targets[:first]):
            with suppress(OSError):
                if isinstance(target, str):
                    return await asyncio.open_unix_connection(target)
                return await asyncio.open_connection(*target)
        raise ConnectionRefusedError(f"nobody listens at any of {self._targets}")

    async def _forward(
        self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        far_reader, far_writer = await self._dial()
        # The answers of a TLS handshake must pass: only what follows a later request is swallowed.
        state = {"armed": False}

        async def up() -> None:
            while data := await reader.read(65536):
                await self._pass(connection)
                if self._swallow and data[0] == 0x17:  # TLS application data
                    self._swallow -= 1
                    state["armed"] = True
                far_writer.write(data)
                await far_writer.drain()

        async def down() -> None:
            while data := await far_reader.read(65536):
                await self._pass(connection)
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

    async def _pass(self, connection: _Connection) -> None:
        await connection.flowing.wait()
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
