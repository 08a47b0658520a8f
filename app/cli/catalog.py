"""``nebula catalog refresh CLOUD``: its price list made anew from what the cloud itself says now.

It shows the difference, and writes the file only when nothing in it is absurd, or ``--force`` says that it is
right. The file goes where ``--catalog-dir`` is, so that ``nebula run --catalog-dir`` reads it.
"""

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from app.cli.accounts import ask, settings_of


@click.group("catalog")
def group() -> None:
    """Price lists: what is written down of each cloud."""


@group.command("refresh")
@click.argument("cloud")
@click.option(
    "--providers", metavar="LIST", help="How to reach it, if not simply as CLOUD. [NEBULA_PROVIDERS]"
)
@click.option("--catalog-dir", metavar="DIR", help="Where the file is written. [NEBULA_CATALOG_DIR]")
@click.option("--dry-run", is_flag=True, help="Show the difference, and write nothing.")
@click.option("--force", is_flag=True, help="Write it although prices look absurd.")
def refresh(cloud: str, providers: str | None, catalog_dir: str | None, dry_run: bool, force: bool) -> None:
    """Ask CLOUD for its prices, show what changed, and write CLOUD.csv."""
    settings = settings_of(catalog_dir=catalog_dir, providers=providers or _configured(cloud))
    entries = tuple(entry for entry in settings.providers if entry.adapter == cloud)[:1]
    if not entries:
        raise click.UsageError(f"no account of {cloud} among the providers: give --providers {cloud}")
    if settings.catalog_dir is None and not dry_run:
        raise click.UsageError(
            "--catalog-dir: where to write the file? (or --dry-run, to see the difference)"
        )
    asyncio.run(_refresh(settings.model_copy(update={"providers": entries}), cloud, dry_run, force))


def _configured(cloud: str) -> str | None:
    import os

    return None if os.environ.get("NEBULA_PROVIDERS") else cloud


async def _refresh(settings: Any, cloud: str, dry_run: bool, force: bool) -> None:
    from app.inventory.accounts import installed_adapters
    from catalog.catalogue import BadCatalogue, load, text_of
    from catalog.rewrite import difference, doubts, rewritten
    from catalog.rows import parse

    own = _existing(settings.catalog_dir)
    try:
        before = load(own, adapters=installed_adapters()).of(cloud)
    except BadCatalogue as error:
        raise click.ClickException(str(error)) from None
    (asked,) = await ask(settings, credentials={})
    if asked.provider is not None:
        await asked.provider.close()
    if asked.offerings is None:
        raise click.ClickException(f"{cloud} did not answer: {asked.trouble}")
    old = text_of(cloud, own)
    today = datetime.now(UTC).date()
    new = rewritten(old, asked.offerings, before=before, today=today, source="the cloud's own API")
    changed = difference(old, new, name=f"{cloud}.csv")
    click.echo(changed or f"{cloud}.csv: nothing changed", nl=not changed)
    wrong = doubts(asked.offerings, before=before)
    _, problems = parse(new)
    wrong += [f"line {each.line}: {each.column}: {each.message}" for each in problems]
    if wrong and not (force and not problems):
        lines = "".join(f"\n  {line}" for line in wrong)
        hint = "" if problems else "\nIf all of it is right, say --force."
        raise click.ClickException(f"not written: this cannot be right:{lines}{hint}")
    if changed and not dry_run:
        _write(Path(settings.catalog_dir), cloud, new)


def _existing(folder: str | None) -> str | None:
    """The folder, if it is there yet."""
    return folder if folder and Path(folder).is_dir() else None


def _write(folder: Path, cloud: str, text: str) -> None:
    """Whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / f".{cloud}.csv.new"
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(folder / f"{cloud}.csv")
    click.echo(f"written: {folder / f'{cloud}.csv'}", err=True)
