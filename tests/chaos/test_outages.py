"""The API server or Postgres goes and comes back under live Pods: nothing changes, nothing is doubled."""

import asyncio

import pytest

from app.kube.client import Obj
from tests.chaos.world import QUICK, World


async def test_an_api_server_that_restarts_changes_no_pod_and_rents_and_ends_nothing(world: World):
    """Longer than the Lease lasts, so that leadership is lost and won again under the live Pods."""
    plane = world.cluster.control_plane
    assert plane is not None
    controller = world.controller(options=QUICK)
    await world.start(controller)
    await world.create_pods("one", "two", "three")
    await world.until_ready("one", "two", "three")
    before, machines, epoch = await _statuses(world), await _ids(world), await world.lease_epoch()

    await asyncio.to_thread(plane.stop_apiserver)
    await _leadership_ends(world)
    assert await _ids(world) == machines
    await asyncio.to_thread(plane.start_apiserver)

    await world.create_pod("after")
    await world.until_ready("after")
    assert await world.lease_epoch() > epoch
    after = await _statuses(world)
    assert {name: after[name] for name in before} == before
    await world.one_machine_for_each_pod(ever=4)
    assert set(machines) <= set(await _ids(world))

    await world.delete_pods("one", "two", "three", "after")
    await world.until_nothing_is_left()


@pytest.mark.behaviour(400)
@pytest.mark.field_case("FC-094")
async def test_postgres_killed_under_live_pods_changes_none_of_them_and_new_ones_wait_for_it(world: World):
    controller = world.controller()
    await world.start(controller)
    await world.create_pods("one", "two")
    await world.until_ready("one", "two")
    before, machines = await _statuses(world), await _ids(world)

    held = await world.cloud.pause(verb="create", when="after")
    await world.create_pod("renting")  # its create is on its way when Postgres goes
    await world.cloud.until(lambda truth: len(truth["creates"]) == 3, within_s=60)
    await asyncio.to_thread(world.postgres.kill)
    await world.cloud.resume(held)
    await world.create_pod("waiting")
    await world.delete_pods("one")
    await world.until_gone("one")
    assert len(await world.cloud.creates()) == 3
    await asyncio.to_thread(world.postgres.start)

    await world.until_ready("two", "renting", "waiting")
    after = await _statuses(world)
    assert after["two"] == before["two"]
    assert set(machines) & set(await _ids(world))
    await world.until_gone("one")
    await world.until("the claim of the deleted Pod is gone", lambda: _claims_are(world, 3))
    await world.one_machine_for_each_pod(ever=4)
    await world.each_attempt_was_sent_once()

    await world.delete_pods("two", "renting", "waiting")
    await world.until_nothing_is_left()


async def test_postgres_restarted_while_pods_end_and_begin_loses_and_doubles_nothing(world: World):
    """In order, twice, with three Pods coming and three going at each time."""
    controller = world.controller()
    await world.start(controller)
    await world.create_pods("a1", "a2", "a3")
    await world.until_ready("a1", "a2", "a3")

    for old, new in (("a", "b"), ("b", "c")):
        await asyncio.gather(
            world.create_pods(*(f"{new}{n}" for n in (1, 2, 3))),
            world.delete_pods(*(f"{old}{n}" for n in (1, 2, 3))),
            asyncio.to_thread(world.postgres.restart),
        )
        await world.until_ready(*(f"{new}{n}" for n in (1, 2, 3)))
        await world.until("the old claims are gone", lambda: _claims_are(world, 3))
        await world.one_machine_for_each_pod()

    await world.each_attempt_was_sent_once()
    assert not await world.rows("select 1 from installation where held_since is not null")
    await world.delete_pods("c1", "c2", "c3")
    await world.until_nothing_is_left()


async def _statuses(world: World) -> dict[str, Obj]:
    """The whole status of each Pod: a phase, condition, time or restart count that moved would show."""
    return {pod["metadata"]["name"]: pod["status"] for pod in await world.pods()}


async def _ids(world: World) -> list[str]:
    return sorted(machine["id"] for machine in await world.cloud.alive())


async def _claims_are(world: World, count: int) -> bool:
    return len(await world.claims()) == count


async def _leadership_ends(world: World) -> None:
    """The controller says so itself, or has ended because of it."""
    (controller,) = world.controllers

    def lost() -> bool:
        return not controller.running or "leadership lost" in controller.log.read_text()

    kept, world.kept = world.kept, []  # without an API server a start could only fail
    await world.until("the leader stands down", lost)
    world.kept = kept
