"""The scenes. Each is a short story that checks what it says; an unmet promise raises `Unmet`."""

from collections.abc import Callable
from typing import Any

from hack.demo.billing import cost
from hack.demo.endings import crash_loop, job, reclaim
from hack.demo.inside import logs
from hack.demo.orphans import orphan
from hack.demo.renting import runpod
from hack.demo.reserving import reserve
from hack.demo.stage import NAMESPACE, SAMPLES, Stage

WORKLOAD = ("deployment/gpu-workload", "-n", NAMESPACE)


def main(stage: Stage) -> None:
    """Failover, a killed controller, and both clouds empty at the end."""
    modal, aws = stage.clouds["modal"], stage.clouds["aws"]

    stage.say("A NodePool: modal first, then aws; Spot before OnDemand. A Deployment that asks for 8 H100.")
    stage.show(
        "apply",
        "-n",
        NAMESPACE,
        "-f",
        str(SAMPLES / "nodepool.yaml").replace(str(SAMPLES.parents[1]) + "/", ""),
    )
    stage.show(
        "apply",
        "-n",
        NAMESPACE,
        "-f",
        str(SAMPLES / "deployment.yaml").replace(str(SAMPLES.parents[1]) + "/", ""),
    )
    stage.until("the Pod is Ready on modal", lambda: len(stage.ready_on("modal")) == 1)
    stage.show("get", "pods", "-n", NAMESPACE, "-o", "wide")
    stage.show("get", "nodeclaims")
    (machine,) = modal.alive()
    stage.check(
        "modal's own books show one machine of 8 H100",
        machine["accelerator"] == "H100" and machine["count"] == 8,
    )

    stage.say("modal reclaims the spot machine, and has no H100 left in any tier.")
    modal.run_out("H100")
    modal.reclaim(machine["id"])
    stage.until("the workload is Ready on aws", lambda: len(stage.ready_on("aws")) == 1, within_s=60)
    stage.show("get", "pods", "-n", NAMESPACE, "-o", "wide")
    stage.show("get", "cloudpodbindings", "-n", NAMESPACE)
    stage.say("What is avoided now, and until when:")
    stage.show_nebula("blocks")
    stage.until("modal holds no machine", lambda: not modal.alive())
    stage.check("the machine that modal took back is not paid for any more", not modal.alive())
    stage.check("aws holds exactly one machine", len(aws.alive()) == 1)

    stage.say(
        "A second replica. aws takes the order, but before its answer arrives the controller is killed."
    )
    held = aws.hold_answers()
    stage.show("scale", *WORKLOAD, "--replicas=2")
    stage.until("aws has made the second machine", lambda: len(aws.alive()) == 2)
    stage.controller.kill()
    print("  SIGKILL: the controller is gone, and never heard that a machine was made", flush=True)
    aws.let_go(held)
    stage.controller.start()
    print("  a new controller runs", flush=True)
    stage.until("both Pods are Ready", lambda: len(stage.ready_on("aws")) == 2, within_s=60)
    stage.show("get", "nodeclaims")
    names = [one["name"] for one in aws.machines()]
    stage.check(
        "aws made two machines in all, one for each Pod: nothing was doubled",
        len(names) == len(set(names)) == 2,
    )
    stage.check("both are there", len(aws.alive()) == 2)

    stage.say("All is deleted.")
    stage.show("delete", *WORKLOAD)
    stage.until("no Pod is left", lambda: not stage.objects("pods"), within_s=60)
    stage.until(
        "no claim is left", lambda: stage.kubectl("get", "nodeclaims", "-o", "name") == "", within_s=60
    )
    # They are their claims' own: the cluster's garbage collection takes them, a moment later.
    stage.until("no binding is left", lambda: not stage.objects("cloudpodbindings"), within_s=60)
    stage.show("get", "pods,nodeclaims,cloudpodbindings", "-n", NAMESPACE)
    for cloud in (modal, aws):
        stage.check(
            f"{cloud.name}'s own list is empty; it made {len(cloud.machines())} machine(s)"
            f" and bills ${cloud.bill_usd():.4f} in all",
            not cloud.alive(),
        )


