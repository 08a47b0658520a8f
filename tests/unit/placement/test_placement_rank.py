"""The walk: which candidate, in which order, and why not the others."""

from datetime import timedelta
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placement_makers import (
    H100X8,
    LATER,
    NOW,
    a_block,
    a_node,
    a_pool,
    a_request,
    nodes,
    offers,
    ranked,
    shown,
    view,
)

from app.api.reasons import SkipReason
from app.placement.constraints import NodeConstraints
from app.placement.market import Listed
from app.placement.rank import Candidate, Skip, Usage, chosen
from providers.base import Accelerator, Completion, Tier

SEED_POOL = a_pool("modal", {"name": "aws", "regions": ["us", "eu-west-1"]})
AWS_REGIONS = ("us-east-1", "us-east-2", "us-west-1", "us-west-2", "eu-west-1")


@pytest.mark.behaviour(37, 38, 49, 50)
def test_every_provider_and_region_is_tried_in_the_first_tier_before_any_in_the_second():
    places = ranked(
        pool=SEED_POOL,
        offerings=view(offers("modal"), offers("aws", *AWS_REGIONS)),
        nodes=nodes("modal", "aws"),
    )

    one_tier = ["modal", *(f"aws {region}" for region in AWS_REGIONS)]
    assert shown(places) == [f"Spot {place}" for place in one_tier] + [
        f"OnDemand {place}" for place in one_tier
    ]


@pytest.mark.behaviour(31, 54)
def test_the_choice_is_the_first_candidate():
    places = ranked(
        pool=SEED_POOL,
        offerings=view(offers("modal"), offers("aws", *AWS_REGIONS)),
        nodes=nodes("modal", "aws"),
        blocks=[a_block("modal", tier="Spot"), a_block("aws", region="us-east-1")],
    )

    choice = chosen(places)
    assert choice is not None
    assert str(choice) == "aws Spot us-east-2"
    assert choice.accelerator == H100X8
    assert [offering.region for offering in choice.offerings] == ["us-east-2"]


@pytest.mark.behaviour(40, 41, 44, 46, 48)
@pytest.mark.parametrize(
    ("account", "pool", "request_changes", "reason"),
    [
        (None, {}, {}, SkipReason.PROVIDER_UNREGISTERED),
        (offers("acme", tiers={Tier.ON_DEMAND}), {}, {}, SkipReason.CAPACITY_TYPE_UNSUPPORTED),
        (offers("acme"), {"egress": {"mode": "Blocked"}}, {}, SkipReason.EGRESS_POLICY_UNSUPPORTED),
        (
            offers("acme"),
            {},
            {"accelerator": Accelerator(type="h100", count=1)},
            SkipReason.ACCELERATOR_UNSUPPORTED,
        ),
        (offers("acme"), {}, {"accelerator": None}, SkipReason.REQUEST_UNSUPPORTED),
        (
            offers("acme", completion=Completion.NEVER),
            {},
            {"restart_policy": "OnFailure"},
            SkipReason.COMPLETION,
        ),
        (
            offers("acme", completion=Completion.ENDED),
            {},
            {"restart_policy": "Never", "needs_exit_code": True},
            SkipReason.COMPLETION,
        ),
        (offers("acme", max_lifetime_s=3600.0), {}, {"active_deadline_s": 3601}, SkipReason.LIFETIME),
        (
            offers("acme"),
            {},
            {"node": NodeConstraints(selector={"zone": "a"})},
            SkipReason.NODE_UNAVAILABLE,
        ),
    ],
    ids=lambda value: value.value if isinstance(value, SkipReason) else "",
)
def test_a_provider_that_cannot_serve_is_passed_over_with_its_reason(account, pool, request_changes, reason):
    places = ranked(
        a_request(**request_changes),
        pool=a_pool("acme", capacityTypes=["Spot"], **pool),
        offerings=view(account) if account else {},
        nodes=nodes("acme"),
    )

    assert shown(places) == [f"Spot acme - {reason}"]


