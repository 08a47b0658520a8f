"""``make bench N=500``: N Pods up and down, beside a floor and beside a Go controller under the same load.

The control plane runs with raised client limits, the fake cloud boots at once, and one ``nebula run`` is
started as a user would. First the floor brings the same number of Pods up and down on the same cluster, so
that the machine's speed on that day cancels out of the ratios. Then the product does, twice: once with its
webhook, which is what the figures of a Pod's life are of; and once without, its Pods created as the webhook
leaves them, with the controller ended and started again while all of them live. Nothing here fails on time.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg

from app import processes
from app.api import keys
from app.kube import paths
from app.kube.client import Kube
from app.store.devserver import DevPostgres
from hack.cluster import ControlPlane
from hack.controller import Controller
from tests.bench import floor, load, report
from tests.bench.observe import (
    DOWN,
    OUR_OBJECTS,
    READS,
    UP,
    Audit,
    Database,
    Meter,
    Request,
    Watching,
    Work,
    of_floor,
    of_nebula,
    writes,
)
from tests.support import composed
from tests.support.clouds import FakeCloud

NAMESPACE, FLOOR_NAMESPACE = "bench", "bench-floor"
NO_WEBHOOK_NAMESPACE = "kube-public"  # one of those that the webhooks leave alone
QUIET_S = 5.0  # a replica renews its Lease more often
SETTLE_S = 3.0  # what is written late, mirrors and NodePool, is no part of the idle state
DRY_RUNS_PER_S, DRY_RUN_S = 50.0, 10.0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("-n", "--pods", type=int, default=int(os.environ.get("N") or 100))
    parser.add_argument("--idle", type=float, default=20.0, metavar="S", help="watch the idle state so long")
    parser.add_argument("--no-floor", action="store_true", help="leave the yardstick out")
    parser.add_argument("--no-second", action="store_true", help="leave out the life without webhook")
    parser.add_argument("--no-restart", action="store_true", help="leave the two restarts in it out")
    parser.add_argument("--kubeconfig", type=Path, help="this cluster rather than one of our own")
    parser.add_argument("--audit-log", type=Path, help="that cluster's audit log, if it is on this machine")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the controller's log there")
    return parser.parse_args()


async def _main(options: argparse.Namespace) -> None:
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="nebula-bench-"))
        folder = options.keep or Path(scratch)
        if options.kubeconfig is None:
            plane = stack.enter_context(ControlPlane())
            kubeconfig, audit = plane.kubeconfig, Audit(plane.audit_log)
        else:
            kubeconfig, audit = options.kubeconfig, Audit(options.audit_log or Path("/dev/null"))
        async with _database() as url, await Kube.connect(kubeconfig=str(kubeconfig)) as connected:
            kube = connected.room("bench")
            await _refuse_company(audit)
            await composed.serve_our_kinds(kube)
            for name in (NAMESPACE, FLOOR_NAMESPACE, keys.SYSTEM_NAMESPACE):
                await kube.patch(
                    paths.namespace(name),
                    {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}},
                    kind="apply",
                )
            figures: dict[str, Any] = {"n": options.pods}
            if not options.no_floor:
                figures |= await _floor(kube, kubeconfig, options.pods, audit)
            figures |= await _product(kube, kubeconfig, url, folder, options, audit)
    report.show(figures)
    report.write(figures)


async def _refuse_company(audit: Audit) -> None:
    """End the bench while somebody else's replica works on this cluster: it would be measured, too."""
    since = audit.here()
    await asyncio.sleep(QUIET_S)
    others = audit.requests(since, await audit.settled(), agent=of_nebula)
    written = sum(count for (verb, _, _), count in others.items() if verb not in READS)
    if written:
        raise SystemExit(
            f"another client of ours is writing on this cluster ({written} writes): end it first"
        )


