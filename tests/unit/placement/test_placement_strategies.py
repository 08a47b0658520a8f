"""LowestPrice, Weighted, ceilings, limits, and who may spend from a pool."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placement_makers import H100X8, a_block, a_pool, a_request, nodes, offers, ranked, shown, view

from app.api.nodepool import LabelSelector
from app.api.quantities import usd
from app.api.reasons import DeferralReason, SkipReason
from app.placement import explain
from app.placement.market import Listed
from app.placement.rank import Candidate, Skip, Usage, chosen
from providers.base import Accelerator, Tier

ALL = ("a", "b", "c")
SPOT = {"capacityTypes": ["Spot"]}


def one(*, pool, account=None, usage=None, **request):
    """The one place of a pool with provider a."""
    (place,) = ranked(
        a_request(**request),
        pool=pool,
        offerings=view(account or offers("a", usd="10")),
        nodes=nodes("a"),
        usage=usage,
    )
    return place


# --- LowestPrice ---------------------------------------------------------------------------------


@pytest.mark.behaviour(64)
def test_lowest_price_ranks_all_providers_and_regions_inside_a_tier():
    places = ranked(
        pool=a_pool("a", "b", strategy="LowestPrice"),
        offerings=view(offers("a", "r1", "r2", prices={"r1": "9", "r2": "3"}), offers("b", usd="5")),
        nodes=nodes("a", "b"),
    )

    one_tier = ["a r2", "b", "a r1"]
    assert shown(places) == [f"Spot {place}" for place in one_tier] + [f"OnDemand {p}" for p in one_tier]


@pytest.mark.behaviour(64)
def test_a_cheaper_machine_of_the_second_tier_does_not_come_first():
    cheap_on_demand = offers("b", usd="1", tiers={Tier.ON_DEMAND})
    places = ranked(
        pool=a_pool("a", "b", strategy="LowestPrice"),
        offerings=view(offers("a", usd="50"), cheap_on_demand),
        nodes=nodes("a", "b"),
    )

    assert str(chosen(places)) == "a Spot"


@pytest.mark.behaviour(65)
def test_equal_prices_keep_the_listed_order():
    places = ranked(
        pool=a_pool("c", "a", "b", strategy="LowestPrice", **SPOT),
        offerings=view(offers("a", usd="2.0"), offers("b", usd="2"), offers("c", usd="2.00")),
        nodes=nodes(*ALL),
    )

    assert shown(places) == ["Spot c", "Spot a", "Spot b"]


def test_a_price_that_is_not_known_is_not_a_low_one():
    places = ranked(
        pool=a_pool("a", "b", "c", strategy="LowestPrice", **SPOT),
        offerings=view(offers("a", usd=None), offers("b", usd="99"), offers("c", usd="0")),
        nodes=nodes(*ALL),
    )

    assert shown(places) == ["Spot c", "Spot b", "Spot a"]


def test_a_blocked_place_keeps_its_rank_and_its_price():
    first, second = ranked(
        pool=a_pool("a", "b", strategy="LowestPrice", **SPOT),
        offerings=view(offers("a", usd="5"), offers("b", usd="3")),
        nodes=nodes("a", "b"),
        blocks=[a_block("b")],
    )

    assert (str(first), first.usd_per_hour) == ("b Spot", Decimal(3))
    assert isinstance(first, Skip)
    assert isinstance(second, Candidate)


class DiskCosts(Listed):
    """Provider a sells the disk apart."""

    def price(self, request, offering):
        return offering.usd_per_hour + (Decimal(4) if offering.provider == "a" else 0)


def test_the_whole_machine_is_compared_disk_included():
    places = ranked(
        pool=a_pool("a", "b", strategy="LowestPrice", **SPOT),
        offerings=view(offers("a", usd="1"), offers("b", usd="3")),
        nodes=nodes("a", "b"),
        market=DiskCosts(),
    )

    assert [(str(place), place.usd_per_hour) for place in places] == [("b Spot", 3), ("a Spot", 5)]


# --- Weighted ------------------------------------------------------------------------------------


def weighted(weights):
    return a_pool(
        *({"name": name, "weight": weight} for name, weight in weights.items()), strategy="Weighted", **SPOT
    )


def placed(weights, *, times, held=None):
    """How many machines each provider has after so many placements, one by one."""
    counts = dict.fromkeys(weights, 0) | (held or {})
    accounts, where = view(*(offers(name) for name in weights)), nodes(*weights)
    for _ in range(times):
        usage = Usage(machines={(name, "default"): count for name, count in counts.items()})
        choice = chosen(ranked(pool=weighted(weights), offerings=accounts, nodes=where, usage=usage))
        counts[choice.provider] += 1
    return counts


@pytest.mark.behaviour(64)
def test_the_first_machine_of_a_weighted_pool_goes_to_the_heaviest_and_ties_to_the_first_listed():
    assert placed({"a": 1, "b": 3}, times=1) == {"a": 0, "b": 1}
    assert placed({"a": 2, "b": 2}, times=1) == {"a": 1, "b": 0}


def test_what_is_held_already_counts():
    assert placed({"a": 1, "b": 1}, times=3, held={"a": 3}) == {"a": 3, "b": 3}


@pytest.mark.behaviour(64)
@given(
    weights=st.dictionaries(st.sampled_from(ALL), st.integers(1, 9), min_size=1),
    times=st.integers(0, 60),
)
def test_a_weighted_pool_converges_to_its_weights(weights, times):
    """At every moment each provider is less than one machine for each other provider off its share."""
    counts = placed(weights, times=times)

    total = sum(weights.values())
    assert sum(counts.values()) == times
    for name, weight in weights.items():
        assert abs(counts[name] - times * weight / total) <= len(weights) - 1


def test_a_weighted_provider_that_cannot_serve_leaves_its_share_to_the_others():
    places = ranked(
        pool=weighted({"a": 9, "b": 1}),
        offerings=view(offers("a"), offers("b")),
        nodes=nodes("a", "b"),
        blocks=[a_block("a")],
    )

    assert str(chosen(places)) == "b Spot"


def test_a_weighted_pool_stored_without_a_weight_is_told_as_the_api_server_tells_it():
    stored = a_pool({"name": "a", "weight": 1}, "b", strategy="Weighted")

    assert explain.unusable(stored) == "strategy Weighted requires a weight on every provider"
    assert explain.unusable(weighted({"a": 1})) is None


# --- ceilings ------------------------------------------------------------------------------------


@pytest.mark.behaviour(66)
@pytest.mark.parametrize(
    ("pool", "asked", "price", "frozen"),
    [
        ({"maxPrice": "10"}, None, "10", "10"),
        ({"maxPrice": "9.99"}, None, "10", None),
        ({}, "10", "10", "10"),
        ({}, "9", "10", None),
        ({"maxPrice": "20"}, "12", "10", "12"),
        ({"maxPrice": "12"}, "20", "10", "12"),
        ({"maxPrice": "9"}, "20", "10", None),
        ({"maxPrice": "1", "spotMaxPrice": "11"}, None, "10", "11"),
        ({"maxPrice": "99", "spotMaxPrice": "9"}, None, "10", None),
        ({"maxPrice": "99"}, None, None, None),
        ({}, "99", None, None),
    ],
    ids=str,
)
def test_the_smallest_ceiling_that_applies_holds_and_is_frozen(pool, asked, price, frozen):
    place = one(
        pool=a_pool("a", **SPOT, **pool),
        account=offers("a", usd=price),
        max_usd_per_hour=Decimal(asked) if asked else None,
    )

    if frozen is None:
        assert place.reason is SkipReason.PRICE
    else:
        assert place.max_usd_per_hour == Decimal(frozen)


def test_the_spot_ceiling_says_nothing_of_on_demand():
    pool = a_pool("a", spotMaxPrice="1")

    places = ranked(pool=pool, offerings=view(offers("a", usd="10")), nodes=nodes("a"))

    assert shown(places) == ["Spot a  price", "OnDemand a"]


@pytest.mark.parametrize(
    ("pool", "asked", "price", "says"),
    [
        ({"maxPrice": "9.5"}, None, "10", "$10.00 an hour, at most $9.50 by the pool's maxPrice"),
        ({"spotMaxPrice": "9"}, None, "10", "$10.00 an hour, at most $9.00 by the pool's spotMaxPrice"),
        ({}, "2", "10", "$10.00 an hour, at most $2.00 by annotation cloud.aibrix.ai/max-price"),
        ({"maxPrice": "9"}, None, None, "its price is not known, at most $9.00 by the pool's maxPrice"),
    ],
    ids=["pool", "spot", "pod", "unknown"],
)
def test_a_place_that_is_too_dear_says_the_price_and_whose_ceiling_it_is(pool, asked, price, says):
    place = one(
        pool=a_pool("a", **SPOT, **pool),
        account=offers("a", usd=price),
        max_usd_per_hour=Decimal(asked) if asked else None,
    )

    assert place.detail == says


# --- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "taken", "fits"), [(16, 8, True), (16, 9, False), (8, 0, True), (7, 0, False)]
)
def test_gpus_of_all_machines_together_stay_within_the_limit(limit, taken, fits):
    place = one(pool=a_pool("a", **SPOT, limits={"gpus": limit}), usage=Usage(gpus=taken))

    assert isinstance(place, Candidate) is fits
    if not fits:
        assert place.reason is SkipReason.LIMIT


def test_a_machine_without_gpus_needs_none_of_the_limit():
    place = one(
        pool=a_pool("a", **SPOT, limits={"gpus": 8}),
        account=offers("a", accelerator=None, needs_accelerator=False),
        accelerator=None,
        usage=Usage(gpus=8),
    )

    assert isinstance(place, Candidate)


@pytest.mark.parametrize(
    ("usage", "price", "says"),
    [
        (Usage(usd_per_hour=Decimal("15")), "10", None),
        (
            Usage(usd_per_hour=Decimal("15.01")),
            "10",
            "$15.01 of limits.usdPerHour $25.00 are taken, and it costs $10.00 an hour",
        ),
        (Usage(), None, "its price is not known, and limits.usdPerHour $25.00 counts it"),
        (
            Usage(unpriced=2),
            "1",
            "2 machines of the pool have no known price, and limits.usdPerHour $25.00 counts them",
        ),
        (Usage(), "25.5", "$25.50 an hour, and limits.usdPerHour $25.00 is less than one machine"),
    ],
    ids=["fits", "over", "unknown-price", "unknown-usage", "below-one-machine"],
)
def test_dollars_of_all_machines_together_stay_within_the_limit(usage, price, says):
    place = one(
        pool=a_pool("a", **SPOT, limits={"usdPerHour": "25"}), account=offers("a", usd=price), usage=usage
    )

    assert getattr(place, "detail", None) == says


def test_under_a_limit_in_dollars_the_machine_may_not_become_dearer_than_it_was_counted():
    place = one(
        pool=a_pool("a", **SPOT, limits={"usdPerHour": "25"}, maxPrice="20"), account=offers("a", usd="10")
    )

    assert place.max_usd_per_hour == place.ceiling_usd_per_hour == Decimal(10)


@pytest.mark.parametrize(
    ("price", "counted"), [("0.1234567891", "0.12345679"), ("0", "0.000000001"), ("3", "3")]
)
def test_a_price_finer_than_the_api_can_hold_is_counted_upwards(price, counted):
    place = one(pool=a_pool("a", **SPOT, limits={"usdPerHour": "25"}), account=offers("a", usd=price))

    assert place.max_usd_per_hour == Decimal(counted)


def test_without_a_limit_the_ceiling_is_what_is_counted_until_the_machine_is_rented():
    capped = one(pool=a_pool("a", **SPOT, maxPrice="20"))
    free = one(pool=a_pool("a", **SPOT))

    assert (capped.ceiling_usd_per_hour, free.ceiling_usd_per_hour) == (20, 10)
    assert free.max_usd_per_hour is None


def test_the_next_decision_of_a_batch_sees_what_the_one_before_it_promised():
    usage = Usage(gpus=8).plus(("a", "default"), machines=1, gpus=8, usd_per_hour=Decimal(3), unpriced=0)
    usage = usage.plus(("a", "default"), machines=1, gpus=0, usd_per_hour=None, unpriced=1)

    assert usage == Usage(machines={("a", "default"): 2}, gpus=16, usd_per_hour=Decimal(3), unpriced=1)


# --- who may spend -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selector", "labels", "selects"),
    [
        ({}, {}, True),
        ({"matchLabels": {"team": "a"}}, {"team": "a", "x": ""}, True),
        ({"matchLabels": {"team": "a"}}, {"team": "b"}, False),
        ({"matchLabels": {"team": "a"}}, {}, False),
        ({"matchExpressions": [{"key": "t", "operator": "In", "values": ["a", "b"]}]}, {"t": "b"}, True),
        ({"matchExpressions": [{"key": "t", "operator": "In", "values": ["a", "b"]}]}, {}, False),
        ({"matchExpressions": [{"key": "t", "operator": "NotIn", "values": ["a"]}]}, {}, True),
        ({"matchExpressions": [{"key": "t", "operator": "NotIn", "values": ["a"]}]}, {"t": "a"}, False),
        ({"matchExpressions": [{"key": "t", "operator": "Exists"}]}, {"t": ""}, True),
        ({"matchExpressions": [{"key": "t", "operator": "DoesNotExist"}]}, {"t": ""}, False),
        (
            {"matchLabels": {"a": "1"}, "matchExpressions": [{"key": "t", "operator": "Exists"}]},
            {"a": "1"},
            False,
        ),
    ],
)
def test_a_namespace_selector_selects_as_everywhere_in_kubernetes(selector, labels, selects):
    place = one(pool=a_pool("a", **SPOT, namespaceSelector=selector), namespace_labels=labels)

    assert LabelSelector.model_validate(selector).selects(labels) is selects
    assert isinstance(place, Candidate) is selects
    if not selects:
        assert (place.reason, place.detail) == (
            SkipReason.NAMESPACE_NOT_ALLOWED,
            "the pool's namespaceSelector does not select namespace team",
        )


# --- a pool that can never serve -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("account", "pool", "request_changes", "for_good"),
    [
        (offers("a", tiers={Tier.ON_DEMAND}), {}, {}, True),
        (offers("a"), {}, {"accelerator": Accelerator(type="tpu", count=1)}, True),
        (offers("a"), {"limits": {"gpus": 4}}, {}, True),
        (offers("a", usd="10"), {"limits": {"usdPerHour": "9"}}, {}, False),  # prices change
        (offers("a", usd="10"), {"maxPrice": "9"}, {}, False),
        (offers("a"), {"namespaceSelector": {"matchLabels": {"x": "y"}}}, {}, False),
    ],
    ids=["tier", "accelerator", "gpus", "dollars", "ceiling", "namespace"],
)
def test_a_pool_that_can_never_serve_the_pod_says_so(account, pool, request_changes, for_good):
    place = one(pool=a_pool("a", **SPOT, **pool), account=account, **request_changes)

    assert (explain.NEVER in explain.sentence([place])) is for_good


def test_a_pool_is_not_called_hopeless_while_one_place_may_come_to_serve():
    places = ranked(
        pool=a_pool("a", "b", **SPOT),
        offerings=view(offers("a", tiers={Tier.ON_DEMAND}), offers("b")),
        nodes=nodes("a", "b"),
        blocks=[a_block("b")],
    )

    assert explain.NEVER not in explain.sentence(places)


def test_the_request_alone_being_too_large_for_the_limit_is_said_with_both_numbers():
    place = one(pool=a_pool("a", **SPOT, limits={"gpus": 4}), accelerator=H100X8)

    assert place.detail == "it asks for 8 GPUs, and limits.gpus is 4 in all"


@pytest.mark.parametrize(
    ("amount", "text"),
    [("2", "$2.00"), ("18.960", "$18.96"), ("0.5", "$0.50"), ("0.125", "$0.125"), ("100", "$100.00")],
)
def test_dollars_are_shown_exactly(amount, text):
    assert usd(Decimal(amount)) == text


@pytest.mark.behaviour(45)
@pytest.mark.behaviour(362)
def test_egress_that_nobody_can_enforce_is_never_opened_up():
    places = ranked(
        pool=a_pool("a", "b", egress={"mode": "Allowlist", "targets": ["10.0.0.0/8"]}),
        offerings=view(offers("a"), offers("b")),
        nodes=nodes("a", "b"),
    )

    assert chosen(places) is None
    assert explain.deferral_of(places) is DeferralReason.NO_CANDIDATE
    assert "4 unable to enforce the egress policy" in explain.sentence(places)
