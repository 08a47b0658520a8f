"""A part of the process that is over, or stands still, while the others go on."""

import asyncio
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from app import duties
from app.duties import DutyEnded, Watches, watch_over
from app.processes import free_ports
from app.telemetry.health import Health


async def _lasts() -> None:
    await asyncio.Event().wait()


async def _returns() -> None:
    return


async def _raises() -> None:
    raise LookupError


@pytest.mark.parametrize("how", ["returns", "cancelled", "raises"])
async def test_fc_045_a_duty_that_is_over_ends_all_of_them(how: str):
    """Of a task group alone, the first two would be seen by nobody."""

    async def all_of_them() -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_lasts(), name="lasts")]
            work = {"returns": _returns, "cancelled": _lasts, "raises": _raises}[how]
            tasks.append(group.create_task(work(), name="odd"))
            if how == "cancelled":
                tasks[-1].cancel()
            await watch_over(tasks)

    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(5):
            await all_of_them()

    assert any(
        isinstance(error, LookupError if how == "raises" else DutyEnded) for error in caught.value.exceptions
    )
    if how != "raises":
        assert "odd" in str(caught.value.exceptions[0])


async def test_fc_045_a_watch_that_stands_still_is_told_to_whoever_can_restart_the_process():
    watches = Watches()
    caches: Any = [
        SimpleNamespace(path="/api/v1/pods", silent_s=1.0, unanswered_s=1.0),
        SimpleNamespace(path="/x", silent_s=2.0, unanswered_s=2.0),
    ]
    (port,) = free_ports(1)
    health = Health(f"127.0.0.1:{port}", checks={}, shown={}, live={"watches": watches.stale})
    serving = asyncio.create_task(health.run())

    async def asked(path: str) -> tuple[int, str]:
        async with aiohttp.ClientSession() as http:
            for _ in range(200):
                try:
                    async with http.get(f"http://127.0.0.1:{port}{path}") as answer:
                        return answer.status, await answer.text()
                except aiohttp.ClientConnectorError:
                    await asyncio.sleep(0.02)
        raise AssertionError("nobody answers")

    try:
        with watches.of_a_term(caches):
            assert await asked("/healthz") == (200, "ok\n")
            caches[0].silent_s = caches[0].unanswered_s = duties.STALE_S + 1
            status, text = await asked("/healthz")
            assert 'nebula_watch_silence_seconds{watch="/api/v1/pods"} 301.0' in (await asked("/metrics"))[1]
        after = await asked("/healthz")
    finally:
        serving.cancel()
        await asyncio.wait([serving])

    assert status == 503
    assert text == "watches: nothing was heard of /api/v1/pods for 301 s\n"
    assert after == (200, "ok\n")  # whoever does not lead has no watches


def test_fc_045_a_watch_that_the_server_refuses_ends_nobody():
    watches = Watches()
    refused: Any = SimpleNamespace(path="/x", silent_s=duties.STALE_S + 1, unanswered_s=3.0)

    with watches.of_a_term([refused]):
        assert watches.stale() is None
