"""What the API server's refusals become. Each test makes the real server refuse."""

import pytest

from app.kube import errors, paths
from app.kube.client import Kube

pytestmark = pytest.mark.usefixtures("our_kinds")

GONE_UID = "11111111-2222-3333-4444-555555555555"


def a_config_map(name="one", **data):
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def a_pod(name="one", **metadata):
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, **metadata},
        "spec": {
            "automountServiceAccountToken": False,
            "schedulerName": "nobody",
            "containers": [{"name": "c", "image": "i"}],
        },
    }


def a_binding(name="one"):
    spec = {"podRef": {"name": "p", "uid": "u-1"}, "claimName": name, "provider": "modal", "region": "eu"}
    return {
        "apiVersion": "nebula.inftyai.com/v1alpha1",
        "kind": "CloudPodBinding",
        "metadata": {"name": name},
        "spec": spec,
    }


async def test_an_object_that_is_not_there_is_replaced(kube: Kube, namespace):
    with pytest.raises(errors.Replaced) as caught:
        await kube.get(paths.configmap(namespace, "nope"))

    assert caught.value.status == 404
    assert await kube.find(paths.configmap(namespace, "nope")) is None


async def test_a_kind_that_is_not_served_says_nothing_about_an_object(kube: Kube):
    with pytest.raises(errors.KubeError) as caught:
        await kube.find("/apis/nebula.inftyai.com/v1alpha1/nosuchkinds/one")

    assert type(caught.value) is errors.KubeError
    assert caught.value.status == 404


async def test_a_create_in_a_missing_namespace_is_no_replaced_object(kube: Kube):
    with pytest.raises(errors.KubeError) as caught:
        await kube.create(paths.configmaps("no-such-namespace"), a_config_map())

    assert type(caught.value) is errors.KubeError


async def test_a_second_create_finds_the_first(kube: Kube, namespace):
    await kube.create(paths.configmaps(namespace), a_config_map())

    with pytest.raises(errors.Exists):
        await kube.create(paths.configmaps(namespace), a_config_map())


async def test_a_write_of_an_old_version_conflicts(kube: Kube, namespace):
    old = await kube.create(paths.configmaps(namespace), a_config_map())
    path = paths.configmap(namespace, "one")
    await kube.patch(path, {"data": {"a": "1"}}, kind="merge")

    version = {"metadata": {"resourceVersion": old["metadata"]["resourceVersion"]}}
    with pytest.raises(errors.Conflict):
        await kube.patch(path, version | {"data": {"a": "2"}}, kind="merge")
    with pytest.raises(errors.Conflict):
        await kube.replace(path, old | {"data": {"a": "2"}})
    assert (await kube.get(path))["data"] == {"a": "1"}


async def test_a_delete_of_another_uid_is_replaced_and_deletes_nothing(kube: Kube, namespace):
    await kube.create(paths.configmaps(namespace), a_config_map())
    path = paths.configmap(namespace, "one")

    with pytest.raises(errors.Replaced) as caught:
        await kube.delete(path, uid=GONE_UID)

    assert caught.value.status == 409
    assert await kube.find(path) is not None


async def test_a_pod_delete_of_another_uid_is_replaced_and_deletes_nothing(kube: Kube, namespace):
    await kube.create(paths.pods(namespace), a_pod())

    with pytest.raises(errors.Replaced):
        await kube.delete(paths.pod(namespace, "one"), uid=GONE_UID, grace_s=0)

    pod = await kube.get(paths.pod(namespace, "one"))
    assert "deletionTimestamp" not in pod["metadata"]


async def test_a_delete_of_an_old_version_conflicts(kube: Kube, namespace):
    old = await kube.create(paths.configmaps(namespace), a_config_map())
    path = paths.configmap(namespace, "one")
    await kube.patch(path, {"data": {"a": "1"}}, kind="merge")
    metadata = old["metadata"]

    with pytest.raises(errors.Conflict):
        await kube.delete(path, uid=metadata["uid"], resource_version=metadata["resourceVersion"])

    assert await kube.find(path) is not None


