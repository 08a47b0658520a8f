"""A second replica: how it finds machines, and what becomes of nodes and sessions when it takes over."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
from sqlalchemy import make_url

from app.api import keys
from hack.controller import Controller
from tests.cluster.kubelet.conftest import LEASE, Bench
from tests.cluster.kubelet.test_endpoint import client_tls
from tests.cluster.kubelet.test_logs import until_said
from tests.support.composed import until
from tests.support.proxy import Proxy


@asynccontextmanager
async def standing_by(bench: Bench, folder: Path, *, store: Proxy) -> AsyncIterator[Controller]:
    """Another replica, whose way to the store leads through ``store``."""
    url = make_url(bench.database).set(host="127.0.0.1", port=store.port, query={})
    other = Controller(
        folder / "other",
        kubeconfig=bench.cluster.kubeconfig,
        database_url=url.render_as_string(hide_password=False),
        clouds={name: cloud.url for name, cloud in bench.clouds.items()},
        options=LEASE | {"NEBULA_WEBHOOK_URL": f"https://{bench.controller.webhook_address}"},
    )
    try:
        await asyncio.to_thread(other.start)
        yield other
    finally:
        await asyncio.to_thread(other.stop)


async def said(http: aiohttp.ClientSession, replica: Controller, bench: Bench) -> tuple[int, str]:
    async with http.get(f"{replica.kubelet_url}/containerLogs/{bench.namespace}/p/work") as answer:
        return answer.status, await answer.text()


async def leads_to(bench: Bench, replica: Controller) -> bool:
    """Whether every node announces that replica's endpoint."""
    nodes = [
        json.loads(await bench.ok("get", "node", keys.node_name(name), "-o", "json")) for name in bench.clouds
    ]
    ports = {node["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"] for node in nodes}
    return ports == {urlsplit(replica.kubelet_url).port}


@pytest.mark.slow
@pytest.mark.behaviour(270)
async def test_fc_117_a_replica_asks_claims_first_and_rows_second_and_a_new_leader_calls_nodes_to_itself(
    bench: Bench, tmp_path: Path
):
    await bench.shell("p", "echo here; sleep 600")
    await until_said(bench, "p", b"here")
    socket = f"{make_url(bench.database).query['host']}/.s.PGSQL.5432"
    connector = aiohttp.TCPConnector(ssl=client_tls(bench, tmp_path))
    async with (
        Proxy.running(socket) as store,
        aiohttp.ClientSession(connector=connector) as http,
        standing_by(bench, tmp_path, store=store) as other,
    ):
        try:

            async def found() -> bool:
                return await said(http, other, bench) == (200, "here\n")

            # Once it has opened its accounts, and then without a store: the claim's status is enough.
            await until(found)
            await store.refuse()
            assert await said(http, other, bench) == (200, "here\n")

            # The claim does not say it, and the leader, who would mend that, stands still: the rows do.
            bench.controller.pause()
            claim = keys.claim_name(bench.namespace, "p")
            patch = '{"status":{"instanceID":null}}'
            await bench.ok("patch", "nodeclaim", claim, "--subresource=status", "--type=merge", "-p", patch)
            status, words = await said(http, other, bench)
            assert (status, words) == (
                500,
                f"the machine of pod {bench.namespace}/p is not known to this replica yet",
            )
            store.flow()
            await until(found)
            bench.controller.go_on()

            # The leader stops, with a session under way and its successor's store away.
            process = await bench.start("exec", "p", "--", "sh", "-c", "echo begun; sleep 600")
            assert process.stdout is not None
            assert process.stderr is not None
            assert await process.stdout.readline() == b"begun\n"
            assert await leads_to(bench, bench.controller)
            await store.refuse()
            await asyncio.to_thread(bench.controller.stop)
            async with asyncio.timeout(20):
                assert b"this replica is stopping" in await process.stderr.read()
                assert await process.wait() == 1
            await until(lambda: leads_to(bench, other))
            assert await bench.ok("logs", "p") == b"here\n"
            store.flow()
        finally:
            if bench.controller.running:
                bench.controller.go_on()
            else:
                await asyncio.to_thread(bench.controller.start)
    await until(lambda: leads_to(bench, bench.controller))
