"""Seeds side by side: what one waits for, the others wait for too, so that each costs little.

They share the faults of everything that they share: a leader that one kills is everybody's, and so are the
cloud's lost answers. What a seed asks of its own namespace holds all the same. Run alone, a seed meets its
own faults only; a failure names both commands, for the seed alone and for its whole flock.
"""

import asyncio
import os
import re
import time
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil

from app.kube.errors import KubeError
from hack.controller import Controller
from tests.chaos.disasters import Disasters, Hold, Restore, confirm, held
from tests.chaos.seeds import Planted, Seed, Seen
from tests.chaos.world import DATABASE_AWAY, World

BESIDE = 8
FAILURES = 10  # after so many, the rest would say nothing new
REST_S = 90.0
LOOK_EVERY_S = 0.25
CONFIRM_EVERY_S = 2.0
LATE = timedelta(
    seconds=10
)  # from the intent whose row is lost to what came of it, with a machine under load
SLACK = 5  # a bound is promised to a machine that does nothing else


@dataclass(slots=True, kw_only=True)
class Flock:
    """One run of some seeds. ``failed``: what was wrong, by number."""

    world: World
    disasters: Disasters
    planted: Planted
    seeds: Sequence[Seed]
    failed: dict[int, str] = field(default_factory=dict)
    earlier: list[Restore] = field(default_factory=list)  # of flocks before
    calm_since: datetime = field(default_factory=lambda: datetime.now(UTC))

    async def run(self) -> None:
        self.earlier = list(self.disasters.restores)
        self.disasters.restores.clear()
        self.disasters.orphans = self.disasters.beside = 0
        await self._each(Seed.begin)
        await self._each(Seed.disturb)
        await self._calm()
        await self._until("all is at rest", Seed.is_at_rest)
        await self._each(Seed.delete_all)
        await self._until("nothing is left", Seed.is_nothing_left)
        await self._until("every run is billed", Seed.is_billed)
        await self._each(Seed.books)
        await self._each(self._orphans_in_time)
        assert self.planted.untouched(await self.world.cloud.machines(image="planted")), (
            f"somebody else's machine was touched: {self._commands()}"
        )

    # --- the faults stop --------------------------------------------------------------------------

    async def _calm(self) -> None:
        await self.world.cloud.clear_faults()
        self.calm_since = datetime.now(UTC)
        for seed in self._going():
            seed.tell("-- the faults stop")

    async def _confirm(self) -> None:
        """A person looks at what holds the sweeps, and lets them go on if what was done here explains it."""
        with suppress(*DATABASE_AWAY):
            hold = await held(self.world)
            if hold is None:
                return
            if not await self._explains(hold):
                for seed in self._going():
                    await self._fail(seed, f"nothing explains that sweeps are held: {hold}")
            await confirm(self.world)
            self.calm_since = datetime.now(UTC)
            for seed in self._going():
                seed.tell(f"-- a person lifts the hold: {hold.reason}")

    async def _explains(self, hold: Hold) -> bool:
        """Whether rows were lost that it misses, or it is about a machine that was planted as an orphan."""
        restores = [one for one in (*self.earlier, *self.disasters.restores) if one.of <= hold.since]
        machine = re.match(r"machine (\S+) carries attempt", hold.reason)
        if machine is not None:
            if any(machine[1] in seed.orphans for seed in self.seeds):
                return True
            told = [one for one in await self.world.cloud.machines() if one["id"] == machine[1]]
            return any(
                one.of <= datetime.fromisoformat(made["created_at"]) <= one.at + LATE
                for made in told
                for one in restores
            )
        return bool(restores) and bool(
            re.match(r"claim \S+ carries attempt|\d+ rentals have lost their rows", hold.reason)
        )

    async def _orphans_in_time(self, seed: Seed) -> None:
        """The bound that the sweep prints holds."""
        if seed.orphans:
            bound_s = await asyncio.to_thread(self._bound_s)
            took_s = await seed.orphan_took_s(self.calm_since)
            assert took_s <= SLACK * bound_s, f"an orphan was there for {took_s} s, the bound is {bound_s} s"

    def _bound_s(self) -> float:
        """As the leader tells it."""
        for replica in self.disasters.replicas.values():
            with (
                suppress(OSError),
                urllib.request.urlopen(f"{replica.health_url}/metrics", timeout=5) as told,
            ):
                for line in told.read().decode().splitlines():
                    if line.startswith("nebula_orphan_bound_seconds{"):
                        return float(line.rsplit(" ", 1)[1])
        raise AssertionError("no replica tells the bound of orphans")

    # --- all seeds --------------------------------------------------------------------------------

    def _going(self) -> list[Seed]:
        return [seed for seed in self.seeds if seed.number not in self.failed]

    async def _each(self, what: Callable[[Seed], Awaitable[None]]) -> None:
        async def one(seed: Seed) -> None:
            try:
                await what(seed)
            except AssertionError as error:
                await self._fail(seed, str(error))
            except Exception as error:
                error.add_note("\n".join([self._command(seed), *seed.story]))
                raise

        async with asyncio.TaskGroup() as tasks:
            for seed in self._going():
                tasks.create_task(one(seed))

    async def _until(self, what: str, holds: Callable[[Seed, Seen], Awaitable[bool]]) -> None:
        """Look again and again, until it was true of each seed once."""
        began_s = confirmed_s = time.monotonic()
        waiting = self._going()
        while waiting:
            await self.world.tend()
            with suppress(KubeError, *DATABASE_AWAY):
                seen = await Seen.now(self.world)
                for seed in list(waiting):
                    if await holds(seed, seen):
                        seed.tell(f"-- {what} after {time.monotonic() - began_s:.1f} s")
                        waiting.remove(seed)
            if time.monotonic() > began_s + REST_S:
                for seed in waiting:
                    told = await seed.world.told()
                    left = await seed.left()
                    await self._fail(seed, f"not within {REST_S:g} s: {what}\n{left}\n{told}")
                return
            if time.monotonic() > confirmed_s + CONFIRM_EVERY_S:
                await self._confirm()
                confirmed_s = time.monotonic()
            await asyncio.sleep(LOOK_EVERY_S)

    async def _fail(self, seed: Seed, why: str) -> None:
        told = [self._command(seed), *seed.story, *await self._warnings(seed)]
        for other in self.seeds:
            if other is not seed:
                told += [f"beside it, {other.number}: {line}" for line in other.story]
        self.failed[seed.number] = "\n".join([*told, why])
        await seed.world.purge()

    def _command(self, seed: Seed) -> str:
        return f"make chaos SEED={seed.number}; {self._commands()}"

    def _commands(self) -> str:
        first, count = self.seeds[0].number, len(self.seeds)
        return f"the whole flock: make chaos FIRST={first} SEEDS={count} BESIDE={count}"

    async def _warnings(self, seed: Seed) -> list[str]:
        """What the cluster itself complains of."""
        with suppress(KubeError):
            found = await self.world.kube.get(f"/api/v1/namespaces/{seed.namespace}/events")
            return [
                f"event {one.get('lastTimestamp')} {one['involvedObject'].get('name')} {one['message'][:200]}"
                for one in found["items"]
                if one.get("type") == "Warning"
            ]
        return []


