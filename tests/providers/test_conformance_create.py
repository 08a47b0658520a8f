"""Creates: what an order carries, and what each kind of answer, or none, lets the caller conclude."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from providers.base import (
    Accepted,
    BlockScope,
    MeterKind,
    OutcomeUnknown,
    Rejection,
    RejectionKind,
    Throttled,
    Tier,
    usd_per_hour,
)
from tests.providers.conftest import Pair, a_workload
from tests.providers.rows import having

NewPair = Callable[..., Awaitable[Pair]]


async def test_a_rented_machine_carries_its_identity_and_is_found_by_list_and_get(pair: Pair):
    attempt = pair.attempt()

    accepted = await pair.rented(attempt)

    (listed,) = await pair.found(attempt.identity)
    got = await pair.provider.get(accepted.ref)
    assert listed.ref == accepted.ref
    assert got is not None
    assert got.identity == attempt.identity
    (truth,) = await pair.at_cloud(attempt.identity)
    assert (truth["id"], truth["tier"], truth["count"]) == (accepted.ref.resource_id, "OnDemand", 8)


async def test_an_accepted_order_tells_place_price_account_and_time(pair: Pair):
    accepted = await pair.rented()

    assert (accepted.ref.provider, accepted.ref.account) == (pair.row.name, "default")
    assert accepted.ref.region == pair.region
    assert accepted.account_id == await pair.provider.account()
    assert accepted.reserved
    assert usd_per_hour(accepted.meters) == Decimal("32.00") + pair.row.extra_usd_per_hour
    assert all(isinstance(meter.quantity, Decimal) for meter in accepted.meters)
    assert accepted.created_at is not None
    assert accepted.created_at.utcoffset() == timedelta(0)


async def test_the_price_of_an_offer_is_that_of_the_order(pair: Pair):
    offering = await pair.offering(tier=pair.row.tier)

    accepted = await pair.rented(pair.attempt(tier=pair.row.tier))

    assert pair.provider.quote(a_workload(), offering) == accepted.meters


@pytest.mark.parametrize("row", having("disk-price"), ids=str)
async def test_disk_that_is_sold_apart_is_in_quote_and_order(new_pair: NewPair):
    pair = await new_pair(disk_usd_per_gib_hour="0.0002")
    workload = a_workload(disk_bytes=100 * 1024**3)

    accepted = await pair.rented(workload=workload)

    quoted = pair.provider.quote(workload, await pair.offering())
    assert quoted == accepted.meters
    assert [m.quantity for m in quoted if m.kind is MeterKind.DISK] == [Decimal(100)]


@pytest.mark.parametrize("kind", ["lost", "cut", "garbage", "error_body"])
async def test_an_answer_lost_after_the_effect_is_unknown_and_the_machine_is_listed(pair: Pair, kind: str):
    attempt = pair.attempt()
    await pair.cloud.add_fault(kind, verb="create", name=attempt.identity)

    with pytest.raises(OutcomeUnknown):
        await pair.provision(attempt)

    assert len(await pair.found(attempt.identity)) == 1


@pytest.mark.field_case("FC-001")
async def test_a_server_error_after_the_effect_is_unknown_and_the_machine_is_listed(pair: Pair):
    attempt = pair.attempt()
    await pair.cloud.add_fault("status", verb="create", name=attempt.identity, when="after", status=500)

    with pytest.raises(OutcomeUnknown):
        await pair.provision(attempt)

    assert len(await pair.found(attempt.identity)) == 1


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "lost", "when": "before"},
        {"kind": "status", "status": 500},
        {"kind": "status", "status": 503},
        {"kind": "status", "status": 409},
        {"kind": "status", "status": 400},
        {"kind": "status", "status": 403},
    ],
    ids=["lost", "500", "503", "409", "400", "403"],
)
@pytest.mark.behaviour(208, 209, 211, 213)
async def test_without_a_documented_code_no_failure_is_a_refusal(pair: Pair, fault: dict[str, Any]):
    attempt = pair.attempt()
    await pair.cloud.add_fault(verb="create", name=attempt.identity, **fault)

    with pytest.raises(OutcomeUnknown):
        await pair.provision(attempt)

    assert await pair.at_cloud(attempt.identity) == []
    assert (await pair.cloud.creates())[attempt.identity] == 1


@pytest.mark.field_case("FC-106")
async def test_a_throttled_order_was_not_carried_out_and_says_how_long_to_wait(pair: Pair):
    attempt = pair.attempt()
    await pair.cloud.add_fault("throttle", verb="create", name=attempt.identity, retry_after_s=7)

    with pytest.raises(Throttled) as caught:
        await pair.provision(attempt)

    assert caught.value.retry_after_s == 7
    assert await pair.at_cloud(attempt.identity) == []


async def test_an_order_without_a_connection_was_not_carried_out(new_pair: NewPair):
    pair = await new_pair()
    await pair.offering()
    await pair.cloud.stop()

    with pytest.raises(Throttled):
        await pair.provision()


@pytest.mark.field_case("FC-079")
async def test_an_order_is_given_up_when_its_time_is_over_and_is_then_unknown(new_pair: NewPair):
    pair = await new_pair(config={"call_timeout_s": 0.5})
    attempt = pair.attempt()
    await pair.offering()
    await pair.cloud.pause(verb="create", when="after")

    with pytest.raises(OutcomeUnknown):
        await pair.provision(attempt)

    assert pair.provider.traits.provision_deadline_s == 0.5
    assert len(await pair.found(attempt.identity)) == 1


@pytest.mark.parametrize(
    "kind",
    [RejectionKind.CAPACITY, RejectionKind.QUOTA, RejectionKind.UNSUPPORTED],
)
@pytest.mark.behaviour(205, 207)
@pytest.mark.field_case("FC-069")
async def test_what_is_refused_for_want_of_it_blocks_that_shape_there_and_in_that_tier(
    pair: Pair, kind: RejectionKind
):
    attempt = pair.attempt(tier=pair.row.tier)
    await pair.cloud.add_fault("refuse", verb="create", name=attempt.identity, code=kind.value)

    answer = await pair.provision(attempt)

    assert isinstance(answer, Rejection)
    assert answer.kind is kind
    there = BlockScope(accelerator="h100:8", tier=pair.row.tier, region=pair.region)
    assert answer.scope == (BlockScope(everything=True) if kind in pair.row.wide else there)
    assert await pair.at_cloud(attempt.identity) == []


@pytest.mark.behaviour(206)
@pytest.mark.field_case("FC-070")
async def test_a_refused_credential_blocks_everything(pair: Pair):
    await pair.cloud.add_fault("refuse", verb="create", code="auth")

    answer = await pair.provision()

    assert isinstance(answer, Rejection)
    assert (answer.kind, answer.scope) == (RejectionKind.AUTH, BlockScope(everything=True))


@pytest.mark.field_case("FC-074")
async def test_a_wrong_order_blocks_no_offering(pair: Pair):
    answer = await pair.provision(workload=a_workload(image=""))

    assert isinstance(answer, Rejection)
    assert (answer.kind, answer.scope) == (RejectionKind.INVALID, None)


@pytest.mark.parametrize("row", having("hosts"), ids=str)
async def test_what_one_host_refuses_blocks_that_host_alone(pair: Pair):
    await pair.cloud.add_fault("refuse", verb="create", code="capacity", host="host-7")

    answer = await pair.provision()

    assert isinstance(answer, Rejection)
    assert answer.scope == BlockScope(host="host-7")


@pytest.mark.parametrize("row", having("hosts"), ids=str)
async def test_a_host_to_avoid_is_avoided(new_pair: NewPair):
    pair = await new_pair(hosts=2)

    answers = [await pair.provision(avoid=frozenset({"host-1"})) for _ in range(3)]

    assert {answer.host for answer in answers if isinstance(answer, Accepted)} == {"host-2"}


async def test_real_want_of_capacity_is_refused_as_such(new_pair: NewPair):
    pair = await new_pair()
    await pair.cloud.set_capacity(8, tier="OnDemand", accelerator="H100", region=pair.region)
    await pair.rented()

    answer = await pair.provision()

    assert isinstance(answer, Rejection)
    assert answer.kind is RejectionKind.CAPACITY
    assert len(await pair.cloud.alive()) == 1


async def test_an_order_above_its_ceiling_is_not_sent(pair: Pair):
    attempt = pair.attempt(ceiling_usd_per_hour=Decimal("31.99"))

    answer = await pair.provision(attempt)

    assert isinstance(answer, Rejection)
    assert answer.kind is RejectionKind.PRICE
    assert attempt.identity not in await pair.cloud.creates()


@pytest.mark.parametrize("row", having("price"), ids=str)
async def test_a_price_that_rose_above_the_ceiling_is_refused_by_the_cloud(new_pair: NewPair):
    pair = await new_pair(check_ceiling=True)
    await pair.offering()
    await pair.cloud.set_price("9.00", tier="OnDemand", accelerator="H100", region=pair.region)

    answer = await pair.provision(pair.attempt(ceiling_usd_per_hour=Decimal("40")))

    assert isinstance(answer, Rejection)
    assert answer.kind is RejectionKind.PRICE
    assert await pair.cloud.machines() == []


@pytest.mark.parametrize("row", having("idempotent"), ids=str)
async def test_the_same_attempt_sent_again_is_the_same_machine(pair: Pair):
    attempt = pair.attempt()
    assert pair.provider.traits.replay_for_s is not None

    first = await pair.rented(attempt)
    again = await pair.rented(attempt)

    assert again.ref == first.ref
    assert len(await pair.at_cloud(attempt.identity)) == 1


@pytest.mark.parametrize("row", having("idempotent"), ids=str)
async def test_a_replay_after_a_lost_answer_is_the_machine_that_was_made(pair: Pair):
    attempt = pair.attempt()
    await pair.cloud.add_fault("lost", verb="create", name=attempt.identity)
    with pytest.raises(OutcomeUnknown):
        await pair.provision(attempt)

    again = await pair.rented(attempt)

    (machine,) = await pair.at_cloud(attempt.identity)
    assert machine["id"] == again.ref.resource_id


@pytest.mark.parametrize("row", having("idempotent"), ids=str)
async def test_a_replay_that_differs_is_unknown_and_makes_nothing(pair: Pair):
    attempt = pair.attempt()
    await pair.rented(attempt)

    with pytest.raises(OutcomeUnknown):
        await pair.provision(attempt, a_workload(image="app:2"))

    assert len(await pair.at_cloud(attempt.identity)) == 1


@pytest.mark.parametrize("row", having("idempotent"), ids=str)
async def test_a_token_answered_with_another_attempts_machine_is_unknown(new_pair: NewPair):
    pair = await new_pair(on_token_reuse="shrug")
    first = pair.attempt()
    await pair.rented(first)

    for other in (
        replace(first, identity=pair.attempt().identity),
        replace(first, tier=Tier.SPOT),
    ):
        with pytest.raises(OutcomeUnknown):
            await pair.provision(other)

    assert len(await pair.cloud.machines()) == 1


async def test_without_idempotent_creates_no_replay_is_promised(new_pair: NewPair):
    pair = await new_pair(idempotent_for_s=None)
    attempt = pair.attempt()

    first, second = await pair.rented(attempt), await pair.rented(attempt)

    assert pair.provider.traits.replay_for_s is None
    assert first.ref != second.ref
    assert len(await pair.found(attempt.identity)) == 2


@pytest.mark.parametrize("row", having("queue"), ids=str)
async def test_an_order_without_capacity_is_queued_and_runs_once_there_is_some(new_pair: NewPair):
    pair = await new_pair(on_no_capacity="queue")
    await pair.cloud.set_capacity(0, tier="OnDemand", accelerator="H100", region=pair.region)

    accepted = await pair.rented()
    waiting = await pair.provider.get(accepted.ref)
    await pair.cloud.set_capacity(8, tier="OnDemand", accelerator="H100", region=pair.region)
    running = await pair.provider.get(accepted.ref)

    assert not accepted.reserved
    assert waiting is not None
    assert waiting.state == "queued"
    assert running is not None
    assert running.state == "running"


async def test_an_order_taken_that_becomes_nothing_is_never_listed(pair: Pair):
    attempt = pair.attempt()
    await pair.cloud.add_fault("phantom", verb="create", name=attempt.identity)

    accepted = await pair.rented(attempt)

    assert await pair.found(attempt.identity) == []
    assert await pair.provider.get(accepted.ref) is None


async def test_the_clouds_clock_is_measured_against_ours(new_pair: NewPair):
    pair = await new_pair(clock={"skew_s": 3600})

    accepted = await pair.rented()

    assert accepted.clock_offset_s is not None
    assert accepted.clock_offset_s == pytest.approx(3600, abs=60)


async def test_secrets_show_in_no_error_repr_log_or_state(
    pair: Pair, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
):
    caplog.set_level("DEBUG")
    workload = a_workload(env={"API_KEY": "hunter2-secret"})
    attempt = pair.attempt()
    await pair.cloud.add_fault("status", verb="create", name=attempt.identity, when="after")

    with pytest.raises(OutcomeUnknown) as caught:
        await pair.provision(attempt, workload)

    out, err = capfd.readouterr()
    said = [
        repr(caught.value),
        str(caught.value.__cause__),
        repr(workload),
        repr(pair.provider),
        caplog.text,
        out,
        err,
    ]
    said += [pair.cloud.log.read_text(), str(await pair.cloud.truth(name=attempt.identity))]
    assert "API_KEY" in said[-1]
    assert not [text for text in said if "hunter2" in text]
