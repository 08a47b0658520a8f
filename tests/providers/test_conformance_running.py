"""What a provider must do that offers output, commands, connections and usage, against real processes."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from providers.base import Machine, MachineState, Ref, ResourceId, Unavailable
from providers.capabilities import (
    Attaches,
    Dials,
    Executes,
    KeepsPreviousRun,
    LogChunk,
    ReportsUsage,
    Restarts,
    Session,
    StreamsLogs,
)
from tests.providers.conftest import Pair, a_workload
from tests.providers.rows import Row, having
from tests.support.composed import until

NewPair = Callable[..., Awaitable[Pair]]
pytestmark = pytest.mark.parametrize("row", having("processes"), ids=str)


async def running(pair: Pair, *script: str, **workload: object) -> Ref:
    """A machine whose workload is a shell with this script."""
    command = ("sh", "-c", " ".join(script))
    made = await pair.rented(workload=a_workload(command=command, **workload))
    await shown(pair, made.ref, MachineState.RUNNING, MachineState.EXITED)
    return made.ref


async def shown(pair: Pair, ref: Ref, *states: MachineState) -> Machine:
    async def there() -> Machine | None:
        machine = await pair.provider.get(ref)
        return machine if machine is not None and machine.state in states else None

    found: Machine = await until(there)
    return found


async def output(pair: Pair, ref: Ref, *, follow: bool = True) -> list[LogChunk]:
    assert isinstance(pair.provider, StreamsLogs)
    chunks = await pair.provider.logs(ref, follow=follow, since=None, tail_lines=None)
    assert chunks is not None
    return [chunk async for chunk in chunks]


def joined(chunks: list[LogChunk], stream: str) -> bytes:
    return b"".join(chunk.data for chunk in chunks if chunk.stream == stream)


async def session(
    pair: Pair, ref: Ref, *command: str, stdin: bool = False, terminal: bool = False
) -> Session:
    assert isinstance(pair.provider, Executes)
    found = await pair.provider.exec(ref, command, stdin=stdin, terminal=terminal)
    assert found is not None
    return found


async def said(found: Session) -> tuple[int, bytes, bytes]:
    async def gather(stream: AsyncIterator[bytes]) -> bytes:
        return b"".join([piece async for piece in stream])

    out, err = await asyncio.gather(gather(found.stdout), gather(found.stderr))
    code = await found.wait()
    await found.aclose()
    return code, out, err


async def test_output_is_delivered_from_the_first_byte_with_its_stream_and_time(pair: Pair):
    ref = await running(pair, "echo one; echo two >&2; printf three")

    chunks = await output(pair, ref)

    assert joined(chunks, "stdout") == b"one\nthree"
    assert joined(chunks, "stderr") == b"two\n"
    assert all(chunk.at is not None for chunk in chunks)


async def test_following_ends_with_the_workload_and_not_before(pair: Pair):
    ref = await running(pair, "echo a; sleep 0.3; echo b; sleep 0.2; echo c")

    assert joined(await output(pair, ref), "stdout") == b"a\nb\nc\n"


async def test_without_following_output_ends_with_what_is_there(pair: Pair):
    ref = await running(pair, "echo here; sleep 600")

    async def there() -> bool:
        return joined(await output(pair, ref, follow=False), "stdout") == b"here\n"

    await until(there)


async def test_bytes_that_are_no_text_and_a_line_of_ten_megabytes_arrive_as_they_are(pair: Pair):
    ref = await running(pair, r"printf '\377\000\376\n'; head -c 10485760 /dev/zero | tr '\0' x; echo")

    data = joined(await output(pair, ref), "stdout")

    assert data[:4] == b"\xff\x00\xfe\n"
    assert data[4:] == b"x" * 10485760 + b"\n"


async def test_output_that_comes_in_a_burst_is_whole(pair: Pair):
    ref = await running(pair, "seq 200000")

    lines = joined(await output(pair, ref), "stdout").split()

    assert lines == [str(number).encode() for number in range(1, 200001)]


async def test_a_stream_that_broke_ends_in_an_error(pair: Pair):
    ref = await running(pair, "seq 10000; sleep 600")
    await pair.cloud.add_fault("stream_cut", verb="logs", keep=1000)

    with pytest.raises(Unavailable):
        await output(pair, ref)


async def test_a_stalled_stream_can_be_left(pair: Pair):
    ref = await running(pair, "seq 10000; sleep 600")
    await pair.cloud.add_fault("stream_stall", verb="logs", keep=1000)
    reading = asyncio.ensure_future(output(pair, ref))
    done, _ = await asyncio.wait([reading], timeout=0.2)
    assert not done

    reading.cancel()

    await asyncio.gather(reading, return_exceptions=True)
    assert reading.cancelled()


async def test_a_slow_stream_is_whole_in_the_end(pair: Pair):
    ref = await running(pair, "echo slow")
    await pair.cloud.add_fault("stream_slow", verb="logs", delay_s=0.05)

    assert joined(await output(pair, ref), "stdout") == b"slow\n"


async def test_a_machine_that_is_not_there_has_no_output_and_runs_nothing(pair: Pair):
    ref = Ref(provider="x", account="default", region=pair.region, resource_id=ResourceId("no-such"))
    provider = pair.provider
    assert isinstance(provider, StreamsLogs)
    assert isinstance(provider, Executes)
    assert isinstance(provider, Attaches)
    assert isinstance(provider, Dials)
    assert isinstance(provider, ReportsUsage)

    assert await provider.logs(ref, follow=False, since=None, tail_lines=None) is None
    assert await provider.exec(ref, ["true"], stdin=False, terminal=False) is None
    assert await provider.attach(ref, stdin=False, terminal=False) is None
    assert await provider.dial(ref, port=80) is None
    assert await provider.usage(ref) is None


async def test_the_previous_run_is_kept_apart(pair: Pair):
    ref = await running(pair, "echo run $$; sleep 600")
    provider = pair.provider
    assert isinstance(provider, Restarts)
    assert isinstance(provider, KeepsPreviousRun)
    assert await provider.previous_logs(ref) is None

    async def there(before: bytes = b"") -> bytes:
        data = joined(await output(pair, ref, follow=False), "stdout")
        return data if data and data != before else b""

    first = await until(there)
    await provider.restart(ref)
    second = await until(lambda: there(first))

    chunks = await provider.previous_logs(ref)
    assert chunks is not None
    assert joined([chunk async for chunk in chunks], "stdout") == first
    assert second != first


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("exit 0", 0),
        ("exit 1", 1),
        ("exit 126", 126),
        ("kill -9 $$", 137),
        ("exit 255", 255),
    ],
)
async def test_exit_codes_are_exact(pair: Pair, script: str, code: int):
    ref = await running(pair, "sleep 600")

    assert (await said(await session(pair, ref, "sh", "-c", script)))[0] == code


async def test_a_command_that_is_not_there_ends_with_127_and_says_so(pair: Pair):
    ref = await running(pair, "sleep 600")

    code, _, err = await said(await session(pair, ref, "no-such-program"))

    assert code == 127
    assert b"no-such-program" in err


async def test_stdin_arrives_whole_and_its_end_too(pair: Pair):
    ref = await running(pair, "sleep 600")
    found = await session(pair, ref, "cat", stdin=True)
    data = os.urandom(3_000_000)
    gathering = asyncio.ensure_future(said(found))

    await found.write(data)
    await found.end_input()

    assert await gathering == (0, data, b"")


async def test_a_terminal_has_the_size_that_it_was_told(pair: Pair):
    ref = await running(pair, "sleep 600")
    found = await session(pair, ref, "sh", "-c", "read go; stty size", stdin=True, terminal=True)

    assert await found.resize(columns=132, rows=50)
    await found.write(b"\n")
    code, out, _ = await said(found)

    assert code == 0
    assert b"50 132" in out


async def test_leaving_a_session_ends_its_process(pair: Pair):
    ref = await running(pair, "sleep 600")
    found = await session(pair, ref, "sh", "-c", "echo $$; sleep 600")
    pid = int(await anext(aiter(found.stdout)))
    assert psutil.pid_exists(pid)

    await found.aclose()

    await until(lambda: not psutil.pid_exists(pid))


async def test_leaving_a_session_ends_a_process_that_reads_no_input(pair: Pair):
    ref = await running(pair, "sleep 600")
    found = await session(pair, ref, "sh", "-c", "echo $$; exec sleep 600", stdin=True)
    pid = int(await anext(aiter(found.stdout)))
    writing = asyncio.ensure_future(found.write(b"x" * (64 << 20)))
    done, _ = await asyncio.wait([writing], timeout=0.3)
    assert not done

    await found.aclose()

    await until(lambda: not psutil.pid_exists(pid))
    await asyncio.gather(writing, return_exceptions=True)


async def test_a_session_that_broke_gives_no_exit_code(pair: Pair):
    ref = await running(pair, "sleep 600")
    await pair.cloud.add_fault("stream_cut", verb="exec", keep=5)
    found = await session(pair, ref, "echo", "hello")

    with pytest.raises(Unavailable):
        await found.wait()
    await found.aclose()


async def test_attaching_shows_what_comes_from_now_on_and_leaving_ends_nothing(pair: Pair):
    ref = await running(pair, "while :; do date; sleep 0.05; done")
    provider = pair.provider
    assert isinstance(provider, Attaches)
    found = await provider.attach(ref, stdin=False, terminal=False)
    assert found is not None

    assert await anext(aiter(found.stdout))
    await found.aclose()

    assert (await shown(pair, ref, MachineState.RUNNING)).state is MachineState.RUNNING


async def attached(pair: Pair, ref: Ref, *, stdin: bool = True, terminal: bool = False) -> Session:
    assert isinstance(pair.provider, Attaches)
    found = await pair.provider.attach(ref, stdin=stdin, terminal=terminal)
    assert found is not None
    return found


async def test_a_workload_with_input_reads_what_those_who_attach_write(pair: Pair):
    ref = await running(pair, "read one; echo got $one; read two; echo got $two", stdin=True)
    first = await attached(pair, ref)
    await first.write(b"a\n")
    assert await anext(aiter(first.stdout)) == b"got a\n"
    await first.end_input()  # which is no end for the workload
    await first.aclose()

    second = await attached(pair, ref)
    await second.write(b"b\n")
    code, out, _ = await said(second)

    assert (code, out) == (0, b"got b\n")


async def test_an_input_that_is_there_once_ends_with_the_first_who_attached(pair: Pair):
    ref = await running(pair, "cat; echo over", stdin=True, stdin_once=True)
    silent = await attached(pair, ref, stdin=False)
    await silent.aclose()  # it has none that could end
    found = await attached(pair, ref)
    await found.write(b"all of it\n")
    await found.end_input()

    code, out, _ = await said(found)

    assert (code, out) == (0, b"all of it\nover\n")


async def test_a_workload_without_input_reads_nothing_of_those_who_attach(pair: Pair):
    ref = await running(pair, "cat; while [ ! -e $HOME/go ]; do sleep 0.02; done; echo over")
    found = await attached(pair, ref)
    await found.write(b"not read\n")
    touched = await session(pair, ref, "sh", "-c", "touch $HOME/go")
    await said(touched)

    code, out, _ = await said(found)

    assert (code, out) == (0, b"over\n")


async def test_a_workload_with_a_terminal_learns_its_size_from_whoever_attaches(pair: Pair):
    ref = await running(pair, "read go; stty size; echo err >&2", stdin=True, stdin_once=True, terminal=True)
    found = await attached(pair, ref, terminal=True)
    assert await found.resize(columns=111, rows=44)
    await found.write(b"\n")

    code, out, err = await said(found)

    assert (code, err) == (0, b"")
    assert b"44 111\r\n" in out
    assert b"err\r\n" in out


async def test_a_port_is_dialled_and_each_direction_ends_on_its_own(pair: Pair):
    script = (
        "import os,socket; s=socket.create_server(('127.0.0.1',int(os.environ['FAKE_PORT_8000'])))\n"
        "while True:\n c,_=s.accept(); d=b''\n while (p:=c.recv(65536)): d+=p\n"
        " c.sendall(d[::-1]); c.close()"
    )
    made = await pair.rented(workload=a_workload(command=("python3", "-c", script), ports=(8000,)))
    provider = pair.provider
    assert isinstance(provider, Dials)
    await shown(pair, made.ref, MachineState.RUNNING)

    async def dialled() -> object:
        try:
            return await provider.dial(made.ref, port=8000)
        except Unavailable:
            return None

    pipe = await until(dialled)
    await pipe.write(b"abc" * 100_000)
    await pipe.end_output()
    answer = b""
    while piece := await pipe.read():
        answer += piece

    assert answer == b"cba" * 100_000
    await pipe.aclose()


async def test_a_port_that_nobody_listens_on_is_refused(pair: Pair):
    ref = await running(pair, "sleep 600")
    assert isinstance(pair.provider, Dials)

    with pytest.raises(Unavailable, match="refused"):
        await pair.provider.dial(ref, port=8000)


async def test_usage_grows_with_work(pair: Pair):
    ref = await running(pair, "while :; do :; done")
    provider = pair.provider
    assert isinstance(provider, ReportsUsage)

    async def busy() -> bool:
        usage = await provider.usage(ref)
        return usage is not None and (usage.cpu_s or 0) > 0.1 and (usage.memory_bytes or 0) > 0

    await until(busy)


async def test_a_workload_hears_that_it_is_to_end_and_its_own_code_counts(pair: Pair):
    ref = await running(pair, "trap 'echo bye; exit 3' TERM; while :; do sleep 0.05; done")

    await pair.provider.stop(ref, grace_s=20)

    machine = await shown(pair, ref, MachineState.EXITED)
    assert machine.end is not None
    assert machine.end.exit_code == 3
    assert joined(await output(pair, ref), "stdout") == b"bye\n"


async def test_a_machine_that_is_terminated_leaves_no_process(pair: Pair):
    ref = await running(pair, "echo $HOME; setsid sleep 601 & setsid sleep 602 & sleep 603")
    mark = await _mark(pair, ref)
    await until(lambda: len(_marked(mark)) >= 3)

    await pair.provider.terminate(ref)

    await until(lambda: not _marked(mark))


async def test_a_cloud_that_is_killed_leaves_no_process(new_pair: NewPair, row: Row):
    pair = await new_pair()
    ref = await running(pair, "echo $HOME; setsid sleep 604 & sleep 605")
    mark = await _mark(pair, ref)
    await until(lambda: len(_marked(mark)) >= 2)

    await pair.cloud.kill()

    await until(lambda: not _marked(mark))


async def _mark(pair: Pair, ref: Ref) -> str:
    """By its folder: another test's cloud on this computer may have a machine of the same id."""
    home = b""
    async with asyncio.timeout(20):
        while not home.endswith(b"\n"):
            home = joined(await output(pair, ref, follow=False), "stdout")
    return f"FAKE_MACHINE_FOLDER={home.decode().strip()}"


def _marked(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found
