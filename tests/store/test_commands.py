"""``nebula migrate`` and ``nebula blocks``, run as commands of their own."""

import asyncio
import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from app.cli import output
from app.store import blocks, migrate, revisions
from app.store.blocks import Cause, Scope
from app.store.engine import begin


async def nebula(*words: str, url: str = "") -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("NEBULA_")}
    command = [sys.executable, "-m", "app.cli", *words]
    if url:
        env["NEBULA_DATABASE_URL"] = url
    return await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, env=env, check=False
    )


@pytest.fixture
async def two_blocks(engine: AsyncEngine) -> None:
    async with begin(engine) as conn:
        cause = Cause(
            kind="capacity",
            message="none left",
            pool="gpu",
            pod_namespace="default",
            pod_name="w-1",
            claim_uid="c",
        )
        spot = Scope(provider="modal", account="default", accelerator="H100:8", tier="Spot")
        await blocks.record(conn, spot, cause, ttl_s=610)
        cpu = Scope(provider="aws", account="prod", accelerator="", region="eu-west-1", host="h-1")
        await blocks.record(conn, cpu, cause, ttl_s=35)


async def test_migrate_says_from_where_to_where(empty_url: str) -> None:
    head = revisions.head()

    check = await nebula("migrate", "--check", url=empty_url)
    first = await nebula("migrate", url=empty_url)
    again = await nebula("migrate", "-o", "json", "--database-url", empty_url)
    after = await nebula("migrate", "--check", "-o", "json", url=empty_url)

    assert (check.returncode, check.stdout) == (1, f"database: empty, this version: {head}: behind\n")
    assert (first.returncode, first.stdout) == (0, f"migrated from an empty database to revision {head}\n")
    assert first.stderr.startswith("0001: The first tables")
    assert (again.returncode, json.loads(again.stdout)) == (0, {"from": head, "to": head})
    assert json.loads(after.stdout) == {"revision": head, "head": head, "verdict": "current"}
    assert after.returncode == 0


async def test_migrate_waits_for_another_and_gives_up_with_one_line(empty_url: str) -> None:
    with psycopg.connect(empty_url.replace("+asyncpg", "")) as other:
        other.execute("select pg_advisory_lock(%s)", [migrate.LOCK])
        done = await nebula("migrate", "--wait", "0", url=empty_url)

    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "waiting for another migrator",
        "Error: the database cannot be used: another migrator has been at work for 0 s",
    ]


async def test_migrate_refuses_a_schema_that_refuses_this_version(database_url: str) -> None:
    with psycopg.connect(database_url.replace("+asyncpg", ""), autocommit=True) as other:
        other.execute("insert into schema_revision (revision, min_reader) values ('9999', '9999')")

    done = await nebula("migrate", url=database_url)
    check = await nebula("migrate", "--check", url=database_url)

    assert (done.returncode, check.returncode) == (1, 1)
    assert "run the newer version" in done.stderr
    assert check.stdout.endswith("too new\n")


async def test_commands_say_what_is_missing_and_hide_the_password() -> None:
    without = await nebula("blocks")
    unreachable = await nebula("blocks", url="postgresql://u:geheim@127.0.0.1:1/d")
    wrong = await nebula("migrate", url="mysql://u:geheim@h/d")

    assert without.returncode == 2
    assert "NEBULA_DATABASE_URL" in without.stderr
    assert unreachable.returncode == 1
    assert unreachable.stderr.startswith("Error: the database cannot be used:")
    assert unreachable.stderr.count("\n") == 1
    assert wrong.returncode == 2
    for done in (unreachable, wrong):
        assert "geheim" not in done.stdout + done.stderr


