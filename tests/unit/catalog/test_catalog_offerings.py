"""The merged set of what can be rented."""

import asyncio
from dataclasses import replace
from decimal import Decimal

import pytest

from catalog.catalogue import CloudRows
from catalog.offerings import AccountOffers, Offerings
from catalog.refresh import follow
from catalog.regions import region_tokens
from providers.base import Accelerator, Meter, MeterKind, Offering, Tier, Traits, Unavailable

TRAITS = Traits(tiers=frozenset(Tier))


def an_offering(shape="s", *, provider="acme", kind="H100", count=8, **changes) -> Offering:
    accelerator = Accelerator(type=kind, count=count) if kind else None
    fields = {"account": "default", "region": "", "tier": Tier.SPOT, "accelerator": accelerator, "meters": ()}
    return Offering(**({"provider": provider, "shape": shape} | fields | changes))


def an_account(*offerings: Offering) -> AccountOffers:
    return AccountOffers(provider="acme", account="default", traits=TRAITS, offerings=offerings)


@pytest.mark.parametrize(
    ("kind", "count", "found"),
    [("h100", 8, True), ("H100", 8, True), ("H100", 4, False), ("A100", 8, False)],
)
@pytest.mark.behaviour(24, 25)
def test_type_is_compared_without_case_and_count_exactly(kind, count, found):
    rows = an_account(an_offering()).find(Accelerator(type=kind, count=count))

    assert bool(rows) is found


def test_an_offering_without_a_count_is_for_every_count():
    rows = an_account(an_offering(count=0)).find(Accelerator(type="h100", count=3))

    assert [row.shape for row in rows] == ["s"]


@pytest.mark.behaviour(28)
def test_an_offering_for_any_count_is_given_and_priced_as_for_the_count_that_was_asked():
    gpu = Meter(kind=MeterKind.GPU, quantity=Decimal(1), usd=Decimal("3.95"))
    base = Meter(kind=MeterKind.MACHINE, quantity=Decimal(1), usd=Decimal("0.05"))

    (row,) = an_account(an_offering(count=0, meters=(gpu, base))).find(Accelerator(type="h100", count=3))

    assert row.accelerator == Accelerator(type="H100", count=3)
    assert row.usd_per_hour == Decimal("11.90")


@pytest.mark.behaviour(24)
@pytest.mark.parametrize("kind", ["H100", "h100-80gb", "H100-80GB", "nvidia-h100"])
def test_an_accelerator_is_found_by_any_of_its_names(kind):
    offers = AccountOffers(
        provider="acme",
        account="default",
        traits=TRAITS,
        offerings=(an_offering("a"), an_offering("b", kind="nvidia-h100")),
        aliases={"h100-80gb": "H100", "nvidia-h100": "H100"},
    )

    assert [row.shape for row in offers.find(Accelerator(type=kind, count=8))] == ["a", "b"]


def a_cloud(*rows, adapter="acme"):
    """The rows of a catalogue file, which are of no account yet."""
    return CloudRows(adapter=adapter, rows=tuple(replace(row, provider=adapter, account="") for row in rows))


def test_written_rows_are_offered_before_a_cloud_answers_and_its_own_word_is_believed_after():
    offerings = Offerings()
    written = [an_offering("s", region="r1"), an_offering("s", region="r2"), an_offering("t", region="r1")]
    dearer = Meter(kind=MeterKind.MACHINE, quantity=Decimal(1), usd=Decimal(9))

    offerings.put("acme", "default", traits=TRAITS, written=a_cloud(*written))
    before = offerings.view[("acme", "default")]
    told = [an_offering("s", region="r1", meters=(dearer,)), an_offering("u", region="r3")]
    offerings.put("acme", "default", traits=TRAITS, offerings=told)
    after = offerings.view[("acme", "default")]

    assert not before.answered
    assert before.offerings == tuple(written)
    assert after.answered
    assert after.offerings == (*told, written[1], written[2])


def test_a_cloud_that_tells_nothing_is_served_by_its_rows_and_has_answered():
    offerings = Offerings()

    offerings.put("acme", "default", traits=TRAITS, offerings=[], written=a_cloud(an_offering("s")))

    account = offerings.view[("acme", "default")]
    assert [row.shape for row in account.offerings] == ["s"]
    assert account.answered


@pytest.mark.behaviour(360)
@pytest.mark.parametrize(
    ("name", "adapter", "tokens"),
    [("my-aws", "aws", 4), ("aws", "fake", 4), ("aws", "", 4), ("my-aws", "fake", 1)],
    ids=["an-account-called-otherwise", "a-stand-in", "by-name", "neither"],
)
def test_region_words_are_those_of_the_kind_of_cloud_and_else_of_its_name(name, adapter, tokens):
    offerings = Offerings()
    offerings.put(name, "default", traits=TRAITS, offerings=[], written=a_cloud(adapter=adapter))
    words = offerings.view[(name, "default")].words

    assert len(region_tokens(["us"], served=("us-east-1",), words=words)) == tokens


