"""What the store's failures are called. The servers are real, and are stopped, killed, filled and closed."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from decimal import Decimal

import asyncpg
import psycopg
import pytest
from sqlalchemy import exc as sa_exc
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from app.settings import Settings
from app.store.devserver import DevPostgres
from app.store.engine import (
    StoreUnavailable,
    begin,
    connect,
    create_engine,
    database_now,
    engine_of,
    normalise,
)


@asynccontextmanager
async def engine_on(url: str, **options: object) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(url, **options)  # type: ignore[arg-type]
    try:
        yield engine
    finally:
        await engine.dispose()


async def ask(engine: AsyncEngine, statement: str = "select 1") -> object:
    async with begin(engine) as conn:
        return (await conn.execute(text(statement))).scalar()


async def within(engine: AsyncEngine, work: Callable[[AsyncConnection], Awaitable[None]]) -> None:
    async with begin(engine) as conn:
        await work(conn)


async def pid(engine: AsyncEngine) -> object:
    return await ask(engine, "select pg_backend_pid()")


async def test_no_server_is_unavailable() -> None:
    async with engine_on("postgresql://nebula@127.0.0.1:1/nebula") as engine:
        with pytest.raises(StoreUnavailable):
            await ask(engine)


async def test_a_server_that_says_nothing_is_told_of_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.store.engine.CONNECT_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with engine_on(f"postgresql://u:p@127.0.0.1:{silent.getsockname()[1]}/d") as engine:
            with pytest.raises(StoreUnavailable, match="no answer in time: does the server run"):
                await ask(engine)


async def test_a_stopped_server_is_unavailable_and_a_started_one_is_used_again(
    own_server: DevPostgres,
) -> None:
    async with engine_on(own_server.url) as engine:
        await ask(engine)
        own_server.stop()
        with pytest.raises(StoreUnavailable):
            await ask(engine)
        own_server.start()

        assert await ask(engine) == 1


@pytest.mark.field_case("FC-094")
async def test_a_restart_between_two_transactions_is_not_noticed(own_server: DevPostgres) -> None:
    """The pooled connections are dead, and are replaced before any statement runs."""
    async with engine_on(own_server.url, pool_size=3) as engine:
        await asyncio.gather(*(ask(engine, "select pg_sleep(0.05)") for _ in range(3)))
        await asyncio.to_thread(own_server.restart)

        assert await asyncio.gather(*(ask(engine) for _ in range(3))) == [1, 1, 1]


async def test_a_backend_ended_in_the_pool_is_replaced(database_url: str) -> None:
    async with engine_on(database_url, pool_size=2) as engine, engine_on(database_url) as other:
        before = await pid(engine)
        await ask(other, f"select pg_terminate_backend({before}, 5000)")

        after = await pid(engine)

    assert after != before


async def test_an_idle_connection_is_asked_whether_it_lives(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even when the driver has not heard of its end."""
    monkeypatch.setattr("app.store.engine.PING_AFTER_IDLE_S", 0.0)
    async with engine_on(database_url, pool_size=1) as engine:
        before = await pid(engine)
        with psycopg.connect(database_url.replace("+asyncpg", ""), autocommit=True) as other:
            other.execute(
                "select pg_terminate_backend(%s, 5000)", [before]
            )  # the loop does not run meanwhile

        assert await pid(engine) != before


async def test_a_server_killed_in_the_middle_is_unavailable(own_server: DevPostgres) -> None:
    async with engine_on(own_server.url) as engine:

        async def write(conn: AsyncConnection) -> None:
            await conn.execute(text("create table written ()"))
            own_server.kill()
            await conn.execute(text("select 1"))

        with pytest.raises(StoreUnavailable) as caught:
            await within(engine, write)
        own_server.start()

        assert not caught.value.uncertain
        assert await ask(engine, "select to_regclass('written')") is None


async def test_a_failed_commit_is_uncertain(own_server: DevPostgres) -> None:
    async with engine_on(own_server.url) as engine:

        async def write(conn: AsyncConnection) -> None:
            await conn.execute(text("select 1"))
            own_server.kill()

        with pytest.raises(StoreUnavailable) as caught:
            await within(engine, write)

        assert caught.value.uncertain


