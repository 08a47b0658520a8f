"""The Node object of one provider account, kept true, and its Lease, renewed in a task of its own.

Invariants: only our own keys are written, and a taint list only under the resourceVersion it was read at;
``spec.unschedulable`` (cordon) is never written; the Node is never deleted here: on loss of leadership the
heartbeats just stop, and the next leader goes on. A Node that somebody deletes is made again at once, before
the garbage collector takes its Pods.
"""

import asyncio
import importlib.metadata
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import structlog

from app.api import keys
from app.api.reasons import MACHINES_KNOWN_CONDITION
from app.kube import paths
from app.kube.cache import Cache
from app.kube.client import Kube, Obj
from app.kube.errors import Conflict, Exists, KubeError, Replaced
from app.kube.patches import condition, diff, timestamp
from app.settings import Settings
from app.vnode.hearing import Hearing

log = structlog.get_logger()

# Room for more than 5,000 Pods of any size: 2,000 cores, 200 TiB and 200 GPUs each. The true limit is what
# the cloud rents, which placement knows and the scheduler does not.
CAPACITY: Mapping[str, str] = {
    "cpu": "10M",
    "memory": "1Ei",
    "ephemeral-storage": "1Ei",
    "pods": "100k",
    keys.GPU_RESOURCE: "1M",
}
EXTRA_LABELS: Mapping[str, str] = {
    "type": "virtual-kubelet",  # what DaemonSets of many clusters leave out
    # No machine behind it: a load balancer must not try to attach one, and a silent virtual node must not
    # count as a disrupted zone.
    "node.kubernetes.io/exclude-from-external-load-balancers": "true",
    "node.kubernetes.io/exclude-disruption": "true",
}
CALL_TIMEOUT_S = 8.0  # a heartbeat that hangs longer is better sent again
RETRY_S, RETRY_MAX_S = 0.2, 7.0
LEASES_NAMESPACE = "kube-node-lease"
LEASE_PERIODS = 4  # a Lease lasts so many renewals

METRICS_PATH = "metrics.k8s.io/resource-metrics-path"  # read by metrics-server

_HEALTHY = (
    ("MemoryPressure", "False", "KubeletHasSufficientMemory"),
    ("DiskPressure", "False", "KubeletHasNoDiskPressure"),
    ("PIDPressure", "False", "KubeletHasSufficientPID"),
    ("NetworkUnavailable", "False", "RouteCreated"),
    ("Ready", "True", "KubeletReady"),
)
_READY_MESSAGE = "virtual node ready"


