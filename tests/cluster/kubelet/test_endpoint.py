"""The endpoint itself: who may call it, its words for what cannot be done, usage, WebSocket, probes."""

import asyncio
import base64
import json
import re
import shutil
import ssl
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from app.api import keys
from app.kube import pki
from tests.cluster.kubelet.conftest import Bench
from tests.support.composed import until

SLEEP = "sleep 600"
_LINE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)(?: \d+)?$")


def client_tls(bench: Bench, folder: Path) -> ssl.SSLContext:
    """The admin's certificate, which the cluster's client CA has signed. The server's is of a CA of ours."""
    config = yaml.safe_load(bench.cluster.kubeconfig.read_text())
    user = config["users"][0]["user"]
    pair = folder / "client.pem"
    pair.write_bytes(
        base64.b64decode(user["client-certificate-data"]) + base64.b64decode(user["client-key-data"])
    )
    context = anonymous_tls()
    context.load_cert_chain(pair)
    return context


def anonymous_tls() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


@asynccontextmanager
async def calling(bench: Bench, context: ssl.SSLContext) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(ssl=context)
    async with aiohttp.ClientSession(bench.controller.kubelet_url, connector=connector) as http:
        yield http


@pytest.fixture
async def http(bench: Bench, tmp_path: Path) -> AsyncIterator[aiohttp.ClientSession]:
    """A caller with every right."""
    async with calling(bench, client_tls(bench, tmp_path)) as session:
        yield session


@pytest.mark.behaviour(273, 274, 414)
async def test_fc_116_nobody_gets_an_answer_without_a_name_and_a_right(bench: Bench):
    node = keys.node_name("runs")
    token = (await bench.ok("create", "token", "default")).decode().strip()
    paths = ("/containerLogs/x/y/z", "/exec/x/y/z?command=a&output=1", f"/nodes/{node}/metrics/resource")
    async with calling(bench, anonymous_tls()) as http:
        for path in paths:
            async with http.get(path) as answer:
                assert answer.status == 401, path
            async with http.get(path, headers={"Authorization": "Bearer no-such-token"}) as answer:
                assert answer.status == 401, path
            async with http.get(path, headers={"Authorization": f"Bearer {token}"}) as answer:
                assert answer.status == 403, path
                assert f"system:serviceaccount:{bench.namespace}:default" in await answer.text()


async def test_fc_116_a_certificate_of_another_authority_is_no_name(bench: Bench, tmp_path: Path):
    now = datetime.now(UTC)
    stranger = pki.mint_ca(now=now, life=timedelta(hours=1))
    leaf = pki.mint_leaf(stranger, names=["127.0.0.1"], now=now, life=timedelta(hours=1))
    pair = tmp_path / "stranger.pem"
    pair.write_bytes(leaf.certificate + leaf.key)
    context = anonymous_tls()
    context.load_cert_chain(pair)
    async with calling(bench, context) as http:
        with pytest.raises(aiohttp.ClientError):
            await http.get("/healthz")


@pytest.mark.behaviour(277)
async def test_fc_116_the_certificate_is_for_the_address_that_the_nodes_announce(bench: Bench):
    host, _, port = bench.controller.kubelet_url.removeprefix("https://").partition(":")

    served = await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))

    assert {"127.0.0.1", "localhost"} <= pki.names(served.encode())


async def test_a_token_with_the_right_reads_usage_and_runs_nothing(bench: Bench):
    name = f"metrics-{bench.namespace}"
    await bench.ok(
        "create", "clusterrole", name, "--verb=get", "--resource=nodes/metrics,nodes/stats,nodes/proxy"
    )
    await bench.ok(
        "create",
        "clusterrolebinding",
        name,
        f"--clusterrole={name}",
        f"--serviceaccount={bench.namespace}:default",
    )
    await bench.shell("p", SLEEP)
    token = (await bench.ok("create", "token", "default")).decode().strip()
    bearer = {"Authorization": f"Bearer {token}"}
    try:
        async with calling(bench, anonymous_tls()) as http:
            async with http.get(
                f"/nodes/{keys.node_name('runs')}/metrics/resource", headers=bearer
            ) as answer:
                assert answer.status == 200
            async with http.get(f"/containerLogs/{bench.namespace}/p/work", headers=bearer) as answer:
                assert answer.status == 200
            path = f"/exec/{bench.namespace}/p/work?command=true&output=1"
            async with http.get(path, headers=bearer) as answer:
                assert answer.status == 403  # reading rights run nothing, although it is a GET
    finally:
        await bench.run("delete", "clusterrolebinding", name)
        await bench.run("delete", "clusterrole", name)


def series(page: str) -> dict[str, dict[str, float]]:
    """Values by name, then by labels."""
    found: dict[str, dict[str, float]] = {}
    for line in page.splitlines():
        if match := _LINE.match(line):
            found.setdefault(match[1], {})[match[2] or ""] = float(match[3])
    return found