def test_open_egress_needs_no_enforcement():
    places = ranked(
        pool=a_pool("acme", capacityTypes=["Spot"], egress={"mode": "Open"}),
        offerings=view(offers("acme")),
        nodes=nodes("acme"),
    )

    assert shown(places) == ["Spot acme"]


@pytest.mark.behaviour(41, 43)
def test_a_shape_sold_only_in_the_other_tier_is_never_downgraded_to():
    account = offers("acme", tiers={Tier.ON_DEMAND})
    both = offers("acme")  # the account sells both tiers, but this accelerator on demand only
    account = type(account)(
        provider="acme", account="default", traits=both.traits, offerings=account.offerings
    )

    places = ranked(pool=a_pool("acme"), offerings=view(account), nodes=nodes("acme"))

    assert shown(places) == ["Spot acme - capacity_type_unsupported", "OnDemand acme"]


def test_a_region_that_offers_nothing_is_passed_over_alone():
    places = ranked(
        pool=a_pool({"name": "acme", "regions": ["r1", "r9", "r2"]}, capacityTypes=["Spot"]),
        offerings=view(offers("acme", "r1", "r2")),
        nodes=nodes("acme"),
    )

    assert shown(places) == ["Spot acme r1", "Spot acme r9 accelerator_unsupported", "Spot acme r2"]


@pytest.mark.behaviour(47)
def test_a_machine_without_accelerator_needs_no_listed_shape():
    places = ranked(
        a_request(accelerator=None),
        pool=a_pool("acme", capacityTypes=["Spot"]),
        offerings=view(offers("acme", needs_accelerator=False)),
        nodes=nodes("acme"),
    )

    assert shown(places) == ["Spot acme"]


@pytest.mark.behaviour(69, 70, 71, 72, 73, 74)
@pytest.mark.parametrize(
    ("columns", "spot_r1", "spot_r2", "on_demand_r1"),
    [
        ({}, True, True, True),
        ({"tier": "Spot"}, True, True, False),
        ({"region": "r1"}, True, False, True),
        ({"accelerator": "h100:8"}, True, True, True),
        ({"accelerator": "h100:1"}, False, False, False),
        ({"accelerator": ""}, False, False, False),
        ({"region": ""}, False, False, False),
        ({"host": "h-17"}, False, False, False),
        ({"template": "rs-uid/1"}, True, True, True),
        ({"template": "rs-uid/2"}, False, False, False),
        ({"account": "second"}, False, False, False),
        ({"expires_at": NOW}, False, False, False),
    ],
    ids=str,
)
def test_a_block_covers_what_its_axes_say_and_nothing_else(columns, spot_r1, spot_r2, on_demand_r1):
    places = ranked(
        pool=a_pool("acme", "other"),
        offerings=view(offers("acme", "r1", "r2"), offers("other")),
        nodes=nodes("acme", "other"),
        blocks=[a_block("acme", **columns)],
    )
    blocked = {(place.provider, place.tier, place.region): isinstance(place, Skip) for place in places}

    assert blocked[("acme", Tier.SPOT, "r1")] is spot_r1
    assert blocked[("acme", Tier.SPOT, "r2")] is spot_r2
    assert blocked[("acme", Tier.ON_DEMAND, "r1")] is on_demand_r1
    assert not blocked[("other", Tier.SPOT, "")]


@pytest.mark.behaviour(70)
@pytest.mark.behaviour(214)
def test_a_block_of_machines_without_accelerator_covers_those():
    places = ranked(
        a_request(accelerator=None),
        pool=a_pool("acme", capacityTypes=["Spot"]),
        offerings=view(offers("acme", needs_accelerator=False)),
        nodes=nodes("acme"),
        blocks=[a_block("acme", accelerator="")],
    )

    assert shown(places) == ["Spot acme  blocked"]


