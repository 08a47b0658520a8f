"""What a process remembers, or does not, costs no machine; nor does a credential of another account."""

import asyncio

import pytest
from sqlalchemy import text

from app.kube import paths
from app.kube.claims import ClaimDoor
from app.provisioning.model import ClaimSpec, LiveClaim, Mark, Releasing, Rented, Waiting, Why
from app.store.installation import next_epoch
from providers.base import Unavailable
from tests.cluster.provisioning.conftest import POLICY, WORKLOAD, Bench


@pytest.mark.field_case("FC-100")
async def test_a_credential_of_another_account_rents_nothing_and_ends_nothing(bench: Bench):
    """The controller comes back with somebody else's key: our machines live on where they are."""
    async with bench.running():
        old = await bench.claim()
        await bench.rented(old)

    switched = await bench.cloud.add_fault("foreign", unlimited=True)
    async with bench.running():
        await bench.until_row("select 1 from list_round where not complete and rounds > 3")
        outcome = await bench.ensure_once(await bench.claim())
        release = await bench.release_once(old)

        assert isinstance(outcome, Waiting)
        assert outcome.why is Why.NO_ACCOUNT
        assert isinstance(release, Releasing)
        assert not release.accepted
        assert (await bench.row("select gone_at from run")).gone_at is None
        assert list((await bench.cloud.creates()).values()) == [1]

    await bench.cloud.clear_faults(switched)
    async with bench.running():
        await bench.release(old)
        assert await bench.cloud.alive() == []


async def test_a_credential_of_another_account_rents_once_nothing_is_left_in_the_former(bench: Bench):
    """In the very term in which the former one was used."""
    async with bench.running():
        old = await bench.claim()
        await bench.rented(old)
        account = bench.accounts.get(old.key)
        assert account is not None
        await bench.release(old)

        await bench.cloud.add_fault("foreign", unlimited=True)
        account.account_id = await account.provider.account()

        await bench.rented(await bench.claim())


async def test_a_credential_that_comes_between_the_mark_and_the_send_stops_the_send(bench: Bench):
    """Else the machine would be in one account, and be looked for in the one that the mark names."""
    async with bench.running():
        claim = await bench.claim()
        account = bench.accounts.get(claim.key)
        assert account is not None

        class Door(ClaimDoor):
            async def mark(self, claim: ClaimSpec, mark: Mark, *, live: LiveClaim) -> None:
                await super().mark(claim, mark, live=live)
                account.account_id = "another"

        door = Door(bench.kube.room("test"))
        outcome = await bench.provisioning.ensure(claim, WORKLOAD, port=door, policy=POLICY)

        assert isinstance(outcome, Waiting)
        assert await bench.cloud.creates() == {}
        assert (await bench.row("select outcome from provision_attempt")).outcome == "unsent"


async def test_an_extra_whose_end_a_former_leader_did_not_live_to_see_is_billed_to_its_end(bench: Bench):
    async with bench.running():
        claim = await bench.claim()
        await bench.rented(claim)
        name = (await bench.row("select identity from provision_attempt")).identity
        await bench.cloud.plant(name=name, region="r1")
        extra = await bench.until_row("select * from run where extra and gone_at is not null")
        assert extra.terminate_asked_at is not None
    async with bench.engine.begin() as conn:
        await conn.execute(text("update run set gone_at = null where extra"))

    async with bench.running():
        await bench.until_row("select 1 from run where extra and gone_at is not null")

        assert (await bench.row("select count(*) as n from run where gone_at is null")).n == 1
        assert (await bench.row("select state from rental")).state == "live"


async def test_a_command_for_which_no_call_is_free_is_not_run_and_has_not_failed(bench: Bench):
    async with bench.running():
        claim = await bench.claim()
        rented = await bench.rented(claim)
        account = bench.accounts.get(claim.key)
        assert account is not None
        account.budget.pause(60)

        with pytest.raises(Unavailable):
            await bench.provisioning.keep.command(claim.key, rented.ref, ("true",), within_s=0.1)


