"""RunPod's quirks, each as its simulator shows it, and what the unmodified adapter makes of it."""

import asyncio
import hashlib
import os
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import aiohttp
import orjson
import pytest

from providers.base import (
    Accelerator,
    Accepted,
    BlockScope,
    CredentialRejected,
    EndReason,
    Machine,
    MachineState,
    Offering,
    RegistryLogin,
    Rejection,
    RejectionKind,
    Tier,
    Unavailable,
    usd_per_hour,
)
from providers.capabilities import Dropped, PartKind
from providers.runpod import orders
from providers.runpod.adapter import RunPod
from tests.providers.conftest import Pair, a_workload, an_attempt, opened
from tests.providers.rows import ROWS, RUNPOD
from tests.support.clouds import FakeCloud
from tests.support.composed import until

NewPair = Callable[..., Awaitable[Pair]]
A40 = Accelerator(type="A40", count=1)
CENTRES = {"regions": ["EU-RO-1", "US-CA-2"], "lists": "global"}
ROW = next(row for row in ROWS if row.name == "runpod")

pytestmark = [pytest.mark.parametrize("row", [ROW], ids=str), pytest.mark.slow]


def runpod(pair: Pair) -> RunPod:
    assert isinstance(pair.provider, RunPod)
    return pair.provider


async def offering(pair: Pair, *, shape: str, count: int = 1) -> Offering:
    rows = await pair.provider.offers()
    return next(
        row
        for row in rows
        if row.shape == shape and row.accelerator is not None and row.accelerator.count == count
    )


async def ordered(
    pair: Pair,
    workload: Any = None,
    *,
    shape: str = "NVIDIA A40",
    offer: Offering | None = None,
    **attempt: Any,
) -> Accepted | Rejection:
    offer = offer or await offering(pair, shape=shape)
    return await pair.provider.provision(
        an_attempt(**attempt),
        workload or a_workload(accelerator=A40),
        offering=offer,
        access=None,
        avoid=frozenset(),
    )


async def rented(pair: Pair, workload: Any = None, **kwargs: Any) -> Accepted:
    answer = await ordered(pair, workload, **kwargs)
    assert isinstance(answer, Accepted), answer
    return answer


async def got(pair: Pair, accepted: Accepted) -> Machine:
    machine = await pair.provider.get(accepted.ref)
    assert machine is not None
    return machine


async def console(cloud: FakeCloud, method: str, path: str, body: Any = None) -> Any:
    """Somebody else who has the account."""
    data = None if body is None else orjson.dumps(body)
    headers = {"User-Agent": "a browser"}
    async with (
        aiohttp.ClientSession() as http,
        http.request(method, cloud.url + path, data=data, headers=headers) as answer,
    ):
        raw = await answer.read()
        return orjson.loads(raw) if raw else None


# --- where, what and for how much ----------------------------------------------------------------------


async def test_data_centres_are_asked_for_and_the_place_is_told(new_pair: NewPair):
    pair = await new_pair(**CENTRES)

    accepted = await rented(pair, region="US-CA-2")

    assert (accepted.ref.region, accepted.location, accepted.unfit) == ("", "US-CA-2", None)
    assert (await got(pair, accepted)).location == "US-CA-2"


async def test_a_pod_in_a_place_that_the_pool_does_not_allow_is_unfit(new_pair: NewPair):
    pair = await new_pair(**CENTRES, quirks={"elsewhere": "US-CA-2"})

    accepted = await rented(pair, region="EU-RO-1")

    assert accepted.unfit is not None
    assert accepted.unfit.kind is RejectionKind.CAPACITY
    assert accepted.unfit.scope == BlockScope(accelerator="a40:1", tier=Tier.ON_DEMAND, region="EU-RO-1")


async def test_a_data_centre_that_runpod_does_not_have_is_refused_before_anything_is_sent(new_pair: NewPair):
    pair = await new_pair(regions=["EU-RO-1", "XX-NEW-1"], lists="global")
    offer = await offering(pair, shape="NVIDIA A40")

    wrong = await ordered(pair, offer=offer, region="EU-RO-1|EU-ZZ-9")
    new = await rented(pair, offer=offer, region="xx-new-1")

    assert isinstance(wrong, Rejection)
    assert (wrong.kind, wrong.scope) == (RejectionKind.UNSUPPORTED, BlockScope(region="EU-RO-1|EU-ZZ-9"))
    assert "no data centre EU-ZZ-9" in wrong.message
    assert new.location == "XX-NEW-1"  # the live catalogue names it


async def test_of_several_data_centres_one_with_room_is_taken(new_pair: NewPair):
    pair = await new_pair(**CENTRES)
    await pair.cloud.set_capacity(0, tier="OnDemand", accelerator="A40", region="EU-RO-1")

    accepted = await rented(pair, region="EU-RO-1|US-CA-2")

    assert accepted.location == "US-CA-2"