async def test_usage_is_a_counter_of_real_work_and_what_is_unknown_is_absent(
    bench: Bench, http: aiohttp.ClientSession
):
    await bench.shell("busy", "while :; do :; done")
    labels = f'container="work",namespace="{bench.namespace}",pod="busy"'
    page = f"/nodes/{keys.node_name('runs')}"

    async def worked() -> bool:
        async with http.get(page + "/metrics/resource") as answer:
            values = series(await answer.text())
        cpu = values.get("container_cpu_usage_seconds_total", {}).get(labels, 0.0)
        return cpu > 0.2 and values["container_memory_working_set_bytes"][labels] > 0

    await until(worked)
    async with http.get(page + "/stats/summary") as answer:
        summary = await answer.json()
    (pod,) = [each for each in summary["pods"] if each["podRef"]["namespace"] == bench.namespace]
    assert pod["containers"][0]["cpu"]["usageCoreNanoSeconds"] > 0
    await bench.pod("mute", ["sleep"], cloud="mute")
    async with http.get(f"/containerLogs/{bench.namespace}/mute/work") as answer:
        assert answer.status == 404
        assert await answer.text() == 'provider "mute" shows no output of its machines'
    async with http.get(f"/nodes/{keys.node_name('mute')}/metrics/resource") as answer:
        assert answer.status == 200
        assert set(series(await answer.text())) == {"resource_scrape_error"}


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/containerLogs/{ns}/nobody/work", 404, 'pod "nobody" does not exist'),
        ("/containerLogs/{ns}/p/other", 404, 'container "other" not found in pod "p"'),
        ("/containerLogs/{ns}/p/work?sinceSeconds=x", 400, "Unable to decode query."),
        ("/containerLogs/{ns}/p/work?sinceSeconds=0", 422, "Invalid request."),
        ("/exec/{ns}/nobody/work?command=a&output=1", 404, "pod does not exist"),
        ("/exec/{ns}/p/other?command=a&output=1", 500, 'container not found (\\"other\\")'),
        ("/exec/{ns}/p/work?output=1", 400, "you must specify a command"),
        ("/exec/{ns}/p/work?command=a", 400, "at least 1 of stdin, stdout, stderr"),
        ("/exec/{ns}/p/work?command=a&output=1", 400, "missing upgrade headers"),
        ("/exec/{ns}/p/0000/work?command=a&output=1", 404, "pod does not exist"),
        ("/attach/{ns}/p/work", 400, "at least 1 of stdin, stdout, stderr"),
        ("/portForward/{ns}/nobody", 404, "pod does not exist"),
        ("/portForward/{ns}/p", 400, "missing upgrade headers"),
        ("/exec/{ns}/p/work?command=&output=1", 400, "you must specify a command"),
        ("/containerLogs/{ns}/p/work?sinceTime=yesterday", 400, "Unable to decode query."),
        ("/containerLogs/{ns}/p/work?tailLines=-1", 422, "Invalid request."),
        ("/containerLogs/{ns}/p/work?limitBytes=0", 422, "Invalid request."),
        ("/nodes/nobody/metrics/resource", 404, "several nodes are served here"),
        ("/no/such/path", 404, ""),
    ],
    ids=str,
)
async def test_bad_requests_are_answered_as_a_kubelet_answers_them(
    bad: tuple[Bench, aiohttp.ClientSession], path: str, status: int, words: str
):
    bench, http = bad
    async with http.get(path.format(ns=bench.namespace)) as answer:
        assert answer.status == status
        assert words in await answer.text()


@pytest.fixture(scope="module")
async def bad(
    whole: Bench, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Bench, aiohttp.ClientSession]]:
    """One running Pod for all bad requests."""
    mine = Bench(
        cluster=whole.cluster, controller=whole.controller, clouds=whole.clouds, database=whole.database
    )
    await mine.ok("create", "namespace", mine.namespace)
    await mine.shell("p", SLEEP)
    async with calling(mine, client_tls(mine, tmp_path_factory.mktemp("bad"))) as session:
        yield mine, session
    await mine.close()
    await mine.run("delete", "namespace", mine.namespace, "--wait=false")


