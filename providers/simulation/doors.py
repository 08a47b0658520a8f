"""The ports of simulated workloads: tiny HTTP servers on the loopback interface, so that they can be probed.

A machine that runs has one door for each port of its order, if the scenario says so. Until the workload is
ready, or while it is told to be closed, connections are refused; then every request is answered with the
status of the moment. The addresses are new after a restart of the simulator, as a real cloud's may be.
Requests are remembered in memory alone: their headers may hold a credential.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from providers.simulation.clock import micros
from providers.simulation.scenario import Serve
from providers.simulation.state import Machine

_HOST = "127.0.0.1"
_HEAD_BYTES_MAX = 64 * 1024


@dataclass(slots=True)
class _Health:
    """How the workload of one machine answers. ``status`` 0: it accepts, and never answers."""

    status: int
    open: bool = True
    location: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class _Door:
    number: int
    """The port on the loopback interface; it stays the same while the machine runs."""
    sock: socket.socket
    server: asyncio.Server | None = None
    listening: bool = False


class Doors:
    """All doors of one cloud. ``serve`` None: no workload serves anything."""

    def __init__(self, serve: Serve | None, *, now: Callable[[], int], scale: float) -> None:
        self._serve, self._now, self._scale = serve, now, scale
        self._doors: dict[str, dict[int, _Door]] = {}
        self._health: dict[str, _Health] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def addresses(self, machine: Machine) -> dict[int, str]:
        """Where each port of a running machine is reached; {} where nothing is served."""
        self.follow(machine)
        return {port: f"{_HOST}:{door.number}" for port, door in self._doors.get(machine.id, {}).items()}

    def follow(self, machine: Machine) -> None:
        """Open the doors of a machine that runs, close those of one that does not."""
        if self._serve is None or not machine.ports:
            return
        if machine.state != "running":
            self._shut(machine.id)
        elif machine.id not in self._doors:
            self._doors[machine.id] = {port: _Door(*_reserved(0)) for port in machine.ports}
            self._health.setdefault(machine.id, _Health(status=self._serve.status))
            since = machine.last("running") or 0
            wait_s = (since + micros(self._serve.ready_after_s) - self._now()) / micros(1) / self._scale
            if wait_s <= 0:
                self._apply(machine.id)
            else:
                loop = asyncio.get_running_loop()
                self._timers[machine.id] = loop.call_later(wait_s, self._ready, machine.id)

    def set_health(self, machine_id: str, *, status: int | None, open_: bool | None, location: str) -> None:
        """How the workload answers from now on; it keeps that over a restart on the same machine."""
        health = self._health.setdefault(
            machine_id, _Health(status=self._serve.status if self._serve else 200)
        )
        health.status = health.status if status is None else status
        health.open = health.open if open_ is None else open_
        health.location = location
        if machine_id not in self._timers:
            self._apply(machine_id)

    def requests(self, machine_id: str) -> list[dict[str, Any]]:
        """Every request that a machine's workload was asked: port, path and headers."""
        health = self._health.get(machine_id)
        return list(health.requests) if health else []

    def close(self) -> None:
        for machine_id in list(self._doors):
            self._shut(machine_id)

    def _ready(self, machine_id: str) -> None:
        self._timers.pop(machine_id, None)
        self._apply(machine_id)

    def _apply(self, machine_id: str) -> None:
        """Listen, or do not, as the workload's health says."""
        health = self._health[machine_id]
        for port, door in self._doors.get(machine_id, {}).items():
            if health.open and not door.listening:
                door.sock.listen(128)
                door.listening = True
                task = asyncio.get_running_loop().create_task(self._accept(machine_id, port, door))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            elif not health.open and door.listening:
                _stop(door)
                _, door.sock = _reserved(door.number)
                door.listening = False

    async def _accept(self, machine_id: str, port: int, door: _Door) -> None:
        health, sock = self._health[machine_id], door.sock

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                head = await reader.readuntil(b"\r\n\r\n")
                await self._answer(health, port, head.decode("latin-1"), writer)
            writer.close()

        server = await asyncio.start_server(answer, sock=sock, limit=_HEAD_BYTES_MAX)
        if door.sock is sock and door.listening:
            door.server = server
        else:
            server.close()  # it was shut meanwhile

    async def _answer(self, health: _Health, port: int, head: str, writer: asyncio.StreamWriter) -> None:
        first, *lines = head.split("\r\n")
        words = first.split(" ")
        headers = dict(line.split(": ", 1) for line in lines if ": " in line)
        health.requests.append({"port": port, "path": words[1] if len(words) > 1 else "", "headers": headers})
        if not health.status:
            await writer.wait_closed()  # until the caller has had enough
            return
        location = f"Location: {health.location}\r\n" if health.location else ""
        text = f"HTTP/1.1 {health.status} said\r\n{location}Content-Length: 0\r\nConnection: close\r\n\r\n"
        writer.write(text.encode("latin-1"))
        await writer.drain()

    def _shut(self, machine_id: str) -> None:
        if (timer := self._timers.pop(machine_id, None)) is not None:
            timer.cancel()
        for door in self._doors.pop(machine_id, {}).values():
            _stop(door)


def _stop(door: _Door) -> None:
    if door.server is not None:
        door.server.close()
        door.server = None
    door.sock.close()


def _reserved(number: int) -> tuple[int, socket.socket]:
    """A port that is ours and refuses connections: bound, and not listened on."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((_HOST, number))
    sock.setblocking(False)
    return sock.getsockname()[1], sock
