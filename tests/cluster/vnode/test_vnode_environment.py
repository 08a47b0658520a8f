"""What a Pod refers to: read live and once, right before its machine is rented; waited for while missing."""

import base64
import hashlib
from typing import Any

import orjson
import pytest

from app.api import keys
from app.kube import paths
from app.kube.client import Obj
from app.kube.errors import KubeError
from tests.cluster.vnode.vnode_world import World, is_ready, state_of
from tests.support.clouds import SMALL

IMAGE = "nvidia/cuda:12.4.1-base-ubuntu22.04"
PRIVATE_IMAGE = "registry.example.com/team/app:1"
PASSWORD = "canary-5f2d"
PRIVATE = SMALL | {"images": {"private": {"registry.example.com": f"user:{PASSWORD}"}}}
CONFIG_PROBLEM = "CreateContainerConfigError"


async def a_secret(world: World, name: str, **values: str) -> Obj:
    body: Obj = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": values}
    return await world.kube.create(paths.secrets(world.namespace), body)


async def a_config_map(world: World, name: str, **values: str) -> Obj:
    body: Obj = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": values}
    return await world.kube.create(paths.configmaps(world.namespace), body)


async def a_pull_secret(world: World, name: str, *, password: str = PASSWORD) -> Obj:
    auths = {"auths": {"registry.example.com": {"username": "user", "password": password}}}
    body: Obj = {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/dockerconfigjson",
        "metadata": {"name": name},
        "data": {".dockerconfigjson": base64.b64encode(orjson.dumps(auths)).decode()},
    }
    return await world.kube.create(paths.secrets(world.namespace), body)


def running(**changes: Any) -> dict[str, Any]:
    """A Pod's ``containers``, with one that has these fields."""
    return {"containers": [{"name": "workload", "image": IMAGE, **changes}]}


def from_secret(name: str, key: str, **changes: Any) -> dict[str, Any]:
    return {"secretKeyRef": {"name": name, "key": key, **changes}}


def from_map(name: str, key: str, **changes: Any) -> dict[str, Any]:
    return {"configMapKeyRef": {"name": name, "key": key, **changes}}


async def arrived(world: World, pod: Obj) -> dict[str, str]:
    """The environment that reached the Pod's machine: digests by name."""
    machine = await world.machine_of(pod)
    (found,) = [each for each in await world.cloud.machines() if each["id"] == machine]
    return dict(found["env_digests"])


def digests(**values: str) -> dict[str, str]:
    return {name: hashlib.sha256(value.encode()).hexdigest() for name, value in values.items()}


