"""What no cloud has is refused in a real cluster, for every owner of a Pod; cases are the field cases'."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import yaml
from admission_world import ENABLED, GROUP, World, a_container, a_pod, served, until

from app.kube import paths
from app.kube.errors import KubeError
from providers.base import Accelerator, Offering, Tier, Traits

TYPE = f"{GROUP}/accelerator-type"
GPU = "nvidia.com/gpu"


def an_offer(provider: str, kind: str, count: int) -> Offering:
    return Offering(
        provider=provider,
        account="default",
        region="",
        tier=Tier.ON_DEMAND,
        accelerator=Accelerator(type=kind, count=count),
        shape=f"{kind}.{count}",
        meters=(),
    )


@pytest.fixture(scope="module", autouse=True)
async def hooks(around: World) -> AsyncIterator[None]:
    async with served(around.admission()):
        await around.asked()
        yield


@pytest.fixture
def known(around: World) -> None:
    """Both accounts have told their offers."""
    traits = Traits(tiers=frozenset(Tier))
    around.offerings.put("aws", "default", traits=traits, offerings=[an_offer("aws", "H100", 8)])
    around.offerings.put("modal", "default", traits=traits, offerings=[an_offer("modal", "RTX-6000", 1)])


def asking(kind: str, count: str, **more):
    container = a_container(resources={"limits": {GPU: count}})
    return a_pod(container, labels={**ENABLED, TYPE: kind, **more})


def owner(kind: str, pod: dict, *, name: str) -> str:
    template = {"metadata": {"labels": {**pod["metadata"]["labels"], "app": name}}, "spec": dict(pod["spec"])}
    spec = {"template": template}
    if kind == "Job":
        template["spec"]["restartPolicy"] = "Never"
    else:
        spec["selector"] = {"matchLabels": {"app": name}}
    group = "batch/v1" if kind == "Job" else "apps/v1"
    return yaml.safe_dump({"apiVersion": group, "kind": kind, "metadata": {"name": name}, "spec": spec})


async def test_an_accelerator_is_refused_only_once_every_account_has_told_its_offers(around: World, known):
    around.offerings.drop("modal", "default")
    await around.create(asking("rtx-600", "1"))

    traits = Traits(tiers=frozenset(Tier))
    around.offerings.put("modal", "default", traits=traits, offerings=[an_offer("modal", "RTX-6000", 1)])
    said = await around.refused(asking("rtx-600", "1"))

    assert f"label {TYPE}" in said
    assert "did you mean RTX-6000" in said
    await around.create(asking("rtx-6000", "1"))


@pytest.mark.behaviour(25)
async def test_a_count_that_no_cloud_has_is_refused_with_those_there_are(around: World, known):
    said = await around.refused(asking("rtx-6000", "16"))

    assert "ask for one of 1" in said


@pytest.mark.parametrize("quantity", ["0.5", "500m"])
@pytest.mark.parametrize("kind", ["Deployment", "Job"])
async def test_fc_033_a_part_of_a_gpu_is_refused_through_a_controller_too(
    around: World, kubectl, kind, quantity
):
    name = f"part-{kind.lower()}-{quantity.replace('.', '-')}"

    done = await asyncio.to_thread(
        kubectl.run,
        *("create", "-n", around.namespace, "-f", "-"),
        stdin=owner(kind, asking("h100", quantity), name=name),
    )

    assert done.returncode != 0
    assert GPU in done.stderr


async def test_fc_032_a_gpu_in_requests_only_is_refused_by_the_api_server_in_its_own_words(around: World):
    pod = asking("h100", "1")
    pod["spec"]["containers"][0]["resources"] = {"requests": {GPU: "1"}}

    with pytest.raises(KubeError, match=r"Limit must be set for non overcommitable resources"):
        await around.create(pod)


async def test_fc_034_a_claim_volume_is_refused_and_never_bound_for_a_virtual_node(around: World, kubectl):
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "data"},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "1Gi"}},
            "storageClassName": "later",
        },
    }
    args = ("-n", around.namespace, "-f", "-")
    await asyncio.to_thread(kubectl, "create", *args, stdin=json.dumps(claim))
    volume = {"name": "data", "persistentVolumeClaim": {"claimName": "data"}}

    said = await around.refused(a_pod(volumes=[volume]))

    assert "spec.volumes[data].persistentVolumeClaim" in said
    held = await asyncio.to_thread(kubectl, "get", "pvc", "data", "-n", around.namespace, "-o", "json")
    assert "volume.kubernetes.io/selected-node" not in held


@pytest.mark.behaviour(3, 408)
async def test_fc_038_a_deployment_that_names_a_node_makes_no_pods_and_says_why(around: World, kubectl):
    pod = asking("h100", "8")
    pod["spec"]["nodeName"] = "nebula-aws"
    args = ("-n", around.namespace, "-f", "-")
    await asyncio.to_thread(kubectl, "create", *args, stdin=owner("Deployment", pod, name="pinned"))

    async def told() -> bool:
        events = await around.kube.get(paths.events(around.namespace))
        return any("spec.nodeName is set" in each.get("message", "") for each in events["items"])

    await until(told)
    pods = await around.kube.get(paths.pods(around.namespace), labelSelector="app=pinned")
    assert pods["items"] == []
    await asyncio.to_thread(kubectl, "delete", "deployment", "pinned", "-n", around.namespace)