@pytest.mark.behaviour(75)
def test_of_two_blocks_on_one_place_the_later_end_is_told():
    sooner, later = a_block("acme", id=1), a_block("acme", id=2, expires_at=LATER + timedelta(seconds=9))

    (place,) = ranked(
        pool=a_pool("acme", capacityTypes=["Spot"]),
        offerings=view(offers("acme")),
        nodes=nodes("acme"),
        blocks=[later, sooner],
    )

    assert isinstance(place, Skip)
    assert place.until == later.expires_at
    assert place.blocks == (1, 2)


@pytest.mark.parametrize(
    ("node", "word"),
    [
        (None, "does not exist"),
        (a_node("acme", ready=False), "not Ready"),
        (a_node("acme", cordoned=True), "cordoned"),
    ],
    ids=["absent", "not-ready", "cordoned"],
)
def test_a_provider_whose_virtual_node_takes_no_pods_is_passed_over(node, word):
    (place,) = ranked(
        pool=a_pool("acme", capacityTypes=["Spot"]),
        offerings=view(offers("acme")),
        nodes={("acme", "default"): node} if node else {},
    )

    assert isinstance(place, Skip)
    assert place.reason is SkipReason.NODE_UNAVAILABLE
    assert word in place.detail


@pytest.mark.parametrize(
    ("completion", "restart_policy", "job", "fits"),
    [
        (Completion.CODE, "Never", True, True),
        (Completion.ENDED, "Never", True, False),
        (Completion.ENDED, "OnFailure", True, False),
        (Completion.ENDED, "Never", False, True),
        (Completion.NEVER, "Never", False, False),
        (Completion.NEVER, "OnFailure", True, False),
        (Completion.NEVER, "Always", False, True),
    ],
)
def test_work_goes_only_where_what_is_needed_of_its_end_is_told(completion, restart_policy, job, fits):
    (place,) = ranked(
        a_request(restart_policy=restart_policy, needs_exit_code=job),
        pool=a_pool("acme", capacityTypes=["Spot"]),
        offerings=view(offers("acme", completion=completion)),
        nodes=nodes("acme"),
    )

    assert isinstance(place, Candidate) is fits


def test_a_deadline_as_long_as_machines_live_is_not_too_long():
    (place,) = ranked(
        a_request(active_deadline_s=3600),
        pool=a_pool("acme", capacityTypes=["Spot"]),
        offerings=view(offers("acme", max_lifetime_s=3600.0)),
        nodes=nodes("acme"),
    )

    assert isinstance(place, Candidate)


class Refusing(Listed):
    def refuses(self, request, account):
        return "no GPUDirect" if account == ("acme", "default") else None


def test_what_an_adapter_can_never_run_is_passed_over_in_its_own_words():
    first, second = ranked(
        pool=a_pool("acme", "other", capacityTypes=["Spot"]),
        offerings=view(offers("acme"), offers("other")),
        nodes=nodes("acme", "other"),
        market=Refusing(),
    )

    assert (first.reason, first.detail, first.for_good) == (
        SkipReason.REQUEST_UNSUPPORTED,
        "no GPUDirect",
        True,
    )
    assert isinstance(second, Candidate)


# --- properties ----------------------------------------------------------------------------------

PROVIDERS = ("modal", "aws", "acme")
REGIONS = ("us-east-1", "eu-west-1", "r1")
SHAPES = (H100X8, Accelerator(type="H100", count=1), Accelerator(type="A100", count=8))