@pytest.mark.behaviour(224, 225, 226, 231, 232, 235, 236, 240)
@pytest.mark.field_case("FC-127")
async def test_the_whole_environment_arrives_and_each_object_was_read_once(world: World) -> None:
    await a_secret(world, "db", user="u", password="p")
    await a_config_map(world, "conf", MODE="fast", LEVEL="1")
    env = [
        {"name": "LEVEL", "value": "2"},
        {"name": "DB_USER", "valueFrom": from_secret("db", "user")},
        {"name": "DB_PASSWORD", "valueFrom": from_secret("db", "password")},
        {"name": "URL", "value": "pg://$(DB_USER):$(DB_PASSWORD)@db"},
        {"name": "MODE_AGAIN", "valueFrom": from_map("conf", "MODE")},
        {"name": "MAYBE", "valueFrom": from_map("gone", "k", optional=True)},
        {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "CPUS", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
    ]
    container = running(
        env=env,
        envFrom=[{"configMapRef": {"name": "conf"}}, {"secretRef": {"name": "db"}, "prefix": "ALL_"}],
        resources={"limits": {"cpu": "1500m"}},
        args=["--mode=$(MODE)", "$(UNKNOWN)"],
    )
    async with world.running():
        pod = await world.pod(**container)
        found = await arrived(world, pod)

    assert found == digests(
        MODE="fast",
        LEVEL="2",
        ALL_user="u",
        ALL_password="p",
        DB_USER="u",
        DB_PASSWORD="p",
        URL="pg://u:p@db",
        MODE_AGAIN="fast",
        NAME=pod["metadata"]["name"],
        NODE=world.node,
        CPUS="2",
    )
    assert sorted(world.wire.reads) == ["configmaps/conf", "configmaps/gone", "secrets/db"]
    (machine,) = await world.cloud.machines()
    assert machine["args"] == ["--mode=fast", "$(UNKNOWN)"]


@pytest.mark.behaviour(123, 124, 228, 229, 391)
@pytest.mark.parametrize(
    ("origin", "words"),
    [
        (from_secret("late", "k"), 'secret "late" not found in namespace "{namespace}"'),
        (from_map("late", "k"), 'configmap "late" not found in namespace "{namespace}"'),
        (from_secret("there", "k"), "couldn't find key k in Secret {namespace}/there"),
        (from_map("there", "k"), "couldn't find key k in ConfigMap {namespace}/there"),
    ],
    ids=["secret", "config-map", "key-of-a-secret", "key-of-a-config-map"],
)
@pytest.mark.field_case("FC-130")
async def test_what_is_missing_is_named_in_a_kubelets_words_and_waited_for(
    world: World, origin: dict[str, Any], words: str
) -> None:
    await a_secret(world, "there", other="x")
    await a_config_map(world, "there", other="x")
    async with world.running():
        pod = await world.pod(**running(env=[{"name": "A", "valueFrom": origin}]))
        shown = await world.until_reason(pod, "ConfigError")

        assert shown["status"]["phase"] == "Pending"
        assert shown["status"]["message"] == words.format(namespace=world.namespace)
        assert state_of(shown)["waiting"] == {
            "reason": CONFIG_PROBLEM,
            "message": shown["status"]["message"],
        }
        assert await world.cloud.creates() == {}
        await world.until_event(pod, "ConfigError")
        await _make_it_good(world, origin)
        found = await arrived(world, pod)

    assert found == digests(A="v")
    async with world.engine.connect() as conn:
        assert list(await conn.exec_driver_sql("select kind from block")) == []


async def _make_it_good(world: World, origin: dict[str, Any]) -> None:
    ((kind, reference),) = origin.items()
    if reference["name"] == "late":
        make = a_secret if kind == "secretKeyRef" else a_config_map
        await make(world, "late", k="v")
        return
    path = paths.secret if kind == "secretKeyRef" else paths.configmap
    field = "stringData" if kind == "secretKeyRef" else "data"
    await world.kube.patch(path(world.namespace, "there"), {field: {"k": "v"}}, kind="merge")


@pytest.mark.behaviour(227, 229)
async def test_what_is_optional_and_missing_is_left_out(world: World) -> None:
    await a_secret(world, "there", other="x")
    env = [
        {"name": "A", "valueFrom": from_secret("gone", "k", optional=True)},
        {"name": "B", "valueFrom": from_secret("there", "k", optional=True)},
        {"name": "C", "value": "kept"},
    ]
    async with world.running():
        pod = await world.pod(**running(env=env, envFrom=[{"secretRef": {"name": "gone", "optional": True}}]))

        assert await arrived(world, pod) == digests(C="kept")


@pytest.mark.behaviour(230, 231)
async def test_a_read_that_fails_is_no_absence_even_where_that_would_be_allowed(world: World) -> None:
    await a_config_map(world, "conf", k="v")

    def refuse(_what: str) -> None:
        raise KubeError(403, reason="Forbidden", message="configmaps is forbidden")

    async with world.running():
        world.wire.before_read = refuse
        pod = await world.pod(
            **running(env=[{"name": "A", "valueFrom": from_map("conf", "k", optional=True)}])
        )
        shown = await world.until_reason(pod, "ConfigError")
        assert f"ConfigMap {world.namespace}/conf cannot be read" in shown["status"]["message"]
        assert await world.cloud.creates() == {}

        world.wire.before_read = None  # the failure was remembered for no longer than its call
        assert await arrived(world, pod) == digests(A="v")


@pytest.mark.behaviour(237)
async def test_a_key_that_can_be_no_variable_is_left_out_and_told(world: World) -> None:
    await a_config_map(world, "conf", **{"1st": "x", "ok.name": "v"})
    async with world.running():
        pod = await world.pod(**running(envFrom=[{"configMapRef": {"name": "conf"}}]))

        assert await arrived(world, pod) == digests(**{"ok.name": "v"})
        await world.until_event(pod, "InvalidEnvironmentVariableNames")


@pytest.mark.behaviour(239, 176)
async def test_a_machine_keeps_what_it_was_rented_with_and_a_restart_of_ours_reads_nothing(
    world: World,
) -> None:
    await a_secret(world, "db", k="old")
    async with world.running():
        pod = await world.pod(**running(env=[{"name": "A", "valueFrom": from_secret("db", "k")}]))
        await world.until_ready(pod)
        await _name_on_claim(world, pod)
    await world.kube.delete(paths.secret(world.namespace, "db"))
    world.wire.writes.clear()
    world.wire.reads.clear()

    async with world.running():
        other = await world.pod()
        await world.until_ready(other)
        after = await world.see(pod)
        found = await arrived(world, pod)

    assert after is not None
    assert is_ready(after)
    assert found == digests(A="old")
    assert world.wire.about(pod["metadata"]["name"]) == []
    assert world.wire.reads == []


async def _name_on_claim(world: World, pod: Obj) -> None:
    """What the claims room writes: the machine, on the claim."""
    name = keys.claim_name(world.namespace, pod["metadata"]["name"])
    status = {
        "phase": "Bound",
        "instanceID": await world.machine_of(pod),
        "account": "default",
        "region": "r1",
    }
    await world.kube.patch(paths.nodeclaim_status(name), {"status": status}, kind="merge")


@pytest.mark.parametrize("scenario", [PRIVATE], ids=["private-registry"])
async def test_a_private_image_is_pulled_with_the_pods_secret(world: World) -> None:
    await a_pull_secret(world, "registry")
    async with world.running():
        pod = await world.pod(**running(image=PRIVATE_IMAGE), imagePullSecrets=[{"name": "registry"}])

        await world.until_ready(pod)


@pytest.mark.parametrize("scenario", [PRIVATE], ids=["private-registry"])
@pytest.mark.field_case("FC-125")
async def test_a_private_image_is_pulled_with_the_secret_of_the_pods_service_account(world: World) -> None:
    await a_pull_secret(world, "registry")
    accounts = f"/api/v1/namespaces/{world.namespace}/serviceaccounts"
    body: Obj = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": "puller"},
        "imagePullSecrets": [{"name": "registry"}],
    }
    await world.kube.create(accounts, body)
    async with world.running():
        pod = await world.pod(**running(image=PRIVATE_IMAGE), serviceAccountName="puller")

        await world.until_ready(pod)


