"""What the machines of one node use, as metrics-server and the HPA read it from a kubelet.

Unknown is absent, never zero: a Pod without a measure has no series. CPU is a counter of core-seconds; where
a cloud tells only the rate of now, the counter is made here from one measure to the next, so it begins at
nothing on a new leader, which readers of counters expect.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import structlog

from app.api import keys
from app.inventory.accounts import Account, Accounts
from app.inventory.budget import Urgency
from app.kube import paths
from app.kube.client import Kube, Obj
from app.kubelet.find import Finder
from providers.base import ProviderError, Ref
from providers.capabilities import ReportsUsage, Usage

log = structlog.get_logger()
FRESH_S = 5.0  # two readers of one moment ask the cloud once
PARALLEL = 32
ANSWER_S = 8.0  # metrics-server waits ten
_LEAST_CPU_S = 1e-3  # a container with a counter of nothing is dropped by metrics-server, and its Pod with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One container's. ``at`` is the cloud's time where it tells one, else ours."""

    namespace: str
    pod: str
    pod_uid: str
    container: str
    started_at: datetime | None
    at: datetime
    cpu_s: float
    cpu_cores: float | None
    memory_bytes: int


@dataclass(slots=True)
class _Counter:
    """``at``: the monotonic time of the last measure."""

    cpu_s: float
    at: float


