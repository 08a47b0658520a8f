"""SIGKILL before and after each step of renting and of ending, then a restart: nothing doubled, nothing left.

A test takes one step of each half: the controller dies while it rents, the next one finishes that and dies
while it ends, the third finishes that. In one pass tokens mean nothing and one Pod is rented for; in the
other tokens count, and three Pods are under way when it dies. In both, lists and gets lag a second behind.
"""

import pytest

from app.provisioning import steps
from tests.chaos.world import CLOUD, PATIENT, TOKENS, World

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
@pytest.mark.field_case("FC-002")
async def test_orphans_01_killed_at_a_step_one_pod_gets_one_machine_and_gives_it_back(
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
@pytest.mark.field_case("FC-002")
async def test_killed_at_a_step_three_pods_get_one_machine_each_and_give_it_back(
    world: World, renting: str, ending: str
):
    await _die_twice(world, renting, ending, pods=["first", "second", "third"])


@pytest.mark.parametrize(
    "scenario",
    [{**CLOUD, "lag": {"list_create_s": 7.0, "get_create_s": 7.0}}],
    ids=["lists lag longer than a restart takes"],
)
async def test_a_machine_that_no_list_shows_yet_is_waited_for(world: World):
    """Rows and mark say that it may be there; three lists without it do not say that it is not."""
    controller = world.controller(options=PATIENT | {"NEBULA_SETTLE_AFTER_S": "10"})
    await world.start(controller, die_at="send.after", keep=False)
    await world.create_pod("only")
    await world.died(controller)
    lists = (await world.cloud.truth())["calls"]["list"]

    await world.start(controller)
    await world.cloud.until(lambda truth: truth["calls"]["list"] > lists + 3, within_s=30)
    await world.until_ready("only")

    await world.one_machine_for_each_pod(ever=1)
    await world.each_attempt_was_sent_once()
    await world.delete_pods("only")
    await world.until_nothing_is_left()


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
