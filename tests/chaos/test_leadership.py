"""Leaders that die without a database, and leaders that stand still and wake up too late."""

import asyncio

import pytest

from app.processes import free_ports
from hack.controller import Controller
from tests.chaos.world import CLOUD, QUICK, TOKENS, World

# Long enough that what a stopped leader had under way still counts when the next one looks for it.
PAUSED = QUICK | {"NEBULA_SETTLE_AFTER_S": "12"}


async def test_a_leader_that_comes_without_a_database_ends_machines_and_rents_none(world: World):
    first, second = await _two_replicas(world, QUICK)
    await world.create_pods("kept", "deleted")
    await world.until_ready("kept", "deleted")
    machines, epoch = await world.cloud.machines(), await world.lease_epoch()
    kept_status = (await world.pod("kept"))["status"]

    await asyncio.to_thread(world.postgres.stop)
    await world.create_pod("waiting")
    world.unkeep(first)
    await asyncio.to_thread(first.kill)
    await world.until("the second leads", lambda: world.leads("second"))
    await world.delete_pods("deleted")
    await world.until_gone("deleted")

    # The machine is gone and so is the Pod; what proves the end, and what may rent, waits for the rows.
    await world.until("the deleted Pod's claim is being deleted", lambda: _is_leaving(world, "deleted"))
    assert len(await world.claims()) == 2
    assert "waiting" not in await world.ready()
    assert await world.cloud.creates() == {machine["name"]: 1 for machine in machines}
    assert (await world.pod("kept"))["status"] == kept_status

    await asyncio.to_thread(world.postgres.start)
    await world.until_ready("waiting", "kept")
    await world.until("one epoch on both sides", world.epoch_is_settled)
    assert await world.lease_epoch() > epoch + 1  # above the old leader's, and above what the Lease gave
    await world.until("the deleted Pod's claim goes", lambda: _claims_are(world, 2))
    await world.one_machine_for_each_pod(ever=3)
    assert (await world.pod("kept"))["status"] == kept_status

    await world.delete_pods("kept", "waiting")
    await world.until_nothing_is_left()
    assert second.running


@pytest.mark.parametrize(
    ("scenario", "when"),
    [(CLOUD, "before"), (CLOUD, "after"), (TOKENS, "before")],
    ids=["request held", "answer held", "request held, tokens count"],
)
@pytest.mark.field_case("FC-122")
async def test_a_leader_paused_in_the_middle_of_a_create_doubles_nothing(world: World, when: str):
    first, _ = await _two_replicas(world, PAUSED)
    held = await world.cloud.pause(verb="create", when=when)
    await world.create_pod("only")
    await world.cloud.until(lambda truth: bool(truth["creates"]), within_s=60, what="a create")
    world.unkeep(first)
    first.pause()
    (attempt,) = await world.rows("select outcome from provision_attempt")
    assert attempt["outcome"] is None  # no answer has reached it
    await world.until("the second leads", lambda: world.leads("second"))
    lists = (await world.cloud.truth())["calls"]["list"]
    await world.cloud.until(lambda truth: truth["calls"]["list"] > lists + 4, what="the second looks for it")
    await world.cloud.resume(held)

    await world.until_ready("only")
    await world.one_machine_for_each_pod(ever=1)
    await _wakes_and_stands_down(world, first)
    await world.one_machine_for_each_pod(ever=1)

    await world.delete_pods("only")
    await world.until_nothing_is_left()


@pytest.mark.parametrize("step", ["intent.after", "fence.before", "fence.after"])
@pytest.mark.field_case("FC-122")
async def test_a_leader_that_wakes_up_before_its_send_does_not_send(world: World, step: str):
    """Whatever it still believes: the mark, the fence, or the clock that began before the intent stops it."""
    first, _ = await _two_replicas(world, QUICK, die_at=f"{step}=SIGSTOP")
    await world.create_pod("only")
    await world.stood_still(first)
    await world.until("the second leads", lambda: world.leads("second"))
    await world.until_ready("only")

    await _wakes_and_stands_down(world, first)

    await world.one_machine_for_each_pod(ever=1)
    assert len(await world.cloud.creates()) == 1
    await world.delete_pods("only")
    await world.until_nothing_is_left()
    assert len(await world.cloud.creates()) == 1


async def _two_replicas(
    world: World, options: dict[str, str], *, die_at: str | None = None
) -> tuple[Controller, Controller]:
    """The first leads; the second stands by, and serves the webhooks, which need no leader."""
    first = world.controller("first", webhook=f"127.0.0.1:{free_ports(1)[0]}", options=options)
    second = world.controller("second", options=options)
    await world.start(first, keep=die_at is None, die_at=die_at)
    await world.until("the first leads", lambda: world.leads("first"))
    await world.start(second)
    assert await world.leads("first")
    return first, second


async def _wakes_and_stands_down(world: World, first: Controller) -> None:
    """It goes on where it stood, and either ends or says that it does not lead any more."""
    seen = first.log.stat().st_size
    first.go_on()

    def over() -> bool:
        return not first.running or b"not leading any more" in first.log.read_bytes()[seen:]

    await world.until("the paused leader stands down", over)
    assert await world.leads("second")


async def _is_leaving(world: World, pod: str) -> bool:
    return "deletionTimestamp" in (await world.claim_of(pod))["metadata"]


async def _claims_are(world: World, count: int) -> bool:
    return len(await world.claims()) == count
