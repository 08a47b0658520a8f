"""The scene of RunPod: one pool over it and another cloud; out of stock, and back."""

from hack.demo.stage import NAMESPACE, SAMPLES, Stage

CENTRES = ("US-CA-2", "EU-RO-1")


def runpod(stage: Stage) -> None:
    """The cheaper cloud is taken while it has something, and again once it has."""
    rented, other = stage.clouds["runpod"], stage.clouds["modal"]
    earlier = {cloud.name: cloud.machines() for cloud in (rented, other)}
    other.has("H100", units=64, tier="OnDemand")
    other.asks("H100", usd_per_hour="3.95", tier="OnDemand")
    for centre in CENTRES:
        rented.has("H100", units=8, tier="OnDemand", region=centre)
    stage.until_prices_are_known()

    stage.say("What could be rented now, and what the pool says to it:")
    pool = str((SAMPLES / "runpod.yaml").relative_to(SAMPLES.parents[1]))
    stage.show_nebula("offers", "--accelerator", "h100", "--count", "8", "--pool", pool)

    stage.say("One NodePool over RunPod and modal, LowestPrice. A Deployment that asks for 8 H100.")
    stage.apply("runpod.yaml")
    stage.until("the Pod is Ready on RunPod", lambda: len(stage.ready_on("runpod")) == 1, within_s=60)
    stage.show("get", "pods", "-n", NAMESPACE, "-o", "wide")
    stage.show("get", "nodeclaims")
    (machine,) = rented.alive()
    stage.check(
        "RunPod's own books show one pod of 8 H100 in a data centre",
        (machine["count"], machine["tier"]) == (8, "OnDemand") and machine["region"] in CENTRES,
    )

    stage.say("RunPod loses the host, and has no H100 left in any data centre.")
    for centre in CENTRES:
        rented.has("H100", units=0, tier="OnDemand", region=centre)
    rented.reclaim(machine["id"])
    stage.until("the workload is Ready on modal", lambda: len(stage.ready_on("modal")) == 1, within_s=60)
    stage.show("get", "cloudpodbindings", "-n", NAMESPACE)
    stage.show_nebula("blocks", "--all", "--provider", "runpod")
    stage.until("RunPod holds no pod", lambda: not rented.alive(), within_s=60)

    stage.say("RunPod has some again. The next Pod goes there; what runs already stays where it is.")
    for centre in CENTRES:
        rented.has("H100", units=8, tier="OnDemand", region=centre)
    stage.until("nothing is avoided any more", lambda: not _blocked(stage), within_s=60)
    stage.show("scale", "deployment/inference", "-n", NAMESPACE, "--replicas=2")
    stage.until("the second Pod is Ready on RunPod", lambda: len(stage.ready_on("runpod")) == 1, within_s=60)
    stage.show("get", "pods", "-n", NAMESPACE, "-o", "wide")
    stage.check("the first is still on modal", len(stage.ready_on("modal")) == 1)

    stage.say("All is deleted.")
    stage.show("delete", "deployment/inference", "-n", NAMESPACE)
    stage.until("no Pod is left", lambda: not stage.objects("pods"), within_s=60)
    stage.until("no claim is left", lambda: not stage.kubectl("get", "nodeclaims", "-o", "name"), within_s=60)
    stage.show("delete", "nodepool", "anywhere")
    stage.check("RunPod made two pods in all", len(rented.made_since(earlier["runpod"])) == 2)
    for cloud in (rented, other):
        stage.check(
            f"{cloud.name}'s own list is empty; it bills ${cloud.bill_usd():.4f} in all", not cloud.alive()
        )


def _blocked(stage: Stage) -> bool:
    return "runpod" in stage.nebula("blocks", "--provider", "runpod")
