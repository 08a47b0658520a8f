"""The process itself: its health, its log, its orderly end, and the database of another installation."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from pytest_postgresql.executors import NoopExecutor
from sqlalchemy import text

from app.api import keys
from app.store.devserver import DevPostgres
from app.store.engine import create_engine
from app.store.installation import release_hold
from hack.cluster import Cluster
from tests.cluster.whole.conftest import running
from tests.cluster.whole.owners_world import Owners
from tests.support import postgres
from tests.support.cluster import Kubectl

POD = {
    "restartPolicy": "Never",
    "containers": [
        {"name": "work", "image": "work:1", "resources": {"limits": {keys.GPU_RESOURCE: "1"}}},
    ],
}


@pytest.fixture
async def alone(
    cluster: Cluster,
    kubectl: Kubectl,
    postgres_server: DevPostgres,
    database_template: NoopExecutor,
    tmp_path: Path,
) -> AsyncIterator[tuple[Owners, str]]:
    """A controller for this test alone, and the URL of its database."""
    with postgres.clone(postgres_server, database_template) as url:
        async with running(
            kubectl, tmp_path, kubeconfig=cluster.kubeconfig, database=url, webhook_url=cluster.webhook_url
        ) as made:
            yield made, url


async def _ask(owners: Owners, path: str) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"{owners.controller.health_url}{path}") as answer,
    ):
        return answer.status, await answer.text()


def _pod(name: str) -> dict:
    labels = {keys.ENABLED_LABEL: "true", keys.NODE_POOL_LABEL: "once", keys.ACCELERATOR_TYPE_LABEL: "T4"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": POD}


async def test_health_log_and_orderly_end(alone: tuple[Owners, str], kubectl: Kubectl):
    owners, _url = alone
    await owners.kubectl("create", "-f", "-", stdin=_pod("one"))
    await owners.ready(1)

    assert await _ask(owners, "/healthz") == (200, "ok\n")
    status, lines = await _ask(owners, "/readyz")
    assert status == 200
    assert "[+] admission: ok" in lines
    assert "[.] store: ok" in lines
    status, metrics = await _ask(owners, "/metrics")
    assert status == 200
    for name in ("nebula_placement_decisions_total", "nebula_provision_attempts_total", "nebula_claims"):
        assert name in metrics
    assert owners.namespace not in metrics  # no label is a Pod's

    rented = [line for line in _log(owners) if line.get("event") == "machine rented"]
    assert len(rented) == 1
    assert rented[0]["pod"].endswith("/one") or rented[0]["claim"].endswith("-one")
    assert {"claim", "pod"} & rented[0].keys()

    code = await asyncio.to_thread(owners.controller.stop)
    assert code == 0
    lease = json.loads(kubectl("get", "lease", keys.LEASE_NAME, "-n", keys.SYSTEM_NAMESPACE, "-o", "json"))
    assert not lease["spec"].get("holderIdentity")  # given back: the next one need not wait
    (machine,) = await owners.clouds["once"].alive()
    assert machine["state"] == "running"  # the end of a controller ends no machine


async def test_with_the_database_of_another_installation_nothing_is_rented_and_nothing_destroyed(
    alone: tuple[Owners, str],
):
    owners, url = alone
    await owners.kubectl("create", "-f", "-", stdin=_pod("one"))
    await owners.ready(1)
    engine = create_engine(url)
    try:
        async with engine.begin() as conn:
            ours = (await conn.execute(text("select id from installation"))).scalar_one()
            await conn.execute(text("update installation set id = 'aaaaaaaaaa'"))
        async with asyncio.timeout(30):
            while "installation aaaaaaaaaa" not in (await _ask(owners, "/readyz"))[1]:
                await asyncio.sleep(0.1)

        await owners.kubectl("create", "-f", "-", stdin=_pod("two"))
        await owners.kubectl("delete", "pod", "one", "--wait=false")
        once = owners.clouds["once"]
        before = (await once.truth())["calls"]["offers"]  # which every replica asks for, whatever its duties
        await once.until(lambda truth: truth["calls"]["offers"] > before + 5, what="further rounds")

        assert len(await once.machines()) == 1
        assert len(await once.alive()) == 1

        async with engine.begin() as conn:
            await conn.execute(text("update installation set id = :id"), {"id": ours})
        await owners.until(lambda pods: [pod["metadata"]["name"] for pod in pods] == ["two"])
        await owners.ready(1)
        await once.until(lambda truth: [m["state"] for m in truth["machines"]].count("gone") == 1)
    finally:
        await engine.dispose()


async def test_orphans_09_in_a_copy_of_the_cluster_without_its_claims_nothing_is_destroyed_until_confirmed(
    alone: tuple[Owners, str],
):
    """The Secret and the database were copied, the claims not: no rental is released for the want of them."""
    owners, url = alone
    await owners.kubectl("create", "-f", "-", stdin=_pod("one"))
    await owners.ready(1)
    engine = create_engine(url)
    try:
        async with engine.begin() as conn:
            await conn.execute(text("update installation set cluster_uid = 'the-first-cluster'"))
        async with asyncio.timeout(30):
            while "the-first-cluster" not in (await _ask(owners, "/readyz"))[1]:
                await asyncio.sleep(0.1)
        claim = (await owners.kubectl("get", "nodeclaims", "-o", "name")).strip()
        patch = '{"metadata":{"finalizers":null}}'
        await owners.kubectl("patch", claim, "--type=merge", "-p", patch)
        await owners.kubectl("delete", claim)
        await owners.kubectl("delete", "pod", "one", "--force", "--grace-period=0")
        once = owners.clouds["once"]
        before = (await once.truth())["calls"]["offers"]  # which every replica asks for, whatever its duties
        await once.until(lambda truth: truth["calls"]["offers"] > before + 5, what="further rounds")

        assert len(await once.alive()) == 1

        async with engine.begin() as conn:
            assert await release_hold(conn)
        await once.until(lambda truth: [m["state"] for m in truth["machines"]] == ["gone"])
    finally:
        await engine.dispose()


def _log(owners: Owners) -> list[dict]:
    lines = owners.controller.log.read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]
