"""Pods created in a cluster whose API server asks our webhooks."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml
from admission_world import (
    DEED,
    ENABLED,
    GATE,
    GROUP,
    TROUBLES,
    World,
    a_container,
    a_pod,
    another_webhook,
    gated,
    served,
    until,
)

from app.admission.server import Admission
from app.api.crds import load_crds
from app.kube import paths
from app.kube.errors import KubeError

SAMPLES = Path(__file__).parents[3] / "docs" / "samples"
PROBE = {"httpGet": {"path": "/", "port": 80}}
UNSET_LIMIT = {"resourceFieldRef": {"resource": "limits.cpu"}}
CLAIM = {"name": "data", "persistentVolumeClaim": {"claimName": "c"}}
DEEDS = {
    "add-sidecar": [{"op": "add", "path": "/spec/containers/-", "value": a_container(name="sidecar")}],
    "opt-in": [{"op": "add", "path": "/metadata/labels", "value": ENABLED}],
    "ungate": [{"op": "remove", "path": "/spec/schedulingGates"}],
    "annotate": [{"op": "add", "path": f"/metadata/annotations/{GROUP}~1endpoint", "value": "x"}],
}
"""What the other webhook does to a Pod that has the deed's name in its annotation."""


@pytest.fixture(scope="module", autouse=True)
async def hooks(around: World) -> AsyncIterator[Admission]:
    async with served(around.admission()) as admission:
        await around.asked()
        yield admission


@pytest.fixture(scope="module")
async def somebody_elses_webhook(around: World, hooks: Admission) -> AsyncIterator[None]:
    """A mutating webhook that is called after ours, for every Pod of this module's namespace."""
    async with another_webhook(around, hooks, patches=DEEDS):
        yield


async def first_pod(world: World, *, app: str):
    """The Pod that a controller made, as it is stored."""

    async def made() -> bool:
        return bool((await world.kube.get(paths.pods(world.namespace), labelSelector=f"app={app}"))["items"])

    await until(made)
    return (await world.kube.get(paths.pods(world.namespace), labelSelector=f"app={app}"))["items"][0]


async def test_the_sample_s_pod_is_gated_and_may_run_on_any_virtual_node(around, kubectl):
    await asyncio.to_thread(kubectl, "apply", "-n", around.namespace, "-f", SAMPLES / "deployment.yaml")
    where = {"labelSelector": f"{GROUP}/nodepool=gpu"}

    async def made() -> bool:
        return bool((await around.kube.get(paths.pods(around.namespace), **where))["items"])

    await until(made)

    (pod,) = (await around.kube.get(paths.pods(around.namespace), **where))["items"]
    assert pod["spec"]["schedulingGates"] == [GATE]
    assert {"key": f"{GROUP}/provider", "operator": "Exists", "effect": "NoSchedule"} in pod["spec"][
        "tolerations"
    ]
    assert pod["status"]["conditions"][0]["reason"] == "SchedulingGated"
    await asyncio.to_thread(kubectl, "delete", "-n", around.namespace, "-f", SAMPLES / "deployment.yaml")


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet", "Job"])
async def test_the_pods_of_every_controller_are_gated(around, kubectl, kind):
    app = kind.lower()
    template = {"metadata": {"labels": {**ENABLED, "app": app}}, "spec": {"containers": [a_container()]}}
    spec = {"template": template}
    if kind == "Job":
        template["spec"]["restartPolicy"] = "Never"
        spec |= {"backoffLimit": 1, "activeDeadlineSeconds": 600}
    else:
        spec["selector"] = {"matchLabels": {"app": app}}
    if kind == "StatefulSet":
        spec["serviceName"] = "db"
    group = "batch/v1" if kind == "Job" else "apps/v1"
    owner = {"apiVersion": group, "kind": kind, "metadata": {"name": app}, "spec": spec}

    await asyncio.to_thread(kubectl, "create", "-n", around.namespace, "-f", "-", stdin=yaml.safe_dump(owner))

    assert gated(await first_pod(around, app=app))
    await asyncio.to_thread(kubectl, "delete", "-n", around.namespace, kind, app)


async def test_a_pod_without_a_controller_is_gated(around):
    assert gated(await around.create(a_pod()))


@pytest.mark.parametrize("labels", [{}, {f"{GROUP}/enabled": "false"}, {f"{GROUP}/enabled": "True"}])
@pytest.mark.field_case("FC-103")
async def test_a_pod_that_is_not_opted_in_is_not_touched(around, labels):
    pod = await around.create(a_pod(labels=labels, annotations={f"{GROUP}/region": "mine"}, hostNetwork=True))

    assert not gated(pod)
    assert pod["metadata"]["annotations"] == {f"{GROUP}/region": "mine"}
    assert {each["tolerationSeconds"] for each in pod["spec"]["tolerations"]} == {300}


