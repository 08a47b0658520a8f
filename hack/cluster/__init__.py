"""A real Kubernetes for tests and the demo: built from Go modules, run on loopback, or somebody's own.

``obtain`` is the way in for whoever needs a cluster and does not care whose. ``NEBULA_TEST_KUBECONFIG``
names a kubeconfig to use instead of a control plane of ours; ``NEBULA_WEBHOOK_URL`` must then say at which
URL that cluster's API server reaches our webhook.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from hack.cluster import binaries
from hack.cluster.controlplane import ClusterFailed, ControlPlane, StateInUse

__all__ = ["Cluster", "ClusterFailed", "ControlPlane", "NotUsable", "StateInUse", "obtain"]


class NotUsable(RuntimeError):
    """The cluster named by ``NEBULA_TEST_KUBECONFIG`` cannot be used; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A cluster to work with. ``control_plane`` and no ``webhook_url``: it is ours, and ``close`` ends it."""

    kubeconfig: Path
    kubectl: Path
    control_plane: ControlPlane | None = None
    webhook_url: str | None = None

    @property
    def ours(self) -> bool:
        return self.control_plane is not None

    def close(self) -> None:
        """End the control plane if it is ours; leave somebody else's cluster alone."""
        if self.control_plane is not None:
            self.control_plane.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def obtain(*, control_plane: ControlPlane | None = None) -> Cluster:
    """Return a cluster that is ready: the one the environment names, else ours, started (and built) as
        needed.
     ``control_plane`` is one of ours to start when the choice falls on us; None takes one with the usual
    settings.

        Raises:
            NotUsable, ClusterFailed: see there.
    """
    if named := os.environ.get("NEBULA_TEST_KUBECONFIG"):
        return _somebody_elses(Path(named).expanduser().absolute())
    ours = control_plane or ControlPlane()
    ours.start()
    return Cluster(kubeconfig=ours.kubeconfig, kubectl=ours.kubectl, control_plane=ours)


def _somebody_elses(kubeconfig: Path) -> Cluster:
    if not kubeconfig.is_file():
        raise NotUsable(f"NEBULA_TEST_KUBECONFIG: {kubeconfig} is not a file")
    webhook_url = os.environ.get("NEBULA_WEBHOOK_URL", "")
    if not webhook_url.startswith("https://"):
        raise NotUsable(
            "NEBULA_TEST_KUBECONFIG needs NEBULA_WEBHOOK_URL beside it: the https:// URL at which that "
            "cluster's API server reaches this machine"
        )
    built = binaries.folder() / "kubectl"
    found = shutil.which("kubectl") or (str(built) if built.exists() else None)
    if found is None:
        raise NotUsable("no kubectl on PATH: install it, or run `make cluster` once to build one")
    return Cluster(kubeconfig=kubeconfig, kubectl=Path(found), webhook_url=webhook_url)
