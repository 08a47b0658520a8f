"""SIGKILL at each step of renting for a gated Pod, one after another: the next controller goes on.

One Pod lives through all of them but the last: what each controller finds is what the one before it has left.
"""

import pytest

from app.api import keys
from tests.chaos.test_kill_matrix import RENTING
from tests.chaos.world import World

# A machine that was sent for is found, not recorded as an answer: that step has a Pod of its own.
CHAIN, LAST = RENTING[:-1], RENTING[-1]


@pytest.mark.behaviour(149, 150, 151, 152)
async def test_killed_at_every_step_while_a_machine_is_reserved_the_gate_stays_and_no_second_one_is_rented(
    world: World,
):
    assert LAST == "record.after"
    controller = world.controller()
    await world.start(controller, die_at=CHAIN[0], keep=False)
    await world.create_pod("bare", owned=False)
    for step, following in zip(CHAIN, (*CHAIN[1:], None), strict=True):
        await world.died(controller)
        assert await _gates(world, "bare") == [keys.SCHEDULING_GATE], step
        assert len(await world.cloud.machines()) == (step == "send.after"), step
        await world.start(controller, keep=following is None, die_at=following)
    await world.until_ready("bare")
    await world.one_machine_for_each_pod(ever=1)

    await world.stop(controller)
    await world.start(controller, die_at=LAST, keep=False)
    await world.create_pod("last", owned=False)
    await world.died(controller)
    assert await _gates(world, "last") == [keys.SCHEDULING_GATE]
    await world.start(controller)
    await world.until_ready("bare", "last")

    await world.one_machine_for_each_pod(ever=2)
    await world.each_attempt_was_sent_once()
    await world.delete_pods("bare", "last")
    await world.until_nothing_is_left()


async def _gates(world: World, pod: str) -> list[str]:
    found = await world.pod(pod)
    return [gate["name"] for gate in found["spec"].get("schedulingGates") or ()]