async def test_community_hosts_are_another_price_and_another_stock(new_pair: NewPair):
    pair = await new_pair()
    await pair.cloud.set_capacity(0, tier="Spot", accelerator="A40")

    secure = await rented(pair)
    community = await ordered(pair, shape="community/NVIDIA A40")

    assert usd_per_hour(secure.meters) == Decimal("0.44") + ROW.extra_usd_per_hour
    assert isinstance(community, Rejection)
    assert community.kind is RejectionKind.CAPACITY


@pytest.mark.behaviour(385)
async def test_community_hosts_without_capacity_are_refused_as_capacity_not_waited_for(new_pair: NewPair):
    pair = await new_pair()
    await pair.cloud.set_capacity(0, tier="Spot", accelerator="A40")

    answer = await ordered(pair, shape="community/NVIDIA A40")

    assert isinstance(answer, Rejection)
    assert answer.kind is RejectionKind.CAPACITY
    assert pair.provider.traits.tiers == {Tier.ON_DEMAND}


async def test_community_hosts_cannot_be_had_by_region(new_pair: NewPair):
    pair = await new_pair(**CENTRES)
    offer = await offering(pair, shape="community/NVIDIA A40")

    answer = await ordered(pair, offer=offer, region="EU-RO-1")
    prepared = await runpod(pair).prepare(
        a_workload(),
        offering=offer,
        region="EU-RO-1",
        ceiling_usd_per_hour=None,
        options={},
        avoid=frozenset(),
    )

    for refused in (answer, prepared):
        assert isinstance(refused, Rejection)
        assert refused.kind is RejectionKind.UNSUPPORTED
        assert refused.scope == BlockScope(accelerator="a40:1", region="EU-RO-1")
    assert await pair.cloud.machines() == []


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, "NVIDIA A40"),
        ({"cloud": "SECURE"}, "NVIDIA A40"),
        ({"cloud": "COMMUNITY"}, "community/NVIDIA A40"),
    ],
)
async def test_only_an_option_leads_to_community_hosts(pair: Pair, options: dict[str, str], shape: str):
    rows = [row for row in await pair.provider.offers() if row.accelerator and row.accelerator.key == "a40:1"]

    chosen = runpod(pair).choose(a_workload(options=options), rows)

    assert [row.shape for row in chosen] == [shape]


async def test_fc_083_what_was_really_asked_is_what_counts(new_pair: NewPair):
    pair = await new_pair()
    offer = await offering(pair, shape="NVIDIA A40")
    await pair.cloud.set_price("0.98", tier="OnDemand", accelerator="A40")

    cheap = await rented(pair, offer=offer, ceiling_usd_per_hour=Decimal("1.50"))
    dear = await rented(pair, offer=offer, ceiling_usd_per_hour=Decimal("0.50"))

    assert cheap.meters[0].usd == Decimal("0.98")
    assert cheap.unfit is None
    assert dear.unfit is not None
    assert dear.unfit.kind is RejectionKind.PRICE


async def test_the_bill_of_the_cloud_is_that_of_the_declared_rule(new_pair: NewPair):
    """Accepted to the end, by the second: what the simulator's own meter says of a pod's life."""
    pair = await new_pair(clock={"scale": 200}, life={"queue_s": 20, "boot_s": 40})
    accepted = await rented(pair)
    await pair.cloud.until(lambda truth: truth["machines"][0]["state"] == "running", what="it runs")
    await pair.provider.terminate(accepted.ref)

    (machine,) = await pair.cloud.machines()
    rate = usd_per_hour(accepted.meters)
    assert rate is None or accepted.reserved is False
    shown = Decimal(machine["billed_s"]) * (Decimal("0.44") + 20 * Decimal("0.00013698630136986301")) / 3600
    assert Decimal(machine["bill_usd"]) == pytest.approx(shown)
    assert Decimal(machine["billed_s"]) >= 60


async def test_an_unknown_card_is_a_wrong_request_and_never_a_shortage(new_pair: NewPair):
    pair = await new_pair()
    offer = replace(await offering(pair, shape="NVIDIA A40"), shape="NVIDIA A41")

    answer = await ordered(pair, offer=offer)

    assert isinstance(answer, Rejection)
    assert (answer.kind, answer.scope) == (RejectionKind.INVALID, None)


# --- the account ---------------------------------------------------------------------------------------


async def test_the_account_is_a_template_of_ours_that_is_made_once(new_pair: NewPair):
    pair = await new_pair()

    again = await opened(ROW, pair.cloud)
    other = await opened(ROW, pair.cloud, installation="other")

    assert await again.account() == await pair.provider.account()
    assert await other.account() != await pair.provider.account()
    shown = await console(pair.cloud, "GET", "/v2/templates")
    assert sorted(each["name"] for each in shown["templates"]) == ["nb-other-account", "nb-test-account"]
    await asyncio.gather(again.close(), other.close())