async def test_a_second_delete_is_replaced(kube: Kube, namespace):
    made = await kube.create(paths.configmaps(namespace), a_config_map())
    path = paths.configmap(namespace, "one")
    await kube.delete(path, uid=made["metadata"]["uid"])

    with pytest.raises(errors.Replaced):
        await kube.delete(path, uid=made["metadata"]["uid"])


async def test_a_pod_status_patch_with_another_uid_is_replaced_and_writes_nothing(kube: Kube, namespace):
    await kube.create(paths.pods(namespace), a_pod())
    patch = {"metadata": {"uid": GONE_UID}, "status": {"message": "not for you"}}

    with pytest.raises(errors.Replaced) as caught:
        await kube.patch(paths.pod_status(namespace, "one"), patch, kind="strategic")

    assert caught.value.status == 422
    assert "message" not in (await kube.get(paths.pod(namespace, "one")))["status"]


async def test_another_uid_is_replaced_even_when_the_version_is_old_too(kube: Kube, namespace):
    """A Pod that was deleted and made again has another version as well: that is no mere conflict."""
    await kube.create(paths.pods(namespace), a_pod())
    patch = {"metadata": {"uid": GONE_UID, "resourceVersion": "1"}, "status": {"message": "x"}}

    with pytest.raises(errors.KubeError) as caught:
        await kube.patch(paths.pod_status(namespace, "one"), patch, kind="strategic")

    assert isinstance(caught.value, errors.Replaced)


async def test_a_failed_uid_test_of_a_json_patch_is_replaced_and_writes_nothing(kube: Kube, namespace):
    """The server answers a bare 422; the client looks again to tell why."""
    await kube.create(paths.cloudpodbindings(namespace), a_binding())
    path = paths.cloudpodbinding(namespace, "one")
    patch = [
        {"op": "test", "path": "/metadata/uid", "value": GONE_UID},
        {"op": "add", "path": "/status", "value": {"provider": "modal"}},
    ]

    with pytest.raises(errors.Replaced) as caught:
        await kube.patch(path + "/status", patch, kind="json")

    assert caught.value.status == 422
    assert "status" not in await kube.get(path)


async def test_a_json_patch_of_a_missing_object_is_replaced(kube: Kube, namespace):
    patch = [{"op": "test", "path": "/metadata/uid", "value": GONE_UID}]

    with pytest.raises(errors.Replaced):
        await kube.patch(paths.cloudpodbinding_status(namespace, "nope"), patch, kind="json")


async def test_a_failed_version_test_of_a_json_patch_conflicts(kube: Kube, namespace):
    made = await kube.create(paths.cloudpodbindings(namespace), a_binding())
    patch = [
        {"op": "test", "path": "/metadata/uid", "value": made["metadata"]["uid"]},
        {"op": "test", "path": "/metadata/resourceVersion", "value": "1"},
    ]

    with pytest.raises(errors.Conflict):
        await kube.patch(paths.cloudpodbinding_status(namespace, "one"), patch, kind="json")


async def test_a_json_patch_to_nowhere_is_neither_a_conflict_nor_replaced(kube: Kube, namespace):
    made = await kube.create(paths.cloudpodbindings(namespace), a_binding())
    patch = [
        {"op": "test", "path": "/metadata/uid", "value": made["metadata"]["uid"]},
        {"op": "add", "path": "/status/no/such/place", "value": 1},
    ]

    with pytest.raises(errors.KubeError) as caught:
        await kube.patch(paths.cloudpodbinding_status(namespace, "one"), patch, kind="json")

    assert type(caught.value) is errors.KubeError


async def test_a_long_message_is_cut(kube: Kube, namespace):
    with pytest.raises(errors.KubeError) as caught:
        await kube.create(paths.configmaps(namespace), a_config_map(name="N" * 5000))

    assert len(caught.value.message) == errors.MESSAGE_CHARS


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_a_path_is_never_made_of_an_empty_name(name):
    """``DELETE /api/v1/namespaces/x/pods/`` would empty the namespace."""
    for make in (paths.node, paths.nodeclaim, lambda each: paths.pod("default", each), paths.pods):
        with pytest.raises(ValueError, match="not the name"):
            make(name)
