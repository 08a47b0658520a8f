"""Databases for tests: one server a session, one migrated template, a clone for each test that asks.

pytest-postgresql makes the template and the clones, on a server of ours: its own way to start one fails as
root. ``NEBULA_TEST_POSTGRES`` (``installed`` or ``embedded``) chooses the server, so that the store can be
tested on the oldest and the newest version to be had.
"""

import asyncio
import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from pytest_postgresql.executors import NoopExecutor
from pytest_postgresql.janitor import DatabaseJanitor

from app.store.devserver import DevPostgres, Source

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Base:
    """What pytest-postgresql wants to know of a server that runs already."""

    host: str
    port: int
    user: str
    password: str
    options: str = ""
    maintenance_dbname: str = DevPostgres.database
    template_dbname: str = "template1"


def server() -> DevPostgres:
    """Return the session's server, not started yet; it may lose data only if the machine crashes."""
    prefer = os.environ.get("NEBULA_TEST_POSTGRES") or None
    if prefer not in (None, "installed", "embedded"):
        raise ValueError(f"NEBULA_TEST_POSTGRES is {prefer!r}: installed or embedded")
    return DevPostgres(durable=False, prefer=cast("Source | None", prefer))


def base(postgres: DevPostgres) -> Base:
    return Base(postgres.host, postgres.port, postgres.user, postgres.password)


def migrate_template(*, host: str, port: int, user: str, dbname: str, password: str, **_: Any) -> None:
    """Bring the template to the newest revision, the way a starting replica does."""
    from app.store.migrate import migrate  # here, so that tests without a database never import it

    url = f"postgresql+asyncpg://{user}@/{dbname}?host={host}&port={port}"
    _in_a_thread_of_its_own(lambda: asyncio.run(migrate(url)))


@contextmanager
def clone(postgres: DevPostgres, template: NoopExecutor) -> Iterator[str]:
    """Yield the URL (postgresql+asyncpg) of a fresh copy of the template, dropped afterwards."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    name = f"test{worker}_{next(_numbers)}"
    about = base(postgres)
    with DatabaseJanitor(
        user=about.user,
        host=about.host,
        port=about.port,
        password=about.password,
        dbname=name,
        template_dbname=template.template_dbname,
        maintenance_dbname=about.maintenance_dbname,
    ):
        yield postgres.url_of(name)


def _in_a_thread_of_its_own(work: Any) -> None:
    """Run to the end in another thread: ``asyncio.run`` here would take the session's event loop away."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
