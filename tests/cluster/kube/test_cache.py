"""The live copy against a real API server, over a connection that misbehaves."""

import asyncio

import pytest

from app.kube import paths
from app.kube.cache import Cache
from app.kube.client import Kube
from tests.cluster.kube.following import Diary, running
from tests.cluster.kube.waiting import until

QUICK = {"base_delay_s": 0.05, "max_delay_s": 0.2}


async def put(kube: Kube, namespace: str, name: str, *, labels: dict[str, str] | None = None, **data: str):
    metadata = {"name": name, "labels": labels or {}}
    return await kube.create(
        paths.configmaps(namespace),
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data},
    )


async def change(kube: Kube, namespace: str, name: str, **patch):
    return await kube.patch(paths.configmap(namespace, name), patch, kind="merge")


async def test_additions_changes_and_deletions_are_told_in_order(kube: Kube, namespace):
    cache = Cache(kube, paths.configmaps(namespace))
    diary = Diary(cache)
    async with running(cache):
        await put(kube, namespace, "a")
        await change(kube, namespace, "a", data={"x": "1"})
        await kube.delete(paths.configmap(namespace, "a"))

        await until(lambda: "-a" in diary.lines)

    assert [line for line in diary.lines if line.endswith("a")] == ["+a", "~a", "-a"]
    assert cache.get(namespace, "a") is None


async def test_what_is_listed_and_what_is_watched_look_alike(kube: Kube, namespace):
    """Items of a list lack their kind; both arrive without the fields nobody reads."""
    await put(kube, namespace, "listed")
    cache = Cache(kube, paths.configmaps(namespace), trim=lambda obj: obj.pop("data", None))
    async with running(cache):
        await put(kube, namespace, "watched", x="1")
        await until(lambda: cache.get(namespace, "watched") is not None)

    for name in ("listed", "watched"):
        obj = cache.get(namespace, name)
        assert obj
        assert (obj["apiVersion"], obj["kind"]) == ("v1", "ConfigMap")
        assert "managedFields" not in obj["metadata"]
        assert "data" not in obj


async def test_a_list_longer_than_a_page_is_whole(kube: Kube, namespace):
    for n in range(5):
        await put(kube, namespace, f"n{n}", labels={"numbered": "yes"})

    cache = Cache(kube, paths.configmaps(namespace), label_selector="numbered=yes", page=2)
    async with running(cache):
        assert {obj["metadata"]["name"] for obj in cache.all()} == {f"n{n}" for n in range(5)}


async def test_objects_are_found_by_uid_and_by_index(kube: Kube, namespace):
    cache = Cache(kube, paths.configmaps(namespace))
    cache.add_index("colour", lambda obj: [obj["metadata"].get("labels", {}).get("colour", "none")])
    async with running(cache):
        made = await put(kube, namespace, "a", labels={"colour": "red"})
        await put(kube, namespace, "b", labels={"colour": "red"})
        await until(lambda: len(cache.by_index("colour", "red")) == 2)
        held = cache.by_uid(made["metadata"]["uid"])
        assert held
        assert held["metadata"]["name"] == "a"

        await change(kube, namespace, "a", metadata={"labels": {"colour": "blue"}})
        await kube.delete(paths.configmap(namespace, "b"))
        await until(lambda: not cache.by_index("colour", "red"))

        assert [obj["metadata"]["name"] for obj in cache.by_index("colour", "blue")] == ["a"]


async def test_a_label_taken_off_is_told_as_a_deletion(kube: Kube, namespace):
    cache = Cache(kube, paths.configmaps(namespace), label_selector="mine=yes")
    diary = Diary(cache)
    async with running(cache):
        await put(kube, namespace, "a", labels={"mine": "yes"})
        await until(lambda: diary.lines == ["+a"])
        await change(kube, namespace, "a", metadata={"labels": {"mine": None}})
        await until(lambda: diary.lines == ["+a", "-a"])

    assert await kube.find(paths.configmap(namespace, "a")) is not None


