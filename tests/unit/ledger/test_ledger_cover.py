"""A prepayment covers its machines and its amount, and not one second more."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from app.ledger.cover import Stay, cover
from app.ledger.rules import seconds
from app.store.ledger_prices import Lasting
from app.store.ledger_values import Commitment, Override

T0 = datetime(2026, 3, 1, tzinfo=UTC)
DAY = 86400
TERM = Commitment(
    id=1,
    provider="modal",
    account="*",
    sku="*",
    tier="*",
    usd_per_hour=Decimal(10),
    amount_usd=Decimal(10_000),
    machines=None,
    starts_at=T0,
    ends_at=T0 + timedelta(days=10),
)


def at(after_s: float) -> datetime:
    return T0 + timedelta(seconds=after_s)


def stay(number: int, start_s: float, end_s: float | None, *, accelerator: str = "H100:8") -> Stay:
    run = Lasting(
        id=number,
        provider="modal",
        account="default",
        sku="gpu_8x",
        accelerator=accelerator,
        tier="OnDemand",
        begun_at=at(start_s),
        over_at=None if end_s is None else at(end_s),
        covered=(),
    )
    return Stay(run=run, start=run.begun_at, end=run.over_at)


def covered(
    stays: list[Stay], *terms: Commitment, overrides: tuple[Override, ...] = ()
) -> dict[int, list[tuple[float, float]]]:
    found = cover(stays, commitments=terms or (TERM,), overrides=overrides)
    return {
        run: [((each.starts_at - T0).total_seconds(), (each.ends_at - T0).total_seconds()) for each in pieces]
        for run, pieces in found.items()
    }


def test_a_machine_is_covered_within_the_term_and_one_that_goes_on_to_its_end():
    assert covered([stay(1, -100, 100), stay(2, 50, None), stay(3, 11 * DAY, None)]) == {
        1: [(0, 100)],
        2: [(50, 10 * DAY)],
    }


def test_as_many_machines_as_were_bought_and_the_next_one_when_one_ends():
    two = replace(TERM, machines=2)
    stays = [stay(1, 0, 100), stay(2, 10, 300), stay(3, 20, 400), stay(4, 30, 90)]

    assert covered(stays, two) == {1: [(0, 100)], 2: [(10, 300)], 3: [(100, 400)]}


def test_none_any_more_from_the_microsecond_in_which_the_amount_is_used():
    hour = replace(TERM, amount_usd=Decimal(10))  # an hour of one machine

    assert covered([stay(1, 0, None)], hour) == {1: [(0, 3600)]}
    assert covered([stay(1, 0, 7200), stay(2, 0, 7200)], hour) == {1: [(0, 1800)], 2: [(0, 1800)]}
    third = replace(TERM, amount_usd=Decimal(10), usd_per_hour=Decimal(30))
    assert covered([stay(1, 0, None)], third) == {1: [(0, 1200)]}


def test_what_costs_nothing_an_hour_lasts_the_term_and_what_was_paid_nothing_for_not_a_moment():
    assert covered([stay(1, 0, 50)], replace(TERM, usd_per_hour=Decimal(0))) == {1: [(0, 50)]}
    assert covered([stay(1, 0, 50)], replace(TERM, amount_usd=Decimal(0))) == {}


def test_the_next_prepayment_covers_what_the_first_one_leaves():
    first, second = replace(TERM, machines=1), replace(TERM, id=2, machines=1)

    assert covered([stay(1, 0, 100), stay(2, 10, 150)], first, second) == {
        1: [(0, 100)],
        2: [(100, 150), (10, 100)],
    }


def test_what_a_person_has_set_a_price_for_is_not_covered():
    price = Override(
        id=1, provider="modal", account="*", sku="*", tier="*", usd_per_hour=Decimal(1),
        starts_at=at(20), ends_at=at(40),
    )  # fmt: skip

    assert covered([stay(1, 0, 100)], overrides=(price,)) == {1: [(0, 20), (40, 100)]}


def test_what_is_kept_has_its_place_and_its_money_and_nothing_else_is_asked_for():
    one, hours = replace(TERM, machines=1), replace(TERM, amount_usd=Decimal(30))
    shut = replace(stay(1, 0, 9000), kept=((1, at(100), at(3700)),))
    other = replace(stay(3, 0, 9000), kept=())

    assert covered([shut, stay(2, 50, None), stay(4, 120, 3600), other], one) == {
        1: [(100, 3700)],
        2: [(50, 10 * DAY)],  # had it before, and stays
    }
    assert covered([shut, stay(2, 150, 8000), other], one) == {1: [(100, 3700)], 2: [(3700, 8000)]}
    assert covered([shut, stay(2, 0, None), other], hours) == {1: [(100, 3700)], 2: [(0, 7200)]}
    assert covered([shut, other], replace(TERM, id=2)) == {}


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 30), st.booleans()), max_size=8),
    st.integers(1, 3),
    st.integers(0, 100),
)
def test_what_is_kept_as_it_was_covered_changes_nothing_for_the_others(
    spans: list[tuple[int, int, bool]], machines: int, limit_s: int
):
    term = replace(TERM, machines=machines, usd_per_hour=Decimal(3600), amount_usd=Decimal(limit_s))
    stays = [stay(number, start, start + length) for number, (start, length, _) in enumerate(spans)]
    before = cover(stays, commitments=(term,), overrides=())
    shut = [
        replace(each, kept=[(1, piece.starts_at, piece.ends_at) for piece in before.get(number, ())])
        if spans[number][2]
        else each
        for number, each in enumerate(stays)
    ]

    after = cover(shut, commitments=(term,), overrides=())

    # What is left over, less than a microsecond for each machine, is another's.
    for number in range(len(spans)):
        then, now = (
            sum((each.ends_at - each.starts_at for each in found.get(number, ())), timedelta(0))
            for found in (before, after)
        )
        assert abs(now - then) <= timedelta(microseconds=machines)


def test_only_what_it_fits():
    only = replace(TERM, sku="a100:1")

    assert covered([stay(1, 0, 10), stay(2, 0, 10, accelerator="A100:1")], only) == {2: [(0, 10)]}


@given(
    spans=st.lists(st.tuples(st.integers(-DAY, 12 * DAY), st.integers(1, 5 * DAY) | st.none()), max_size=12),
    machines=st.none() | st.integers(1, 3),
    amount=st.integers(0, 5_000),
)
def test_never_more_machines_at_once_or_more_money_than_was_paid_for(
    spans: list[tuple[int, int | None]], machines: int | None, amount: int
):
    term = replace(TERM, machines=machines, amount_usd=Decimal(amount))
    stays = [
        stay(n, start, None if length is None else start + length) for n, (start, length) in enumerate(spans)
    ]

    found = cover(stays, commitments=(term,), overrides=())

    pieces = [each for mine in found.values() for each in mine]
    for each in pieces:
        together = [one for one in pieces if one.starts_at <= each.starts_at < one.ends_at]
        assert machines is None or len(together) <= machines
        assert term.starts_at <= each.starts_at < each.ends_at <= term.ends_at
    used = sum((seconds(each.starts_at, each.ends_at) for each in pieces), Decimal(0)) * term.usd_per_hour
    assert used <= amount * 3600
    asked = [
        (max(one.start, term.starts_at), min(one.end or term.ends_at, term.ends_at))
        for one in stays
        if one.start < term.ends_at and (one.end is None or one.end > term.starts_at)
    ]
    whole = sum((seconds(low, high) for low, high in asked), Decimal(0)) * term.usd_per_hour
    if machines is None and whole <= amount * 3600:
        assert used == whole  # nothing is left uncovered that was paid for
    assert found == cover(reversed(stays), commitments=(term,), overrides=())
