"""The sshd of a simulated container: a real SSH server, whose commands are local processes of the machine's.

It takes the key that the environment has in ``PUBLIC_KEY``, as RunPod's own images do, and has a host key of
its own making. ``/proc/1`` is the machine's: asked for by name, since no container is around the processes.
"""

import asyncio
import contextlib
import socket
from typing import Any, Final

from providers.simulation.engine import Engine
from providers.simulation.processes import CannotStart, Process, read
from providers.simulation.state import Machine

SSH_PORT: Final = 22
_ENVIRON, _CWD = "/proc/1/environ", "/proc/1/cwd"


class Servers:
    """Those of all machines of one cloud, each opened when its address is first asked for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open: dict[tuple[str, int], tuple[int, asyncio.Task[None]]] = {}

    def address(self, machine: Machine, *, key: str) -> dict[int, str]:
        """By port; a new one after each restart. {} where no key lets anybody in."""
        self._close_old()
        if machine.state != "running" or not key or self._engine.processes is None:
            return {}
        run = (machine.id, machine.restarts)
        if run not in self._open:
            sock = socket.create_server(("127.0.0.1", 0))  # whoever comes before the server is up waits
            sock.setblocking(False)
            task = asyncio.get_running_loop().create_task(self._serve(machine.id, sock, key))
            self._open[run] = (sock.getsockname()[1], task)
        return {SSH_PORT: f"127.0.0.1:{self._open[run][0]}"}

    def _close_old(self) -> None:
        for machine_id, restarts in list(self._open):
            machine = self._engine.machines[machine_id]
            if machine.state != "running" or machine.restarts != restarts:
                self._open.pop((machine_id, restarts))[1].cancel()

    async def _serve(self, machine_id: str, sock: socket.socket, key: str) -> None:
        import asyncssh

        engine = self._engine

        class Server(asyncssh.SSHServer):
            def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
                self._conn = conn

            def connection_requested(self, dest_host: str, dest_port: int, *_origin: Any) -> Any:
                assert engine.processes is not None
                local = engine.processes.port(machine_id, dest_port)
                return self._conn.forward_connection("127.0.0.1", local) if local else False

        async def serve(process: "asyncssh.SSHServerProcess[bytes]") -> None:
            process.exit(await self._run(machine_id, process))

        server = await asyncssh.listen(
            sock=sock,
            server_factory=Server,
            server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
            authorized_client_keys=asyncssh.import_authorized_keys(key),
            process_factory=serve,
            encoding=None,
            line_editor=False,
            allow_scp=False,
        )
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            server.close()

    async def _run(self, machine_id: str, client: Any) -> int:
        """One command; its code."""
        processes = self._engine.processes
        assert processes is not None
        command = client.command or "/bin/sh"
        if _ENVIRON in command:
            environ = processes.environment(machine_id)
            client.stdout.write(b"".join(f"{name}={value}\0".encode() for name, value in environ.items()))
            return 0
        argv = ["/bin/sh", "-c", command.replace(_CWD, ".")]
        try:
            inner = processes.start(machine_id, argv, stdin=True, terminal=bool(client.term_type))
        except CannotStart as error:
            client.stderr.write(f"{error}\n".encode())
            return 126
        copying = [asyncio.ensure_future(_copy(inner.stdout, client.stdout))]
        if inner.stderr >= 0:
            copying.append(asyncio.ensure_future(_copy(inner.stderr, client.stderr)))
        hearing = asyncio.ensure_future(_hear(client, inner))
        left = asyncio.ensure_future(client.wait_closed())
        try:
            watched: list[asyncio.Future[Any]] = [inner.ended, left]
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            if not inner.ended.done():
                return 255
            await asyncio.wait(copying, timeout=2)
            return inner.ended.result()
        finally:
            for task in (hearing, left, *copying):
                task.cancel()
            await asyncio.gather(hearing, left, *copying, return_exceptions=True)
            inner.close()


async def _copy(descriptor: int, writer: Any) -> None:
    with contextlib.suppress(OSError):
        while data := await read(descriptor):
            writer.write(data)
            await writer.drain()


async def _hear(client: Any, inner: Process) -> None:
    """What the client sends, the new sizes of its terminal among it."""
    import asyncssh

    with contextlib.suppress(OSError):
        while True:
            try:
                data = await client.stdin.read(65536)
            except asyncssh.TerminalSizeChanged as size:
                inner.resize(columns=size.width, rows=size.height)
                continue
            except (asyncssh.BreakReceived, asyncssh.SignalReceived):
                continue
            if not data:
                inner.close_input()
                return
            await inner.feed(data)
