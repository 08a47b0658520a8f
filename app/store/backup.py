"""A copy of the store, and its way back: Postgres's own ``pg_dump`` and ``pg_restore``, as found here.

A restored store is older than the world. So a restore sets the fence at once: sweeps are held until a person
confirms, the numbers of attempts go on far above whatever was given out meanwhile, and the epoch is raised
above any leader's that may still stand. What happened since is found again by the next leader: claims
remember their newest order, and the clouds show the rest (`run.source` is then ``recovered``).

The password never stands in an argument, where others on the machine could read it.
"""

import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.store.devbinaries import embedded, installed
from app.store.engine import APPLICATION_NAME, connect, create_direct_engine, normalise
from app.store.installation import id_of

ABOVE = 1_000_000  # how far the next attempt's number is above the backup's last one
TIMEOUT_S = 3600.0


class NoTools(RuntimeError):
    """There is no pg_dump and pg_restore here that can talk to this server: install postgresql-client."""


class BackupFailed(RuntimeError):
    """Postgres's tool refused; the message ends with what it said, the password left out."""


class StoreInUse(RuntimeError):
    """Sessions of Nebula use the database: stop the controllers first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """What a backup holds."""

    file: Path
    size_bytes: int
    installation: str
    revision: str
    last_sequence: int
    at: datetime


async def backup(url: str, file: Path) -> Copied:
    """Write the database as it is at one moment into ``file``, whole or not at all.

    Raises:
        NoTools, BackupFailed: see there.
        StoreUnavailable: the database cannot be read.
        LookupError: it has no installation.
    """
    engine = create_direct_engine(url, lock_timeout_s=10)
    try:
        async with connect(engine) as conn:
            about = await _about(conn)
    finally:
        await engine.dispose()
    dump = _tool("pg_dump", about.server_major)
    part = file.with_name(file.name + ".part")
    try:
        part.unlink(missing_ok=True)
        part.touch(mode=0o600, exist_ok=False)  # nobody else may read it while it grows, either
        _run([dump, "--format=custom", "--no-owner", "--no-privileges", f"--file={part}"], url)
        part.rename(file)
    finally:
        part.unlink(missing_ok=True)
    return _copied(file, about)


async def restore(url: str, file: Path, *, by: str) -> Copied:
    """Put the database back to what ``file`` holds, and set the fence.

    Whatever the database has now is replaced, in one transaction: it is the old state, or the restored one.

    Raises:
        NoTools, BackupFailed, StoreInUse: see there; the database is as it was. So is it with a file that
            holds no installation.
        StoreUnavailable: the database cannot be used.
    """
    engine = create_direct_engine(url, lock_timeout_s=10)
    try:
        async with connect(engine) as conn:
            major = await _major(conn)
            if others := await _sessions(conn):
                raise StoreInUse(
                    f"{others} sessions of Nebula use this database: stop the controllers (scale to 0) first"
                )
        with tempfile.TemporaryDirectory(prefix="nebula-restore-") as folder:
            _replay(file, Path(folder), url, server_major=major, by=by)
        async with connect(engine) as conn:
            return _copied(file, await _about(conn))
    finally:
        await engine.dispose()


def _copied(file: Path, about: "_About") -> Copied:
    return Copied(
        file=file,
        size_bytes=file.stat().st_size,
        installation=about.installation,
        revision=about.revision,
        last_sequence=about.last_sequence,
        at=about.now,
    )


def _replay(file: Path, folder: Path, url: str, *, server_major: int, by: str) -> None:
    """Drop what is there, make what the file holds, and set the fence: one transaction, the fence in it."""
    script, before, after = folder / "store.sql", folder / "before.sql", folder / "after.sql"
    options = ["--clean", "--if-exists", "--no-owner", "--no-privileges", f"--file={script}"]
    _run([_tool("pg_restore", server_major), *options, str(file)], None)  # whole, before anything is dropped
    before.write_text(_BEFORE.format(tables=", ".join(f"'{name}'" for name in _tables())))
    after.write_text(_FENCE)
    how = ["--no-psqlrc", "--quiet", "--output=/dev/null", "--single-transaction", "--set=ON_ERROR_STOP=1"]
    how += [f"--set=by={by}", f"--set=above={ABOVE}"]
    how += [f"--file={each}" for each in (before, script, after)]
    _run([_tool("psql", server_major), *how], url)


def _tables() -> list[str]:
    """All tables of this code: those that the file does not know are from after it, and would stay."""
    from app.store import drift
    from app.store.tables import Base

    assert drift.TABLE_MODULES  # every module of tables is there
    return [table.name for table in Base.metadata.sorted_tables]


# Views first, since tables cannot go while views read them; those of extensions are not ours. Functions of
# tables' triggers are in their migrations, too.
_BEFORE = """
do $$
declare
    one text;
    tables text[] := array[{tables}];
    functions text[];
