"""The scene of mode Reserve: both clouds are full, a Job waits without failing, and capacity returns."""

from hack.demo.stage import NAMESPACE, Stage


def reserve(stage: Stage) -> None:
    """No Pod fails for want of capacity, and its machine is there before its gate goes."""
    modal, aws = stage.clouds["modal"], stage.clouds["aws"]
    earlier = {cloud.name: cloud.machines() for cloud in (modal, aws)}
    stage.say("Neither cloud has an H100. A NodePool in mode Reserve, and a Job that may not fail once.")
    modal.has("H100", units=0)
    aws.has("H100", units=0, region="us-east-1")
    stage.apply("reserve.yaml")
    stage.until(
        "the Pod says that both clouds have refused",
        lambda: [stage.placed_condition(pod).get("reason") for pod in stage.pods()] == ["AllBlocked"],
    )
    (waiting,) = stage.pods()
    stage.show("get", "pods", "-n", NAMESPACE)
    print(f"  {stage.placed_condition(waiting)['message']}", flush=True)
    stage.why(waiting["metadata"]["name"])
    stage.check("it is gated and Pending", waiting["status"]["phase"] == "Pending")
    made = [machine for cloud in (modal, aws) for machine in cloud.made_since(earlier[cloud.name])]
    stage.check("nothing was rented", not made)

    stage.say("aws has eight again. Its answer is held back for a moment, to look at the gate.")
    held = aws.hold_answers()
    aws.has("H100", units=8, region="us-east-1")
    stage.until("aws has made the machine", lambda: len(aws.made_since(earlier["aws"])) == 1, within_s=60)
    (pod,) = stage.pods()
    stage.check("the machine is there, and the Pod is still gated", bool(pod["spec"].get("schedulingGates")))
    aws.let_go(held)
    stage.until("the Pod is Ready on aws", lambda: len(stage.ready_on("aws")) == 1, within_s=60)
    stage.show("get", "pods", "-n", NAMESPACE, "-o", "wide")
    stage.show("get", "nodeclaims")
    (ready,) = stage.ready_on("aws")
    stage.check("it is the same Pod", ready["metadata"]["uid"] == waiting["metadata"]["uid"])
    (job,) = stage.objects("jobs")
    stage.check("the Job has counted no failure", not job["status"].get("failed"))

    stage.say("All is deleted.")
    stage.show("delete", "job/train", "-n", NAMESPACE)
    stage.until("no Pod is left", lambda: not stage.objects("pods"), within_s=60)
    stage.until("no claim is left", lambda: not stage.kubectl("get", "nodeclaims", "-o", "name"), within_s=60)
    stage.show("delete", "nodepool", "patient")
    stage.check("one machine was made in all", len(aws.made_since(earlier["aws"])) == 1)
    for cloud in (modal, aws):
        stage.check(f"{cloud.name}'s own list is empty", not cloud.alive())