async def test_fc_100_another_accounts_answer_is_no_answer(new_pair: NewPair):
    pair = await new_pair()
    await rented(pair)
    assert (await pair.round()).unknown is None
    await pair.cloud.add_fault("foreign", unlimited=True)

    seen = await pair.round()

    assert seen.unknown is not None
    assert seen.account_id is None


async def test_a_pod_that_is_missing_makes_the_list_prove_its_account(new_pair: NewPair):
    pair = await new_pair()
    accepted = await rented(pair)
    first = await pair.round()
    await pair.cloud.remove(accepted.ref.resource_id)

    later = [await pair.round() for _ in range(4)]

    assert first.calls == 1
    assert [each.calls for each in later] == [2, 2, 2, 1]
    assert all(each.unknown is None for each in later)


async def test_a_template_that_somebody_deleted_leaves_lists_unknown(new_pair: NewPair):
    pair = await new_pair()
    accepted = await rented(pair)
    await pair.round()
    await console(pair.cloud, "DELETE", f"/v2/templates/{await pair.provider.account()}")
    await pair.cloud.remove(accepted.ref.resource_id)

    seen = await pair.round()

    assert "template is not shown" in (seen.unknown or "")


async def test_a_wrong_key_is_refused_and_shown_nowhere(new_pair: NewPair):
    pair = await new_pair(credential="rpa_test")
    wrong = await ROW.factory.open(_config(pair, credentials={"RUNPOD_API_KEY": "rpa_canary"}))

    with pytest.raises(CredentialRejected) as caught:
        await wrong.account()
    answer = await wrong.provision(
        an_attempt(),
        a_workload(accelerator=A40),
        offering=await offering(pair, shape="NVIDIA A40"),
        access=None,
        avoid=frozenset(),
    )
    await wrong.close()

    assert "does not accept the API key" in str(caught.value)
    assert isinstance(answer, Rejection)
    assert (answer.kind, answer.scope) == (RejectionKind.AUTH, BlockScope(everything=True))
    assert "canary" not in repr(caught.value) + repr(wrong) + repr(answer)


async def test_without_a_key_it_says_where_to_put_one(new_pair: NewPair, monkeypatch: pytest.MonkeyPatch):
    pair = await new_pair()
    monkeypatch.delenv("RUNPOD_API_KEY", raising=False)

    with pytest.raises(CredentialRejected, match="RUNPOD_API_KEY into the account's Secret"):
        await ROW.factory.open(_config(pair, credentials={}))

    monkeypatch.setenv("RUNPOD_API_KEY", "rpa_of_the_environment")
    await (await ROW.factory.open(_config(pair, credentials={}))).close()


@pytest.mark.parametrize("quirk", ["suspended", "read_only_key"])
async def test_an_account_that_may_not_rent_is_auth(new_pair: NewPair, quirk: str):
    pair = await new_pair()
    offer = await offering(pair, shape="NVIDIA A40")
    await pair.cloud.reset({**RUNPOD, "quirks": {quirk: True}})

    answer = await ordered(pair, offer=offer)

    assert isinstance(answer, Rejection)
    assert (answer.kind, answer.scope) == (RejectionKind.AUTH, BlockScope(everything=True))


async def test_a_card_that_this_key_has_no_access_to_is_unsupported(new_pair: NewPair):
    pair = await new_pair(quirks={"closed_pools": ["A40"]})

    answer = await ordered(pair)

    assert isinstance(answer, Rejection)
    assert answer.kind is RejectionKind.UNSUPPORTED
    assert answer.scope == BlockScope(accelerator="a40:1", tier=Tier.ON_DEMAND, region="")


async def test_fc_076_an_empty_balance_stops_the_account_and_blames_no_card(new_pair: NewPair):
    pair = await new_pair(quirks={"balance_usd": "0.40"})

    answer = await ordered(pair)

    assert isinstance(answer, Rejection)
    assert (answer.kind, answer.scope) == (RejectionKind.QUOTA, BlockScope(everything=True))
    assert "balance is too low" in answer.message


async def test_at_a_balance_of_nothing_the_pods_go_and_the_reason_is_told(new_pair: NewPair):
    pair = await new_pair(quirks={"balance_usd": "0.50"}, clock={"scale": 3600}, history_s=10**6)
    accepted = await rented(pair)

    before = await runpod(pair).balance()
    await pair.cloud.until(lambda truth: Decimal(truth["bill_usd"]) > Decimal("0.5"), what="it is used up")
    await pair.round()

    assert before.usd <= Decimal("0.50")
    assert before.burn_usd_per_hour == Decimal("0.44")
    assert (await got(pair, accepted)).state is MachineState.GONE


