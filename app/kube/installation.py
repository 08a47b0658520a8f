"""Which installation a cluster is of: the Secret beside the Lease says so, before any database does.

The database carries the same id. Whoever reads claims and rows together makes sure first that both are of one
installation: by another cluster's claims every machine of ours looks ownerless.
"""

from base64 import b64decode
from typing import Final

from app.kube import paths
from app.kube.client import Kube
from app.kube.errors import KubeError

INSTALLATION_SECRET: Final = "nebula-installation"
MACHINES_SECRET: Final = "nebula-machines"


class OtherInstallation(Exception):
    """The cluster is another installation's than the database."""


async def installation_of(kube: Kube, *, namespace: str) -> str | None:
    """The cluster's installation id, None where no controller has made one in that namespace.

    Raises:
        KubeError: the Secret cannot be read.
    """
    secret = await kube.find(paths.secret(namespace, INSTALLATION_SECRET))
    return None if secret is None else b64decode(secret["data"]["id"]).decode()


async def check_installation(kube: Kube, *, namespace: str, ours: str) -> None:
    """Nothing where the cluster is of installation ``ours``, or does not tell whose it is.

    Raises:
        OtherInstallation: it is another one's.
    """
    try:
        theirs = await installation_of(kube, namespace=namespace)
    except KubeError:  # away, or the Secret is not for this person to read
        return
    if theirs not in (None, ours):
        raise OtherInstallation(
            f"the database is of installation {ours}, and the cluster of installation {theirs} (its Secret"
            f" {namespace}/{INSTALLATION_SECRET}): give that installation's --kubeconfig or --database-url"
        )