@pytest.mark.parametrize("scenario", [PRIVATE], ids=["private-registry"])
@pytest.mark.field_case("FC-008")
async def test_an_image_that_cannot_be_pulled_fails_the_pod_with_the_reason_and_its_machine_goes(
    world: World,
) -> None:
    await a_pull_secret(world, "registry", password="wrong")
    async with world.running():
        pod = await world.pod(**running(image=PRIVATE_IMAGE), imagePullSecrets=[{"name": "registry"}])
        failed = await world.until(pod, lambda seen: seen["status"]["phase"] == "Failed")
        await world.cloud.until(
            lambda truth: all(each["state"] == "gone" for each in truth["machines"]), what="the release"
        )

    assert failed["status"]["reason"] == "Failed"
    assert state_of(failed)["waiting"]["reason"] == "ErrImagePull"
    assert "access denied" in failed["status"]["message"]


@pytest.mark.field_case("FC-125")
async def test_a_missing_pull_secret_is_told_and_a_public_image_runs(world: World) -> None:
    async with world.running():
        pod = await world.pod(imagePullSecrets=[{"name": "gone"}])

        await world.until_ready(pod)
        await world.until_event(pod, "FailedToRetrieveImagePullSecret")


@pytest.mark.field_case("FC-125")
async def test_a_pull_secret_that_holds_no_login_rents_nothing(world: World) -> None:
    await a_secret(world, "registry", anything="x")
    async with world.running():
        pod = await world.pod(imagePullSecrets=[{"name": "registry"}])
        shown = await world.until_reason(pod, "ConfigError")

    assert state_of(shown)["waiting"]["reason"] == "ErrImagePull"
    assert f"Secret {world.namespace}/registry is of type Opaque" in shown["status"]["message"]
    assert await world.cloud.creates() == {}


