"""What the client repeats, what it never repeats, and how it introduces itself."""

import asyncio

import pytest

from app.kube import client, paths
from app.kube.client import Kube
from app.kube.errors import KubeError, Unreachable
from tests.cluster.kube.scripted import refusal
from tests.cluster.kube.waiting import until

ONE = "/api/v1/namespaces/default/configmaps/one"
ALL = "/api/v1/namespaces/default/configmaps"


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Pauses of the client take no time; how long they would be is kept."""
    pauses: list[float] = []
    real = asyncio.sleep

    async def sleep(delay_s: float) -> None:
        pauses.append(delay_s)
        await real(0)

    monkeypatch.setattr(client, "_pause", sleep)
    return pauses


async def test_each_room_is_told_apart_by_its_user_agent(scripted, told):
    await told.room("vnode").get(ONE)
    await told.room("placement").create(ALL, {})
    watch = told.room("mirror").watch_lines("/api/v1/configmaps", silence_s=5, query={})
    pending = asyncio.ensure_future(anext(watch))
    await scripted.watched()
    pending.cancel()
    await asyncio.wait((pending,))

    agents = [each.headers["User-Agent"] for each in scripted.requests]
    assert agents == ["nebula/0.1.0 (vnode)", "nebula/0.1.0 (placement)", "nebula/0.1.0 (mirror)"]


async def test_a_patch_says_what_kind_it_is(scripted, told):
    for kind in ("strategic", "merge", "json", "apply"):
        await told.patch(ONE, {}, kind=kind)

    assert [each.headers["Content-Type"] for each in scripted.requests] == [
        "application/strategic-merge-patch+json",
        "application/merge-patch+json",
        "application/json-patch+json",
        "application/apply-patch+yaml",
    ]
    assert scripted.requests[-1].query == {"fieldManager": "nebula", "force": "true"}


@pytest.mark.parametrize("verb", ["get", "create"])
async def test_a_request_that_the_server_did_not_begin_is_repeated(scripted, told, impatient, verb):
    """429 is how the server says "too many" and "the storage of this kind is (re)initializing"."""
    scripted.refusals.extend(refusal(429, "TooManyRequests", retry_after="3") for _ in range(3))

    await (told.get(ONE) if verb == "get" else told.create(ALL, {}))

    assert len(scripted.requests) == 4
    assert all(3 <= pause <= 4.5 for pause in impatient)


async def test_a_server_that_stays_busy_is_given_up(scripted, told):
    scripted.refusals.extend(refusal(429, "TooManyRequests") for _ in range(50))

    with pytest.raises(KubeError) as caught:
        await told.create(ALL, {})

    assert caught.value.status == 429
    assert len(scripted.requests) == client.REFUSALS + 1


@pytest.mark.parametrize("code", [500, 503, 504])
async def test_a_write_that_failed_in_the_server_is_not_repeated(scripted, told, code):
    scripted.refusals.append(refusal(code, "Oops"))

    with pytest.raises(KubeError):
        await told.patch(ONE, {}, kind="merge")

    assert len(scripted.requests) == 1


async def test_a_read_that_failed_in_the_server_is_repeated_once(scripted, told):
    scripted.refusals.append(refusal(503, "ServiceUnavailable"))
    await told.get(ONE)
    assert len(scripted.requests) == 2

    scripted.refusals.extend(refusal(503, "ServiceUnavailable") for _ in range(5))
    with pytest.raises(KubeError):
        await told.get(ONE)
    assert len(scripted.requests) == 4


async def test_a_write_whose_answer_is_lost_happened_once_and_is_reported_as_unknown(
    kube: Kube, through, proxy, namespace
):
    await through.get(paths.namespace(namespace))  # the connection is open
    proxy.swallow_next_answer()

    with pytest.raises(Unreachable) as caught:
        await through.create(
            paths.configmaps(namespace),
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"generateName": "lost-"}},
        )

    assert caught.value.status == 0
    made = [obj async for page in kube.list_pages(paths.configmaps(namespace)) for obj in page["items"]]
    assert len([obj for obj in made if obj["metadata"]["name"].startswith("lost-")]) == 1


async def test_a_read_whose_answer_is_lost_is_repeated(through, proxy, namespace):
    await through.get(paths.namespace(namespace))
    proxy.swallow_next_answer()

    assert (await through.get(paths.namespace(namespace)))["metadata"]["name"] == namespace
    assert proxy.swallowed == 1


@pytest.mark.field_case("FC-042")
async def test_no_request_waits_for_ever(scripted, told):
    scripted.slow = asyncio.Event()

    with pytest.raises(Unreachable):
        await told.room("impatient", timeout_s=0.05).create(ALL, {})
    scripted.slow.set()


async def test_urgent_requests_do_not_queue_behind_others(scripted, told):
    scripted.slow = asyncio.Event()
    ordinary = [asyncio.ensure_future(told.get(ONE)) for _ in range(client.PARALLEL + 5)]
    await until(lambda: len(scripted.requests) == client.PARALLEL)

    urgent = asyncio.ensure_future(told.room("lease", urgent=True).get(ALL + "/lease"))
    await until(lambda: len(scripted.requests) == client.PARALLEL + 1)

    assert scripted.requests[-1].path.endswith("/lease")
    scripted.slow.set()
    await asyncio.gather(urgent, *ordinary)


async def test_only_the_metadata_of_an_answer_is_sent_when_nobody_reads_more(kube: Kube, namespace):
    made = await kube.create(
        paths.configmaps(namespace),
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"x": "1"}},
        metadata_only=True,
    )

    assert made["metadata"]["uid"]
    assert "data" not in made
    assert (await kube.get(paths.configmap(namespace, "a")))["data"] == {"x": "1"}


async def test_an_applied_object_is_made_and_then_changed(kube: Kube, namespace):
    path = paths.configmap(namespace, "a")
    for value in ("1", "2"):
        obj = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"x": value}}
        await kube.patch(path, obj, kind="apply")

    assert (await kube.get(path))["data"] == {"x": "2"}
