"""Migrations: complete, one at a time, and kind to the replica of the version before."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psycopg
import pytest
from alembic import command
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.store import drift, migrate, revisions
from app.store.devserver import DevPostgres
from app.store.engine import StoreUnavailable, create_direct_engine
from app.store.migrate import SchemaTooNew
from app.store.revisions import Verdict
from app.store.tables import Base

HEAD = int(revisions.head())
ALL = [f"{number:04}" for number in range(1, HEAD + 1)]


@asynccontextmanager
async def direct(url: str) -> AsyncIterator[AsyncConnection]:
    engine = create_direct_engine(url, lock_timeout_s=5)
    async with engine.begin() as conn:
        yield conn
    await engine.dispose()


async def applied(url: str) -> list[str]:
    async with direct(url) as conn:
        return list((await conn.execute(text("select revision from schema_revision order by 1"))).scalars())


async def test_an_empty_database_is_brought_to_the_head(empty_url: str) -> None:
    before = await migrate.check(empty_url)

    revision = await migrate.migrate(empty_url)

    after = await migrate.check(empty_url)
    assert (before.revision, before.verdict) == (None, Verdict.BEHIND)
    assert revision == revisions.head() == after.revision
    assert after.verdict is Verdict.CURRENT
    assert await applied(empty_url) == ALL


async def test_migrating_again_changes_nothing(empty_url: str) -> None:
    await migrate.migrate(empty_url)
    said: list[str] = []

    assert await migrate.migrate(empty_url, report=said.append) == revisions.head()

    assert said == []


async def test_the_scripts_build_exactly_the_tables(store_server: DevPostgres) -> None:
    assert await drift.find(store_server.url) == []


async def test_a_forgotten_condition_of_an_index_is_drift(
    store_server: DevPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What alembic's own comparison does not see is seen."""
    [index] = [i for i in Base.metadata.tables["rental"].indexes if i.name == "rental_not_ended_idx"]
    monkeypatch.setitem(index.dialect_options["postgresql"], "where", text("state <> 'open'"))

    found = await drift.find(store_server.url)

    assert [line.split(":")[0] for line in found if "rental_not_ended_idx" in line] == [
        "only in the migrations",
        "only in the tables",
    ]


async def test_every_table_has_a_comment(database_url: str) -> None:
    async with direct(database_url) as conn:
        bare = await conn.execute(
            text(
                "select relname from pg_class where relnamespace = 'public'::regnamespace and relkind = 'r'"
                " and obj_description(oid, 'pg_class') is null"
            )
        )
    assert list(bare.scalars()) == ["alembic_version"]


async def test_views_of_an_extension_are_left_alone(empty_url: str) -> None:
    """A database may well count its statements; what that extension brings is not ours to drop."""
    async with direct(empty_url) as conn:
        there = text("select 1 from pg_available_extensions where name = 'pg_stat_statements'")
        if (await conn.execute(there)).first() is None:
            pytest.skip("this Postgres comes without its contributed extensions")
        await conn.execute(text("create extension pg_stat_statements"))

    await migrate.migrate(empty_url)

    async with direct(empty_url) as conn:
        kept = await conn.execute(text("select to_regclass('pg_stat_statements_info') is not null"))
        assert kept.scalar_one()


async def test_attempts_are_numbered_by_a_sequence(database_url: str) -> None:
    async with direct(database_url) as conn:
        first = (await conn.execute(text("select nextval('attempt_sequence')"))).scalar_one()
        second = (await conn.execute(text("select nextval('attempt_sequence')"))).scalar_one()
    assert second == first + 1


@pytest.mark.field_case("FC-096")
async def test_of_two_migrators_one_applies_and_both_succeed(empty_url: str) -> None:
    program = (
        "import asyncio, sys; from app.store.migrate import migrate;"
        "print(asyncio.run(migrate(sys.argv[1], poll_s=0.05, report=lambda line: print('did', line))))"
    )
    processes = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", program, empty_url, stdout=subprocess.PIPE)
        for _ in range(3)
    ]

    outputs = [(await process.communicate())[0].decode().splitlines() for process in processes]

    assert [process.returncode for process in processes] == [0, 0, 0]
    assert [lines[-1] for lines in outputs] == [revisions.head()] * 3
    steps = [line for lines in outputs for line in lines if line.startswith("did 0001")]
    assert len(steps) == 1
    assert await applied(empty_url) == ALL


