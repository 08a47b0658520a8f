"""Machines that are paid for and never start: given back, put on record, and not bought again at once."""

from typing import Any

import pytest

from app.kube import paths
from app.store import standing
from app.store.engine import begin
from tests.cluster.vnode.test_vnode_runs import owned
from tests.cluster.vnode.vnode_world import World, condition_of, is_ready, state_of
from tests.support.clouds import SMALL

NEVER = SMALL | {"life": {"boot_s": 3600}}
OF_HOSTS = NEVER | {"hosts": 2}


async def blocked(world: World) -> list[tuple[Any, ...]]:
    async with world.engine.connect() as conn:
        query = "select accelerator, tier, region, host, kind from block"
        return [tuple(row) for row in await conn.exec_driver_sql(query)]


async def until_one_boots(world: World) -> str:
    truth = await world.cloud.until(
        lambda truth: any(one["state"] == "booting" for one in truth["machines"]), what="a machine that boots"
    )
    return next(str(one["id"]) for one in truth["machines"] if one["state"] == "booting")


@pytest.mark.parametrize("scenario", [NEVER], ids=["boots-for-ever"])
async def test_fc_078_fc_080_a_machine_that_boots_for_ever_goes_back_and_its_place_is_passed_over(
    world: World,
) -> None:
    """As long as it boots it bills, and the cloud will never say that anything is wrong."""
    owner = await owned(world)
    async with world.running(boot_deadline_s=1.0):
        pod = await world.pod(owner=owner)

        failed = await world.until(pod, lambda seen: seen["status"]["phase"] == "Failed")
        assert await world.cloud.alive() == []
        await world.until_event(pod, "Failed")
        async with begin(world.engine) as conn:
            waiting = (await standing.read(conn)).backoffs

    assert failed["status"]["message"] == (
        "the machine was rented and did not start within 1 s: it was given back"
    )
    assert "waiting" in state_of(failed)  # nothing ever ran, so no code is made up
    disrupted = condition_of(failed, "DisruptionTarget")
    assert disrupted is not None
    assert (disrupted["status"], disrupted["reason"]) == ("True", "NeverStarted")
    assert await blocked(world) == [("h100:1", "OnDemand", "r1", None, "start")]
    assert "did not start within 1 s" in waiting[owner["uid"]].message


@pytest.mark.field_case("FC-080")
@pytest.mark.parametrize("scenario", [NEVER], ids=["boots-for-ever"])
async def test_a_machine_that_nobody_hears_of_is_not_given_up_for_its_silence(world: World) -> None:
    async with world.running(boot_deadline_s=1.0):
        pod = await world.pod()
        await until_one_boots(world)
        await world.rounds(2)
        await world.cloud.add_fault("status", verb="list", unlimited=True)
        await world.unknown_rounds(8)

        seen = await world.see(pod)
        assert seen is not None
        assert seen["status"]["phase"] == "Pending"
        assert len(await world.cloud.alive()) == 1


@pytest.mark.parametrize("scenario", [NEVER, OF_HOSTS], ids=["a-cloud-without-hosts", "a-cloud-of-hosts"])
async def test_fc_012_fc_071_a_machine_that_breaks_at_its_start_goes_and_its_place_is_passed_over(
    world: World,
) -> None:
    """The whole offer, or the host alone where the cloud names one: the next one is rented on another."""
    async with world.running():
        pod = await world.pod()
        await world.cloud.fail(await until_one_boots(world), message="no network on this host")

        failed = await world.until_reason(pod, "Failed")
        await world.cloud.until(lambda truth: truth["machines"][0]["state"] == "gone", what="the release")
        (host,) = [one["host"] for one in await world.cloud.machines()]
        place = ("h100:1", "OnDemand", "r1") if host is None else (None, None, None)
        assert await blocked(world) == [(*place, host, "start")]
        if host is not None:
            await world.pod()
            await world.cloud.until(lambda truth: len(truth["machines"]) == 2, what="the next machine")
            assert {one["host"] for one in await world.cloud.machines()} == {"host-1", "host-2"}

    assert "no network on this host" in failed["status"]["message"]


async def test_fc_072_fc_021_what_went_while_nobody_looked_is_over_and_never_a_success(world: World) -> None:
    """Removed in the console while no controller ran; one had ended well before, and nobody saw that."""
    async with world.running():
        removed, done, deleted = [await world.pod() for _ in range(3)]
        machines = [await world.machine_of(pod) for pod in (removed, done, deleted)]
    await world.cloud.exit(machines[1], code=0)
    for machine in machines:
        await world.cloud.remove(machine)
    await world.kube.delete(paths.pod(world.namespace, deleted["metadata"]["name"]))

    async with world.running():
        for pod in (removed, done):
            over = await world.until_reason(pod, "Terminated")
            assert over["status"]["phase"] == "Failed"
            assert state_of(over)["terminated"]["reason"] == "ContainerStatusUnknown"
            await world.kube.delete(paths.pod(world.namespace, pod["metadata"]["name"]))
        for pod in (removed, done, deleted):
            await world.until_gone(pod)

        async def whose_runs_are_open() -> set[str]:
            async with world.engine.connect() as conn:
                rows = await conn.exec_driver_sql("select resource_id from run where gone_at is null")
                return {row.resource_id for row in rows}

        async def those_seen_to_be_gone_are_closed() -> bool:
            # A deleted Pod goes with its accepted end: its run is closed by the claims' room, not here.
            return await whose_runs_are_open() <= {machines[2]}

        await world.until_true(those_seen_to_be_gone_are_closed)


LAGGING = SMALL | {"lag": {"list_create_s": 2.0, "get_create_s": 2.0}}


@pytest.mark.parametrize("scenario", [LAGGING], ids=["not shown for 2 s"])
async def test_fc_073_a_new_spot_machine_that_no_list_shows_yet_was_not_taken_back(world: World) -> None:
    async with world.running():
        pod = await world.pod(claim={"capacityType": "Spot"})
        await world.rounds(4)
        early = await world.see(pod)
        ready = await world.until(pod, is_ready)

    assert early is not None
    assert early["status"].get("phase") == "Pending"
    assert condition_of(ready, "DisruptionTarget") is None
    assert len(await world.cloud.machines()) == 1
