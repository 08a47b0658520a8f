"""``nebula uninstall``: the guard that runs before an installation is taken away.

``check`` is safe to repeat at any moment: it decides, by the cluster's own claims, whether anything is still
rented. A claim exists until its machine is proven gone (its finalizer), so no claim means no machine of
ours that we know of. Only when nothing is left does it stop the controller, look once more, and take away
what Helm does not know: the webhook configurations and the virtual nodes.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import click

from app.cli import output
from app.cli.cluster import cluster_options, connected

if TYPE_CHECKING:
    from app.kube.client import Kube, Obj

POLL_S = 2.0
TRIES = 5  # at a pool that somebody changes meanwhile
STOP_S = 120.0  # the controller's Pods have a grace
TITLES = ("NAMESPACE", "POD", "CLAIM", "PROVIDER", "REGION", "TIER", "INSTANCE", "PHASE", "$/H")
WAYS = """\
Machines are still rented. Nothing was changed. Three ways on:
  - delete the workloads (or scale them to zero), wait until kubectl get nodeclaims is empty, try again;
  - helm rollback to the newest revision of helm history (a refused uninstall leaves the release marked), then
    helm upgrade --reuse-values --set installation.uninstallPolicy=drain, then uninstall --timeout 25m: Pods
    are evicted with their grace, and the uninstall waits until every machine is proven gone;
  - the same with installation.uninstallPolicy=abandon: the records go, the MACHINES STAY AND COST MONEY until
    you end them by hand; the list above is then all that is left of them."""


@click.group("uninstall")
def group() -> None:
    """Look after what is rented before an installation goes."""


@group.command("check")
@cluster_options
@click.option(
    "--policy", type=click.Choice(["refuse", "drain", "abandon"]), default="refuse", show_default=True
)
@click.option(
    "--timeout-s", type=click.FloatRange(min=1), default=900.0, show_default=True, help="For drain."
)
@click.option("--deployment", help="The controller's Deployment, stopped once nothing is rented.")
@click.option("--clean-up", is_flag=True, help="Then take away webhook configurations and virtual nodes.")
def check(
    kubeconfig: str | None,
    namespace: str,
    policy: str,
    timeout_s: float,
    deployment: str | None,
    clean_up: bool,
) -> None:
    """Refuse, drain or abandon what is still rented; exit code 1 keeps the uninstall from going on."""
    asyncio.run(
        _check(
            kubeconfig,
            namespace=namespace,
            policy=policy,
            timeout_s=timeout_s,
            deployment=deployment,
            clean_up=clean_up,
        )
    )


async def _check(
    kubeconfig: str | None,
    *,
    namespace: str,
    policy: str,
    timeout_s: float,
    deployment: str | None,
    clean_up: bool,
) -> None:
    if policy == "abandon" and deployment is None:
        raise click.UsageError("--policy abandon needs --deployment: a controller that runs would end them")
    async with connected(kubeconfig) as kube:
        left: list[Obj] = []
        claims = await _claims(kube)
        if claims and policy != "abandon":
            click.echo(await _table(claims))
            if policy == "refuse":
                raise click.ClickException(WAYS)
            if policy == "drain":
                await _drain(kube, timeout_s=timeout_s)
        if deployment is None:
            if clean_up:
                await _clean_up(kube)
        else:
            replicas = await _replicas(kube, namespace, deployment)
            try:
                await _scale(kube, namespace, deployment, replicas=0)
                await _until(
                    lambda: _stopped(kube, namespace, deployment), within_s=STOP_S, what="controller"
                )
                left = await _claims(kube)
                if left:
                    click.echo(await _table(left))  # as it is at the very end: it is all that will be known
                    if policy != "abandon":
                        raise click.ClickException(
                            "these were made meanwhile; the controller is started again"
                        )
                    await _abandon(kube, left)
                if clean_up:
                    await _clean_up(kube)
            except BaseException:  # the release stays, and with it machines that somebody has to end
                await _scale(kube, namespace, deployment, replicas=replicas)
                raise
        if not left:
            click.echo("nothing is rented")


async def _claims(kube: "Kube") -> "list[Obj]":
    from app.kube import paths

    return await _all(kube, paths.nodeclaims())


async def _all(kube: "Kube", path: str) -> "list[Obj]":
    """All of a kind of ours; none where the cluster serves none of our kinds: their CRDs are gone."""
    from app.api import keys
    from app.kube.errors import KubeError

    try:
        return [item async for page in kube.list_pages(path) for item in page["items"]]
    except KubeError as error:
        # The 404 may also be that of something else than an API server, or of a wrong path to it.
        if error.status != 404 or keys.GROUP in {
            each["name"] for each in (await kube.get("/apis"))["groups"]
        }:
            raise
        return []


# --- drain ---


async def _drain(kube: "Kube", *, timeout_s: float) -> None:
    """No new placements (our nodes are cordoned), their Pods evicted, then wait for the last claim."""
    from app.api import keys
    from app.kube import paths

    nodes = await _our_nodes(kube)
    for node in nodes:
        await kube.patch(
            paths.node(node["metadata"]["name"]), {"spec": {"unschedulable": True}}, kind="merge"
        )
    names = {node["metadata"]["name"] for node in nodes}

    async def drained() -> bool:
        claims = await _claims(kube)
        selector = f"{keys.ENABLED_LABEL}={keys.ENABLED}"
        async for page in kube.list_pages(paths.pods(), labelSelector=selector):
            for pod in page["items"]:
                if pod["spec"].get("nodeName") in names and "deletionTimestamp" not in pod["metadata"]:
                    await _evict(kube, pod)
        for claim in claims:
            if "deletionTimestamp" not in claim["metadata"] and not await _pod_lives(kube, claim):
                with suppress_replaced():
                    await kube.delete(
                        paths.nodeclaim(claim["metadata"]["name"]), uid=claim["metadata"]["uid"]
                    )
        click.echo(f"{len(claims)} claims left" if claims else "every machine is proven gone")
        return not claims

    try:
        await _until(drained, within_s=timeout_s, what="drain")
    except TimeoutError:
        left = await _claims(kube)
        click.echo(await _table(left))
        raise click.ClickException(
            f"not drained within {timeout_s:.0f} s: these are still rented. The virtual nodes stay cordoned; "
            "run it again, or kubectl uncordon them"
        ) from None


async def _pod_lives(kube: "Kube", claim: "Obj") -> bool:
    from app.kube import paths

    ref = claim["spec"]["podRef"]
    pod = await kube.find(paths.pod(ref["namespace"], ref["name"]))
    return pod is not None and pod["metadata"]["uid"] == ref["uid"]


async def _evict(kube: "Kube", pod: "Obj") -> None:
    """By the eviction API, so that PodDisruptionBudgets hold; one that is refused is asked again."""
    from app.kube import paths
    from app.kube.errors import KubeError

    metadata = pod["metadata"]
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
        "deleteOptions": {"preconditions": {"uid": metadata["uid"]}},
    }
    try:
        await kube.create(f"{paths.pod(metadata['namespace'], metadata['name'])}/eviction", body)
    except KubeError as error:
        if error.status not in (404, 409, 429):
            raise
        click.echo(f"{metadata['namespace']}/{metadata['name']} not evicted yet: {error}")


# --- abandon ---


async def _abandon(kube: "Kube", claims: "list[Obj]") -> None:
    from app.api import keys
    from app.kube import paths
    from app.kube.patches import without_finalizer

    for claim in claims:
        path = paths.nodeclaim(claim["metadata"]["name"])
        with suppress_replaced():
            await kube.delete(path, uid=claim["metadata"]["uid"])
            held = await kube.get(path)
            ops = without_finalizer(held, keys.CLAIM_FINALIZER)
            if ops is not None:
                await kube.patch(path, ops, kind="json", metadata_only=True)
    click.echo(f"{len(claims)} claims abandoned: the machines above go on and cost money until you end them")


# --- what Helm does not know ---


async def _clean_up(kube: "Kube") -> None:
    from app.api import keys
    from app.kube import paths

    for path in (
        paths.mutating_webhook(keys.MUTATING_WEBHOOK_CONFIGURATION),
        paths.validating_webhook(keys.VALIDATING_WEBHOOK_CONFIGURATION),
    ):
        with suppress_replaced():
            await kube.delete(path)
            click.echo(f"deleted {path.rpartition('/')[2]}")
    await _let_pools_go(kube)
    for node in await _our_nodes(kube):
        name = node["metadata"]["name"]
        with suppress_replaced():
            await kube.delete(paths.node(name), uid=node["metadata"]["uid"])
            click.echo(f"deleted node {name}")


async def _let_pools_go(kube: "Kube") -> None:
    """Later nobody is there to take our finalizer off, and their kind could not be deleted."""
    from app.api import keys
    from app.kube import paths
    from app.kube.errors import Conflict

    for tries_left in reversed(range(TRIES)):
        changed = False
        for pool in await _all(kube, paths.nodepools()):
            name, finalizers = pool["metadata"]["name"], pool["metadata"].get("finalizers") or []
            if keys.POOL_FINALIZER not in finalizers:
                continue
            # By its version, and so without a second look at what was refused: the guard may list, not get.
            left = [each for each in finalizers if each != keys.POOL_FINALIZER]
            body = {"metadata": {"resourceVersion": pool["metadata"]["resourceVersion"], "finalizers": left}}
            try:
                with suppress_replaced():
                    await kube.patch(paths.nodepool(name), body, kind="merge", metadata_only=True)
                    click.echo(f"let go nodepool {name}")
            except Conflict:
                if not tries_left:
                    raise
                changed = True
        if not changed:
            return


async def _our_nodes(kube: "Kube") -> "list[Obj]":
    from app.api import keys
    from app.kube import paths

    ours = f"{keys.MANAGED_BY_LABEL}={keys.MANAGED_BY}"
    return [
        item async for page in kube.list_pages(paths.nodes(), labelSelector=ours) for item in page["items"]
    ]


# --- the controller ---


def _deployment(namespace: str, name: str) -> str:
    return f"/apis/apps/v1/namespaces/{namespace}/deployments/{name}"


async def _replicas(kube: "Kube", namespace: str, name: str) -> int:
    return int((await kube.get(f"{_deployment(namespace, name)}/scale"))["spec"].get("replicas", 0))


async def _scale(kube: "Kube", namespace: str, name: str, *, replicas: int) -> None:
    await kube.patch(f"{_deployment(namespace, name)}/scale", {"spec": {"replicas": replicas}}, kind="merge")


async def _stopped(kube: "Kube", namespace: str, name: str) -> bool:
    """Whether none of its Pods is left, not even one that is still ending."""
    from app.kube import paths

    found = await kube.get(_deployment(namespace, name))
    selector = ",".join(f"{key}={value}" for key, value in found["spec"]["selector"]["matchLabels"].items())
    page = await kube.get(paths.pods(namespace), labelSelector=selector)
    return not page["items"]


# --- small things ---


def suppress_replaced() -> Any:
    from app.kube.errors import Replaced

    return suppress(Replaced)


async def _until(holds: Callable[[], Awaitable[bool]], *, within_s: float, what: str) -> None:
    """Raises:
    TimeoutError: it did not come true in time.
    """
    deadline = time.monotonic() + within_s
    while not await holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {within_s:.0f} s")
        await asyncio.sleep(POLL_S)


async def _table(claims: "Sequence[Obj]") -> str:
    prices = await _prices()
    rows = []
    for claim in claims:
        spec, status = claim["spec"], claim.get("status") or {}
        price = prices.get(claim["metadata"]["uid"])
        rows.append(
            (
                spec["podRef"]["namespace"],
                spec["podRef"]["name"],
                claim["metadata"]["name"],
                spec["provider"],
                spec.get("region") or output.NONE,
                spec.get("capacityType") or output.NONE,
                status.get("instanceID") or output.NONE,
                status.get("phase") or "Pending",
                output.NONE if price is None else f"{price:.2f}",
            )
        )
    shown = output.table(TITLES, rows, right=("$/H",))
    known = [price for price in prices.values() if price is not None]
    if known:
        shown += f"\nat least {sum(known, Decimal(0)):.2f} USD an hour"
    return shown


async def _prices() -> dict[str, Decimal]:
    """What each live claim's machine costs, by the record; empty where the database cannot be read.

    Whatever is wrong with it (settings, its way, tables of another version): its list goes first.
    """
    import os

    from sqlalchemy import text

    from app.settings import load
    from app.store.engine import connect, engine_of

    try:
        settings = load({}, os.environ)
        if settings.database_url is None:
            return {}
        engine = engine_of(settings)
        try:
            async with connect(engine) as conn:
                rows = await conn.execute(
                    text(
                        "select claim_uid, usd_per_hour from run where gone_at is null and usd_per_hour >= 0"
                    )
                )
                return {str(row.claim_uid): row.usd_per_hour for row in rows}
        finally:
            await engine.dispose()
    except Exception as error:
        click.echo(f"no prices: {type(error).__name__}", err=True)
        return {}