@asynccontextmanager
async def _database() -> AsyncIterator[str]:
    """An empty database, on a server that counts statements where it can."""
    server = DevPostgres(durable=False)
    try:
        await asyncio.to_thread(server.start)
        conn = await asyncpg.connect(server.dsn)
        counts = await conn.fetchval(
            "select 1 from pg_available_extensions where name = 'pg_stat_statements'"
        )
        if counts:
            await conn.execute("alter system set shared_preload_libraries = 'pg_stat_statements'")
        await conn.close()
        if counts:
            await asyncio.to_thread(server.restart)
            conn = await asyncpg.connect(server.dsn)
            await conn.execute("create extension pg_stat_statements")
            await conn.close()
        argv = [sys.executable, "-m", "app.cli", "migrate"]  # as an installation does, once
        process = await asyncio.create_subprocess_exec(
            *argv, env=os.environ | {"NEBULA_DATABASE_URL": server.url}, stdout=subprocess.DEVNULL
        )
        if await process.wait() != 0:
            raise SystemExit("the database was not migrated")
        yield server.url
    finally:
        await asyncio.to_thread(server.close)


# --- the floor -----------------------------------------------------------------------------------


async def _floor(kube: Kube, kubeconfig: Path, pods: int, audit: Audit) -> dict[str, Any]:
    """The same Pods, and the same writes, without a thought. Its node and webhook are gone afterwards."""
    argv = [sys.executable, "-m", "tests.bench.floor"]
    argv += ["--kubeconfig", str(kubeconfig), "--namespace", FLOOR_NAMESPACE]
    process = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        if (await process.stdout.readline()).strip() != b"ready":
            raise SystemExit("the floor did not start")
        since = audit.here()
        body = load.deployment("floor", pods, load.template(opted_in=False, gated=False))
        async with Meter(process.pid) as meter, Watching(kube, FLOOR_NAMESPACE) as stages:
            cpu = meter.cpu_s()
            ready_s = await load.up(kube, FLOOR_NAMESPACE, stages, body)
            report.show_stages("floor", stages.table(UP))
            cpu_up = meter.cpu_s() - cpu
            await asyncio.sleep(3)
            cpu = meter.cpu_s()
            drained_s = await load.down(kube, FLOOR_NAMESPACE, stages, "floor", pods)
            report.show_stages("floor", stages.table(DOWN))
            cpu_ms = (cpu_up + meter.cpu_s() - cpu) / pods * 1000
            made = writes(audit.requests(since, await audit.settled(), agent=of_floor))
    finally:
        process.terminate()
        await process.wait()
        await floor.clean(kube)
    return {
        "floor_ready_s": ready_s,
        "floor_drained_s": drained_s,
        "floor_cpu_ms": cpu_ms,
        "floor_peak_mib": meter.peak_mib,
        "floor_writes": made / pods,
    }


# --- the product ---------------------------------------------------------------------------------


async def _product(
    kube: Kube, kubeconfig: Path, url: str, folder: Path, options: argparse.Namespace, audit: Audit
) -> dict[str, Any]:
    async with FakeCloud.running(folder / "cloud", scenario=load.CLOUD) as cloud:
        controller = Controller(
            folder / "controller",
            kubeconfig=kubeconfig,
            database_url=url,
            clouds={"fake": cloud.url},
            # As in production, but that a simulator settles sooner than any real cloud.
            options={"NEBULA_PROFILE": "production", "NEBULA_SETTLE_AFTER_S": "2"},
        )
        began = time.monotonic()
        await asyncio.to_thread(controller.start)
        start_s = time.monotonic() - began
        print(f"controller: process {controller.pid}", flush=True)
        try:
            await kube.patch(paths.nodepool(load.POOL), load.pool(), kind="apply")
            figures: dict[str, Any] = {"help_s": await asyncio.to_thread(_help_s), "start_s": start_s}
            await load.one_more(kube, NAMESPACE, name="warm")  # every part has been used once
            figures["base_mib"] = Meter(controller.pid).mib()
            figures |= await _dry_runs(kube, controller)
            database = Database(url)
            figures |= await _first_life(kube, controller, database, options, audit)
            if not options.no_second:
                figures |= await _second_life(kube, cloud, controller, database, options, audit)
            await load.remove_all(kube, NAMESPACE)
            if left := await cloud.alive():
                print(f"MACHINES LEFT: {len(left)}")
        except BaseException:
            print(processes.tail(controller.log), file=sys.stderr)
            raise
        finally:
            await asyncio.to_thread(controller.stop)
    return figures


