"""What clouds do wrong, against the cloud's own truth: one machine a claim, none after its end."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import text

from app.inventory.identity import parse
from app.kube import paths
from app.kube.claims import ClaimDoor
from app.provisioning.model import ClaimSpec, LiveClaim, Mark, Over, Releasing, Rented, Waiting, Why
from tests.cluster.provisioning.conftest import POLICY, WORKLOAD, Bench
from tests.support.clouds import SMALL
from tests.support.composed import until

pytestmark = pytest.mark.slow

LAGGING = {**SMALL, "lag": {"list_create_s": 1.0, "get_create_s": 1.0}}
REPLAYING = {**SMALL, "idempotent_for_s": 60}


def creates_of(truth: dict[str, Any]) -> int:
    return sum(truth["creates"].values())


@pytest.mark.behaviour(137, 150)
@pytest.mark.field_case("FC-001")
async def test_a_lost_answer_is_looked_for_and_its_machine_found(bench: Bench):
    async with bench.running():
        await bench.cloud.add_fault("lost", verb="create")
        claim = await bench.claim()

        first = await bench.ensure_once(claim)
        rented = await bench.rented(claim)

        assert isinstance(first, Waiting)
        assert first.why is Why.UNKNOWN
        (machine,) = await bench.cloud.machines()
        assert machine["id"] == rented.ref.resource_id
        attempt = await bench.row("select * from provision_attempt")
        assert attempt.outcome == "found"


@pytest.mark.field_case("FC-067")
async def test_a_500_before_the_effect_is_settled_as_absent_and_tried_again(bench: Bench):
    async with bench.running():
        await bench.cloud.add_fault("status", verb="create", status=500)
        claim = await bench.claim()

        await bench.rented(claim)

        outcomes = [
            row.outcome for row in await bench.rows("select outcome from provision_attempt order by number")
        ]
        assert outcomes == ["absent", "accepted"]
        assert len(await bench.cloud.machines()) == 1


@pytest.mark.behaviour(126)
@pytest.mark.parametrize("scenario", [LAGGING], ids=["lists lag 1 s behind creates"])
@pytest.mark.field_case("FC-001", "FC-014")
async def test_a_list_that_lags_behind_a_lost_create_does_not_double_it(bench: Bench):
    async with bench.running():
        await bench.cloud.add_fault("lost", verb="create")
        claim = await bench.claim()

        await bench.rented(claim)

        assert len(await bench.cloud.machines()) == 1
        await bench.release(claim)
        assert await bench.cloud.alive() == []


@pytest.mark.parametrize("scenario", [LAGGING], ids=["a fresh id is not visible for 1 s"])
@pytest.mark.field_case("FC-073")
async def test_a_fresh_machine_that_get_does_not_know_yet_is_not_taken_for_gone(bench: Bench):
    async with bench.running():
        claim = await bench.claim()
        await bench.rented(claim)

        first = await bench.release_once(claim)
        found = [machine["terminates"] for machine in await bench.cloud.machines()]
        assert isinstance(first, Releasing)
        assert found == [1] or first.unknown_s > 0  # NOT_FOUND says nothing of a fresh one
        await bench.release(claim)

        assert await bench.cloud.alive() == []


@pytest.mark.behaviour(154, 200)
@pytest.mark.parametrize("fault", ["truncate", "shrink", "foreign", "garbage", "error_body", "repeat_page"])
@pytest.mark.field_case("FC-013")
async def test_a_list_that_is_not_whole_concludes_nothing(bench: Bench, fault: str):
    """Neither is the lost create called absent, nor a released machine gone."""
    async with bench.running():
        live = await bench.claim()
        await bench.rented(live)
        await bench.until(lambda: bench.provisioning.view(live.uid).machine is not None)
        wrong = await bench.cloud.add_fault(fault, verb="list", unlimited=True)
        await bench.cloud.add_fault("status", verb="create", status=500)
        lost = await bench.claim()

        async with asyncio.timeout(20):  # well past send_by, time-out and settling
            while True:
                outcome = await bench.ensure_once(lost)
                assert isinstance(outcome, Waiting)
                if outcome.for_s > 7.0:
                    break
                await asyncio.sleep(0.3)

        assert outcome.why is Why.UNKNOWN
        assert not bench.provisioning.view(live.uid).gone
        assert creates_of(await bench.cloud.truth()) == 2
        await bench.cloud.clear_faults(wrong)
        await bench.rented(lost)
        assert len(await bench.cloud.alive()) == 2


@pytest.mark.behaviour(138, 153)
@pytest.mark.parametrize("scenario", [REPLAYING], ids=["tokens count"])
async def test_a_replay_with_the_same_token_gets_the_same_machine(bench: Bench):
    async with bench.running(list_busy_s=5.0, list_rest_s=5.0):  # so slow that the list cannot find it first
        await bench.cloud.add_fault("lost", verb="create")
        claim = await bench.claim()

        await bench.rented(claim)

        (machine,) = await bench.cloud.machines()
        assert creates_of(await bench.cloud.truth()) == 2
        attempt = await bench.row("select * from provision_attempt")
        assert (attempt.outcome, attempt.sends) == ("accepted", 2)
        assert machine["name"] == attempt.identity


@pytest.mark.parametrize("scenario", [REPLAYING], ids=["tokens count"])
async def test_a_refusal_after_an_unknown_settles_nothing(bench: Bench):
    async with bench.running(list_busy_s=5.0, list_rest_s=5.0):
        await bench.cloud.add_fault("lost", verb="create", name="nb-")
        await bench.cloud.add_fault("refuse", verb="create", code="capacity", skip=1, times=2)
        claim = await bench.claim()

        await bench.rented(claim)

        assert len(await bench.cloud.machines()) == 1
        assert await bench.row("select 1 from block") is None


async def test_terminate_is_repeated_until_the_cloud_takes_it(bench: Bench):
    async with bench.running():
        claim = await bench.claim()
        await bench.rented(claim)
        broken = await bench.cloud.add_fault("status", verb="terminate", status=500, unlimited=True)

        for _ in range(5):
            release = await bench.release_once(claim)
            assert isinstance(release, Releasing)
            assert not release.accepted
        assert len(await bench.cloud.alive()) == 1

        await bench.cloud.clear_faults(broken)
        await bench.release(claim)
        assert await bench.cloud.alive() == []


@pytest.mark.behaviour(203)
async def test_a_machine_beside_the_recorded_one_is_ended(bench: Bench):
    async with bench.running():
        claim = await bench.claim()
        rented = await bench.rented(claim)
        name = (await bench.row("select identity from provision_attempt")).identity

        await bench.cloud.plant(name=name, region="r1")

        await bench.cloud.until(lambda truth: [m["state"] for m in truth["machines"]].count("gone") == 1)
        (alive,) = await bench.cloud.alive()
        assert alive["id"] == rented.ref.resource_id
        extra = await bench.until_row("select * from run where extra and gone_at is not null")
        assert extra.claim_uid == claim.uid
        assert (await bench.row("select state from rental")).state == "live"


@pytest.mark.behaviour(398)
async def test_a_machine_that_comes_after_the_end_is_ended_too(bench: Bench):
    async with bench.running():
        claim = await bench.claim()
        await bench.rented(claim)
        name = (await bench.row("select identity from provision_attempt")).identity
        await bench.release(claim)

        await bench.cloud.plant(name=name, region="r1")

        await bench.cloud.until(lambda truth: all(m["state"] == "gone" for m in truth["machines"]))
        assert len(await bench.cloud.machines()) == 2
        assert (await bench.row("select state from rental")).state == "ended"


async def test_machines_of_others_are_never_touched(bench: Bench):
    async with bench.running():
        claim = await bench.claim()
        await bench.rented(claim)
        ours = (await bench.row("select identity from provision_attempt")).identity
        other = ours.replace(ours.split("-")[1], "aaaaaaaaaa")  # another installation's: the check fails too
        planted = [
            await bench.cloud.plant(name=name, region="r1") for name in ("training-7", other, ours + "x")
        ]
        await bench.until_row("select 1 from instance_seen where identity = 'training-7'")

        await bench.release(claim)

        assert {machine["id"] for machine in await bench.cloud.alive()} == {one["id"] for one in planted}


async def test_a_machine_that_vanishes_is_gone_after_two_lists_and_a_get(bench: Bench):
    async with bench.running():
        claim = await bench.claim()
        rented = await bench.rented(claim)
        await bench.until(lambda: bench.provisioning.view(claim.uid).machine is not None)

        await bench.cloud.remove(rented.ref.resource_id)

        await bench.until(lambda: bench.provisioning.view(claim.uid).gone)
        await bench.until_row("select 1 from run where gone_at is not null")


async def test_a_machine_that_only_the_list_leaves_out_is_not_gone(bench: Bench):
    async with bench.running():
        claim = await bench.claim()
        await bench.rented(claim)
        await bench.until(lambda: bench.provisioning.view(claim.uid).machine is not None)

        await bench.cloud.add_fault("hide", verb="list", for_s=4.0)
        await bench.until_row("select 1 from list_round where not complete and reason like '%is there%'")

        assert not bench.provisioning.view(claim.uid).gone
        assert (await bench.row("select gone_at from run")).gone_at is None


async def test_rows_lost_after_the_intent_are_made_good_from_the_mark(bench: Bench):
    """The database is restored to before an intent whose machine lives: it is found, not doubled."""
    async with bench.running():
        claim = await bench.claim()
        rented = await bench.rented(claim)

    await _restored_to_before_everything(bench)
    async with bench.running():
        again = await bench.rented(claim)

        assert again.ref == rented.ref
        assert len(await bench.cloud.machines()) == 1
        held = await bench.row("select held_reason from installation where held_since is not null")
        assert held is not None
        await bench.release(claim)
        assert await bench.cloud.alive() == []


async def test_after_a_restore_numbers_that_are_given_out_again_hide_no_attempt(bench: Bench):
    """The marks of old claims carry numbers that the restored sequence gives to new ones."""
    async with bench.running():
        old = [await bench.claim() for _ in range(3)]
        rented = [await bench.rented(claim) for claim in old]

    await _restored_to_before_everything(bench)
    async with bench.running():
        new = [await bench.claim(region="r2") for _ in range(3)]
        for claim in new:
            await bench.rented(claim)
        again = [await bench.rented(claim) for claim in old]

        assert again == rented
        assert len(await bench.cloud.machines()) == 6


async def test_rows_lost_are_made_good_by_release_as_well(bench: Bench):
    async with bench.running():
        claim = await bench.claim()
        await bench.rented(claim)

    await _restored_to_before_everything(bench)
    async with bench.running():
        await bench.release(claim)

        assert await bench.cloud.alive() == []


async def test_rows_lost_and_the_machine_gone_rent_no_second_one(bench: Bench):
    """The claim's status tells that it had its machine: it is over, and its Pod with it."""
    async with bench.running():
        claim = await bench.claim()
        rented = await bench.rented(claim)
    claim = await _with_its_machine_on_the_status(bench, claim, rented)
    await bench.cloud.remove(rented.ref.resource_id)

    await _restored_to_before_everything(bench)
    async with bench.running():
        assert isinstance(await bench.ensure(claim), Over)

        assert creates_of(await bench.cloud.truth()) == 1
        await bench.release(claim)


