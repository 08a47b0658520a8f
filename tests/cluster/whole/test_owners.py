"""Jobs, Deployments, StatefulSets and bare Pods end and start again as on a node, and buy little for it."""

import asyncio
import json
from itertools import pairwise

import pytest

from app.api import keys
from tests.cluster.whole.owners_world import (
    Owners,
    condition_of,
    instance_of,
    is_gated,
    is_ready,
    restarts_of,
)

pytestmark = pytest.mark.slow

# --- Jobs ----------------------------------------------------------------------------------------


@pytest.mark.behaviour(416, 419)
async def test_a_job_that_restarts_on_failure_does_so_on_its_machine_and_completes(owners: Owners) -> None:
    await owners.job("train", "again", policy="OnFailure")
    (pod,) = await owners.ready()
    await owners.exit(pod, code=3)
    await owners.until(lambda pods: is_ready(pods[0]) and restarts_of(pods[0]) == 1, what="the restart")

    await owners.exit(pod, code=0)

    await owners.kubectl("wait", "--for=condition=Complete", "job/train", "--timeout=60s")
    assert (await owners.get("job", "train"))["status"].get("failed", 0) == 0
    assert len(await owners.machines()) == 1
    await owners.until_none_alive()


@pytest.mark.field_case("FC-060")
async def test_a_pod_failure_policy_reads_the_exit_code_and_ends_the_job_at_once(owners: Owners) -> None:
    rule = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [42]}}
    await owners.job("strict", "once", podFailurePolicy={"rules": [rule]}, backoffLimit=6)
    (pod,) = await owners.ready()

    await owners.exit(pod, code=42)

    await owners.kubectl("wait", "--for=condition=Failed", "job/strict", "--timeout=60s")
    conditions = (await owners.get("job", "strict"))["status"]["conditions"]
    assert "PodFailurePolicy" in {each["reason"] for each in conditions}
    assert len(await owners.machines()) == 1
    await owners.until_none_alive()


@pytest.mark.behaviour(417)
@pytest.mark.field_case("FC-060")
async def test_a_reclaim_is_not_held_against_a_job_that_says_so(owners: Owners) -> None:
    """``backoffLimit: 0``: the first failure that counts would end the Job."""
    rule = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    await owners.job("patient", "once", podFailurePolicy={"rules": [rule]}, backoffLimit=0)
    (first,) = await owners.ready()
    await owners.preempt(first)
    second = await owners.until(
        lambda pods: next(
            (pod for pod in pods if is_ready(pod) and instance_of(pod) != instance_of(first)), None
        ),
        what="the replacement",
    )

    await owners.exit(second, code=0)

    await owners.kubectl("wait", "--for=condition=Complete", "job/patient", "--timeout=60s")
    ends = [one["end_reason"] for one in await owners.machines()]
    assert ends[0] == "preempted"


async def test_a_job_that_replaces_only_failed_pods_waits_until_the_old_one_is_over(owners: Owners) -> None:
    await owners.job("careful", "once", podReplacementPolicy="Failed")
    (first,) = await owners.ready()
    await owners.clouds["once"].set_life(stop_s=2)

    await owners.kubectl("delete", "pod", first["metadata"]["name"], "--wait=false")
    await owners.until(
        lambda pods: any(is_ready(pod) and instance_of(pod) != instance_of(first) for pod in pods),
        what="the replacement",
    )

    old, new = await owners.machines()
    assert old["exit_code"] == 143
    assert new["created_at"] > old["ended_at"]


# --- Deployments ---------------------------------------------------------------------------------


@pytest.mark.field_case("FC-059")
async def test_a_crash_loop_buys_no_second_machine(owners: Owners) -> None:
    await owners.deployment("loop", "again", env={"FAKE_EXIT_AFTER_S": "0.2", "FAKE_EXIT_CODE": "3"})

    (pod,) = await owners.until(
        lambda pods: pods if pods and restarts_of(pods[0]) >= 3 else None, what="three restarts"
    )
    held = await owners.until(
        lambda pods: next(
            (one for one in pods if "waiting" in one["status"]["containerStatuses"][0]["state"]), None
        ),
        what="CrashLoopBackOff",
    )

    assert held["status"]["containerStatuses"][0]["state"]["waiting"]["reason"] == "CrashLoopBackOff"
    assert pod["status"]["phase"] == "Running"
    assert len(await owners.machines()) == 1
    assert "CrashLoopBackOff" in await owners.kubectl("get", "pods")


