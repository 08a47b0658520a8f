"""Everything that Postgres may become under live Pods: no Pod changes, nothing is rented, ends go on.

And when it is back, what waited is rented once, and what had ended is put on record.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from tests.chaos import store_faults
from tests.chaos.world import QUICK, World
from tests.support.proxy import Proxy

Fault = Callable[[World, Proxy], AbstractAsyncContextManager[None]]
# Silent connections are given up after this, and not after ten seconds.
IMPATIENT = QUICK | {"NEBULA_DATABASE_TIMEOUT_S": "2"}


@asynccontextmanager
async def stopped(world: World, _proxy: Proxy) -> AsyncIterator[None]:
    await asyncio.to_thread(world.postgres.stop)
    yield
    await asyncio.to_thread(world.postgres.start)


@asynccontextmanager
async def read_only(world: World, _proxy: Proxy) -> AsyncIterator[None]:
    async with store_faults.read_only(world):
        yield


@asynccontextmanager
async def without_connections(world: World, _proxy: Proxy) -> AsyncIterator[None]:
    async with store_faults.without_connections(world):
        yield


@asynccontextmanager
async def full(world: World, _proxy: Proxy) -> AsyncIterator[None]:
    async with store_faults.full(world):
        yield


@asynccontextmanager
async def silent(_world: World, proxy: Proxy) -> AsyncIterator[None]:
    """Half open: nobody closes a connection, and nothing passes on old ones or new ones."""
    proxy.stall()
    yield
    await proxy.cut()
    proxy.flow()


FAULTS: tuple[Fault, ...] = (stopped, read_only, without_connections, full, silent)


@pytest.fixture
async def proxy(world: World) -> AsyncIterator[Proxy]:
    """The controller's way to its database; as an ordinary user of it."""
    await store_faults.let_in(world)
    async with Proxy.running(world.postgres_address) as running:
        yield running


def url_through(proxy: Proxy, world: World) -> str:
    return f"postgresql://{store_faults.ROLE}@127.0.0.1:{proxy.port}/{world.database}?sslmode=disable"


@pytest.mark.field_case("FC-094", "FC-097")
async def test_a_store_that_cannot_be_used_changes_no_pod_and_rents_nothing_and_ends_go_on(
    world: World, proxy: Proxy
):
    """One fault after another, under one leader and one Pod that stays."""
    controller = world.controller(options=IMPATIENT, url=url_through(proxy, world))
    await world.start(controller)
    await world.create_pods("kept", "deleted-0")
    await world.until_ready("kept", "deleted-0")
    before = (await world.pod("kept"))["status"]

    for number, fault in enumerate(FAULTS):
        name, deleted, machines = fault.__name__, f"deleted-{number}", 2 + number
        async with fault(world, proxy):
            await world.create_pod(waiting := f"deleted-{number + 1}")
            await world.delete_pods(deleted)
            await world.until_gone(deleted)
            lists = (await world.cloud.truth())["calls"]["list"]
            await world.cloud.until(
                lambda truth, lists=lists: truth["calls"]["list"] > lists + 10,
                within_s=60,
                what=f"{name}: ten more lists",
            )
            assert len(await world.cloud.creates()) == machines, name
            assert waiting not in await world.ready(), name
            assert (await world.pod("kept"))["status"] == before, name
            assert "deletionTimestamp" in (await world.claim_of(deleted))["metadata"], name

        await world.until_ready(waiting, "kept")
        await world.until(f"{name}: the deleted Pod's claim goes", lambda: _claims_are(world, 2))
        assert (await world.pod("kept"))["status"] == before, name
        await world.one_machine_for_each_pod(ever=machines + 1)
    await world.each_attempt_was_sent_once()
    await world.delete_pods(f"deleted-{len(FAULTS)}", "kept")
    await world.until_nothing_is_left()


@pytest.mark.field_case("FC-094")
async def test_half_open_connections_to_the_store_are_given_up_and_nothing_doubles(
    world: World, proxy: Proxy
):
    controller = world.controller(options=IMPATIENT, url=url_through(proxy, world))
    await world.start(controller)
    await world.create_pod("one")
    await world.until_ready("one")
    before = (await world.pod("one"))["status"]

    for name in ("two", "three"):
        assert proxy.silence() > 0
        await world.create_pod(name)
        await world.until_ready(name)

    assert (await world.pod("one"))["status"] == before
    await world.one_machine_for_each_pod(ever=3)
    await world.each_attempt_was_sent_once()
    await world.delete_pods("one", "two", "three")
    await world.until_nothing_is_left()


async def _claims_are(world: World, count: int) -> bool:
    return len(await world.claims()) == count
