"""Our own restarts, and a time without any of us: nothing is rented, nothing lost, nothing written."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.api import keys
from hack.cluster import Cluster, ControlPlane
from tests.cluster.whole.nobody_leads import nobody_leads
from tests.cluster.whole.owners_world import Owners

pytestmark = pytest.mark.slow

PODS = 3
GRACE_S = 6
OURS = ("pods", "nodeclaims", "cloudpodbindings", "nodepools", "nodes")


@pytest.mark.behaviour(176)
@pytest.mark.field_case("FC-010")
async def test_a_restart_with_live_pods_rents_nothing_loses_nothing_and_writes_nothing(
    owners: Owners, cluster: Cluster
) -> None:
    if cluster.control_plane is None:
        pytest.fail("writes are counted in our own audit log: unset NEBULA_TEST_KUBECONFIG")
    await owners.deployment("serve", "again", replicas=PODS)
    before = await owners.ready(PODS)
    claims = await owners.get("nodeclaims")
    await asyncio.to_thread(owners.controller.stop)
    marker = "after-the-restart"
    await owners.kubectl("create", "configmap", marker)

    await asyncio.to_thread(owners.controller.start)
    # A new Pod is placed, rented and shown only after all that is old was looked at.
    await owners.kubectl("scale", "deployment/serve", f"--replicas={PODS + 1}")
    after = await owners.ready(PODS + 1)
    old = {pod["metadata"]["uid"] for pod in before}
    new = {pod["metadata"]["name"] for pod in after if pod["metadata"]["uid"] not in old}

    assert {uid: _shown(pod) for uid, pod in _by_uid(after).items() if uid in old} == {
        uid: _shown(pod) for uid, pod in _by_uid(before).items()
    }
    assert len(await owners.machines()) == PODS + 1
    names = {pod["metadata"]["name"] for pod in before}
    names |= {claim["metadata"]["name"] for claim in claims["items"]}
    written = await asyncio.to_thread(_writes_after, cluster.control_plane.audit_log, marker, new)
    assert [entry for entry in written if entry[2] in names] == []


@pytest.mark.field_case("FC-049")
async def test_a_cloud_that_is_silent_through_a_restart_changes_no_pod(owners: Owners) -> None:
    """Neither its own, nor one of the cloud beside it, which answers and whose node is not the same."""
    await owners.deployment("serve", "again")
    await owners.job("beside", "once")
    first = await owners.ready(2)
    (before,) = [pod for pod in first if pod["metadata"]["name"].startswith("serve")]
    await asyncio.to_thread(owners.controller.stop)
    cloud = owners.clouds["again"]
    fault = await cloud.add_fault("status", unlimited=True)

    await asyncio.to_thread(owners.controller.start)
    await owners.kubectl(
        "wait",
        f"node/{keys.node_name('again')}",
        "--for=condition=nebula.inftyai.com/MachinesKnown=Unknown",
        "--timeout=60s",
    )
    (during,) = [pod for pod in await owners.pods() if pod["metadata"]["name"].startswith("serve")]
    await cloud.clear_faults(fault)
    await owners.kubectl(
        "wait",
        f"node/{keys.node_name('again')}",
        "--for=condition=nebula.inftyai.com/MachinesKnown=True",
        "--timeout=60s",
    )
    last = await owners.ready(2)
    (after,) = [pod for pod in last if pod["metadata"]["name"].startswith("serve")]

    assert during["status"] == before["status"] == after["status"]
    assert {pod["metadata"]["uid"]: pod["status"] for pod in last} == {
        pod["metadata"]["uid"]: pod["status"] for pod in first
    }
    assert len(await owners.machines()) == 2


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[ControlPlane]:
    """A control plane that gives a silent node seconds, and its Pods no more."""
    flags = ("--default-not-ready-toleration-seconds=1", "--default-unreachable-toleration-seconds=1")
    with ControlPlane(node_grace_s=GRACE_S, apiserver_flags=flags) as started:
        yield started


@pytest.mark.behaviour(114)
async def test_no_pod_is_evicted_while_nobody_leads(
    impatient: ControlPlane, database_url: str, tmp_path: Path
) -> None:
    """Seven minutes, scaled; `make soak` lives through them as they are."""
    await nobody_leads(impatient, tmp_path, database=database_url, beat_s=GRACE_S / 6)


def _by_uid(pods: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {pod["metadata"]["uid"]: pod for pod in pods}


def _shown(pod: dict[str, Any]) -> tuple[str, Any]:
    return pod["metadata"]["resourceVersion"], pod["metadata"]["annotations"]


def _writes_after(audit_log: Path, marker: str, until: set[str]) -> list[tuple[str, str, str]]:
    """Verb, resource and name of our writes since the marker was made, once those on new Pods are in it."""
    while True:
        seen, found = False, []
        for line in audit_log.read_text().splitlines():
            entry = json.loads(line)
            ref = entry.get("objectRef", {})
            seen = seen or ref.get("name") == marker
            ours = entry.get("userAgent", "").startswith("nebula/") and ref.get("resource") in OURS
            if seen and ours and entry["verb"] not in ("get", "list", "watch"):
                found.append((entry["verb"], ref["resource"], ref.get("name", "")))
        if until <= {name for _, _, name in found}:
            return found
