"""What a simulated cloud remembers, and the journal that keeps it.

The journal is one append-only file of JSON lines. `Journal.commit` returns when everything appended so far is
on disk; callers of one moment share one write and one fsync. A torn last line is what a killed process had
not promised to anybody yet, and is dropped. Each start rewrites the file with only what still counts.
"""

import asyncio
import fcntl
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson


class StateError(ValueError):
    """The state folder cannot be used: another simulator has it, or the journal is damaged."""


@dataclass(slots=True, kw_only=True)
class Machine:
    """One machine that was ever ordered. Times are microseconds; ``history`` is (state, since), oldest first.

    States: queued, booting, running, exited, ending (terminate accepted, still there), gone. ``rates`` is
    (since, meters), a meter being (kind, quantity, dollars or None) as exact text. ``phantom``: the order
    was accepted and never became a machine. ``due`` is what happens by itself: event -> time.
    """

    id: str
    number: int
    name: str | None
    token: str | None
    account: str
    region: str
    tier: str
    accelerator: str | None
    count: int
    shape: str
    state: str
    created_at: int
    host: str | None = None
    image: str = ""
    command: list[str] = field(default_factory=list)
    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    ports: list[int] = field(default_factory=list)
    pull_problem: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    digest: str = ""
    exit_after_s: float | None = None
    exit_code_planned: int = 0
    stop_after_s: float | None = None
    stop_code: int | None = None
    history: list[tuple[str, int]] = field(default_factory=list)
    rates: list[tuple[int, list[tuple[str, str, str | None]]]] = field(default_factory=list)
    due: dict[str, int] = field(default_factory=dict)
    end_reason: str | None = None
    end_message: str = ""
    ended_at: int | None = None
    exit_code: int | None = None
    phantom: bool = False
    terminates: int = 0
    restarts: int = 0
    stops: int = 0

    def since(self, state: str) -> int | None:
        """When it first was in that state; None if it never was."""
        return next((at for name, at in self.history if name == state), None)

    def last(self, state: str) -> int | None:
        """When it was last put into that state: a restart makes it run once more."""
        return next((at for name, at in reversed(self.history) if name == state), None)

    @property
    def holds_capacity(self) -> bool:
        return self.state in ("booting", "running", "exited", "ending")


@dataclass(slots=True, kw_only=True)
class Thing:
    """What stands beside the machines: a key, a template, a login. ``machine``: whose it is, if one's.

    Nobody pays for it, and it stays when its machine goes.
    """

    id: str
    kind: str
    name: str | None
    region: str
    account: str
    created_at: int
    machine: str | None = None
    dropped: bool = False


class Journal:
    """The file. Only the event loop's thread appends; the writing itself happens beside it."""

    def __init__(self, folder: Path) -> None:
        """Take the folder, made if absent, for this process.

        Raises:
            StateError: another simulator runs on it.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise StateError(f"{folder} is in use by another simulator") from error
        self._folder = folder
        self._path = folder / "journal.jsonl"
        self._file = -1
        self._lines: list[bytes] = []
        self._appended = 0
        self._durable = 0
        self._writer: asyncio.Task[None] | None = None
        self._failed = False

    def read(self) -> Iterable[tuple[str, Any]]:
        """Every record in order.

        Raises:
            StateError: a line that is not the last one cannot be read.
        """
        try:
            lines = self._path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return
        lines.pop()  # empty, or torn by a crash before it was promised
        for number, line in enumerate(lines, start=1):
            try:
                record = orjson.loads(line)
                kind, value = record["k"], record["v"]
            except (orjson.JSONDecodeError, KeyError, TypeError) as error:
                raise StateError(f"{self._path}: line {number} is damaged") from error
            yield kind, value

    def restart(self, records: Iterable[tuple[str, Any]]) -> None:
        """Replace the file by these records and go on appending to it."""
        fresh = self._path.with_suffix(".new")
        with fresh.open("wb") as file:
            file.writelines(_line(kind, value) for kind, value in records)
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(self._path)
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name itself must survive
        finally:
            os.close(folder)
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def append(self, kind: str, value: Any) -> None:
        """Remember a record; it is on disk once a later `commit` returns."""
        self._lines.append(_line(kind, value))
        self._appended += 1

    async def commit(self) -> None:
        """Return when everything appended until now is on disk.

        Raises:
            OSError: the disk refused; nothing more may be promised.
        """
        wanted = self._appended
        while self._durable < wanted:
            if self._failed:
                raise OSError("the journal could not be written before")
            if self._writer is None:
                self._writer = asyncio.create_task(self._write(), name="journal")
            await asyncio.shield(self._writer)

    async def _write(self) -> None:
        try:
            await asyncio.sleep(0)  # whatever else this tick appends goes along
            chunk, upto = b"".join(self._lines), self._appended
            self._lines.clear()
            await asyncio.to_thread(self._put, chunk)
            self._durable = upto
        except BaseException:
            self._failed = True  # what was in the chunk is lost: never promise anything again
            raise
        finally:
            self._writer = None

    def _put(self, chunk: bytes) -> None:
        view = memoryview(chunk)
        while view:
            view = view[os.write(self._file, view) :]
        os.fsync(self._file)

    def remove(self) -> None:
        """Forget everything, after `close`."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Write what is left and give the folder back."""
        if self._file >= 0:
            self._put(b"".join(self._lines))
            os.close(self._file)
            self._file = -1
        os.close(self._lock)


def _line(kind: str, value: Any) -> bytes:
    return orjson.dumps({"k": kind, "v": value}) + b"\n"
