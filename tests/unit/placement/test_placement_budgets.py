"""A budget without room passes a place over, and says which budget it is and how much of it is left."""

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from app.api.reasons import SkipReason
from app.placement.promises import Promises
from app.placement.rank import Candidate, Skip, Usage
from app.store.budgets import Standing
from app.store.reservations import Reservation
from providers.base import Tier
from tests.unit.placement.placement_makers import a_pool, nodes, offers, ranked, view


def a_budget(**changes: Any) -> Standing:
    values: dict[str, Any] = {
        "name": "b",
        "amount_usd": Decimal(100),
        "period": "month",
        "namespace": None,
        "team": None,
        "pool": None,
        "action": "RefuseNew",
        "look_ahead_s": 3600,
        "spent_usd": Decimal(0),
    }
    return Standing(**(values | changes))


def places_of(*budgets: Standing) -> list[Any]:
    return ranked(
        pool=a_pool("modal"),
        offerings=view(offers("modal", usd="10")),
        nodes=nodes("modal"),
        usage=Usage(budgets=budgets),
    )


def tiers_left(*budgets: Standing) -> set[Tier]:
    return {place.tier for place in places_of(*budgets) if isinstance(place, Candidate)}


def test_a_budget_with_room_changes_nothing():
    assert tiers_left(a_budget()) == {Tier.SPOT, Tier.ON_DEMAND}


@pytest.mark.behaviour(404)
@pytest.mark.parametrize("spent", ["100", "101", "99.99"])
def test_a_spent_budget_refuses_every_tier_and_says_how_much_is_left(spent: str):
    places = places_of(a_budget(spent_usd=Decimal(spent)))

    skips = [place for place in places if isinstance(place, Skip) and place.reason is SkipReason.BUDGET]
    assert skips
    assert all("budget b of $100.00, a month" in skip.detail and "left" in skip.detail for skip in skips)
    assert not any(isinstance(place, Candidate) for place in places)


def test_what_runs_and_is_promised_counts_for_the_look_ahead():
    assert tiers_left(a_budget(usd_per_hour=Decimal(100))) == set()
    assert tiers_left(a_budget(usd_per_hour=Decimal(100), look_ahead_s=60)) == {Tier.SPOT, Tier.ON_DEMAND}


def test_a_budget_may_still_allow_spot():
    assert tiers_left(a_budget(action="RefuseOnDemand", spent_usd=Decimal(200))) == {Tier.SPOT}


def test_a_burst_of_one_transaction_sees_what_it_has_promised():
    promises = Promises((), [a_budget(namespace="a"), a_budget(name="other", namespace="b")])

    for number in range(3):
        promises.reserve(
            Reservation(
                pod_uid=f"p-{number}",
                claim_name=f"c-{number}",
                pool="gpu",
                provider="modal",
                account="default",
                gpus=1,
                usd_per_hour=Decimal(30),
                namespace="a",
            )
        )

    (mine,) = promises.usage("gpu", namespace="a").budgets
    assert (mine.usd_per_hour, mine.left_usd()) == (90, 10)
    assert [each.usd_per_hour for each in promises.usage("gpu", namespace="b").budgets] == [0]
    assert replace(mine, spent_usd=Decimal(20)).left_usd() == -10


def test_a_budget_by_labels_counts_promises_of_pods_that_have_all_of_them():
    promises = Promises((), [a_budget(labels={"app": "train", "team": "a"})])
    row = Reservation(
        pod_uid="p",
        claim_name="c",
        pool="gpu",
        provider="modal",
        account="default",
        gpus=1,
        usd_per_hour=Decimal(30),
        labels={"app": "train", "team": "a", "version": "7"},
    )

    promises.reserve(row)
    promises.reserve(replace(row, pod_uid="q", labels={"app": "train"}))

    (mine,) = promises.usage("gpu", labels=row.labels).budgets
    assert mine.usd_per_hour == 30
    assert promises.usage("gpu", labels={"app": "train"}).budgets == ()
