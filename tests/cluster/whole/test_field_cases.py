"""The whole controller where it cost other people money or sleep. Numbers are the field cases'."""

import asyncio
from typing import Any
from uuid import uuid4

import psutil
import pytest

from app.api import keys
from app.api.reasons import PLACED_CONDITION
from tests.cluster.whole.conftest import NO_IMAGE
from tests.cluster.whole.owners_world import Owners, condition_of, instance_of, is_gated, is_ready
from tests.support.composed import until

pytestmark = pytest.mark.slow

Obj = dict[str, Any]
MANY = 8  # for a thousand
GROWTH_BYTES = 24 << 20
POOLED = 40  # idle connections to the API server, the store and the clouds come and go


def a_pod(owners: Owners, name: str, pool: str, **spec: Any) -> Obj:
    template = owners.template(pool, policy="Never", **spec)
    return {"apiVersion": "v1", "kind": "Pod", **template, "metadata": {"name": name, **template["metadata"]}}


async def test_fc_006_fc_007_what_is_deleted_while_its_machine_is_on_order_leaves_none(
    owners: Owners,
) -> None:
    """A Job, a Pod by force, and a namespace with all that is in it, with every create still unanswered."""
    once = owners.clouds["once"]
    held = await once.pause(verb="create", when="after")
    await owners.job("work", "once")
    await owners.kubectl("create", "-f", "-", stdin=a_pod(owners, "bare", "once"))
    await owners.deployment("serve", "once")
    await owners.until_machines(lambda all_: len(all_) == 3, what="three orders")

    await owners.kubectl("delete", "pod", "bare", "--force", "--grace-period=0")
    await owners.kubectl("delete", "job", "work", "--wait=false")
    await owners.kubectl("delete", "namespace", owners.namespace, "--wait=false")
    await once.resume(held)

    await owners.until_none_alive()
    await owners.kubectl("wait", "--for=delete", f"namespace/{owners.namespace}", "--timeout=60s")
    assert len(await owners.machines()) == 3


async def test_fx_07_a_job_deleted_while_its_lost_machine_is_replaced_leaves_none(owners: Owners) -> None:
    await owners.job("patient", "once", backoffLimit=3)
    (first,) = await owners.ready()
    held = await owners.clouds["once"].pause(verb="create", when="after")
    await owners.preempt(first)
    await owners.until_machines(lambda all_: len(all_) == 2, what="the replacement's order")

    await owners.kubectl("delete", "job", "patient", "--wait=false")
    await owners.clouds["once"].resume(held)

    await owners.until_none_alive()
    await owners.until(lambda pods: not pods, what="no Pod")
    assert len(await owners.machines()) == 2


async def test_fc_059_a_deployment_whose_image_cannot_be_pulled_makes_no_endless_pods(owners: Owners) -> None:
    """Each try is a machine that is paid for: the next Pods wait, longer each time, gated and free."""
    template = owners.template("once")
    template["spec"]["containers"][0]["image"] = NO_IMAGE
    spec = {"replicas": 3, "selector": {"matchLabels": {"app": "owners"}}, "template": template}
    await owners.create("Deployment", "serve", spec, api="apps/v1")

    waiting = await owners.until(
        lambda pods: [pod for pod in pods if _waits_for_its_owner(pod)] or None, what="Pods that wait"
    )
    pods = await owners.pods()
    failed = [pod for pod in pods if pod["status"]["phase"] == "Failed"]
    said = condition_of(waiting[0], PLACED_CONDITION)
    await owners.kubectl("delete", "deployment", "serve")
    await owners.until(lambda pods: not pods, what="no Pod")

    assert 0 < len(failed) <= 6
    assert said is not None
    assert "never ran" in said["message"]
    machines = [one for one in await owners.clouds["once"].machines() if one["image"] == NO_IMAGE]
    assert len(machines) <= 9
    assert all(one["state"] == "gone" for one in machines)


def _waits_for_its_owner(pod: Obj) -> bool:
    said = condition_of(pod, PLACED_CONDITION)
    return is_gated(pod) and said is not None and said["reason"] == "OwnerBackOff"


LONG = ".".join(["p" * 60] * 4)[:253]
CUT_AT_63 = "x" * 62 + "-" + "y" * 37  # a cut at 63 characters would leave a dash at the end