@pytest.mark.behaviour(11)
async def test_11_a_pod_in_a_namespace_of_the_system_is_not_touched(around):
    pods = paths.pods("kube-system")

    assert not gated(await around.kube.create(pods, a_pod(hostNetwork=True), params={"dryRun": "All"}))


@pytest.mark.parametrize(
    "given",
    [
        [],
        [
            {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 9}
            for key in TROUBLES
        ],
    ],
    ids=["the-server-s-defaults", "the-author-s"],
)
async def test_a_silent_node_is_tolerated_for_ever_whatever_the_api_server_adds(around, given):
    pod = await around.create(a_pod(tolerations=given))

    about = [each for each in pod["spec"]["tolerations"] if each.get("key") in TROUBLES]
    assert {each["key"] for each in about} == TROUBLES
    assert len(about) == len(TROUBLES)
    assert not any("tolerationSeconds" in each for each in about)


async def test_other_gates_and_tolerations_are_kept(around):
    gate, toleration = {"name": "example.com/quota"}, {"key": "example.com/x", "operator": "Exists"}

    pod = await around.create(a_pod(schedulingGates=[gate], tolerations=[toleration]))

    assert pod["spec"]["schedulingGates"] == [gate, GATE]
    assert pod["spec"]["tolerations"][0] == toleration


@pytest.mark.behaviour(405, 407)
async def test_405_407_annotations_that_only_we_may_set_are_taken_off_and_the_author_is_told(around, kubectl):
    ours = {f"{GROUP}/{name}": "x" for name in ("capacity-type", "region", "endpoint", "instance-id")}
    pod = a_pod(annotations={**ours, "mine": "kept"})
    pod["metadata"]["name"] = "annotated"

    done = await asyncio.to_thread(
        kubectl.run, "create", "-n", around.namespace, "-f", "-", stdin=yaml.safe_dump(pod)
    )

    assert done.returncode == 0
    assert all(key in done.stderr for key in ours)
    stored = await around.kube.get(paths.pod(around.namespace, "annotated"))
    assert stored["metadata"]["annotations"] == {"mine": "kept"}


