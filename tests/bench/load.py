"""What is put on the cluster: a Deployment of N Pods and its end, one more Pod, dry-run creates at a rate."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from app.api import keys
from app.kube import paths
from app.kube.client import Kube, Obj
from app.kube.errors import KubeError
from tests.bench.observe import Stages, is_ready, percentile

POOL = "bench"
CLOUD: dict[str, Any] = {
    "cloud": "fake",
    "account": "acct-1",
    "life": {"boot_s": 0},
    "offers": [{"accelerator": "T4", "counts": [1], "usd_per_hour": {"OnDemand": "0.40"}}],
}


def pool() -> Obj:
    return {
        "apiVersion": keys.API_VERSION,
        "kind": keys.NODE_POOL,
        "metadata": {"name": POOL},
        "spec": {"providers": [{"name": "fake"}], "capacityTypes": ["OnDemand"]},
    }


def template(*, opted_in: bool, gated: bool) -> Obj:
    """``opted_in`` Pods are the product's. ``gated``: as its webhook would leave them."""
    labels = {"app": "bench"}
    if opted_in:
        labels |= {
            keys.ENABLED_LABEL: keys.ENABLED,
            keys.NODE_POOL_LABEL: POOL,
            keys.ACCELERATOR_TYPE_LABEL: "T4",
        }
    spec: Obj = {
        "containers": [
            {"name": "main", "image": "bench:1", "resources": {"limits": {keys.GPU_RESOURCE: "1"}}}
        ]
    }
    if gated:
        spec["schedulingGates"] = [{"name": keys.SCHEDULING_GATE}]
        spec["tolerations"] = [dict(keys.TOLERATION)]
    return {"metadata": {"labels": labels}, "spec": spec}


def deployment(name: str, pods: int, made: Obj) -> Obj:
    labels = {**made["metadata"]["labels"], "set": name}
    made = {**made, "metadata": {"labels": labels}}
    return {
        "metadata": {"name": name},
        "spec": {"replicas": pods, "selector": {"matchLabels": {"set": name}}, "template": made},
    }


def deployments(namespace: str) -> str:
    return f"/apis/apps/v1/namespaces/{namespace}/deployments"


async def up(kube: Kube, namespace: str, stages: Stages, body: Obj) -> float:
    """Apply; seconds until all Pods are Ready."""
    stages.begin()
    await kube.create(deployments(namespace), body)
    return await stages.until("pods ready", body["spec"]["replicas"])


async def down(kube: Kube, namespace: str, stages: Stages, name: str, pods: int) -> float:
    """Delete; seconds until all Pods and claims are gone."""
    stages.begin()
    await kube.delete(f"{deployments(namespace)}/{name}", propagation="Background")
    gone_s = await stages.until("pods gone", pods)
    return max(gone_s, await stages.until("claims gone", pods))


async def one_more(kube: Kube, namespace: str, *, name: str) -> float:
    """Create a Deployment of one Pod; seconds until it is Ready. The proof that a replica works."""
    began = time.monotonic()
    body = deployment(name, 1, template(opted_in=True, gated=False))
    while True:
        try:
            await kube.create(deployments(namespace), body)
            break
        except KubeError:  # the API server itself may be busy; the Pod is what is waited for
            await asyncio.sleep(0.1)
    while True:
        pods = await kube.get(paths.pods(namespace), labelSelector=f"set={name}")
        if pods["items"] and all(map(is_ready, pods["items"])):
            return time.monotonic() - began
        await asyncio.sleep(0.05)


async def remove_all(kube: Kube, namespace: str) -> None:
    """Delete what is left, and wait until no claim is there any more."""
    for found in (await kube.get(deployments(namespace)))["items"]:
        await kube.delete(f"{deployments(namespace)}/{found['metadata']['name']}", propagation="Background")
    async with asyncio.timeout(120):
        while (await kube.get(paths.nodeclaims()))["items"]:
            await asyncio.sleep(0.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Of creates, in milliseconds; ``failed`` ones are in none of the figures."""

    creates: int
    failed: int
    p50_ms: float
    p99_ms: float


async def dry_runs(kube: Kube, namespace: str, *, rate: float, for_s: float) -> Latency:
    """Create opted-in Pods that nothing keeps, ``rate`` a second: only admission works."""
    made = template(opted_in=True, gated=False)
    times: list[float] = []
    failures: list[str] = []

    async def one(number: int) -> None:
        pod = {**made, "metadata": {**made["metadata"], "name": f"dry-{number}"}}
        began = time.monotonic()
        try:
            await kube.create(paths.pods(namespace), pod, params={"dryRun": "All"})
        except KubeError as error:  # on a machine that is too busy: the rest is still worth its figures
            failures.append(str(error))
        else:
            times.append((time.monotonic() - began) * 1000)

    for number in range(20):  # connections are made, and are not what is measured
        await one(number)
    times.clear()
    start = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for number in range(round(rate * for_s)):
            await asyncio.sleep(max(0.0, start + number / rate - time.monotonic()))
            tasks.create_task(one(number))
    if failures:
        print(f"  {len(failures)} DRY RUNS FAILED, the first: {failures[0][:200]}")
    if not times:
        raise SystemExit("no dry run was answered")
    return Latency(
        creates=len(times),
        failed=len(failures),
        p50_ms=percentile(times, 0.5),
        p99_ms=percentile(times, 0.99),
    )
