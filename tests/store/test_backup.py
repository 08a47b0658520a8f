"""``nebula backup`` and ``nebula restore`` on each kind of server: the old rows and the fence."""

import asyncio
import os
from pathlib import Path

import pytest
from alembic import command
from click.testing import CliRunner, Result
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.cli import main
from app.store import blocks, migrate
from app.store.backup import ABOVE
from app.store.blocks import Cause, Scope
from app.store.engine import begin
from app.store.installation import get, get_or_create

US = "aaaaaaaaaa"


@pytest.fixture
async def _installed(engine: AsyncEngine) -> None:
    async with begin(engine) as conn:
        await get_or_create(conn, new_id=US)
        await conn.execute(text("select setval('attempt_sequence', 41)"))


async def nebula(*words: str | Path, url: str) -> Result:
    env: dict[str, str | None] = {name: None for name in os.environ if name.startswith("NEBULA_")}
    return await asyncio.to_thread(
        CliRunner().invoke, main, [str(word) for word in words], env=env | {"NEBULA_DATABASE_URL": url}
    )


async def a_block(engine: AsyncEngine, name: str) -> None:
    async with begin(engine) as conn:
        cause = Cause(kind="capacity", message="", pool="p", pod_namespace="n", pod_name="p", claim_uid="c")
        await blocks.record(conn, Scope(provider=name, account="default", host="h"), cause, ttl_s=60)


@pytest.mark.usefixtures("_installed")
async def test_a_restore_brings_the_old_rows_back_and_sets_the_fence(
    engine: AsyncEngine, database_url: str, tmp_path: Path
):
    await a_block(engine, "before")
    done = await nebula("backup", tmp_path / "store.dump", url=database_url)
    assert done.exit_code == 0, done.output
    assert f"installation {US}" in done.output
    assert "attempts up to 41" in done.output
    assert (tmp_path / "store.dump").stat().st_mode & 0o777 == 0o600
    await a_block(engine, "after")
    await engine.dispose()

    done = await nebula("restore", tmp_path / "store.dump", "--replace", "--by", "ada", url=database_url)

    assert done.exit_code == 0, done.output
    async with begin(engine) as conn:
        names = set((await conn.execute(text("select provider from block"))).scalars())
        sequence = (await conn.execute(text("select nextval('attempt_sequence')"))).scalar_one()
        found = await get(conn)
        kept = await conn.execute(text("select 1 from pg_trigger where tgname = 'orphan_event_append_only'"))
        assert kept.scalar_one() == 1
    assert names == {"before"}
    assert sequence > 41 + ABOVE
    assert found is not None
    assert found.id == US
    assert found.epoch >= ABOVE
    assert found.hold is not None
    assert found.hold.reason.startswith("the store was restored by ada")


@pytest.mark.usefixtures("_installed")
async def test_a_backup_from_before_an_upgrade_can_be_restored_and_upgraded_again(
    engine: AsyncEngine, database_url: str, tmp_path: Path
):
    """Tables, functions and views that came since would stop the restore, or the next migration."""
    query = text("select max(revision) from schema_revision")
    async with begin(engine) as conn:
        newest = (await conn.execute(query)).scalar_one()
        await conn.run_sync(lambda sync: command.downgrade(migrate.config_for(sync), "0003"))
    done = await nebula("backup", tmp_path / "store.dump", url=database_url)
    assert done.exit_code == 0, done.output
    await migrate.migrate(database_url)
    await engine.dispose()

    done = await nebula("restore", tmp_path / "store.dump", "--replace", url=database_url)

    assert done.exit_code == 0, done.output
    assert "revision 0003" in done.output
    await migrate.migrate(database_url)
    async with begin(engine) as conn:
        found = await get(conn)
        assert found is not None
        assert found.hold is not None
        assert (await conn.execute(query)).scalar_one() == newest


@pytest.mark.usefixtures("_installed")
async def test_a_restore_under_a_running_controller_is_refused(
    engine: AsyncEngine, database_url: str, tmp_path: Path
):
    await nebula("backup", tmp_path / "store.dump", url=database_url)
    async with begin(engine):  # what a controller's connection looks like
        done = await nebula("restore", tmp_path / "store.dump", "--replace", url=database_url)

    assert done.exit_code == 1
    assert "stop the controllers" in done.output


@pytest.mark.usefixtures("_installed")
async def test_what_cannot_be_restored_changes_nothing(
    engine: AsyncEngine, database_url: str, tmp_path: Path
):
    (tmp_path / "rubbish").write_text("not a backup")
    await a_block(engine, "kept")
    await engine.dispose()

    rubbish = await nebula("restore", tmp_path / "rubbish", "--replace", url=database_url)
    unsure = await nebula("restore", tmp_path / "rubbish", url=database_url)
    missing = await nebula("restore", tmp_path / "nothing", "--replace", url=database_url)

    assert rubbish.exit_code == 1
    assert "pg_restore:" in rubbish.output
    assert "add --replace" in unsure.output
    assert "does not exist" in missing.output
    async with begin(engine) as conn:
        assert (await conn.execute(text("select count(*) from block"))).scalar_one() == 1
        found = await get(conn)
    assert found is not None
    assert found.hold is None


@pytest.mark.usefixtures("_installed")
async def test_a_backup_overwrites_nothing_by_accident_and_is_whole_or_not_there(
    database_url: str, tmp_path: Path
):
    (tmp_path / "there").write_text("older")

    twice = await nebula("backup", tmp_path / "there", url=database_url)
    nowhere = await nebula("backup", tmp_path / "no" / "folder", url=database_url)
    forced = await nebula("backup", tmp_path / "there", "--force", url=database_url)

    assert "is there already" in twice.output
    assert "is no folder" in nowhere.output
    assert forced.exit_code == 0, forced.output
    assert [each.name for each in tmp_path.iterdir()] == ["there"]
