"""Migrations, run in-process: by every replica at its start, by ``nebula migrate``, and for test databases.

One migrator at a time: a session lock that is polled, not waited for, so that a waiter holds no snapshot and
cannot stand in the way of the migration that it waits for. The lock and the migrations share one direct
connection: if it breaks, both are over. Each script is one transaction, and gives up when another session
holds a table for longer than ``lock_timeout_s``; nothing of it is left then, and the caller tries again.

``python -m app.store.migrate --check`` proves that the scripts build exactly what `app.store.tables` says.
"""

import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from importlib import resources
from typing import TYPE_CHECKING, Any

import structlog
from sqlalchemy import Connection, func, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from app.store import engine as door
from app.store import revisions
from app.store.revisions import State, Verdict

if TYPE_CHECKING:
    from alembic.config import Config

log = structlog.get_logger()

LOCK = 0x6E6562756C61  # "nebula"; the key belongs to the database, so installations do not meet
LOCK_TIMEOUT_S = 10.0
WAIT_S = 600.0
POLL_S = 0.5
DEADLOCKS = 10
_DEADLOCK = "40P01"

__all__ = ["SchemaTooNew", "State", "Verdict", "check", "migrate"]


class SchemaTooNew(Exception):
    """The database was migrated by newer code, and a newer revision refuses ours: run a newer version."""

    def __init__(self, state: State) -> None:
        super().__init__(
            f"the database is at revision {state.revision}, which this version, that knows {state.head}, "
            "would misread: run the newer version"
        )
        self.state = state


async def migrate(
    url: str,
    *,
    lock_timeout_s: float = LOCK_TIMEOUT_S,
    wait_s: float = WAIT_S,
    poll_s: float = POLL_S,
    report: Callable[[str], None] | None = None,
) -> str:
    """Bring the database up to our head; return the revision in force: ours, or a newer one that allows us.

    ``wait_s`` bounds the wait for another migrator. ``report`` hears what happens, a line at a time.

    Raises:
        SchemaTooNew: newer code was here.
        app.store.engine.StoreUnavailable: no server, or another migrator or a lock for too long.
        ValueError: ``url`` is none of Postgres.
    """
    say = report or (lambda line: log.info("store migration", step=line))
    async with _direct(url, lock_timeout_s=lock_timeout_s) as conn:
        state = await _read(conn)
        if state.verdict is Verdict.BEHIND:
            await _lock(conn, wait_s=wait_s, poll_s=poll_s, say=say)
            state = await _read(conn)  # another migrator may have been first
        if state.verdict is Verdict.BEHIND:
            await _again_after_deadlocks(conn, lambda: conn.run_sync(_upgrade, say), say=say)
            state = await _read(conn)
        if state.revision is None or not state.usable:
            raise SchemaTooNew(state)
        if state.verdict is Verdict.CURRENT:  # newer code's views are its own business
            await _keep_views(conn, wait_s=wait_s, poll_s=poll_s, say=say)
        return state.revision


async def _again_after_deadlocks(
    conn: AsyncConnection, step: Callable[[], Awaitable[None]], *, say: Callable[[str], None]
) -> None:
    """Carry out ``step``. Replicas of the version before are at work, and may hold what it needs in another
    order; the server then ends one of the two. Each revision is a transaction, so no work is done twice.

    Raises:
        app.store.engine.StoreUnavailable: it was ended again and again.
    """
    for _ in range(DEADLOCKS):
        try:
            await step()
            return
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) != _DEADLOCK:
                raise
            await conn.rollback()
            say("ended by a deadlock with a replica at work: tried again")
    raise door.StoreUnavailable("deadlocks with replicas at work, again and again", sqlstate=_DEADLOCK)


async def _keep_views(
    conn: AsyncConnection, *, wait_s: float, poll_s: float, say: Callable[[str], None]
) -> None:
    """Make the views of this code, unless they are there."""
    from app.store import views

    current = await conn.run_sync(views.is_current)
    await conn.rollback()
    if current:
        return
    await _lock(conn, wait_s=wait_s, poll_s=poll_s, say=say)  # ours already, after a migration
    if not await conn.run_sync(views.is_current):
        await _again_after_deadlocks(conn, lambda: conn.run_sync(views.install), say=say)
        say(f"views: {views.version()}")
    await conn.commit()


async def check(url: str, *, lock_timeout_s: float = LOCK_TIMEOUT_S) -> State:
    """Compare the database with this code. Changes nothing.

    Raises:
        app.store.engine.StoreUnavailable: no server.
        ValueError: ``url`` is none of Postgres.
    """
    async with _direct(url, lock_timeout_s=lock_timeout_s) as conn:
        return await _read(conn)


@asynccontextmanager
async def _direct(url: str, *, lock_timeout_s: float) -> AsyncIterator[AsyncConnection]:
    engine = door.create_direct_engine(url, lock_timeout_s=lock_timeout_s)
    try:
        async with door.connect(engine) as conn:
            yield conn
    finally:
        await engine.dispose()


async def _read(conn: AsyncConnection) -> State:
    try:
        return await conn.run_sync(revisions.read)
    finally:
        await conn.rollback()  # between steps nothing is open: alembic begins transactions of its own


async def _lock(conn: AsyncConnection, *, wait_s: float, poll_s: float, say: Callable[[str], None]) -> None:
    deadline = time.monotonic() + wait_s
    told = False
    while True:
        taken = (await conn.execute(select(func.pg_try_advisory_lock(LOCK)))).scalar_one()
        await conn.rollback()  # a session lock stays; the snapshot goes
        if taken:
            return
        if not told:
            say("waiting for another migrator")
            told = True
        if time.monotonic() > deadline:
            raise door.StoreUnavailable(f"another migrator has been at work for {wait_s:g} s")
        await asyncio.sleep(poll_s * random.uniform(0.5, 1.0))


def _upgrade(conn: Connection, say: Callable[[str], None]) -> None:
    from alembic import command

    config = config_for(conn)

    def applied(step: Any) -> None:
        say(f"{step.up_revision_id}: {step.up_revision.doc}")

    config.attributes["applied"] = applied
    command.upgrade(config, "head")


def config_for(conn: Connection) -> "Config":
    """Alembic's configuration on a connection that is open already; the scripts are those of the package."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(resources.files("migrations")).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = conn
    return config


def main(argv: Sequence[str]) -> int:
    """``--check``: 1 if the scripts and the tables have drifted apart, the differences on standard error."""
    if list(argv) != ["--check"]:
        print("usage: python -m app.store.migrate --check", file=sys.stderr)
        return 2
    from app.store import drift

    found = drift.find_on_scratch_server()
    for line in found:
        print(line, file=sys.stderr)
    print(f"migrations: {len(found)} differences from app/store/tables.py")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