async def test_a_backend_ended_by_an_administrator_is_unavailable(database_url: str) -> None:
    async with engine_on(database_url) as engine, engine_on(database_url) as other:

        async def work(conn: AsyncConnection) -> None:
            own = (await conn.execute(text("select pg_backend_pid()"))).scalar_one()
            await ask(other, f"select pg_terminate_backend({own}, 5000)")
            await conn.execute(text("select 1"))

        with pytest.raises(StoreUnavailable):
            await within(engine, work)

        assert await ask(engine) == 1


@pytest.mark.field_case("FC-094")
async def test_a_read_only_server_is_unavailable_for_writes_alone(own_server: DevPostgres) -> None:
    with psycopg.connect(own_server.dsn, autocommit=True) as admin:
        admin.execute("create table it ()")
        admin.execute("alter system set default_transaction_read_only = on")
        admin.execute("select pg_reload_conf()")
    own_server.restart()
    async with engine_on(own_server.url) as engine:
        assert await ask(engine) == 1
        with pytest.raises(StoreUnavailable) as caught:
            await ask(engine, "insert into it default values")

    assert caught.value.sqlstate == "25006"


async def test_fc_094_connections_that_stay_on_a_demoted_server_are_given_up_and_not_kept(
    database_url: str,
) -> None:
    """It answers reads and refuses writes for as long as anybody asks it; new connections are led away."""
    async with engine_on(database_url, pool_size=3) as engine:
        async with begin(engine) as conn:
            await conn.execute(text("create table it (n integer)"))

        async def demote(_: int) -> object:
            async with connect(engine) as conn:
                await conn.execute(text("set session characteristics as transaction read only"))
                await conn.commit()
                await conn.execute(text("select pg_sleep(0.1)"))  # so that each of the pool is one of them
                return (await conn.execute(text("select pg_backend_pid()"))).scalar_one()

        pinned = set(await asyncio.gather(*map(demote, range(3))))
        for number in range(3):
            with pytest.raises(StoreUnavailable) as caught:
                await ask(engine, f"insert into it values ({number}) returning n")
            assert caught.value.sqlstate == "25006"

        assert len(pinned) == 3
        assert await ask(engine, "insert into it values (4) returning n") == 4
        assert await pid(engine) not in pinned


@pytest.mark.field_case("FC-097")
async def test_a_server_without_a_free_connection_is_unavailable(own_server: DevPostgres) -> None:
    with psycopg.connect(own_server.dsn, autocommit=True) as admin:
        admin.execute("create role few login connection limit 1")
    url = own_server.url.replace("nebula@", "few@")
    async with engine_on(url, pool_size=2) as engine, connect(engine) as conn:
        await conn.execute(text("select 1"))
        with pytest.raises(StoreUnavailable) as caught:
            await ask(engine)

    assert caught.value.sqlstate == "53300"


async def test_a_database_that_takes_no_connections_for_a_moment_is_unavailable(
    store_server: DevPostgres, database_url: str
) -> None:
    """While it is put back. The code is one that statements have too."""
    name = normalise(database_url).split("?")[0].rsplit("/", 1)[1]
    with psycopg.connect(store_server.dsn, autocommit=True) as admin:
        admin.execute(f'alter database "{name}" with allow_connections false')
        async with engine_on(database_url) as engine:
            with pytest.raises(StoreUnavailable) as caught:
                await ask(engine)
            admin.execute(f'alter database "{name}" with allow_connections true')
            assert await ask(engine) == 1

    assert caught.value.sqlstate == "55000"


async def test_a_driver_that_lost_its_place_under_a_killed_server_is_unavailable(database_url: str) -> None:
    """Seen once in a thousand seeds, as asyncpg's own error: not one that SQLAlchemy knows."""
    async with engine_on(database_url) as engine:
        with pytest.raises(StoreUnavailable):
            async with begin(engine):
                raise asyncpg.InternalClientError("cannot switch to state 11")
        assert await ask(engine) == 1


async def test_a_full_disk_is_unavailable(database_url: str) -> None:
    """The server's own code for it, raised by the server."""
    async with engine_on(database_url) as engine:
        with pytest.raises(StoreUnavailable) as caught:
            await ask(engine, "do $$ begin raise exception 'no space left' using errcode = '53100'; end $$")

    assert (caught.value.sqlstate, str(caught.value)) == ("53100", "no space left")


async def test_a_database_that_was_emptied_is_unavailable(empty_url: str) -> None:
    async with engine_on(empty_url) as engine:
        with pytest.raises(StoreUnavailable) as caught:
            await ask(engine, "select count(*) from rental")

    assert caught.value.sqlstate == "42P01"