REFUSED = {
    "nodeName": (a_pod(nodeName="some-node"), "spec.nodeName"),
    "selector": (a_pod(nodeSelector={f"{GROUP}/provider": "aws"}), f"spec.nodeSelector[{GROUP}/provider]"),
    "count-without-type": (
        a_pod(a_container(resources={"limits": {"nvidia.com/gpu": "8"}})),
        f"label {GROUP}/accelerator-type",
    ),
    "max-price": (a_pod(annotations={"cloud.aibrix.ai/max-price": "two"}), "cloud.aibrix.ai/max-price"),
    "regions": (a_pod(annotations={f"{GROUP}/regions": "us"}), f"{GROUP}/regions"),
    "vast": (a_pod(annotations={"cloud.aibrix.ai/vast-offer-id": "7"}), "cloud.aibrix.ai/vast-offer-id"),
    "146-containers": (a_pod(a_container(), a_container(name="two")), "spec.containers[two]"),
    "init": (a_pod(initContainers=[a_container(name="first")]), "spec.initContainers"),
    "probe-on-no-port": (
        a_pod(a_container(readinessProbe=PROBE)),
        "spec.containers[main].readinessProbe.httpGet.port",
    ),
    "probe-by-grpc": (
        a_pod(a_container(livenessProbe={"grpc": {"port": 9000}})),
        "spec.containers[main].livenessProbe.grpc",
    ),
    "236-unset-limit": (
        a_pod(a_container(env=[{"name": "CPU", "valueFrom": UNSET_LIMIT}])),
        "spec.containers[main].env[CPU].valueFrom.resourceFieldRef",
    ),
    "235-address": (
        a_pod(a_container(env=[{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}])),
        "spec.containers[main].env[IP].valueFrom.fieldRef",
    ),
    "147-pvc": (a_pod(volumes=[CLAIM]), "spec.volumes[data].persistentVolumeClaim"),
    "147-hostPath": (
        a_pod(volumes=[{"name": "data", "hostPath": {"path": "/"}}]),
        "spec.volumes[data].hostPath",
    ),
    "147-hostNetwork": (a_pod(hostNetwork=True), "spec.hostNetwork"),
    "147-privileged": (
        a_pod(a_container(securityContext={"privileged": True})),
        "spec.containers[main].securityContext.privileged",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.field_case("FC-029", "FC-030", "FC-031", "FC-034", "FC-038")
async def test_a_pod_that_could_never_run_is_refused_by_the_name_of_the_field(around, name):
    pod, field = REFUSED[name]

    assert field in await around.refused(pod)


async def test_what_a_rented_machine_does_not_enforce_is_a_warning(around, kubectl):
    pod = a_pod(securityContext={"runAsNonRoot": True})

    done = await asyncio.to_thread(
        kubectl.run, "create", "-n", around.namespace, "-f", "-", stdin=yaml.safe_dump(pod)
    )

    assert done.returncode == 0
    assert "spec.securityContext.runAsNonRoot" in done.stderr


async def test_a_living_pod_cannot_be_given_another_container_or_another_size(around):
    sized = a_container(resources={"requests": {"cpu": "1"}})
    ours, other = await around.create(a_pod(sized)), await around.create(a_pod(sized, labels={}))
    debugger = {"spec": {"ephemeralContainers": [{"name": "debugger", "image": "sh:1"}]}}
    size = {"spec": {"containers": [{"name": "main", "resources": {"requests": {"cpu": "2"}}}]}}

    for subresource, patch in (("ephemeralcontainers", debugger), ("resize", size)):
        path = paths.pod(around.namespace, ours["metadata"]["name"])
        with pytest.raises(KubeError, match=r"denied the request.*machine"):
            await around.kube.patch(f"{path}/{subresource}", patch, kind="strategic")

    for subresource, patch in (("ephemeralcontainers", debugger), ("resize", size)):
        path = paths.pod(around.namespace, other["metadata"]["name"])
        await around.kube.patch(f"{path}/{subresource}", patch, kind="strategic")


@pytest.mark.parametrize(
    ("deed", "field"), [("add-sidecar", "spec.containers[sidecar]"), ("opt-in", GATE["name"])]
)
@pytest.mark.field_case("FX-10")
async def test_what_another_webhook_does_to_a_pod_after_ours_is_still_caught(
    around, somebody_elses_webhook, deed, field
):
    labels = {} if deed == "opt-in" else None

    assert field in await around.refused(a_pod(labels=labels, annotations={DEED: deed}))


@pytest.mark.field_case("FX-10")
async def test_what_another_webhook_undoes_is_done_again(around, somebody_elses_webhook):
    assert gated(await around.create(a_pod(annotations={DEED: "ungate"})))

    annotated = await around.create(a_pod(annotations={DEED: "annotate"}))
    assert annotated["metadata"]["annotations"] == {DEED: "annotate"}


async def test_a_pool_that_names_an_unknown_provider_is_created_with_a_warning(around, kubectl):
    for crd in load_crds():
        await around.kube.patch(paths.crd(crd["metadata"]["name"]), crd, kind="apply")
    await asyncio.to_thread(
        kubectl, "wait", "--for=condition=Established", f"crd/nodepools.{GROUP}", "--timeout=30s"
    )
    pool = {
        "apiVersion": f"{GROUP}/v1alpha1",
        "kind": "NodePool",
        "metadata": {"name": "misspelt"},
        "spec": {"providers": [{"name": "aws"}, {"name": "modle"}]},
    }

    done = await asyncio.to_thread(kubectl.run, "create", "-f", "-", stdin=yaml.safe_dump(pool))

    assert done.returncode == 0, done.stderr
    assert '"modle" is not configured' in done.stderr
    assert '"aws" is not' not in done.stderr
    await asyncio.to_thread(kubectl, "delete", "nodepool", "misspelt")


async def test_a_pod_that_is_almost_opted_in_is_created_with_a_warning_and_a_bystander_without(
    around, kubectl
):
    """The API server's own condition decides whom it asks us about; what it says is `spelling`'s."""
    said = {}
    for labels in (
        {f"{GROUP}/enabled": "True", f"{GROUP}/nodepool": "p"},
        {f"{GROUP}/enable": "true"},
        {f"{GROUP}/enabled": "false", f"{GROUP}/nodepool": "p"},
        {"app": "x"},
    ):
        pod = a_pod(labels=labels)
        done = await asyncio.to_thread(
            kubectl.run, "create", "-n", around.namespace, "-f", "-", stdin=yaml.safe_dump(pod)
        )
        assert done.returncode == 0, done.stderr
        said[" ".join(labels.values())] = done.stderr

    assert "is 'True', not 'true'" in said["True p"]
    assert f"did you mean the label {GROUP}/enabled by {GROUP}/enable?" in said["true"]
    assert said["false p"] == said["x"] == ""
