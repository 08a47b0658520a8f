"""``nebula offers``: what could be rented now, over all configured clouds, cheapest first.

The clouds are asked at once, and nothing is rented. Blocks are shown where the database is given, a pool's
rules where ``--pool`` names a file or a NodePool of the cluster; the clouds' Secrets are read in the cluster
where a kubeconfig leads to one and no variable holds the credential.
"""

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from app.cli import output
from app.cli.accounts import Asked, ask, settings_of

if TYPE_CHECKING:
    from app.api.nodepool import NodePool
    from app.placement.shop import Ware
    from app.settings import Settings
    from app.store.blocks import Block

TITLES = (
    *(
        "PROVIDER",
        "ACCOUNT",
        "REGION",
        "TIER",
        "ACCELERATOR",
        "SHAPE",
        "$/H",
        "$/GPU/H",
        "STOCK",
        "PRICE-AGE",
    ),
    "BLOCKED",
)
_RIGHT = ("$/H", "$/GPU/H")


@click.command("offers")
@click.option("--accelerator", metavar="TYPE", help="Only this one, by any of its names; default: each.")
@click.option(
    "--count", type=click.IntRange(1, 1024), default=1, show_default=True, help="So many in a machine."
)
@click.option("--pool", metavar="NAME|FILE", help="Apply a NodePool's rules, and say why each offer is out.")
@click.option(
    "--providers", metavar="LIST", help="NAME[/ACCOUNT][=ADAPTER][,KEY=VALUE...] [NEBULA_PROVIDERS]"
)
@click.option(
    "--catalog-dir", metavar="DIR", help="Catalogue files in the place of ours. [NEBULA_CATALOG_DIR]"
)
@click.option("--database-url", metavar="URL", help="Where blocks are on record. [NEBULA_DATABASE_URL]")
@click.option("--kubeconfig", metavar="FILE", help="The cluster of --pool NAME and of the clouds' Secrets.")
@click.option("--namespace", metavar="NAME", help="Where those Secrets are. [NEBULA_NAMESPACE]")
@output.style_option
def command(accelerator: str | None, count: int, pool: str | None, style: output.Style, **flags: Any) -> None:
    """Show what could be rented now, cheapest first, at which price, and what is blocked until when."""
    settings = settings_of(**flags)
    now = datetime.now(UTC)
    asked, found = asyncio.run(_found(settings, accelerator=accelerator, count=count, pool=pool, now=now))
    for each in asked:
        if each.trouble:
            name = f"{each.entry.name}/{each.entry.account}"
            click.echo(f"warning: {name} did not answer, its catalogue is shown: {each.trouble}", err=True)
    if style == "json":
        click.echo(output.to_json([_plain(ware) for ware in found]))
    elif not found:
        what = f"{accelerator}:{count}" if accelerator else f"machine with {count} GPUs"
        raise click.ClickException(f"no configured cloud offers a {what}")
    else:
        titles = (*TITLES, "OUT") if pool else TITLES
        click.echo(
            output.table(titles, [_row(ware, now=now, pool=bool(pool)) for ware in found], right=_RIGHT)
        )


async def _found(
    settings: "Settings", *, accelerator: str | None, count: int, pool: str | None, now: datetime
) -> "tuple[list[Asked], list[Ware]]":
    from app.placement.shop import Shop, judged, wares
    from catalog.catalogue import BadCatalogue, load
    from catalog.offerings import Offerings

    rules, credentials = await _of_cluster(settings, pool)
    blocks = await _blocks(settings)
    try:
        catalogue = load(settings.catalog_dir)
    except BadCatalogue as error:
        raise click.UsageError(str(error)) from None
    asked = await ask(settings, credentials=credentials)
    try:
        offerings = Offerings()
        for each in asked:
            if each.provider is not None:
                offerings.put(
                    each.entry.name,
                    each.entry.account,
                    traits=each.provider.traits,
                    offerings=each.offerings,
                    written=catalogue.of(each.entry.adapter),
                )
        shop = Shop({each.entry.key: each.provider for each in asked if each.provider is not None})
        view = offerings.view
        found = wares(view, shop=shop, accelerator=accelerator, count=count, blocks=blocks, now=now)
        if rules is not None:
            found = judged(found, pool=rules.spec, view=view, shop=shop, blocks=blocks, now=now)
        return asked, found
    finally:
        for each in asked:
            if each.provider is not None:
                await each.provider.close()