@dataclass(slots=True)
class _Node:
    samples: list[Sample] = field(default_factory=list)
    read_at: float = float("-inf")
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Meterer:
    """Asks clouds when somebody asks us."""

    def __init__(
        self,
        kube: Kube,
        *,
        accounts: Accounts,
        finder: Finder,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._kube, self._accounts, self._finder = kube.room("kubelet"), accounts, finder
        self._clock, self._now = clock, now
        self._nodes: dict[str, _Node] = {}
        self._counters: dict[tuple[str, str], _Counter] = {}  # by node and Pod UID

    def names(self) -> list[str]:
        """The nodes of all open accounts."""
        return sorted(keys.node_name(*each.key) for each in self._accounts)

    def account_of(self, node: str) -> Account | None:
        """The open account behind a node."""
        return next((each for each in self._accounts if keys.node_name(*each.key) == node), None)

    async def node(self, name: str) -> list[Sample]:
        """The samples of a node's running Pods.

        Raises:
            KubeError: the API server did not answer.
        """
        node = self._nodes.setdefault(name, _Node())
        async with node.lock:
            if self._clock() - node.read_at >= FRESH_S:
                node.samples = await self._read(name)
                node.read_at = self._clock()
            return node.samples

    async def _read(self, name: str) -> list[Sample]:
        account = self.account_of(name)
        if account is None or not isinstance(account.provider, ReportsUsage):
            return []
        provider = account.provider
        pods = [
            pod
            async for page in self._kube.list_pages(paths.pods(), fieldSelector=f"spec.nodeName={name}")
            for pod in page["items"]
            if _running(pod) is not None
        ]
        refs = await self._finder.machines(*account.key)
        places = asyncio.Semaphore(PARALLEL)

        async def ask(pod: Obj, ref: Ref) -> tuple[Obj, Usage] | None:
            async with places:
                await account.budget.take(Urgency.LIST)
                try:
                    usage = await provider.usage(ref)
                except ProviderError as error:
                    log.debug("usage not known", resource=ref.resource_id, error=str(error))
                    return None
            return (pod, usage) if usage is not None else None

        asking = [
            asyncio.create_task(ask(pod, refs[uid]))
            for pod in pods
            if (uid := pod["metadata"]["uid"]) in refs
        ]
        if asking:
            _, late = await asyncio.wait(asking, timeout=ANSWER_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        found = [task.result() for task in asking if task.done() and not task.cancelled()]
        living = {pod["metadata"]["uid"] for pod in pods}
        for key in [key for key in self._counters if key[0] == name and key[1] not in living]:
            del self._counters[key]
        samples = (self._sample(name, *each) for each in found if each is not None)
        return [sample for sample in samples if sample is not None]

    def _sample(self, node: str, pod: Obj, usage: Usage) -> Sample | None:
        metadata, container = pod["metadata"], _running(pod)
        if container is None or usage.memory_bytes is None:
            return None
        cpu_s = self._cpu_s((node, metadata["uid"]), usage)
        if cpu_s is None:
            return None
        started = (container["state"]["running"] or {}).get("startedAt")
        return Sample(
            namespace=metadata["namespace"],
            pod=metadata["name"],
            pod_uid=metadata["uid"],
            container=container["name"],
            started_at=datetime.fromisoformat(started) if started else None,
            at=usage.at or self._now(),
            cpu_s=max(cpu_s, _LEAST_CPU_S),
            cpu_cores=usage.cpu_cores,
            memory_bytes=max(usage.memory_bytes, 1),
        )

    def _cpu_s(self, key: tuple[str, str], usage: Usage) -> float | None:
        if usage.cpu_s is not None:
            return usage.cpu_s
        if usage.cpu_cores is None:
            return None
        now, counter = self._clock(), self._counters.get(key)
        if counter is None:
            counter = self._counters[key] = _Counter(0.0, now)
        counter.cpu_s += usage.cpu_cores * (now - counter.at)
        counter.at = now
        return counter.cpu_s


def _running(pod: Obj) -> Obj | None:
    """The status of a container that runs."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    return next((each for each in statuses if "running" in (each.get("state") or {})), None)


def exposition(samples: list[Sample]) -> str:
    """The page ``/metrics/resource``."""
    lines: list[str] = []

    def family(name: str, kind: str, text: str, values: list[tuple[str, float, datetime | None]]) -> None:
        if values:
            lines.append(f"# HELP {name} {text}")
            lines.append(f"# TYPE {name} {kind}")
            for labels, value, at in values:
                stamp = f" {round(at.timestamp() * 1000)}" if at is not None else ""
                lines.append(f"{name}{labels} {value:.15g}{stamp}")

    def of(sample: Sample) -> str:
        pod = f'namespace="{sample.namespace}",pod="{sample.pod}"'
        return f'{{container="{sample.container}",{pod}}}'

    def of_pod(sample: Sample) -> str:
        return f'{{namespace="{sample.namespace}",pod="{sample.pod}"}}'

    cpu, memory = "Cumulative cpu time in core-seconds", "Current working set in bytes"
    family(
        "container_cpu_usage_seconds_total", "counter", cpu, [(of(one), one.cpu_s, one.at) for one in samples]
    )
    family(
        "container_memory_working_set_bytes",
        "gauge",
        memory,
        [(of(one), float(one.memory_bytes), one.at) for one in samples],
    )
    family(
        "container_start_time_seconds",
        "gauge",
        "Start time in seconds since the epoch",
        [(of(one), one.started_at.timestamp(), None) for one in samples if one.started_at is not None],
    )
    if samples:
        newest = max(sample.at for sample in samples)
        total_cpu, total_memory = sum(one.cpu_s for one in samples), sum(one.memory_bytes for one in samples)
        family("node_cpu_usage_seconds_total", "counter", cpu, [("", total_cpu, newest)])
        family("node_memory_working_set_bytes", "gauge", memory, [("", float(total_memory), newest)])
    family(
        "pod_cpu_usage_seconds_total", "counter", cpu, [(of_pod(one), one.cpu_s, one.at) for one in samples]
    )
    family(
        "pod_memory_working_set_bytes",
        "gauge",
        memory,
        [(of_pod(one), float(one.memory_bytes), one.at) for one in samples],
    )
    family("resource_scrape_error", "gauge", "1 if something could not be read", [("", 0.0, None)])
    return "\n".join(lines) + "\n"


def summary(node: str, samples: list[Sample]) -> dict[str, Any]:
    """The document ``/stats/summary``."""

    def figures(cpu_s: float, memory_bytes: int, at: datetime, cores: float | None) -> dict[str, Any]:
        time_ = at.strftime("%Y-%m-%dT%H:%M:%SZ")
        cpu: dict[str, Any] = {"time": time_, "usageCoreNanoSeconds": round(cpu_s * 1e9)}
        if cores is not None:
            cpu["usageNanoCores"] = round(cores * 1e9)
        return {"cpu": cpu, "memory": {"time": time_, "workingSetBytes": memory_bytes}}

    pods = []
    for one in samples:
        own = figures(one.cpu_s, one.memory_bytes, one.at, one.cpu_cores)
        started = {} if one.started_at is None else {"startTime": one.started_at.isoformat()}
        pods.append(
            {
                "podRef": {"name": one.pod, "namespace": one.namespace, "uid": one.pod_uid},
                **started,
                "containers": [{"name": one.container, **started, **own}],
                **own,
            }
        )
    whole: dict[str, Any] = {"nodeName": node}
    if samples:
        whole |= figures(
            sum(one.cpu_s for one in samples),
            sum(one.memory_bytes for one in samples),
            max(one.at for one in samples),
            None,
        )
    return {"node": whole, "pods": pods}