async def test_the_older_api_may_be_gone_and_only_reasons_are_missing_then(new_pair: NewPair):
    pair = await new_pair(quirks={"graphql_retired": True})
    accepted = await rented(pair)
    await console(pair.cloud, "POST", f"/v2/pods/{accepted.ref.resource_id}/action", {"action": "stop"})

    machine = await got(pair, accepted)

    assert machine.state is MachineState.EXITED
    assert machine.end is not None
    assert machine.end.reason is EndReason.UNKNOWN
    with pytest.raises(Unavailable):
        await runpod(pair).balance()


async def test_fc_079_a_silent_api_holds_nobody_up(new_pair: NewPair):
    pair = await new_pair(config={"call_timeout_s": 0.5})
    accepted = await rented(pair)
    cloud, ref = runpod(pair), accepted.ref
    login = RegistryLogin(server="ghcr.io", username="user", password="x")
    offer = await offering(pair, shape="NVIDIA A40")
    await pair.cloud.pause()

    answers = await asyncio.gather(
        cloud.parts(frozenset()),
        cloud.balance(),
        cloud.logs(ref, follow=False, since=None, tail_lines=None),
        cloud.prepare(
            a_workload(registry=login),
            offering=offer,
            region="",
            ceiling_usd_per_hour=None,
            options={},
            avoid=frozenset(),
        ),
        cloud.restart(ref),
        ordered(pair, offer=offer),
        return_exceptions=True,
    )

    names = [type(answer).__name__ for answer in answers]
    assert names == ["Unavailable"] * 4 + ["OutcomeUnknown"] * 2


# --- lists ---------------------------------------------------------------------------------------------


async def test_fc_107_a_list_a_round_and_nothing_else_however_many_pods_there_are(new_pair: NewPair):
    pair = await new_pair()
    for _ in range(30):
        await rented(pair, offer=pair.offerings.get(("", Tier.ON_DEMAND, "a40:1")) or await _kept(pair))
    before = (await pair.cloud.truth())["calls"]

    for _ in range(5):
        assert (await pair.round()).calls == 1

    after = (await pair.cloud.truth())["calls"]
    assert {
        verb: count - before.get(verb, 0) for verb, count in after.items() if count != before.get(verb)
    } == {"list": 5}


async def _kept(pair: Pair) -> Offering:
    return pair.offerings.setdefault(("", Tier.ON_DEMAND, "a40:1"), await offering(pair, shape="NVIDIA A40"))


BROKEN_PAGES: dict[str, dict[str, Any]] = {
    "cursor-expired": {"kind": "status", "status": 400},
    "500": {"kind": "status", "status": 500},
    "again": {"kind": "repeat_page"},
    "no-next": {"kind": "truncate", "keep": 50},
}


async def test_fc_015_a_list_that_is_not_read_to_its_end_is_no_list(new_pair: NewPair):
    pair = await new_pair(page_size=50)
    for number in range(120):
        await pair.cloud.plant(name=f"m-{number}")
    whole = await pair.round()
    assert (whole.unknown, len(whole.machines), whole.calls) == (None, 120, 3)

    for name, fault in BROKEN_PAGES.items():
        await pair.cloud.add_fault(verb="list", skip=1, unlimited=True, **fault)
        cut = await pair.round()
        await pair.cloud.clear_faults()
        assert cut.unknown is not None, name

    again = await pair.round()
    assert (again.unknown, len(again.machines)) == (None, 120)


async def test_a_list_without_pagination_is_of_one_page(new_pair: NewPair):
    pair = await new_pair()
    await rented(pair)
    await pair.cloud.add_fault("missing_total", verb="list")

    seen = await pair.round()

    assert (seen.unknown, len(seen.machines)) == (None, 1)


@pytest.mark.parametrize("kind", ["error_body", "garbage", "status"])
async def test_fc_013_anything_but_a_list_is_an_error_and_never_nothing(new_pair: NewPair, kind: str):
    pair = await new_pair()
    await rented(pair)
    await pair.round()
    await pair.cloud.add_fault(kind, verb="list", unlimited=True)

    try:
        seen = await pair.round()
    except Unavailable:
        return
    assert seen.unknown is not None


async def test_fc_014_a_list_that_lags_shows_less_and_a_get_shows_it(new_pair: NewPair):
    pair = await new_pair(lag={"list_create_s": 3600})
    accepted = await rented(pair)

    seen = await pair.round()

    assert seen.machines == ()
    assert (await got(pair, accepted)).ref == accepted.ref
    assert pair.provider.traits.settle_after_s >= 120