async def test_an_image_name_that_no_node_could_pull_rents_nothing_until_it_is_mended(world: World) -> None:
    async with world.running():
        pod = await world.pod(**running(image="Not/An:Image:Name"))
        shown = await world.until_reason(pod, "ConfigError")
        assert state_of(shown)["waiting"]["reason"] == "InvalidImageName"
        assert await world.cloud.creates() == {}

        await _edit_image(world, pod, IMAGE)

        ready = await world.until_ready(pod)
    assert ready["status"]["containerStatuses"][0]["image"] == IMAGE


@pytest.mark.behaviour(158)
async def test_an_image_that_is_edited_on_a_running_pod_changes_nothing_and_is_told(world: World) -> None:
    async with world.running():
        pod = await world.pod()
        await world.until_ready(pod)
        await _edit_image(world, pod, "other:2")

        await world.until_event(pod, "ImageChangeIgnored")
        after = await world.see(pod)

    assert after is not None
    assert is_ready(after)
    assert after["status"]["containerStatuses"][0]["image"] == IMAGE
    (machine,) = await world.cloud.machines()
    assert machine["image"] == IMAGE


async def _edit_image(world: World, pod: Obj, image: str) -> None:
    path = paths.pod(world.namespace, pod["metadata"]["name"])
    body = {"spec": {"containers": [{"name": "workload", "image": image}]}}
    await world.kube.patch(path, body, kind="strategic")


QUOTING = f"bad env TOKEN={PASSWORD}"


@pytest.mark.parametrize("restarted", [False, True], ids=["same-process", "after-a-restart"])
@pytest.mark.field_case("FC-077", "FC-101")
async def test_what_a_cloud_says_later_is_shown_without_what_came_from_a_secret(
    world: World, restarted: bool
) -> None:
    await a_secret(world, "app", token=PASSWORD)
    env = [{"name": "TOKEN", "valueFrom": from_secret("app", "token")}]
    async with world.running():
        pod = await world.pod(**running(env=env))
        machine = await world.machine_of(pod)
        if not restarted:
            await world.cloud.fail(machine, message=QUOTING)
            failed = await world.until(pod, lambda seen: seen["status"]["phase"] == "Failed")
    if restarted:
        await world.cloud.fail(machine, message=QUOTING)
        async with world.running():
            failed = await world.until(pod, lambda seen: seen["status"]["phase"] == "Failed")

    assert PASSWORD not in str(failed)
    assert "bad env TOKEN=[hidden]" in failed["status"]["message"]
    assert "bad env TOKEN=[hidden]" in state_of(failed)["terminated"]["message"]


async def test_words_that_can_be_masked_no_more_are_left_out(world: World) -> None:
    """The process that rented is gone, and so is the Secret: nobody can tell what the words quote."""
    secret = await a_secret(world, "app", token=PASSWORD)
    env = [{"name": "TOKEN", "valueFrom": from_secret("app", "token")}]
    async with world.running():
        pod = await world.pod(**running(env=env))
        machine = await world.machine_of(pod)
    await world.kube.delete(paths.secret(world.namespace, secret["metadata"]["name"]))
    await world.cloud.fail(machine, message=QUOTING)

    async with world.running():
        failed = await world.until(pod, lambda seen: seen["status"]["phase"] == "Failed")

    assert PASSWORD not in str(failed)
    assert "left out" in failed["status"]["message"]


async def test_words_of_a_pod_without_secrets_are_shown_as_they_are(world: World) -> None:
    async with world.running():
        pod = await world.pod()
        machine = await world.machine_of(pod)
    await world.cloud.fail(machine, message="the host lost its power")

    async with world.running():
        failed = await world.until(pod, lambda seen: seen["status"]["phase"] == "Failed")

    assert "the host lost its power" in failed["status"]["message"]
