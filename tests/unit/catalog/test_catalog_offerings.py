"""The merged set of what can be rented."""

import asyncio

import pytest

from catalog.offerings import AccountOffers, Offerings
from catalog.refresh import follow
from providers.base import Accelerator, Offering, Tier, Traits, Unavailable

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
def test_type_is_compared_without_case_and_count_exactly(kind, count, found):
    rows = an_account(an_offering()).find(Accelerator(type=kind, count=count))

    assert bool(rows) is found


def test_an_offering_without_a_count_is_for_every_count():
    rows = an_account(an_offering(count=0)).find(Accelerator(type="h100", count=3))

    assert [row.shape for row in rows] == ["s"]


def test_no_accelerator_finds_only_shapes_without_one():
    offers = an_account(an_offering("gpu"), an_offering("cpu", kind=None))

    assert [row.shape for row in offers.find(None)] == ["cpu"]


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