async def test_a_field_selector_is_honoured(kube: Kube, namespace):
    await put(kube, namespace, "a")
    await put(kube, namespace, "b")

    cache = Cache(kube, paths.configmaps(namespace), field_selector="metadata.name=b")
    async with running(cache):
        assert [obj["metadata"]["name"] for obj in cache.all()] == ["b"]


async def test_a_handler_that_comes_late_is_told_of_what_is_there(kube: Kube, namespace):
    await put(kube, namespace, "a")
    cache = Cache(kube, paths.configmaps(namespace), field_selector="metadata.name=a")
    async with running(cache):
        diary = Diary(cache)

    assert diary.lines == ["+a"]


async def test_what_happened_during_an_outage_is_told_after_it(kube: Kube, through, proxy, namespace):
    for name in ("stays", "goes", "changes"):
        await put(kube, namespace, name, labels={"mine": "yes"})
    cache = Cache(through, paths.configmaps(namespace), label_selector="mine=yes", **QUICK)
    async with running(cache):
        diary = Diary(cache)
        diary.lines.clear()
        await proxy.refuse()
        await kube.delete(paths.configmap(namespace, "goes"))
        await change(kube, namespace, "changes", data={"x": "1"})
        await put(kube, namespace, "comes", labels={"mine": "yes"})
        proxy.flow()

        await until(lambda: len(diary.lines) >= 3)

    assert sorted(diary.lines) == ["+comes", "-goes", "~changes"]


@pytest.mark.field_case("FC-042")
async def test_a_connection_that_went_silent_is_noticed(kube: Kube, through, proxy, namespace):
    """Half open: nobody closed it, and nothing comes any more."""
    cache = Cache(
        through, paths.configmaps(namespace), field_selector="metadata.name=late", silence_s=0.5, **QUICK
    )
    async with running(cache):
        await until(lambda: cache.watches == 1)
        proxy.stall()
        await put(kube, namespace, "late")
        await until(lambda: cache.watches > 1)  # gave the first one up
        assert len(cache) == 0
        await proxy.cut()
        proxy.flow()

        await until(lambda: len(cache) == 1)


async def test_another_object_of_the_same_name_is_a_deletion_and_an_addition(
    kube: Kube, through, proxy, namespace
):
    first = await put(kube, namespace, "twin", x="1")
    cache = Cache(through, paths.configmaps(namespace), field_selector="metadata.name=twin", **QUICK)
    async with running(cache):
        diary = Diary(cache)
        await proxy.refuse()
        await kube.delete(paths.configmap(namespace, "twin"))
        second = await put(kube, namespace, "twin", x="2")
        proxy.flow()

        await until(lambda: len(diary.uids) == 3)

    old, new = first["metadata"]["uid"], second["metadata"]["uid"]
    assert diary.uids == [f"+{old}", f"-{old}", f"+{new}"]
    assert cache.by_uid(old) is None


async def test_a_watch_that_the_server_ends_is_begun_again(kube: Kube, namespace):
    cache = Cache(kube, paths.configmaps(namespace), field_selector="metadata.name=a", watch_s=1, **QUICK)
    async with running(cache):
        await until(lambda: cache.watches >= 2)
        await put(kube, namespace, "a")
        await until(lambda: len(cache) == 1)

    assert cache.lists == 1


async def test_a_kind_that_is_not_served_yet_is_waited_for(kube: Kube):
    """A CRD that is applied after the controller started must not have ended the loop."""
    name = "latecomers.test.nebula.example"
    cache = Cache(kube, "/apis/test.nebula.example/v1/latecomers", **QUICK)
    task = asyncio.create_task(cache.run())
    try:
        schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
        names = {"plural": "latecomers", "singular": "latecomer", "kind": "Latecomer"}
        spec = {"group": "test.nebula.example", "names": names, "scope": "Cluster", "versions": [version]}
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(cache.synced(), timeout=0.2)
        await kube.create(
            paths.crds(),
            {
                "apiVersion": "apiextensions.k8s.io/v1",
                "kind": "CustomResourceDefinition",
                "metadata": {"name": name},
                "spec": spec,
            },
        )
        await asyncio.wait_for(cache.synced(), timeout=20)
    finally:
        task.cancel()
        await asyncio.wait((task,))
        await kube.delete(paths.crd(name))