async def test_fc_016_another_installation_in_the_account_is_seen_and_is_not_ours(new_pair: NewPair):
    pair = await new_pair()
    theirs = await opened(ROW, pair.cloud, installation="other")
    answer = await theirs.provision(
        an_attempt(identity="nb-other-1"),
        a_workload(accelerator=A40),
        offering=await offering(pair, shape="NVIDIA A40"),
        access=None,
        avoid=frozenset(),
    )
    ours = await rented(pair, identity="nb-test-1")
    await theirs.close()

    assert isinstance(answer, Accepted)
    identities = {machine.identity: machine.ref for machine in (await pair.round()).machines}
    assert identities == {"nb-other-1": answer.ref, "nb-test-1": ours.ref}


async def test_fc_106_a_throttled_look_after_a_create_loses_nothing(new_pair: NewPair):
    pair = await new_pair(quirks={"per_minute": 1000})
    accepted = await rented(pair, identity="nb-test-7")
    await pair.cloud.add_fault("throttle", verb="list", retry_after_s=0)

    with pytest.raises(Exception, match="rate limit"):
        await pair.round()

    assert [machine.ref for machine in await pair.found("nb-test-7")] == [accepted.ref]


async def test_over_the_rate_everything_is_patience(new_pair: NewPair):
    pair = await new_pair(quirks={"per_minute": 3})
    answers = await asyncio.gather(
        *(pair.provider.list(frozenset()) for _ in range(5)), return_exceptions=True
    )

    throttled = [answer for answer in answers if isinstance(answer, Exception)]
    assert throttled
    assert {type(answer).__name__ for answer in throttled} == {"Throttled"}
    assert all(0 < answer.retry_after_s <= 60 for answer in throttled)  # type: ignore[attr-defined]


# --- what people do in the console ---------------------------------------------------------------------


async def test_a_pod_under_another_name_than_its_environment_tells_is_ours_by_its_id_alone(new_pair: NewPair):
    """A person's copy of a pod of ours keeps its environment: it must never be taken for an extra of ours."""
    pair = await new_pair()
    accepted = await rented(pair, identity="nb-test-3")

    await console(pair.cloud, "PATCH", f"/v2/pods/{accepted.ref.resource_id}", {"name": "my favourite"})

    assert await pair.found("nb-test-3") == []
    machine = await got(pair, accepted)
    assert (machine.ref, machine.identity) == (accepted.ref, None)


async def test_a_pod_that_a_person_stopped_is_over_and_no_interruption(new_pair: NewPair):
    pair = await new_pair()
    accepted = await rented(pair)

    await console(pair.cloud, "POST", f"/v2/pods/{accepted.ref.resource_id}/action", {"action": "stop"})

    machine = await got(pair, accepted)
    assert machine.state is MachineState.EXITED
    assert machine.end is not None
    assert machine.end.reason is EndReason.TERMINATED
    assert "person" in machine.end.message


async def test_fc_072_a_pod_that_a_person_deleted_is_gone_by_list_and_by_get(new_pair: NewPair):
    pair = await new_pair()
    accepted = await rented(pair)
    await pair.round()

    await console(pair.cloud, "DELETE", f"/v2/pods/{accepted.ref.resource_id}")

    seen = await pair.round()
    assert (seen.unknown, seen.machines) == (None, ())
    assert await pair.provider.get(accepted.ref) is None


async def test_fc_082_ending_what_has_ended_is_done(new_pair: NewPair):
    pair = await new_pair()
    accepted = await rented(pair)
    await pair.cloud.fail(accepted.ref.resource_id)

    first = await pair.provider.terminate(accepted.ref)
    again = await pair.provider.terminate(accepted.ref)

    assert (first, again) == ("accepted", "not_found")


# --- containers ----------------------------------------------------------------------------------------


async def test_running_right_after_the_create_is_believed_once_it_has_a_container_and_its_ports(
    new_pair: NewPair,
):
    pair = await new_pair(
        life={"boot_s": 1, "exit_restarts": True},
        quirks={"lifecycle": "observed", "ports_after_s": 1},
        clock={"scale": 2},
    )
    accepted = await rented(pair, a_workload(accelerator=A40, ports=(8000,)))

    states = []
    while not states or states[-1] is not MachineState.RUNNING:
        states.append((await got(pair, accepted)).state)
        await asyncio.sleep(0.05)

    assert accepted.reserved
    assert states[0] is MachineState.BOOTING
    assert len((await got(pair, accepted)).ports) == 1


