"""A cloud that fails late, for long, in one place, or after it has said yes: its own books stay right.

"An hour" is twenty back-off steps, capped at 0.1 s each.
"""

import asyncio
from typing import Any

import pytest
from sqlalchemy import text

from app.kube import paths
from app.provisioning.model import ClaimSpec, Releasing, Rented, Waiting, Why
from providers.base import ClaimUid
from tests.cluster.provisioning.conftest import Bench
from tests.support.clouds import SMALL

pytestmark = pytest.mark.slow

HOUR = 20  # back-off steps
STEP_S = 0.1
LATE_LISTS = {**SMALL, "lag": {"list_terminate_s": 1.5}}


@pytest.mark.field_case("FC-001", "FC-067")
@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "status", "when": "after"},
        {"kind": "status", "when": "after", "status": 504},
        {"kind": "error_body"},
    ],
    ids=["500", "504", "200-with-an-error"],
)
async def test_an_error_after_the_effect_of_a_create_is_looked_for_and_doubles_nothing(
    bench: Bench, fault: dict[str, Any]
):
    """A 500 that came too late, and a 200 whose body says error: the machine is there."""
    async with bench.running():
        await bench.cloud.add_fault(**fault, verb="create")
        claim = await bench.claim()

        first = await bench.ensure_once(claim)
        rented = await bench.rented(claim)

        assert isinstance(first, Waiting)
        assert first.why is Why.UNKNOWN
        (machine,) = await bench.cloud.machines()
        assert machine["id"] == rented.ref.resource_id
        await bench.release(claim)
        assert await bench.cloud.alive() == []


@pytest.mark.parametrize("fault", [{"kind": "status", "when": "after"}, {"kind": "error_body"}])
async def test_an_error_after_the_effect_of_a_terminate_is_asked_again_and_ends_once(
    bench: Bench, fault: dict[str, Any]
):
    async with bench.running():
        claim = await bench.claim()
        await bench.rented(claim)
        await bench.cloud.add_fault(**fault, verb="terminate")

        first = await bench.release_once(claim)
        await bench.release(claim)

        assert isinstance(first, Releasing)
        assert not first.accepted
        run = await bench.row("select * from run")
        assert run.terminate_asked_at <= run.gone_at
        assert await bench.cloud.alive() == []


@pytest.mark.parametrize("scenario", [LATE_LISTS], ids=["lists lag 1.5 s behind terminates"])
async def test_a_list_that_lags_behind_terminates_only_delays_the_end(bench: Bench):
    async with bench.running():
        claim = await bench.claim()
        await bench.rented(claim)
        await bench.until(lambda: bench.provisioning.view(claim.uid).machine is not None)

        release = await bench.release_once(claim)
        assert isinstance(release, Releasing)
        assert release.accepted
        assert await bench.cloud.alive() == []  # the cloud's books say so, and its list does not yet
        await bench.release(claim)

        (machine,) = await bench.cloud.machines()
        gone = next(one["at"] for one in machine["history"] if one["state"] == "gone")
        run = await bench.row(
            "select gone_at, gone_at > cast(cast(:gone as text) as timestamptz)"
            " + interval '1 s' as late from run",
            gone=gone,
        )
        assert run.late


@pytest.mark.field_case("FC-025")
async def test_a_terminate_that_was_accepted_without_effect_is_repeated(bench: Bench):
    """Accepted is not gone: a machine that lists go on showing is ended again."""
    async with bench.running(backoff_max_s=STEP_S):
        claim = await bench.claim()
        await bench.rented(claim)
        await bench.until(lambda: bench.provisioning.view(claim.uid).machine is not None)
        await bench.cloud.add_fault("ignored", verb="terminate", times=2)

        await bench.release(claim)

        assert await bench.cloud.alive() == []
        assert (await bench.cloud.truth())["calls"]["terminate"] >= 3


async def test_one_region_that_fails_says_nothing_and_holds_up_no_other(bench: Bench):
    async with bench.running():
        there = await bench.claim(region="r2")
        kept = await bench.rented(there)
        await bench.until(lambda: bench.provisioning.view(there.uid).machine is not None)
        broken = await bench.cloud.add_fault("status", verb="list", region="r2", status=503, unlimited=True)
        await bench.cloud.add_fault("lost", verb="create", region="r2")
        lost = await bench.claim(region="r2")
        assert isinstance(await bench.ensure_once(lost), Waiting)

        here = await bench.claim(region="r1")
        await bench.rented(here)
        await bench.release(here)
        async with asyncio.timeout(20):  # past send_by, time-out and settling
            while (await _waiting(bench, lost)).for_s < 7.0:
                await asyncio.sleep(0.2)

        assert not bench.provisioning.view(there.uid).gone
        assert len(await bench.cloud.alive()) == 2
        await bench.cloud.clear_faults(broken)
        rented = await bench.rented(lost)
        assert {one["id"] for one in await bench.cloud.alive()} == {
            kept.ref.resource_id,
            rented.ref.resource_id,
        }


