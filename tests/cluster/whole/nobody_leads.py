"""A time without any replica, beside a node that is well: the story of the test, and of `make soak`.

Where every node of a cluster is silent, Kubernetes evicts nobody: it takes the fault for its own. So a well
node stands beside ours, and a Pod that is not ours is on our node, with the tolerations that everybody has:
its eviction shows that the taint was there, and acts.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

from app.api import keys
from app.kube import paths
from app.kube.client import Kube, Obj
from hack.cluster import Cluster, ControlPlane
from tests.cluster.whole.conftest import running
from tests.cluster.whole.owners_world import Owners, instance_of, is_ready
from tests.support.cluster import Kubectl

HEALTHY = "healthy"
UNREACHABLE = "node.kubernetes.io/unreachable"


async def nobody_leads(
    plane: ControlPlane,
    folder: Path,
    *,
    database: str,
    beat_s: float,
    at_least_s: float = 0.0,
    within_s: float = 60.0,
    options: dict[str, str] | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> None:
    """Nobody leads until the other Pod is evicted, and for so long at least; ours stays, on its machine."""
    kubectl = Kubectl(Cluster(kubeconfig=plane.kubeconfig, kubectl=plane.kubectl))
    async with (
        running(kubectl, folder, kubeconfig=plane.kubeconfig, database=database, options=options) as owners,
        _healthy_node(plane.kubeconfig, beat_s=beat_s),
    ):
        await owners.deployment("serve", "again")
        (before,) = await owners.ready()
        bystander = owners.template("again", nodeName=keys.node_name("again"))
        bystander["metadata"] = {"name": "bystander"}
        await owners.kubectl("create", "-f", "-", stdin={"apiVersion": "v1", "kind": "Pod", **bystander})
        await asyncio.to_thread(owners.controller.kill)

        began_s = time.monotonic()
        evicted_after_s = await _evicted(owners, within_s=within_s, tell=tell)
        while (left_s := began_s + at_least_s - time.monotonic()) > 0:
            tell(f"{time.monotonic() - began_s:.0f} s without anybody; {left_s:.0f} s to go")
            await asyncio.sleep(min(30.0, left_s))
        node, healthy = [await owners.get("node", name) for name in (keys.node_name("again"), HEALTHY)]
        (during,) = [pod for pod in await owners.pods() if pod["metadata"]["name"] != "bystander"]
        alive = await owners.alive()
        await asyncio.to_thread(owners.controller.start)
        back = await owners.until(
            lambda pods: next((pod for pod in pods if is_ready(pod)), None), what="Ready again"
        )

    assert UNREACHABLE in {taint["key"] for taint in node["spec"]["taints"]}
    assert UNREACHABLE not in {taint["key"] for taint in healthy["spec"].get("taints") or ()}
    assert during["metadata"]["uid"] == before["metadata"]["uid"] == back["metadata"]["uid"]
    assert "deletionTimestamp" not in during["metadata"]
    assert during["status"]["phase"] == "Running"
    assert [one["id"] for one in alive] == [instance_of(back)]
    tell(f"the other Pod was evicted after {evicted_after_s:.0f} s; ours ran on")


async def _evicted(owners: Owners, *, within_s: float, tell: Callable[[str], None]) -> float:
    """How long it took until the other Pod was told to go."""
    began_s = told_s = time.monotonic()
    while True:
        if any(map(_is_evicted, await owners.pods())):
            return time.monotonic() - began_s
        now_s = time.monotonic()
        if now_s > began_s + within_s:
            raise AssertionError(f"the other Pod was not evicted within {within_s:g} s: nothing was seen")
        if now_s > told_s + 30:
            told_s = now_s
            tell(f"{now_s - began_s:.0f} s without anybody; nobody is evicted yet")
        await asyncio.sleep(0.2)


def _is_evicted(pod: Obj) -> bool:
    return pod["metadata"]["name"] == "bystander" and "deletionTimestamp" in pod["metadata"]


@asynccontextmanager
async def _healthy_node(kubeconfig: Path, *, beat_s: float) -> AsyncIterator[None]:
    """A node of somebody else's that renews its Lease until the block ends."""
    async with await Kube.connect(kubeconfig=str(kubeconfig)) as kube:
        await kube.create(paths.nodes(), {"apiVersion": "v1", "kind": "Node", "metadata": {"name": HEALTHY}})
        ready = [{"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "for a test"}]
        await kube.patch(f"{paths.nodes()}/{HEALTHY}/status", {"status": {"conditions": ready}}, kind="merge")
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": HEALTHY, "namespace": "kube-node-lease"},
            "spec": {"holderIdentity": HEALTHY, "leaseDurationSeconds": 40, "renewTime": _now()},
        }
        await kube.create("/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases", lease)

        async def beat() -> None:
            while True:
                await asyncio.sleep(beat_s)
                body = {"spec": {"renewTime": _now()}}
                await kube.patch(paths.lease("kube-node-lease", HEALTHY), body, kind="merge")

        beating = asyncio.create_task(beat())
        try:
            yield
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
