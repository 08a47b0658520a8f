"""The scenes. Each is a short story that checks what it says; an unmet promise raises `Unmet`."""

from collections.abc import Callable

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
    stage.show("get", "pods,nodeclaims,cloudpodbindings", "-n", NAMESPACE)
    for cloud in (modal, aws):
        stage.check(
            f"{cloud.name}'s own list is empty; it made {len(cloud.machines())} machine(s)"
            f" and bills ${cloud.bill_usd():.4f} in all",
            not cloud.alive(),
        )


SCENES: dict[str, Callable[[Stage], None]] = {"main": main}