@pytest.mark.field_case("FC-100")
async def test_an_hour_of_a_refused_credential_ends_rents_and_concludes_nothing(bench: Bench):
    async with bench.running(backoff_max_s=STEP_S):
        live, leaving = await bench.claim(), await bench.claim()
        kept = await bench.rented(live)
        await bench.rented(leaving)
        await bench.until(lambda: bench.provisioning.view(live.uid).machine is not None)
        expired = await bench.cloud.add_fault("expired", unlimited=True)

        for _ in range(HOUR):
            release = await bench.release_once(leaving)
            assert isinstance(release, Releasing)
            assert not release.accepted
            await asyncio.sleep(release.after_s)
        await bench.until_row("select 1 from list_round where not complete and rounds > 3")

        assert not bench.provisioning.view(live.uid).gone
        assert len(await bench.cloud.alive()) == 2
        await bench.cloud.clear_faults(expired)
        await bench.release(leaving)
        (machine,) = await bench.cloud.alive()
        assert machine["id"] == kept.ref.resource_id


async def test_an_hour_of_500s_to_terminates_keeps_the_claim_and_then_ends_it(bench: Bench):
    async with bench.running(backoff_max_s=STEP_S):
        claim = await bench.claim()
        await bench.rented(claim)
        broken = await bench.cloud.add_fault("status", verb="terminate", status=500, unlimited=True)

        for _ in range(HOUR):
            release = await bench.release_once(claim)
            assert isinstance(release, Releasing)
            assert not release.accepted
            await asyncio.sleep(release.after_s)

        assert len(await bench.cloud.alive()) == 1
        assert (await bench.row("select state from rental")).state == "ending"
        assert (await bench.cloud.truth())["calls"]["terminate"] >= HOUR
        await bench.cloud.clear_faults(broken)
        await bench.release(claim)
        assert await bench.cloud.alive() == []


@pytest.mark.field_case("FX-06")
async def test_an_accepted_create_that_never_becomes_a_machine_is_told_gone_and_rents_no_second(bench: Bench):
    async with bench.running():
        await bench.cloud.add_fault("phantom", verb="create")
        claim = await bench.claim()

        await bench.rented(claim)
        await bench.until(lambda: bench.provisioning.view(claim.uid).gone)

        assert isinstance(await bench.ensure_once(claim), Rented)  # it had its machine: no second one
        assert list((await bench.cloud.creates()).values()) == [1]
        await bench.release(claim)
        assert (await bench.row("select state from rental")).state == "ended"
        assert await bench.cloud.bill_usd() == 0


@pytest.mark.field_case("FC-003")
async def test_a_create_that_takes_effect_after_its_claim_was_released_is_found_and_ended(bench: Bench):
    """The cloud held the request longer than anybody could wait for it, and we were restarted meanwhile."""
    async with bench.running():
        claim = await bench.claim()
        held = await bench.cloud.pause(verb="create")
        first = await bench.ensure_once(claim)
        assert isinstance(first, Waiting)

    async with bench.running():
        await bench.release(claim)
        await _gone(bench, claim)
        assert await bench.cloud.machines() == []

        await bench.cloud.resume(held)

        await bench.cloud.until(lambda truth: bool(truth["machines"]), what="the late effect")
        await bench.cloud.until(lambda truth: all(one["state"] == "gone" for one in truth["machines"]))
        run = await bench.until_row("select * from run where gone_at is not null")
        assert run.claim_uid == claim.uid
        assert (await bench.row("select state from rental")).state == "ended"


async def test_a_run_that_was_written_down_after_its_end_is_closed(bench: Bench):
    """By a former leader, whose answer came when all was over: nobody would bill it to an end."""
    async with bench.running(list_rest_s=0.5):
        claim = await bench.claim()
        await bench.rented(claim)
        await bench.release(claim)
        async with bench.engine.begin() as conn:
            await conn.execute(text("update run set gone_at = null"))

        run = await bench.until_row("select * from run where gone_at is not null")

        assert run.claim_uid == claim.uid


async def _waiting(bench: Bench, claim: ClaimSpec) -> Waiting:
    outcome = await bench.ensure_once(claim)
    assert isinstance(outcome, Waiting), outcome
    return outcome


async def _gone(bench: Bench, claim: ClaimSpec) -> None:
    """The claim object goes, as after its finalizer."""
    path = paths.nodeclaim(claim.name)
    await bench.kube.patch(path, {"metadata": {"finalizers": None}}, kind="merge")
    await bench.kube.delete(path)
    bench.provisioning.forget(ClaimUid(claim.uid))
