"""How clouds bill, by their rules alone: the arithmetic of one run, to the last digit."""

from datetime import timedelta
from decimal import Decimal
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.ledger.rules import (
    AdjustmentKind,
    Confidence,
    Derived,
    Facts,
    Phase,
    derive,
    product,
    seconds,
    total,
)
from providers.base import BillsFrom, BillsUntil, MeterKind
from tests.unit.ledger.makers import T0, a_rate, a_rule, a_run, a_tariff, at

AWS = a_rule(starts=BillsFrom.STARTED, until=BillsUntil.ENDED, step_s=1, minimum_s=60, reclaim_free_s=3600)
LAMBDA = a_rule(starts=BillsFrom.STARTED, step_s=60)


def billed_s(derived: Derived, meter: str = "machine") -> Decimal:
    spans = [seconds(each.start, each.end) for each in derived.segments if each.meter == meter and each.end]
    return total(spans + [each.seconds for each in derived.adjustments if each.meter == meter])


@pytest.mark.parametrize(("ran_s", "paid_s"), [(1, 60), (59, 60), (60, 60), (61, 61)])
def test_cost_17_aws_bills_sixty_seconds_at_least(ran_s: int, paid_s: int):
    derived = derive(a_run(("running", 0), end_s=ran_s), rules=[AWS])

    assert billed_s(derived) == paid_s
    assert derived.dollar_seconds() == Decimal("2.49") * paid_s


def test_cost_17_three_starts_in_a_minute_are_three_minimums():
    runs = [derive(a_run(("running", 20 * n), end_s=20 * n + 5), rules=[AWS]) for n in range(3)]

    assert sum(billed_s(each) for each in runs) == 180
    kinds = [adjustment.kind for each in runs for adjustment in each.adjustments]
    assert kinds == [AdjustmentKind.MINIMUM] * 3


@pytest.mark.parametrize(("ran_s", "paid_s"), [(60.0, 60), (60.1, 120), (0.000001, 60)])
def test_cost_18_lambda_rounds_up_to_the_minute(ran_s: float, paid_s: int):
    derived = derive(a_run(("running", 0), end_s=ran_s), rules=[LAMBDA])

    assert billed_s(derived) == paid_s


@pytest.mark.parametrize(("ran_s", "reason", "paid_s"), [
    (3599, "preempted", 0),
    (3601, "preempted", 3601),
    (600, "terminated", 600),
])  # fmt: skip
def test_cost_19_an_early_reclaim_costs_nothing(ran_s: int, reason: str, paid_s: int):
    facts = a_run(("booting", -30), ("running", 0), ("stopped", ran_s), end_s=ran_s + 5, end_reason=reason)

    derived = derive(facts, rules=[AWS])

    assert billed_s(derived) == paid_s
    assert derived.dollar_seconds() == Decimal("2.49") * paid_s


def test_cost_20_a_stopped_pod_pays_for_its_disk_twice_and_for_its_volume_as_before():
    rates = (
        a_rate("2", kind=MeterKind.GPU),
        a_rate("0.01", kind=MeterKind.DISK, quantity=Decimal(20)),
        a_rate("0.005", kind=MeterKind.DISK, label="network", quantity=Decimal(100)),
    )
    rules = [
        a_rule(until=BillsUntil.ENDED),
        a_rule(kind=MeterKind.DISK, until=BillsUntil.GONE, stopped_times=Decimal(2)),
    ]
    facts = a_run(("running", 0), ("stopped", 3600), end_s=7200, tariffs=(a_tariff(*rates),))

    derived = derive(facts, rules=rules)

    by_meter = {(each.meter, each.phase): each.dollar_seconds for each in derived.segments}
    assert by_meter[("gpu", Phase.RUNNING)] == 2 * 3600
    assert ("gpu", Phase.STOPPED) not in by_meter
    assert by_meter[("disk", Phase.RUNNING)] == Decimal("0.2") * 3600
    assert by_meter[("disk", Phase.STOPPED)] == Decimal("0.4") * 3600


def test_cost_21_a_paused_bid_has_a_gap_in_its_gpu_and_none_in_its_disk():
    rates = (a_rate("1", kind=MeterKind.GPU), a_rate("0.1", kind=MeterKind.DISK))
    rules = [a_rule(until=BillsUntil.ENDED), a_rule(kind=MeterKind.DISK, until=BillsUntil.GONE)]
    facts = a_run(
        ("running", 0),
        ("stopped", 100),
        ("running", 300),
        ("ending", 400),
        end_s=410,
        tariffs=(a_tariff(*rates),),
    )

    derived = derive(facts, rules=rules)

    assert billed_s(derived, "gpu") == 200
    assert billed_s(derived, "disk") == 410
    assert [each.start for each in derived.segments if each.meter == "gpu"] == [at(0), at(300)]


def test_cost_16_a_price_that_changes_in_the_hour_makes_two_segments():
    tariffs = (a_tariff(a_rate("2.49")), a_tariff(a_rate("3.10"), since=at(1234.567891)))

    derived = derive(a_run(("running", 0), end_s=3600, tariffs=tariffs), rules=[a_rule()])

    assert [(each.start, each.end) for each in derived.segments] == [
        (at(0), at(1234.567891)),
        (at(1234.567891), at(3600)),
    ]
    hand = Decimal("2.49") * Decimal("1234.567891") + Decimal("3.10") * Decimal("2365.432109")
    assert derived.dollar_seconds() == hand


