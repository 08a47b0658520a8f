"""The Nodes of providers that are not configured any more: each goes when no Pod and no claim needs it.

Until then it stays as it is, without heartbeats: a claim's machine may still exist, and its finalizer waits
for the provider to come back. A Node of another installation is never touched.
"""

import asyncio
from collections.abc import Iterable

import structlog

from app.api import keys
from app.kube import paths
from app.kube.cache import Cache
from app.kube.client import Kube, Obj
from app.kube.errors import KubeError, Replaced
from app.settings import Settings
from app.vnode.order import is_daemon

log = structlog.get_logger()


class Retirement:
    """One duty of the leader. ``claims`` is run by the caller."""

    def __init__(self, *, kube: Kube, claims: Cache, settings: Settings, installation: str) -> None:
        self._kube, self._claims = kube.room("vnode"), claims
        self._settings, self._installation = settings, installation

    async def run(self) -> None:
        """Look until no such Node is left: what is configured cannot change while we run."""
        while True:
            try:
                left = [node for node in await self._retired() if not await self._remove(node)]
            except KubeError as error:
                log.warning("nodes of former providers not checked", error=str(error))
            else:
                if not left:
                    return
            await asyncio.sleep(self._settings.list_rest_s)

    async def _retired(self) -> list[Obj]:
        configured = set(_names(entry.key for entry in self._settings.providers))
        selector = ",".join(
            (f"{keys.MANAGED_BY_LABEL}={keys.MANAGED_BY}", f"{keys.INSTALLATION_LABEL}={self._installation}")
        )
        return [
            node
            async for page in self._kube.list_pages(paths.nodes(), labelSelector=selector)
            for node in page["items"]
            if node["metadata"]["name"] not in configured
        ]

    async def _remove(self, node: Obj) -> bool:
        """Whether it is gone. Claims are looked at first: their Pods are bound after they are made."""
        name, labels = node["metadata"]["name"], node["metadata"]["labels"]
        key = (labels.get(keys.PROVIDER_LABEL), labels.get(keys.ACCOUNT_LABEL) or keys.DEFAULT_ACCOUNT)
        if any(_key_of(claim) == key for claim in self._claims) or await self._has_pods(name):
            log.info("the node of a former provider stays: it is still needed", node=name)
            return False
        try:
            await self._kube.delete(paths.node(name), uid=node["metadata"]["uid"])
        except Replaced:
            return True
        log.info("the node of a former provider is removed", node=name)
        return True

    async def _has_pods(self, name: str) -> bool:
        async for page in self._kube.list_pages(paths.pods(), fieldSelector=f"spec.nodeName={name}"):
            if any(not is_daemon(pod) for pod in page["items"]):
                return True
        return False


def _names(accounts: Iterable[tuple[str, str]]) -> Iterable[str]:
    for key in accounts:
        try:
            yield keys.node_name(*key)
        except ValueError:
            continue  # it has no node, which is said elsewhere


def _key_of(claim: Obj) -> tuple[str, str]:
    return (claim["spec"]["provider"], claim["spec"].get("account") or keys.DEFAULT_ACCOUNT)
