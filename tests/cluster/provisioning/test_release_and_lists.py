"""What a release may conclude from lists that are not whole, and from those of other regions."""

import asyncio

import pytest

from app.provisioning.model import ClaimSpec, Releasing, Why
from tests.cluster.provisioning.conftest import Bench

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("fault", ["truncate", "shrink", "foreign", "garbage", "error_body", "missing_total"])
async def test_a_release_does_not_end_by_lists_that_are_not_whole(bench: Bench, fault: str):
    """Its machine goes at once all the same."""
    async with bench.running():
        kept, claim = await bench.claim(), await bench.claim()
        await bench.rented(kept)
        await bench.rented(claim)
        await bench.until(lambda: bench.provisioning.view(kept.uid).machine is not None)
        wrong = await bench.cloud.add_fault(fault, verb="list", unlimited=True)
        lists = (await bench.cloud.truth())["calls"]["list"]

        async def released_while_more_lists_came() -> Releasing:
            while True:
                release = await bench.release_once(claim)
                assert isinstance(release, Releasing)
                if (await bench.cloud.truth())["calls"]["list"] > lists + 10:
                    return release
                await asyncio.sleep(0.1)

        release = await asyncio.wait_for(released_while_more_lists_came(), 30)

        assert release.accepted
        assert len(await bench.cloud.alive()) == 1
        assert (
            await bench.row("select state from rental where claim_uid = :uid", uid=claim.uid)
        ).state == "ending"
        assert not bench.provisioning.view(kept.uid).gone
        await bench.cloud.clear_faults(wrong)
        await bench.release(claim)
        assert len(await bench.cloud.alive()) == 1


async def test_a_release_needs_the_lists_of_its_own_region_alone(bench: Bench):
    async with bench.running():
        here, there = await bench.claim(region="r1"), await bench.claim(region="r2")
        await bench.rented(here)
        await bench.rented(there)
        failing = await bench.cloud.add_fault("status", verb="list", region="r2", unlimited=True)
        await bench.until_row("select 1 from list_round where region = 'r2' and not complete")

        await bench.release(here)

        (left,) = await bench.cloud.alive()
        assert left["region"] == "r2"
        lists = (await bench.cloud.truth())["calls"]["list"]
        while (await bench.cloud.truth())["calls"]["list"] < lists + 12:
            release = await bench.release_once(there)
            assert isinstance(release, Releasing)
            await asyncio.sleep(0.1)
        assert (release.accepted, release.why) == (True, Why.TERMINATING)
        assert (
            await bench.row("select state from rental where claim_uid = :uid", uid=there.uid)
        ).state == "ending"

        await bench.cloud.clear_faults(failing)
        await bench.release(there)
        assert await bench.cloud.alive() == []


async def _state(bench: Bench, claim: ClaimSpec) -> str:
    row = await bench.row("select state from rental where claim_uid = :uid", uid=claim.uid)
    return str(row.state)
