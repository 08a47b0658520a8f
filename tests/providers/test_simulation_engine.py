"""The engine of the simulators on a clock moved by hand: lives, capacity, restarts, and the true bill."""

import asyncio
import contextlib
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from providers.base import Tier
from providers.simulation.clock import MICROS_PER_S
from providers.simulation.engine import Engine
from providers.simulation.meter import bill_usd, billed_s
from providers.simulation.orders import Order, Refusal, Refused
from providers.simulation.scenario import parse
from providers.simulation.state import Journal, Machine, StateError

T0 = 1_800_000_000 * MICROS_PER_S

ONE_KIND: dict[str, Any] = {
    "life": {"boot_s": 10},
    "offers": [
        {
            "accelerator": "H100",
            "counts": [1, 2, 4, 8],
            "usd_per_hour": {"Spot": "1.80", "OnDemand": "3.60"},
            "capacity": {"OnDemand": 8},
        }
    ],
}


class World:
    """One engine on one folder, and a clock that only `pass_s` moves."""

    def __init__(self, folder: Path, **scenario: Any) -> None:
        self.folder = folder
        self.scenario = parse(yaml.safe_dump({**ONE_KIND, **scenario}))
        self.real = T0
        self.journal = Journal(folder)
        self.engine = Engine(self.scenario, self.journal, real=lambda: self.real)

    def pass_s(self, seconds: float) -> int:
        self.real += round(seconds * MICROS_PER_S)
        return self.engine.advance()

    def order(self, **changes: Any) -> Machine:
        fields = {
            "name": "m",
            "region": "",
            "tier": Tier.ON_DEMAND,
            "accelerator": "H100",
            "count": 1,
            "image": "app:1",
        }
        now = self.engine.advance()
        return self.engine.create(Order(**(fields | changes)), now=now).machine

    def bill(self, machine: Machine) -> Decimal | None:
        return bill_usd(machine, billing=self.scenario.billing, now=self.engine.advance())

    def restart(self, **changes: Any) -> None:
        """What SIGKILL leaves: the journal as far as it was committed."""
        asyncio.run(self.journal.commit())
        self.journal.close()
        self.scenario = parse(yaml.safe_dump({**yaml.safe_load(self.scenario.model_dump_json()), **changes}))
        self.journal = Journal(self.folder)
        self.engine = Engine(self.scenario, self.journal, real=lambda: self.real)


@pytest.fixture
def worlds(tmp_path: Path) -> Iterator[Any]:
    made: list[World] = []

    def make(**scenario: Any) -> World:
        made.append(World(tmp_path / f"w{len(made)}", **scenario))
        return made[-1]

    yield make
    for world in made:
        world.journal.close()


def test_the_bill_of_a_scripted_life_is_exact(worlds: Any):
    """Boots for 10 s, runs for 20 s, is terminated 5 s after its exit: 35 s of 2 GPUs at 3.60."""
    world = worlds()
    machine = world.order(count=2, exit_after_s=20.0)

    world.pass_s(35)
    world.engine.terminate(machine.id, now=world.engine.advance())
    world.pass_s(3600)

    assert [state for state, _ in machine.history] == ["queued", "booting", "running", "exited", "gone"]
    assert world.bill(machine) == Decimal("0.07")  # 2 x 3.60 dollars an hour for 35 s


def test_only_the_states_that_bill_are_billed(worlds: Any):
    world = worlds(billing={"states": ["running"]})
    machine = world.order(exit_after_s=20.0)

    world.pass_s(3600)

    assert world.bill(machine) == Decimal("0.02")  # 20 s at 3.60


def test_billed_time_is_rounded_up_and_has_a_minimum(worlds: Any):
    world = worlds(billing={"states": ["running"], "unit_s": 60, "minimum_s": 120})
    short, long = world.order(exit_after_s=1.0), world.order(exit_after_s=130.5)

    world.pass_s(3600)

    billing, now = world.scenario.billing, world.engine.advance()
    assert billed_s(short, billing=billing, now=now) == 120
    assert billed_s(long, billing=billing, now=now) == 180


