"""What a Postgres may become under its clients: read-only, full, out of connections; until a block ends.

None of these binds the server's own user, so that controllers come as an ordinary one: `let_in`, `url_of`.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import quote

from tests.chaos.world import World

ROLE = "ordinary"

_ROOM = "create or replace function room() returns trigger language plpgsql as $$ begin {} end $$"
_IS_FULL = "raise exception 'could not extend file: No space left on device' using errcode = '53100';"


async def let_in(world: World) -> None:
    """Make the ordinary user, who may do everything in the test's database."""
    await world.administer(
        f"do $$ begin create role {ROLE} login; exception when duplicate_object then null; end $$",
        f'grant create, connect on database "{world.database}" to {ROLE}',
    )
    await world.rows(f"grant all on schema public to {ROLE}")
    await world.rows(f"grant all on all tables in schema public to {ROLE}")
    await world.rows(f"grant all on all sequences in schema public to {ROLE}")


def url_of(world: World) -> str:
    """The ordinary user's way to it."""
    return f"postgresql://{ROLE}@/{world.database}?host={quote(world.postgres.host, safe='/')}"


async def hang_up(world: World) -> None:
    """End every connection to the database, as its server does when it changes what it is."""
    await world.administer(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        f" where datname = '{world.database}' and pid <> pg_backend_pid()"
    )


@asynccontextmanager
async def read_only(world: World) -> AsyncIterator[None]:
    """As after a failover to a server that only follows."""
    await world.administer(f'alter database "{world.database}" set default_transaction_read_only = on')
    await hang_up(world)
    try:
        yield
    finally:
        await world.administer(f'alter database "{world.database}" reset default_transaction_read_only')
        await hang_up(world)


@asynccontextmanager
async def without_connections(world: World) -> AsyncIterator[None]:
    await world.administer(f"alter role {ROLE} connection limit 0")
    await hang_up(world)
    try:
        yield
    finally:
        await world.administer(f"alter role {ROLE} connection limit -1")


@asynccontextmanager
async def full(world: World) -> AsyncIterator[None]:
    """Every write is refused by the server with its own code for a full disk; reads go on.

    Each table's trigger stays: a lock of its own for each of them, and no deadlock with whoever is at work.
    """
    await world.rows(_ROOM.format("return null;"))
    tables = await world.rows(
        "select quote_ident(tablename) as name from pg_tables where schemaname = 'public' and not exists ("
        " select 1 from pg_trigger where tgname = 'room' and tgrelid = quote_ident(tablename)::regclass)"
    )
    for row in tables:
        await world.rows(
            f"create trigger room before insert or update or delete on {row['name']}"
            " for each statement execute function room()"
        )
    await world.rows(_ROOM.format(_IS_FULL))
    try:
        yield
    finally:
        await world.rows(_ROOM.format("return null;"))