class NodeKeeper:
    """Keeps one virtual node and its Lease. Start `run` only when Pods bound to it will be looked after."""

    def __init__(
        self,
        *,
        provider: str,
        account: str,
        kube: Kube,
        settings: Settings,
        installation: str,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = keys.node_name(provider, account)
        self._provider, self._account, self._installation = provider, account, installation
        self._kube = kube.room("vnode", urgent=True, timeout_s=CALL_TIMEOUT_S)
        self._settings, self._now = settings, now
        self._nodes = Cache(self._kube, paths.nodes(), field_selector=f"metadata.name={self.name}")
        self._changed = asyncio.Event()
        self.hearing = Hearing(
            (provider, account), patience_s=settings.silence_s, clock=clock, changed=self._changed.set
        )
        self._nodes.on_change(lambda _old, _new: self._changed.set())
        self._version = ""

    def address(self) -> str | None:
        """Where the API server reaches the node, as its status says; None while it says nothing."""
        node = self._nodes.get("", self.name)
        addresses = ((node or {}).get("status") or {}).get("addresses") or ()
        return next((str(each["address"]) for each in addresses if each["type"] == "InternalIP"), None)

    async def run(self) -> None:
        """Keep both until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._nodes.run(), name=f"watch {self.name}")
            tasks.create_task(self._keep_node(), name=f"node {self.name}")
            tasks.create_task(self._keep_lease(), name=f"lease {self.name}")

    async def _keep_node(self) -> None:
        await self._nodes.synced()
        failures = 0
        while True:
            self._changed.clear()
            try:
                wait_s = await self._look()
                failures = 0
            except (Conflict, Exists, Replaced):
                wait_s = RETRY_S  # somebody was faster; the watch tells what is true now
            except KubeError as error:
                failures += 1
                wait_s = min(RETRY_MAX_S, RETRY_S * 2.0**failures)
                log.warning("virtual node not written", node=self.name, error=str(error))
            try:
                async with asyncio.timeout(min(wait_s, self.hearing.due_s() or wait_s)):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _look(self) -> float:
        """Write what differs; seconds until the next look is due even if nothing changes."""
        self._version = self._version or await self._server_version()
        node = self._nodes.get("", self.name)
        if node is None:
            status = self._status(None)
            await self._kube.create(paths.nodes(), self._new() | {"status": status})
            log.info("virtual node created", node=self.name)
            return RETRY_S
        await self._adopt(node)
        every_s = self._settings.node_status_s
        wanted = self._status(node)
        age_s = (self._now() - _heartbeat(node)).total_seconds()
        if _differs(node.get("status") or {}, wanted) or not 0 <= age_s < every_s:
            body = {"metadata": {"uid": node["metadata"]["uid"]}, "status": _alone(wanted)}
            await self._kube.patch(paths.node_status(self.name), body, kind="strategic", metadata_only=True)
            return every_s
        return every_s - age_s

    async def _server_version(self) -> str:
        """A version that reads as current to whoever compares kubelets, and says who we are."""
        server = (await self._kube.get("/version")).get("gitVersion", "v1.0.0").split("+")[0].split("-")[0]
        return f"{server}-nebula.{importlib.metadata.version('nebula')}"

    def _labels(self) -> dict[str, str]:
        ours = keys.node_labels(self._provider, self._account)
        return {**ours, **EXTRA_LABELS, keys.INSTALLATION_LABEL: self._installation}

    def _new(self) -> Obj:
        return {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": self.name,
                "labels": self._labels(),
                # All nodes are served at one address, so each names its own path.
                "annotations": {METRICS_PATH: f"/nodes/{self.name}/metrics/resource"},
            },
            "spec": {
                "providerID": f"nebula://{self._provider}/{self._account}",
                "taints": [keys.node_taint(self._provider)],
            },
        }

    async def _adopt(self, node: Obj) -> None:
        """Put right what a former run, or somebody, left different; foreign labels and taints stay."""
        metadata, spec, new = node["metadata"], node.get("spec") or {}, self._new()
        changes: Obj = {}
        if notes := diff(metadata.get("annotations"), new["metadata"]["annotations"]):
            changes["metadata"] = {"annotations": notes}
        if labels := diff(metadata.get("labels"), new["metadata"]["labels"]):
            changes.setdefault("metadata", {})["labels"] = labels
        if not spec.get("providerID"):
            changes["spec"] = {"providerID": new["spec"]["providerID"]}
        taints, ours = spec.get("taints") or [], keys.node_taint(self._provider)
        if not any(diff(taint, ours) is None for taint in taints):
            others = [
                taint for taint in taints if (taint["key"], taint["effect"]) != (ours["key"], ours["effect"])
            ]
            changes.setdefault("spec", {})["taints"] = [*others, ours]
            changes.setdefault("metadata", {})["resourceVersion"] = metadata["resourceVersion"]
        if changes:
            changes.setdefault("metadata", {})["uid"] = metadata["uid"]
            await self._kube.patch(paths.node(self.name), changes, kind="strategic", metadata_only=True)

    def _status(self, node: Obj | None) -> Obj:
        """The whole status. Without an address nothing serves logs and exec, and so they fail at once."""
        now = self._now()
        conditions: list[Obj] = ((node or {}).get("status") or {}).get("conditions") or []
        for type_, status, reason in _HEALTHY:
            message = _READY_MESSAGE if type_ == "Ready" else ""
            conditions = condition(
                conditions, type=type_, status=status, reason=reason, message=message, now=now
            )
        ours = {type_ for type_, _, _ in _HEALTHY}
        if (said := self.hearing.said()) is not None:
            known, reason, message = said
            conditions = condition(
                conditions,
                type=MACHINES_KNOWN_CONDITION,
                status=known,
                reason=reason,
                message=message,
                now=now,
            )
            ours.add(MACHINES_KNOWN_CONDITION)
        stamped = [
            each | {"lastHeartbeatTime": timestamp(now)} for each in conditions if each["type"] in ours
        ]
        where = {} if self._settings.kubelet_address is None else address_of(self._settings)
        return {
            **where,
            "capacity": dict(CAPACITY),
            "allocatable": dict(CAPACITY),
            "conditions": stamped,
            "nodeInfo": {
                "machineID": "",
                "systemUUID": "",
                "bootID": "",
                "kernelVersion": "",
                "osImage": "",
                "containerRuntimeVersion": "",
                "kubeletVersion": self._version,
                "kubeProxyVersion": "",
                "operatingSystem": "linux",
                "architecture": "amd64",
            },
        }

    # --- the Lease ---

    async def _keep_lease(self) -> None:
        every_s, failures = self._settings.node_lease_s, 0
        await self._nodes.synced()
        while True:
            try:
                await self._renew()
                failures, wait_s = 0, every_s
            except KubeError as error:
                failures += 1
                wait_s = min(every_s, RETRY_S * 2.0**failures)
                log.warning("lease of virtual node not renewed", node=self.name, error=str(error))
            await asyncio.sleep(wait_s)

    async def _renew(self) -> None:
        """Set the time, and the owner: the Lease of a Node that was deleted would be collected with it."""
        metadata: Obj = {"name": self.name}
        if (node := self._nodes.get("", self.name)) is not None:
            owner = {"apiVersion": "v1", "kind": "Node", "name": self.name, "uid": node["metadata"]["uid"]}
            metadata["ownerReferences"] = [owner]
        body: Obj = {
            "metadata": metadata,
            "spec": {
                "holderIdentity": self.name,
                "leaseDurationSeconds": max(1, round(LEASE_PERIODS * self._settings.node_lease_s)),
                "renewTime": self._now().strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            },
        }
        try:
            path = paths.lease(LEASES_NAMESPACE, self.name)
            await self._kube.patch(path, body, kind="merge", metadata_only=True)
        except Replaced:
            whole = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", **body}
            await self._kube.create(paths.leases(LEASES_NAMESPACE), whole, metadata_only=True)


def address_of(settings: Settings) -> Obj:
    """The part of a node's status that says where its kubelet is: at this replica."""
    port = int(settings.kubelet_bind.rpartition(":")[2])
    return {
        "addresses": [{"type": "InternalIP", "address": settings.kubelet_address}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
    }


def _alone(status: Obj) -> Obj:
    """The status as a patch in which our addresses take the place of all that were there."""
    if "addresses" not in status:
        return status
    return status | {"addresses": [{"$patch": "replace"}, *status["addresses"]]}


async def announce(kube: Kube, settings: Settings, names: Iterable[str]) -> None:
    """Make existing nodes lead here: the first thing of a new leader, before anything is read.

    A node that is not there yet gets its address when it is made.
    """
    if settings.kubelet_address is None:
        return
    view = kube.room("vnode", urgent=True, timeout_s=CALL_TIMEOUT_S)
    body = {"status": _alone(address_of(settings))}

    async def one(name: str) -> None:
        try:
            await view.patch(paths.node_status(name), body, kind="strategic", metadata_only=True)
        except Replaced:
            log.debug("no such node yet", node=name)
        except KubeError as error:  # its keeper tries again
            log.warning("node does not lead here yet", node=name, error=str(error))

    await asyncio.gather(*(one(name) for name in names))


def _heartbeat(node: Obj) -> datetime:
    """When the Ready condition was last written; long ago if never."""
    for each in (node.get("status") or {}).get("conditions") or ():
        if each["type"] == "Ready" and each.get("lastHeartbeatTime"):
            return datetime.fromisoformat(each["lastHeartbeatTime"])
    return datetime.fromtimestamp(0, UTC)


def _differs(current: Obj, wanted: Obj) -> bool:
    """Whether anything but the heartbeat's own time differs."""
    bare: dict[str, Any] = {**wanted, "conditions": [_still(each) for each in wanted["conditions"]]}
    held = {**current, "conditions": [_still(each) for each in current.get("conditions") or ()]}
    return diff(held, bare, keyed={"conditions": "type"}) is not None


def _still(condition_: Obj) -> Obj:
    return {key: value for key, value in condition_.items() if key != "lastHeartbeatTime"}