async def _of_cluster(
    settings: "Settings", pool: str | None
) -> "tuple[NodePool | None, dict[tuple[str, str], Mapping[str, str]]]":
    """The pool's rules, and the credentials that Secrets hold; none where there is no cluster to ask."""
    from app.kube.auth import NoCluster
    from app.kube.client import Kube
    from app.kube.credentials import CredentialSecrets
    from app.kube.errors import KubeError

    rules = _pool_of(pool)
    credentials: dict[tuple[str, str], Mapping[str, str]] = {}
    needed = pool is not None and rules is None
    try:
        kube = await Kube.connect(kubeconfig=settings.kubeconfig)
    except NoCluster as error:
        if needed:
            raise click.UsageError(f"--pool {pool}: no such file, and no cluster: {error}") from None
        return rules, credentials
    async with kube:
        try:
            if needed:
                rules = await _stored(kube, str(pool))
            secrets = CredentialSecrets(kube, namespace=settings.namespace)
            for entry in settings.providers:
                credentials[entry.key] = await secrets.of(entry) or {}
        except KubeError as error:
            if needed:
                raise click.ClickException(f"the API server cannot be used: {error}") from None
    return rules, credentials


async def _stored(kube: Any, name: str) -> "NodePool":
    from app.api.nodepool import NodePool
    from app.kube import paths

    stored = await kube.find(paths.nodepool(name))
    if stored is None:
        raise click.UsageError(f"--pool {name}: no such file, and no NodePool of that name")
    return NodePool.model_validate(stored)


def _pool_of(pool: str | None) -> "NodePool | None":
    """The NodePool in a file; None when it is no file."""
    if pool is None or not (path := Path(pool)).is_file():
        return None
    import yaml
    from pydantic import ValidationError

    from app.api.keys import NODE_POOL
    from app.api.nodepool import NodePool

    try:
        documents = [each for each in yaml.safe_load_all(path.read_text()) if isinstance(each, dict)]
        pools = [each for each in documents if each.get("kind") == NODE_POOL]
        if len(pools) != 1:
            raise click.UsageError(f"--pool {path}: it has {len(pools)} NodePools, and one is asked for")
        return NodePool.model_validate(pools[0])
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--pool {path}: not YAML: {error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise click.UsageError(f"--pool {path}: {field}: {first['msg']}") from None


async def _blocks(settings: "Settings") -> "list[Block]":
    if settings.database_url is None:
        return []
    from app.store import blocks
    from app.store.engine import StoreUnavailable, connect, engine_of

    engine = engine_of(settings)
    try:
        async with connect(engine) as conn:
            return await blocks.live(conn)
    except StoreUnavailable as error:
        raise click.ClickException(f"the database cannot be used: {error}") from None
    finally:
        await engine.dispose()


def _row(ware: "Ware", *, now: datetime, pool: bool) -> list[str]:
    offering = ware.offering
    blocked = output.NONE
    if ware.blocked_until is not None:
        blocked = f"{ware.blocked_for}, free {output.until(ware.blocked_until, now=now)}"
    row = [
        offering.provider,
        offering.account,
        offering.region or output.NONE,
        offering.tier.value,
        str(ware.accelerator) if ware.accelerator else output.NONE,
        offering.shape,
        _usd(ware.usd_per_hour),
        _usd(ware.usd_per_gpu_hour) if ware.accelerator else output.NONE,
        _stock(ware),
        output.since(ware.priced_at, now=now) if ware.priced_at is not None else "unknown",
        blocked,
    ]
    return [*row, ware.out or output.NONE] if pool else row


def _usd(amount: Any) -> str:
    return "unknown" if amount is None else f"{amount:.4f}"


def _stock(ware: "Ware") -> str:
    if ware.offering.stock:
        return ware.offering.stock
    return {True: "yes", False: "none", None: "unknown"}[ware.offering.available]


def _plain(ware: "Ware") -> dict[str, Any]:
    offering = ware.offering
    return {
        "provider": offering.provider,
        "account": offering.account,
        "region": offering.region,
        "tier": offering.tier.value,
        "accelerator": ware.accelerator.type if ware.accelerator else None,
        "count": ware.accelerator.count if ware.accelerator else None,
        "shape": offering.shape,
        "usdPerHour": ware.usd_per_hour,
        "usdPerGpuHour": ware.usd_per_gpu_hour,
        "available": offering.available,
        "stock": offering.stock or None,
        "pricedAt": ware.priced_at,
        "blockedUntil": ware.blocked_until,
        "blockedFor": ware.blocked_for or None,
        "out": ware.out or None,
    }
