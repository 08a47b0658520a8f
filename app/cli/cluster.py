"""The options of commands that talk to the cluster, and what they say when it cannot be used."""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from app.kube.client import Kube


def cluster_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """``kubeconfig`` and ``namespace``, as for ``nebula run``."""
    from app.api import keys

    for option in (
        click.option(
            "-n",
            "--namespace",
            envvar="NEBULA_NAMESPACE",
            default=keys.SYSTEM_NAMESPACE,
            show_default=True,
            help="The installation's namespace.",
        ),
        click.option("--kubeconfig", envvar="NEBULA_KUBECONFIG", help="Default: in-cluster, else the usual."),
    ):
        command = option(command)
    return command


@asynccontextmanager
async def connected(kubeconfig: str | None) -> AsyncIterator["Kube"]:
    """The API server, for one command.

    Raises:
        click.ClickException: there is none, or it refuses what is asked.
    """
    from app.kube.auth import NoCluster
    from app.kube.client import Kube
    from app.kube.errors import KubeError

    try:
        kube = await Kube.connect(kubeconfig=kubeconfig or os.environ.get("NEBULA_KUBECONFIG"))
    except NoCluster as error:
        raise click.ClickException(f"--kubeconfig: {error}") from None
    async with kube:
        try:
            yield kube
        except KubeError as error:
            raise click.ClickException(f"the API server: {error}") from None
