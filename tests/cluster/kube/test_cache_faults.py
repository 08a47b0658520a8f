"""The live copy before a server that does what no healthy one does on demand."""

import asyncio

import psutil
import pytest

from app.kube.cache import Cache
from app.kube.client import Kube
from tests.cluster.kube.following import Diary, running
from tests.cluster.kube.scripted import PATH, kubeconfig_for, refusal
from tests.cluster.kube.waiting import until

QUICK = {"base_delay_s": 0.01, "max_delay_s": 0.05}
EXPIRED = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}


@pytest.mark.field_case("FC-041")
async def test_an_expired_version_inside_the_stream_brings_a_new_list(scripted, told):
    scripted.put("stays")
    scripted.put("goes")
    cache = Cache(told, PATH, **QUICK)
    diary = Diary(cache)
    async with running(cache):
        await scripted.watched()
        scripted.remove("goes")
        scripted.put("comes")
        scripted.say("ERROR", EXPIRED)
        await until(lambda: cache.lists == 2)

    assert diary.lines == ["+stays", "+goes", "+comes", "-goes"]


@pytest.mark.field_case("FC-041")
async def test_an_expired_version_as_http_status_brings_a_new_list(scripted, told):
    scripted.put("a")
    scripted.watch_refusals.append(refusal(410, "Expired"))
    cache = Cache(told, PATH, **QUICK)
    async with running(cache):
        await scripted.watched(times=2)

    assert cache.lists == 2


@pytest.mark.field_case("FC-041")
async def test_a_server_that_expires_every_watch_is_asked_ever_more_seldom(scripted, told):
    scripted.refuse_every_watch = 410
    pauses: list[float] = []
    enough = asyncio.Event()

    async def sleep(delay_s: float) -> None:
        pauses.append(delay_s)
        if len(pauses) == 12:
            enough.set()
        await asyncio.sleep(0)

    cache = Cache(told, PATH, base_delay_s=1.0, max_delay_s=60.0, sleep=sleep)
    async with running(cache):
        await asyncio.wait_for(enough.wait(), timeout=20)
        watches = cache.watches

    assert watches <= len(pauses) + 1  # never two in a row without a pause
    assert pauses[0] <= 1.0
    assert min(pauses[7:12]) >= 30.0


async def test_fc_045_a_watch_that_is_refused_is_stale_and_no_reason_for_a_restart(scripted, told):
    """The next process would be refused as well."""
    scripted.refuse_every_watch = 403
    enough = asyncio.Event()

    async def sleep(delay_s: float) -> None:
        enough.set()
        await asyncio.Event().wait()

    cache = Cache(told, PATH, sleep=sleep)
    async with running(cache):
        await asyncio.wait_for(enough.wait(), timeout=20)

        assert cache.unanswered_s < cache.silent_s


async def test_a_server_that_ends_every_watch_at_once_is_asked_ever_more_seldom(scripted, told):
    pauses: list[float] = []

    async def sleep(delay_s: float) -> None:
        pauses.append(delay_s)
        await asyncio.sleep(0)

    cache = Cache(told, PATH, base_delay_s=1.0, max_delay_s=60.0, sleep=sleep)
    async with running(cache):
        for n in range(1, 9):
            await scripted.watched(times=n)
            scripted.end_watches()
            await until(lambda n=n: len(pauses) >= n)

    assert all(later > 0.99 * earlier for earlier, later in zip(pauses, pauses[2:], strict=False))
    assert pauses[-1] >= 30.0


async def test_a_watch_that_lived_is_begun_again_without_a_pause(scripted, told):
    pauses: list[float] = []

    async def sleep(delay_s: float) -> None:
        pauses.append(delay_s)

    cache = Cache(told, PATH, settled_s=0.0, sleep=sleep)
    async with running(cache):
        await scripted.watched()
        scripted.end_watches()
        await scripted.watched(times=2)

    assert pauses == []


async def test_fc_044_five_hundred_watches_leave_no_task_thread_or_socket_behind(scripted, told):
    cache = Cache(told, PATH, settled_s=0.0, **QUICK)
    process, seen = psutil.Process(), []
    async with running(cache):
        for n in range(1, 521):
            await scripted.watched(times=n)
            if n in (20, 520):
                seen.append((len(asyncio.all_tasks()), process.num_threads(), process.num_fds()))
            scripted.end_watches()

    (tasks, threads, fds), (tasks_later, threads_later, fds_later) = seen
    assert tasks_later <= tasks + 2
    assert threads_later <= threads + 1
    assert fds_later <= fds + 4


@pytest.mark.field_case("FC-041")
async def test_an_error_event_without_metadata_is_survived(scripted, told):
    cache = Cache(told, PATH, **QUICK)
    async with running(cache):
        await scripted.watched()
        scripted.say("ERROR", {"kind": "Status", "code": 500, "message": "etcd went away"})
        await scripted.watched(times=2)
        scripted.say("ADDED", scripted.put("a"))
        await until(lambda: len(cache) == 1)

    assert cache.lists == 1


