"""``make bench`` (``N=500``): a Deployment of N Pods up and down, beside a Go controller under the same load.

The control plane runs with raised client limits, the fake cloud boots at once, and one ``nebula run`` is
started as a user would. Times are from apply; CPU and memory are the controller's; writes come from the audit
log.
"""

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from app.api import keys
from app.kube import paths
from app.kube.cache import Cache
from app.kube.client import Kube
from hack.cluster import ControlPlane
from hack.controller import Controller
from tests.support import composed
from tests.support.clouds import FakeCloud

N = int(os.environ.get("N", "100"))
NAMESPACE = "bench"
CLOUD = {
    "cloud": "fake",
    "account": "acct-1",
    "life": {"boot_s": 0},
    "offers": [{"accelerator": "T4", "counts": [1], "usd_per_hour": {"OnDemand": "0.40"}}],
}
# Seen on a machine of two cores, 500 Pods, the webhook off: what an existing Go controller of this kind does.
RIVAL = {
    "ready_last_s": 30.0,
    "drained_s": 40.0,
    "writes_per_pod": 19.0,
    "cpu_ms_per_pod": 100.0,
    "peak_mib": 158.0,
}


class Meter:
    """A process's CPU seconds and peak memory, sampled."""

    def __init__(self, pid: int) -> None:
        self._process, self.peak_mib = psutil.Process(pid), 0.0

    def cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    async def watch(self) -> None:
        while True:
            self.peak_mib = max(self.peak_mib, self._process.memory_info().rss / 2**20)
            await asyncio.sleep(0.25)


async def test_pods_up_and_down(tmp_path: Path, database_url: str):
    with ControlPlane() as plane:
        async with (
            await Kube.connect(kubeconfig=str(plane.kubeconfig)) as kube,
            FakeCloud.running(tmp_path / "cloud", scenario=CLOUD) as cloud,
        ):
            await composed.serve_our_kinds(kube)
            for name in (NAMESPACE, keys.SYSTEM_NAMESPACE):
                await kube.create(paths.namespaces(), {"metadata": {"name": name}})
            controller = Controller(
                tmp_path / "controller",
                kubeconfig=plane.kubeconfig,
                database_url=database_url,
                clouds={"fake": cloud.url},
                options={"NEBULA_PROFILE": "production", "NEBULA_SETTLE_AFTER_S": "2"},
            )
            await asyncio.to_thread(controller.start)
            try:
                figures = await _measure(kube, Meter(controller.pid), plane.audit_log)
            finally:
                await asyncio.to_thread(controller.stop)
            assert await cloud.alive() == []
    _print(figures)


async def _measure(kube: Kube, meter: Meter, audit_log: Path | None) -> dict[str, float]:
    await kube.create(paths.nodepools(), _pool())
    pods, claims = Cache(kube, paths.pods(NAMESPACE)), Cache(kube, paths.nodeclaims())
    changed = asyncio.Event()
    for cache in (pods, claims):
        cache.on_change(lambda _old, _new: changed.set())
    tasks = [asyncio.create_task(work) for work in (pods.run(), claims.run(), meter.watch())]
    await asyncio.gather(pods.synced(), claims.synced())
    deployments = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments"

    async def until(holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(120 + N / 2):
            while not holds():
                changed.clear()
                await changed.wait()

    cpu, began = meter.cpu_s(), time.monotonic()
    await kube.create(deployments, _deployment())
    await until(lambda: sum(map(_ready, pods.all())) == N)
    ready_s = time.monotonic() - began
    idle_cpu, idle_from = meter.cpu_s(), time.monotonic()
    await asyncio.sleep(10)  # the idle state is what is measured, not waited for
    idle_share = (meter.cpu_s() - idle_cpu) / (time.monotonic() - idle_from)
    began = time.monotonic()
    await kube.delete(f"{deployments}/bench", propagation="Background")
    await until(lambda: not pods.all() and not claims.all())
    drained_s = time.monotonic() - began
    cpu_ms = (meter.cpu_s() - cpu - idle_share * 10) / N * 1000
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(2)  # the audit log is written in batches
    writes = _writes(audit_log) if audit_log is not None else Counter()
    for key, count in sorted(writes.items(), key=lambda item: -item[1]):
        print(f"  {count / N:6.2f} a Pod  {' '.join(filter(None, key))}")
    return {
        "ready_last_s": ready_s,
        "drained_s": drained_s,
        "writes_per_pod": sum(writes.values()) / N,
        "cpu_ms_per_pod": cpu_ms,
        "peak_mib": meter.peak_mib,
        "idle_core_share": idle_share,
    }


def _writes(audit_log: Path) -> Counter[tuple[str, str, str]]:
    count: Counter[tuple[str, str, str]] = Counter()
    with audit_log.open() as lines:
        for line in lines:
            entry = json.loads(line)
            ref = entry.get("objectRef", {})
            ours = entry.get("userAgent", "").startswith("nebula/") and "(main)" not in entry["userAgent"]
            about_pods = ref.get("resource") in ("pods", "nodeclaims", "cloudpodbindings")
            if ours and about_pods and entry["verb"] not in ("get", "list", "watch"):
                count[entry["verb"], ref["resource"], ref.get("subresource", "")] += 1
    return count


def _ready(pod: dict[str, Any]) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def _pool() -> dict[str, Any]:
    return {
        "apiVersion": keys.API_VERSION,
        "kind": keys.NODE_POOL,
        "metadata": {"name": "bench"},
        "spec": {"providers": [{"name": "fake"}], "capacityTypes": ["OnDemand"]},
    }


def _deployment() -> dict[str, Any]:
    labels = {keys.ENABLED_LABEL: "true", keys.NODE_POOL_LABEL: "bench", keys.ACCELERATOR_TYPE_LABEL: "T4"}
    container = {"name": "main", "image": "bench:1", "resources": {"limits": {keys.GPU_RESOURCE: "1"}}}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    return {
        "metadata": {"name": "bench"},
        "spec": {"replicas": N, "selector": {"matchLabels": labels}, "template": template},
    }


def _print(figures: dict[str, float]) -> None:
    print(f"\n{'':18}{f'{N} Pods':>12}{'Go, 500 Pods':>14}{'ratio':>8}")
    for name, value in figures.items():
        rival = RIVAL.get(name)
        beside = f"{rival:14.1f}{value / rival:8.2f}" if rival is not None else ""
        print(f"{name:18}{value:12.2f}{beside}")
