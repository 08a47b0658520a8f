"""``kubectl top`` and the HPA with a real metrics-server: built once, which takes minutes, and so opt-in.

``NEBULA_CHECK_METRICS_SERVER=1`` runs this; ``NEBULA_METRICS_SERVER_BIN`` names a folder with the program.
"""

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from app import processes
from app.api import keys
from hack.cluster import binaries
from tests.cluster.kubelet.conftest import Bench
from tests.support.composed import until

PROGRAM = binaries.Programs(
    "metrics-server",
    "metrics-server",
    (binaries.Program("metrics-server", "sigs.k8s.io/metrics-server/cmd/metrics-server", "metrics-server"),),
    "NEBULA_METRICS_SERVER_BIN",
    4 << 30,
)
_SERVICE, _GROUP = "metrics-server", "v1beta1.metrics.k8s.io"
_LATE_S = 120.0  # two samples of ten seconds, then the HPA's own round of fifteen

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "NEBULA_CHECK_METRICS_SERVER" not in os.environ, reason="NEBULA_CHECK_METRICS_SERVER is not set"
    ),
]


@pytest.fixture
async def metrics_server(bench: Bench, tmp_path: Path) -> AsyncIterator[Path]:
    """One that the API server passes the metrics API on to, at the machine's own address; its log."""
    program = await asyncio.to_thread(binaries.build, PROGRAM)
    (port,) = processes.free_ports(1)
    config = str(bench.cluster.kubeconfig)
    log = tmp_path / "metrics-server.log"
    process = processes.spawn(
        [
            program / "metrics-server",
            f"--kubeconfig={config}",
            f"--authentication-kubeconfig={config}",
            f"--authorization-kubeconfig={config}",
            f"--secure-port={port}",
            f"--cert-dir={tmp_path}",
            "--kubelet-preferred-address-types=InternalIP",
            "--kubelet-use-node-status-port",
            "--kubelet-insecure-tls",
            "--kubelet-request-timeout=5s",
            "--metric-resolution=10s",
        ],
        log=log,
    )
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": _SERVICE},
        "spec": {"ports": [{"name": "https", "port": 443, "targetPort": port}]},
    }
    slice_ = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": _SERVICE, "labels": {"kubernetes.io/service-name": _SERVICE}},
        "addressType": "IPv4",
        "ports": [{"name": "https", "port": port}],
        "endpoints": [{"addresses": [_address()], "conditions": {"ready": True}}],
    }
    group = {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": _GROUP},
        "spec": {
            "service": {"name": _SERVICE, "namespace": bench.namespace},
            "group": "metrics.k8s.io",
            "version": "v1beta1",
            "insecureSkipTLSVerify": True,
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
        },
    }
    try:
        for obj in (service, slice_, group):
            await bench.ok("create", "-f", "-", stdin=json.dumps(obj).encode())
        yield log
    finally:
        await bench.run("delete", "apiservice", _GROUP)
        processes.stop(process, grace_s=10)


def _address() -> str:
    """An address of this machine that is not the loopback one, which no Service may have."""
    for each in psutil.net_if_addrs().values():
        for address in each:
            if address.family is socket.AF_INET and not address.address.startswith("127."):
                return str(address.address)
    pytest.skip("this machine has no address but the loopback one")


async def test_top_and_the_hpa_see_what_rented_machines_use(bench: Bench, metrics_server: Path):
    labels = {
        keys.ENABLED_LABEL: "true",
        keys.NODE_POOL_LABEL: "runs",
        keys.ACCELERATOR_TYPE_LABEL: "T4",
        "app": "busy",
    }
    container = {
        "name": "work",
        "image": "work:1",
        "command": ["sh", "-c", "while :; do :; done"],
        "resources": {"limits": {keys.GPU_RESOURCE: "1"}, "requests": {"cpu": "50m"}},
    }
    deployment: dict[str, Any] = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "busy"},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": {"app": "busy"}},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
        },
    }
    await bench.ok("create", "-f", "-", stdin=json.dumps(deployment).encode())
    await bench.ok("autoscale", "deployment", "busy", "--cpu=100%", "--min=1", "--max=2")
    said = ""

    async def top() -> bool:
        nonlocal said
        done = await bench.run("top", "pod", "-l", "app=busy", "--no-headers")
        said = done.out.decode() + done.err
        words = done.out.split()
        return len(words) >= 3 and int(words[1].removesuffix(b"m")) > 50 and words[2] != b"0Mi"

    try:
        await until(top, within_s=_LATE_S)
        node = await bench.ok("top", "node", keys.node_name("runs"), "--no-headers")
        print(f"\nkubectl top pod: {said.strip()}\nkubectl top node: {node.decode().strip()}")

        async def scaled() -> bool:
            hpa = json.loads(await bench.ok("get", "hpa", "busy", "-o", "json"))
            return int(hpa["status"].get("desiredReplicas") or 0) == 2

        await until(scaled, within_s=_LATE_S, what="the HPA wants a second one")
    except (AssertionError, TimeoutError) as error:
        conditions = (await bench.run("get", "hpa", "busy", "-o", "jsonpath={.status.conditions}")).out
        raise AssertionError(f"{said}\n{conditions!r}\n{processes.tail(metrics_server)}") from error
