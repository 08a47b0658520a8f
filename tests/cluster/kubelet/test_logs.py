"""``kubectl logs`` with all its options, through the real API server."""

import asyncio
import json
import re
from collections import Counter
from datetime import datetime, timedelta

import psutil
import pytest

from app.api import keys
from tests.cluster.kubelet.conftest import Bench
from tests.support.composed import until

STAMPED = re.compile(rb"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z ")


async def until_said(bench: Bench, pod: str, words: bytes) -> None:
    async def says() -> bool:
        done = await bench.run("logs", pod, "--tail=9")
        return words in done.out

    await until(says, what=f"{pod} says {words!r}")


@pytest.mark.behaviour(242, 247, 249, 250)
async def test_options_choose_what_a_running_container_shows(bench: Bench):
    script = (
        "echo old; sleep 2.5; for n in 1 2 3; do echo line $n; done; echo err >&2; printf rest; sleep 600"
    )
    await bench.shell("p", script)
    await until_said(bench, "p", b"rest")
    logs = ("logs", "p", "-c", "work")

    assert (await bench.ok(*logs)).replace(b"err\n", b"") == b"old\nline 1\nline 2\nline 3\nrest"
    assert len((await bench.ok(*logs, "--tail=2")).splitlines()) == 2
    assert await bench.ok(*logs, "--tail=0") == b""
    assert await bench.ok(*logs, "--limit-bytes=6") == b"old\nli"
    stamped = await bench.ok(*logs, "--timestamps")
    assert all(STAMPED.match(line) for line in stamped.splitlines())
    first = stamped.splitlines()[0].split(b" ")[0].decode()
    assert b"old" in await bench.ok(*logs, f"--since-time={first}")
    later = datetime.fromisoformat(first) + timedelta(seconds=1)
    since = await bench.ok(*logs, f"--since-time={later.isoformat().replace('+00:00', 'Z')}")
    assert b"old" not in since
    assert b"line 1" in since
    assert await bench.ok(*logs, "--since=1h") == await bench.ok(*logs)
    await bench.shell("q", "echo of another; sleep 600")
    await until_said(bench, "q", b"of another")
    both = await bench.ok("logs", "-l", "app=bench", "--prefix")
    assert b"[pod/p/work] old\n" in both
    assert b"[pod/q/work] of another\n" in both
    every = ("--tail=4", "--timestamps", "--limit-bytes=40")
    limited = await bench.ok(*logs, *every)
    assert len(limited) == 40
    assert STAMPED.match(limited)


@pytest.mark.behaviour(246, 252)
async def test_fc_110_following_shows_each_line_as_it_comes_and_ends_with_the_container(bench: Bench):
    await bench.shell("p", "echo one; while [ ! -e $HOME/go ]; do sleep 0.05; done; echo two; sleep 0.3")
    process = await bench.start("logs", "-f", "p")
    assert process.stdout is not None
    assert await process.stdout.readline() == b"one\n"

    await bench.ok("exec", "p", "--", "sh", "-c", "touch $HOME/go")

    assert await process.stdout.readline() == b"two\n"
    async with asyncio.timeout(20):
        assert await process.wait() == 0


async def test_fc_110_following_a_pod_that_has_no_machine_yet_waits_for_it(bench: Bench):
    await bench.cloud.set_life(boot_s=4)
    try:
        await bench.shell("p", "echo begun; sleep 0.5", wait="")
        await bench.ok("wait", "pod/p", "--for=condition=PodScheduled", "--timeout=30s")
        waiting = await bench.run("logs", "p")
        assert waiting.code == 1
        assert 'container "work" in pod "p" is waiting to start' in waiting.err
        early = await bench.run("exec", "p", "--", "true")
        assert early.code == 1
        assert 'container not found ("work"): its machine does not run yet' in early.err
        forwarded = await bench.run("port-forward", "p", ":8000")
        assert forwarded.code == 1

        assert await bench.ok("logs", "-f", "p") == b"begun\n"
    finally:
        await bench.cloud.set_life(boot_s=0)


async def test_fc_110_a_follower_that_is_killed_leaves_no_connection_behind(bench: Bench):
    await bench.shell("p", "echo here; sleep 600")
    await until_said(bench, "p", b"here")
    controller = psutil.Process(bench.controller.pid)

    def connections() -> Counter[int]:
        """By the port at the other end."""
        open_ = (each for each in controller.net_connections(kind="tcp") if each.raddr)
        return Counter(each.raddr.port for each in open_ if each.status == psutil.CONN_ESTABLISHED)

    before = connections()
    followers = [await bench.start("logs", "-f", "p") for _ in range(5)]
    for follower in followers:
        assert follower.stdout is not None
        assert await follower.stdout.readline() == b"here\n"
    (cloud,) = [port for port, count in (connections() - before).items() if count >= len(followers)]

    for follower in followers:
        follower.kill()

    await until(lambda: connections()[cloud] <= before[cloud], what="every stream of the cloud is let go")