@pytest.mark.parametrize(
    ("statement", "state"),
    [("select not_yet from installation", "42703"), ("select not_yet(1)", "42883")],
    ids=["column", "function"],
)
async def test_what_a_migration_has_still_to_make_is_unavailable(
    database_url: str, statement: str, state: str
) -> None:
    async with engine_on(database_url) as engine:
        with pytest.raises(StoreUnavailable) as caught:
            await ask(engine, statement)

    assert caught.value.sqlstate == state


async def test_a_table_that_changed_under_a_prepared_statement_is_unavailable_once(database_url: str) -> None:
    """As when another replica migrates, or the database is put back, under a connection that goes on."""
    async with engine_on(database_url, pool_size=1) as engine:

        async def look(conn: AsyncConnection) -> None:
            await conn.execute(text("select 1"))
            await conn.execute(text("select * from installation"))

        await within(engine, look)
        async with engine_on(database_url) as other:
            await within(
                other, lambda conn: conn.execute(text("alter table installation add column more int"))
            )
        with pytest.raises(StoreUnavailable):
            await within(engine, look)

        await within(engine, look)


async def test_no_free_connection_in_the_pool_is_unavailable(database_url: str) -> None:
    async with engine_on(database_url, pool_size=1, pool_timeout_s=0.05) as engine, connect(engine) as conn:
        await conn.execute(text("select 1"))
        with pytest.raises(StoreUnavailable):
            await ask(engine)


async def test_a_statement_that_takes_too_long_is_unavailable_and_the_next_is_not(database_url: str) -> None:
    async with engine_on(database_url, timeout_s=0.1) as engine:
        with pytest.raises(StoreUnavailable) as caught:
            await ask(engine, "select pg_sleep(60)")

        assert caught.value.sqlstate == "57014"
        assert await ask(engine) == 1


async def test_a_silent_server_is_unavailable(own_server: DevPostgres) -> None:
    """Nobody answers: our own time-out ends the wait, and the connection is thrown away."""
    async with engine_on(own_server.url, pool_size=1, pooler=True, timeout_s=0.1) as engine:
        before = await pid(engine)
        with pytest.raises(StoreUnavailable):
            await ask(engine, "select pg_sleep(60)")

        assert await pid(engine) != before


async def test_a_lock_that_is_not_to_be_had_is_unavailable(database_url: str) -> None:
    async with engine_on(database_url, lock_timeout_s=0.05) as engine, begin(engine) as holder:
        await holder.execute(text("lock table block"))
        with pytest.raises(StoreUnavailable) as caught:
            await ask(engine, "select count(*) from block")

    assert caught.value.sqlstate == "55P03"


@pytest.mark.parametrize(
    "state",
    ["40001", "40P01", "23505", "42601", "P0001"],
    ids=["serialize", "deadlock", "unique", "sql", "raise"],
)
async def test_what_concerns_the_statement_keeps_its_own_class(database_url: str, state: str) -> None:
    async with engine_on(database_url) as engine:
        with pytest.raises(sa_exc.DBAPIError) as caught:
            await ask(engine, f"do $$ begin raise exception 'x' using errcode = '{state}'; end $$")

    assert getattr(caught.value.orig, "sqlstate", None) == state


async def test_an_argument_of_the_wrong_type_is_a_mistake_and_not_an_outage(database_url: str) -> None:
    async with engine_on(database_url) as engine:

        async def work(conn: AsyncConnection) -> None:
            await conn.execute(text("select cast(:n as integer)"), {"n": "no number"})

        with pytest.raises(sa_exc.DBAPIError):
            await within(engine, work)


async def test_a_block_that_raises_is_rolled_back(database_url: str) -> None:
    async with engine_on(database_url) as engine:

        async def work(conn: AsyncConnection) -> None:
            await conn.execute(text("create table gone ()"))
            raise LookupError

        with pytest.raises(LookupError):
            await within(engine, work)

        assert await ask(engine, "select to_regclass('gone')") is None


async def test_a_read_is_not_committed(database_url: str) -> None:
    async with engine_on(database_url) as engine:
        async with connect(engine) as conn:
            await conn.execute(text("create table gone ()"))

        assert await ask(engine, "select to_regclass('gone')") is None


