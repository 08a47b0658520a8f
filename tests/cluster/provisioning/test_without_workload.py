"""A caller that cannot say what to run: nothing is sent, and what was sent before is still found."""

import pytest

from app.provisioning.model import ClaimSpec, Outcome, Rented, Waiting, Why
from providers.base import Workload
from tests.cluster.provisioning.conftest import POLICY, WORKLOAD, Bench
from tests.support.clouds import SMALL
from tests.support.composed import until

REPLAYING = {**SMALL, "idempotent_for_s": 60}


async def ensure(bench: Bench, claim: ClaimSpec, workload: Workload | None = None) -> Outcome:
    return await bench.provisioning.ensure(claim, workload, port=bench.door, policy=POLICY)


@pytest.mark.behaviour(123)
async def test_nothing_is_sent_marked_or_written_down(bench: Bench):
    async with bench.running():
        claim = await bench.claim()

        outcome = await ensure(bench, claim)

        assert isinstance(outcome, Waiting)
        assert outcome.why is Why.NO_WORKLOAD
        assert await bench.cloud.creates() == {}
        assert list(await bench.rows("select 1 from provision_attempt")) == []
        assert isinstance(await ensure(bench, claim, WORKLOAD), Rented)


@pytest.mark.parametrize("scenario", [SMALL, REPLAYING], ids=["no-tokens", "tokens"])
async def test_what_an_earlier_call_has_sent_is_found(bench: Bench):
    async with bench.running():
        await bench.cloud.add_fault("lost", verb="create")
        claim = await bench.claim()
        assert isinstance(await ensure(bench, claim, WORKLOAD), Waiting)

        async def found() -> Rented | None:
            outcome = await ensure(bench, claim)
            return outcome if isinstance(outcome, Rented) else None

        rented = await until(found)

        (machine,) = await bench.cloud.machines()
        assert machine["id"] == rented.ref.resource_id
        assert sum((await bench.cloud.creates()).values()) == 1
