"""The store's tests run on each kind of server that this machine has: the installed and the embedded one."""

import itertools
from collections.abc import AsyncIterator, Iterator

import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from app.store.devbinaries import Source, embedded, installed
from app.store.devserver import DevPostgres
from app.store.engine import create_engine

_numbers = itertools.count(1)


def _sources() -> list[Source]:
    found: list[Source] = []
    if installed(account=None):
        found.append("installed")
    if embedded() is not None:
        found.append("embedded")
    return found


SOURCES = _sources()
# One server in every run, the other with the slow tests: what differs between versions rarely breaks.
SERVERS = [*SOURCES[:1], *(pytest.param(source, marks=pytest.mark.slow) for source in SOURCES[1:])]


@pytest.fixture(scope="session", params=SERVERS)
def store_server(request: pytest.FixtureRequest) -> Iterator[DevPostgres]:
    """A server of each kind, shared by the tests that only use databases on it."""
    with DevPostgres(durable=False, prefer=request.param) as server:
        yield server


@pytest.fixture(params=SERVERS)
def own_server(request: pytest.FixtureRequest) -> Iterator[DevPostgres]:
    """A server that the test may stop, kill or reconfigure."""
    with DevPostgres(durable=False, prefer=request.param) as server:
        yield server


@pytest.fixture
def empty_url(store_server: DevPostgres) -> Iterator[str]:
    """An empty database of the test's own."""
    name = f"empty_{next(_numbers)}"
    with psycopg.connect(store_server.dsn, autocommit=True) as admin:
        admin.execute(f"create database {name}")
        yield store_server.url_of(name)
        admin.execute(f"drop database {name} with (force)")


@pytest.fixture(scope="session")
def store_template(store_server: DevPostgres) -> str:
    """A migrated database to copy."""
    from tests.support.postgres import migrate_template

    with psycopg.connect(store_server.dsn, autocommit=True) as admin:
        admin.execute("create database store_template")
    migrate_template(
        host=store_server.host,
        port=store_server.port,
        user=store_server.user,
        dbname="store_template",
        password=store_server.password,
    )
    return "store_template"


@pytest.fixture
def database_url(store_server: DevPostgres, store_template: str) -> Iterator[str]:
    """A migrated database of the test's own, on each kind of server."""
    name = f"store_{next(_numbers)}"
    with psycopg.connect(store_server.dsn, autocommit=True) as admin:
        admin.execute(f"create database {name} template {store_template}")
        yield store_server.url_of(name)
        admin.execute(f"drop database {name} with (force)")


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    made = create_engine(database_url)
    yield made
    await made.dispose()