def test_a_machine_that_never_ran_costs_nothing(worlds: Any):
    world = worlds(billing={"states": ["running"], "minimum_s": 60})
    machine = world.order()

    world.pass_s(5)
    world.engine.terminate(machine.id, now=world.engine.advance())

    assert world.bill(machine) == 0


def test_a_price_change_moves_running_machines_only_where_billing_follows_the_market(worlds: Any):
    fixed, floating = worlds(), worlds(billing={"follow_market": True})
    bills = []
    for world in (fixed, floating):
        machine = world.order()
        world.pass_s(100)
        world.engine.set_price(
            region="", tier=Tier.ON_DEMAND, accelerator="H100", usd_per_hour=Decimal("7.20"), now=world.real
        )
        world.pass_s(50)
        bills.append(world.bill(machine))

    assert bills == [Decimal("0.15"), Decimal("0.20")]


def test_a_price_that_is_not_told_is_never_billed_as_zero(worlds: Any):
    world = worlds(offers=[{"accelerator": "H100", "usd_per_hour": {"OnDemand": None}}])
    machine = world.order()

    world.pass_s(60)

    assert world.bill(machine) is None


def test_a_reclaim_within_the_free_time_is_not_billed(worlds: Any):
    world = worlds(life={"boot_s": 0, "reclaim_after_s": 30}, billing={"reclaim_free_s": 60})
    early = world.order(tier=Tier.SPOT)

    world.pass_s(40)

    assert early.end_reason == "preempted"
    assert world.bill(early) == 0


def test_an_on_demand_machine_is_not_reclaimed(worlds: Any):
    world = worlds(life={"boot_s": 0, "reclaim_after_s": 30})
    machine = world.order()

    world.pass_s(3600)

    assert machine.state == "running"


def test_events_have_the_time_at_which_they_were_due_however_late_the_engine_looks(worlds: Any):
    world = worlds(life={"boot_s": 10, "exited_s": 5})
    machine = world.order(exit_after_s=20.0)

    world.pass_s(86400)

    assert machine.history == [
        ("queued", T0),
        ("booting", T0),
        ("running", T0 + 10 * MICROS_PER_S),
        ("exited", T0 + 30 * MICROS_PER_S),
        ("gone", T0 + 35 * MICROS_PER_S),
    ]


def test_a_machine_of_n_gpus_takes_n_and_gives_them_back_when_it_is_gone(worlds: Any):
    world = worlds(life={"boot_s": 0, "end_s": 10})
    machine = world.order(count=8)
    with pytest.raises(Refused) as caught:
        world.order()

    world.engine.terminate(machine.id, now=world.engine.advance())
    with pytest.raises(Refused):
        world.order()  # it is on its way out, and still holds them
    world.pass_s(10)

    assert caught.value.reason is Refusal.CAPACITY
    assert world.order(count=8).state == "running"


def test_those_who_wait_are_served_in_order_even_if_a_later_one_would_fit(worlds: Any):
    world = worlds(on_no_capacity="queue", life={"boot_s": 0})
    first, big, small = world.order(count=8), world.order(count=8), world.order(count=1)
    assert [first.state, big.state, small.state] == ["running", "queued", "queued"]

    world.engine.terminate(first.id, now=world.engine.advance())
    world.engine.advance()

    assert [big.state, small.state] == ["running", "queued"]


def test_the_quota_counts_the_whole_account(worlds: Any):
    world = worlds(quota_gpus=4)
    world.order(count=4)

    with pytest.raises(Refused) as caught:
        world.order(tier=Tier.SPOT)

    assert caught.value.reason is Refusal.QUOTA


def test_a_token_counts_for_its_time_and_no_longer(worlds: Any):
    world = worlds(idempotent_for_s=60)
    first = world.order(token="t")

    world.pass_s(59)
    within = world.order(token="t")
    world.pass_s(1)
    after = world.order(token="t")

    assert within is first
    assert after is not first


