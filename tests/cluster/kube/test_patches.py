"""Our patches on real objects: only on the one that is meant, and only what differs."""

from datetime import UTC, datetime

import pytest

from app.kube import patches, paths
from app.kube.client import Kube
from app.kube.errors import Conflict, Replaced
from tests.cluster.kube.test_errors import GONE_UID, a_binding, a_pod

pytestmark = pytest.mark.usefixtures("our_kinds")

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)


async def test_a_pod_status_patch_keeps_the_conditions_of_others(kube: Kube, namespace):
    pod = await kube.create(paths.pods(namespace), a_pod())
    path, uid = paths.pod_status(namespace, "one"), pod["metadata"]["uid"]
    theirs = {"type": "lb.example/ready", "status": "True"}
    await kube.patch(path, {"status": {"conditions": [theirs]}}, kind="strategic")

    wanted = {
        "phase": "Running",
        "conditions": patches.condition(None, type="Ready", status="True", reason="Up", now=NOW),
    }
    held = await kube.get(paths.pod(namespace, "one"))
    changes = patches.diff(held["status"], wanted, keyed=patches.POD_STATUS_KEYS)
    assert changes
    patch = patches.pod_status(uid, changes, annotations={"nebula.inftyai.com/endpoint": "10.0.0.1"})
    after = await kube.patch(path, patch, kind="strategic")

    assert {each["type"] for each in after["status"]["conditions"]} == {"lb.example/ready", "Ready"}
    assert after["metadata"]["annotations"]["nebula.inftyai.com/endpoint"] == "10.0.0.1"
    assert patches.diff(after["status"], wanted, keyed=patches.POD_STATUS_KEYS) is None


async def test_a_changed_address_replaces_the_old_one(kube: Kube, namespace):
    await kube.create(paths.pods(namespace), a_pod())
    path = paths.pod_status(namespace, "one")
    for address in ("10.0.0.1", "10.0.0.2"):
        status = {"podIP": address, "podIPs": patches.whole_list([{"ip": address}])}
        after = await kube.patch(path, {"status": status}, kind="strategic")

    assert after["status"]["podIPs"] == [{"ip": "10.0.0.2"}]


async def test_a_terminal_status_is_refused_for_a_pod_that_has_changed(kube: Kube, namespace):
    pod = await kube.create(paths.pods(namespace), a_pod())
    metadata = pod["metadata"]
    await kube.patch(paths.pod(namespace, "one"), {"metadata": {"labels": {"a": "b"}}}, kind="merge")
    patch = patches.pod_status(
        metadata["uid"], {"phase": "Failed"}, resource_version=metadata["resourceVersion"]
    )

    with pytest.raises(Conflict):
        await kube.patch(paths.pod_status(namespace, "one"), patch, kind="strategic")


async def test_the_first_status_of_a_custom_resource_is_made(kube: Kube, namespace):
    made = await kube.create(paths.cloudpodbindings(namespace), a_binding())
    ops = patches.status_ops(made, {"instanceID": "i-1", "endpoint": None})

    after = await kube.patch(paths.cloudpodbinding_status(namespace, "one"), ops, kind="json")

    assert after["status"] == {"instanceID": "i-1"}
    assert patches.status_ops(after, {"instanceID": "i-1", "endpoint": None}) is None


async def test_a_first_status_does_not_overwrite_one_that_came_meanwhile(kube: Kube, namespace):
    """Two writers own different fields of a status: neither may sweep away the other's."""
    made = await kube.create(paths.cloudpodbindings(namespace), a_binding())
    path = paths.cloudpodbinding_status(namespace, "one")
    await kube.patch(path, patches.status_ops(made, {"instanceID": "i-1"}), kind="json")

    with pytest.raises(Conflict):
        await kube.patch(path, patches.status_ops(made, {"pricePerHour": "2"}), kind="json")

    held = await kube.get(paths.cloudpodbinding(namespace, "one"))
    assert held["status"] == {"instanceID": "i-1"}
    after = await kube.patch(path, patches.status_ops(held, {"pricePerHour": "2"}), kind="json")
    assert after["status"] == {"instanceID": "i-1", "pricePerHour": "2"}


async def test_a_status_write_for_another_uid_of_the_same_name_is_refused(kube: Kube, namespace):
    """A plain merge patch with a uid would be written: the server ignores it there."""
    made = await kube.create(paths.cloudpodbindings(namespace), a_binding())
    await kube.delete(paths.cloudpodbinding(namespace, "one"))
    await kube.create(paths.cloudpodbindings(namespace), a_binding())

    with pytest.raises(Replaced):
        await kube.patch(
            paths.cloudpodbinding_status(namespace, "one"),
            patches.status_ops(made, {"instanceID": "i-1"}),
            kind="json",
        )

    assert "status" not in await kube.get(paths.cloudpodbinding(namespace, "one"))


async def test_a_uid_in_a_merge_patch_does_not_guard_the_status_of_our_kinds(kube: Kube, namespace):
    """Why status_ops exists. When this fails, the server has learned it and the two ways can become one."""
    await kube.create(paths.cloudpodbindings(namespace), a_binding())
    patch = {"metadata": {"uid": GONE_UID}, "status": {"instanceID": "i-1"}}

    after = await kube.patch(paths.cloudpodbinding_status(namespace, "one"), patch, kind="merge")

    assert after["status"] == {"instanceID": "i-1"}


async def test_a_version_guard_refuses_any_change_between(kube: Kube, namespace):
    made = await kube.create(paths.cloudpodbindings(namespace), a_binding())
    path = paths.cloudpodbinding(namespace, "one")
    await kube.patch(path, {"metadata": {"labels": {"a": "b"}}}, kind="merge")

    ops = patches.status_ops(made, {"instanceID": "i-1"}, guard_version=True)
    with pytest.raises(Conflict):
        await kube.patch(path + "/status", ops, kind="json")


async def test_our_finalizer_is_taken_off_and_others_stay(kube: Kube, namespace):
    binding = a_binding()
    binding["metadata"]["finalizers"] = ["a.example/one", "nebula.inftyai.com/x", "b.example/two"]
    made = await kube.create(paths.cloudpodbindings(namespace), binding)
    path = paths.cloudpodbinding(namespace, "one")
    try:
        ops = patches.without_finalizer(made, "nebula.inftyai.com/x")
        after = await kube.patch(path, ops, kind="json")

        assert after["metadata"]["finalizers"] == ["a.example/one", "b.example/two"]
        assert patches.without_finalizer(after, "nebula.inftyai.com/x") is None
        with pytest.raises(Conflict):  # the list is another one now
            await kube.patch(path, ops, kind="json")
    finally:
        await kube.patch(path, {"metadata": {"finalizers": None}}, kind="merge")
