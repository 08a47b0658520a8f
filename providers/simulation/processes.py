"""Machines that really run something: each one's command as an unprivileged local process, with its output.

An opt-in of the scenario (``processes``), for demos and tests: whoever may order a machine may run a command
here. Every machine has a folder of its own, its output on disk, a local port for each port that it declares
(``FAKE_PORT_<port>``; ``PORT`` is the first), and no image: the command is looked up on this computer. As
root, the processes run as another account. They end with the machine, and with the simulator, however that
ends: `guardian` is the parent of all of them. Linux only.

Output is kept in one file for each run of a machine, in records of time, stream, length and bytes.
"""

import array
import asyncio
import contextlib
import fcntl
import json
import os
import pwd
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from providers.simulation.clock import Clock
from providers.simulation.orders import Order
from providers.simulation.scenario import ProcessesPart
from providers.simulation.state import Machine, StateError

CHUNK_BYTES = 64 * 1024
RECORD = struct.Struct(">QBI")  # microseconds of the cloud's clock, 1 stdout or 2 stderr, length
_MARK = "FAKE_MACHINE"
# What a machine's processes are found by: another cloud on this computer has machines of the same id.
_PLACE = "FAKE_MACHINE_FOLDER"
_PACKET_BYTES = 512 * 1024
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TERMINAL = (80, 24)
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # ours may name folders of ours alone


class CannotStart(Exception):
    """Nothing was started; the message says why."""