def test_a_restart_goes_on_where_it_was(worlds: Any):
    """What becomes due while the simulator is down happens with its own time; faults and changes stay."""
    world = worlds(idempotent_for_s=3600)
    ended, waiting = world.order(token="a", exit_after_s=20.0), world.order(count=4)
    world.engine.set_capacity(region="", tier=Tier.SPOT, accelerator="H100", units=0, now=world.real)
    world.engine.set_price(
        region="", tier=Tier.ON_DEMAND, accelerator="H100", usd_per_hour=Decimal("9"), now=world.real
    )
    world.engine.set_life({"boot_s": 99})
    world.engine.note_create(name="m", token="a", now=world.real)

    world.real += 3600 * MICROS_PER_S
    world.restart()
    world.engine.advance()

    again = world.engine.machines[ended.id]
    assert [state for state, _ in again.history] == ["queued", "booting", "running", "exited"]
    assert again.history[-1][1] == T0 + 30 * MICROS_PER_S
    assert world.engine.machines[waiting.id].state == "running"
    assert world.engine.creates == [{"name": "m", "token": "a", "at": T0}]
    assert world.engine.life.boot_s == 99
    with pytest.raises(Refused):
        world.order(tier=Tier.SPOT)
    assert world.order(count=1).rates[-1][1] == [("gpu", "1", "9")]
    with pytest.raises(Refused):
        world.order(count=4)  # 1 + 4 + 1 of 8 are taken, as before


def test_a_torn_last_line_is_dropped_and_damage_before_it_is_an_error(worlds: Any):
    world = worlds()
    kept = world.order()
    asyncio.run(world.journal.commit())
    file = world.folder / "journal.jsonl"

    file.write_bytes(file.read_bytes() + b'{"k":"machine","v":{"id":"to')
    world.restart()
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b'"k"', b'"q', 1))

    assert list(world.engine.machines) == [kept.id]
    with pytest.raises(StateError, match="line 1"):
        world.restart()


def test_a_state_is_not_lent_to_two_simulators_or_to_another_account(worlds: Any, tmp_path: Path):
    world = worlds()
    with pytest.raises(StateError, match="in use"):
        Journal(world.folder)

    with pytest.raises(StateError, match="account"):
        world.restart(account="somebody-else")


# Restarts are rare: they count everything anew, and so would hide a wrong count.
_STEPS = st.lists(
    st.one_of(
        *[st.tuples(st.just("order"), st.sampled_from([1, 2, 4, 8]), st.sampled_from(list(Tier)))] * 3,
        *[st.tuples(st.sampled_from(["end", "exit", "pass"]), st.integers(0, 30), st.none())] * 5,
        st.tuples(st.just("restart"), st.none(), st.none()),
    ),
    min_size=5,
    max_size=50,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=_STEPS, queue=st.booleans())
def test_capacity_is_never_exceeded_and_is_what_the_machines_hold(
    tmp_path_factory: pytest.TempPathFactory, steps: Any, queue: bool
):
    world = World(
        tmp_path_factory.mktemp("capacity"),
        on_no_capacity="queue" if queue else "refuse",
        life={"boot_s": 3, "end_s": 5, "queue_s": 1, "exited_s": 20},
    )
    try:
        for what, number, tier in steps:
            machines = list(world.engine.machines.values())
            if what == "order":
                with contextlib.suppress(Refused):
                    world.order(count=number, tier=tier)
            elif what == "pass":
                world.pass_s(number)
            elif what == "restart":
                world.restart()
            elif machines:
                machine = machines[number % len(machines)]
                if what == "end":
                    world.engine.terminate(machine.id, now=world.engine.advance())
                else:
                    world.engine.exit(machine, now=world.engine.advance(), code=0)
            held = {tier.value: 0 for tier in Tier}
            for machine in world.engine.machines.values():
                held[machine.tier] += machine.count if machine.holds_capacity else 0
            for (_, pool_tier, _), limit, used in world.engine.market.capacity():
                assert used == held[pool_tier]
                assert limit is None or used <= limit
    finally:
        world.journal.close()
