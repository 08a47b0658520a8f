"""The database is put back to a moment before an intent whose machine lives."""

import pytest

from app.kube.client import Obj
from tests.chaos.world import World


@pytest.mark.behaviour(401)
async def test_machines_that_the_restored_rows_do_not_know_are_adopted_not_doubled_and_sweeps_are_held(
    world: World,
):
    """Of one such machine the claim's status tells; of the other only the mark, since its controller died."""
    controller = world.controller()
    await world.start(controller)
    await world.create_pod("known")
    await world.until_ready("known")
    await world.stop(controller)
    backup = await world.copy_database("backup")

    await world.start(controller)
    await world.create_pod("forgotten")
    await world.until_ready("forgotten")
    await world.stop(controller)
    await world.start(controller, keep=False, die_at="send.after")
    await world.create_pod("unrecorded")
    await world.died(controller)
    assert len(await world.cloud.alive()) == 3
    before = await _statuses(world, "known", "forgotten")

    world.database = backup
    restored = world.controller("restored")
    await world.start(restored)
    await world.until_ready("known", "forgotten", "unrecorded")

    await world.until("sweeps are held", lambda: _held(world))
    await world.until("each machine has its row", lambda: _runs(world, 3))
    await world.one_machine_for_each_pod(ever=3)
    assert await _statuses(world, "known", "forgotten") == before
    await world.create_pod("new")
    await world.until_ready("new")  # what is held are the sweeps

    sequences = await world.rows("select sequence from provision_attempt order by created_at")
    assert sequences[-1]["sequence"] == max(row["sequence"] for row in sequences) > 3
    await world.one_machine_for_each_pod(ever=4)
    await world.each_attempt_was_sent_once()
    await world.delete_pods("known", "forgotten", "unrecorded", "new")
    await world.until_nothing_is_left()
    assert await _held(world)  # neither an adoption nor an end has lifted it: a person does


async def _held(world: World) -> bool:
    return bool(await world.rows("select 1 from installation where held_since is not null"))


async def _runs(world: World, count: int) -> bool:
    return len(await world.rows("select 1 from run")) == count


async def _statuses(world: World, *pods: str) -> list[Obj]:
    return [(await world.pod(pod))["status"] for pod in pods]
