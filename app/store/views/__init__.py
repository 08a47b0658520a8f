"""The views that reports and dashboards read, one SQL file each, and how they get into a database.

They are made after the last migration and made anew whenever a file here differs from what the database has,
so that a view may use any column of its own version. A view holds no data: dropping it loses nothing.
"""

import hashlib
from functools import cache
from importlib import resources

from sqlalchemy import Connection, event, text

from app.store import ledger_tables as _ledger_tables  # noqa: F401 (they come first)
from app.store.tables import Base

_VERSION = "store_views_version"


@cache
def files() -> tuple[tuple[str, str], ...]:
    """Name and SQL of each file, in the order in which they are made."""
    folder = resources.files(__name__)
    found = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".sql"))
    return tuple((name, folder.joinpath(name).read_text()) for name in found)


@cache
def version() -> str:
    """Of all files together."""
    return hashlib.sha256("".join(name + sql for name, sql in files()).encode()).hexdigest()[:16]


def is_current(conn: Connection) -> bool:
    """Whether the database has these very views."""
    found = conn.execute(text("select to_regproc(:name) is not null"), {"name": _VERSION}).scalar_one()
    return bool(found) and conn.execute(text(f"select {_VERSION}()")).scalar_one() == version()


def install(conn: Connection) -> None:
    """Drop what is there of us, and make it all; in the caller's transaction. Grants to others are kept."""
    granted = list(conn.execute(_GRANTS))
    drop(conn)
    for _, sql in files():
        for statement in _statements(sql):
            conn.exec_driver_sql(statement)
    conn.exec_driver_sql(
        f"create function {_VERSION}() returns text language sql immutable as $$ select '{version()}' $$"
    )
    for row in granted:
        if conn.execute(text("select to_regclass(:name) is not null"), {"name": row.name}).scalar_one():
            conn.exec_driver_sql(f"grant select on {row.name} to {row.grantee}")


def drop(conn: Connection) -> None:
    """Drop them all; a downgrade begins with it, since tables cannot go while views read them."""
    for kind, name in conn.execute(_OURS).all():
        conn.exec_driver_sql(f"drop {kind} if exists {name} cascade")


def names() -> tuple[str, ...]:
    """Every view, in the order in which they are made."""
    lines = [line for _, sql in files() for line in sql.splitlines()]
    return tuple(line.split()[2] for line in lines if line.startswith("create view "))


class NoSuchRole(ValueError):
    """There is no role of that name in the database."""


def let_read(conn: Connection, role: str) -> None:
    """Let a role read the views, and so the functions over them, and nothing else of ours.

    Raises:
        NoSuchRole: making roles is not ours to do.
    """
    query = text("select quote_ident(rolname) from pg_roles where rolname = :role")
    quoted = conn.execute(query, {"role": role}).scalar_one_or_none()
    if quoted is None:
        raise NoSuchRole(role)
    schema = conn.execute(text("select quote_ident(current_schema())")).scalar_one()
    conn.exec_driver_sql(f"grant usage on schema {schema} to {quoted}")
    conn.exec_driver_sql(f"grant select on {', '.join(names())} to {quoted}")


_GRANTS = text("""
    select distinct format('%I', c.relname) as name, quote_ident(r.rolname) as grantee
    from pg_class c, aclexplode(c.relacl) a join pg_roles r on r.oid = a.grantee
    where c.relkind = 'v' and c.relnamespace = current_schema()::regnamespace and a.privilege_type = 'SELECT'
        and a.grantee <> c.relowner
""")
# Functions of the views' files are marked so in their comment. What an extension has brought (such as
# pg_stat_statements) is not ours, and cannot be dropped either.
_OURS = text("""
    select 'view' as kind, format('%I', relname) as name from pg_class
    where relkind = 'v' and relnamespace = current_schema()::regnamespace
        and not exists (select from pg_depend d where d.objid = pg_class.oid and d.deptype = 'e')
    union all
    select 'function', p.oid::regprocedure::text from pg_proc p
    where p.pronamespace = current_schema()::regnamespace
        and (p.proname = 'store_views_version' or obj_description(p.oid, 'pg_proc') like 'Report: %')
""")


def _statements(sql: str) -> list[str]:
    """The statements of a file: each ends with a semicolon at a line's end, outside of a body in $$."""
    found, lines, inside = [], [], False
    for line in sql.splitlines():
        lines.append(line)
        inside ^= line.count("$$") % 2 == 1
        if line.rstrip().endswith(";") and not inside:
            found.append("\n".join(lines))
            lines = []
    if any(line.strip() and not line.strip().startswith("--") for line in lines):
        raise ValueError(f"a statement does not end: {lines[-1]!r}")
    return found


@event.listens_for(Base.metadata, "after_create")
def _with_the_tables(_target: object, connection: Connection, **_: object) -> None:
    install(connection)