async def test_an_unknown_subprotocol_is_refused_and_garbage_after_the_upgrade_ends_the_connection(
    bad: tuple[Bench, aiohttp.ClientSession],
):
    bench, http = bad
    path = f"/exec/{bench.namespace}/p/work?command=cat&input=1&output=1"
    spdy = {"Connection": "Upgrade", "Upgrade": "SPDY/3.1"}
    async with http.post(path, headers=spdy | {"X-Stream-Protocol-Version": "v9"}) as answer:
        assert answer.status == 403
        assert "v4.channel.k8s.io" in answer.headers["X-Accepted-Stream-Protocol-Versions"]
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await http.ws_connect(path, protocols=["v9"])
    assert refused.value.status == 403
    host, _, port = bench.controller.kubelet_url.removeprefix("https://").partition(":")
    reader, writer = await asyncio.open_connection(
        host,
        int(port),
        ssl=http.connector._ssl,  # type: ignore[union-attr]
    )
    lines = {**spdy, "X-Stream-Protocol-Version": "v4.channel.k8s.io", "Host": "x", "Content-Length": "0"}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    writer.write(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + b"\x80\x09garbage that is no SPDY")
    async with asyncio.timeout(10):
        answer_ = await reader.read()
    assert answer_.startswith(b"HTTP/1.1 101 ")
    writer.close()


@pytest.mark.parametrize(
    "version", ["v5.channel.k8s.io", "v4.channel.k8s.io", "v4.base64.channel.k8s.io", "channel.k8s.io"]
)
async def test_every_websocket_version_carries_a_session(
    bad: tuple[Bench, aiohttp.ClientSession], version: str
):
    bench, http = bad
    query = "command=sh&command=-c&command=head%20-c%205;%20echo%20err%20>%262;%20exit%206"
    path = f"/exec/{bench.namespace}/p/work?{query}&input=1&output=1&error=1"
    coded = "base64" in version
    said: dict[int, bytes] = {}
    async with http.ws_connect(path, protocols=[version]) as ws:
        assert ws.protocol == version
        if coded:
            await ws.send_str("0" + base64.b64encode(b"hello").decode())
        else:
            await ws.send_bytes(b"\0hello")
        if version.startswith("v5"):
            await ws.send_bytes(b"\xff\0")
        async for message in ws:
            data: Any = message.data
            channel = int(data[:1]) if coded else data[0]
            said[channel] = said.get(channel, b"") + (base64.b64decode(data[1:]) if coded else data[1:])
    assert said[1] == b"hello"
    assert said[2] == b"err\n"
    if version.startswith("v"):
        status = json.loads(said[3])
        assert status["details"]["causes"] == [{"reason": "ExitCode", "message": "6"}]
    else:
        assert b"exit" in said[3]


async def test_the_websocket_client_of_the_kubernetes_library_runs_commands(bench: Bench):
    await bench.shell("p", SLEEP)
    code = f"""
import asyncio
from kubernetes_asyncio import client, config
from kubernetes_asyncio.stream import WsApiClient

async def main():
    await config.load_kube_config({str(bench.cluster.kubeconfig)!r})
    async with WsApiClient() as api:
        print(await client.CoreV1Api(api).connect_get_namespaced_pod_exec(
            "p", {bench.namespace!r}, command=["seq", "3"], stdout=True, stderr=True, stdin=False, tty=False))

asyncio.run(main())
"""
    import sys

    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    assert out.decode().split() == ["1", "2", "3"], err.decode()


async def test_exec_probes_and_the_hook_before_the_end_are_run_in_the_machine(bench: Bench):
    folder = Path(tempfile.mkdtemp())  # not the test's own, which the processes' account cannot reach
    folder.chmod(0o777)
    told = folder / "told"
    lifecycle = {"preStop": {"exec": {"command": ["sh", "-c", f"echo bye > {told}"]}}}
    probe = {"exec": {"command": ["sh", "-c", "test -e $HOME/ready"]}, "periodSeconds": 1}
    await bench.shell(
        "p",
        "sleep 2; touch $HOME/ready; sleep 600",
        wait="Running",
        readinessProbe=probe,
        lifecycle=lifecycle,
    )
    ready = await bench.run("get", "pod", "p", "-o", "jsonpath={.status.containerStatuses[0].ready}")
    assert ready.out == b"false"
    await bench.ok("wait", "pod/p", "--for=condition=Ready", "--timeout=30s")

    await bench.ok("delete", "pod", "p", "--grace-period=10")

    assert told.read_text() == "bye\n"
    shutil.rmtree(folder)


async def test_where_it_cannot_be_done_a_pod_with_an_exec_probe_or_an_input_is_not_placed(bench: Bench):
    probe = {"exec": {"command": ["true"]}}
    await bench.shell("p", SLEEP, cloud="mute", wait="", readinessProbe=probe)
    await bench.shell("q", SLEEP, cloud="mute", wait="", stdin=True)
    await bench.shell("r", SLEEP, cloud="mute", wait="", tty=True)
    words = {
        "p": "exec probes and hooks cannot be run here",
        "q": "nobody can attach to a container here",
        "r": "nobody can attach to a container here",
    }

    async def told() -> bool:
        pods = [json.loads(await bench.ok("get", "pod", name, "-o", "json")) for name in words]
        return all(words[pod["metadata"]["name"]] in json.dumps(pod["status"]) for pod in pods)

    await until(told)
