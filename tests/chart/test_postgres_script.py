"""The script that runs the bundled Postgres, on real Postgres programs, as an account that is not root."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import asyncpg
import pytest

from app import processes
from app.store import devbinaries
from app.store.devbinaries import Binaries

pytestmark = pytest.mark.slow  # each makes a database from nothing
SCRIPTS = Path(__file__).resolve().parents[2] / "chart" / "files"
PASSWORD = 'it\'s a "pass"word$ with \\ signs'
WITHIN_S = 60


@dataclass(slots=True, kw_only=True)
class Server:
    """One run of the script after the other on the same volume."""

    folder: Path
    binaries: Binaries
    account: processes.Account | None
    port: int = field(default_factory=lambda: _free_port())

    @property
    def data(self) -> Path:
        return self.folder / "volume" / "pgdata"

    def own(self, folder: Path) -> None:
        """Give all of it to the account that runs the server, as a volume's group does in a Pod."""
        if self.account is not None:
            for path in (folder, *folder.rglob("*")):
                os.chown(path, self.account.uid, self.account.gid)

    def start(self, *, password: str = PASSWORD, major: str = "") -> subprocess.Popen[str]:
        environment = {
            "PATH": f"{self.binaries.folder}:/usr/bin:/bin",
            "PGDATA": str(self.data),
            "SOCKETS": str(self.folder / "sockets"),
            "DATABASE": "nebula",
            "DATABASE_USER": "nebula",
            "DATABASE_PASSWORD": password,
            "MAJOR": major or str(self.binaries.major),
        }
        argv = ["/bin/sh", str(self.folder / "postgres.sh"), "-c", f"port={self.port}", "-c", "fsync=off"]
        who = self.account
        return subprocess.Popen(
            argv,
            env=environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            user=who.uid if who else None,
            group=who.gid if who else None,
            extra_groups=[] if who else None,
        )

    def refused(self, **how: str) -> str:
        """What it says where it must not start."""
        process = self.start(**how)
        said, _ = process.communicate(timeout=WITHIN_S)
        assert process.returncode == 1, said
        return said

    def back_up(self, *, keep: int) -> str:
        """Run the script of the CronJob; what it says."""
        text = (self.folder / "backup.sh").read_text().replace("/backup", str(self.folder / "backup"))
        environment = {
            "PATH": f"{self.binaries.folder}:/usr/bin:/bin",
            "KEEP": str(keep),
            "PGHOST": "127.0.0.1",
            "PGPORT": str(self.port),
            "PGDATABASE": "nebula",
            "PGUSER": "nebula",
            "PGPASSWORD": PASSWORD,
        }
        done = subprocess.run(
            ["/bin/sh", "-c", text],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=WITHIN_S,
            user=self.account.uid if self.account else None,
            group=self.account.gid if self.account else None,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    @asynccontextmanager
    async def running(self, *, password: str = PASSWORD) -> AsyncIterator[subprocess.Popen[str]]:
        process = self.start(password=password)
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            said, _ = await asyncio.to_thread(process.communicate, timeout=WITHIN_S)
            print(said)

    async def connect(self, *, password: str = PASSWORD) -> asyncpg.Connection:
        """Log in over TCP as the controller does, once the server listens."""
        async with asyncio.timeout(WITHIN_S):
            while True:
                try:
                    return await asyncpg.connect(
                        host="127.0.0.1", port=self.port, user="nebula", database="nebula", password=password
                    )
                except (OSError, asyncpg.CannotConnectNowError):
                    await asyncio.sleep(0.05)


@pytest.fixture
def server() -> Iterator[Server]:
    account = processes.unprivileged_account("postgres") if os.geteuid() == 0 else None
    scratch = processes.Scratch("chart", need_bytes=500_000_000, in_memory=False)
    try:
        yield _prepared(scratch.path, account)
    finally:
        scratch.close()


def _prepared(folder: Path, account: processes.Account | None) -> Server:
    if account is not None:
        os.chown(folder, account.uid, account.gid)
    found = devbinaries.embedded(account=account, copy_to=folder / "wheel")
    assert found is not None
    assert found.major is not None
    shutil.copy(SCRIPTS / "postgres.sh", folder)
    shutil.copy(SCRIPTS / "backup.sh", folder)
    for name in ("volume", "sockets", "backup"):
        (folder / name).mkdir()
    made = Server(folder=folder, binaries=found, account=account)
    made.own(folder)
    return made


async def test_an_empty_volume_becomes_a_database_that_the_controller_can_log_in_to(server: Server) -> None:
    async with server.running():
        connection = await server.connect()
        row = await connection.fetchrow(
            "select pg_encoding_to_char(encoding) as encoding, datcollate, pg_get_userbyid(datdba) as owner"
            " from pg_database where datname = 'nebula'"
        )
        superuser = await connection.fetchval("select rolsuper from pg_roles where rolname = 'nebula'")
        await connection.close()

    assert dict(row) == {"encoding": "UTF8", "datcollate": "C", "owner": "nebula"}
    assert superuser is False


@pytest.mark.field_case("FC-095")
async def test_a_kept_volume_takes_the_password_of_a_new_secret(server: Server) -> None:
    async with server.running():
        connection = await server.connect()
        await connection.execute("create table kept (n int)")
        await connection.close()

    async with server.running(password="another"):
        connection = await server.connect(password="another")
        assert await connection.fetchval("select count(*) from kept") == 0
        await connection.close()
        with pytest.raises(asyncpg.InvalidPasswordError):
            await server.connect()


async def test_sigterm_ends_the_server_cleanly_although_a_client_stays(server: Server) -> None:
    async with server.running() as process:
        connection = await server.connect()
        os.kill(process.pid, signal.SIGTERM)
        said, _ = await asyncio.to_thread(process.communicate, timeout=WITHIN_S)

    assert process.returncode == 0, said
    assert "database system is shut down" in said
    with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, OSError)):
        await connection.execute("select 1")


