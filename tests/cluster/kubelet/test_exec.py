"""``kubectl exec`` through the real API server, against processes that really run."""

import asyncio
import hashlib
import os
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
        ("kill -9 $$", 137),
        ("exit 255", 255),
    ):
        assert (await bench.run("exec", "p", "--", "sh", "-c", script)).code == code, script
    missing = await bench.run("exec", "p", "--", "no-such-program")
    assert missing.code == 127
    unable = await bench.run("exec", "p", "--", "/etc/passwd")
    assert unable.code == 126
    assert "denied" in unable.err
    assert "no-such-program" in missing.err


@pytest.mark.behaviour(261)
async def test_fc_112_fc_113_megabytes_go_both_ways_byte_for_byte_and_the_end_of_input_arrives(bench: Bench):
    await bench.shell("p", SLEEP)
    data = os.urandom(8_000_000)

    assert await bench.ok("exec", "-i", "p", "--", "cat", stdin=data) == data


async def test_fc_114_a_terminal_has_the_newest_size_and_merges_the_errors(bench: Bench):
    await bench.shell("p", SLEEP)
    async with bench.terminal("exec", "-it", "p", "--", "sh", columns=101, rows=31) as terminal:
        await terminal.until(b"$ ")
        terminal.type(b"stty size; echo er''rors >&2\n")
        await terminal.until(b"31 101")
        await terminal.until(b"errors")
        for columns in range(60, 78):
            terminal.resize(columns, 22)
        await terminal.until(b"22 77", typing=b"stty size\n")
        terminal.type(b"exit 3\n")
        assert await terminal.ended() == 3


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

    machine = await bench.machine("p")
    await bench.cloud.preempt(machine["id"])

    at_once = await bench.run("exec", "p", "--", "true")  # the Pod may still look as if it ran
    assert at_once.code == 1
    assert at_once.err
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


async def test_attached_input_reaches_the_workload_and_its_end_ends_it(bench: Bench):
    await bench.shell("p", "cat; echo over", stdin=True, stdinOnce=True)

    assert await bench.ok("attach", "-i", "p", stdin=b"hello\n") == b"hello\nover\n"

    await bench.ok("wait", "pod/p", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=30s")


async def test_attaching_to_a_terminal_brings_its_size_and_the_output_is_kept(bench: Bench):
    await bench.shell("p", "read go; stty size; exit 3", stdin=True, stdinOnce=True, tty=True)
    async with bench.terminal("attach", "-it", "p", columns=91, rows=41) as terminal:
        await terminal.until(b"If you don't see a command prompt")
        terminal.type(b"\n")
        await terminal.until(b"41 91")
        await terminal.ended()
    await bench.ok("wait", "pod/p", "--for=jsonpath={.status.phase}=Failed", "--timeout=30s")
    assert b"41 91\r\n" in await bench.ok("logs", "p")


@pytest.mark.parametrize("websockets", ["true", "false"], ids=["websocket", "spdy"])
async def test_clients_of_either_protocol_get_the_same(bench: Bench, websockets: str):
    await bench.shell("p", SLEEP)
    data = os.urandom(300_000)
    env = {"KUBECTL_REMOTE_COMMAND_WEBSOCKETS": websockets}

    script = "cat; echo err >&2; exit 5"
    whole = await bench.run("exec", "-i", "p", "--", "sh", "-c", script, stdin=data, **env)

    assert (whole.code, whole.out) == (5, data)
    assert whole.err.startswith("err\n")


async def test_fc_117_deleting_the_pod_ends_its_sessions(bench: Bench):
    await bench.shell("p", SLEEP)
    process = await bench.start("exec", "p", "--", "sh", "-c", "echo here; sleep 600")
    assert process.stdout is not None
    assert await process.stdout.readline() == b"here\n"

    await bench.ok("delete", "pod", "p", "--grace-period=1")

    async with asyncio.timeout(20):
        assert await process.wait() != 0


async def test_fc_117_a_command_that_says_nothing_any_more_is_left_with_its_client(bench: Bench):
    await bench.shell("p", SLEEP)
    await bench.cloud.add_fault("stream_stall", verb="exec", keep=200)
    # The pause keeps the first line out of the piece in which the stream stalls.
    script = "echo $$; sleep 0.5; seq 100000; sleep 600"
    process = await bench.start("exec", "p", "--", "sh", "-c", script)
    assert process.stdout is not None
    async with asyncio.timeout(20):
        pid = int(await process.stdout.readline())

    process.kill()

    await until(lambda: not psutil.pid_exists(pid))


async def test_who_did_what_is_logged_and_never_the_content(bench: Bench):
    await bench.shell("p", SLEEP)
    secret = os.urandom(8).hex()

    await bench.ok("exec", "-i", "p", "--", "sh", "-c", f"echo {secret}; cat", stdin=secret.encode())
    await bench.ok("logs", "p")

    log = bench.controller.log.read_text()
    told = [line for line in log.splitlines() if f"{bench.namespace}/p" in line and "kubelet " in line]
    assert any("kubelet exec" in line for line in told)
    assert any("kubelet logs" in line for line in told)
    assert all("kube-apiserver" in line for line in told)
    assert secret not in log


@pytest.mark.slow
async def test_fc_112_a_slow_reader_gets_all_of_a_big_output_and_the_controller_holds_little(bench: Bench):
    await bench.shell("p", SLEEP)
    controller = psutil.Process(bench.controller.pid)
    before, most = controller.memory_info().rss, 0
    size = 128 << 20
    script = f"head -c {size} /dev/zero; exit 9"
    process = await bench.start("exec", "p", "--", "sh", "-c", script)
    assert process.stdout is not None
    digest, got = hashlib.sha256(), 0
    while piece := await process.stdout.read(1 << 20):
        digest.update(piece)
        got += len(piece)
        if got % (8 << 20) < len(piece):
            await asyncio.sleep(0.05)  # what makes it a slow one
            most = max(most, controller.memory_info().rss)

    assert await process.wait() == 9
    assert got == size
    assert digest.digest() == hashlib.sha256(bytes(size)).digest()
    assert most - before < 32 << 20
