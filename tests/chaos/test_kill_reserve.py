"""SIGKILL at each step of renting for a gated Pod: the next controller goes on from the claim."""

import pytest

from app.api import keys
from tests.chaos.test_kill_matrix import RENTING
from tests.chaos.world import World


@pytest.mark.behaviour(149, 150, 151, 152)
@pytest.mark.parametrize("step", RENTING)
async def test_killed_while_a_machine_is_reserved_the_gate_stays_and_no_second_one_is_rented(
    world: World, step: str
):
    controller = world.controller()
    await world.start(controller, die_at=step, keep=False)
    await world.create_pod("bare", owned=False)
    await world.died(controller)
    gates = (await world.pod("bare"))["spec"].get("schedulingGates") or ()
    assert [gate["name"] for gate in gates] == [keys.SCHEDULING_GATE]

    await world.start(controller)
    await world.until_ready("bare")
    await world.one_machine_for_each_pod(ever=1)
    await world.each_attempt_was_sent_once()

    await world.delete_pods("bare")
    await world.until_nothing_is_left()