class Process:
    """One local process with its streams. Its whole session ends with `kill`."""

    def __init__(self, number: int, *, terminal: bool, ask: Callable[[dict[str, Any]], None]) -> None:
        self.number, self.terminal = number, terminal
        self._ask = ask
        self.stdin = self.stdout = self.stderr = -1
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._turn = asyncio.Lock()
        self._room: asyncio.Future[None] | None = None

    def signal(self, number: int) -> None:
        if not self.ended.done():
            self._ask({"do": "signal", "id": self.number, "signal": number})

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def resize(self, *, columns: int, rows: int) -> None:
        if self.terminal and self.stdout >= 0 and columns > 0 and rows > 0:
            fcntl.ioctl(self.stdout, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    async def feed(self, data: bytes) -> None:
        """All of it to its input, after whoever came before; nothing where there is none, or none any more.

        Raises:
            OSError: nobody reads any more.
        """
        async with self._turn:
            view = memoryview(data)
            while view and self.stdin >= 0:
                try:
                    view = view[os.write(self.stdin, view) :]
                except BlockingIOError:
                    loop = asyncio.get_running_loop()
                    self._room = loop.create_future()
                    loop.add_writer(self.stdin, _settle, self._room)
                    try:
                        await self._room
                    finally:
                        if self.stdin >= 0:  # else its number may be another's by now
                            loop.remove_writer(self.stdin)

    def close_input(self) -> None:
        """End of file for a pipe; for a terminal the character that says so."""
        if self.stdin < 0:
            return
        if self.terminal:
            with contextlib.suppress(OSError):
                os.write(self.stdin, b"\x04")
            return
        asyncio.get_running_loop().remove_writer(self.stdin)
        os.close(self.stdin)
        self.stdin = -1
        self._wake()

    def close(self) -> None:
        """End it, and give the descriptors back."""
        self.kill()
        loop = asyncio.get_running_loop()
        for descriptor in {self.stdin, self.stdout, self.stderr} - {-1}:
            loop.remove_reader(descriptor)
            loop.remove_writer(descriptor)
            os.close(descriptor)
        self.stdin = self.stdout = self.stderr = -1
        self._wake()

    def _wake(self) -> None:
        if self._room is not None:
            _settle(self._room)


@dataclass(slots=True)
class _Run:
    """One run of a machine's workload."""

    process: Process
    output: Path
    size: int = 0
    over: bool = False
    grown: asyncio.Event = field(default_factory=asyncio.Event)

    def wake(self) -> None:
        grown, self.grown = self.grown, asyncio.Event()
        grown.set()


@dataclass(slots=True)
class _Place:
    """What a machine is on this computer."""

    folder: Path
    argv: tuple[str, ...]
    env: dict[str, str]
    ports: dict[int, int]
    stdin: bool
    stdin_once: bool
    terminal: bool
    runs: list[_Run] = field(default_factory=list)
    extra: set[Process] = field(default_factory=set)
    cpu_s: float = 0.0  # the most that was ever measured: a counter does not fall when a child ends
    run: int = 0


@dataclass(frozen=True, slots=True)
class Joined:
    """The workload's process. ``takes``: it gets the input; ``ends``: and the end of it."""

    process: Process
    takes: bool
    ends: bool


class Processes:
    """All local processes of one cloud. ``ended`` is told a machine's id, its run and the exit code."""

    def __init__(
        self, facts: ProcessesPart, *, clock: Callable[[], Clock], ended: Callable[[str, int], None]
    ) -> None:
        """Raises:
        StateError: this system or account cannot keep them apart from ours.
        """
        if sys.platform != "linux":
            raise StateError("processes: only on Linux")
        self._uid = self._gid = -1
        if os.geteuid() == 0:
            try:
                account = pwd.getpwnam(facts.user)
            except KeyError:
                raise StateError(f"processes.user: there is no account {facts.user!r}") from None
            self._uid, self._gid = account.pw_uid, account.pw_gid
        self._facts, self._clock, self._ended = facts, clock, ended
        self._places: dict[str, _Place] = {}
        self._started: dict[int, Process] = {}
        self._number = 0
        self._control: socket.socket | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # --- what the engine tells ------------------------------------------------------------------------

    def prepare(self, machine: Machine, order: Order) -> None:
        """A machine was ordered. Its environment is kept in memory alone."""
        self._guard()
        assert self._folder is not None
        folder = self._folder / machine.id
        folder.mkdir(mode=0o700)
        ports = {port: _free_port() for port in machine.ports}
        own = {
            "PATH": _PATH,
            "HOME": str(folder),
            "TMPDIR": str(folder),
            "TERM": "xterm",
            "HOSTNAME": machine.id,
            **({"PORT": str(next(iter(ports.values())))} if ports else {}),
            **{f"FAKE_PORT_{port}": str(local) for port, local in ports.items()},
        }
        if self._uid >= 0:
            os.chown(folder, self._uid, self._gid)
        self._places[machine.id] = _Place(
            folder=folder,
            argv=(*order.command, *order.args) or ("sleep", "infinity"),
            env={**own, **order.values, _MARK: machine.id, _PLACE: str(folder)},
            ports=ports,
            stdin=order.stdin,
            stdin_once=order.stdin_once,
            terminal=order.terminal,
        )

    def follow(self, machine: Machine) -> None:
        """Start the workload of a machine that runs now, and end all that one has which does not."""
        place = self._places.get(machine.id)
        if place is None:
            return
        if machine.state == "running":
            self._run(machine.id, place)
            return
        for run in place.runs[-1:]:
            run.process.kill()
        for process in list(place.extra):
            process.kill()
        if place.runs:
            self._tell({"do": "sweep", "mark": f"{_PLACE}={place.folder}"})
        if machine.state == "gone":
            del self._places[machine.id]
            shutil.rmtree(place.folder, ignore_errors=True)

    def known(self, machine_id: str) -> bool:
        return machine_id in self._places

    def runs_of(self, machine_id: str) -> int:
        """How many runs of a machine there is output of; 0 before the first."""
        place = self._places.get(machine_id)
        return len(place.runs) if place is not None else 0

    def ask_to_end(self, machine_id: str) -> None:
        """SIGTERM to the workload."""
        if (run := self._last(machine_id)) is not None:
            run.process.signal(signal.SIGTERM)

    def addresses(self, machine_id: str) -> dict[int, str]:
        """Where each declared port is reached."""
        place = self._places.get(machine_id)
        return {port: f"127.0.0.1:{local}" for port, local in place.ports.items()} if place else {}

    def close(self) -> None:
        """End everything, and wait until it is gone."""
        if self._control is None:
            return
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop().remove_reader(self._control)
        self._control.close()
        self._control = None
        assert self._child is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout=10)
        self._places.clear()

    # --- what clients ask -----------------------------------------------------------------------------

    def start(self, machine_id: str, command: Sequence[str], *, stdin: bool, terminal: bool) -> Process:
        """A further process beside the workload.

        Raises:
            CannotStart: the machine runs nothing, or the computer refused.
        """
        place, run = self._places.get(machine_id), self._last(machine_id)
        if place is None or run is None or run.over:
            raise CannotStart("the machine runs nothing")
        process = self._spawn(place, command, stdin=stdin, terminal=terminal)
        place.extra.add(process)
        process.ended.add_done_callback(lambda _: place.extra.discard(process))
        return process

    def joined(self, machine_id: str, *, stdin: bool) -> "Joined | None":
        """What somebody who attaches gets, with input or without; None before the first run."""
        place, run = self._places.get(machine_id), self._last(machine_id)
        if place is None or run is None:
            return None
        takes = stdin and place.stdin
        return Joined(run.process, takes, takes and place.stdin_once and not place.terminal)

    async def output(
        self, machine_id: str, *, follow: bool, run_back: int = 0, from_end: bool = False
    ) -> AsyncIterator[tuple[int, int, bytes]]:
        """Records of a run (``run_back`` 1: the one before the last): time, stream, bytes."""
        place = self._places.get(machine_id)
        if place is None or len(place.runs) <= run_back:
            return
        run = place.runs[-1 - run_back]
        with run.output.open("rb") as file:
            at = run.size if from_end else 0
            file.seek(at)
            while True:
                grown, size, over = run.grown, run.size, run.over
                while at < size:
                    stamp, stream, length = RECORD.unpack(file.read(RECORD.size))
                    data = file.read(length)
                    at += RECORD.size + length
                    yield stamp, stream, data
                if over or (not follow and at >= run.size):
                    return
                if at >= run.size:
                    await grown.wait()

    def usage(self, machine_id: str) -> dict[str, float | int] | None:
        """Core-seconds since the workload began, and resident bytes, of all processes; None without any."""
        place, run = self._places.get(machine_id), self._last(machine_id)
        if place is None or run is None or run.over:
            return None
        mark = f"{_PLACE}={place.folder}".encode()
        cpu_s, memory = 0.0, 0
        for entry in os.listdir("/proc"):
            if not entry.isdecimal():
                continue
            with contextlib.suppress(OSError, IndexError, ValueError):
                if mark not in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    continue
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                cpu_s += sum(int(ticks) for ticks in fields[11:15]) / _TICKS_PER_S
                memory += int(fields[21]) * _PAGE_BYTES
        place.cpu_s = max(place.cpu_s, cpu_s)
        return {"cpu_s": place.cpu_s, "memory_bytes": memory}

    def environment(self, machine_id: str) -> dict[str, str]:
        """What a machine's processes are started with; {} where there are none."""
        place = self._places.get(machine_id)
        return dict(place.env) if place is not None else {}

    def port(self, machine_id: str, port: int) -> int | None:
        place = self._places.get(machine_id)
        return place.ports.get(port) if place is not None else None

    # --- inside ---------------------------------------------------------------------------------------

    def _last(self, machine_id: str) -> _Run | None:
        place = self._places.get(machine_id)
        return place.runs[-1] if place is not None and place.runs else None

    def _run(self, machine_id: str, place: _Place) -> None:
        place.run += 1
        output = place.folder.parent / f"{machine_id}.{place.run}.out"
        output.touch(mode=0o600)
        process = self._spawn(place, place.argv, stdin=place.stdin, terminal=place.terminal)
        run = _Run(process=process, output=output)
        place.runs.append(run)
        for old in place.runs[:-2]:
            old.output.unlink(missing_ok=True)
        del place.runs[:-2]
        place.cpu_s = 0.0
        task = asyncio.get_running_loop().create_task(
            self._keep(machine_id, run), name=f"output {machine_id}"
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep(self, machine_id: str, run: _Run) -> None:
        """Write down what a run says until it is over, then tell of its end."""
        process = run.process
        with run.output.open("ab", buffering=0) as file:

            async def copy(descriptor: int, stream: int) -> None:
                while data := await read(descriptor):
                    if run.size < self._facts.output_bytes:
                        file.write(RECORD.pack(self._clock().now(), stream, len(data)) + data)
                        run.size += RECORD.size + len(data)
                        run.wake()

            copying = [asyncio.ensure_future(copy(process.stdout, 1))]
            if process.stderr >= 0:
                copying.append(asyncio.ensure_future(copy(process.stderr, 2)))
            code = await process.ended
            # A background child may hold the pipes for ever; what the workload itself has said is there now.
            _, late = await asyncio.wait(copying, timeout=0.5)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        process.close()
        run.over = True
        run.wake()
        if self._last(machine_id) is run:
            self._ended(machine_id, code)

    def _spawn(self, place: _Place, command: Sequence[str], *, stdin: bool, terminal: bool) -> Process:
        self._guard()
        self._number += 1
        process = Process(self._number, terminal=terminal, ask=self._tell)
        ours: list[int] = []
        theirs: list[int] = []
        if terminal:
            main, other = os.openpty()
            columns, rows = _TERMINAL
            fcntl.ioctl(main, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            process.stdin, process.stdout, ours = os.dup(main), main, [main]
            theirs = [other, os.dup(other), os.dup(other)]
            ours.append(process.stdin)
        else:
            if stdin:
                read_end, process.stdin = os.pipe()
                ours.append(process.stdin)
            else:
                read_end = os.open(os.devnull, os.O_RDONLY)
            (process.stdout, out), (process.stderr, err) = os.pipe(), os.pipe()
            ours += [process.stdout, process.stderr]
            theirs = [read_end, out, err]
        for descriptor in ours:
            os.set_blocking(descriptor, False)
        asked = {
            "do": "start",
            "id": process.number,
            "argv": list(command),
            "env": place.env,
            "folder": str(place.folder),
            "terminal": terminal,
        }
        try:
            self._tell(asked, theirs)
        except OSError as error:
            for descriptor in ours:
                os.close(descriptor)
            raise CannotStart(f"{command[0]}: {error}") from error
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        self._started[process.number] = process
        return process

    def _guard(self) -> None:
        """Start the guardian, once."""
        if self._control is not None:
            return
        # Not below the state: another account must be able to reach it, whatever the modes above.
        self._folder = Path(tempfile.mkdtemp(prefix="nebula-processes-"))
        self._folder.chmod(0o711)
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _PACKET_BYTES)
        script = Path(__file__).with_name("guardian.py")
        argv = [sys.executable, "-I", "-S", str(script), str(other.fileno()), str(self._folder)]
        self._child = subprocess.Popen(
            [*argv, str(self._uid), str(self._gid)],
            pass_fds=[other.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        other.close()
        asyncio.get_running_loop().add_reader(self._control, self._hear)

    def _tell(self, asked: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        if self._control is None:
            return
        sent = array.array("i", descriptors)
        extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, sent)] if descriptors else []
        self._control.sendmsg([json.dumps(asked).encode()], extra)

    def _hear(self) -> None:
        assert self._control is not None
        try:
            data = self._control.recv(_PACKET_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:  # the guardian is dead, and all its children with it
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None
            for process in list(self._started.values()):
                if not process.ended.done():
                    process.ended.set_result(137)
            self._started.clear()
            return
        told = json.loads(data)
        process = self._started.pop(int(told["ended"]))
        if not process.ended.done():
            process.ended.set_result(told["code"])


async def read(descriptor: int) -> bytes:
    """What is there, as soon as something is; empty at the end, also of a terminal that was left."""
    while True:
        try:
            return os.read(descriptor, CHUNK_BYTES)
        except BlockingIOError:
            await _readable(descriptor)
        except OSError:
            return b""


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(descriptor, _settle, ready)
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)


def _settle(ready: "asyncio.Future[None]") -> None:
    if not ready.done():
        ready.set_result(None)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
