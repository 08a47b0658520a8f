"""Cores, memory and disk of the Pod against those of the machine: one that is too small is never chosen."""

from dataclasses import replace
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placement_makers import a_pool, a_request, nodes, offers, ranked, shown, view

from app.api.reasons import SkipReason
from app.placement.explain import sentence
from app.placement.rank import Candidate, Skip
from catalog.offerings import AccountOffers
from catalog.sizes import Amounts
from providers.base import Tier, Workload

GIB = 2**30
SPOT = a_pool("acme", capacityTypes=["Spot"])


def asking(**amounts):
    return a_request(workload=Workload(image="x", **amounts))


def sized(account: AccountOffers, **sizes) -> AccountOffers:
    return replace(account, offerings=tuple(replace(row, **sizes) for row in account.offerings))


def placed(request, account, *, pool=SPOT):
    return ranked(request, pool=pool, offerings=view(account), nodes=nodes("acme"))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"cpu": Decimal("200")}, "cpu 192 at most, and 200 is asked for"),
        ({"memory_bytes": 2048 * GIB}, "memory 1000Gi at most, and 2048Gi is asked for"),
        ({"disk_bytes": 65 * GIB}, "ephemeral-storage 64Gi at most, and 65Gi is asked for"),
    ],
)
@pytest.mark.field_case("FC-039")
def test_a_machine_with_too_little_of_one_thing_is_passed_over_for_good_and_says_of_what(asked, words):
    account = sized(offers("acme"), cpu=Decimal(192), memory_bytes=1000 * GIB, disk_bytes=64 * GIB)

    (place,) = placed(asking(**asked), account)

    assert isinstance(place, Skip)
    assert (place.reason, place.for_good) == (SkipReason.REQUEST_UNSUPPORTED, True)
    assert place.detail == f"its h100:8 machines have {words}"
    assert "1 unable to run the Pod (acme Spot: its h100:8 machines have " in sentence([place])


def test_a_machine_of_exactly_that_size_is_large_enough():
    account = sized(offers("acme"), cpu=Decimal(8), memory_bytes=64 * GIB)

    (place,) = placed(asking(cpu=Decimal(8), memory_bytes=64 * GIB), account)

    assert isinstance(place, Candidate)


def test_a_size_that_nobody_tells_stands_in_no_ones_way():
    (place,) = placed(asking(memory_bytes=2048 * GIB), offers("acme"))
    (other,) = placed(a_request(), sized(offers("acme"), memory_bytes=GIB))

    assert isinstance(place, Candidate)
    assert isinstance(other, Candidate)


def test_the_first_shape_with_room_is_the_one_that_is_priced_and_rented():
    small, large = offers("acme", usd="2"), offers("acme", usd="5")
    account = replace(
        small,
        offerings=(
            *(replace(row, memory_bytes=64 * GIB) for row in small.offerings),
            *(replace(row, shape="large", memory_bytes=512 * GIB) for row in large.offerings),
        ),
    )

    (place,) = placed(asking(memory_bytes=128 * GIB), account)

    assert isinstance(place, Candidate)
    assert [row.shape for row in place.offerings] == ["large"]
    assert place.usd_per_hour == 5


def test_only_the_region_with_the_small_machines_is_passed_over():
    account = offers("acme", "r1", "r2")
    rows = tuple(
        replace(row, memory_bytes=(64 if row.region == "r1" else 512) * GIB) for row in account.offerings
    )

    places = placed(asking(memory_bytes=128 * GIB), replace(account, offerings=rows))

    assert shown(places) == ["Spot acme r1 request_unsupported", "Spot acme r2"]


def test_only_the_tier_with_the_small_machines_is_passed_over():
    account = offers("acme")
    rows = tuple(
        replace(row, memory_bytes=(64 if row.tier is Tier.SPOT else 512) * GIB) for row in account.offerings
    )

    places = placed(asking(memory_bytes=128 * GIB), replace(account, offerings=rows), pool=a_pool("acme"))

    assert shown(places) == ["Spot acme - request_unsupported", "OnDemand acme"]


def test_machines_without_accelerator_have_sizes_too():
    account = sized(offers("acme", accelerator=None, needs_accelerator=False), cpu=Decimal(4))

    (place,) = placed(replace(asking(cpu=Decimal(5)), accelerator=None), account)

    assert isinstance(place, Skip)
    assert place.detail == "its machines have cpu 4 at most, and 5 is asked for"


_sizes = st.one_of(st.none(), st.sampled_from([1, 8, 64, 512]))


@given(
    rows=st.lists(st.tuples(_sizes, _sizes, _sizes), min_size=2, max_size=2),
    asked=st.tuples(_sizes, _sizes, _sizes),
)
def test_no_candidate_holds_a_shape_without_room(rows, asked):
    account = offers("acme")
    fields = ("cpu", "memory_bytes", "disk_bytes")
    account = replace(
        account,
        offerings=tuple(
            replace(row, **dict(zip(fields, sizes, strict=True)))
            for row, sizes in zip(account.offerings, rows, strict=True)
        ),
    )
    wanted = Amounts(**dict(zip(fields, asked, strict=True)))

    for place in placed(asking(**dict(zip(fields, asked, strict=True))), account, pool=a_pool("acme")):
        if isinstance(place, Candidate):
            assert place.offerings
            assert not any(wanted.exceeding(Amounts.of(row)) for row in place.offerings)