async def test_a_machine_on_the_status_that_cannot_be_looked_at_is_waited_for(bench: Bench):
    async with bench.running():
        claim = await bench.claim()
        rented = await bench.rented(claim)
    claim = await _with_its_machine_on_the_status(bench, claim, rented)

    await _restored_to_before_everything(bench)
    async with bench.running(list_busy_s=5.0, list_rest_s=5.0):
        broken = await bench.cloud.add_fault("status", status=500, verb="get", unlimited=True)
        hidden = await bench.cloud.add_fault("status", status=500, verb="list", unlimited=True)
        outcome = await bench.ensure_once(claim)
        assert isinstance(outcome, Waiting)
        assert outcome.why is Why.RETRY

        await bench.cloud.clear_faults(broken)
        assert await bench.rented(claim) == rented
        await bench.cloud.clear_faults(hidden)
        await bench.until_row("select 1 from run")


async def test_while_held_the_machine_of_a_forgotten_and_gone_claim_is_left(bench: Bench):
    async with bench.running():
        claim = await bench.claim()
        rented = await bench.rented(claim)
    await _restored_to_before_everything(bench)
    path = paths.nodeclaim(claim.name)
    await bench.kube.patch(path, {"metadata": {"finalizers": None}}, kind="merge")
    await bench.kube.delete(path)

    async with bench.running():
        await bench.until_row("select 1 from installation where held_since is not null")
        await bench.until_row("select 1 from list_round where rounds > 5")
        (machine,) = await bench.cloud.alive()
        assert machine["id"] == rented.ref.resource_id
        identity = parse(machine["name"])
        assert identity is not None
        refused = await bench.provisioning.end_forgotten(rented.ref, identity, reason="a test")
        assert refused.startswith("refused: sweeps are held")

        async with bench.engine.begin() as conn:
            await conn.execute(text("update installation set held_since = null, held_reason = null"))
        await bench.until_row("select 1 from list_round where rounds > 10")
        assert await bench.cloud.alive()  # provisioning alone ends nothing that no row knows

        begun = await bench.provisioning.end_forgotten(rented.ref, identity, reason="a test")
        assert begun.startswith("begun")
        await bench.cloud.until(lambda truth: all(m["state"] == "gone" for m in truth["machines"]))


