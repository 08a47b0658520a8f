"""The door to Postgres: how a connection is made, and what its failures are called.

Everybody opens transactions with `begin` (`single` for one statement, `connect` for reads) and catches
`StoreUnavailable` only: it stands for every failure that says nothing about the statement, namely no server,
no connection to be had, a read-only or full server, a schema that is being migrated, a time-out. What remains
(a violated constraint, a serialization failure, wrong SQL) keeps SQLAlchemy's own class, because the caller
or the code must do something about it.

Times of the store are the database's; durations here are seconds.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from decimal import Decimal
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import asyncpg
import orjson
from sqlalchemy import URL, Pool, event, func, select
from sqlalchemy import exc as sa_exc
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

APPLICATION_NAME = "nebula"
CONNECT_TIMEOUT_S = 5.0
POOL_TIMEOUT_S = 15.0  # 64 renters of a burst share 10 connections: 5 s cut some off after their mark
RECYCLE_S = 1800
PING_AFTER_IDLE_S = 1.0  # a connection used more recently is trusted: a ping costs half a query
SERVER_FIRST_S = 1.0  # the server's time-out comes this much before ours, so that its answer is heard

# Classes and codes of SQLSTATE that are about the server or the way to it, not about the statement.
_UNAVAILABLE_CLASSES = frozenset(
    {
        "08",  # connection exceptions
        "28",  # not let in: a password that was just changed
        "53",  # no memory, disk or connections left
        "57",  # shut down, starting up, cancelled, statement time-out
        "58",  # the server's own input and output
    }
)
_UNAVAILABLE_STATES = frozenset(
    {
        "25006",  # read-only: a standby, or a server that was set so
        "25P03",  # idle in the transaction for too long
        "25P04",  # the transaction took too long (17 and later)
        "3D000",  # the database is not there
        # What a statement names is not there: not migrated yet, in the middle of it, older, or emptied.
        "42703",  # a column
        "42883",  # a function
        "42P01",  # a table
        "55P03",  # a lock was not to be had in time
    }
)
# libpq reads these in a URL and asyncpg does not: it would send them on as settings of the server.
_LIBPQ_ONLY = frozenset(
    {
        "channel_binding",
        "connect_timeout",
        "fallback_application_name",
        "gssencmode",
        "keepalives",
        "keepalives_count",
        "keepalives_idle",
        "keepalives_interval",
        "require_auth",
        "sslcompression",
        "sslsni",
        "tcp_user_timeout",
    }
)


class StoreUnavailable(Exception):
    """The store cannot be used now; try again later. ``sqlstate`` is the server's code, if it answered.

    After ``uncertain`` (the commit itself failed) the transaction may have taken effect or not: read before
    acting on either. Otherwise nothing of it was written.
    """

    def __init__(self, message: str, *, sqlstate: str | None = None, uncertain: bool = False) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate
        self.uncertain = uncertain


class DatabaseOptions(Protocol):
    """The part of `app.settings.Settings` that concerns the store."""

    @property
    def database_url(self) -> str | None: ...
    @property
    def direct_database_url(self) -> str | None: ...
    @property
    def database_pool(self) -> int: ...
    @property
    def database_timeout_s(self) -> float: ...


def engine_of(options: DatabaseOptions) -> AsyncEngine:
    """The engine of a replica. A direct URL beside the usual one means that a pooler stands there.

    Raises:
        ValueError: there is no database URL, or it is none of Postgres.
    """
    if options.database_url is None:
        raise ValueError("no database: give --database-url or NEBULA_DATABASE_URL")
    return create_engine(
        options.database_url,
        pool_size=options.database_pool,
        timeout_s=options.database_timeout_s,
        pooler=options.direct_database_url is not None,
    )


def create_engine(
    url: str,
    *,
    pool_size: int = 10,
    timeout_s: float = 10.0,
    lock_timeout_s: float | None = None,
    pool_timeout_s: float = POOL_TIMEOUT_S,
    pooler: bool = False,
    application_name: str = APPLICATION_NAME,
) -> AsyncEngine:
    """An engine on ``url``; nothing is connected yet.

    ``timeout_s`` bounds one statement, ``lock_timeout_s`` (default: the same) one wait for a lock,
    ``pool_timeout_s`` the wait for a free connection. ``pooler``: a transaction pooler stands between; then
    no statement is kept prepared, and the time-outs are ours alone, because it refuses start-up settings.

    Raises:
        ValueError: ``url`` is none of Postgres.
    """
    dsn = normalise(url)
    settings = {"application_name": application_name}
    if not pooler:
        settings |= {
            "statement_timeout": _ms(timeout_s),
            "lock_timeout": _ms(timeout_s if lock_timeout_s is None else lock_timeout_s),
            "idle_in_transaction_session_timeout": _ms(2 * timeout_s + 10),
            "jit": "off",
        }
    engine = _engine(
        dsn,
        settings=settings,
        command_timeout_s=timeout_s + SERVER_FIRST_S,
        extra={"statement_cache_size": 0} if pooler else {},
        pool={
            "pool_size": pool_size,
            "max_overflow": 0,
            "pool_timeout": pool_timeout_s,
            "pool_recycle": RECYCLE_S,
        },
    )
    _replace_stale_connections(engine)
    return engine


def create_direct_engine(
    url: str, *, lock_timeout_s: float, application_name: str = f"{APPLICATION_NAME}-migrate"
) -> AsyncEngine:
    """An engine for migrations: no pool, statements may take as long as they need, waits for locks may not.

    Raises:
        ValueError: ``url`` is none of Postgres.
    """
    settings = {
        "application_name": application_name,
        "statement_timeout": "0",
        "lock_timeout": _ms(lock_timeout_s),
        "jit": "off",
    }
    pool: dict[str, Any] = {"poolclass": NullPool}
    return _engine(normalise(url), settings=settings, command_timeout_s=None, extra={}, pool=pool)


@asynccontextmanager
async def connect(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """A connection without a commit: for reads. What the block wrote is rolled back.

    Raises:
        StoreUnavailable: see there; also for what the block itself runs into.
    """
    conn = await _open(engine)
    try:
        with _translated():
            yield conn
    except StoreUnavailable:
        await _drop(conn)
        raise
    except BaseException:
        with suppress(Exception):  # what happened first is what the caller hears of
            await _give_back(conn)
        raise
    with _translated():
        await _give_back(conn)


@asynccontextmanager
async def begin(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """A transaction: committed when the block ends, rolled back when it raises.

    Raises:
        StoreUnavailable: see there; ``uncertain`` if it was the commit that failed.
    """
    async with connect(engine) as conn:
        yield conn
        with _translated(uncertain=True):
            await conn.commit()


@asynccontextmanager
async def single(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """A connection whose every statement is a transaction of its own: for work that is one statement.

    Begin and commit are round trips of their own: without them a statement takes 0.38 ms of our CPU, not
    0.56.

    Raises:
        StoreUnavailable: see there; ``uncertain`` if the connection broke while a statement was on its way.
    """
    async with connect(engine) as conn:
        await conn.execution_options(isolation_level="AUTOCOMMIT")
        with _translated(uncertain=True):
            yield conn


async def database_now(conn: AsyncConnection) -> datetime:
    """The database's clock at this moment (not at the start of the transaction), aware, UTC."""
    now: datetime = (await conn.execute(select(func.clock_timestamp()))).scalar_one()
    return now


