"""Commands and connections inside a container that is reached by an sshd of its own.

Such a server's host key is made at its start, so nobody can know it, and addresses change hands. It proves
itself by what only our container has: the environment of its first process carries the machine's identity,
which is asked for before anything of the user's is sent. A command then gets that environment and that
process's directory, as ``kubectl exec`` has it on any node.
"""

import asyncio
import logging
import shlex
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from app.machines.keys import private_key
from providers.base import Unavailable
from providers.capabilities import Pipe, Session, SshAddress

if TYPE_CHECKING:
    import asyncssh

CONNECT_S: Final = 15.0
# It tells every command at level info, and with it the environment.
logging.getLogger("asyncssh").setLevel(logging.WARNING)
_KEEPALIVE_S = 20
_PIECE_BYTES = 64 * 1024
_ENVIRON = "cat /proc/1/environ"
_SIGNAL = 128


async def run(
    address: SshAddress, *, secret: bytes, command: Sequence[str], stdin: bool, terminal: bool
) -> Session:
    """Start the command.

    Raises:
        Unavailable: there is no way in, or the server there is not our container's.
    """
    connection, environ = await _enter(address, secret=secret)
    try:
        process = await connection.create_process(
            _line(command, environ, terminal=terminal),
            encoding=None,
            term_type="xterm" if terminal else None,
            term_size=(80, 24) if terminal else None,
        )
        if not stdin:
            process.stdin.write_eof()
    except Exception as error:
        connection.abort()
        raise Unavailable(f"the command was not started: {_told(error)}") from error
    except asyncio.CancelledError:
        connection.abort()
        raise
    return _Command(connection, process, stdin=stdin)


async def dial(address: SshAddress, *, secret: bytes, port: int) -> Pipe:
    """A connection to a port of the container.

    Raises:
        Unavailable: there is no way in, or nobody listens there.
    """
    connection, _ = await _enter(address, secret=secret)
    try:
        reader, writer = await connection.open_connection("127.0.0.1", port)
    except Exception as error:
        connection.abort()
        raise Unavailable(f"port {port}: {_told(error)}") from error
    except asyncio.CancelledError:
        connection.abort()
        raise
    return _Forwarded(connection, reader, writer)


async def _enter(
    address: SshAddress, *, secret: bytes
) -> tuple["asyncssh.SSHClientConnection", Mapping[str, str]]:
    """A connection to the container of this identity, and the environment that it was started with."""
    import asyncssh  # costs a quarter of a second, and few need it

    where = f"{address.host}:{address.port}"
    if not secret:
        raise Unavailable("this installation has no keys for machines")
    try:
        async with asyncio.timeout(CONNECT_S):
            connection = await asyncssh.connect(
                address.host,
                address.port,
                username=address.user,
                client_keys=[asyncssh.import_private_key(private_key(secret, address.identity))],
                known_hosts=None,
                config=None,
                agent_path=None,
                preferred_auth="publickey",
                keepalive_interval=_KEEPALIVE_S,
            )
    except asyncssh.PermissionDenied as error:
        raise Unavailable(f"the sshd at {where} does not take our key") from error
    except TimeoutError as error:
        raise Unavailable(f"no sshd answers at {where}") from error
    except (OSError, asyncssh.Error) as error:
        raise Unavailable(f"no sshd answers at {where}: {_told(error)}") from error
    try:
        async with asyncio.timeout(CONNECT_S):
            shown = await connection.run(_ENVIRON, encoding=None, stdin=asyncssh.DEVNULL)
        environ = _environ(shown.stdout if isinstance(shown.stdout, bytes) else b"")
    except (TimeoutError, OSError, asyncssh.Error) as error:
        connection.abort()
        raise Unavailable(f"the container at {where} does not show its environment") from error
    except asyncio.CancelledError:
        connection.abort()
        raise
    if environ.get(address.variable) != address.identity:
        connection.abort()
        raise Unavailable(f"the sshd at {where} is not this Pod's, or may not read /proc/1/environ")
    return connection, environ


def _environ(raw: bytes) -> Mapping[str, str]:
    pairs = (each.partition(b"=") for each in raw.split(b"\0") if b"=" in each)
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, _, value in pairs}


def _line(command: Sequence[str], environ: Mapping[str, str], *, terminal: bool) -> str:
    """For the login shell of the server, whichever that is."""
    env = {"TERM": "xterm", **environ} if terminal else environ
    words = ["env", "-i", *(f"{name}={value}" for name, value in env.items()), *command]
    return f"cd -P /proc/1/cwd 2>/dev/null; exec {shlex.join(words)}"


def _told(error: BaseException) -> str:
    return str(error) or type(error).__name__


class _Command:
    """A command as a `Session`."""

    def __init__(
        self,
        connection: "asyncssh.SSHClientConnection",
        process: "asyncssh.SSHClientProcess[bytes]",
        *,
        stdin: bool,
    ) -> None:
        self._connection, self._process = connection, process
        self._open = stdin

    @property
    def stdout(self) -> AsyncIterator[bytes]:
        return _pieces(self._process.stdout)

    @property
    def stderr(self) -> AsyncIterator[bytes]:
        return _pieces(self._process.stderr)

    async def write(self, data: bytes) -> None:
        if self._open:
            with suppress(OSError):  # a command that reads no more may go on
                self._process.stdin.write(data)
                await self._process.stdin.drain()

    async def end_input(self) -> None:
        if self._open:
            self._open = False
            with suppress(OSError):
                self._process.stdin.write_eof()

    async def resize(self, *, columns: int, rows: int) -> bool:
        with suppress(OSError):
            self._process.change_terminal_size(columns, rows)
        return True

    async def wait(self) -> int:
        await self._process.wait_closed()
        if self._process.exit_signal is not None:
            return _SIGNAL + _number(self._process.exit_signal[0])
        if self._process.exit_status is None:
            raise Unavailable("the connection broke")
        return self._process.exit_status

    async def aclose(self) -> None:
        await _let_go(self._connection, self._process.close)


class _Forwarded:
    """A connection through the server as a `Pipe`."""

    def __init__(self, connection: "asyncssh.SSHClientConnection", reader: Any, writer: Any) -> None:
        self._connection, self._reader, self._writer = connection, reader, writer

    async def read(self) -> bytes:
        try:
            data: bytes = await self._reader.read(_PIECE_BYTES)
        except OSError as error:
            raise Unavailable("the connection broke") from error
        return data

    async def write(self, data: bytes) -> None:
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError as error:
            raise Unavailable("the connection broke") from error

    async def end_output(self) -> None:
        with suppress(OSError):
            self._writer.write_eof()

    async def aclose(self) -> None:
        await _let_go(self._connection, self._writer.close)


async def _let_go(connection: "asyncssh.SSHClientConnection", close: Any) -> None:
    with suppress(Exception):
        close()
        connection.close()
        async with asyncio.timeout(1):
            await connection.wait_closed()
        return
    connection.abort()


async def _pieces(reader: "asyncssh.SSHReader[bytes]") -> AsyncIterator[bytes]:
    with suppress(OSError):
        while data := await reader.read(_PIECE_BYTES):
            yield data


def _number(name: str) -> int:
    with suppress(ValueError):
        return int(signal.Signals[f"SIG{name}"])
    return int(signal.SIGKILL)
