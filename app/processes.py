"""Child processes that never outlive us: servers for tests, the demo and ``nebula run --dev``.

However this process ends, SIGKILL included, the kernel ends the children (``PR_SET_PDEATHSIG``, Linux only;
elsewhere only an orderly exit ends them). That signal is tied to the *thread* that forked, so one thread,
which lives as long as the process, starts all of them. Each child leads a session of its own: a Ctrl-C at the
terminal reaches us alone, and we end the children in the order that they need.

Durations are seconds, sizes bytes. Nothing here knows what it starts.
"""

import contextlib
import fcntl
import os
import pwd
import queue
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

# Runs in a fresh interpreter that becomes the child: code between fork and exec of a threaded process can
# deadlock. The user changes before the signal is asked for, because changing it clears the request.
_TETHER = """\
import ctypes, os, signal, sys
parent, death, uid, gid = map(int, sys.argv[1:5])
libc = ctypes.CDLL(None)
if uid >= 0:
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)
if sys.platform == "linux" and libc.prctl(1, death, 0, 0, 0) != 0:
    sys.exit("prctl(PR_SET_PDEATHSIG) was refused")
if os.getppid() != parent:
    sys.exit("the parent died first")
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
try:
    os.execv(sys.argv[5], sys.argv[5:])
except OSError as error:
    print(f"{sys.argv[5]}: {error.strerror}", file=sys.stderr)
    sys.exit(126)
"""

_SWEEP_AFTER_S = 3600  # a folder without a lock file may belong to somebody who is just making it


@dataclass(frozen=True, slots=True)
class Account:
    """An existing account of the operating system, by name and ids."""

    name: str
    uid: int
    gid: int


def unprivileged_account(*names: str) -> Account:
    """Return the first of the named accounts that exists, else ``nobody``.

    Raises:
        LookupError: the machine has none of them.
    """
    for name in (*names, "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return Account(entry.pw_name, entry.pw_uid, entry.pw_gid)
    raise LookupError(f"none of the accounts {', '.join((*names, 'nobody'))} exists")


def spawn(
    argv: Sequence[str | os.PathLike[str]],
    *,
    log: Path,
    account: Account | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    death_signal: signal.Signals = signal.SIGKILL,
) -> subprocess.Popen[bytes]:
    """Start ``argv`` (an absolute path first), tied to the life of this process, outputs appended to ``log``.

    The log is opened by us, so the account need not be able to write it. A program that cannot be executed
    shows as exit code 126 with the reason in the log.
    """
    uid, gid = (account.uid, account.gid) if account else (-1, -1)
    tether = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        _TETHER,
        str(os.getpid()),
        str(int(death_signal)),
        str(uid),
        str(gid),
    ]

    def start() -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            return subprocess.Popen(
                [*tether, *(os.fspath(word) for word in argv)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(env) if env is not None else None,
                cwd=cwd,
                start_new_session=True,
            )

    return _spawner().call(start)


def stop(process: subprocess.Popen[bytes], *, grace_s: float, ask: signal.Signals = signal.SIGTERM) -> None:
    """End one child and wait until it is gone: ``ask`` first, SIGKILL after ``grace_s``."""
    if process.poll() is None:
        process.send_signal(ask)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=grace_s)
            return
        process.kill()
    process.wait()


def tail(log: Path, *, lines: int = 20) -> str:
    """Return the last lines of a log, for an error message; empty if there is none."""
    with contextlib.suppress(OSError):
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    return ""


def free_ports(count: int) -> list[int]:
    """Return distinct TCP ports that nobody listens on at 127.0.0.1.

    They lie below the range from which the kernel takes the ports of outgoing connections, so that a server
    can be stopped and started again at the same port. Somebody may still take one before it is used: the
    caller tries again.
    """
    low, high = 20_000, _first_ephemeral_port()
    if high - low < 1_000:
        low, high = 10_000, 65_000
    found: list[int] = []
    for port in random.sample(range(low, high), k=min(1_000, high - low)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"no {count} free ports between {low} and {high}")


class Scratch:
    """A private folder for one run, in memory where there is room, removed by ``close``.

    Its owner holds a lock on it. What a killed owner left behind is removed by the next one that makes a
    folder of the same kind, so that no memory leaks into ``/dev/shm``.
    """

    def __init__(self, kind: str, *, need_bytes: int, in_memory: bool = True) -> None:
        """Make it, in the temporary folder if memory has less than ``need_bytes`` free.

        ``in_memory=False`` is for programs: a memory file system is often mounted without the right to
        execute. ``kind`` becomes part of the folder's name.
        """
        prefix = f"nebula-{kind}-"
        parents = [Path(tempfile.gettempdir())]
        memory = Path("/dev/shm")
        if memory.is_dir() and os.access(memory, os.W_OK):
            parents.append(memory)
            if in_memory and shutil.disk_usage(memory).free >= need_bytes:
                parents.reverse()
        for parent in parents:
            _sweep(parent, prefix)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parents[0]))
            self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if (self.path / ".lock").exists():
                return
            os.close(self._lock)  # a sweep came between open and lock; next try

    def close(self) -> None:
        """Remove the folder with all that is in it. May be called again."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def lock_file(path: Path) -> int | None:
    """Lock a file (made if absent) and write our pid into it; None if another process holds it.

    The caller closes the returned descriptor to give the lock back; the end of the process does so too.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    os.ftruncate(handle, 0)
    os.write(handle, str(os.getpid()).encode())
    return handle


class _Spawner:
    """The one thread that forks: a daemon, so that it lives until the exit handlers have run."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._calls: queue.SimpleQueue[
            tuple[Callable[[], subprocess.Popen[bytes]], Future[subprocess.Popen[bytes]]]
        ] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="spawner", daemon=True).start()

    def call(self, start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        future: Future[subprocess.Popen[bytes]] = Future()
        self._calls.put((start, future))
        try:
            return future.result()
        except BaseException:  # Ctrl-C while we wait: nobody will know of the child, so it must go
            future.add_done_callback(_kill_started)
            raise

    def _run(self) -> None:
        while True:
            start, future = self._calls.get()
            try:
                future.set_result(start())
            except BaseException as error:
                future.set_exception(error)


_lock = threading.Lock()
_current: _Spawner | None = None


def _spawner() -> _Spawner:
    global _current
    with _lock:
        if _current is None or _current.pid != os.getpid():  # a forked copy of us has no threads of its own
            _current = _Spawner()
        return _current


def _kill_started(future: "Future[subprocess.Popen[bytes]]") -> None:
    if future.exception() is None:
        future.result().kill()
        future.result().wait()


def _first_ephemeral_port() -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    return 32_768


def _sweep(parent: Path, prefix: str) -> None:
    """Remove folders of our kind and user whose owner is dead."""
    for folder in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            about = folder.lstat()
            if about.st_uid != os.getuid() or not folder.is_dir():
                continue
            try:
                handle = os.open(folder / ".lock", os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                if time.time() - about.st_mtime > _SWEEP_AFTER_S:
                    shutil.rmtree(folder, ignore_errors=True)
                continue
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)