def normalise(url: str) -> str:
    """A URL as SQLAlchemy, libpq or a cloud's console writes it, as asyncpg reads it.

    Raises:
        ValueError: it is none of Postgres. The message does not repeat the URL, which holds a password.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("postgresql", "postgres", "postgresql+asyncpg"):
        raise ValueError("a database URL begins with postgresql://")
    query = []
    for key, value in parse_qsl(parts.query, keep_blank_values=True):
        if key == "ssl":  # what SQLAlchemy's asyncpg dialect calls it
            key, value = "sslmode", {"true": "require", "1": "require"}.get(value.lower(), value)
        if key not in _LIBPQ_ONLY:
            query.append((key, value))
    # By hand, because urlunsplit drops the slashes of a URL without a host (a Unix socket in the query).
    tail = urlunsplit(("", "", parts.path, urlencode(query), ""))
    return f"postgresql://{parts.netloc}{tail}"


def _engine(
    dsn: str,
    *,
    settings: dict[str, str],
    command_timeout_s: float | None,
    extra: dict[str, Any],
    pool: dict[str, Any],
) -> AsyncEngine:
    async def connection() -> Any:
        return await asyncpg.connect(
            dsn,
            timeout=CONNECT_TIMEOUT_S,
            command_timeout=command_timeout_s,
            server_settings=settings,
            **extra,
        )

    parts = urlsplit(dsn)
    shown = URL.create("postgresql+asyncpg", host=parts.hostname, database=parts.path.lstrip("/") or None)
    return create_async_engine(
        shown,  # for messages only: asyncpg gets the whole, password included, from `connection`
        async_creator=connection,
        json_serializer=_to_json,
        json_deserializer=orjson.loads,
        hide_parameters=True,  # errors are logged, and parameters may be anything
        **pool,
    )


def _replace_stale_connections(engine: AsyncEngine) -> None:
    """Find out at checkout that a pooled connection is dead, and take a fresh one, once.

    The driver knows of most (the server closed them); one that has been idle is asked. So the retry happens
    before any statement of the caller has run.
    """
    pool: Pool = engine.sync_engine.pool

    @event.listens_for(pool, "checkin")
    def checked_in(dbapi_connection: Any, record: Any) -> None:
        record.info["idle_since"] = time.monotonic()

    @event.listens_for(pool, "checkout")
    def checked_out(dbapi_connection: Any, record: Any, proxy: Any) -> None:
        idle_since = record.info.pop("idle_since", None)
        if idle_since is None:
            return  # fresh
        if dbapi_connection.driver_connection.is_closed():
            raise sa_exc.DisconnectionError("closed while it was in the pool")
        if time.monotonic() - idle_since < PING_AFTER_IDLE_S:
            return
        try:
            engine.dialect.do_ping(dbapi_connection)
        except Exception as error:
            raise sa_exc.DisconnectionError("does not answer any more") from error


async def _open(engine: AsyncEngine) -> AsyncConnection:
    conn = engine.connect()
    try:
        return await conn.start()
    except (OSError, sa_exc.InvalidRequestError, asyncpg.exceptions.TargetServerAttributeNotMatched) as error:
        # asyncpg raises the operating system's own errors while it connects, and the last when no host of
        # several is writable. The pool raises the middle one after some dead connections in a row.
        raise StoreUnavailable(_text(error)) from error
    except Exception as error:
        # Whatever a server says while it is connected to, it says before any statement: a database that takes
        # no connections for the moment it is put back has a code (55000) that statements have as well.
        found, state = _unavailable(error, uncertain=False), _sqlstate(error)
        if found is None and state is None:
            raise
        raise found or StoreUnavailable(_text(error), sqlstate=state) from error


async def _give_back(conn: AsyncConnection) -> None:
    """Roll back what is open and return the connection to the pool, even if we are cancelled meanwhile."""
    await asyncio.shield(asyncio.ensure_future(conn.close()))


async def _drop(conn: AsyncConnection) -> None:
    """Throw the connection away: a server that was silent once is not asked for a rollback."""
    with suppress(Exception):
        await conn.invalidate()
    with suppress(Exception):
        await _give_back(conn)


class _translated:
    """Turns what is raised inside into `StoreUnavailable` where it is that, cause kept."""

    def __init__(self, *, uncertain: bool = False) -> None:
        self._uncertain = uncertain

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, StoreUnavailable):
            found = _unavailable(error, uncertain=self._uncertain)
            if found is not None:
                raise found from error


def _unavailable(error: Exception, *, uncertain: bool) -> StoreUnavailable | None:
    if _caused_by(error, asyncpg.exceptions.InvalidCachedStatementError):
        # A table changed under a prepared statement; the driver has dropped it, the next try prepares anew.
        return StoreUnavailable(_text(error))
    if _caused_by(error, asyncpg.exceptions.InternalClientError):
        # The driver lost its place in the protocol: the server was killed between two of its messages.
        return StoreUnavailable(_text(error), uncertain=uncertain)
    state = _sqlstate(error)
    if state is not None:
        if state[:2] not in _UNAVAILABLE_CLASSES and state not in _UNAVAILABLE_STATES:
            return None
        # A refusal that the server put into words is no doubt about the commit, unless it was cut short.
        return StoreUnavailable(
            _text(error), sqlstate=state, uncertain=uncertain and state[:2] in ("08", "57", "58")
        )
    if isinstance(error, sa_exc.DBAPIError):
        lost = error.connection_invalidated
        cause: BaseException | None = error.orig
        while cause is not None and not lost:
            lost = isinstance(cause, OSError | TimeoutError)
            cause = cause.__cause__
        return StoreUnavailable(_text(error), uncertain=uncertain) if lost else None
    if isinstance(error, sa_exc.TimeoutError | TimeoutError | ConnectionError):
        return StoreUnavailable(_text(error), uncertain=uncertain)
    return None


def _caused_by(error: BaseException, kind: type[Exception]) -> bool:
    at: BaseException | None = error
    while at is not None and not isinstance(at, kind):
        at = at.__cause__
    return at is not None


def _sqlstate(error: BaseException) -> str | None:
    """The server's code, from the error or from what it was made of."""
    at: BaseException | None = error
    while at is not None:
        state = getattr(at, "sqlstate", None)
        if isinstance(state, str):
            return state
        at = at.orig if isinstance(at, sa_exc.DBAPIError) and at.orig is not None else at.__cause__
    return None


def _text(error: BaseException) -> str:
    """One line, without the statement and without SQLAlchemy's link to its manual."""
    inner = error.orig if isinstance(error, sa_exc.DBAPIError) and error.orig is not None else error
    words = str(inner).strip()
    if not words and isinstance(inner, TimeoutError):
        words = "no answer in time: does the server run, and is the way to it open?"
    return (words or type(inner).__name__).splitlines()[0]


def _to_json(value: Any) -> str:
    return orjson.dumps(value, default=_plain).decode()


def _plain(value: Any) -> str:
    if isinstance(value, Decimal):
        return str(value)  # money stays exact: a JSON number may become a float on the way
    raise TypeError(f"{type(value).__name__} does not go into a JSON column")


def _ms(seconds: float) -> str:
    return str(max(1, round(seconds * 1000)))
