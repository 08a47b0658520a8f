"""Lists and gets: a list is complete or unknown, and unknown is never absent."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from providers.base import CredentialRejected, MachineState, ResourceId, Throttled, Unavailable
from tests.providers.conftest import Pair
from tests.providers.rows import having

NewPair = Callable[..., Awaitable[Pair]]


async def test_a_list_without_faults_is_complete_and_names_the_account(pair: Pair):
    await pair.rented()

    seen = await pair.round()

    assert seen.unknown is None
    assert seen.account_id == await pair.provider.account()
    assert seen.region == (pair.region if pair.provider.traits.lists_by_region else "")


async def test_machines_that_are_not_ours_are_listed_too(pair: Pair):
    planted = await pair.cloud.plant(name="somebody-elses", region=pair.region)

    seen = await pair.round()

    assert planted["id"] in [machine.ref.resource_id for machine in seen.machines]


async def test_a_machine_without_a_name_has_no_identity(pair: Pair):
    planted = await pair.cloud.plant(region=pair.region)

    seen = await pair.round()

    (machine,) = [machine for machine in seen.machines if machine.ref.resource_id == planted["id"]]
    assert machine.identity is None


@pytest.mark.field_case("FC-081")
async def test_times_are_aware_utc_and_in_order(pair: Pair):
    accepted = await pair.rented()

    machine = await pair.provider.get(accepted.ref)

    assert machine is not None
    assert machine.created_at is not None
    assert machine.started_at is not None
    assert machine.created_at.utcoffset() == machine.started_at.utcoffset() == timedelta(0)
    assert machine.created_at == accepted.created_at
    assert machine.created_at <= machine.started_at


@pytest.mark.parametrize("row", having("pages"), ids=str)
async def test_a_list_of_many_pages_is_read_to_its_end(new_pair: NewPair):
    pair = await new_pair(page_size=2)
    made = {(await pair.rented()).ref for _ in range(5)}

    seen = await pair.round()

    assert seen.unknown is None
    assert {machine.ref for machine in seen.machines} == made
    assert len(seen.machines) == 5
    assert seen.calls == 3


@pytest.mark.parametrize("row", having("pages"), ids=str)
@pytest.mark.parametrize("kind", ["status", "lost", "cut", "garbage", "error_body", "throttle"])
async def test_a_page_that_fails_leaves_the_round_unknown_with_what_was_seen(new_pair: NewPair, kind: str):
    pair = await new_pair(page_size=2)
    for _ in range(5):
        await pair.rented()
    await pair.cloud.add_fault(kind, verb="list", skip=1, unlimited=True)

    seen = await pair.round()

    assert seen.unknown is not None
    assert len(seen.machines) == 2


@pytest.mark.parametrize("row", having("total"), ids=str)
@pytest.mark.parametrize("kind", ["truncate", "missing_total", "repeat_page", "error_body", "garbage"])
async def test_a_list_that_is_not_proven_whole_is_unknown(new_pair: NewPair, kind: str):
    pair = await new_pair()
    for _ in range(3):
        await pair.rented()
    await pair.cloud.add_fault(kind, verb="list", keep=1, unlimited=True)

    seen = await pair.round()

    assert seen.unknown is not None


async def test_a_list_that_fails_at_once_is_an_error_not_an_empty_list(pair: Pair):
    await pair.cloud.add_fault("status", verb="list", unlimited=True)

    with pytest.raises(Unavailable):
        await pair.provider.list(pair.regions)


async def test_a_throttled_list_says_how_long_to_wait(pair: Pair):
    await pair.cloud.add_fault("throttle", verb="list", retry_after_s=3, unlimited=True)

    with pytest.raises(Throttled) as caught:
        await pair.provider.list(pair.regions)

    assert caught.value.retry_after_s == 3


@pytest.mark.parametrize("row", having("list-account"), ids=str)
async def test_another_accounts_list_shows_in_its_account(pair: Pair):
    own = await pair.provider.account()
    await pair.cloud.add_fault("foreign", verb="list")

    seen = await pair.round()

    assert seen.account_id is not None
    assert seen.account_id != own


@pytest.mark.parametrize("row", [row for row in having("pages") if row.scenario.get("regions")], ids=str)
async def test_one_regions_failure_leaves_the_others_complete(pair: Pair):
    await pair.cloud.add_fault("status", verb="list", region="r1", unlimited=True)

    first, second = await pair.provider.list(frozenset({"r1", "r2"}))

    assert (first.region, first.unknown is None) == ("r1", False)
    assert (second.region, second.unknown is None) == ("r2", True)


@pytest.mark.parametrize("row", [row for row in having("pages") if row.scenario.get("regions")], ids=str)
async def test_a_machine_is_listed_in_its_own_region_only(pair: Pair):
    accepted = await pair.rented()

    first, second = await pair.provider.list(frozenset({"r1", "r2"}))

    assert accepted.ref in [machine.ref for machine in first.machines]
    assert accepted.ref not in [machine.ref for machine in second.machines]


@pytest.mark.parametrize("row", [row for row in having("pages") if row.scenario.get("regions")], ids=str)
async def test_a_cloud_that_lists_all_regions_at_once_answers_one_round(new_pair: NewPair):
    pair = await new_pair(lists="global")
    await pair.rented()
    await pair.cloud.plant(region="r2")

    (seen,) = await pair.provider.list(frozenset({"r1"}))

    assert not pair.provider.traits.lists_by_region
    assert seen.region == ""
    assert sorted(machine.ref.region for machine in seen.machines) == ["r1", "r2"]


async def test_an_expired_credential_says_nothing_of_any_machine(pair: Pair):
    accepted = await pair.rented()
    await pair.cloud.add_fault("expired", unlimited=True)

    for ask in (
        pair.provider.account(),
        pair.provider.list(pair.regions),
        pair.provider.get(accepted.ref),
        pair.provider.terminate(accepted.ref),
    ):
        with pytest.raises(CredentialRejected):
            await ask


async def test_a_lagging_list_shows_a_new_machine_within_the_settling_time(new_pair: NewPair):
    pair = await new_pair(lag={"list_create_s": 1}, clock={"scale": 10})
    attempt = pair.attempt()

    await pair.rented(attempt)
    at_first = await pair.found(attempt.identity)
    await pair.cloud.until(lambda truth: _age_s(truth) > 1, what="the lag")

    assert at_first == []
    assert len(await pair.found(attempt.identity)) == 1
    assert pair.provider.traits.settle_after_s > 1


async def test_a_lagging_list_still_shows_a_machine_that_is_gone_but_a_get_does_not(new_pair: NewPair):
    pair = await new_pair(lag={"list_terminate_s": 3600}, history_s=0)
    attempt = pair.attempt()
    accepted = await pair.rented(attempt)

    await pair.provider.terminate(accepted.ref)

    (stale,) = await pair.found(attempt.identity)
    assert stale.state is MachineState.RUNNING
    assert await pair.provider.get(accepted.ref) is None


async def test_a_get_of_an_unknown_id_is_none(pair: Pair):
    accepted = await pair.rented()
    unknown = replace(accepted.ref, resource_id=ResourceId("no-such"))

    assert await pair.provider.get(unknown) is None


async def test_a_get_by_a_fresh_id_may_lag(new_pair: NewPair):
    pair = await new_pair(lag={"get_create_s": 3600})
    accepted = await pair.rented()

    assert await pair.provider.get(accepted.ref) is None
    assert len(await pair.cloud.alive()) == 1


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "status", "status": 404},
        {"kind": "status", "status": 500},
        {"kind": "lost"},
        {"kind": "cut"},
        {"kind": "garbage"},
        {"kind": "error_body"},
    ],
    ids=["bare-404", "500", "lost", "cut", "garbage", "error-body"],
)
async def test_a_get_that_failed_is_not_absence(pair: Pair, fault: dict[str, Any]):
    accepted = await pair.rented()
    await pair.cloud.add_fault(verb="get", unlimited=True, **fault)

    with pytest.raises(Unavailable):
        await pair.provider.get(accepted.ref)


@pytest.mark.field_case("FC-079")
async def test_reads_are_given_up_when_their_time_is_over(new_pair: NewPair):
    pair = await new_pair(config={"call_timeout_s": 0.5})
    accepted = await pair.rented()
    await pair.cloud.pause()

    answers = await asyncio.gather(
        pair.provider.account(),
        pair.provider.offers(),
        pair.provider.list(pair.regions),
        pair.provider.get(accepted.ref),
        pair.provider.stop(accepted.ref, grace_s=1),
        pair.provider.terminate(accepted.ref),
        return_exceptions=True,
    )

    silent = [answer for answer in answers if answer is None]  # a stop that is nothing asks nobody
    assert len(silent) == (0 if "stop" in pair.row.features else 1)
    assert {type(answer) for answer in answers if answer is not None} == {Unavailable}


def _age_s(truth: dict[str, Any]) -> float:
    created = datetime.fromisoformat(truth["machines"][0]["created_at"])
    return (datetime.fromisoformat(truth["now"]) - created).total_seconds()
