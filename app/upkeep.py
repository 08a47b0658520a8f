"""Rows that nobody will ask for again are forgotten, once an hour, by the leader. APScheduler is the clock.

Never pruned: rentals, attempts and runs. They are what was promised and what it cost.
"""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import structlog
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from sqlalchemy.ext.asyncio import AsyncEngine

from app.store import backoffs, blocks, decisions, rounds
from app.store.engine import StoreUnavailable, begin

log = structlog.get_logger()

EVERY = timedelta(hours=1)
FIRST = timedelta(minutes=1)
KEEP_S = 14 * 24 * 3600.0


class Upkeep:
    """One duty of the leader."""

    def __init__(self, engine: AsyncEngine, *, keep_s: float = KEEP_S) -> None:
        self._engine, self._keep_s = engine, keep_s

    async def run(self) -> None:
        """Prune every hour until cancelled; an hour that is missed is made up for once."""
        clock: Any = cast(Any, AsyncIOScheduler)(timezone=UTC)
        clock.add_job(
            self.prune,
            "interval",
            seconds=EVERY.total_seconds(),
            next_run_time=datetime.now(UTC) + FIRST,
            coalesce=True,
            max_instances=1,
            misfire_grace_time=None,
        )
        clock.start()
        try:
            await asyncio.Event().wait()
        finally:
            clock.shutdown(wait=False)

    async def prune(self) -> dict[str, int]:
        """Forget what is old, and tell how many of each. A store that is away is left alone."""
        try:
            async with begin(self._engine) as conn:
                gone = {
                    "blocks": await blocks.prune(conn, older_than_s=self._keep_s),
                    "backoffs": await backoffs.prune(conn, older_than_s=self._keep_s),
                    "decisions": await decisions.prune(conn, older_than_s=self._keep_s),
                    "rounds": await rounds.prune(conn, older_than_s=self._keep_s),
                }
        except StoreUnavailable as error:
            log.info("not pruned", error=str(error)[:256])
            return {}
        if any(gone.values()):
            log.info("pruned", **gone)
        return gone