begin
    for one in select quote_ident(relname) from pg_class
        where relkind = 'v' and relnamespace = current_schema()::regnamespace
            and not exists (select from pg_depend d where d.objid = pg_class.oid and d.deptype = 'e')
    loop
        execute format('drop view if exists %s cascade', one);
    end loop;
    functions := array(select distinct p.oid::regprocedure::text
        from pg_trigger t join pg_proc p on p.oid = t.tgfoid
        where not t.tgisinternal and p.pronamespace = current_schema()::regnamespace
            and t.tgrelid in (select to_regclass(name) from unnest(tables) name));
    foreach one in array tables loop
        execute format('drop table if exists %I cascade', one);
    end loop;
    foreach one in array functions loop
        execute format('drop function if exists %s', one);
    end loop;
end
$$;
"""
# The file's script leaves no search path behind.
_FENCE = """
reset search_path;
do $$
begin
    if not exists (select from installation) then
        raise exception 'there is no installation in it: no controller has run with it';
    end if;
end
$$;
select setval('attempt_sequence', :above + greatest((select last_value from attempt_sequence),
    (select coalesce(max(sequence), 0) from provision_attempt)));
update installation set epoch = epoch + :above,
    held_since = coalesce(held_since, clock_timestamp()),
    held_reason = coalesce(held_reason, format('the store was restored by %s at %s UTC', :'by',
        to_char(clock_timestamp() at time zone 'UTC', 'YYYY-MM-DD HH24:MI')));
do $$
begin
    -- The backup may be of an older schema.
    if exists (select from information_schema.columns where table_schema = current_schema()
            and table_name = 'installation' and column_name = 'held_sequence') then
        update installation set held_sequence = (select last_value from attempt_sequence);
    end if;
end
$$;
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _About:
    installation: str
    revision: str
    last_sequence: int
    now: datetime
    server_major: int


async def _about(conn: AsyncConnection) -> _About:
    found = await id_of(conn)  # which can be read whatever revision it is of
    if found is None:
        raise LookupError("there is no installation in it: no controller has run with it")
    query = text("""
        select clock_timestamp() as now, (select max(revision) from schema_revision) as revision,
            greatest((select last_value from attempt_sequence),
                (select coalesce(max(sequence), 0) from provision_attempt)) as last_sequence
    """)
    row = (await conn.execute(query)).one()
    return _About(
        installation=found,
        revision=row.revision,
        last_sequence=row.last_sequence,
        now=row.now,
        server_major=await _major(conn),
    )


async def _major(conn: AsyncConnection) -> int:
    number = (await conn.execute(text("show server_version_num"))).scalar_one()
    return int(number) // 10_000


async def _sessions(conn: AsyncConnection) -> int:
    query = text("""
        select count(*) from pg_stat_activity
        where datname = current_database() and application_name = :name and pid <> pg_backend_pid()
    """)
    return int((await conn.execute(query, {"name": APPLICATION_NAME})).scalar_one())


def _tool(name: str, server_major: int) -> Path:
    """The program of the oldest version that is not older than the server."""
    wheel = embedded()
    programs = [*installed(), *([wheel] if wheel is not None else [])]
    found = {each.major: each.folder / name for each in programs if each.major is not None}
    usable = sorted((major, path) for major, path in found.items() if path.exists())
    for major, path in usable:
        if major >= server_major:
            return path
    known = ", ".join(str(major) for major, _ in usable) or "none"
    raise NoTools(
        f"no {name} here is as new as the server, {server_major} (found: {known}): install"
        f" postgresql-client-{server_major}, or pip install 'nebula[embedded]'"
    )


def _run(argv: Sequence[str | Path], url: str | None) -> None:
    env = dict(os.environ)
    words = [str(word) for word in argv]
    if url is not None:
        address, password = _address(url)
        if password:
            env["PGPASSWORD"] = password
        words.insert(1, f"--dbname={address}")
    try:
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise BackupFailed(f"{Path(words[0]).name}: {error}") from error
    if done.returncode:
        said = " ".join(done.stderr.split())[-500:]
        raise BackupFailed(f"{Path(words[0]).name}: {said or f'exit code {done.returncode}'}")


def _address(url: str) -> tuple[str, str | None]:
    """The URL without its password, and the password."""
    parts = urlsplit(normalise(url))
    user, at, host = parts.netloc.rpartition("@")
    name, _, password = user.partition(":")
    tail = urlunsplit(("", "", parts.path, parts.query, ""))
    return f"postgresql://{name}{at}{host}{tail}", unquote(password) if password else None
