"""What would make a Pod placeable, from rows as placement writes them: real rankings, through JSON."""

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import orjson
import pytest
from placement_makers import LATER, NOW, a_block, a_node, a_pool, a_request, nodes, offers, ranked, view

from app.cli import output
from app.placement.explain import decision_of
from app.placement.rank import Usage
from app.placement.remedies import block_ids, looked, remedies
from app.store.decisions import Decision
from providers.base import Accelerator, Tier

SPOT = {"capacityTypes": ["Spot"]}


def recorded(places, request=None) -> Decision:
    decision = decision_of(request or a_request(), "gpu", places)
    rows = orjson.loads(orjson.dumps(list(decision.candidates), default=str))
    return replace(decision, candidates=rows)


def sentences(places, *, blocks=(), now=NOW) -> list[str]:
    decision = recorded(places)
    shown = looked(decision, blocks=blocks)
    return remedies(decision, shown, now=now, relative=lambda moment: output.until(moment, now=now))


def one_place(pool, account, *, usage=None, **changes):
    return ranked(
        pool=pool, offerings=view(account), nodes=changes.pop("nodes", nodes("a")), usage=usage, **changes
    )


def test_of_blocked_places_the_soonest_end_is_told_first_and_how_to_end_it_now():
    blocks = [a_block("a", id=4), a_block("b", id=7, kind="quota", expires_at=LATER - timedelta(minutes=1))]
    places = ranked(
        pool=a_pool("gone", "a", "b", **SPOT),
        offerings=view(offers("a"), offers("b")),
        nodes=nodes("a", "b"),
        blocks=blocks,
    )

    assert block_ids(recorded(places)) == [4, 7]
    assert sentences(places, blocks=blocks) == [
        "waiting: b Spot (quota) is tried again in 4m; sooner with: nebula blocks clear 7",
        "configure gone (nebula run --providers), or take it off NodePool gpu",
    ]


def test_a_block_that_is_extended_is_no_new_decision():
    def row(end):
        return recorded(one_place(a_pool("a", **SPOT), offers("a"), blocks=[a_block("a", expires_at=end)]))

    assert row(LATER) == row(LATER + timedelta(minutes=5))


def test_a_block_that_is_over_leaves_nothing_to_do():
    blocks = [a_block("a")]
    places = one_place(a_pool("a", **SPOT), offers("a"), blocks=blocks)

    (line,) = sentences(places, blocks=blocks, now=LATER)
    assert line == "nothing: the block on a Spot is over, and the Pod is about to be looked at again"


def test_what_only_this_pod_avoids_is_waited_for_and_no_row_is_named():
    places = one_place(a_pool("a", **SPOT), offers("a"), blocks=[a_block("a", id=-1)])

    assert sentences(places) == ["waiting: a Spot (capacity) is tried again by itself"]


def test_each_ceiling_is_to_be_raised_to_the_cheapest_price_that_it_shut_out():
    places = ranked(
        pool=a_pool("a", "b", maxPrice="2", spotMaxPrice="1.5"),
        offerings=view(offers("a", usd="18.96"), offers("b", "r1", usd="7.1")),
        nodes=nodes("a", "b"),
    )

    assert sentences(places) == [
        "raise the pool's spotMaxPrice to at least $7.10 an hour, the price of b Spot r1",
        "raise the pool's maxPrice to at least $7.10 an hour, the price of b OnDemand r1",
    ]


def test_the_pods_own_ceiling_is_named_and_an_unknown_price_is_never_a_number():
    dear = one_place(
        a_pool("a", **SPOT), offers("a", usd="3"), request=a_request(max_usd_per_hour=Decimal(2))
    )
    unknown = one_place(a_pool("a", maxPrice="2", **SPOT), offers("a"))

    assert sentences(dear) == [
        "raise annotation cloud.aibrix.ai/max-price to at least $3.00 an hour, the price of a Spot"
    ]
    assert sentences(unknown) == ["a known price of a Spot within the pool's maxPrice, or no such ceiling"]