def _help_s() -> float:
    """How long ``nebula --help`` takes; the best of three."""
    times = []
    for _ in range(3):
        began = time.monotonic()
        subprocess.run([sys.executable, "-m", "app.cli", "--help"], stdout=subprocess.DEVNULL, check=True)
        times.append(time.monotonic() - began)
    return min(times)


async def _dry_runs(kube: Kube, controller: Controller) -> dict[str, float]:
    """Creates that only admission sees. What the process does anyway, measured right before, is taken off."""
    meter = Meter(controller.pid)
    cpu, began = meter.cpu_s(), time.monotonic()
    await asyncio.sleep(DRY_RUN_S / 2)
    anyway = (meter.cpu_s() - cpu) / (time.monotonic() - began)
    cpu, began = meter.cpu_s(), time.monotonic()
    found = await load.dry_runs(kube, NAMESPACE, rate=DRY_RUNS_PER_S, for_s=DRY_RUN_S)
    spent = meter.cpu_s() - cpu - anyway * (time.monotonic() - began)
    return {
        "dry_run_p50_ms": found.p50_ms,
        "dry_run_p99_ms": found.p99_ms,
        "dry_run_cpu_ms": spent / found.creates * 1000,
    }


@dataclass(slots=True)
class _Spent:
    """What bringing Pods up, or taking them down, has cost."""

    controller: Controller
    database: Database
    audit: Audit
    requests: Counter[Request] = field(default_factory=Counter)
    cpu_s: list[float] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    peak_mib: float = 0.0

    @asynccontextmanager
    async def counting(self) -> AsyncIterator[Meter]:
        """Count what happens inside the block, requests until they are in the log, CPU to its end."""
        async with Meter(self.controller.pid) as meter:
            since, work, cpu = self.audit.here(), await self.database.work(), meter.cpu_s()
            yield meter
            self.cpu_s.append(meter.cpu_s() - cpu)
            self.requests += self.audit.requests(since, await self.audit.settled(), agent=of_nebula)
            self.work.append(await self.database.work() - work)
        self.peak_mib = max(self.peak_mib, meter.peak_mib)


async def _first_life(
    kube: Kube, controller: Controller, database: Database, options: argparse.Namespace, audit: Audit
) -> dict[str, Any]:
    """N Pods up, a while of nothing, N Pods down; the webhook on, one process from beginning to end."""
    pods, figures = options.pods, dict[str, Any]()
    spent = _Spent(controller, database, audit)
    body = load.deployment("bench", pods, load.template(opted_in=True, gated=False))
    async with Watching(kube, NAMESPACE) as stages:
        async with spent.counting():
            figures["ready_last_s"] = await load.up(kube, NAMESPACE, stages, body)
            await stages.until("claims bound", pods)
            figures["stages"] = stages.table(UP)
            report.show_stages("up", figures["stages"])
        await asyncio.sleep(SETTLE_S)
        async with Meter(controller.pid) as meter:
            figures |= await _idle(meter, audit, options.idle)
        async with spent.counting():
            figures["drained_s"] = await load.down(kube, NAMESPACE, stages, "bench", pods)
            figures["stages"] |= stages.table(DOWN)
            report.show_stages("down", stages.table(DOWN))
    report.show_requests(spent.requests, pods)
    for calls, took_ms, text in await database.top(25):
        print(f"  {calls / pods:8.2f} a Pod  {took_ms / calls:7.3f} ms  {text[:110]}")
    up_cpu, down_cpu = spent.cpu_s
    done = spent.work[0] + spent.work[1]
    figures |= {
        "writes_per_pod": writes(spent.requests) / pods,
        "requests_per_pod": spent.requests.total() / pods,
        "cpu_ms_per_pod": (up_cpu + down_cpu) / pods * 1000,
        "cpu_up_ms": up_cpu / pods * 1000,
        "cpu_down_ms": down_cpu / pods * 1000,
        "peak_mib": max(spent.peak_mib, meter.peak_mib),
        "transactions_per_pod": done.transactions / pods,
        "requests": {
            " ".join(filter(None, key)): count / pods for key, count in spent.requests.most_common()
        },
    }
    if done.statements is not None:
        figures["statements_per_pod"] = done.statements / pods
    return figures


