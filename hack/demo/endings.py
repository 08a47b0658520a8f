"""Scenes of endings: a spot reclaim, a Job that completes, and a crash loop that buys no second machine."""

from itertools import pairwise
from typing import Any

from app.api import keys
from hack.demo.stage import NAMESPACE, Stage


def reclaim(stage: Stage) -> None:
    """A spot machine is taken back: the Pod says so, and its owner's next Pod gets another machine."""
    modal = stage.clouds["modal"]
    earlier = modal.machines()
    stage.say("A Deployment with one L4, on a spot machine of modal.")
    stage.make(pool_of("modal-only", "modal"), _deployment("serve", "modal-only", "L4"))
    stage.until("the Pod is Ready", lambda: len(stage.ready_on("modal")) == 1)
    (pod,), (machine,) = stage.ready_on("modal"), modal.made_since(earlier)
    stage.check("it is a spot machine", machine["tier"] == "Spot")

    stage.say("modal takes the machine back.")
    modal.reclaim(machine["id"])
    stage.until(
        "another Pod is Ready on another machine",
        lambda: [one["metadata"]["uid"] for one in stage.ready_on("modal")] not in ([], [_uid(pod)]),
    )
    stage.show("get", "pods", "-n", NAMESPACE, "-o", "wide")
    (over,) = [one for one in stage.pods() if _uid(one) == _uid(pod)]
    stage.check("the first Pod says Preempted", over["status"]["reason"] == "Preempted")
    disrupted = [one for one in over["status"]["conditions"] if one["type"] == "DisruptionTarget"]
    stage.check("and has the condition DisruptionTarget", [one["status"] for one in disrupted] == ["True"])
    stage.until(
        "only the new machine is left",
        lambda: [one["id"] == machine["id"] for one in modal.alive()] == [False],
    )
    clear(stage, "deployment/serve")


def job(stage: Stage) -> None:
    """A Job completes by its exit code, and its machine goes at once."""
    modal = stage.clouds["modal"]
    earlier = modal.machines()
    stage.say("A Job with one T4, whose work takes two seconds.")
    made = template("modal-only", "T4", restart="Never", FAKE_EXIT_AFTER_S="2")
    stage.make(
        pool_of("modal-only", "modal"),
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "train"},
            "spec": {"template": made},
        },
    )
    stage.show("wait", "-n", NAMESPACE, "--for=condition=Complete", "job/train", "--timeout=60s")
    stage.show("get", "jobs,pods", "-n", NAMESPACE)
    (pod,) = stage.pods("Succeeded")
    ended = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    stage.check("its Pod has succeeded with exit code 0", ended["exitCode"] == 0)
    stage.until("the machine is gone", lambda: not modal.alive())
    (machine,) = modal.made_since(earlier)
    stage.check(f"one machine was made, and cost ${machine['bill_usd'][:7]}", machine["state"] == "gone")
    clear(stage, "job/train")


def crash_loop(stage: Stage) -> None:
    """A workload that crashes again and again buys no second machine."""
    aws, modal = stage.clouds["aws"], stage.clouds["modal"]
    earlier = aws.machines()
    crash = {"FAKE_EXIT_AFTER_S": "0.3", "FAKE_EXIT_CODE": "3"}
    stage.say("A Deployment whose container ends with code 3, on aws, which can start it again in place.")
    stage.make(pool_of("aws-only", "aws"), _deployment("loop", "aws-only", "T4", **crash))
    stage.until("it was started again three times", lambda: max(map(_restarts, stage.pods()), default=0) >= 3)
    stage.until(
        "it says CrashLoopBackOff",
        lambda: "CrashLoopBackOff" in stage.kubectl("get", "pods", "-n", NAMESPACE),
    )
    stage.show("get", "pods", "-n", NAMESPACE)
    stage.check("aws made one machine in all", len(aws.made_since(earlier)) == 1)
    clear(stage, "deployment/loop")

    stage.say(
        "The same on modal, which cannot: each Pod is over, and its owner's next one waits, ever longer."
    )
    earlier = modal.machines()
    stage.make(pool_of("modal-only", "modal"), _deployment("loop", "modal-only", "T4", **crash))
    stage.until("a Pod waits for its owner's sake", lambda: any(map(_waiting_for_owner, stage.pods())))
    print(f"  {next(filter(None, map(_waiting_for_owner, stage.pods())))}", flush=True)
    stage.until(
        "modal has made three machines, one after another", lambda: len(modal.made_since(earlier)) >= 3
    )
    made = modal.made_since(earlier)
    stage.check(
        "never two at once",
        all(later["created_at"] > one["ended_at"] for one, later in pairwise(made)),
    )
    clear(stage, "deployment/loop")


def pool_of(name: str, provider: str) -> dict[str, Any]:
    return {
        "apiVersion": keys.API_VERSION,
        "kind": keys.NODE_POOL,
        "metadata": {"name": name},
        "spec": {"providers": [{"name": provider}], "capacityTypes": ["Spot", "OnDemand"]},
    }


def _deployment(name: str, pool: str, accelerator: str, **env: str) -> dict[str, Any]:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": {"app": "demo"}},
            "template": template(pool, accelerator, **env),
        },
    }


def template(pool: str, accelerator: str, *, restart: str = "Always", **env: str) -> dict[str, Any]:
    """What a simulated workload does is said in its environment."""
    container = {
        "name": "workload",
        "image": "nvidia/cuda:12.4.1-base-ubuntu22.04",
        "env": [{"name": name, "value": value} for name, value in env.items()],
        "resources": {"limits": {keys.GPU_RESOURCE: "1"}},
    }
    labels = {
        "app": "demo",
        keys.ENABLED_LABEL: keys.ENABLED,
        keys.NODE_POOL_LABEL: pool,
        keys.ACCELERATOR_TYPE_LABEL: accelerator,
    }
    return {"metadata": {"labels": labels}, "spec": {"restartPolicy": restart, "containers": [container]}}


def clear(stage: Stage, workload: str) -> None:
    """Leave nothing for the next scene."""
    stage.show("delete", workload, "-n", NAMESPACE)
    stage.until("no Pod is left", lambda: not stage.objects("pods"), within_s=60)
    stage.until(
        "no claim is left", lambda: stage.kubectl("get", "nodeclaims", "-o", "name") == "", within_s=60
    )
    stage.check("no cloud holds a machine", not any(cloud.alive() for cloud in stage.clouds.values()))


def _uid(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["uid"])


def _restarts(pod: dict[str, Any]) -> int:
    return int((pod["status"].get("containerStatuses") or [{}])[0].get("restartCount", 0))


def _waiting_for_owner(pod: dict[str, Any]) -> str | None:
    """What a gated Pod says while its owner waits between machines."""
    for each in pod["status"].get("conditions", []) if pod["spec"].get("schedulingGates") else []:
        if each["reason"] == "OwnerBackOff":
            return str(each["message"])
    return None