@pytest.mark.parametrize(
    ("limits", "usage", "usd", "line"),
    [
        (
            {"gpus": 16},
            Usage(gpus=12),
            None,
            "a Pod of NodePool gpu ends, or its limit is raised:"
            " 12 GPUs of limits.gpus 16 are taken, and it asks for 8",
        ),
        (
            {"gpus": 4},
            Usage(),
            None,
            "raise the limit of NodePool gpu, or take it off:"
            " it asks for 8 GPUs, and limits.gpus is 4 in all",
        ),
        (
            {"usdPerHour": "10"},
            Usage(usd_per_hour=Decimal(8)),
            "3",
            "a Pod of NodePool gpu ends, or its limit is raised:"
            " $8.00 of limits.usdPerHour $10.00 are taken, and it costs $3.00 an hour",
        ),
        (
            {"usdPerHour": "1"},
            Usage(),
            "3",
            "raise the limit of NodePool gpu, or take it off:"
            " $3.00 an hour, and limits.usdPerHour $1.00 is less than one machine",
        ),
        (
            {"usdPerHour": "1"},
            Usage(),
            None,
            "a known price, or no limits.usdPerHour on NodePool gpu:"
            " its price is not known, and limits.usdPerHour $1.00 counts it",
        ),
    ],
)
def test_waiting_is_advised_only_for_a_limit_that_can_get_room(limits, usage, usd, line):
    places = one_place(a_pool("a", limits=limits, **SPOT), offers("a", usd=usd), usage=usage)

    assert sentences(places) == [line]


@pytest.mark.parametrize(
    ("node", "line"),
    [
        (a_node("a", cordoned=True), "kubectl uncordon nebula-a"),
        (
            a_node("a", ready=False),
            "node nebula-a becomes Ready: kubectl describe node nebula-a says why it is not",
        ),
        (None, "node nebula-a exists: the controller makes it once it has reached a"),
    ],
)
def test_a_node_that_takes_nothing_is_named_with_the_command_that_helps(node, line):
    both_tiers = one_place(a_pool("a"), offers("a"), nodes={} if node is None else {("a", "default"): node})

    assert sentences(both_tiers) == [line]


def test_what_nobody_sells_is_told_apart_from_offers_that_are_not_known_yet():
    silent = replace(offers("b"), offerings=())
    other = offers("a", accelerator=Accelerator(type="t4", count=1))
    places = ranked(pool=a_pool("a", "b", **SPOT), offerings=view(other, silent), nodes=nodes("a", "b"))

    assert sentences(places) == [
        "waiting: b Spot must tell its offers first",
        "ask for another accelerator or count, or add a provider or region that offers it to NodePool gpu"
        " (a Spot: it offers no h100:8)",
    ]


def test_a_namespace_that_the_pool_does_not_select_is_to_be_labelled():
    pool = a_pool("a", namespaceSelector={"matchLabels": {"gpu": "yes"}})

    assert sentences(one_place(pool, offers("a"))) == [
        "label namespace team so that NodePool gpu's namespaceSelector selects it"
    ]


def test_a_tier_that_is_not_sold_asks_for_another():
    places = one_place(a_pool("a", **SPOT), offers("a", tiers={Tier.ON_DEMAND}))

    assert sentences(places) == [
        "add another capacityType to NodePool gpu (a Spot: it sells no Spot machines)"
    ]


def test_a_placed_pod_needs_nothing_and_only_the_first_free_candidate_is_chosen():
    places = ranked(pool=a_pool("gone", "a"), offerings=view(offers("a")), nodes=nodes("a"))

    assert sentences(places) == []
    verdicts = [place.verdict for place in looked(recorded(places), blocks=())]
    assert verdicts == ["not configured", "chosen", "not configured", "next"]


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        ("no_pool", "the label nebula.inftyai.com/nodepool must name a NodePool"),
        ("invalid_request", "the Pod must be made anew"),
        ("no_candidate", "NodePool gpu must be corrected"),
        ("stale_claim", "the claim of an earlier Pod must be released"),
        ("owner_backoff", "waiting: its owner's Pods end by themselves"),
        ("of a later version", "waiting ("),
    ],
)
def test_a_decision_without_candidates_says_what_helps_and_where_its_message_is(outcome, words):
    old = Decision(pod_namespace="team", pod_name="pod", pod_uid="u", pool="gpu", outcome=outcome)

    (line,) = remedies(replace(old, message="because"), [], now=NOW, relative=str)
    (old_line,) = remedies(old, [], now=NOW, relative=str)

    assert line.startswith(words)
    assert old_line.startswith(words)
    if outcome not in ("no_pool", "stale_claim"):
        assert "(see above)" in line
        assert "kubectl get pod -n team pod -o yaml says" in old_line


def test_a_row_of_an_older_or_later_version_is_read_as_far_as_it_is_known():
    row = {"provider": "a", "account": "x", "region": None, "tier": "Spot", "price": "1.5", "skip": "moon"}
    decision = Decision(
        pod_namespace="n", pod_name="p", pod_uid="u", pool="gpu", outcome="no_candidate", candidates=[row]
    )

    (place,) = looked(decision, blocks=())
    assert (place.verdict, place.usd_per_hour, str(place)) == ("moon", Decimal("1.5"), "a/x Spot")
    assert remedies(decision, [place], now=NOW, relative=str) == ["end what holds back a/x Spot"]
