"""Mode Reserve on the whole product: want of capacity fails nobody's Pod, Job or StatefulSet."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from app.api import keys
from app.api.reasons import PLACED_CONDITION
from tests.cluster.whole.owners_world import Owners, condition_of, is_gated

pytestmark = pytest.mark.slow

Obj = dict[str, Any]


@pytest.fixture
async def reserving(owners: Owners) -> AsyncIterator[Owners]:
    """With a pool of both clouds in mode Reserve, and no T4 left anywhere."""
    spec = {
        "providers": [{"name": name, "regions": ["r1"]} for name in owners.clouds],
        "capacityTypes": ["OnDemand"],
        "failover": {"mode": "Reserve", "blocklistTTL": "5s"},
    }
    pool = {
        "apiVersion": keys.API_VERSION,
        "kind": keys.NODE_POOL,
        "metadata": {"name": pool_of(owners)},
        "spec": spec,
    }
    await owners.kubectl("apply", "-f", "-", stdin=pool)
    await capacity(owners, 0)
    yield owners
    await capacity(owners, None)
    await owners.kubectl("delete", "nodepool", pool_of(owners), "--wait=false")


def pool_of(owners: Owners) -> str:
    return f"pool-{owners.namespace}"


async def capacity(owners: Owners, units: int | None) -> None:
    for cloud in owners.clouds.values():
        await cloud.set_capacity(units, tier="OnDemand", accelerator="T4", region="r1")


async def create_all(owners: Owners) -> None:
    pool = pool_of(owners)
    await owners.deployment("served", pool)
    await owners.job("train", pool, backoffLimit=0)
    template = owners.template(pool)
    template["metadata"]["labels"]["app"] = "ordinals"
    spec = {
        "replicas": 1,
        "serviceName": "ordinals",
        "selector": {"matchLabels": {"app": "ordinals"}},
        "template": template,
    }
    await owners.create("StatefulSet", "ordinals", spec, api="apps/v1")
    bare = owners.template(pool, policy="Never")
    bare["metadata"]["labels"]["app"] = "bare"
    body = {"apiVersion": "v1", "kind": "Pod", **bare, "metadata": {"name": "bare", **bare["metadata"]}}
    await owners.kubectl("create", "-f", "-", stdin=body)


def all_blocked(pods: list[Obj]) -> bool:
    placed = [condition_of(pod, PLACED_CONDITION) or {} for pod in pods]
    return len(pods) == 4 and all(each.get("reason") == "AllBlocked" for each in placed)


@pytest.mark.behaviour(31, 141)
@pytest.mark.field_case("FC-059")
async def test_while_all_clouds_are_full_every_kind_of_pod_waits_and_the_same_pods_run_afterwards(
    reserving: Owners,
) -> None:
    await create_all(reserving)
    await reserving.until(all_blocked, what="four Pods that wait")
    waiting = await reserving.pods()
    assert all(is_gated(pod) and pod["status"]["phase"] == "Pending" for pod in waiting)
    assert await reserving.machines() == []

    await capacity(reserving, None)
    ready = await reserving.ready(4)

    assert {pod["metadata"]["uid"] for pod in ready} == {pod["metadata"]["uid"] for pod in waiting}
    assert len(await reserving.machines()) == 4
    assert (await reserving.get("job", "train"))["status"].get("failed", 0) == 0
    (train,) = [pod for pod in ready if pod["metadata"]["name"].startswith("train")]
    await reserving.exit(train, code=0)
    await reserving.kubectl("wait", "--for=condition=Complete", "job/train", "--timeout=60s")


@pytest.mark.field_case("FC-019", "FC-055")
async def test_pods_that_are_deleted_while_they_wait_leave_nothing(reserving: Owners) -> None:
    await create_all(reserving)
    await reserving.until(all_blocked, what="four Pods that wait")

    for kind in ("deployment/served", "job/train", "statefulset/ordinals", "pod/bare"):
        await reserving.kubectl("delete", kind, "--wait=false")
    await reserving.until(lambda pods: not pods, what="no Pod")

    async def claims() -> list[Obj]:
        items: list[Obj] = (await reserving.get("nodeclaims"))["items"]
        return [item for item in items if item["spec"]["podRef"]["namespace"] == reserving.namespace]

    while await claims():
        await reserving.until(lambda pods: not pods)
    assert await reserving.machines() == []
