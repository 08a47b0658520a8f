"""``nebula setup``: what an installation needs once, made in the cluster. Safe to repeat.

Nothing secret is ever rendered by a chart: a template that makes a password makes another one at the next
rendering.
"""

import asyncio
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from app.cli.cluster import cluster_options, connected

if TYPE_CHECKING:
    from app.kube.client import Kube

USER = "nebula"
PASSWORD_BYTES = 24


@click.group("setup")
def group() -> None:
    """Make what an installation needs once."""


@group.command("database-secret")
@cluster_options
@click.option("--name", required=True, help="The Secret.")
@click.option("--user", default=USER, show_default=True, help="The user in it.")
@click.option("--user-key", default="username", show_default=True, help="The user's key in it.")
@click.option("--password-key", default="password", show_default=True, help="The password's key in it.")
def database_secret(
    kubeconfig: str | None, namespace: str, name: str, user: str, user_key: str, password_key: str
) -> None:
    """Make the Secret with the database's user and password, unless it is there. It is never changed."""
    if user_key == password_key:
        raise click.UsageError(f"--user-key and --password-key are both {user_key!r}: give two names")
    made = asyncio.run(
        _database_secret(kubeconfig, namespace=namespace, name=name, user=user, keys=(user_key, password_key))
    )
    click.echo(f"secret/{name} {'created' if made else 'unchanged'}")


async def _database_secret(
    kubeconfig: str | None, *, namespace: str, name: str, user: str, keys: tuple[str, str]
) -> bool:
    async with connected(kubeconfig) as kube:
        made = await _make(kube, namespace=namespace, name=name, user=user, keys=keys)
        from app.kube import paths

        held = (await kube.get(paths.secret(namespace, name))).get("data") or {}
        if missing := [key for key in keys if not held.get(key)]:
            raise click.ClickException(f"Secret {namespace}/{name} lacks {' and '.join(missing)}: add them")
        return made


async def _make(kube: "Kube", *, namespace: str, name: str, user: str, keys: tuple[str, str]) -> bool:
    """``keys``: the user's and the password's."""
    from app.api.keys import MANAGED_BY, MANAGED_BY_LABEL
    from app.kube import paths
    from app.kube.errors import Exists

    if await kube.find(paths.secret(namespace, name)) is not None:
        return False
    body = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "labels": {MANAGED_BY_LABEL: MANAGED_BY}},
        "stringData": dict(zip(keys, (user, secrets.token_urlsafe(PASSWORD_BYTES)), strict=True)),
    }
    with suppress(Exists):  # another replica came first
        await kube.create(paths.secrets(namespace), body)
        return True
    return False