@pytest.mark.field_case("FC-059")
async def test_where_no_workload_can_start_again_each_next_machine_is_waited_for(owners: Owners) -> None:
    await owners.deployment("loop", "once", env={"FAKE_EXIT_AFTER_S": "0.2", "FAKE_EXIT_CODE": "3"})

    gated = await owners.until(
        lambda pods: next((pod for pod in pods if _waits_for_its_owner(pod)), None), what="a gated Pod"
    )
    said = condition_of(gated, "nebula.inftyai.com/Placed")
    await owners.until_machines(lambda all_: len(all_) >= 3, what="three machines, one after another")

    assert said is not None
    assert "ended with code 3" in said["message"]
    machines = await owners.machines()
    for earlier, later in pairwise(machines):
        assert later["created_at"] > earlier["ended_at"]


def _waits_for_its_owner(pod: dict) -> bool:  # type: ignore[type-arg]
    said = condition_of(pod, "nebula.inftyai.com/Placed")
    return is_gated(pod) and said is not None and said["reason"] == "OwnerBackOff"


@pytest.mark.behaviour(102, 199)
async def test_a_reclaimed_pod_of_a_deployment_is_replaced_at_once_on_a_new_machine(owners: Owners) -> None:
    await owners.deployment("serve", "once")
    (first,) = await owners.ready()

    await owners.preempt(first)

    await owners.until(
        lambda pods: any(is_ready(pod) and instance_of(pod) != instance_of(first) for pod in pods),
        what="the replacement",
    )
    (over,) = [pod for pod in await owners.pods() if pod["metadata"]["uid"] == first["metadata"]["uid"]]
    assert (over["status"]["phase"], over["status"]["reason"]) == ("Failed", "Preempted")
    assert len(await owners.alive()) == 1


# --- StatefulSets --------------------------------------------------------------------------------


@pytest.mark.field_case("FC-009", "FC-028", "FC-062")
async def test_two_incarnations_of_an_ordinal_never_run_at_once(owners: Owners) -> None:
    spec = {
        "serviceName": "none",
        "replicas": 1,
        "selector": {"matchLabels": {"app": "owners"}},
        "template": owners.template("once"),
    }
    await owners.create("StatefulSet", "db", spec, api="apps/v1")
    (first,) = await owners.ready()
    await owners.clouds["once"].set_life(stop_s=1)

    await owners.kubectl("delete", "pod", "db-0", "--wait=false")
    await owners.until(
        lambda pods: any(
            is_ready(pod) and pod["metadata"]["uid"] != first["metadata"]["uid"] for pod in pods
        ),
        what="the next incarnation",
    )

    old, new = await owners.machines()
    assert new["created_at"] > old["ended_at"]


# --- bare Pods, evictions, namespaces ------------------------------------------------------------


@pytest.mark.behaviour(103, 141)
async def test_a_bare_pod_that_is_over_stays_as_a_record(owners: Owners) -> None:
    pod = owners.template("again", policy="Never")
    pod["metadata"]["name"] = "bare"
    await owners.kubectl("create", "-f", "-", stdin={"apiVersion": "v1", "kind": "Pod", **pod})
    (running,) = await owners.ready()

    await owners.exit(running, code=0)

    await owners.kubectl("wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/bare", "--timeout=60s")
    await owners.until_none_alive()
    assert len(await owners.pods()) == 1


async def test_an_eviction_respects_a_budget_and_then_gives_the_machine_back(owners: Owners) -> None:
    await owners.deployment("serve", "again")
    (pod,) = await owners.ready()
    budget = {"minAvailable": 1, "selector": {"matchLabels": {"app": "owners"}}}
    await owners.create("PodDisruptionBudget", "keep", budget, api="policy/v1")
    await owners.kubectl("wait", "--for=jsonpath={.status.currentHealthy}=1", "pdb/keep", "--timeout=60s")

    refused = await _evict(owners, pod)
    await owners.kubectl("delete", "pdb", "keep")
    allowed = await _evict(owners, pod)

    assert (refused, allowed) == (False, True)
    await owners.until(
        lambda pods: all(one["metadata"]["uid"] != pod["metadata"]["uid"] for one in pods),
        what="the eviction",
    )
    await owners.until_machines(
        lambda all_: [one["state"] for one in all_ if one["id"] == instance_of(pod)] == ["gone"],
        what="the machine's end",
    )


async def _evict(owners: Owners, pod: dict) -> bool:  # type: ignore[type-arg]
    name = pod["metadata"]["name"]
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    path = f"/api/v1/namespaces/{owners.namespace}/pods/{name}/eviction"
    done = await asyncio.to_thread(
        owners.kubectl_.run, "create", "--raw", path, "-f", "-", stdin=json.dumps(body)
    )
    return done.returncode == 0