def test_listeners_of_a_term_hear_nothing_after_it():
    offerings, always, of_term = Offerings(), [], []
    offerings.on_change(always.append)

    with offerings.listeners_of_a_term():
        offerings.on_change(of_term.append)
        offerings.put("acme", "default", traits=TRAITS)
    offerings.drop("acme", "default")

    assert (len(always), len(of_term)) == (2, 1)


def test_no_accelerator_finds_only_shapes_without_one():
    offers = an_account(an_offering("gpu"), an_offering("cpu", kind=None))

    assert [row.shape for row in offers.find(None)] == ["cpu"]


@pytest.mark.behaviour(27)
def test_the_first_match_is_the_primary_and_repetitions_are_dropped():
    offers = an_account(
        an_offering("a"), an_offering("b"), an_offering("a"), an_offering("c", tier=Tier.ON_DEMAND)
    )

    rows = offers.find(Accelerator(type="h100", count=8), tier=Tier.SPOT)

    assert [row.shape for row in rows] == ["a", "b"]


def test_a_region_is_served_by_its_own_offerings_else_by_those_without_region():
    offers = an_account(an_offering("anywhere"), an_offering("there", region="r1"))
    h100 = Accelerator(type="h100", count=8)

    assert [row.shape for row in offers.find(h100, region="r1")] == ["there"]
    assert [row.shape for row in offers.find(h100, region="r2")] == ["anywhere"]


def test_listeners_hear_only_of_real_changes():
    offerings, heard = Offerings(), []
    offerings.on_change(heard.append)

    assert offerings.put("acme", "default", traits=TRAITS)
    assert offerings.put("acme", "default", traits=TRAITS, offerings=[an_offering()])
    version = offerings.version
    assert not offerings.put("acme", "default", traits=TRAITS, offerings=[an_offering()])

    assert heard == [("acme", "default")] * 2
    assert offerings.version == version


def test_an_account_keeps_its_offerings_when_only_its_traits_are_put_again():
    offerings = Offerings()
    offerings.put("acme", "default", traits=TRAITS, offerings=[an_offering()])

    offerings.put("acme", "default", traits=Traits(tiers=frozenset({Tier.SPOT})))

    assert offerings.view[("acme", "default")].offerings == (an_offering(),)


def test_a_view_does_not_change_after_it_was_taken():
    offerings = Offerings()
    view = offerings.view

    offerings.put("acme", "default", traits=TRAITS)

    assert not view
    assert offerings.drop("acme", "default")
    assert not offerings.drop("acme", "default")


def test_an_offering_of_another_account_is_refused():
    with pytest.raises(ValueError, match="not of acme/default"):
        Offerings().put("acme", "default", traits=TRAITS, offerings=[an_offering(provider="other")])


class Adapter:
    """The part of a provider that is asked for offers: its answers come in turn, the last one for ever."""

    name = "acme"
    traits = TRAITS

    def __init__(self, *answers) -> None:
        self.answers = list(answers)
        self.asked = 0

    async def offers(self):
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_a_cloud_that_does_not_answer_changes_nothing_and_is_asked_again():
    offerings, changed = Offerings(), asyncio.Event()
    adapter = Adapter([an_offering("old")], Unavailable("down"), [an_offering("new")])
    seen = []

    def heard(key):
        seen.append([row.shape for row in offerings.view[key].offerings] if key in offerings.view else None)
        if seen[-1] == ["new"]:
            changed.set()

    offerings.on_change(heard)
    task = asyncio.create_task(
        follow(offerings, provider=adapter, account="default", every_s=0.001, retry_s=0.001)
    )
    await asyncio.wait_for(changed.wait(), timeout=5)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert seen == [[], ["old"], ["new"], None]


def test_an_offer_that_names_no_size_has_that_of_its_row():
    """The cloud knows the price of the day, and the file what the shape has."""
    row = an_offering("h100x8", region="r1", memory_bytes=64 * 2**30, cpu=Decimal(8))
    told = an_offering("h100x8", region="r2", cpu=Decimal(9))
    offerings = Offerings()
    offerings.put(
        "acme",
        "default",
        traits=Traits(tiers=frozenset(Tier)),
        offerings=[told],
        written=CloudRows(adapter="acme", rows=(row,)),
    )

    here, there = offerings.view["acme", "default"].offerings

    assert (here.region, here.cpu, here.memory_bytes) == ("r2", 9, 64 * 2**30)
    assert there == row
