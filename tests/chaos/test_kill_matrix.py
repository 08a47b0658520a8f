"""SIGKILL before and after each step of renting and of ending, then a restart: nothing doubled, nothing left.

A test takes one step of each half: the controller dies while it rents, the next one finishes that and dies
while it ends, the third finishes that. In one pass tokens mean nothing and one Pod is rented for; in the
other tokens count, and three Pods are under way when it dies. In both, lists and gets lag a second behind.
"""

import pytest

from app.provisioning import steps
from tests.chaos.world import CLOUD, TOKENS, World

RENTING = (
    "intent.before",
    "intent.after",
    "mark.before",
    "mark.after",
    "fence.before",
    "fence.after",
    "send.after",
    "record.after",
)
ENDING = (
    "ending.before",
    "ending.after",
    "terminate.before",
    "terminate.after",
    "ended.before",
    "ended.after",
    "finalizer.before",
    "finalizer.after",
)


def test_every_step_has_its_kill():
    assert {*RENTING, *ENDING} == set(steps.NAMES)


@pytest.mark.behaviour(149, 150, 151, 152)
@pytest.mark.parametrize("scenario", [CLOUD], ids=["tokens mean nothing"])
@pytest.mark.parametrize(("renting", "ending"), list(zip(RENTING, ENDING, strict=True)))
async def test_killed_at_a_step_one_pod_gets_one_machine_and_gives_it_back(
    world: World, renting: str, ending: str
):
    await _die_twice(world, renting, ending, pods=["only"])
    await world.each_attempt_was_sent_once()


# What is on its way when the others are under way too: before the mark, nothing is.
@pytest.mark.parametrize("scenario", [TOKENS], ids=["tokens count"])
@pytest.mark.parametrize(
    ("renting", "ending"),
    [
        ("mark.after", "ending.after"),
        ("fence.after", "terminate.after"),
        ("send.after", "ended.before"),
        ("record.after", "finalizer.before"),
    ],
)
async def test_killed_at_a_step_three_pods_get_one_machine_each_and_give_it_back(
    world: World, renting: str, ending: str
):
    await _die_twice(world, renting, ending, pods=["first", "second", "third"])


async def _die_twice(world: World, renting: str, ending: str, *, pods: list[str]) -> None:
    controller = world.controller()
    await world.start(controller, die_at=renting, keep=False)
    await world.create_pods(*pods)
    await world.died(controller)

    await world.start(controller, die_at=ending, keep=False)
    await world.until_ready(*pods)
    await world.one_machine_for_each_pod(ever=len(pods))

    await world.delete_pods(*pods)
    await world.died(controller)

    await world.start(controller, wait=False)
    await world.until_nothing_is_left()
    assert len(await world.cloud.machines()) == len(pods)
    await world.kill(controller)