async def test_without_a_store_an_id_written_by_hand_ends_nobody_elses_machine(bench: Bench):
    async with bench.running():
        victim = await bench.claim()
        machine = await bench.rented(victim)
        claim = await bench.claim()
        status = {"status": {"instanceID": machine.ref.resource_id, "region": "r1", "account": "default"}}
        await bench.kube.patch(paths.nodeclaim_status(claim.name), status, kind="merge")
        claim = await bench.reread(claim)
        bench.provisioning.adopt_status(claim)
        bench.leader.epoch = None  # what a leader has while the store is away

        release = await bench.release_once(claim)

        assert isinstance(release, Releasing)
        (alive,) = await bench.cloud.alive()
        assert alive["id"] == machine.ref.resource_id


async def test_a_recorded_machine_that_this_process_has_not_met_is_no_extra(bench: Bench):
    """A new leader sees it in lists, round after round, before anybody calls ensure."""
    async with bench.running():
        claim = await bench.claim()
        rented = await bench.rented(claim)
        await bench.until(lambda: bench.provisioning.view(claim.uid).machine is not None)

    bench.leader.epoch = None
    async with bench.running():
        # The epoch is late: rounds come first, and rows are not loaded.
        settled, bench.leader.epoch = bench.leader.epoch, None
        await bench.until_row("select 1 from list_round where rounds > 6")
        bench.leader.epoch = settled
        await bench.until(lambda: bench.provisioning.view(claim.uid).ref == rented.ref)
        await bench.until_row("select 1 from list_round where rounds > 12")

        (alive,) = await bench.cloud.alive()
        assert alive["id"] == rented.ref.resource_id
        assert (await bench.row("select count(*) as n from run where extra")).n == 0


async def test_a_list_that_names_another_region_than_the_create_did_ends_nothing(bench: Bench):
    async with bench.running():
        claim = await bench.claim()
        rented = await bench.rented(claim)
        async with bench.engine.begin() as conn:
            await conn.execute(text("update rental set resource_region = 'elsewhere'"))
            await conn.execute(text("update run set region = 'elsewhere'"))

    async with bench.running():
        assert isinstance(await bench.ensure_once(claim), Rented)
        await bench.until_row("select 1 from list_round where rounds > 10")

        (alive,) = await bench.cloud.alive()
        assert alive["id"] == rented.ref.resource_id


async def test_a_create_that_was_answered_to_a_former_leader_is_taken_up(bench: Bench):
    """The run row is there, the rental is still open: the next leader rents nothing beside it."""
    async with bench.running():
        claim = await bench.claim()
        rented = await bench.rented(claim)
        async with bench.engine.begin() as conn:
            await conn.execute(text("update rental set state = 'open', resource_id = null, live_at = null"))
            await conn.execute(text("delete from instance_seen"))

    hidden = await bench.cloud.add_fault("hide", verb="list", unlimited=True)
    async with bench.running():
        assert await bench.rented(claim) == rented
        assert list((await bench.cloud.creates()).values()) == [1]
    await bench.cloud.clear_faults(hidden)


async def test_a_machine_that_an_earlier_process_saw_is_found_although_lists_leave_it_out(bench: Bench):
    async with bench.running():
        await bench.cloud.add_fault("lost", verb="create")
        claim = await bench.claim()
        assert isinstance(await bench.ensure_once(claim), Waiting)
        await bench.until_row("select 1 from instance_seen where claim_uid = :uid", uid=claim.uid)

    async with bench.engine.begin() as conn:  # the process died before it adopted the machine
        await conn.execute(text("update rental set state = 'open', resource_id = null, live_at = null"))
        await conn.execute(text("delete from run"))
        await conn.execute(text("update provision_attempt set outcome = null, settled_at = null"))
    await bench.cloud.add_fault("hide", verb="list", unlimited=True)
    async with bench.running():
        await bench.rented(claim)

        assert len(await bench.cloud.machines()) == 1


