"""From a Pod's name to its machine: the NodeClaim's status first, our rows second, nothing from memory.

What a Pod's author can edit is believed nowhere: the machine is that of the claim that carries the Pod's UID
and belongs to the node that the Pod is bound to.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

import structlog
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from app.api import keys
from app.inventory.accounts import Account, Accounts
from app.kube import paths
from app.kube.claims import UnreadableClaim, claim_spec
from app.kube.client import Kube, Obj
from app.provisioning.model import ClaimSpec
from app.store.engine import StoreUnavailable, connect
from app.store.tables import Rental
from providers.base import Ref, ResourceId

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A Pod on one of our nodes. ``ref`` None: no machine yet, or none any more."""

    pod: Obj
    claim: ClaimSpec | None
    ref: Ref | None
    account: Account | None

    @property
    def uid(self) -> str:
        return str(self.pod["metadata"]["uid"])

    @property
    def name(self) -> str:
        return f"{self.pod['metadata']['namespace']}/{self.pod['metadata']['name']}"

    @property
    def provider(self) -> Any:
        """The open adapter; None while its account is not open."""
        return self.account.provider if self.account is not None else None

    def has(self, container: str) -> bool:
        return any(each["name"] == container for each in self.pod["spec"]["containers"])

    @property
    def over(self) -> bool:
        return (self.pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")

    def state(self, container: str) -> Obj:
        """``{"waiting": …}``, ``running`` or ``terminated``, as the Pod's status tells; {} before it does."""
        return self._status(container).get("state") or {}

    def has_run(self, container: str) -> bool:
        """Whether there may be output: it runs, has ended, or waits between two runs."""
        status = self._status(container)
        last, now = status.get("lastState") or {}, status.get("state") or {}
        return "running" in now or "terminated" in now or "terminated" in last

    def _status(self, container: str) -> Obj:
        statuses = (self.pod.get("status") or {}).get("containerStatuses") or ()
        return next((each for each in statuses if each["name"] == container), {})


class Finder:
    """Works on every replica alike."""

    def __init__(self, kube: Kube, *, accounts: Accounts, engine: AsyncEngine) -> None:
        self._kube, self._accounts, self._engine = kube.room("kubelet"), accounts, engine

    async def pod(self, namespace: str, name: str) -> Target | None:
        """The Pod and its machine as they are now; None when there is no such Pod on a node of ours.

        Raises:
            KubeError: the API server did not answer.
        """
        try:
            pod_path = paths.pod(namespace, name)
            claim_path = paths.nodeclaim(keys.claim_name(namespace, name))
        except ValueError:
            return None
        pod, likely = await asyncio.gather(self._kube.find(pod_path), self._kube.find(claim_path))
        if pod is None or pod["metadata"].get("labels", {}).get(keys.ENABLED_LABEL) != keys.ENABLED:
            return None
        claim = _of_pod(likely, pod) or await self._search(pod)
        ref = claim.instance if claim is not None else None
        if claim is not None and ref is None:
            ref = await self._recorded(claim)
        account = self._accounts.get(claim.key) if claim is not None else None
        return Target(pod=pod, claim=claim, ref=ref, account=account)

    async def machines(self, provider: str, account: str) -> dict[str, Ref]:
        """The machines of one account's claims by the UID of their Pods.

        Raises:
            KubeError: the API server did not answer.
        """
        found: dict[str, Ref] = {}
        async for page in self._kube.list_pages(
            paths.nodeclaims(), labelSelector=_selector(provider, account)
        ):
            for obj in page["items"]:
                claim = _readable(obj)
                if claim is not None and claim.instance is not None:
                    found[claim.pod_uid] = claim.instance
        return found

    async def _search(self, pod: Obj) -> ClaimSpec | None:
        """A claim whose name is not the plain one: a later candidate, or another Pod has that name."""
        labels = f"{keys.MANAGED_BY_LABEL}={keys.MANAGED_BY}"
        async for page in self._kube.list_pages(paths.nodeclaims(), labelSelector=labels):
            for obj in page["items"]:
                if (claim := _of_pod(obj, pod)) is not None:
                    return claim
        return None

    async def _recorded(self, claim: ClaimSpec) -> Ref | None:
        """What our rows say; nothing while the store is away."""
        query = select(Rental.resource_id, Rental.resource_region).where(
            Rental.claim_uid == claim.uid, Rental.state != "ended"
        )
        try:
            async with connect(self._engine) as conn:
                row = (await conn.execute(query)).one_or_none()
        except StoreUnavailable as error:
            log.info("store not asked for a machine", error=str(error)[:200])
            return None
        if row is None or row.resource_id is None:
            return None
        return Ref(
            provider=claim.provider,
            account=claim.account,
            region=row.resource_region or "",
            resource_id=ResourceId(row.resource_id),
        )


def _of_pod(obj: Obj | None, pod: Obj) -> ClaimSpec | None:
    """The claim, if it is this Pod's on the node that it is bound to."""
    claim = _readable(obj) if obj is not None else None
    if claim is None or claim.pod_uid != pod["metadata"]["uid"]:
        return None
    try:
        node = keys.node_name(claim.provider, claim.account)
    except ValueError:
        return None
    return claim if node == pod["spec"].get("nodeName") else None


def _readable(obj: Obj) -> ClaimSpec | None:
    try:
        return claim_spec(obj)
    except UnreadableClaim as error:
        log.error("claim not readable", error=str(error))
        return None


def _selector(provider: str, account: str) -> str:
    return f"{keys.PROVIDER_LABEL}={provider},{keys.ACCOUNT_LABEL}={account}"