async def test_a_workload_that_ends_is_started_for_ever_and_told_as_trouble(new_pair: NewPair):
    pair = await new_pair(clock={"scale": 60}, life={"boot_s": 0, "exit_restarts": True, "exit_after_s": 10})
    accepted = await rented(pair)
    said: str | None = None

    async with asyncio.timeout(60):
        while said is None:
            (machine,) = (await pair.round()).machines
            said = machine.trouble
            await asyncio.sleep(0.03)

    assert "begun again" in said
    assert (await got(pair, accepted)).state is MachineState.RUNNING
    assert pair.provider.traits.completion == "never"


IMAGES = {"images": {"missing": ["gone:1"], "private": {"ghcr.io": "user:canary-77"}}}


@pytest.mark.parametrize("image", ["gone:1", "ghcr.io/team/app:1"])
async def test_an_image_that_cannot_be_pulled_is_trouble_and_then_an_end(new_pair: NewPair, image: str):
    pair = await new_pair(**IMAGES)
    pair.provider = await opened(ROW, pair.cloud, options=ROW.options(pair.cloud) | {"pull_window_s": "0.2"})
    await rented(pair, a_workload(accelerator=A40, image=image))
    troubles = set()

    async with asyncio.timeout(60):
        while True:
            (machine,) = (await pair.round()).machines
            if machine.state is MachineState.EXITED:
                break
            troubles.add(machine.trouble)
            await asyncio.sleep(0.1)

    assert machine.end is not None
    assert (machine.end.reason, machine.end.image) == (EndReason.FAILED, True)
    assert image in machine.end.message
    assert any("cannot be pulled" in (trouble or "") for trouble in troubles)


async def test_fc_078_a_slow_pull_is_no_trouble_while_the_host_goes_on_with_it(new_pair: NewPair):
    """Far longer than an image may fail to be pulled: the boot deadline is the limit, and half an hour."""
    pair = await new_pair(life={"boot_s": 3600, "exit_restarts": True})
    pair.provider = await opened(ROW, pair.cloud, options=ROW.options(pair.cloud) | {"pull_window_s": "0.2"})
    accepted = await rented(pair, a_workload(accelerator=A40, image="large:20gb"))

    async def looked() -> int:
        machine = (await pair.round()).machines[0]
        assert (machine.state, machine.trouble, machine.end) == (MachineState.BOOTING, None, None)
        return int((await pair.cloud.truth())["calls"].get("logs", 0))

    async with asyncio.timeout(30):
        while await looked() < 2:
            await asyncio.sleep(0.05)
    assert (await got(pair, accepted)).state is MachineState.BOOTING
    assert pair.provider.traits.boot_deadline_s == 1800


async def test_fc_071_a_host_that_broke_is_told_in_its_own_words_and_blames_no_image(new_pair: NewPair):
    """RunPod names no hosts: what keeps a bad one from being taken again is a block on the offering."""
    pair = await new_pair()
    accepted = await rented(pair)
    await pair.cloud.fail(str(accepted.ref.resource_id), message="failed to register layer: no such layer")

    (machine,) = (await pair.round()).machines

    assert (machine.state, machine.host) == (MachineState.EXITED, None)
    assert machine.end is not None
    assert (machine.end.reason, machine.end.image) == (EndReason.FAILED, False)
    assert "failed to register layer" in machine.end.message


async def test_fc_124_a_registry_login_is_made_once_for_each_content_and_used_by_the_create(
    new_pair: NewPair,
):
    pair = await new_pair(**IMAGES)
    login = RegistryLogin(server="ghcr.io", username="user", password="canary-77")
    workload = a_workload(accelerator=A40, image="ghcr.io/team/app:1", registry=login)
    offer = await offering(pair, shape="NVIDIA A40")

    async def pins_of(workload: Any) -> Any:
        return await runpod(pair).prepare(
            workload, offering=offer, region="", ceiling_usd_per_hour=None, options={}, avoid=frozenset()
        )

    pins, again = await pins_of(workload), await pins_of(workload)
    rotated = await pins_of(replace(workload, registry=replace(login, password="another")))
    accepted = await rented(pair, workload, offer=offer, pins=pins)

    assert pins == again != rotated
    assert (await got(pair, accepted)).state is MachineState.RUNNING
    (round_,) = await runpod(pair).parts(frozenset())
    logins = [part for part in round_.parts if part.kind is PartKind.REGISTRY_LOGIN]
    assert len(logins) == 2
    assert all((part.identity or "").startswith("nb-test-login-") for part in logins)
    drops = {part.ref.resource_id: await runpod(pair).drop_part(part) for part in logins}
    assert drops == {pins["registry"]: Dropped.IN_USE, rotated["registry"]: Dropped.ACCEPTED}
    assert "canary-77" not in repr(pins) + repr(round_) + repr(accepted)