async def test_orphans_08_an_end_without_a_row_is_held_before_any_round_has_shown_the_machine(bench: Bench):
    async with bench.running():
        claim = await bench.claim()
        rented = await bench.rented(claim)
    await _restored_to_before_everything(bench)
    path = paths.nodeclaim(claim.name)
    await bench.kube.patch(path, {"metadata": {"finalizers": None}}, kind="merge")
    await bench.kube.delete(path)
    (machine,) = await bench.cloud.alive()
    identity = parse(machine["name"])
    assert identity is not None
    await bench.cloud.add_fault("status", status=500, verb="list", unlimited=True)

    async with bench.running():

        async def answered() -> str | None:
            said = await bench.provisioning.end_forgotten(rented.ref, identity, reason="a test")
            return None if said.endswith(("we do not lead", "the account is not open")) else said

        assert (await until(answered)).startswith("refused: sweeps are held")
        assert len(await bench.cloud.alive()) == 1


@pytest.mark.behaviour(402)
async def test_a_rental_whose_claim_is_gone_is_released(bench: Bench):
    async with bench.running():
        claim = await bench.claim()
        await bench.rented(claim)
        path = paths.nodeclaim(claim.name)

        await bench.kube.patch(path, {"metadata": {"finalizers": None}}, kind="merge")
        await bench.kube.delete(path)

        await bench.until_row("select 1 from rental where state = 'ended'")
        assert await bench.cloud.alive() == []


