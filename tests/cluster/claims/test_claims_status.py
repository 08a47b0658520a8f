"""What claims and bindings show, and with how many writes."""

from typing import Any

import pytest
from structlog.testing import capture_logs

from app.kube import paths
from app.kube.cache import Cache
from app.kube.client import Obj
from app.provisioning.model import Refused
from tests.cluster.claims.conftest import World, conditions
from tests.support.clouds import SMALL
from tests.support.composed import until

QUEUED = {**SMALL, "life": {"boot_s": 0, "queue_s": 3600}}
SLOW = {**SMALL, "life": {"boot_s": 3600}}


def statuses(cache: Cache, uid: str) -> list[dict[str, Any]]:
    """Every status of that object, or of what it owns, in the order of the watch; equal neighbours once."""
    seen: list[dict[str, Any]] = []

    def note(_: Obj | None, new: Obj | None) -> None:
        if new is None:
            return
        owners = [owner["uid"] for owner in new["metadata"].get("ownerReferences") or ()]
        status = new.get("status") or {}
        if uid in (new["metadata"]["uid"], *owners) and (not seen or seen[-1] != status):
            seen.append(status)

    cache.on_change(note)
    return seen


async def test_a_rented_machine_is_bound_in_one_write_to_claim_and_binding_each(world: World):
    async with world.leading() as term:
        pod = await world.pod("a")
        claim = await world.claim(pod)
        await until(lambda: term.claims.by_uid(claim["metadata"]["uid"]))
        on_claim = statuses(term.claims, claim["metadata"]["uid"])
        on_binding = statuses(term.bindings, claim["metadata"]["uid"])

        machine = await term.rent(claim)
        status = await world.until_phase(claim, "Bound")

        seen = term.provisioning.view(claim["metadata"]["uid"]).machine
        assert seen is not None
        assert seen.endpoint
        assert {field: status.get(field) for field in status if field != "attempt"} == {
            "phase": "Bound",
            "instanceID": machine,
            "account": "default",
            "region": "r1",
            "nodeName": "nebula-modal",
            "endpoint": seen.endpoint,
        }
        await until(lambda: len(on_binding) > 1)
        binding = await world.binding_status(claim)
        assert (binding["phase"], binding["instanceID"], binding["endpoint"]) == (
            "Bound",
            machine,
            seen.endpoint,
        )
        assert binding["pricePerHour"] == "4.00"
        assert conditions(binding) == {
            "Provisioned": ("True", "Provisioned"),
            "Ready": ("True", "Running"),
            "Capacity": ("True", "Available"),
        }
        assert [each.get("phase") for each in on_claim] == [None, "Provisioning", "Bound"]
        assert len(on_binding) == 2  # nothing, then everything


@pytest.mark.behaviour(285)
@pytest.mark.parametrize("scenario", [SLOW], ids=["slow-boot"])
async def test_a_booting_machine_is_bound_already_for_it_bills(world: World):
    async with world.leading() as term:
        claim = await world.claim(await world.pod("a"))
        await term.rent(claim)

        await world.until_phase(claim, "Bound")

        async def told() -> dict[str, Any]:
            return await world.binding_status(claim)

        assert conditions(await until(told))["Ready"] == ("False", "Initializing")


@pytest.mark.parametrize("scenario", [QUEUED], ids=["queued"])
async def test_a_queued_machine_is_named_but_not_bound(world: World):
    async with world.leading() as term:
        claim = await world.claim(await world.pod("a"))
        machine = await term.rent(claim)

        async def named() -> bool:
            return (await world.status(claim)).get("instanceID") == machine

        await until(named)
        assert (await world.status(claim))["phase"] == "Provisioning"


@pytest.mark.behaviour(291)
async def test_a_new_leader_repeats_no_write_and_blanks_nothing(world: World):
    claim = await world.claim(await world.pod("a"))
    async with world.leading() as term:
        await term.rent(claim)
        await world.until_phase(claim, "Bound")
        await until(lambda: _ready(term.bindings))
    before = (await world.live(claim), await world.binding_status(claim))

    async with world.leading() as term:
        uid = claim["metadata"]["uid"]
        await until(lambda: term.provisioning.view(uid).machine)  # it knows all that there is to know again
        other = await world.claim(await world.pod("b"))
        await term.rent(other)
        await world.until_phase(other, "Bound")  # and the controller has worked since

    assert (await world.live(claim), await world.binding_status(claim)) == before


def _ready(bindings: Cache) -> bool:
    return any(conditions(each.get("status") or {}).get("Ready") == ("True", "Running") for each in bindings)


@pytest.mark.behaviour(222)
async def test_no_capacity_shows_on_the_binding(world: World):
    await world.cloud.set_capacity(0, tier="OnDemand", accelerator="H100", region="r1")
    async with world.leading() as term:
        claim = await world.claim(await world.pod("a"))

        assert isinstance(await term.ensure(claim), Refused)

        async def told() -> dict[str, Any]:
            return await world.binding_status(claim)

        shown = conditions(await until(told))
        assert shown == {"Capacity": ("False", "NoCapacity"), "Provisioned": ("False", "NoCapacity")}


@pytest.mark.behaviour(283)
async def test_a_finished_pod_gives_its_machine_back_and_its_claim_stays_terminated(world: World):
    async with world.leading() as term:
        pod = await world.pod("a")
        claim = await world.claim(pod)
        await term.rent(claim)
        await world.until_phase(claim, "Bound")

        await world.kube.patch(
            paths.pod_status(world.namespace, "a"),
            {"metadata": {"uid": pod["metadata"]["uid"]}, "status": {"phase": "Succeeded"}},
            kind="strategic",
        )

        status = await world.until_phase(claim, "Terminated")
        assert await world.cloud.alive() == []
        assert status["instanceID"]  # what it was stays readable

        async def told() -> bool:
            return (await world.binding_status(claim))["phase"] == "Terminated"

        await until(told)
        shown = conditions(await world.binding_status(claim))
        assert shown["Ready"] == shown["Provisioned"] == ("False", "Terminated")
        await world.remove_pod(pod)
        await world.until_gone(claim)


@pytest.mark.behaviour(284)
async def test_a_graceful_deletion_shows_as_terminating_while_it_lasts(world: World):
    async with world.leading() as term:
        claim = await world.claim(await world.pod("a"))
        await term.rent(claim)
        await world.until_phase(claim, "Bound")

        await world.kube.delete(paths.pod(world.namespace, "a"), grace_s=3600)

        await world.until_phase(claim, "Terminating")
        assert len(await world.cloud.alive()) == 1  # ending it is the virtual node's, until the Pod is gone


async def test_the_status_of_an_old_claim_never_lands_on_a_new_one_of_its_name(world: World):
    """The controller's copy is behind: it holds the old claim while the server has a new one."""
    old = await world.claim(await world.pod("a"))
    name = old["metadata"]["name"]
    async with world.leading(list_rest_s=60.0, call_timeout_s=20.0) as term:
        await until(lambda: len(term.claims) == 1)
        term.blind(term.claims)
        held = await world.cloud.pause(verb="create", when="after")
        renting = term.start(term.rent(old))
        await world.until_phase(old, "Provisioning")
        await world.kube.patch(paths.nodeclaim(name), {"metadata": {"finalizers": []}}, kind="merge")
        await world.kube.delete(paths.nodeclaim(name))
        new = await world.claim(await world.pod("c"), name=name, bound=False)

        with capture_logs() as logs:
            await world.cloud.resume(held)
            await renting
            await until(lambda: any(line["event"] == "claim status not written" for line in logs))

        assert await world.status(new) == {}
