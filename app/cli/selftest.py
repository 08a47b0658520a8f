"""``nebula selftest``: proves an installation from within the cluster, as ``helm test`` runs it.

Each look is said as it is done: the API serves our kinds; the database has this version's schema;
admission gates an opted-in Pod (a dry run, in a namespace of its own); and, where a fake cloud is among the
providers, a Pod runs on it to its end, its claim goes, the ledger has what it cost, and the sweep finds
nothing left of it. Whatever it made it takes away again; the ledger keeps its record.
"""

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import click

from app.cli.cluster import cluster_options, connected

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from app.kube.client import Kube, Obj

POLL_S = 0.5


@click.command("selftest")
@cluster_options
@click.option("--provider", help="A fake cloud's provider name: run a whole Pod on it.")
@click.option("--timeout-s", type=click.FloatRange(min=1), default=180.0, show_default=True)
def command(kubeconfig: str | None, namespace: str, provider: str | None, timeout_s: float) -> None:
    """Prove an installation from within: API, database, admission, a Pod's whole life and its cost."""
    asyncio.run(_run(kubeconfig, provider=provider, timeout_s=timeout_s))


async def _run(kubeconfig: str | None, *, provider: str | None, timeout_s: float) -> None:
    async with connected(kubeconfig) as kube:
        await _kinds(kube)
        await _database()
        async with _namespace(kube) as namespace:
            await _admission(kube, namespace, timeout_s=timeout_s)
            if provider is not None:
                uid = await _whole_life(kube, namespace, provider, timeout_s=timeout_s)
                await _record(uid, timeout_s=timeout_s)
    click.echo("all is well")


async def _kinds(kube: "Kube") -> None:
    from app.kube.preflight import missing_kinds

    if missing := await missing_kinds(kube):
        raise click.ClickException(f"the API server does not serve {', '.join(missing)}")
    click.echo("API: our kinds are served")


