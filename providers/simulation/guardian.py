"""The parent of all local processes of one simulator: a program of its own, run as a script.

It is small and has one thread, so that it may fork at once; it adopts what its children leave behind (a
subreaper), so that nothing hides from it; and when the simulator goes, however it goes, it ends everything
below it, removes their folder and goes, too. Should the guardian itself be killed, the kernel ends its direct
children. Linux only.

Arguments: the number of a seqpacket socket, the folder, uid and gid of the processes (-1: ours). A packet is
a JSON object. Asked: ``start`` (with three descriptors: stdin, stdout, stderr), ``signal``, ``sweep``. Told:
``ended`` with the exit code, 128 plus the number for a signal.
"""

import array
import contextlib
import ctypes
import errno
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import sys
import termios
import time
from pathlib import Path
from typing import Any, NoReturn

PACKET_BYTES = 512 * 1024
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SWEEP_TRIES = 200
_BLOCKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Guardian:
    def __init__(self, control: socket.socket, folder: Path, *, uid: int, gid: int) -> None:
        self._control, self._folder, self._uid, self._gid = control, folder, uid, gid
        self._libc = ctypes.CDLL(None)
        self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._pids: dict[int, int] = {}  # by id
        self._ids: dict[int, int] = {}  # by pid

    def run(self) -> None:
        """Serve until the simulator's end of the socket is closed."""
        wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # The socket says when it is over. Blocked and not ignored: a child that is asked to end before it has
        # become its program must hear of it afterwards.
        signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(wake, select.POLLIN)
        try:
            while True:
                for number, _ in poll.poll():
                    if number == wake:
                        with contextlib.suppress(BlockingIOError):
                            while os.read(wake, 4096):
                                pass
                    elif not self._serve():
                        return
                self._reap()
        finally:
            self._end_all()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _serve(self) -> bool:
        """One packet; False when there is nobody any more."""
        descriptors = array.array("i")
        try:
            data, extra, _, _ = self._control.recvmsg(
                PACKET_BYTES, socket.CMSG_SPACE(3 * descriptors.itemsize)
            )
        except ConnectionError:
            return False
        if not data:
            return False
        for level, kind, content in extra:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
        asked = json.loads(data)
        match asked["do"]:
            case "start":
                self._start(asked, list(descriptors))
            case "signal":
                pid = self._pids.get(asked["id"])
                if pid is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, asked["signal"])
            case "sweep":
                self._sweep(asked["mark"])
        return True

    def _start(self, asked: dict[str, Any], descriptors: list[int]) -> None:
        pid = os.fork()
        if pid == 0:
            self._become(asked, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        self._pids[asked["id"]], self._ids[pid] = pid, asked["id"]

    def _become(self, asked: dict[str, Any], descriptors: list[int]) -> NoReturn:
        code = 126
        try:
            signal.set_wakeup_fd(-1)
            os.setsid()
            for target, descriptor in enumerate(descriptors):
                os.dup2(descriptor, target + 20)
            for target in range(3):
                os.dup2(target + 20, target)
            os.closerange(3, 1024)
            if asked["terminal"]:
                fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            os.chdir(asked["folder"])
            if self._uid >= 0:
                os.setgroups([])
                os.setgid(self._gid)
                os.setuid(self._uid)
            self._libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)  # setuid clears it
            for number in (*_BLOCKED, signal.SIGCHLD, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)
            argv = asked["argv"]
            try:
                os.execvpe(argv[0], argv, asked["env"])
            except OSError as error:
                missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
                code = 127 if missing else 126
                os.write(2, f"exec: {argv[0]}: {os.strerror(error.errno or 0)}\n".encode())
        finally:
            os._exit(code)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            number = self._ids.pop(pid, None)
            if number is not None:
                del self._pids[number]
                code = os.waitstatus_to_exitcode(status)
                told = {"ended": number, "code": code if code >= 0 else 128 - code}
                with contextlib.suppress(OSError):
                    self._control.send(json.dumps(told).encode())

    def _sweep(self, mark: str) -> None:
        """End every process whose environment holds ``mark``, whatever session it has made itself."""
        wanted = mark.encode()
        for _ in range(_SWEEP_TRIES):
            found = False
            for pid in _processes():
                with contextlib.suppress(OSError):
                    if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                        os.kill(pid, signal.SIGKILL)
                        found = True
            self._reap()
            if not found:
                return
            time.sleep(0.005)

    def _end_all(self) -> None:
        for _ in range(_SWEEP_TRIES):
            below = _below(os.getpid())
            for pid in below:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._reap()
            if not below:
                return
            time.sleep(0.005)


def _processes() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdecimal()]


def _below(root: int) -> list[int]:
    """Every process that descends from ``root``."""
    parents: dict[int, int] = {}
    for pid in _processes():
        with contextlib.suppress(OSError, IndexError, ValueError):
            # The name, in parentheses, may hold anything: what follows the last one is fixed.
            parents[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    found: list[int] = []
    for pid in parents:
        above = parents.get(pid)
        while above is not None and above != root:
            above = parents.get(above)
        if above == root:
            found.append(pid)
    return found


if __name__ == "__main__":
    Guardian(
        socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]), uid=int(sys.argv[3]), gid=int(sys.argv[4])
    ).run()
