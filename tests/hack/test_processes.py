"""Children that cannot outlive us, ports, and folders that a killed owner leaves."""

import os
import signal
import threading
from pathlib import Path

import psutil

from app.processes import Scratch, free_ports, lock_file, spawn, stop, tail
from tests.hack.processes import alive, listens, owner, until

SLEEP = "/bin/sleep"


def test_a_child_outlives_the_thread_that_asked_for_it(tmp_path: Path):
    """The kernel ties a child to the thread that forked: that must not be the caller's."""
    started = []
    thread = threading.Thread(target=lambda: started.append(spawn([SLEEP, "600"], log=tmp_path / "log")))
    thread.start()
    thread.join()
    [child] = started
    until(lambda: psutil.Process(child.pid).name() == "sleep")

    still_alive = alive([child.pid])

    stop(child, grace_s=3)
    assert still_alive == [child.pid]
    assert child.returncode == -signal.SIGTERM


def test_no_child_outlives_an_owner_that_was_killed():
    code = (
        "import json, time; from pathlib import Path; from app.processes import spawn\n"
        "child = spawn(['/bin/sleep', '600'], log=Path('/dev/null'))\n"
        "while Path(f'/proc/{child.pid}/comm').read_text() != 'sleep\\n': time.sleep(0.01)\n"
        "print(json.dumps({'pid': child.pid}), flush=True); time.sleep(600)\n"
    )
    with owner(code) as (process, said):
        child = int(str(said["pid"]))
        assert alive([child]) == [child]

        process.kill()

        until(lambda: not alive([child]))


def test_a_child_that_ignores_the_request_is_killed(tmp_path: Path):
    log = tmp_path / "log"
    child = spawn(["/bin/sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1; done"], log=log)
    until(lambda: "ready" in tail(log))

    stop(child, grace_s=0.2)

    assert child.returncode == -signal.SIGKILL


def test_a_program_that_cannot_be_run_says_so_in_its_log(tmp_path: Path):
    child = spawn([tmp_path / "absent"], log=tmp_path / "log")

    assert child.wait(timeout=30) == 126
    assert "No such file" in tail(tmp_path / "log")


def test_free_ports_are_distinct_and_nobody_listens_on_them():
    ports = free_ports(20)

    assert len(set(ports)) == 20
    assert not any(listens(port) for port in ports)


def test_a_folder_left_by_a_killed_owner_goes_with_the_next_of_its_kind():
    code = (
        "import json, time; from app.processes import Scratch\n"
        "path = Scratch('test-sweep', need_bytes=1).path\n"
        "print(json.dumps({'path': str(path)}), flush=True); time.sleep(600)\n"
    )
    with owner(code) as (process, said):
        left = Path(str(said["path"]))
        Scratch("test-sweep", need_bytes=1).close()
        assert left.is_dir(), "its owner lives"
        process.kill()
        process.wait()

        ours = Scratch("test-sweep", need_bytes=1)

        ours.close()
        assert not left.exists()
        assert not ours.path.exists()


def test_a_lock_is_held_by_one_and_names_its_holder(tmp_path: Path):
    first = lock_file(tmp_path / "lock")
    assert first is not None

    second = lock_file(tmp_path / "lock")

    assert second is None
    assert (tmp_path / "lock").read_text() == str(os.getpid())
    os.close(first)
    third = lock_file(tmp_path / "lock")
    assert third is not None
    os.close(third)