async def test_fc_023_fc_026_fc_027_fc_035_pods_of_any_name_and_size_run_and_can_be_deleted(
    owners: Owners,
) -> None:
    """The longest names, 200 KiB of environment and annotations, and the default token: none is a trouble."""
    mine = Owners(
        kubectl_=owners.kubectl_,
        controller=owners.controller,
        clouds=owners.clouds,
        namespace=f"owners-{uuid4().hex[:8]}".ljust(63, "n"),
    )
    await asyncio.to_thread(owners.kubectl_, "create", "namespace", mine.namespace)
    large = a_pod(mine, "large", "again")
    large["metadata"]["annotations"] = {"notes": "n" * 100_000}
    large["spec"]["containers"][0]["env"] = [{"name": f"V{n}", "value": "v" * 10_000} for n in range(10)]
    pods = [large, a_pod(mine, LONG, "again"), a_pod(mine, CUT_AT_63, "again")]
    for pod in pods:
        await mine.kubectl("create", "-f", "-", stdin=pod)

    ready = await mine.ready(3)
    for pod in ready:
        (volume,) = pod["spec"]["volumes"]
        assert volume["name"].startswith("kube-api-access-")
        ours = {name: text for name, text in pod["metadata"]["annotations"].items() if keys.GROUP in name}
        assert max(map(len, ours.values())) < 300  # no copy of the spec
    claims = [
        claim
        for claim in (await mine.get("nodeclaims"))["items"]
        if claim["spec"]["podRef"]["namespace"] == mine.namespace
    ]
    assert {claim["spec"]["podRef"]["name"] for claim in claims} == {"large", LONG, CUT_AT_63}
    assert len({one["name"] for one in await mine.alive()}) == 3

    await mine.kubectl("delete", "pods", "--all", "--timeout=60s")
    await mine.until_none_alive()
    await asyncio.to_thread(owners.kubectl_, "delete", "namespace", mine.namespace, "--wait=false")


async def test_fc_055_a_pod_that_waits_for_anything_or_has_failed_can_be_deleted(owners: Owners) -> None:
    pods = {
        "poolless": a_pod(owners, "poolless", "no-such-pool"),
        "queued": a_pod(owners, "queued", "once", schedulingGates=[{"name": "example.com/quota"}]),
        "failed": a_pod(owners, "failed", "once"),
    }
    for pod in pods.values():
        await owners.kubectl("create", "-f", "-", stdin=pod)
    (running,) = await owners.ready()
    await owners.exit(running, code=3)
    await owners.until(
        lambda pods: any(pod["status"]["phase"] == "Failed" for pod in pods), what="the failed one"
    )
    await owners.until(
        lambda pods: any(
            (condition_of(pod, PLACED_CONDITION) or {}).get("reason") == "NoPool" for pod in pods
        ),
        what="the one without a pool",
    )

    await owners.kubectl("delete", "pods", *pods, "--timeout=30s")

    assert await owners.pods() == []
    await owners.until_none_alive()


async def test_fc_062_an_ordinal_that_goes_and_comes_back_at_once_never_runs_twice(owners: Owners) -> None:
    """All three, from 3 to 0 to 3, each ending for a while."""
    template = owners.template("once")
    spec = {
        "serviceName": "none",
        "replicas": 3,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": {"app": "owners"}},
        "template": template,
    }
    await owners.create("StatefulSet", "db", spec, api="apps/v1")
    old = {pod["metadata"]["name"]: pod for pod in await owners.ready(3)}
    await owners.clouds["once"].set_life(stop_s=1)

    await owners.kubectl("scale", "statefulset/db", "--replicas=0")
    await owners.kubectl("scale", "statefulset/db", "--replicas=3")
    uids = {pod["metadata"]["uid"] for pod in old.values()}
    new = await owners.until(
        lambda pods: (
            pods
            if sum(is_ready(pod) and pod["metadata"]["uid"] not in uids for pod in pods) == 3
            or (len(pods) == 3 and all(is_ready(pod) for pod in pods))
            else None
        ),
        what="three ordinals",
    )

    machines = {one["id"]: one for one in await owners.machines()}
    for pod in new:
        before = old[pod["metadata"]["name"]]
        if before["metadata"]["uid"] != pod["metadata"]["uid"]:
            ended, begun = machines[instance_of(before)], machines[instance_of(pod)]
            assert begun["created_at"] > ended["ended_at"]
    assert len(await owners.alive()) == 3


async def test_fc_109_fc_044_many_pods_up_and_down_leave_nothing_and_the_controller_does_not_grow(
    owners: Owners,
) -> None:
    """Kills and faults on the way are `tests/chaos/test_random_kills.py`; here sizes are compared."""
    await owners.deployment("many", "once", replicas=0)

    sizes = [await _up_and_down(owners) for _ in range(2)]

    before, after = sizes
    assert after[0] <= before[0] + POOLED
    assert after[1] <= before[1] + 2
    assert after[2] <= before[2] + GROWTH_BYTES


async def _up_and_down(owners: Owners) -> tuple[int, int, int]:
    await owners.kubectl("scale", "deployment/many", f"--replicas={MANY}")
    await owners.ready(MANY)
    await _down(owners)
    process = psutil.Process(owners.controller.pid)
    return process.num_fds(), process.num_threads(), process.memory_info().rss


async def _down(owners: Owners) -> None:
    await owners.kubectl("scale", "deployment/many", "--replicas=0")
    await owners.until(lambda pods: not pods, what="no Pod")
    await owners.until_none_alive()

    async def none() -> bool:
        items = (await owners.get("nodeclaims"))["items"]
        return not any(one["spec"]["podRef"]["namespace"] == owners.namespace for one in items)

    await until(none, what="no claim")
