"""Do the migrations build what the tables say? Two databases are made, one by each, and compared.

Alembic's own comparison names differences as operations, but is blind to check constraints, to the conditions
of indexes and to sequences. So the catalogue is read as well: every object of both, as the server words it.
"""

import asyncio
from typing import Any
from urllib.parse import urlsplit

from sqlalchemy import Connection, text

from app.store import engine, migrate, outputs, sweep_tables, views
from app.store.tables import Base

TABLE_MODULES = (
    outputs,
    views,
    sweep_tables,
)  # tables that live beside their queries; importing them is what counts

_CATALOGUE = text("""
    with relation as (
        select oid, relname, relkind from pg_class c
        where relnamespace = 'public'::regnamespace and relname not like 'alembic\\_version%'
    )
    select format('table %s, comment %L', relname, obj_description(oid, 'pg_class'))
        from relation where relkind in ('r', 'p')
    union all
    select format('column %s.%s %s, %s, default %L, identity %L, comment %L', r.relname, a.attname,
            format_type(a.atttypid, a.atttypmod), case when a.attnotnull then 'not null' else 'null' end,
            pg_get_expr(d.adbin, d.adrelid), a.attidentity, col_description(r.oid, a.attnum))
        from relation r join pg_attribute a on a.attrelid = r.oid and a.attnum > 0 and not a.attisdropped
        left join pg_attrdef d on d.adrelid = r.oid and d.adnum = a.attnum
        where r.relkind in ('r', 'p', 'v', 'm')
    union all
    select format('constraint %s on %s: %s', o.conname, r.relname, pg_get_constraintdef(o.oid))
        from relation r join pg_constraint o on o.conrelid = r.oid
    union all
    select format('index %s', pg_get_indexdef(r.oid)) from relation r where r.relkind = 'i'
    union all
    select format('sequence %s %s, from %s by %s up to %s', r.relname, format_type(s.seqtypid, null),
            s.seqstart, s.seqincrement, s.seqmax)
        from relation r join pg_sequence s on s.seqrelid = r.oid
    union all
    select format('view %s: %s', r.relname, pg_get_viewdef(r.oid))
        from relation r where r.relkind in ('v', 'm')
    union all
    select format('function %s: %s', p.oid::regprocedure, md5(pg_get_functiondef(p.oid)))
        from pg_proc p join pg_namespace n on n.oid = p.pronamespace
        where n.nspname = 'public' and p.prokind = 'f'
            and not exists (select from pg_depend e where e.objid = p.oid and e.deptype = 'e')
    order by 1
""")


def find_on_scratch_server() -> list[str]:
    """Start a server, compare, stop it. One line for each difference.

    Raises:
        app.store.devserver.NoServer: there is no Postgres on this machine.
    """
    from app.store.devserver import DevPostgres

    with DevPostgres(durable=False) as server:
        return asyncio.run(find(server.url))


async def find(url: str) -> list[str]:
    """The same on a server that runs; ``url`` may create databases, and two are made and dropped."""
    names = ("nebula_drift_migrated", "nebula_drift_tables")
    admin = engine.create_direct_engine(url, lock_timeout_s=10)
    async with admin.connect() as raw:
        conn = await raw.execution_options(isolation_level="AUTOCOMMIT")
        try:
            for name in names:
                await conn.execute(text(f"drop database if exists {name}"))
                await conn.execute(text(f"create database {name} template template0"))
            migrated, made = (_other(url, name) for name in names)
            await migrate.migrate(migrated, report=lambda line: None)
            await _on(made, Base.metadata.create_all)
            alembic = await _on(migrated, _alembic_differences)
            ours, wanted = set(await _on(migrated, _catalogue)), set(await _on(made, _catalogue))
        finally:
            for name in names:
                await conn.execute(text(f"drop database if exists {name}"))
    await admin.dispose()
    return [
        *alembic,
        *(f"only in the migrations: {line}" for line in sorted(ours - wanted)),
        *(f"only in the tables: {line}" for line in sorted(wanted - ours)),
    ]


def _alembic_differences(conn: Connection) -> list[str]:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    options: dict[str, Any] = {"compare_type": True, "compare_server_default": True}
    context = MigrationContext.configure(conn, opts=options)
    return [f"alembic: {difference}" for difference in compare_metadata(context, Base.metadata)]


def _catalogue(conn: Connection) -> list[str]:
    return list(conn.execute(_CATALOGUE).scalars())


async def _on(url: str, act: Any) -> Any:
    direct = engine.create_direct_engine(url, lock_timeout_s=10)
    try:
        async with direct.begin() as conn:
            return await conn.run_sync(act)
    finally:
        await direct.dispose()


def _other(url: str, database: str) -> str:
    parts = urlsplit(url)
    query = f"?{parts.query}" if parts.query else ""
    return f"{parts.scheme}://{parts.netloc}/{database}{query}"