async def test_a_migrator_waits_for_another_and_says_so(empty_url: str) -> None:
    async with direct(empty_url) as other:
        await other.execute(text(f"select pg_advisory_lock({migrate.LOCK})"))
        waits = asyncio.Event()
        said: list[str] = []

        def report(line: str) -> None:
            said.append(line)
            waits.set()

        task = asyncio.create_task(migrate.migrate(empty_url, poll_s=0.02, report=report))
        await asyncio.wait_for(waits.wait(), timeout=20)
        assert said == ["waiting for another migrator"]
        assert (await migrate.check(empty_url)).revision is None
        await other.execute(text(f"select pg_advisory_unlock({migrate.LOCK})"))

    assert await asyncio.wait_for(task, timeout=30) == revisions.head()


async def test_a_migrator_does_not_wait_for_ever(empty_url: str) -> None:
    async with direct(empty_url) as other:
        await other.execute(text(f"select pg_advisory_lock({migrate.LOCK})"))
        with pytest.raises(StoreUnavailable, match="another migrator"):
            await migrate.migrate(empty_url, wait_s=0.1, poll_s=0.02)


@pytest.mark.field_case("FC-096")
async def test_a_lock_held_for_too_long_leaves_nothing_behind(empty_url: str) -> None:
    with psycopg.connect(empty_url.replace("+asyncpg", "")) as other:
        other.execute("create table run ()")  # not committed: whoever makes one too has to wait
        with pytest.raises(StoreUnavailable) as caught:
            await migrate.migrate(empty_url, lock_timeout_s=0.2)
        other.rollback()

    assert caught.value.sqlstate == "55P03"
    async with direct(empty_url) as conn:
        tables = await conn.execute(text("select tablename from pg_tables where schemaname = 'public'"))
        assert set(tables.scalars()) <= {"alembic_version"}


async def test_fc_096_a_deadlock_with_a_replica_at_work_only_delays_a_migration(database_url: str) -> None:
    """The replica reads one table and then the other; the migration changes them the other way round."""
    engine = create_direct_engine(database_url, lock_timeout_s=5)
    async with engine.connect() as conn:
        await conn.run_sync(lambda sync: command.downgrade(migrate.config_for(sync), "0002"))
    await engine.dispose()
    said: list[str] = []
    changing = text(
        "select 1 from pg_locks where relation = 'claim'::regclass"
        " and mode = 'AccessExclusiveLock' and granted"
    )

    async with direct(database_url) as replica, direct(database_url) as looking:
        await replica.execute(text("set local deadlock_timeout = '60s'"))  # so that the other one is ended
        await replica.execute(text("set local lock_timeout = 0"))
        await replica.execute(text("select count(*) from run"))
        migrating = asyncio.create_task(migrate.migrate(database_url, report=said.append))
        async with asyncio.timeout(30):
            while (await looking.execute(changing)).first() is None:
                await asyncio.sleep(0.02)
        await replica.execute(text("select count(*) from claim"))

    assert await asyncio.wait_for(migrating, timeout=60) == revisions.head()
    assert "ended by a deadlock with a replica at work: tried again" in said
    assert await applied(database_url) == ALL