def lowest_price(stage: Stage) -> None:
    """LowestPrice between two clouds, while one of them changes its price."""
    modal, aws = stage.clouds["modal"], stage.clouds["aws"]
    for cloud, region, price in ((modal, "", "2.37"), (aws, "us-east-1", "2.75")):
        cloud.has("H100", units=64, region=region)
        cloud.asks("H100", usd_per_hour=price, region=region)
    stage.until_prices_are_known()

    stage.say("A NodePool that takes what is cheapest. Eight H100: $18.96 an hour on modal, $22.00 on aws.")
    stage.apply("lowest-price.yaml")
    stage.until("the Pod is Ready on modal", lambda: len(stage.ready_on("modal")) == 1)
    stage.show("get", "cloudpodbindings", "-n", NAMESPACE)

    stage.say("modal now asks $3.50 for a GPU, $28.00 for the machine. The next Pod goes to aws.")
    modal.asks("H100", usd_per_hour="3.50")
    stage.until_prices_are_known()
    stage.show("scale", "deployment/bargain", "-n", NAMESPACE, "--replicas=2")
    stage.until("the second Pod is Ready on aws", lambda: len(stage.ready_on("aws")) == 1)
    stage.show("get", "cloudpodbindings", "-n", NAMESPACE)
    stage.check("what runs already stays where it is", len(stage.ready_on("modal")) == 1)
    stage.why(stage.ready_on("aws")[0]["metadata"]["name"])

    stage.say("Both ask more than the pool's ceiling of $30.00 now: the third Pod waits, and says for what.")
    for tier in ("Spot", "OnDemand"):
        modal.asks("H100", usd_per_hour="9.00", tier=tier)
        aws.asks("H100", usd_per_hour="9.00", tier=tier, region="us-east-1")
    stage.until_prices_are_known()
    stage.show("scale", "deployment/bargain", "-n", NAMESPACE, "--replicas=3")
    stage.until("the third Pod says that all is too dear", lambda: _told(stage, "too dear") != "")
    print(f"  {_told(stage, 'too dear')}", flush=True)
    modal.asks("H100", usd_per_hour="2.00")
    stage.say("modal asks $2.00: the Pod goes there by itself.")
    stage.until("the third Pod is Ready on modal", lambda: len(stage.ready_on("modal")) == 2)
    _put_away(stage, "deployment/bargain", pool="cheapest")


def limit(stage: Stage) -> None:
    """A limit of the pool is reached, and explained; raised, it lets the next Pod in."""
    modal, aws = stage.clouds["modal"], stage.clouds["aws"]
    for cloud, region, price in ((modal, "", "2.37"), (aws, "us-east-1", "2.75")):
        cloud.has("H100", units=64, region=region)
        cloud.asks("H100", usd_per_hour=price, region=region)
    stage.until_prices_are_known()

    stage.say("A NodePool of at most 16 GPUs, and a Deployment of three Pods with eight each.")
    stage.apply("limits.yaml")
    stage.until("two Pods are Ready", lambda: len(_ready(stage)) == 2)
    stage.until("the third says that the limit is reached", lambda: _told(stage, "limits.gpus") != "")
    stage.show("get", "pods", "-n", NAMESPACE, "-o", "wide")
    print(f"  {_told(stage, 'limits.gpus')}", flush=True)
    (waiting,) = stage.pods("Pending")
    stage.why(waiting["metadata"]["name"])
    stage.check("the clouds' own books show two machines", len(modal.alive()) + len(aws.alive()) == 2)

    stage.say("The limit is raised to 24.")
    patch = '{"spec":{"limits":{"gpus":24,"usdPerHour":"70"}}}'
    stage.show("patch", "nodepool", "capped", "--type=merge", "-p", patch)
    stage.until("all three Pods are Ready", lambda: len(_ready(stage)) == 3)
    stage.show("get", "nodeclaims")
    stage.check(
        "weights of one to three: one machine on modal, two on aws",
        (len(modal.alive()), len(aws.alive())) == (1, 2),
    )
    _put_away(stage, "deployment/crowd", pool="capped")


def _ready(stage: Stage) -> list[dict[str, Any]]:
    return stage.ready_on("modal") + stage.ready_on("aws")


def _told(stage: Stage, words: str) -> str:
    """What a waiting Pod says, if it is about this."""
    messages = (str(stage.placed_condition(pod).get("message", "")) for pod in stage.pods("Pending"))
    return next((message for message in messages if words in message), "")


def _put_away(stage: Stage, workload: str, *, pool: str) -> None:
    stage.say("All is deleted.")
    stage.show("delete", workload, "-n", NAMESPACE)
    stage.until("no Pod is left", lambda: not stage.objects("pods"), within_s=60)
    stage.until("no claim is left", lambda: not stage.kubectl("get", "nodeclaims", "-o", "name"), within_s=60)
    stage.show("delete", "nodepool", pool)
    for cloud in stage.clouds.values():
        stage.check(f"{cloud.name}'s own list is empty", not cloud.alive())


SCENES: dict[str, Callable[[Stage], None]] = {
    "main": main,
    "lowest-price": lowest_price,
    "limit": limit,
    "reserve": reserve,
    "runpod": runpod,
    "reclaim": reclaim,
    "job": job,
    "crash-loop": crash_loop,
    "logs": logs,
    "orphan": orphan,
    "cost": cost,
}
