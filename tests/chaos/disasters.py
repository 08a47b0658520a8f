"""What goes wrong for every seed at once: leaders, their clocks, Postgres, the API server, etcd.

One at a time, since each takes seconds of everybody's life; what it did is told in a line.
"""

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from app.kube.errors import KubeError
from hack.cluster import ControlPlane
from hack.controller import Controller
from tests.chaos import liar, store_faults
from tests.chaos.world import World

LEASE_S = 10.0  # of the replicas: a busy machine must not lose it
PULSE_S, FAULT_S = 1.0, 3.0
Disaster = Callable[[random.Random], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Restore:
    """The database was put back: what it learned between the two moments is lost."""

    of: datetime
    at: datetime


@dataclass(slots=True, kw_only=True)
class Disasters:
    """``lie``: the library for wrong clocks, where one could be built."""

    world: World
    replicas: dict[str, Controller]
    lie: Path | None
    restores: list[Restore] = field(default_factory=list)
    orphans: int = 0  # of this flock
    beside: int = 0  # that struck this flock
    struck: int = 0  # of all
    one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def strike(self, rng: random.Random) -> str:
        """One disaster, from its beginning to its end; what it was."""
        disaster = rng.choice(self._all())
        async with self.one_at_a_time:
            self.struck += 1
            self.beside += 1
            return await disaster(rng)

    def _all(self) -> list[Disaster]:
        """Leaders die most often: it costs them the least."""
        leaders = [self._kill, self._kill, self._kill_other, self._term, self._pause, self._pause]
        store = [self._away, self._read_only, self._full, self._without_connections, self._put_back]
        return [*leaders, *store, self._api, self._etcd]

    # --- leaders ----------------------------------------------------------------------------------

    async def _leader(self) -> str:
        """The name of the replica that leads, or of any where nobody can tell."""
        with suppress(KubeError):
            for name in self.replicas:
                if await self.world.leads(name):
                    return name
        return next(iter(self.replicas))

    async def _start(self, name: str, rng: random.Random) -> str:
        """Again, maybe with a clock that is ten minutes wrong."""
        off_s = rng.choice([0, 0, 600, -600]) if self.lie is not None else 0
        options = liar.options(self.lie, off_s) if self.lie is not None and off_s else {}
        await self.world.start(self.replicas[name], wait=False, **options)
        return f", its clock {off_s} s ahead" if off_s else ""

    async def _kill(self, rng: random.Random) -> str:
        name = await self._leader()
        await self.world.kill(self.replicas[name])
        return f"kill {name}, which leads{await self._start(name, rng)}"

    async def _kill_other(self, rng: random.Random) -> str:
        leader = await self._leader()
        (name,) = self.replicas.keys() - {leader}
        self.world.unkeep(self.replicas[name])
        await asyncio.to_thread(self.replicas[name].kill)
        return f"kill {name}, which does not lead{await self._start(name, rng)}"

    async def _term(self, rng: random.Random) -> str:
        name = await self._leader()
        await self.world.stop(self.replicas[name])
        return f"SIGTERM {name}, which leads{await self._start(name, rng)}"

    async def _pause(self, rng: random.Random) -> str:
        """Past its Lease, so that the other one leads when it wakes up; or only for a moment."""
        name, for_s = await self._leader(), rng.choice([0.5, LEASE_S + 1])
        replica = self.replicas[name]
        if not replica.running:
            return "pause nobody"
        replica.pause()
        try:
            await asyncio.sleep(for_s)  # the fault itself is a length of time
        finally:
            replica.go_on()
        return f"pause {name}, which leads, for {for_s} s"

    # --- Postgres ---------------------------------------------------------------------------------

    async def _away(self, rng: random.Random) -> str:
        for_s, how = rng.choice([0.0, 2.0]), rng.choice(["stop", "kill"])
        server = self.world.postgres
        await asyncio.to_thread(server.stop if how == "stop" else server.kill)
        await asyncio.sleep(for_s)  # as above
        await asyncio.to_thread(server.start)
        return f"{how} Postgres for {for_s} s"

    async def _read_only(self, _rng: random.Random) -> str:
        async with store_faults.read_only(self.world):
            await asyncio.sleep(FAULT_S)
        return f"Postgres read-only for {FAULT_S} s"

    async def _full(self, _rng: random.Random) -> str:
        async with store_faults.full(self.world):
            await asyncio.sleep(FAULT_S)
        return f"the disk of Postgres full for {FAULT_S} s"

    async def _without_connections(self, _rng: random.Random) -> str:
        async with store_faults.without_connections(self.world):
            await asyncio.sleep(FAULT_S)
        return f"Postgres without a free connection for {FAULT_S} s"

    async def _put_back(self, rng: random.Random) -> str:
        """To what it was some seconds ago: an hour, for those who live by these seconds."""
        world = self.world
        lived_s, backup = rng.choice([0.5, 3.0]), f"{world.database}_backup"
        await world.administer(f'alter database "{world.database}" with allow_connections false')
        try:
            await store_faults.hang_up(world)
            await world.administer(f'create database "{backup}" template "{world.database}"')
        finally:
            await world.administer(f'alter database "{world.database}" with allow_connections true')
        of = datetime.now(UTC)
        await asyncio.sleep(lived_s)
        await world.put_back(backup)
        await store_faults.let_in(world)
        self.restores.append(Restore(of, datetime.now(UTC)))
        await world.administer(f'drop database "{backup}"')
        return f"Postgres put back by {lived_s} s"

    # --- the cluster ------------------------------------------------------------------------------

    @property
    def _plane(self) -> ControlPlane:
        plane = self.world.cluster.control_plane
        assert plane is not None
        return plane

    async def _api(self, _rng: random.Random) -> str:
        await asyncio.to_thread(self._plane.stop_apiserver)
        await asyncio.to_thread(self._plane.start_apiserver)
        return "API server restarted"

    async def _etcd(self, _rng: random.Random) -> str:
        async with stumbling(self._plane):
            await asyncio.sleep(FAULT_S)
        return f"etcd stands still again and again for {FAULT_S} s"


@asynccontextmanager
async def stumbling(plane: ControlPlane) -> AsyncIterator[None]:
    """etcd stands still for a second, goes on for a moment, and so on until the block ends."""
    pid = plane.pids["etcd"]

    async def pulses() -> None:
        while True:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(PULSE_S)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(PULSE_S / 3)

    at_work = asyncio.create_task(pulses())
    try:
        yield
    finally:
        at_work.cancel()
        await asyncio.gather(at_work, return_exceptions=True)
        os.kill(pid, signal.SIGCONT)


@dataclass(frozen=True, slots=True)
class Hold:
    """What holds the sweeps until a person has looked."""

    since: datetime
    reason: str


async def held(world: World) -> Hold | None:
    rows = await world.rows("select held_since, held_reason from installation where held_since is not null")
    return Hold(rows[0]["held_since"], rows[0]["held_reason"]) if rows else None


async def confirm(world: World) -> None:
    """A person lets the sweeps go on."""
    url = world.postgres.url_of(world.database)
    argv = [sys.executable, "-m", "app.cli", "hold", "release", "--yes"]
    env = {**os.environ, "NEBULA_DATABASE_URL": url}
    await asyncio.to_thread(subprocess.run, argv, env=env, check=True, capture_output=True)
