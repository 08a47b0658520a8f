"""The limit on the machine itself, and the parts that lie beside it: what the fake cloud does with both."""

import asyncio
from typing import Any

import pytest

from providers.base import Machine, MachineState, Ref, ResourceId, Unavailable
from providers.capabilities import Dropped, Extends, HasParts, PartKind
from tests.providers.conftest import Pair, a_workload
from tests.providers.rows import ROWS

pytestmark = pytest.mark.parametrize("row", ROWS[:1], ids=str)

FAST_CLOCK = {"clock": {"scale": 200.0}, "life": {"boot_s": 0}}  # a minute there is 0.3 s here
MINUTE = {"dead_man_s": 60.0}


async def _machine(pair: Pair, ref: Ref) -> Machine | None:
    return await pair.provider.get(ref)


async def test_a_machine_that_nobody_extends_ends_by_itself_and_says_why(new_pair: Any):
    pair = await new_pair(config=MINUTE, **FAST_CLOCK)
    accepted = await pair.rented(workload=a_workload(dead_man=True))

    truth = await pair.cloud.until(lambda told: told["machines"][0]["state"] == "gone")

    (machine,) = truth["machines"]
    assert machine["id"] == accepted.ref.resource_id
    assert machine["end_reason"] == "lifetime"
    assert machine["terminates"] == 0


async def test_extending_puts_the_limit_off_and_a_service_has_none(new_pair: Any):
    pair = await new_pair(config={"dead_man_s": 3600.0})
    batch = await pair.rented(workload=a_workload(dead_man=True))
    service = await pair.rented(workload=a_workload())
    assert isinstance(pair.provider, Extends)
    before = await _machine(pair, batch.ref)
    assert before is not None
    assert before.expires_at is not None
    await pair.cloud.until(lambda told: told["now"] > before.created_at.isoformat())

    assert await pair.provider.extend(batch.ref)
    assert await pair.provider.extend(service.ref)

    after, other = await _machine(pair, batch.ref), await _machine(pair, service.ref)
    assert after is not None
    assert after.expires_at is not None
    assert after.expires_at > before.expires_at
    assert other is not None
    assert other.expires_at is None
    assert not await pair.provider.extend(
        Ref(provider="fake", account="default", region=pair.region, resource_id=ResourceId("fake-999999"))
    )


async def test_a_limit_outlives_the_cloud_being_killed(new_pair: Any):
    pair = await new_pair(config=MINUTE, **FAST_CLOCK)
    await pair.rented(workload=a_workload(dead_man=True))
    await pair.cloud.kill()
    await pair.cloud.start()

    await pair.cloud.until(lambda told: told["machines"][0]["end_reason"] == "lifetime")


async def test_without_a_limit_of_ours_none_is_asked_for(new_pair: Any):
    pair = await new_pair()
    accepted = await pair.rented(workload=a_workload(dead_man=True))

    machine = await _machine(pair, accepted.ref)

    assert machine is not None
    assert machine.expires_at is None


async def test_parts_are_listed_with_their_names_and_dropped_when_nothing_uses_them(new_pair: Any):
    pair = await new_pair(keys=True)
    attempt = pair.attempt()
    accepted = await pair.rented(attempt)
    provider = pair.provider
    assert isinstance(provider, HasParts)
    await pair.cloud.put_part("volume", name="datasets", region=pair.region)

    (found,) = await provider.parts(pair.regions)
    assert found.unknown is None
    assert found.account_id == await provider.account()
    by_kind = {part.kind: part for part in found.parts}
    key = by_kind[PartKind.KEY]
    assert (key.identity, key.in_use) == (attempt.identity, True)
    assert by_kind[PartKind.VOLUME].identity == "datasets"
    assert await provider.drop_part(key) is Dropped.IN_USE

    await provider.terminate(accepted.ref)
    assert await provider.drop_part(key) is Dropped.ACCEPTED
    assert await provider.drop_part(key) is Dropped.NOT_FOUND
    assert {part["kind"] for part in await pair.cloud.parts()} == {"volume"}


async def test_parts_that_cannot_be_listed_are_an_error_and_not_an_empty_list(new_pair: Any):
    pair = await new_pair()
    assert isinstance(pair.provider, HasParts)
    for fault in ("garbage", "error_body"):
        await pair.cloud.add_fault(fault, verb="parts")
        with pytest.raises(Unavailable):
            await pair.provider.parts(pair.regions)


async def test_the_limit_counts_from_the_order_also_while_it_boots(new_pair: Any):
    pair = await new_pair(config=MINUTE, clock={"scale": 200.0}, life={"boot_s": 600})
    accepted = await pair.rented(workload=a_workload(dead_man=True))
    machine = await _machine(pair, accepted.ref)
    assert machine is None or machine.state in (MachineState.BOOTING, MachineState.GONE)

    async with asyncio.timeout(20):
        await pair.cloud.until(lambda told: told["machines"][0]["end_reason"] == "lifetime")
