"""Keeps the rows of NodeClaims and CloudPodBindings like their caches.

Changes are gathered by UID for a moment, then written in one transaction. It is level-triggered: whatever was
missed (an outage, a crash, a change of leader) is made good by writing the whole cache again, which touches
only rows that differ, and by marking as gone the rows that the cache no longer has. So nothing needs to be
queued for ever: what waits is at most one entry for each UID, and ``keep`` of deleted ones.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from app.mirror.rows import Obj, binding_row, claim_row
from app.store import mirrored
from app.store.engine import StoreUnavailable, begin, connect

log = structlog.get_logger()

BATCH_S = 0.25  # for people and reports: a Pod's first steps make one row's write, not five
REWRITE_S = 600.0
KEEP = 10_000
CHUNK = 500


class WatchedObjects(Protocol):
    """What is needed of `app.kube.cache.Cache`."""

    def on_change(self, handler: Callable[[Obj | None, Obj | None], None]) -> None: ...
    def all(self) -> list[Obj]: ...
    async def synced(self) -> None: ...


Row = Any
Write = Callable[[AsyncConnection, Iterable[Row]], Awaitable[list[str]]]


@dataclass(slots=True, kw_only=True)
class _Kind:
    """One kind's way from cache to table, and what has changed since it was written last."""

    name: str
    cache: WatchedObjects
    to_row: Callable[..., Row]
    upsert: Write
    present: Callable[[AsyncConnection], Awaitable[set[str]]]
    mark_gone: Callable[[AsyncConnection, Iterable[str]], Awaitable[list[str]]]
    live: dict[str, Obj] = field(default_factory=dict)
    deleted: dict[str, Obj] = field(default_factory=dict)
    rewrite: bool = True  # the whole cache is to be written

    def heard(self, old: Obj | None, new: Obj | None, *, keep: int) -> None:
        if new is not None:
            uid = new["metadata"]["uid"]
            self.deleted.pop(uid, None)
            self.live[uid] = new
        elif old is not None:
            uid = old["metadata"]["uid"]
            self.live.pop(uid, None)
            self.deleted[uid] = old
        if len(self.live) > keep:  # they are all in the cache
            self.live.clear()
            self.rewrite = True
        if len(self.deleted) > keep:
            log.warning("mirror forgets the last state of deleted objects", kind=self.name, count=keep)
            self.deleted.clear()
            self.rewrite = True

    def take(self) -> list[Row]:
        """The rows of what has changed, which is then no longer remembered here."""
        live, deleted = self.live, self.deleted
        self.live, self.deleted = {}, {}
        return self.rows(live.values()) + self.rows(deleted.values(), gone=True)

    def rows(self, objects: Iterable[Obj], *, gone: bool = False) -> list[Row]:
        made = []
        for obj in objects:
            try:
                made.append(self.to_row(obj, gone=gone))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                name = (obj.get("metadata") or {}).get("name")
                log.error("object cannot be mirrored", kind=self.name, object=name, error=repr(error))
        return made

    @property
    def waits(self) -> bool:
        return bool(self.rewrite or self.live or self.deleted)


