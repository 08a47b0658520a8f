"""``kubectl exec`` through the real API server, against processes that really run."""

import asyncio
import contextlib
import fcntl
import hashlib
import os
import signal
import struct
import termios
from pathlib import Path

import psutil
import pytest

from tests.cluster.kubelet.conftest import Bench
from tests.support.composed import until

SLEEP = "sleep 600"


@pytest.mark.behaviour(257, 262)
async def test_fc_115_output_errors_and_exit_codes_are_those_of_the_command(bench: Bench):
    await bench.shell("p", SLEEP)

    done = await bench.run("exec", "p", "--", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (done.code, done.out) == (7, b"out\n")
    assert "err\n" in done.err
    assert "exit code 7" in done.err
    for script, code in (
        ("true", 0),
        ("exit 1", 1),
        ("exit 126", 126),
        ("kill -9 $$", 137),
        ("exit 255", 255),
    ):
        assert (await bench.run("exec", "p", "--", "sh", "-c", script)).code == code, script
    missing = await bench.run("exec", "p", "--", "no-such-program")
    assert missing.code == 127
    assert "no-such-program" in missing.err


@pytest.mark.behaviour(261)
async def test_fc_112_fc_113_megabytes_go_both_ways_byte_for_byte_and_the_end_of_input_arrives(bench: Bench):
    await bench.shell("p", SLEEP)
    data = os.urandom(8_000_000)

    assert await bench.ok("exec", "-i", "p", "--", "cat", stdin=data) == data


async def test_a_terminal_is_resized_and_merges_the_errors(bench: Bench):
    await bench.shell("p", SLEEP)
    main, other = os.openpty()

    def size(columns: int, rows: int) -> None:
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    size(101, 31)
    process = await asyncio.create_subprocess_exec(
        str(bench.cluster.kubectl),
        *("-n", bench.namespace, "exec", "-it", "p", "--", "sh"),
        stdin=other,
        stdout=other,
        stderr=other,
        start_new_session=True,
        env=os.environ | {"KUBECONFIG": str(bench.cluster.kubeconfig)},
    )
    bench.started.append(process)
    said = b""
    os.set_blocking(main, False)

    async def says(words: bytes) -> bool:
        nonlocal said
        with contextlib.suppress(OSError):
            said += os.read(main, 65536)
        return words in said

    await until(lambda: says(b"$ "), what="a prompt")
    os.write(main, b"stty size; echo er''rors >&2\n")
    await until(lambda: says(b"31 101"))
    await until(lambda: says(b"errors"))
    size(77, 22)
    process.send_signal(signal.SIGWINCH)
    os.write(main, b"sleep 0.3; stty size\n")
    await until(lambda: says(b"22 77"))
    os.write(main, b"exit 3\n")
    async with asyncio.timeout(20):
        assert await process.wait() == 3
    os.close(main)
    os.close(other)


@pytest.mark.behaviour(265)
async def test_a_client_that_is_killed_takes_its_command_along(bench: Bench):
    await bench.shell("p", SLEEP)
    process = await bench.start("exec", "p", "--", "sh", "-c", "echo $$; sleep 600")
    assert process.stdout is not None
    pid = int(await process.stdout.readline())
    assert psutil.pid_exists(pid)

    process.kill()

    await until(lambda: not psutil.pid_exists(pid))


async def test_ten_sessions_at_once(bench: Bench):
    await bench.shell("p", SLEEP)

    outs = await asyncio.gather(*(bench.ok("exec", "p", "--", "echo", str(number)) for number in range(10)))

    assert outs == [f"{number}\n".encode() for number in range(10)]


async def test_fc_112_files_are_copied_both_ways(bench: Bench, tmp_path: Path):
    await bench.shell("p", SLEEP)
    there = tmp_path / "there"
    there.write_bytes(os.urandom(3_000_000))
    where = (await bench.ok("exec", "p", "--", "sh", "-c", "echo $HOME")).decode().strip()

    await bench.ok("cp", str(there), f"p:{where}/copy")
    await bench.ok("cp", f"p:{where}/copy", str(tmp_path / "back"))

    digest = hashlib.sha256(there.read_bytes()).hexdigest()
    assert hashlib.sha256((tmp_path / "back").read_bytes()).hexdigest() == digest
    said = (await bench.ok("exec", "p", "--", "sha256sum", f"{where}/copy")).decode()
    assert said.startswith(digest)


@pytest.mark.behaviour(243, 258, 259)
async def test_fc_115_what_cannot_be_run_is_an_error_and_never_a_success(bench: Bench):
    await bench.pod("mute", ["sleep", "600"], cloud="mute")

    done = await bench.run("exec", "mute", "--", "true")
    assert done.code == 1
    assert 'provider "mute" runs no further commands' in done.err
    gone = await bench.run("exec", "nobody", "--", "true")
    assert gone.code == 1
    assert "not found" in gone.err


async def test_fc_117_a_machine_that_goes_ends_its_sessions_with_an_error(bench: Bench):
    await bench.shell("p", SLEEP)
    process = await bench.start("exec", "p", "--", "sh", "-c", "echo here; sleep 600")
    assert process.stdout is not None
    assert await process.stdout.readline() == b"here\n"

    await bench.cloud.preempt((await bench.machine("p"))["id"])

    async with asyncio.timeout(20):
        assert await process.wait() != 0


async def test_a_session_that_breaks_gives_an_error_and_no_exit_code(bench: Bench):
    await bench.shell("p", SLEEP)
    await bench.cloud.add_fault("stream_cut", verb="exec", keep=2000)

    done = await bench.run("exec", "p", "--", "seq", "100000")

    assert done.code == 1
    assert "the session broke" in done.err


async def test_attach_shows_what_comes_and_ends_with_the_workload(bench: Bench):
    await bench.shell("p", "while [ ! -e $HOME/stop ]; do echo tick; sleep 0.1; done; echo done")
    process = await bench.start("attach", "p")
    assert process.stdout is not None
    assert await process.stdout.readline() == b"tick\n"

    await bench.ok("exec", "p", "--", "sh", "-c", "touch $HOME/stop")

    async with asyncio.timeout(20):
        rest = await process.stdout.read()
        assert await process.wait() == 0
    assert rest.endswith(b"done\n")