async def test_a_new_login_that_does_not_work_at_once_is_waited_for(new_pair: NewPair):
    pair = await new_pair(**IMAGES, quirks={"registry_delay_s": 2}, clock={"scale": 2})
    login = RegistryLogin(server="ghcr.io", username="user", password="canary-77")
    offer = await offering(pair, shape="NVIDIA A40")
    workload = a_workload(accelerator=A40, image="ghcr.io/team/app:1", registry=login)
    pins = await runpod(pair).prepare(
        workload, offering=offer, region="", ceiling_usd_per_hour=None, options={}, avoid=frozenset()
    )
    accepted = await rented(pair, workload, offer=offer, pins=pins)

    assert (await got(pair, accepted)).state is MachineState.BOOTING
    async with asyncio.timeout(60):
        while (await got(pair, accepted)).state is not MachineState.RUNNING:
            await asyncio.sleep(0.05)


async def test_fc_101_a_secret_is_in_the_create_and_nowhere_else(new_pair: NewPair):
    pair = await new_pair()
    workload = a_workload(accelerator=A40, env={"TOKEN": "canary-5f2d"}, secret_env=("TOKEN",))

    accepted = await rented(pair, workload)

    shown = await console(pair.cloud, "GET", f"/v2/pods/{accepted.ref.resource_id}")
    assert shown["env"]["TOKEN"] == "canary-5f2d"  # as RunPod does: whoever has a key may read it
    (machine,) = await pair.cloud.machines()
    assert machine["env_digests"]["TOKEN"] == hashlib.sha256(b"canary-5f2d").hexdigest()
    assert "canary-5f2d" not in repr(await pair.round()) + repr(accepted) + repr(await got(pair, accepted))


JOB = {"command": ("train",), "options": {"job": "report"}}


@pytest.mark.parametrize(("code", "reason"), [(0, EndReason.COMPLETED), (3, EndReason.FAILED)])
async def test_a_command_that_reports_its_end_has_an_exit_code(
    new_pair: NewPair, code: int, reason: EndReason
):
    pair = await new_pair()
    workload = a_workload(accelerator=A40, **JOB)
    accepted = await rented(pair, workload, identity="nb-job-1")
    before = await got(pair, accepted)
    await _say(pair, accepted, "nebula-exit nb-job-2 9", "nebula-exit nb-job-1", "nebula-exit nb-job-1 x")

    await pair.cloud.exit(accepted.ref.resource_id, code=code)
    again = await opened(ROW, pair.cloud)  # nothing is remembered by the one that looks
    machine = await again.get(accepted.ref)
    await again.close()

    assert (before.state, before.end) == (MachineState.RUNNING, None)
    assert machine is not None
    assert machine.state is MachineState.EXITED
    assert machine.end is not None
    assert (machine.end.reason, machine.end.exit_code) == (reason, code)
    assert machine.end.at is not None
    assert machine.meters == before.meters  # it bills until it is ended
    assert runpod(pair).completion_of(workload) == "code"
    assert runpod(pair).completion_of(a_workload()) == "never"


async def test_a_restarted_command_is_not_over_by_what_it_said_before(new_pair: NewPair):
    pair = await new_pair()
    accepted = await rented(pair, a_workload(accelerator=A40, **JOB))
    await pair.cloud.exit(accepted.ref.resource_id, code=3)
    fast = await opened(ROW, pair.cloud, options=ROW.options(pair.cloud) | {"job_every_s": "0.1"})
    first = await fast.get(accepted.ref)

    assert isinstance(fast, RunPod)
    assert await fast.restart(accepted.ref)
    second = await fast.get(accepted.ref)
    await fast.close()

    assert first is not None
    assert first.state is MachineState.EXITED
    assert second is not None
    assert (second.state, second.end) == (MachineState.RUNNING, None)


