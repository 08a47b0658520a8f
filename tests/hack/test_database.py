"""The database fixtures: each test has a migrated database of its own."""

import asyncpg
import pytest
from pytest_postgresql.executors import NoopExecutor

from app.store.devserver import DevPostgres
from tests.support import postgres


@pytest.fixture
def another(postgres_server: DevPostgres, database_template: NoopExecutor):
    with postgres.clone(postgres_server, database_template) as url:
        yield url


def driver(url: str) -> str:
    return url.replace("+asyncpg", "")


async def test_two_databases_share_the_schema_and_no_row(database_url: str, another: str):
    one, two = await asyncpg.connect(driver(database_url)), await asyncpg.connect(driver(another))
    tables = (
        "select array_agg(table_name::text order by 1) from information_schema.tables "
        "where table_schema = 'public'"
    )
    try:
        await one.execute("create table only_here (n int)")
        mine, others = await one.fetchval(tables), await two.fetchval(tables)
    finally:
        await one.close()
        await two.close()

    assert "rental" in others
    assert set(mine) - set(others) == {"only_here"}


async def test_a_database_is_dropped_while_somebody_is_still_connected(
    postgres_server: DevPostgres, database_template: NoopExecutor
):
    with postgres.clone(postgres_server, database_template) as url:
        left_open = await asyncpg.connect(driver(url))

    with pytest.raises(asyncpg.InvalidCatalogNameError):
        await asyncpg.connect(driver(url))
    left_open.terminate()