@pytest.mark.parametrize(
    ("min_readers", "verdict"),
    [
        ([HEAD], Verdict.NEWER),
        ([HEAD + 1], Verdict.TOO_NEW),
        ([HEAD, HEAD], Verdict.NEWER),
        ([HEAD, HEAD + 1], Verdict.TOO_NEW),
        ([HEAD + 1, HEAD], Verdict.TOO_NEW),
    ],
    ids=["allowed", "refused", "both-allow", "later-refuses", "earlier-refuses"],
)
@pytest.mark.field_case("FC-096")
async def test_a_newer_schema_is_accepted_while_every_newer_revision_allows_this_code(
    database_url: str, min_readers: list[int], verdict: Verdict
) -> None:
    async with direct(database_url) as conn:
        for number, reader in enumerate(min_readers, start=HEAD + 1):
            values = {"revision": f"{number:04}", "reader": f"{reader:04}"}
            insert = text("insert into schema_revision (revision, min_reader) values (:revision, :reader)")
            await conn.execute(insert, values)
        newest = f"{len(min_readers) + HEAD:04}"
        await conn.execute(text("update alembic_version set version_num = :v"), {"v": newest})

    state = await migrate.check(database_url)

    assert (state.revision, state.verdict) == (newest, verdict)
    if verdict is Verdict.NEWER:
        assert await migrate.migrate(database_url) == newest
    else:
        with pytest.raises(SchemaTooNew, match="run the newer version"):
            await migrate.migrate(database_url)


async def test_the_first_revision_can_be_undone_by_hand(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = create_direct_engine(database_url, lock_timeout_s=5)
    async with engine.connect() as conn:
        await conn.run_sync(lambda sync: command.downgrade(migrate.config_for(sync), "base"))
    await engine.dispose()

    async with direct(database_url) as conn:
        left = await conn.execute(
            text("select relname from pg_class where relnamespace = 'public'::regnamespace")
        )
        assert {name for name in left.scalars() if not name.startswith("alembic")} == set()
    assert await migrate.migrate(database_url) == revisions.head()


async def test_a_downgrade_leaves_no_budget_without_its_labels_and_no_void_prepayment(
    database_url: str,
) -> None:
    engine = create_direct_engine(database_url, lock_timeout_s=5)

    async def back() -> None:
        async with engine.connect() as conn:
            await conn.run_sync(lambda sync: command.downgrade(migrate.config_for(sync), "0010"))

    values = """
        insert into label_set (id, hash, namespace, workload_kind, workload_name, team, cost_center, pool,
            provider, account, account_id, region, sku, tier, accelerator, accelerator_count)
            overriding system value values (1, 'x', '', '', '', '', '', '', 'p', 'a', '', '', '', '', '', 0);
        insert into commitment (provider, account, sku, tier, amount_usd, usd_per_hour, valid, label_set_id,
            set_by, reason, voided_at, reversed_at)
            values ('p', 'a', '*', '*', 1, 1, '[2026-03-01, 2026-04-01)', 1, '', '', now(), now());
        insert into budget (name, labels, amount_usd, period, thresholds, action, label_action, look_ahead_s,
            set_by) values ('all', '{}', 1, 'day', '{}', 'Drain', null, 0, ''),
            ('some', '{"a": "b"}', 1, 'day', '{}', 'Alert', 'Drain', 0, '')
    """
    async with direct(database_url) as conn:
        for statement in values.split(";"):
            await conn.exec_driver_sql(statement)
    with pytest.raises(RuntimeError, match="a prepayment is void"):
        await back()
    async with direct(database_url) as conn:
        await conn.execute(text("delete from commitment"))
    await back()
    await engine.dispose()

    async with direct(database_url) as conn:
        assert list((await conn.execute(text("select name from budget"))).scalars()) == ["all"]


async def test_developers_upgrade_with_the_ini_file(empty_url: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "alembic", "upgrade", "head", env={"NEBULA_DATABASE_URL": empty_url}
    )

    assert await process.wait() == 0
    assert (await migrate.check(empty_url)).verdict is Verdict.CURRENT


def test_the_drift_check_is_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "app.store.migrate", "--check"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "migrations: 0 differences from app/store/tables.py\n")


def test_a_revision_is_named_after_its_number_and_follows_the_one_before() -> None:
    from alembic.script import ScriptDirectory

    script = ScriptDirectory.from_config(migrate.config_for(None))  # type: ignore[arg-type]
    found = list(reversed(list(script.walk_revisions())))
    numbers = [revision.revision for revision in found]
    assert numbers == [f"{n:04}" for n in range(1, len(found) + 1)]
    assert numbers[-1] == revisions.head()
    for revision in found:
        assert revision.path.rpartition("/")[2].startswith(f"{revision.revision}_")
        assert revision.module.min_reader <= revision.revision