@asynccontextmanager
async def _store() -> "AsyncIterator[AsyncConnection]":
    """A connection to the database of the variables; what is wrong with it ends the test in one sentence."""
    from app.settings import SettingsError, load
    from app.store.engine import StoreUnavailable, engine_of, single

    try:
        settings = load({}, os.environ)
        engine = engine_of(settings)
    except (SettingsError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    try:
        async with single(engine) as conn:
            yield conn
    except StoreUnavailable as error:
        raise click.ClickException(f"the database cannot be used: {error}") from None
    finally:
        await engine.dispose()


async def _database() -> None:
    from app.store.installation import get

    async with _store() as conn:
        recorded = await get(conn)
    if recorded is None:
        raise click.ClickException("the database belongs to no installation yet: is a controller running?")
    click.echo(f"database: the schema is there, of installation {recorded.id}")


async def _admission(kube: "Kube", namespace: str, *, timeout_s: float) -> None:
    """A dry run shows what the webhooks made of the Pod."""
    from app.api import keys
    from app.kube import paths
    from app.kube.errors import KubeError

    body = _pod("selftest-admission", pool="selftest")
    last = ""

    async def gated() -> bool:
        nonlocal last
        try:
            made = await kube.create(paths.pods(namespace), body, params={"dryRun": "All"})
        except KubeError as error:  # a webhook that is not reached yet
            last = str(error)
            return False
        gates = [gate["name"] for gate in made["spec"].get("schedulingGates") or ()]
        last = f"gates {gates}"
        return keys.SCHEDULING_GATE in gates

    if not await _holds(gated, within_s=min(timeout_s, 60.0)):
        raise click.ClickException(f"admission does not gate an opted-in Pod: {last}")
    click.echo("admission: an opted-in Pod is gated")


async def _whole_life(kube: "Kube", namespace: str, provider: str, *, timeout_s: float) -> str:
    """Returns the Pod's uid."""
    from app.kube import paths

    pool = f"selftest-{secrets.token_hex(3)}"
    await kube.create(paths.nodepools(), _pool(pool, provider))
    try:
        made = await kube.create(paths.pods(namespace), _pod("selftest", pool=pool))
        seen: Obj = made

        async def succeeded() -> bool:
            nonlocal seen
            seen = await kube.get(paths.pod(namespace, "selftest"))
            return bool(seen["status"].get("phase") == "Succeeded")

        if not await _holds(succeeded, within_s=timeout_s):
            conditions = seen["status"].get("conditions") or []
            raise click.ClickException(f"the Pod did not run to its end: {conditions}")
        click.echo(f"Pod: ran to its end on {seen['spec'].get('nodeName')}")
        await kube.delete(paths.pod(namespace, "selftest"))

        async def no_claim() -> bool:
            page = await kube.get(paths.nodeclaims())
            return not any(item["spec"]["podRef"]["uid"] == made["metadata"]["uid"] for item in page["items"])

        if not await _holds(no_claim, within_s=timeout_s):
            raise click.ClickException("the Pod's NodeClaim did not go: its machine is not proven gone")
        click.echo("machine: given back")
        return str(made["metadata"]["uid"])
    finally:
        with _gone():
            await kube.delete(paths.nodepool(pool))


async def _record(pod_uid: str, *, timeout_s: float) -> None:
    """What the Pod cost is in the ledger once its run is closed; the sweep has found nothing of it."""
    from sqlalchemy import text

    cost = text("select sum(cost) from pod_receipt where uid = :uid")
    findings = text(
        "select count(*) filter (where claim_uid in (select claim_uid from run where pod_uid = :uid)),"
        " count(*) from orphan_open"
    )

    async with _store() as conn:

        async def is_there() -> bool:
            return (await conn.execute(cost, {"uid": pod_uid})).scalar_one() is not None

        if not await _holds(is_there, within_s=timeout_s):
            raise click.ClickException("the ledger does not know what the Pod cost")
        usd = (await conn.execute(cost, {"uid": pod_uid})).scalar_one()
        click.echo(f"cost: the ledger has the Pod with {usd:.6f} dollars")
        ours, all_ = (await conn.execute(findings, {"uid": pod_uid})).one()
    if ours:
        raise click.ClickException("the sweep has found something left of the Pod: nebula orphans")
    click.echo(f"audit: nothing is left of it; {all_} open findings of others")


def _pool(name: str, provider: str) -> "Obj":
    from app.api import keys

    return {
        "apiVersion": keys.API_VERSION,
        "kind": keys.NODE_POOL,
        "metadata": {"name": name},
        "spec": {
            "providers": [{"name": provider}],
            "capacityTypes": ["OnDemand"],
            "strategy": "Ordered",
        },
    }


def _pod(name: str, *, pool: str) -> "Obj":
    """A workload that the fake cloud ends by itself, a second after it runs."""
    from app.api import keys

    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": {keys.ENABLED_LABEL: keys.ENABLED, keys.NODE_POOL_LABEL: pool},
        },
        "spec": {
            "restartPolicy": "Never",
            "containers": [
                {
                    "name": "workload",
                    "image": "selftest",
                    "env": [{"name": "FAKE_EXIT_AFTER_S", "value": "1"}],
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "runAsNonRoot": True,
                        "capabilities": {"drop": ["ALL"]},
                        "seccompProfile": {"type": "RuntimeDefault"},
                    },
                }
            ],
        },
    }


@asynccontextmanager
async def _namespace(kube: "Kube") -> AsyncIterator[str]:
    from app.kube import paths

    name = f"nebula-selftest-{secrets.token_hex(3)}"
    await kube.create(
        paths.namespaces(), {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    )
    try:
        yield name
    finally:
        with _gone():
            await kube.delete(paths.namespace(name))


def _gone() -> Any:
    from app.kube.errors import Replaced

    return suppress(Replaced)


async def _holds(what: Callable[[], Awaitable[bool]], *, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not await what():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(POLL_S)
    return True