async def test_a_rental_whose_claim_was_torn_out_before_its_mark_is_released_by_the_same_leader(bench: Bench):
    """Nobody asks for it again, and no machine leads to it: only what this process remembers does."""

    class Door(ClaimDoor):
        async def mark(self, claim: ClaimSpec, mark: Mark, *, live: LiveClaim) -> None:
            path = paths.nodeclaim(claim.name)
            await bench.kube.patch(path, {"metadata": {"finalizers": None}}, kind="merge")
            await bench.kube.delete(path)
            await super().mark(claim, mark, live=live)

    async with bench.running():
        claim = await bench.claim()
        door = Door(bench.kube.room("test"))
        outcome = await bench.provisioning.ensure(claim, WORKLOAD, port=door, policy=POLICY)

        assert isinstance(outcome, Waiting)
        await bench.until_row("select 1 from rental where state = 'ended'", within_s=30)
        assert await bench.cloud.creates() == {}


async def test_an_hour_of_a_refused_credential_changes_nothing(bench: Bench):
    async with bench.running():
        claim = await bench.claim()
        await bench.rented(claim)
        expired = await bench.cloud.add_fault("expired", unlimited=True)
        await bench.until_row("select 1 from list_round where not complete and rounds > 3")

        assert not bench.provisioning.view(claim.uid).gone
        release = await bench.release_once(claim)
        assert isinstance(release, Releasing)
        assert not release.accepted

        await bench.cloud.clear_faults(expired)
        await bench.release(claim)
        assert await bench.cloud.alive() == []


@pytest.mark.behaviour(290, 405, 412)
async def test_an_instance_id_written_by_hand_ends_nobody_elses_machine(bench: Bench):
    async with bench.running():
        victim = await bench.claim()
        machine = await bench.rented(victim)
        claim = await bench.claim()
        status = {"status": {"instanceID": machine.ref.resource_id, "region": "r1", "account": "default"}}
        await bench.kube.patch(paths.nodeclaim_status(claim.name), status, kind="merge")

        await bench.release(await bench.reread(claim))

        (alive,) = await bench.cloud.alive()
        assert alive["id"] == machine.ref.resource_id


@pytest.mark.behaviour(297)
async def test_a_provider_that_is_not_configured_keeps_the_claim(bench: Bench):
    async with bench.running():
        claim = await bench.claim(provider="elsewhere")

        assert isinstance(outcome := await bench.ensure_once(claim), Waiting)
        assert outcome.why is Why.NO_ACCOUNT


@pytest.mark.behaviour(171, 176)
@pytest.mark.field_case("FC-010")
async def test_a_restart_rents_nothing_and_follows_what_is_there(bench: Bench):
    async with bench.running():
        claims = [await bench.claim() for _ in range(3)]
        rented = [await bench.rented(claim) for claim in claims]

    async with bench.running():
        again = [await bench.ensure_once(claim) for claim in claims]
        assert again == rented
        await bench.until(lambda: all(bench.provisioning.view(claim.uid).machine for claim in claims))
        assert all(isinstance(outcome, Rented) for outcome in again)
        assert creates_of(await bench.cloud.truth()) == 3


async def _restored_to_before_everything(bench: Bench) -> None:
    async with bench.engine.begin() as conn:
        await conn.execute(text("delete from run"))
        await conn.execute(text("delete from rental"))
        await conn.execute(text("delete from instance_seen"))
        await conn.execute(text("alter sequence attempt_sequence restart"))


async def _with_its_machine_on_the_status(bench: Bench, claim: ClaimSpec, rented: Rented) -> ClaimSpec:
    """As the claims room would have written."""
    status = {"status": {"instanceID": rented.ref.resource_id, "region": "r1", "account": "default"}}
    await bench.kube.patch(paths.nodeclaim_status(claim.name), status, kind="merge")
    return await bench.reread(claim)