@pytest.mark.behaviour(247)
async def test_a_followed_tail_goes_on_with_what_comes(bench: Bench):
    await bench.shell("p", "seq 100; while [ ! -e $HOME/go ]; do sleep 0.05; done; echo more")
    await until_said(bench, "p", b"100\n")
    process = await bench.start("logs", "-f", "--tail=2", "p")
    assert process.stdout is not None
    assert await process.stdout.readline() == b"99\n"

    await bench.ok("exec", "p", "--", "sh", "-c", "touch $HOME/go")

    async with asyncio.timeout(20):
        assert await process.stdout.read() == b"100\nmore\n"


async def test_the_run_before_the_last_restart_is_shown_as_previous(bench: Bench):
    name = "cat /proc/sys/kernel/random/uuid"
    script = f"{name}; if [ -e $HOME/again ]; then sleep 600; fi; touch $HOME/again; exit 1"
    await bench.shell("p", script, policy="Always", wait="")

    async def restarted() -> bool:
        pod = json.loads(await bench.ok("get", "pod", "p", "-o", "json"))
        status = (pod["status"].get("containerStatuses") or [{}])[0]
        return status.get("restartCount") == 1 and "running" in status["state"]

    await until(restarted)
    await until_said(bench, "p", b"-")
    previous, current = await bench.ok("logs", "p", "--previous"), await bench.ok("logs", "p")
    assert len(previous) == len(current) == 37
    assert previous != current

    await bench.shell("first", "sleep 600")
    none = await bench.run("logs", "first", "--previous")
    assert none.code == 1
    assert 'previous terminated container "work" in pod "first" not found' in none.err


async def test_a_finished_pod_shows_its_output_after_its_machine_is_gone(bench: Bench):
    await bench.shell("p", "echo first; seq 50000; echo last", wait="Succeeded")

    async def gone() -> bool:
        return (await bench.machine("p"))["state"] == "gone"

    await until(gone)
    lines = (await bench.ok("logs", "p")).splitlines()
    assert lines[0] == b"[the beginning of this output is not kept]"
    assert lines[-2:] == [b"50000", b"last"]
    assert await bench.ok("logs", "p", "--tail=1") == b"last\n"
    assert await bench.ok("logs", "-f", "p", "--tail=1") == b"last\n"
    stamped = await bench.ok("logs", "p", "--since=1h", "--timestamps", "--tail=1")
    assert STAMPED.sub(b"", stamped) == b"last\n"
    later = datetime.fromisoformat(stamped.split(b" ")[0].decode()) + timedelta(seconds=1)
    assert await bench.ok("logs", "p", f"--since-time={later:%Y-%m-%dT%H:%M:%SZ}") == b""


async def test_a_broken_stream_is_taken_up_again_where_it_stopped(bench: Bench):
    await bench.shell("p", "seq 30000; sleep 600")
    await until_said(bench, "p", b"30000\n")
    await bench.cloud.add_fault("stream_cut", verb="logs", keep=100_000)

    process = await bench.start("logs", "-f", "p")
    assert process.stdout is not None
    async with asyncio.timeout(20):
        lines = [await process.stdout.readline() for _ in range(30000)]

    assert lines == [b"%d\n" % number for number in range(1, 30001)]


@pytest.mark.behaviour(253)
async def test_an_outage_never_reads_as_an_empty_log(bench: Bench):
    await bench.shell("p", "echo here; sleep 600")
    await bench.cloud.add_fault("status", verb="logs", times=20)

    done = await bench.run("logs", "p")

    assert done.code == 1
    assert "could not be read" in done.err


@pytest.mark.slow
async def test_fc_111_fc_113_a_big_burst_and_bytes_that_are_no_text_are_whole(bench: Bench):
    script = (
        r"printf '\377\000\376\n'; head -c 5000000 /dev/zero | tr '\0' x; echo; seq 1000000; touch $HOME/done"
    )
    await bench.shell("p", f"{script}; sleep 600")

    async def done() -> bool:
        return (await bench.run("exec", "p", "--", "sh", "-c", "test -e $HOME/done")).code == 0

    await until(done)

    said = await bench.ok("logs", "p")

    lines = b"".join(b"%d\n" % n for n in range(1, 1_000_001))
    assert said == b"\xff\x00\xfe\n" + b"x" * 5_000_000 + b"\n" + lines


@pytest.mark.behaviour(243)
async def test_what_a_provider_cannot_show_and_what_is_not_there_are_errors(bench: Bench):
    await bench.pod("mute", ["sleep", "600"], cloud="mute")

    done = await bench.run("logs", "mute")
    assert done.code == 1
    assert "NotFound" in done.err  # of a 404 the API server passes on no words
    wrong = await bench.run("logs", "mute", "-c", "other")
    assert wrong.code == 1
    assert "container other is not valid for pod mute" in wrong.err


async def test_every_node_announces_the_endpoint_and_its_own_page(bench: Bench):
    for cloud in bench.clouds:
        name = keys.node_name(cloud)
        node = json.loads(await bench.ok("get", "node", name, "-o", "json"))

        assert node["status"]["addresses"] == [{"type": "InternalIP", "address": "127.0.0.1"}]
        port = node["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"]
        assert bench.controller.kubelet_url.endswith(f":{port}")
        path = node["metadata"]["annotations"]["metrics.k8s.io/resource-metrics-path"]
        assert path == f"/nodes/{name}/metrics/resource"