# --- as many as there is time for --------------------------------------------------------------------


async def run_seeds(
    arena: World,
    replicas: dict[str, Controller],
    *,
    lie: Path | None,
    budget_s: float,
    kind: type[Seed] = Seed,
) -> None:
    """Seeds, flock after flock: those that the environment names, or as many as begin within the budget.

    ``lie``: the library for wrong clocks. A seed that fails does not stop the others.

    Raises:
        AssertionError: with the story of each that failed.
    """
    await asyncio.gather(*(arena.start(replica) for replica in replicas.values()))
    await arena.until("somebody leads", lambda: _somebody_leads(arena, list(replicas)))
    disasters = Disasters(world=arena, replicas=replicas, lie=lie)
    planted = await Planted.into(arena)
    failures: dict[int, str] = {}
    began_s, began_cpu_s, done = time.monotonic(), _cpu_s(), 0
    beside, every = _beside(), _numbers()
    for first in range(0, len(every), beside):
        numbers = every[first : first + beside]
        if done and not _asked() and time.monotonic() - began_s > budget_s:
            break
        flock = Flock(
            world=arena,
            disasters=disasters,
            planted=planted,
            seeds=[
                kind(number, replace(arena, namespace=f"seed-{number}"), disasters, planted)
                for number in numbers
            ],
        )
        flock_began_s = time.monotonic()
        await flock.run()
        failures |= flock.failed
        done += len(numbers)
        if "TELL" in os.environ:
            for seed in flock.seeds:
                print("\n".join([f"--- seed {seed.number}", *seed.story]))
        for why in flock.failed.values():
            print(f"--- FAILED\n{why}")
        print(
            f"seeds {numbers[0]} to {numbers[-1]}: {time.monotonic() - flock_began_s:.1f} s,"
            f" {done} done, {len(failures)} failed so far",
            flush=True,
        )
        if len(failures) >= FAILURES:
            break
    each_s, each_cpu_s = (time.monotonic() - began_s) / done, (_cpu_s() - began_cpu_s) / done
    print(
        f"{done} seeds: {each_s:.1f} s and {each_cpu_s:.1f} s of CPU each;"
        f" {disasters.struck} disasters; {len(failures)} failed"
    )
    assert not failures, "\n\n".join(failures.values())


def _asked() -> bool:
    return "SEED" in os.environ or "SEEDS" in os.environ


def _numbers() -> range:
    first = int(os.environ.get("SEED") or os.environ.get("FIRST") or 1)
    count = 1 if os.environ.get("SEED") else int(os.environ.get("SEEDS") or 1_000_000)
    return range(first, first + count)


def _beside() -> int:
    return 1 if os.environ.get("SEED") else int(os.environ.get("BESIDE") or BESIDE)


def _cpu_s() -> float:
    """Of this process and all that it has started: controllers, cloud, Postgres, control plane."""
    own, spent_s = psutil.Process(), 0.0
    for each in (own, *own.children(recursive=True)):
        with suppress(psutil.Error):
            times = each.cpu_times()
            spent_s += times.user + times.system + times.children_user + times.children_system
    return spent_s


async def _somebody_leads(world: World, names: list[str]) -> bool:
    """And has made the database this installation's."""
    leading = await asyncio.gather(*(world.leads(name) for name in names))
    return any(leading) and bool(await world.rows("select 1 from installation"))