async def test_a_start_that_was_killed_while_it_made_the_data_is_made_again(server: Server) -> None:
    half = server.data.with_name("pgdata.new")
    half.mkdir()
    (half / "PG_VERSION").write_text("18\n")
    server.own(half)

    async with server.running():
        connection = await server.connect()
        await connection.close()

    assert not half.exists()


async def test_data_of_another_major_version_is_refused_and_not_touched(server: Server) -> None:
    async with server.running():
        await (await server.connect()).close()
    (server.data / "PG_VERSION").write_text("17\n")
    before = sorted((path, path.stat().st_mtime_ns) for path in server.data.rglob("*"))

    said = server.refused()

    assert "the data is of Postgres 17" in said
    assert sorted((path, path.stat().st_mtime_ns) for path in server.data.rglob("*")) == before


def test_an_image_of_another_major_version_is_refused(server: Server) -> None:
    assert "database.bundled.majorVersion is 17" in server.refused(major="17")


def test_a_folder_with_something_else_in_it_is_refused(server: Server) -> None:
    server.data.mkdir()
    (server.data / "letters").write_text("not ours")
    server.own(server.data)

    assert "neither empty nor Postgres data" in server.refused()
    assert (server.data / "letters").read_text() == "not ours"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can try it as root")
def test_root_is_refused(server: Server) -> None:
    server.account = None

    assert "does not run as root" in server.refused()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def test_backups_are_whole_and_the_newest_stay(server: Server) -> None:
    async with server.running():
        connection = await server.connect()
        await connection.execute("create table money (usd numeric)")
        await connection.close()
        for day in range(1, 5):
            (server.folder / "backup" / f"nebula-2026010{day}T030000Z.dump").write_bytes(b"old")
        (server.folder / "backup" / "nebula-20260105T030000Z.dump.part").write_bytes(b"cut off")
        server.own(server.folder / "backup")

        said = await asyncio.to_thread(server.back_up, keep=3)

    left = sorted(path.name for path in (server.folder / "backup").iterdir())
    assert left[:2] == ["nebula-20260103T030000Z.dump", "nebula-20260104T030000Z.dump"], said
    (newest,) = left[2:]
    assert (server.folder / "backup" / newest).read_bytes().startswith(b"PGDMP")
