"""The same kills over RunPod's own protocol: creates are never idempotent there, and lists lag."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from hack.controller import Controller
from tests.chaos.test_kill_matrix import _die_twice
from tests.chaos.world import World
from tests.support.clouds import FakeCloud

RUNPOD: dict[str, Any] = {
    "cloud": "runpod",
    "account": "acct-1",
    "life": {"boot_s": 0.3, "exit_restarts": True},
    "lag": {"list_create_s": 1.0, "get_create_s": 1.0, "list_terminate_s": 0.5},
    "billing": {"states": ["queued", "booting", "running"]},
    "quirks": {"lifecycle": "observed"},
    "offers": [{"accelerator": "H100", "counts": [1], "usd_per_hour": {"SECURE": "4.00"}}],
}


@pytest.fixture(scope="module")
async def the_cloud(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FakeCloud]:
    folder = tmp_path_factory.mktemp("runpod")
    async with FakeCloud.running(folder, scenario=RUNPOD, simulator="runpod") as running:
        yield running


@pytest.fixture
def scenario() -> dict[str, Any]:
    return RUNPOD


@pytest.mark.parametrize(
    ("renting", "ending"),
    [
        ("intent.after", "ending.after"),
        ("mark.after", "terminate.before"),
        ("send.after", "terminate.after"),
        ("record.after", "ended.before"),
    ],
)
async def test_killed_at_a_step_a_pod_on_runpod_gets_one_machine_and_gives_it_back(
    world: World, renting: str, ending: str
):
    await _die_twice(world, renting, ending, pods=["only"])
    await world.each_attempt_was_sent_once()


async def test_answers_that_say_nothing_after_the_effect_make_no_second_machine(world: World):
    """RunPod has made pods and then answered 500: the pod is found by its identity."""
    controller = world.controller()
    await world.start(controller)
    faults = ("lost", "status", "garbage", "error_body")
    for ever, fault in enumerate(faults, 1):
        await world.cloud.add_fault(fault, verb="create", when="after")

        await world.create_pods(name := fault.replace("_", "-"))
        await world.until_ready(name)

        await world.one_machine_for_each_pod(ever=ever)
    await world.each_attempt_was_sent_once()
    await world.delete_pods(*(fault.replace("_", "-") for fault in faults))
    await world.until_nothing_is_left()


async def test_a_pod_that_is_renamed_before_its_create_was_answered_is_neither_doubled_nor_lost(world: World):
    """It may as well be a person's copy: nothing is ended, and nothing else rented, until they say so."""
    controller = world.controller()
    await world.start(controller)
    await world.cloud.add_fault("lost", verb="create", when="after")
    lists = await world.cloud.pause(verb="list")
    await world.create_pods("only")
    await world.until("it is rented", lambda: _machines(world, 1))
    (machine,) = await world.cloud.alive()
    await world.cloud.rename(machine["id"], "my favourite")
    await world.cloud.resume(lists)

    await world.until("who asks is told", lambda: _told(controller, "under another name"))
    await world.delete_pods("only")
    await world.until("the claim is being released", lambda: _releasing(world))
    await world.until("the claim says what it waits for", lambda: _in_doubt(world))
    calls = (await world.cloud.truth())["calls"]["list"]
    await world.until("lists show it again and again", lambda: _listed(world, calls + 10))
    (there,) = await world.cloud.alive()
    assert (there["id"], there["terminates"]) == (machine["id"], 0)
    assert len(await world.claims()) == 1
    await world.each_attempt_was_sent_once()

    await world.cloud.rename(machine["id"], machine["name"])

    await world.until_nothing_is_left()


async def _machines(world: World, count: int) -> bool:
    return len(await world.cloud.alive()) == count


async def _listed(world: World, count: int) -> bool:
    return int((await world.cloud.truth())["calls"]["list"]) >= count


async def _told(controller: Controller, text: str) -> bool:
    return text in controller.log.read_text()


async def _releasing(world: World) -> bool:
    claims = await world.claims()
    return bool(claims) and all("deletionTimestamp" in claim["metadata"] for claim in claims)


async def _in_doubt(world: World) -> bool:
    (claim,) = await world.claims()
    conditions = (claim.get("status") or {}).get("conditions") or []
    return ("Released", "False", "MachineInDoubt") in [
        (each["type"], each["status"], each["reason"]) for each in conditions
    ]