async def test_a_cancelled_block_gives_its_connection_back(database_url: str) -> None:
    async with engine_on(database_url, pool_size=1) as engine:
        inside = asyncio.Event()

        async def work() -> None:
            async with begin(engine) as conn:
                await conn.execute(text("create table gone ()"))
                inside.set()
                await conn.execute(text("select pg_sleep(60)"))

        task = asyncio.create_task(work())
        await asyncio.wait_for(inside.wait(), timeout=10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        assert await ask(engine, "select to_regclass('gone')") is None


async def test_money_and_times_survive_json(database_url: str) -> None:
    async with engine_on(database_url) as engine, begin(engine) as conn:
        from sqlalchemy import JSON, bindparam

        query = text("select cast(:v as jsonb)").bindparams(bindparam("v", type_=JSON))
        now = await database_now(conn)
        value = (await conn.execute(query, {"v": {"usd": Decimal("0.1"), "at": now}})).scalar_one()

    assert value == {"usd": "0.1", "at": now.isoformat()}
    assert now.utcoffset() is not None


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("postgres://u:p%40@h:5/d", "postgresql://u:p%40@h:5/d"),
        ("postgresql+asyncpg://u@/d?host=/run/pg", "postgresql://u@/d?host=%2Frun%2Fpg"),
        ("postgresql:///d", "postgresql:///d"),
        ("postgresql://h/d?ssl=true", "postgresql://h/d?sslmode=require"),
        (
            "postgresql://h/d?sslmode=verify-full&sslrootcert=/ca&channel_binding=require",
            "postgresql://h/d?sslmode=verify-full&sslrootcert=%2Fca",
        ),
        (
            "postgresql://h/d?application_name=mine&connect_timeout=3",
            "postgresql://h/d?application_name=mine",
        ),
    ],
    ids=["postgres", "socket", "local", "ssl", "libpq-only", "server-setting"],
)
def test_every_usual_form_of_a_url_is_understood(given: str, wanted: str) -> None:
    assert normalise(given) == wanted


def test_another_database_is_refused_without_showing_the_password() -> None:
    with pytest.raises(ValueError, match="begins with postgresql://") as caught:
        create_engine("mysql://u:geheim@h/d")
    assert "geheim" not in str(caught.value)


async def test_sslmode_is_honoured(store_server: DevPostgres) -> None:
    with DevPostgres(durable=False, tcp=True, prefer=store_server.binaries.source) as server:  # type: ignore[union-attr]
        async with engine_on(f"{server.url}?sslmode=prefer") as engine:
            assert await ask(engine) == 1
        async with engine_on(f"{server.url}?sslmode=require") as engine:
            with pytest.raises(StoreUnavailable):
                await ask(engine)
        async with engine_on(server.url.replace(server.password, "wrong")) as engine:
            with pytest.raises(StoreUnavailable) as caught:
                await ask(engine)
            assert caught.value.sqlstate == "28P01"
            assert server.password not in repr(engine)


@pytest.mark.field_case("FC-097")
async def test_sessions_are_named_and_bounded(database_url: str) -> None:
    options = Settings(database_url=database_url, database_pool=2, database_timeout_s=7)  # type: ignore[call-arg]
    engine = engine_of(options)
    async with connect(engine) as conn:
        query = text(
            "select name, setting from pg_settings where name in ('application_name', 'statement_timeout',"
            " 'lock_timeout', 'idle_in_transaction_session_timeout', 'jit')"
        )
        found = {row.name: row.setting for row in await conn.execute(query)}
    await engine.dispose()

    assert found == {
        "application_name": "nebula",
        "statement_timeout": "7000",
        "lock_timeout": "7000",
        "idle_in_transaction_session_timeout": "24000",
        "jit": "off",
    }


@pytest.mark.field_case("FC-098")
async def test_behind_a_pooler_nothing_stays_prepared(database_url: str) -> None:
    """And no start-up setting is sent that a pooler would refuse."""
    options = Settings(database_url=database_url, direct_database_url=database_url)  # type: ignore[call-arg]
    engine = engine_of(options)
    async with begin(engine) as conn:
        for number in range(3):
            await conn.execute(text("select cast(:n as integer)"), {"n": number})
        prepared = (await conn.execute(text("select count(*) from pg_prepared_statements"))).scalar_one()
        timeout = (await conn.execute(text("show statement_timeout"))).scalar_one()
    await engine.dispose()

    assert (prepared, timeout) == (0, "0")


def test_without_a_url_there_is_no_engine() -> None:
    with pytest.raises(ValueError, match="NEBULA_DATABASE_URL"):
        engine_of(Settings())  # type: ignore[call-arg]
