"""``make bench``: what RunPod's API is asked for a Pod's life and at rest, as a user would run it.

The simulator answers with the latency of an API behind a CDN and enforces the documentation's example limit,
60 calls a minute. Nothing is asserted on time; the table is printed.
"""

import asyncio
import os
from collections import Counter
from pathlib import Path
from typing import Any

from app.api import keys
from app.kube import paths
from app.kube.cache import Cache
from app.kube.client import Kube
from hack.cluster import ControlPlane
from hack.controller import Controller
from tests.bench.load import deployment, deployments, pool, template
from tests.bench.observe import is_ready
from tests.support import composed
from tests.support.clouds import FakeCloud

N = int(os.environ.get("RUNPOD_N", "5"))
NAMESPACE = "bench"
A_MINUTE = 60
LATENCY_S = 0.25
REST_S = 60.0
PAGE = 1000  # pods in one answer
WITHIN_S = 600.0
CLOUD: dict[str, Any] = {
    "cloud": "runpod",
    "account": "acct-1",
    "life": {"boot_s": 10, "exit_restarts": True},
    "billing": {"states": ["queued", "booting", "running"]},
    "quirks": {"lifecycle": "observed", "per_minute": A_MINUTE},
    "offers": [{"accelerator": "T4", "counts": [1], "usd_per_hour": {"SECURE": "0.40"}}],
}


async def test_calls_of_a_pods_life_and_at_rest(tmp_path: Path, database_url: str):
    with ControlPlane() as plane:
        async with (
            await Kube.connect(kubeconfig=str(plane.kubeconfig)) as kube,
            FakeCloud.running(tmp_path / "cloud", scenario=CLOUD, simulator="runpod") as cloud,
        ):
            await composed.serve_our_kinds(kube)
            for name in (NAMESPACE, keys.SYSTEM_NAMESPACE):
                await kube.create(paths.namespaces(), {"metadata": {"name": name}})
            await cloud.add_fault("slow", unlimited=True, delay_s=LATENCY_S)
            controller = Controller(
                tmp_path / "controller",
                kubeconfig=plane.kubeconfig,
                database_url=database_url,
                clouds={},
                others=[f"fake=runpod,url={cloud.url}"],
                options={"NEBULA_PROFILE": "production", "RUNPOD_API_KEY": "any"},
            )
            await asyncio.to_thread(controller.start)
            try:
                up, rest, down = await _measure(kube, cloud)
            finally:
                await asyncio.to_thread(controller.stop)
            assert await cloud.alive() == []
    _print(up, rest, down)


async def _measure(kube: Kube, cloud: FakeCloud) -> tuple[Counter[str], Counter[str], Counter[str]]:
    pods, claims = Cache(kube, paths.pods(NAMESPACE)), Cache(kube, paths.nodeclaims())
    tasks = [asyncio.create_task(cache.run()) for cache in (pods, claims)]
    await asyncio.gather(pods.synced(), claims.synced())
    await kube.create(paths.nodepools(), pool())
    first = await _calls(cloud)
    body = deployment("bench", N, template(opted_in=True, gated=False))
    await kube.create(deployments(NAMESPACE), body)
    await composed.until(lambda: sum(map(is_ready, pods.all())) == N, within_s=WITHIN_S)
    ready = await _calls(cloud)
    await asyncio.sleep(REST_S)  # the idle state is what is measured, not waited for
    rested = await _calls(cloud)
    await kube.delete(f"{deployments(NAMESPACE)}/bench", propagation="Background")
    await composed.until(lambda: not pods.all() and not claims.all(), within_s=WITHIN_S)
    last = await _calls(cloud)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return ready - first, rested - ready, last - rested


async def _calls(cloud: FakeCloud) -> Counter[str]:
    return Counter((await cloud.truth())["calls"])


def _print(up: Counter[str], rest: Counter[str], down: Counter[str]) -> None:
    print(f"\n{N} Pods on RunPod, {A_MINUTE} calls a minute, {LATENCY_S:g} s an answer")
    for verb in sorted({*up, *rest, *down}):
        a_life = (up[verb] + down[verb]) / N
        print(f"  {verb:12}{a_life:8.2f} a Pod's life{rest[verb] * 60 / REST_S:8.1f} a minute at rest")
    at_rest = rest.total() * 60 / REST_S
    print(f"  {'all':12}{(up + down).total() / N:8.2f}{at_rest:33.1f}, {at_rest / A_MINUTE:.0%} of the limit")
    for every_s in (15, 60, 300):
        # Half of the limit is left to whatever changes.
        pages = int(A_MINUTE / 2 * every_s / 60)
        print(f"  a round every {every_s:3} s leaves room for {pages * PAGE:>9,} pods in the account")
