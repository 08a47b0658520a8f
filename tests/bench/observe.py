"""What a run is measured with: the stages of Pods and claims, processes, the audit log, the database.

Times are monotonic seconds since a run began. CPU is that of the process asked about, in seconds of one core.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import psutil

from app.kube import paths
from app.kube.cache import Cache
from app.kube.client import Kube, Obj

SAMPLE_S = 0.25
STALL_S = 60.0  # without any progress for so long, something is broken rather than slow
UP = ("pods created", "claims created", "pods bound", "claims bound", "pods ready")
DOWN = ("pods gone", "claims gone")
READS = ("get", "list", "watch")
OUR_OBJECTS = ("pods", "nodeclaims", "cloudpodbindings")
Request = tuple[str, str, str]
"""Verb, resource and subresource of an API request."""


class Stalled(RuntimeError):
    """Nothing has happened for `STALL_S`."""


@dataclass(slots=True)
class Stages:
    """When each object was first seen in each stage, by UID."""

    began: float = 0.0
    seen: dict[str, dict[str, float]] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self) -> None:
        """Count from now on; what was seen before is forgotten."""
        self.began, self.seen = time.monotonic(), {}

    def mark(self, stage: str, obj: Obj) -> None:
        self.seen.setdefault(stage, {}).setdefault(obj["metadata"]["uid"], time.monotonic() - self.began)
        self.changed.set()

    def pod(self, old: Obj | None, new: Obj | None) -> None:
        if new is None:
            self.mark("pods gone", old or {})
            return
        self.mark("pods created", new)
        if new["spec"].get("nodeName"):
            self.mark("pods bound", new)
        if is_ready(new):
            self.mark("pods ready", new)

    def claim(self, old: Obj | None, new: Obj | None) -> None:
        if new is None:
            self.mark("claims gone", old or {})
            return
        self.mark("claims created", new)
        if (new.get("status") or {}).get("phase") == "Bound":
            self.mark("claims bound", new)

    async def until(self, stage: str, count: int) -> float:
        """The moment at which so many objects have been seen in the stage.

        Raises:
            Stalled: no stage has moved for `STALL_S`.
        """
        while len(self.seen.get(stage, ())) < count:
            self.changed.clear()
            try:
                async with asyncio.timeout(STALL_S):
                    await self.changed.wait()
            except TimeoutError:
                have = {name: len(found) for name, found in self.seen.items()}
                raise Stalled(f"{stage}: {have.get(stage, 0)} of {count}; {have}") from None
        return sorted(self.seen[stage].values())[count - 1]

    def table(self, stages: Iterable[str]) -> dict[str, dict[str, float]]:
        """p50, p95 and max of each stage, in seconds."""
        return {
            stage: {name: round(percentile(times, share), 3) for name, share in _SHARES}
            for stage in stages
            if (times := list(self.seen.get(stage, {}).values()))
        }


_SHARES = (("p50", 0.5), ("p95", 0.95), ("max", 1.0))


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that ``share`` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]


def is_ready(pod: Obj) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


class Watching:
    """Stages of one namespace's Pods and of the claims for them, while entered."""

    def __init__(self, kube: Kube, namespace: str) -> None:
        self.stages = Stages()
        self._pods, self._claims = Cache(kube, paths.pods(namespace)), Cache(kube, paths.nodeclaims())
        self._pods.on_change(self.stages.pod)
        self._claims.on_change(self._claim)
        self._namespace = namespace
        self._tasks: list[asyncio.Task[None]] = []

    def _claim(self, old: Obj | None, new: Obj | None) -> None:
        if ((new or old or {})["spec"]["podRef"]["namespace"]) == self._namespace:
            self.stages.claim(old, new)

    async def __aenter__(self) -> Stages:
        self._tasks = [asyncio.create_task(cache.run()) for cache in (self._pods, self._claims)]
        await asyncio.gather(self._pods.synced(), self._claims.synced())
        return self.stages

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Meter:
    """One process: CPU seconds, and the most memory it had at any sample while entered."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.peak_mib = self.mib()
        self._task: asyncio.Task[None] | None = None

    def cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def mib(self) -> float:
        return float(self._process.memory_info().rss) / 2**20

    async def __aenter__(self) -> "Meter":
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            self.peak_mib = max(self.peak_mib, self.mib())
            await asyncio.sleep(SAMPLE_S)


# --- the audit log -------------------------------------------------------------------------------


@dataclass(slots=True)
class Audit:
    """The API server's audit log (level Metadata), read from one moment to another."""

    log: Path

    def here(self) -> int:
        """The end of the log as it is."""
        return self.log.stat().st_size if self.log.exists() else 0

    async def settled(self) -> int:
        """The end of the log once it holds every request answered before: it is written in batches."""
        await asyncio.sleep(2.0)
        return self.here()

    def requests(self, since: int, until: int, *, agent: Callable[[str], bool]) -> Counter[Request]:
        """How often whoever ``agent`` accepts has made which request."""
        count: Counter[Request] = Counter()
        for entry in self.entries(since, until):
            if agent(entry.get("userAgent", "")):
                ref = entry.get("objectRef", {})
                count[entry["verb"], ref.get("resource", ""), ref.get("subresource", "")] += 1
        return count

    def entries(self, since: int, until: int) -> Iterable[dict[str, Any]]:
        if not self.log.exists():
            return
        with self.log.open("rb") as lines:
            lines.seek(since)
            for line in lines:
                if lines.tell() > until:
                    return
                yield json.loads(line)