async def test_a_store_with_another_epoch_does_not_stop_teardown(bench: Bench):
    async with bench.running():
        claim = await bench.claim()
        await bench.rented(claim)
        await bench.until(lambda: bench.provisioning.view(claim.uid).machine is not None)
        async with bench.engine.begin() as conn:
            await conn.execute(text("update installation set epoch = epoch + 5"))

        release = await bench.release_once(claim)

        assert isinstance(release, Releasing)
        assert release.accepted
        await bench.cloud.until(lambda truth: all(m["state"] == "gone" for m in truth["machines"]))
        assert (await bench.row("select state from rental")).state == "live"  # the rows wait for the epoch


async def test_new_rents_do_not_hide_that_rows_were_lost(bench: Bench):
    """After a restore new attempts get high numbers before the first list shows the old machine."""
    async with bench.running():
        old = await bench.claim()
        await bench.rented(old)
    async with bench.engine.begin() as conn:
        await conn.execute(text("delete from run"))
        await conn.execute(text("delete from rental"))
        await conn.execute(text("delete from instance_seen"))

    async with bench.running():
        for _ in range(3):
            await bench.rented(await bench.claim())

        await bench.until_row("select 1 from installation where held_since is not null")


async def test_a_found_machine_dearer_than_the_ceiling_goes_back(bench: Bench):
    async with bench.running():
        await bench.cloud.add_fault("lost", verb="create")
        claim = await bench.claim(maxPrice="4.50")
        await bench.cloud.set_price("5.00", tier="OnDemand", accelerator="H100", region="r1")

        refused = await bench.refused(claim)

        assert "at most $4.50" in refused.message
        await bench.release(claim)
        assert await bench.cloud.alive() == []


async def test_an_unreachable_cloud_is_asked_less_and_less(bench: Bench):
    async with bench.running():
        await bench.cloud.add_fault("throttle", verb="create", retry_after_s=0.01, unlimited=True)
        claim = await bench.claim()
        waits = []
        async with asyncio.timeout(30):
            while len(waits) < 6:
                outcome = await bench.ensure_once(claim)
                assert isinstance(outcome, Waiting)
                waits.append(outcome.after_s)
                await asyncio.sleep(min(outcome.after_s, 0.3))

        assert waits == sorted(waits)
        assert waits[-1] > 10 * waits[0]


@pytest.mark.field_case("FC-065")
async def test_a_strangers_machine_with_a_strange_name_stops_nothing(bench: Bench):
    async with bench.running():
        await bench.cloud.plant(name="nul\x00here", region="r1")
        claim = await bench.claim()

        rented = await bench.rented(claim)

        await bench.until_row(
            "select 1 from instance_seen where resource_id = :id", id=rented.ref.resource_id
        )
        await bench.until_row("select 1 from instance_seen where identity = 'nulhere'")


async def test_what_a_restore_has_lost_of_a_live_machines_run_is_told_again(bench: Bench):
    """Else one that bills while it runs would never have begun to."""
    async with bench.running():
        await bench.rented(await bench.claim())
        await bench.until_row("select 1 from run where running_at is not null")

        async with bench.engine.begin() as conn:
            await conn.execute(text("update run set running_at = null, provider_started_at = null"))
            bench.leader.epoch = await next_epoch(conn, bench.leader.epoch or 0)

        await bench.until_row("select 1 from run where running_at is not null")


async def test_a_strangers_machine_that_no_row_can_take_costs_no_other_its_row(bench: Bench):
    """Shown by the same list, and so written in the same batch."""
    strange, plain = [await bench.cloud.plant(name=name, region="r1") for name in ("strange", "plain")]
    await bench.cloud.exit(strange["id"], code=1 << 40)

    async with bench.running():
        await bench.until_row("select 1 from instance_seen where resource_id = :id", id=plain["id"])

        assert (
            await bench.row("select 1 from instance_seen where resource_id = :id", id=strange["id"]) is None
        )