entries = st.fixed_dictionaries(
    {"name": st.sampled_from(PROVIDERS)},
    optional={
        "regions": st.lists(st.sampled_from([*REGIONS, "us"]), min_size=1, max_size=3),
        "weight": st.integers(1, 5),
    },
)
pools = st.builds(
    lambda providers, tiers, strategy, extra: a_pool(
        *({"weight": 1} | entry for entry in providers), capacityTypes=tiers, strategy=strategy, **extra
    ),
    st.lists(entries, min_size=1, max_size=3, unique_by=lambda entry: entry["name"]),
    st.sampled_from([["Spot"], ["OnDemand"], ["Spot", "OnDemand"], ["OnDemand", "Spot"]]),
    st.sampled_from(["Ordered", "LowestPrice", "Weighted"]),
    st.fixed_dictionaries(
        {},
        optional={
            "maxPrice": st.sampled_from(["2", "5"]),
            "spotMaxPrice": st.sampled_from(["1", "9"]),
            "limits": st.sampled_from(
                [{"gpus": 8}, {"gpus": 4}, {"usdPerHour": "6"}, {"gpus": 20, "usdPerHour": "30"}]
            ),
            "namespaceSelector": st.sampled_from(
                [
                    {},
                    {"matchLabels": {"team": "a"}},
                    {"matchExpressions": [{"key": "b", "operator": "Exists"}]},
                ]
            ),
        },
    ),
)
accounts = st.builds(
    lambda name, regions, shape, tiers, cpu, prices: offers(
        name,
        *regions,
        accelerator=shape,
        tiers=tiers,
        needs_accelerator=cpu,
        prices=dict(zip(("", *REGIONS), prices, strict=True)),
    ),
    st.sampled_from(PROVIDERS),
    st.lists(st.sampled_from(REGIONS), max_size=3, unique=True),
    st.sampled_from(SHAPES),
    st.sampled_from([frozenset({Tier.SPOT}), frozenset({Tier.ON_DEMAND}), frozenset(Tier)]),
    st.booleans(),
    st.lists(st.sampled_from([None, "0.5", "2", "2", "7.25"]), min_size=4, max_size=4),
)
views = st.lists(accounts, max_size=3).map(lambda rows: view(*rows))
block_rows = st.builds(
    a_block,
    st.sampled_from(PROVIDERS),
    accelerator=st.sampled_from([None, "", "h100:8", "h100:1"]),
    tier=st.sampled_from([None, "Spot", "OnDemand"]),
    region=st.sampled_from([None, "", *REGIONS]),
    host=st.sampled_from([None, "h-1"]),
    template=st.sampled_from([None, "rs-uid/1", "other"]),
    expires_at=st.sampled_from([NOW, LATER]),
)
node_views = st.builds(
    lambda ready, cordoned, gone: {
        (name, "default"): a_node(name, ready=name in ready, cordoned=name in cordoned)
        for name in PROVIDERS
        if name not in gone
    },
    *([st.sets(st.sampled_from(PROVIDERS))] * 3),
)
requests = st.builds(
    a_request,
    accelerator=st.sampled_from([None, *SHAPES]),
    max_usd_per_hour=st.sampled_from([None, Decimal("1"), Decimal("3")]),
    namespace_labels=st.sampled_from([{}, {"team": "a"}, {"team": "a", "b": ""}]),
)
usages = st.builds(
    lambda counts, gpus, usd, unpriced: Usage(
        machines={(name, "default"): count for name, count in zip(PROVIDERS, counts, strict=True)},
        gpus=gpus,
        usd_per_hour=usd,
        unpriced=unpriced,
    ),
    st.lists(st.integers(0, 9), min_size=3, max_size=3),
    st.integers(0, 24),
    st.sampled_from([Decimal(0), Decimal("4"), Decimal("29")]),
    st.sampled_from([0, 0, 1]),
)
situations = st.fixed_dictionaries(
    {
        "request": requests,
        "pool": pools,
        "offerings": views,
        "nodes": node_views,
        "blocks": st.lists(block_rows, max_size=5),
        "usage": usages,
    }
)