class Mirror:
    """One for each process; ``run`` may be cancelled and called again, as leadership comes and goes.

    ``batch_s``: how long changes are gathered. ``rewrite_s``: how often everything is compared, in case that
    another replica, late by a leadership, has written something stale. Waits after a failure of the store
    double from ``base_s`` to ``max_s``.
    """

    def __init__(
        self,
        *,
        engine: AsyncEngine,
        claims: WatchedObjects,
        bindings: WatchedObjects,
        batch_s: float = BATCH_S,
        rewrite_s: float = REWRITE_S,
        base_s: float = 1.0,
        max_s: float = 30.0,
        keep: int = KEEP,
    ) -> None:
        self._engine = engine
        self._batch_s, self._rewrite_s = batch_s, rewrite_s
        self._base_s, self._max_s = base_s, max_s
        self._keep = keep
        self._wake = asyncio.Event()
        self._kinds = (
            _Kind(
                name="NodeClaim",
                cache=claims,
                to_row=claim_row,
                upsert=mirrored.upsert_claims,
                present=mirrored.present_claims,
                mark_gone=mirrored.mark_claims_gone,
            ),
            _Kind(
                name="CloudPodBinding",
                cache=bindings,
                to_row=binding_row,
                upsert=mirrored.upsert_bindings,
                present=mirrored.present_bindings,
                mark_gone=mirrored.mark_bindings_gone,
            ),
        )
        for kind in self._kinds:
            kind.cache.on_change(self._listener(kind))

    async def run(self) -> None:
        """Write until cancelled; first of all, everything."""
        for kind in self._kinds:
            await kind.cache.synced()  # before that, absence from the cache says nothing
            kind.rewrite = True
        self._wake.set()
        failures = 0
        while True:
            await self._something_to_do()
            try:
                await self._flush()
            except StoreUnavailable as error:
                failures += 1
                if failures == 1:
                    log.warning("mirror waits for the store", error=str(error))
                ceiling_s = min(self._max_s, self._base_s * 2 ** min(failures - 1, 16))
                await asyncio.sleep(random.uniform(0.5, 1.0) * ceiling_s)
            else:
                if failures:
                    log.info("mirror goes on", failures=failures)
                failures = 0

    def _listener(self, kind: _Kind) -> Callable[[Obj | None, Obj | None], None]:
        def heard(old: Obj | None, new: Obj | None) -> None:
            kind.heard(old, new, keep=self._keep)
            self._wake.set()

        return heard

    async def _something_to_do(self) -> None:
        if not any(kind.waits for kind in self._kinds):
            try:
                async with asyncio.timeout(self._rewrite_s * random.uniform(0.9, 1.0)):
                    await (
                        self._wake.wait()
                    )  # never by wait_for: before 3.12 it loses a cancel that meets a wake
            except TimeoutError:
                for kind in self._kinds:
                    kind.rewrite = True
        self._wake.clear()
        await asyncio.sleep(self._batch_s)

    async def _flush(self) -> None:
        """Write what has changed, then, where due, everything.

        Raises:
            StoreUnavailable: what was not written is remembered, or will be written from the cache.
        """
        taken = [(kind, kind.deleted, kind.take()) for kind in self._kinds]
        try:
            await self._write([(kind, rows) for kind, _, rows in taken])
            for kind in self._kinds:
                if kind.rewrite:
                    await self._rewrite_all(kind)
        except BaseException:  # cancelled too: the next run begins with everything
            for kind, deleted, _ in taken:
                kind.rewrite = True
                kind.deleted = deleted | kind.deleted  # the cache has these no more
            raise

    async def _rewrite_all(self, kind: _Kind) -> None:
        kind.rewrite = False
        async with connect(self._engine) as conn:
            present = await kind.present(conn)  # before the cache is looked at: what came between stays
        objects = kind.cache.all()
        kind.live.clear()
        for start in range(0, len(objects), CHUNK):
            await self._write([(kind, kind.rows(objects[start : start + CHUNK]))])
        gone = present - {obj["metadata"]["uid"] for obj in objects} - kind.deleted.keys()
        if gone:
            async with begin(self._engine) as conn:
                marked = await kind.mark_gone(conn, gone)
            log.info("mirror marked rows gone", kind=kind.name, count=len(marked))

    async def _write(self, batch: Sequence[tuple[_Kind, list[Row]]]) -> None:
        if not any(rows for _, rows in batch):
            return
        try:
            async with begin(self._engine) as conn:
                for kind, rows in batch:
                    await kind.upsert(conn, rows)
        except StoreUnavailable:
            raise
        except DBAPIError as error:  # one row that the table refuses must not keep the others out
            log.warning("mirror writes one by one", error=_line(error))
            for kind, rows in batch:
                for row in rows:
                    await self._write_one(kind, row)

    async def _write_one(self, kind: _Kind, row: Row) -> None:
        try:
            async with begin(self._engine) as conn:
                await kind.upsert(conn, [row])
        except StoreUnavailable:
            raise
        except DBAPIError as error:
            log.error("row refused", kind=kind.name, object=row.name, error=_line(error))


def _line(error: DBAPIError) -> str:
    """What the server said, without the statement."""
    return str(error.orig).split("\n", 1)[0]