@pytest.mark.field_case("FC-058")
async def test_a_drained_node_gets_its_pods_evicted_and_no_new_ones_until_it_is_uncordoned(
    owners: Owners,
) -> None:
    await owners.deployment("serve", "again")
    (pod,) = await owners.ready()
    await owners.clouds["again"].set_life(stop_s=1)

    await owners.kubectl("drain", keys.node_name("again"), "--ignore-daemonsets", "--timeout=60s")
    waiting = await owners.until(
        lambda pods: next(
            (one for one in pods if is_gated(one) and condition_of(one, "nebula.inftyai.com/Placed")), None
        ),
        what="a replacement that waits",
    )
    await owners.until_none_alive()
    await owners.kubectl("uncordon", keys.node_name("again"))
    (back,) = await owners.ready()

    assert waiting["metadata"]["uid"] == back["metadata"]["uid"] != pod["metadata"]["uid"]
    (drained,) = [one for one in await owners.machines() if one["id"] == instance_of(pod)]
    assert (drained["stops"], drained["exit_code"]) == (1, 143)  # it ended by itself, within its grace


@pytest.mark.field_case("FC-056")
async def test_orphans_15_a_deleted_namespace_takes_its_machines_with_it(owners: Owners) -> None:
    await owners.deployment("serve", "again", replicas=2)
    await owners.job("work", "once")
    await owners.ready(3)

    await owners.kubectl("delete", "namespace", owners.namespace, "--timeout=60s")

    assert await owners.alive() == []


@pytest.mark.behaviour(166)
@pytest.mark.field_case("FC-007")
async def test_orphans_15_a_force_deleted_pods_machine_is_ended(owners: Owners) -> None:
    pod = owners.template("again")
    pod["metadata"]["name"] = "bare"
    await owners.kubectl("create", "-f", "-", stdin={"apiVersion": "v1", "kind": "Pod", **pod})
    await owners.ready()

    await owners.kubectl("delete", "pod", "bare", "--force", "--grace-period=0")

    await owners.until_none_alive()
    assert await owners.pods() == []


@pytest.mark.behaviour(167)
@pytest.mark.field_case("FC-007")
async def test_orphans_15_a_pod_force_deleted_while_nobody_looks_is_ended_afterwards(
    owners: Owners,
) -> None:
    pod = owners.template("again")
    pod["metadata"]["name"] = "bare"
    await owners.kubectl("create", "-f", "-", stdin={"apiVersion": "v1", "kind": "Pod", **pod})
    await owners.ready()
    await asyncio.to_thread(owners.controller.kill)
    await owners.kubectl("delete", "pod", "bare", "--force", "--grace-period=0")
    assert len(await owners.alive()) == 1

    await asyncio.to_thread(owners.controller.start)

    await owners.until_none_alive()


@pytest.mark.field_case("FC-063")
async def test_somebody_elses_finalizer_keeps_the_pod_but_not_the_machine(owners: Owners) -> None:
    pod = owners.template("again")
    pod["metadata"] |= {"name": "kept", "finalizers": ["tests.local/keep"]}
    await owners.kubectl("create", "-f", "-", stdin={"apiVersion": "v1", "kind": "Pod", **pod})
    await owners.ready()

    await owners.kubectl("delete", "pod", "kept", "--wait=false")
    await owners.until_none_alive()
    (kept,) = await owners.until(lambda pods: pods if pods[0]["status"]["phase"] == "Failed" else None)
    await owners.kubectl("patch", "pod", "kept", "--type=merge", "-p", '{"metadata":{"finalizers":null}}')

    await owners.until(lambda pods: not pods, what="the Pod's end")
    assert condition_of(kept, "Ready")["status"] == "False"  # type: ignore[index]


# --- the node ------------------------------------------------------------------------------------


@pytest.mark.field_case("FC-051")
async def test_a_daemonset_that_tolerates_everything_rents_nothing_and_can_be_deleted(owners: Owners) -> None:
    template = owners.template("again", tolerations=[{"operator": "Exists"}])
    template["metadata"]["labels"] = {"app": "owners"}
    spec = {"selector": {"matchLabels": {"app": "owners"}}, "template": template}
    await owners.create("DaemonSet", "agent", spec, api="apps/v1")
    bound = await owners.until(
        lambda pods: [pod for pod in pods if pod["spec"].get("nodeName") == keys.node_name("again")],
        what="a daemon on the virtual node",
    )
    await owners.deployment("serve", "again")
    await owners.until(lambda pods: any(map(is_ready, pods)), what="a Pod of ours")

    assert len(await owners.machines()) == 1
    (daemon,) = [pod for pod in await owners.pods() if pod["metadata"]["uid"] == bound[0]["metadata"]["uid"]]
    assert daemon["status"]["phase"] == "Pending"
    await owners.kubectl("delete", "daemonset", "agent", "--timeout=60s")
    await owners.until(
        lambda pods: all(pod["metadata"]["uid"] != daemon["metadata"]["uid"] for pod in pods),
        what="the daemon's end",
    )
