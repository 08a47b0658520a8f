"""A controller killed again and again under a cloud that loses answers: it converges, the books are clean."""

import random
from typing import Any

import pytest

from tests.chaos.world import CLOUD, TOKENS, World

KILLS = 6
PODS = 6


@pytest.mark.parametrize(
    ("scenario", "seed"), [(CLOUD, 1), (TOKENS, 2)], ids=["tokens mean nothing", "tokens count"]
)
@pytest.mark.field_case("FC-057", "FC-109")
async def test_kills_under_a_flaky_cloud_double_nothing_and_leave_nothing(
    world: World, scenario: dict[str, Any], seed: int
):
    rng = random.Random(seed)
    controller = world.controller()
    await world.start(controller, keep=False)
    await world.create_deployment(replicas=0)

    await world.scale(PODS)
    for _ in range(KILLS // 2):
        await _live_a_moment(world, rng)
        await world.kill(controller)
        await world.start(controller, keep=False, wait=False)
    await world.cloud.clear_faults()
    world.kept.append(controller)
    await world.until_ready_count(PODS)
    await world.until("a claim for each Pod, and no more", lambda: _settled(world))
    await world.one_machine_for_each_pod()

    await world.scale(0)
    world.unkeep(controller)
    for _ in range(KILLS - KILLS // 2):
        await _live_a_moment(world, rng)
        await world.kill(controller)
        await world.start(controller, keep=False, wait=False)
    await world.cloud.clear_faults()
    world.kept.append(controller)
    await world.until_nothing_is_left()
    if scenario is CLOUD:
        await world.each_attempt_was_sent_once()


async def _live_a_moment(world: World, rng: random.Random) -> None:
    """Some faults for the next calls, and a number of the cloud's calls later the moment is over."""
    for _ in range(2):
        await _add_fault(world, rng)
    calls = sum((await world.cloud.truth())["calls"].values()) + rng.randint(2, 9)
    await world.until(
        "the cloud is called", lambda: _called(world, calls), within_s=60
    )  # a moment in events, so that a slow machine dies at as many places


async def _called(world: World, calls: int) -> bool:
    return sum((await world.cloud.truth())["calls"].values()) >= calls


async def _add_fault(world: World, rng: random.Random) -> None:
    kind = rng.choice(["lost", "lost", "cut", "status", "status", "throttle", "hide"])
    verb = rng.choice(["create", "create", "list", "get", "terminate", "terminate"])
    match kind:
        case "hide":
            await world.cloud.add_fault("hide", verb="list", times=rng.randint(1, 3))
        case "status":
            when = rng.choice(["before", "after"])
            await world.cloud.add_fault("status", verb=verb, status=500, when=when, skip=rng.randint(0, 2))
        case "throttle":
            await world.cloud.add_fault("throttle", verb=verb, retry_after_s=0.2)
        case _:
            await world.cloud.add_fault(kind, verb=verb, skip=rng.randint(0, 2))


async def _settled(world: World) -> bool:
    return len(await world.claims()) == len(await world.cloud.alive()) == len(await world.pods())
