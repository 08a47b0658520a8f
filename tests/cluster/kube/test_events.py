"""Events as people see them, and as the API server counts them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import pytest

from app.kube import events, paths
from app.kube.client import Kube
from app.kube.events import ObjectRef, Recorder
from tests.cluster.kube.test_errors import a_binding, a_pod
from tests.cluster.kube.waiting import until


class Clock:
    """Monotonic seconds and a wall clock, moved together by hand."""

    def __init__(self):
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds

    def now(self) -> datetime:
        return datetime(2026, 5, 1, tzinfo=UTC) + timedelta(seconds=self.seconds)


@asynccontextmanager
async def recording(kube: Kube, **options) -> AsyncIterator[tuple[Recorder, Clock]]:
    clock = Clock()
    recorder = Recorder(kube, clock=clock, now=clock.now, **options)
    task = asyncio.create_task(recorder.run())
    try:
        yield recorder, clock
    finally:
        task.cancel()
        await asyncio.wait((task,))


async def written(kube: Kube, namespace: str):
    return (await kube.get(paths.events(namespace)))["items"]


async def test_kubectl_describe_shows_the_event(kube: Kube, kubectl, namespace):
    pod = await kube.create(paths.pods(namespace), a_pod())
    async with recording(kube) as (recorder, _):
        recorder.note(pod, type="Warning", reason="NoCapacity", message="modal is sold out of H100")
        await recorder.flush()

    shown = await asyncio.to_thread(kubectl, "describe", "pod", "one", "-n", namespace)
    line = next(each for each in shown.splitlines() if "NoCapacity" in each)
    assert "Warning" in line
    assert "nebula" in line
    assert "modal is sold out of H100" in line


async def test_an_event_of_a_cluster_scoped_object_is_shown_too(kube: Kube, kubectl):
    node = await kube.create(
        paths.nodes(), {"apiVersion": "v1", "kind": "Node", "metadata": {"generateName": "nebula-test-"}}
    )
    name = node["metadata"]["name"]
    try:
        async with recording(kube) as (recorder, _):
            recorder.note(node, type="Normal", reason="Registered", message="a virtual node")
            await recorder.flush()
        assert "a virtual node" in await asyncio.to_thread(kubectl, "describe", "node", name)
    finally:
        await kube.delete(paths.node(name))


@pytest.mark.usefixtures("our_kinds")
async def test_an_event_of_our_kinds_is_shown_too(kube: Kube, kubectl, namespace):
    binding = await kube.create(paths.cloudpodbindings(namespace), a_binding())
    async with recording(kube) as (recorder, _):
        recorder.note(ObjectRef.of(binding), type="Normal", reason="Bound", message="it has a machine")
        await recorder.flush()

    shown = await asyncio.to_thread(kubectl, "describe", "cloudpodbinding", "one", "-n", namespace)
    assert "it has a machine" in shown


async def test_equal_events_are_one_with_a_count(kube: Kube, namespace):
    pod = await kube.create(paths.pods(namespace), a_pod())
    async with recording(kube, repeat_s=0.0) as (recorder, clock):
        for _ in range(3):
            recorder.note(pod, type="Warning", reason="Again", message="the same")
            await recorder.flush()
            clock.seconds += 10

        (event,) = await written(kube, namespace)

    assert event["count"] == 3
    assert event["lastTimestamp"] > event["firstTimestamp"]


async def test_a_count_is_not_written_at_every_repetition(kube: Kube, namespace):
    """Writes are the budget: a reason that repeats a thousand times costs two."""
    pod = await kube.create(paths.pods(namespace), a_pod())
    async with recording(kube, repeat_s=0.3) as (recorder, clock):
        for _ in range(1000):
            recorder.note(pod, type="Warning", reason="Again", message="the same")
        await recorder.flush()
        for _ in range(1000):
            recorder.note(pod, type="Warning", reason="Again", message="the same")
        clock.seconds += 1
        await until(lambda: recorder.written == 2)

        (event,) = await written(kube, namespace)
        assert event["count"] == 2000


async def test_the_same_event_much_later_is_a_new_one(kube: Kube, namespace):
    pod = await kube.create(paths.pods(namespace), a_pod())
    async with recording(kube) as (recorder, clock):
        for _ in range(2):
            recorder.note(pod, type="Normal", reason="Started", message="the same")
            await recorder.flush()
            clock.seconds += events.SAME_FOR_S + 1

    assert len(await written(kube, namespace)) == 2


async def test_many_messages_of_one_reason_share_an_event(kube: Kube, namespace):
    pod = await kube.create(paths.pods(namespace), a_pod())
    async with recording(kube, repeat_s=0.0) as (recorder, _):
        for n in range(50):
            recorder.note(pod, type="Warning", reason="Failed", message=f"attempt {n}")
        await recorder.flush()

    found = await written(kube, namespace)
    assert len(found) == events.VARIANTS + 1
    shared = next(each for each in found if each["message"].startswith("(and similar)"))
    assert shared["message"].endswith("attempt 49")
    assert shared["count"] == 50 - events.VARIANTS


async def test_one_object_cannot_flood(kube: Kube, namespace):
    pod = await kube.create(paths.pods(namespace), a_pod())
    async with recording(kube, burst=3) as (recorder, clock):
        for n in range(10):
            recorder.note(pod, type="Warning", reason=f"Reason{n}", message="x")
        await recorder.flush()
        assert len(await written(kube, namespace)) == 3
        assert recorder.dropped == 7

        clock.seconds += 60
        recorder.note(pod, type="Warning", reason="Later", message="x")
        await recorder.flush()
        assert len(await written(kube, namespace)) == 4


async def test_a_full_queue_drops_the_oldest_and_nobody_waits(kube: Kube, namespace):
    pods = [await kube.create(paths.pods(namespace), a_pod(f"p{n}")) for n in range(5)]
    recorder = Recorder(kube, queue=3)
    for pod in pods:  # nothing runs yet: note only remembers
        recorder.note(pod, type="Normal", reason="Hello", message="x")
    assert recorder.dropped == 2

    task = asyncio.create_task(recorder.run())
    await recorder.flush()
    task.cancel()
    await asyncio.wait((task,))

    found = {each["involvedObject"]["name"] for each in await written(kube, namespace)}
    assert found == {"p2", "p3", "p4"}


async def test_an_event_that_the_server_forgot_is_made_again(kube: Kube, namespace):
    pod = await kube.create(paths.pods(namespace), a_pod())
    async with recording(kube, repeat_s=0.0) as (recorder, _):
        recorder.note(pod, type="Normal", reason="Started", message="x")
        await recorder.flush()
        (event,) = await written(kube, namespace)
        await kube.delete(paths.event(namespace, event["metadata"]["name"]))
        recorder.note(pod, type="Normal", reason="Started", message="x")
        await recorder.flush()

    (again,) = await written(kube, namespace)
    assert again["count"] == 2


async def test_a_refused_event_is_dropped_and_the_next_is_written(kube: Kube, namespace):
    pod = await kube.create(paths.pods(namespace), a_pod())
    nowhere = ObjectRef(api_version="v1", kind="Pod", namespace="no-such-namespace", name="p", uid="u")
    async with recording(kube) as (recorder, _):
        recorder.note(nowhere, type="Normal", reason="Lost", message="x")
        recorder.note(pod, type="Normal", reason="Found", message="y" * 5000)
        await recorder.flush()

    (event,) = await written(kube, namespace)
    assert event["reason"] == "Found"
    assert len(event["message"]) == events.MESSAGE_CHARS
    assert recorder.dropped == 1


async def test_a_burst_that_fares_well_spends_few_writes_on_events_and_warnings_are_all_told(
    kube: Kube, namespace
):
    pods = [await kube.create(paths.pods(namespace), a_pod(f"p{n}")) for n in range(4)]
    async with recording(kube, normal_burst=2) as (recorder, _):
        for pod in pods:
            recorder.note(pod, type="Normal", reason="Fine", message="x")
            recorder.note(pod, type="Warning", reason="Bad", message="x")
        await recorder.flush()

    reasons = [each["reason"] for each in await written(kube, namespace)]
    assert (reasons.count("Fine"), reasons.count("Bad")) == (2, 4)