async def _second_life(
    kube: Kube,
    cloud: FakeCloud,
    controller: Controller,
    database: Database,
    options: argparse.Namespace,
    audit: Audit,
) -> dict[str, Any]:
    """The same without the webhook, and with restarts between; figures of the life have ``off_`` before."""
    pods, figures = options.pods, dict[str, Any]()
    spent = _Spent(controller, database, audit)
    body = load.deployment("bench-off", pods, load.template(opted_in=True, gated=True))
    async with Watching(kube, NO_WEBHOOK_NAMESPACE) as stages:
        async with spent.counting():
            figures["off_ready_last_s"] = await load.up(kube, NO_WEBHOOK_NAMESPACE, stages, body)
            await stages.until("claims bound", pods)
            report.show_stages("off up", stages.table(UP))
        if not options.no_restart:
            await asyncio.sleep(SETTLE_S)
            figures |= await _restarts(kube, cloud, controller, audit)
        async with spent.counting():
            figures["off_drained_s"] = await load.down(kube, NO_WEBHOOK_NAMESPACE, stages, "bench-off", pods)
            report.show_stages("off down", stages.table(DOWN))
    figures |= {
        "off_writes_per_pod": writes(spent.requests) / pods,
        "off_cpu_ms_per_pod": sum(spent.cpu_s) / pods * 1000,
        "off_peak_mib": spent.peak_mib,
    }
    return figures


async def _idle(meter: Meter, audit: Audit, for_s: float) -> dict[str, float]:
    since, cpu, began = await audit.settled(), meter.cpu_s(), time.monotonic()
    await asyncio.sleep(for_s)
    took_s = time.monotonic() - began
    share = (meter.cpu_s() - cpu) / took_s
    requests = audit.requests(since, await audit.settled(), agent=of_nebula)
    asked = sum(count for (verb, *_), count in requests.items() if verb != "watch")
    report.show_requests(requests, 1)
    return {"idle_core_share": share, "idle_requests_per_s": asked / (took_s + 2), "idle_mib": meter.mib()}


async def _restarts(kube: Kube, cloud: FakeCloud, controller: Controller, audit: Audit) -> dict[str, float]:
    """End it in order, then at once; each time until a Pod that comes meanwhile is Ready.

    ``restart_writes``: those to Pods, claims and bindings that were there before; each one changes nothing.
    """
    figures: dict[str, float] = {}
    for name, end in (("restart", controller.stop), ("restart_killed", controller.kill)):
        before = {machine["id"] for machine in await cloud.alive()}
        since, began = audit.here(), time.monotonic()
        await asyncio.to_thread(end)
        await asyncio.to_thread(controller.start)
        await load.one_more(kube, NAMESPACE, name=name.replace("_", "-"))
        figures[f"{name}_s"] = time.monotonic() - began
        written = [
            entry
            for entry in audit.entries(since, await audit.settled())
            if of_nebula(entry.get("userAgent", ""))
            and entry["verb"] not in READS
            and entry["objectRef"].get("resource") in OUR_OBJECTS
            and "restart" not in entry["objectRef"].get("name", "restart")
        ]
        for entry in written[:10]:
            print(f"  WRITTEN AFTER {name}: {entry['verb']} {entry['requestURI']}")
        after = {machine["id"] for machine in await cloud.alive()}
        if lost := before - after:
            print(f"  LOST IN {name}: {len(lost)} machines")
        if len(after - before) != 1:
            print(f"  RENTED IN {name}: {len(after - before)} machines for one Pod")
        figures[f"{name}_writes"] = len(written)
    return figures


if __name__ == "__main__":
    asyncio.run(_main(_options()))