@pytest.mark.usefixtures("two_blocks")
async def test_blocks_are_a_table_like_kubectls(database_url: str) -> None:
    done = await nebula("blocks", url=database_url)

    assert done.returncode == 0, done.stderr
    titles, first, second = done.stdout.splitlines()
    wanted = "ID PROVIDER ACCOUNT ACCELERATOR TIER REGION REASON EXPIRES POOL POD AGE"
    assert " ".join(titles.split()) == wanted
    assert first[titles.index("PROVIDER") :].startswith("modal ")
    assert first[titles.index("ACCELERATOR") :].startswith("h100:8 ")
    assert first[titles.index("REGION") :].startswith("* ")
    assert first[titles.index("EXPIRES") :].startswith("in 10m ")
    assert first[titles.index("POD") :].startswith("default/w-1 ")
    assert second[titles.index("ACCELERATOR") :].startswith("<none> ")
    assert second[titles.index("REGION") :].startswith("eu-west-1 host h-1 ")


@pytest.mark.usefixtures("two_blocks")
async def test_blocks_are_cleared_by_selector_and_stay_in_the_record(database_url: str) -> None:
    nothing = await nebula("blocks", "clear", url=database_url)
    both = await nebula("blocks", "clear", "--all", "--provider", "aws", url=database_url)
    cleared = await nebula("blocks", "clear", "--provider", "aws", "-o", "json", url=database_url)
    left = await nebula("blocks", "list", "-o", "json", url=database_url)
    every = await nebula("blocks", "--all", "-o", "json", url=database_url)
    rest = await nebula("blocks", "clear", "--all", url=database_url)
    empty = await nebula("blocks", url=database_url)

    assert (nothing.returncode, both.returncode) == (2, 2)
    assert [block["provider"] for block in json.loads(cleared.stdout)] == ["aws"]
    assert [block["provider"] for block in json.loads(left.stdout)] == ["modal"]
    assert sorted(block["provider"] for block in json.loads(every.stdout)) == ["aws", "modal"]
    assert rest.returncode == 0
    assert (empty.stdout, empty.stderr) == ("", "no blocks\n")


@pytest.mark.usefixtures("two_blocks")
async def test_one_block_is_cleared_by_its_id(database_url: str) -> None:
    listed = json.loads((await nebula("blocks", "-o", "json", url=database_url)).stdout)

    await nebula("blocks", "clear", str(listed[0]["id"]), url=database_url)

    left = json.loads((await nebula("blocks", "-o", "json", url=database_url)).stdout)
    assert left == listed[1:]
    assert left[0]["accelerator"] == ""
    assert left[0]["tier"] is None
    assert left[0]["message"] == "none left"


async def test_help_imports_no_database() -> None:
    program = (
        "import sys; import app.cli.blocks, app.cli.migrate;"
        "print([name for name in ('sqlalchemy', 'asyncpg', 'alembic', 'pydantic') if name in sys.modules])"
    )
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


async def test_a_replica_with_a_current_schema_never_imports_alembic(database_url: str) -> None:
    program = (
        "import asyncio, sys; from app.store.migrate import migrate;"
        "asyncio.run(migrate(sys.argv[1])); print('alembic' in sys.modules)"
    )
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", program, database_url],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-5, "0s"),
        (0.9, "0s"),
        (119, "119s"),
        (120, "2m"),
        (580, "9m40s"),
        (600, "10m"),
        (10_799, "179m"),
        (10_800, "3h"),
        (11_100, "3h5m"),
        (8 * 3600, "8h"),
        (47 * 3600, "47h"),
        (52 * 3600, "2d4h"),
        (400 * 86400, "400d"),
    ],
)
def test_lengths_of_time_read_like_kubectls(seconds: float, words: str) -> None:
    assert output.age(seconds) == words


def test_moments_read_relative_to_now() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    assert output.until(now + timedelta(seconds=30), now=now) == "in 30s"
    assert output.until(now - timedelta(minutes=3), now=now) == "3m ago"
    assert output.since(now - timedelta(hours=9), now=now) == "9h"


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    text = output.table(["NAME", "USD"], [["a", "1.5"], ["longer", "10"]], right=["USD"])
    assert text.splitlines() == ["NAME     USD", "a        1.5", "longer    10"]
    assert output.table(["NAME", "USD"], []) == "NAME   USD"
