"""The log stream of the simulated RunPod: what hosts and containers write, as server-sent events without end.

Lines are made from a machine's history and from what a test lets it say. Only what is said lives in memory
alone, and so is lost with the process, as a container's lines are lost with the container.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

import orjson

from providers.simulation.clock import as_datetime, as_text, micros
from providers.simulation.engine import Engine
from providers.simulation.state import Machine

_TAIL = 100
_LOOK_S = 0.05
_PULL_EVERY_S = 5.0


@dataclass(frozen=True, slots=True, order=True)
class _Line:
    at: int
    number: int
    source: str
    text: str

    @property
    def event(self) -> bytes:
        data = orjson.dumps({"ts": as_text(self.at), "source": self.source, "line": self.text})
        return f"id: {as_text(self.at)}/{self.number}\n".encode() + b"data: " + data + b"\n\n"


class Logs:
    """Of all machines. ``problem_of`` is why a machine's image cannot be pulled, "" when it can."""

    def __init__(
        self, engine: Engine, *, problem_of: Callable[[Machine, int], str], forgets_s: float
    ) -> None:
        self._engine, self._problem_of, self._forgets = engine, problem_of, micros(forgets_s)
        self._said: dict[str, list[_Line]] = {}

    def say(self, machine: Machine, text: str, *, source: str) -> None:
        lines = self._said.setdefault(machine.id, [])
        lines.append(_Line(self._engine.clock.now(), len(lines), source, text))

    async def stream(
        self, machine: Machine, query: Mapping[str, str], last_event: str | None
    ) -> AsyncIterator[bytes]:
        """The lines that are there, and each later one; it never ends by itself."""
        source, sent = query.get("source"), 0
        first = True
        yield b": open\n\n"
        while True:
            lines = [line for line in self._lines(machine) if source in (None, line.source)]
            if first:
                begin = _begin(lines, query, last_event)
                first = False
            else:
                begin = min(sent, len(lines))
            for line in lines[begin:]:
                yield line.event
            sent = len(lines)
            await asyncio.sleep(_LOOK_S)

    def _lines(self, machine: Machine) -> list[_Line]:
        now = self._engine.advance()
        gone = machine.since("gone")
        forgotten = gone is not None and now >= gone + self._forgets
        found = [line for line in self._said.get(machine.id, ()) if not forgotten or line.source == "system"]
        starts = 0
        for number, (state, at) in enumerate(machine.history):
            if state == "booting":
                found.append(_Line(at, number, "system", f"pulling image {machine.image}"))
            elif state == "running" and not self._problem_of(machine, now):
                starts += 1
                found.append(_Line(at, number, "system", f"start container for {machine.image}: begin"))
                if not forgotten:
                    found.append(_Line(at, number, "container", f"container started, time {starts}"))
        if machine.labels.get("stays") and machine.exit_code is not None and not forgotten:
            identity = machine.labels.get("NEBULA_IDENTITY", "")
            said = f"nebula-exit {identity} {machine.exit_code}"
            found.append(_Line(machine.ended_at or now, len(machine.history), "container", said))
        problem = self._problem_of(machine, now)
        if problem and machine.state == "running":
            since = machine.since("running") or now
            tries = 1 + (now - since) // micros(_PULL_EVERY_S)
            for number in range(min(tries, 50)):
                at = since + number * micros(_PULL_EVERY_S)
                # After the line that says that it pulls, which may be of the same moment.
                found.append(_Line(at, len(machine.history) + number, "system", problem))
        return sorted(found)


def _begin(lines: list[_Line], query: Mapping[str, str], last_event: str | None) -> int:
    """Where the stream begins: after the last event, else since a time, else with the tail."""
    if last_event:
        for index, line in enumerate(lines):
            if f"{as_text(line.at)}/{line.number}" == last_event:
                return index + 1
    if since := query.get("since"):
        at = datetime.fromisoformat(since)
        return next((i for i, line in enumerate(lines) if as_datetime(line.at) >= at), len(lines))
    return max(0, len(lines) - int(query.get("tail", _TAIL)))