async def test_a_version_that_the_server_keeps_refusing_is_given_up(scripted, told):
    scripted.watch_refusals.extend(refusal(500, "InternalError") for _ in range(4))
    cache = Cache(told, PATH, **QUICK)
    async with running(cache):
        await scripted.watched(times=5)

    assert cache.lists == 2


async def test_a_line_that_is_not_json_is_survived(scripted, told):
    cache = Cache(told, PATH, **QUICK)
    async with running(cache):
        await scripted.watched()
        scripted.say_raw(b'{"type": "ADDED", "obj')
        await scripted.watched(times=2)
        scripted.say("ADDED", scripted.put("a"))
        await until(lambda: len(cache) == 1)


async def test_an_object_of_eight_megabytes_arrives(scripted, told):
    cache = Cache(told, PATH, **QUICK)
    async with running(cache):
        await scripted.watched()
        scripted.say("ADDED", scripted.put("big", x="x" * (8 << 20)))
        await until(lambda: len(cache) == 1)

    assert cache.watches == 1


async def test_a_bookmark_moves_the_place_to_go_on_from(scripted, told):
    cache = Cache(told, PATH, **QUICK)
    async with running(cache):
        await scripted.watched()
        scripted.say("BOOKMARK", {"kind": "ConfigMap", "metadata": {"resourceVersion": "777"}})
        scripted.end_watches()
        await scripted.watched(times=2)

    assert [each.query["resourceVersion"] for each in scripted.watch_requests] == ["100", "777"]
    assert scripted.watch_requests[0].query["allowWatchBookmarks"] == "true"


async def test_a_new_list_tells_nothing_about_what_has_not_changed(scripted, told):
    scripted.put("a")
    cache = Cache(told, PATH, **QUICK)
    diary = Diary(cache)
    async with running(cache):
        await scripted.watched()
        scripted.say("ERROR", EXPIRED)
        await until(lambda: cache.lists == 2)

    assert diary.lines == ["+a"]


async def test_a_list_that_breaks_off_deletes_nothing(scripted, told):
    for n in range(4):
        scripted.put(f"n{n}")
    cache = Cache(told, PATH, page=2, **QUICK)
    diary = Diary(cache)
    async with running(cache):
        await scripted.watched()
        scripted.page_refusals["2"] = refusal(403, "Forbidden")
        scripted.say("ERROR", EXPIRED)
        await until(lambda: cache.lists == 2)

    assert not scripted.page_refusals
    assert not [line for line in diary.lines if line.startswith("-")]


async def test_a_handler_that_fails_stops_neither_the_others_nor_the_watch(scripted, told):
    def bad(old, new):
        raise RuntimeError("a bug")

    cache = Cache(told, PATH, **QUICK)
    cache.on_change(bad)
    diary = Diary(cache)
    async with running(cache):
        await scripted.watched()
        for name in ("a", "b"):
            scripted.say("ADDED", scripted.put(name))
        await until(lambda: diary.lines == ["+a", "+b"])

    assert cache.watches == 1


async def test_an_index_function_that_fails_leaves_the_object_readable(scripted, told):
    scripted.put("a")
    cache = Cache(told, PATH, **QUICK)
    cache.add_index("bad", lambda obj: [obj["no such field"]])
    async with running(cache):
        assert cache.get("default", "a") is not None
        assert cache.by_index("bad", "x") == []


@pytest.mark.field_case("FC-043")
async def test_a_token_that_rotated_is_read_again_and_every_watch_goes_on(scripted, tmp_path):
    """One stream's 401 must not end the others (they share a session)."""
    token = tmp_path / "token"
    token.write_text("first\n")
    scripted.token = "first"
    user = {"tokenFile": str(token)}
    async with await Kube.connect(kubeconfig=str(kubeconfig_for(scripted, tmp_path, user=user))) as kube:
        caches = [Cache(kube, PATH, **QUICK) for _ in range(3)]
        async with running(caches[0]), running(caches[1]), running(caches[2]):
            await scripted.watched(times=3)
            token.write_text("second\n")
            scripted.token = "second"
            scripted.end_watches()
            await until(lambda: len(scripted._watches) == 3 and len(scripted.watch_requests) >= 6)
            scripted.say("ADDED", scripted.put("a"))

            await until(lambda: all(len(cache) == 1 for cache in caches))
            assert all(cache.lists == 1 for cache in caches)


@pytest.mark.parametrize("code", [403, 429, 503])
async def test_a_refused_list_is_tried_again(scripted, told, code):
    scripted.put("a")
    scripted.refusals.extend(refusal(code, "No", retry_after="0") for _ in range(3))

    cache = Cache(told, PATH, **QUICK)
    async with running(cache):
        assert len(cache) == 1