def test_the_shell_that_reports_runs_the_command_once_and_says_its_code(row: Any):
    script = orders.REPORTER.replace("sleep 30", "exit")
    argv = ["/bin/sh", "-c", script, "nebula", "sh", "-c", 'echo $0 "$@"; exit 7', "a b", "c"]

    done = subprocess.run(
        argv,
        env={"NEBULA_IDENTITY": "nb-1", "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.stdout == "a b c\nnebula-exit nb-1 7\n"


# --- logs ----------------------------------------------------------------------------------------------


async def test_logs_that_are_not_followed_end_with_what_there_is(new_pair: NewPair):
    pair = await new_pair()
    accepted = await rented(pair)
    await _say(pair, accepted, "one", "two", "three")
    stream = await runpod(pair).logs(accepted.ref, follow=False, since=None, tail_lines=2)
    assert stream is not None

    chunks = [chunk async for chunk in stream]

    assert b"".join(chunk.data for chunk in chunks) == b"two\nthree\n"
    assert all(chunk.at is not None and chunk.at.utcoffset() is not None for chunk in chunks)


async def test_followed_logs_go_on_and_a_break_is_an_error(new_pair: NewPair):
    pair = await new_pair()
    accepted = await rented(pair)
    await _say(pair, accepted, "before")
    stream = await runpod(pair).logs(accepted.ref, follow=True, since=None, tail_lines=1)
    assert stream is not None

    first = await anext(stream)
    await _say(pair, accepted, "after")
    second = await anext(stream)
    await pair.cloud.kill()

    assert (first.data, second.data) == (b"before\n", b"after\n")
    with pytest.raises(Unavailable):
        await anext(stream)


async def test_a_pod_that_is_not_there_has_no_logs(new_pair: NewPair):
    pair = await new_pair()
    accepted = await rented(pair)
    await pair.provider.terminate(accepted.ref)

    assert await runpod(pair).logs(accepted.ref, follow=False, since=None, tail_lines=None) is None


async def _say(pair: Pair, accepted: Accepted, *lines: str) -> None:
    for line in lines:
        await pair.cloud.control("POST", f"/sim/machines/{accepted.ref.resource_id}/say", {"line": line})


# --- the simulator -------------------------------------------------------------------------------------


async def test_the_simulator_is_as_strict_as_the_api(new_pair: NewPair):
    pair = await new_pair()
    good = {"name": "n", "image": "i", "gpu": {"id": "NVIDIA A40", "count": 1}, "disk": 5}

    async def said(body: Any) -> tuple[int, str]:
        answer = await console(pair.cloud, "POST", "/v2/pods", body)
        return answer["status"], answer["detail"] + str(answer.get("errors", ""))

    assert (await said(good | {"gpuTypeIds": []}))[0] == 422
    assert (await said({key: value for key, value in good.items() if key != "disk"}))[0] == 400
    assert "no longer any instances" in (await said(good | {"gpu": {"id": "NVIDIA A40"}}))[1]
    assert (await said(good | {"ports": ["53/udp"]}))[0] == 422
    assert (await said(good | {"templateId": "t"}))[0] == 404
    assert (await said(good | {"env": {"A": "x" * 103_000}}))[0] == 413
    assert (await console(pair.cloud, "GET", "/v1/pods"))["status"] == 410
    assert (await console(pair.cloud, "GET", "/v2/pods?limit=0"))["status"] == 422
    assert (await console(pair.cloud, "GET", "/v2/pods?cursor=bm9uc2Vuc2U="))["status"] == 422
    assert (await console(pair.cloud, "GET", "/v2/pods?name=x"))["pods"] == []


async def test_what_the_simulator_remembers_outlives_it(new_pair: NewPair):
    pair = await new_pair()
    account = await pair.provider.account()
    await rented(pair, identity="nb-test-9")

    await pair.cloud.kill()
    await pair.cloud.start()

    assert await pair.provider.account() == account
    assert len(await pair.found("nb-test-9")) == 1


def _config(pair: Pair, *, credentials: dict[str, str]) -> Any:
    from providers.base import ProviderConfig

    return ProviderConfig(
        name="runpod", installation="test", options=ROW.options(pair.cloud), credentials=credentials
    )


# --- the bill ------------------------------------------------------------------------------------------


async def test_the_bill_by_the_hour_adds_up_to_what_a_pod_has_cost(new_pair: NewPair):
    """A second is nearly three hours of this cloud, and the bill is an hour late."""
    pair = await new_pair(clock={"scale": 10_000})
    began = datetime.fromisoformat((await pair.cloud.truth())["now"])
    accepted = await rented(pair)
    await asyncio.sleep(1)  # so long it runs
    await pair.provider.terminate(accepted.ref)
    true = await pair.cloud.bill_usd()
    window = {"since": began - timedelta(hours=1), "until": began + timedelta(days=30)}

    async def whole() -> bool:
        lines = await runpod(pair).bill(**window)
        total = sum((line.usd for line in lines), Decimal(0))
        return abs(total - true) <= Decimal("0.0002")  # the cloud rounds up to a second

    assert not await whole()
    await until(whole, within_s=20, what="the hours on the bill are all that it has cost")
    lines = await runpod(pair).bill(**window)
    assert len(lines) >= 3
    assert {(line.resource_id, line.final) for line in lines} == {(accepted.ref.resource_id, False)}
    assert not any(line.identity or line.kind for line in lines)


async def test_a_bill_that_cannot_be_read_is_no_bill(new_pair: NewPair):
    pair = await new_pair()
    window = {"since": datetime.now(UTC) - timedelta(hours=2), "until": datetime.now(UTC)}
    for kind in ("garbage", "error_body", "status"):
        await pair.cloud.add_fault(kind, verb="bill")
        with pytest.raises(Unavailable):
            await runpod(pair).bill(**window)
    assert await runpod(pair).bill(**window) == []