@pytest.mark.behaviour(37, 38, 41, 44, 46, 66, 70, 71, 72, 73, 74)
@given(situation=situations)
def test_no_candidate_is_one_that_a_filter_excludes(situation):
    request, pool, accounts = situation["request"], situation["pool"], situation["offerings"]
    declared = {entry.name: entry for entry in pool.providers}

    for place in ranked(**situation):
        if not isinstance(place, Candidate):
            continue
        account = accounts[(place.provider, place.account)]
        node = situation["nodes"][(place.provider, place.account)]
        assert place.provider in declared
        assert place.tier.value in [tier.value for tier in pool.capacity_types]
        assert place.tier in account.traits.tiers
        assert node.ready
        assert not node.cordoned
        if request.accelerator is not None:
            assert place.offerings
        else:
            assert not account.traits.needs_accelerator
        assert pool.namespace_selector is None or pool.namespace_selector.selects(request.namespace_labels)
        assert_affordable(place, request, pool, situation["usage"])
        for row in place.offerings:
            assert row in account.offerings
            assert row.tier is place.tier
            assert row.region in (place.region, "")
            assert request.accelerator is not None
            assert row.accelerator is not None
            assert row.accelerator.key == request.accelerator.key
        for block in situation["blocks"]:
            excluded = (
                block.scope.provider == place.provider
                and block.expires_at > NOW
                and block.scope.host is None
                and block.scope.accelerator in (None, request.accelerator.key if request.accelerator else "")
                and block.scope.tier in (None, place.tier)
                and block.scope.region in (None, place.region)
                and block.scope.template in (None, request.template)
            )
            assert not excluded


def assert_affordable(place, request, pool, usage):
    """No ceiling is passed and no limit either, and what was not known was not taken for nothing."""
    price = place.usd_per_hour
    spot = pool.spot_max_price if place.tier is Tier.SPOT else None
    ceilings = [
        amount
        for amount in (spot if spot is not None else pool.max_price, request.max_usd_per_hour)
        if amount is not None
    ]
    assert price == (place.offerings[0].usd_per_hour if place.offerings else None)
    if ceilings:
        assert price is not None
        assert price <= place.max_usd_per_hour <= min(ceilings)
    if pool.limits is None:
        return
    if pool.limits.gpus is not None and request.accelerator:
        assert usage.gpus + request.accelerator.count <= pool.limits.gpus
    if pool.limits.usd_per_hour is not None:
        assert not usage.unpriced
        assert usage.usd_per_hour + place.max_usd_per_hour <= pool.limits.usd_per_hour
        assert place.max_usd_per_hour == price


@pytest.mark.behaviour(64)
@given(situation=situations)
def test_the_tier_is_the_outermost_axis_and_inside_it_the_strategy_orders(situation):
    pool = situation["pool"]
    tiers = [tier.value for tier in pool.capacity_types]
    names = [entry.name for entry in pool.providers]

    places = ranked(**situation)
    order = [(tiers.index(place.tier), names.index(place.provider)) for place in places]

    assert [tier for tier, _ in order] == sorted(tier for tier, _ in order)
    if pool.strategy == "Ordered":
        assert order == sorted(order)
    if pool.strategy == "LowestPrice":
        ranks = [
            (tiers.index(place.tier), place.usd_per_hour is None, place.usd_per_hour or 0) for place in places
        ]
        assert ranks == sorted(ranks)
    assert set(order) == {(tier, name) for tier in range(len(tiers)) for name in range(len(names))}


@given(situation=situations, chance=st.randoms(use_true_random=False))
def test_the_order_of_offerings_and_blocks_decides_only_where_the_pool_and_the_groups_are_silent(
    situation, chance
):
    shuffled = dict(situation)
    rows = {}
    for key, account in situation["offerings"].items():
        mixed = list(account.offerings)
        chance.shuffle(mixed)
        rows[key] = type(account)(
            provider=account.provider, account=account.account, traits=account.traits, offerings=tuple(mixed)
        )
    shuffled["offerings"] = dict(chance.sample(sorted(rows.items()), len(rows)))
    shuffled["blocks"] = chance.sample(situation["blocks"], len(situation["blocks"]))

    before, after = shown(ranked(**situation)), shown(ranked(**shuffled))

    assert sorted(after) == sorted(before)
    if all(entry.regions for entry in situation["pool"].providers):
        assert after == before