def of_nebula(agent: str) -> bool:
    """The product, but not the bench's own client."""
    return agent.startswith("nebula/") and "(bench)" not in agent and "(floor)" not in agent


def of_floor(agent: str) -> bool:
    return agent.startswith("nebula/") and "(floor)" in agent


def writes(requests: Counter[Request]) -> int:
    """Writes to Pods, claims and bindings."""
    return sum(
        count
        for (verb, resource, _), count in requests.items()
        if verb not in READS and resource in OUR_OBJECTS
    )


# --- the database --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a database has done so far. ``statements`` is None where nothing counts them."""

    statements: int | None
    transactions: int

    def __sub__(self, earlier: "Work") -> "Work":
        return Work(
            statements=None if self.statements is None else self.statements - (earlier.statements or 0),
            transactions=self.transactions - earlier.transactions,
        )

    def __add__(self, other: "Work") -> "Work":
        return Work(
            statements=None if self.statements is None else self.statements + (other.statements or 0),
            transactions=self.transactions + other.transactions,
        )


class Database:
    """Reads the counters of one database, and what it was asked most."""

    def __init__(self, url: str) -> None:
        self._dsn = url.replace("+asyncpg", "")

    async def work(self) -> Work:
        conn = await asyncpg.connect(self._dsn)
        try:
            # A backend reports its counters at most once a second, and when it becomes idle.
            transactions = await conn.fetchval(
                "select xact_commit + xact_rollback from pg_stat_database where datname = current_database()"
            )
            statements = None
            if await self._counts(conn):
                statements = int(await conn.fetchval(f"select coalesce(sum(calls), 0) {_STATEMENTS}"))
        finally:
            await conn.close()
        return Work(statements=statements, transactions=int(transactions))

    async def top(self, limit: int) -> list[tuple[int, float, str]]:
        """Calls, milliseconds of the server and text of what was called most often."""
        conn = await asyncpg.connect(self._dsn)
        try:
            if not await self._counts(conn):
                return []
            rows = await conn.fetch(
                f"select calls, total_exec_time, query {_STATEMENTS} order by calls desc limit $1", limit
            )
        finally:
            await conn.close()
        return [(int(row[0]), float(row[1]), " ".join(row[2].split())) for row in rows]

    async def _counts(self, conn: Any) -> bool:
        return bool(await conn.fetchval("select to_regclass('pg_stat_statements') is not null"))


# Begin and commit are counted as transactions, and the bench's own questions not at all.
_STATEMENTS = """from pg_stat_statements
 where dbid = (select oid from pg_database where datname = current_database())
   and query !~* '^(begin|commit|rollback|start transaction|set |show |reset )' and query !~ 'pg_stat_'"""
