"""Alembic's entry: run the scripts on the connection that `app.store.migrate` hands over.

``alembic upgrade head`` in the work tree comes here without one, and gets it from NEBULA_DATABASE_URL. Each
script runs in a transaction of its own, and its row of ``schema_revision`` is written in the same.
"""

import asyncio
import os
from typing import Any

from alembic import context
from sqlalchemy import Connection, delete
from sqlalchemy.dialects.postgresql import insert

from app.store import engine, revisions
from app.store import ledger_tables as _ledger_tables  # noqa: F401 (they join the metadata)
from app.store.tables import Base

LOCK_TIMEOUT_S = 10.0


def run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        transaction_per_migration=True,
        compare_type=True,
        compare_server_default=True,
        on_version_apply=_applied,
    )
    with context.begin_transaction():
        context.run_migrations()


def _applied(ctx: Any, step: Any, heads: Any, run_args: Any) -> None:
    _record(ctx, step)
    if (listener := context.config.attributes.get("applied")) is not None:
        listener(step)


def _record(ctx: Any, step: Any) -> None:
    table = revisions.SchemaRevision
    if step.is_upgrade:
        values = {"revision": step.up_revision_id, "min_reader": step.up_revision.module.min_reader}
        ctx.connection.execute(insert(table).values(values).on_conflict_do_nothing())
    elif step.down_revision_ids:  # after the first one is undone, the table is gone too
        ctx.connection.execute(delete(table).where(table.revision == step.up_revision_id))


async def _run_by_hand() -> None:
    url = os.environ.get("NEBULA_DIRECT_DATABASE_URL") or os.environ.get("NEBULA_DATABASE_URL")
    if not url:
        raise SystemExit("set NEBULA_DATABASE_URL")
    direct = engine.create_direct_engine(url, lock_timeout_s=LOCK_TIMEOUT_S)
    try:
        async with direct.connect() as conn:
            await conn.run_sync(run)
    finally:
        await direct.dispose()


if context.is_offline_mode():
    raise SystemExit("migrations are run on a database, not written out as SQL")
given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    asyncio.run(_run_by_hand())