def test_cost_13_a_run_without_length_costs_nothing_and_a_microsecond_does():
    assert derive(a_run(("running", 0), end_s=0), rules=[AWS]).segments == ()
    assert billed_s(derive(a_run(("running", 0), end_s=0.000001), rules=[a_rule()])) == Decimal("0.000001")


def test_an_unpriced_second_is_recorded_and_has_no_dollars():
    facts = a_run(("running", 0), end_s=90, tariffs=(a_tariff(a_rate(None, why="not told")),))

    derived = derive(facts, rules=[a_rule(step_s=60)])

    (segment,) = derived.segments
    assert (segment.dollar_seconds, segment.confidence) == (None, Confidence.UNPRICED)
    assert [(each.seconds, each.dollar_seconds) for each in derived.adjustments] == [(30, None)]


def test_nothing_is_rounded_while_a_run_goes_on():
    derived = derive(a_run(("running", 0)), rules=[AWS])

    assert [each.end for each in derived.segments] == [None]
    assert derived.adjustments == ()


def test_a_machine_that_never_ran_costs_only_where_the_order_bills():
    facts = a_run(("booting", 0), ("ending", 40), end_s=45)

    assert derive(facts, rules=[AWS]).segments == ()
    assert billed_s(derive(facts, rules=[a_rule()])) == 40


# --- properties ----------------------------------------------------------------------------------

MONEY = st.decimals(min_value=0, max_value=500, places=6)
PHASES = st.lists(st.sampled_from(["running", "stopped"]), min_size=1, max_size=6)


@st.composite
def runs(draw: st.DrawFn) -> Facts:
    """Any run: phases in any order, prices that change anywhere, open or over."""
    names = ["booting", *draw(PHASES), "ending"]
    steps = draw(st.lists(st.integers(0, 10**11), min_size=len(names), max_size=len(names)))  # microseconds
    moments, now_us = [], 0
    for name, step in zip(names, steps, strict=True):
        moments.append((name, now_us / 1e6))
        now_us += step
    tariffs = [a_tariff(a_rate(str(draw(MONEY)), quantity=draw(MONEY)))]
    changes = sorted(draw(st.lists(st.integers(0, max(now_us, 1)), max_size=4)))
    tariffs += [
        a_tariff(a_rate(str(draw(MONEY)), quantity=draw(MONEY)), since=T0 + timedelta(microseconds=change))
        for change in changes
    ]
    over = draw(st.booleans())
    return a_run(*moments, end_s=now_us / 1e6 if over else None, tariffs=tuple(tariffs))


RULES = st.builds(
    a_rule,
    starts=st.sampled_from(BillsFrom),
    until=st.sampled_from(BillsUntil),
    step_s=st.sampled_from([0, 1, 60]),
    minimum_s=st.sampled_from([0, 60]),
)


@given(facts=runs(), rule=RULES)
@settings(max_examples=150, deadline=None)
def test_segments_of_a_meter_never_overlap_and_rise(facts: Facts, rule):
    derived = derive(facts, rules=[rule])

    for one, later in pairwise(derived.segments):
        assert one.end is not None
        assert one.start < one.end <= later.start


@given(facts=runs(), rule=RULES, cuts=st.lists(st.integers(0, 10**12), max_size=8))
@settings(max_examples=150, deadline=None)
def test_cost_03_cutting_segments_anywhere_changes_no_sum(facts: Facts, rule, cuts: list[int]):
    derived = derive(facts, rules=[rule])
    edges = [T0 + timedelta(microseconds=cut) for cut in cuts]

    pieces = []
    for each in derived.segments:
        if each.end is None or each.usd is None:
            continue
        inner = sorted({each.start, each.end, *(edge for edge in edges if each.start < edge < each.end)})
        pieces += [product(each.quantity, each.usd, seconds(low, high)) for low, high in pairwise(inner)]

    assert total(pieces) == total([each.dollar_seconds for each in derived.segments])


@given(facts=runs(), rule=RULES)
@settings(max_examples=150, deadline=None)
def test_cost_07_phases_and_adjustments_are_the_whole_of_a_runs_cost(facts: Facts, rule):
    derived = derive(facts, rules=[rule])

    by_phase = {
        phase: total([each.dollar_seconds for each in derived.segments if each.phase is phase])
        for phase in Phase
    }
    extra = total([each.dollar_seconds for each in derived.adjustments])
    assert total([*by_phase.values(), extra]) == derived.dollar_seconds()


@given(facts=runs(), rule=RULES)
@settings(max_examples=100, deadline=None)
def test_the_billed_time_is_a_whole_number_of_steps_and_at_least_the_minimum(facts: Facts, rule):
    derived = derive(facts, rules=[rule])
    if facts.end is None or not derived.segments:
        return

    paid_s = billed_s(derived)

    assert paid_s >= rule.minimum_s
    if rule.step_s and paid_s != rule.minimum_s:
        assert paid_s % rule.step_s == 0
