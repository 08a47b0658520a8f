"""The ledger's arithmetic beside the simulators' own meter: equal to the last digit, whatever happens."""

from datetime import datetime
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.ledger.rules import Facts, Moment, Phase, Source, Tariff, derive, dollars, product, total
from providers.base import BillsFrom, BillsUntil, MeterKind, Tier
from providers.simulation.clock import as_text
from providers.simulation.engine import Engine
from providers.simulation.meter import bill_usd
from providers.simulation.orders import Order
from providers.simulation.scenario import Scenario
from providers.simulation.state import Journal, Machine
from tests.unit.ledger.makers import a_rate, a_rule

# The states that bill, and the rule that says the same.
STATES = {
    ("running",): (BillsFrom.STARTED, BillsUntil.ENDED),
    ("booting", "running"): (BillsFrom.ACCEPTED, BillsUntil.ENDED),
    ("booting", "running", "exited"): (BillsFrom.ACCEPTED, BillsUntil.TERMINATE_ASKED),
    ("booting", "running", "exited", "ending"): (BillsFrom.ACCEPTED, BillsUntil.GONE),
}
PHASES = {"booting": Phase.BOOTING, "running": Phase.RUNNING, "exited": Phase.STOPPED, "ending": Phase.ENDING}


def facts_of(machine: Machine) -> Facts:
    """What a cloud that tells everything exactly would tell of this machine."""
    timeline = tuple(
        Moment(phase=PHASES[state], at=_time(since)) for state, since in machine.history if state in PHASES
    )
    tariffs = tuple(
        Tariff(
            rates=tuple(
                a_rate(usd, kind=MeterKind(kind), quantity=Decimal(quantity))
                for kind, quantity, usd in meters
            ),
            source=Source.QUOTED,
            since=_time(since),
        )
        for since, meters in machine.rates
    )
    gone = machine.since("gone")
    return Facts(
        timeline=timeline,
        tariffs=tariffs,
        end=None if gone is None else _time(gone),
        end_reason=machine.end_reason,
    )


def _time(micros: int) -> datetime:
    text = as_text(micros)
    assert text is not None
    return datetime.fromisoformat(text)


STEPS = st.lists(
    st.tuples(
        st.integers(1, 4 * 3600 * 10**6),  # microseconds until it
        st.sampled_from(["price", "exit", "preempt", "restart", "terminate"]),
        st.decimals(min_value=0, max_value=40, places=5),
    ),
    max_size=7,
)


@given(
    steps=STEPS,
    states=st.sampled_from(sorted(STATES)),
    boot_us=st.integers(0, 10**9),
    end_us=st.integers(0, 10**8),
    unit_s=st.sampled_from([0, 1, 60, 3600]),
    minimum_s=st.sampled_from([0, 60, 600]),
    free_s=st.sampled_from([0, 3600]),
)
@example(  # started again, and reclaimed an hour after it first ran: nothing is waived
    steps=[(1, "exit", Decimal(0)), (1, "restart", Decimal(0)), (3_599_999_998, "preempt", Decimal(0))],
    states=("booting", "running"),
    boot_us=0,
    end_us=0,
    unit_s=0,
    minimum_s=0,
    free_s=3600,
)
@settings(max_examples=120, deadline=None)
def test_the_ledger_equals_the_meter_of_the_cloud(
    steps: list[Any], states: Any, boot_us: int, end_us: int, unit_s: int, minimum_s: int, free_s: int
):
    billing = {
        "states": states,
        "unit_s": unit_s,
        "minimum_s": minimum_s,
        "reclaim_free_s": free_s,
        "follow_market": True,
    }
    scenario = Scenario.model_validate(
        {
            "billing": billing,
            "life": {"boot_s": boot_us / 1e6, "end_s": end_us / 1e6},
            "offers": [{"accelerator": "H100", "counts": [8], "usd_per_hour": {"Spot": "2.4901"}}],
        }
    )
    clock = [1_790_000_000_000_000]
    with TemporaryDirectory() as folder:
        engine = Engine(scenario, Journal(Path(folder)), real=lambda: clock[0])
        engine.journal.restart([])
        order = Order(name="m", region="", tier=Tier.SPOT, accelerator="H100", count=8, token=None, image="i")
        machine = engine.create(order, now=engine.advance()).machine
        for wait_us, what, price in steps:
            clock[0] += wait_us
            now = engine.advance()
            match what:
                case "price":
                    engine.set_price(
                        region="", tier=Tier.SPOT, accelerator="H100", usd_per_hour=price, now=now
                    )
                case "exit":
                    engine.exit(machine, now=now, code=0)
                case "preempt":
                    engine.preempt(machine, now=now)
                case "restart":
                    engine.restart(machine.id, now=now)
                case "terminate":
                    engine.terminate(machine.id, now=now)
        clock[0] += 10**6
        engine.terminate(machine.id, now=engine.advance())
        clock[0] += end_us + 10**6
        now = engine.advance()
        engine.journal.close()

        assert machine.state == "gone"
        starts, until = STATES[states]
        rule = a_rule(starts=starts, until=until, step_s=unit_s, minimum_s=minimum_s, reclaim_free_s=free_s)
        derived = derive(facts_of(machine), rules=[rule])
        assert dollars(derived.dollar_seconds()) == bill_usd(machine, billing=scenario.billing, now=now)


def test_an_hour_of_one_second_slices_has_no_residue():
    price = Decimal("2.49")

    slices = [product(price, Decimal(1)) for _ in range(3600)]

    assert dollars(total(slices)) == price
