"""Budgets count what is spent, what runs and what is promised; counters never fall; the gauge is the view."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.registry import CollectorRegistry

from app.ledger.metrics import Shown, Snapshot
from app.ledger.writer import Writer
from app.store import balances, bills, budgets, ledger_metrics, ledger_rules, ledger_upkeep, reservations
from app.store.budgets import Budget, Standing
from app.store.engine import begin
from app.store.installation import next_epoch
from app.store.ledger_upkeep import Listed
from app.store.reservations import Reservation
from tests.store.ledger.world import RULE, Books, gpu


def now() -> datetime:
    return datetime.now(UTC)


async def lately(books: Books, *, seconds: float, usd: str = "3600", **columns: Any) -> int:
    """A run that began so long ago, at so many dollars an hour (3600: a dollar a second)."""
    (row,) = await books.sql("select now() - make_interval(secs => cast(:s as float8)) as at", s=seconds)
    times = dict.fromkeys(("requested_at", "accepted_at", "first_seen_at", "provider_created_at"), row["at"])
    return await books.run(meters=[gpu(usd, 1)], **(times | columns))


async def standing(books: Books, *pools: str) -> list[Standing]:
    async with begin(books.engine) as conn:
        return await budgets.standing(conn, pools or ("gpu",))


async def put(books: Books, **values: Any) -> None:
    async with begin(books.engine) as conn:
        each = {"name": "b", "amount_usd": Decimal(100), "period": "total", "action": "RefuseNew"} | values
        await budgets.put(conn, [Budget(**each)])


async def test_a_budget_counts_spent_and_running_and_promised(books: Books):
    await put(books, period="month")
    run = await lately(books, seconds=40)
    await books.change(run, terminate_asked_at=now(), gone_at=now())
    await books.tick()
    async with begin(books.engine) as conn:
        for number, price in enumerate((Decimal(10), Decimal(5))):
            row = Reservation(
                pod_uid=f"p-{number}",
                claim_name=f"c-{number}",
                pool="gpu",
                provider="modal",
                account="default",
                gpus=1,
                usd_per_hour=price,
                namespace="team-a",
            )
            await reservations.put(conn, [row])

    (found,) = await standing(books)

    assert 39 < found.spent_usd < 42
    assert found.usd_per_hour == 15
    assert found.left_usd() == 100 - found.spent_usd - 15


@pytest.mark.parametrize(("scope", "counts"), [
    ({"namespace": "team-a"}, True),
    ({"namespace": "team-b"}, False),
    ({"team": "vision"}, True),
    ({"team": "speech"}, False),
    ({"pool": "gpu"}, True),
    ({}, True),
])  # fmt: skip
async def test_a_budget_counts_only_its_scope(books: Books, scope: dict[str, str], counts: bool):
    await put(books, period="month", **scope)
    await lately(books, seconds=40)
    await books.tick()

    (found,) = await standing(books)

    assert (found.spent_usd > 0) is counts
    assert found.concerns(namespace="team-a", team="vision", pool="gpu", labels={"team": "vision"}) is counts


async def test_a_budget_that_only_tells_refuses_nothing(books: Books):
    await put(books, action="Alert")

    assert await standing(books) == []


async def test_a_version_that_knows_no_labels_takes_a_budget_with_some_for_one_that_only_tells(books: Books):
    """It would count and end all machines otherwise, after a rollback. For us it does what it was set to."""
    await put(books, name="all")
    await put(books, name="some", labels={"app": "train"}, action="Drain")

    before = "select name from budget where action <> 'Alert'"
    assert [row["name"] for row in await books.sql(before)] == ["all"]
    before = "select name, action, label_action from budget_status order by name"
    assert [tuple(row.values()) for row in await books.sql(before)] == [
        ("all", "RefuseNew", None),
        ("some", "Alert", "Drain"),
    ]
    assert [(each.name, each.action) for each in await standing(books)] == [
        ("all", "RefuseNew"),
        ("some", "Drain"),
    ]
    async with begin(books.engine) as conn:
        assert {each.name: each.action for each in await budgets.status(conn)}["some"] == "Drain"
    await put(books, name="some", action="Drain")  # without labels, for everything
    assert {row["action"] for row in await books.sql("select action from budget")} == {"RefuseNew", "Drain"}


async def test_a_threshold_is_told_of_once_a_period_and_by_the_leader_alone(books: Books):
    await put(books, amount_usd=Decimal(40), period="month", thresholds=(50, 80, 100))
    await lately(books, seconds=36)
    await books.tick()

    async with begin(books.engine) as conn:
        (each,) = await budgets.status(conn)
        passed = budgets.passed(each)
        first = [await budgets.tell(conn, each, limit, epoch=books.epoch) for limit in passed]
        again = [await budgets.tell(conn, each, limit, epoch=books.epoch) for limit in passed]
        other = await budgets.tell(conn, each, 99, epoch=books.epoch - 1)

    assert (list(passed), first, again, other) == ([50, 80], [True, True], [False, False], False)
    assert each.exhausted_at is not None


async def test_a_pools_budget_goes_with_the_pools_own(books: Books):
    await put(books, name="nodepool/gpu", pool="gpu")
    await put(books, name="mine")

    async with begin(books.engine) as conn:
        await budgets.keep_pools(conn, [], epoch=books.epoch)

    assert [each.name for each in await standing(books)] == ["mine"]


async def shown(books: Books) -> dict[str, list[dict[str, Any]]]:
    async with begin(books.engine) as conn:
        return await ledger_metrics.read(conn, epoch=books.epoch)


async def test_cost_30_the_gauge_is_the_view_and_the_counter_never_falls(books: Books):
    run = await lately(books, seconds=100)
    await books.tick()
    first = await shown(books)
    (view,) = await books.sql("select sum(usd_per_hour) as usd from burn_rate")
    assert sum(row["usd_per_hour"] for row in first["burn"]) == view["usd"] == 3600

    # It turns out to have ended half a minute ago: what was shown is too much, and stays.
    ended = (await books.sql("select now() - interval '30 seconds' as at"))[0]["at"]
    await books.change(run, terminate_asked_at=ended, gone_at=now())
    await books.tick()
    second = await shown(books)

    assert second["burn"] == []
    assert second["cost"][0]["cost"] == first["cost"][0]["cost"] > 99
    await lately(books, seconds=90)
    await books.tick()
    assert (await shown(books))["cost"][0]["cost"] > first["cost"][0]["cost"]


async def test_cost_30_no_counter_falls_under_a_new_leader_and_the_one_before_adds_nothing(books: Books):
    ended = await lately(books, seconds=100)
    await books.change(ended, terminate_asked_at=now(), gone_at=now(), end_reason="failed")
    await lately(books, seconds=50)
    await books.tick()
    counters = ("cost", "waste", "gpu_seconds", "credit")
    first = await shown(books)

    before = books.epoch
    async with begin(books.engine) as conn:
        books.epoch = await next_epoch(conn, before)
    books.writer = Writer(engine=books.engine)  # a process of its own, which has seen nothing
    second = await shown(books)
    await books.tick()
    third = await shown(books)
    books.epoch, newest = before, books.epoch
    await lately(books, seconds=1000)
    await books.tick()
    stale = await shown(books)

    def value(found: dict[str, list[dict[str, Any]]], name: str) -> Decimal:
        return sum((row["cost" if name == "cost" else "value"] for row in found[name]), Decimal(0))

    for name in counters:
        assert value(first, name) <= value(second, name) <= value(third, name) == value(stale, name), name
    books.epoch = newest
    await books.tick()
    assert value(await shown(books), "cost") > value(third, "cost") + 900


async def test_waste_is_counted_once_a_machine_by_its_final_reason_and_survives_every_restart(books: Books):
    dead = await lately(books, seconds=100)
    await books.tick()
    assert (await shown(books))["waste"] == []  # it boots: what that was good for is not known yet
    await books.change(dead, terminate_asked_at=now(), gone_at=now(), end_reason="failed")
    await books.tick()
    first = (await shown(books))["waste"]
    (view,) = await books.sql("select reason, sum(cost) as cost from waste group by 1")

    assert [(row["reason"], row["provider"]) for row in first] == [("failed_provision", "modal")]
    assert abs(first[0]["value"] - view["cost"]) < Decimal("1e-9")
    assert (await shown(books))["waste"] == first
    await lately(books, seconds=50)
    await books.tick()
    assert (await shown(books))["waste"] == first


async def test_gpu_seconds_have_the_phase_in_which_they_were_paid_for(books: Books):
    run = await lately(books, seconds=100)
    begun = (await books.sql("select accepted_at from run where id = :id", id=run))[0]["accepted_at"]
    await books.change(run, running_at=begun + timedelta(seconds=40))
    await books.tick()

    found = {row["phase"]: row["value"] for row in (await shown(books))["gpu_seconds"]}

    assert found["booting"] == 40 * 8
    assert found["running"] >= 60 * 8


async def test_a_balance_lasts_as_long_as_what_runs_leaves_of_it(books: Books):
    async with begin(books.engine) as conn:
        for epoch, usd in ((books.epoch, 7200), (books.epoch - 1, 1)):  # the last word of a former leader
            await balances.put(
                conn, provider="modal", account="default", usd=Decimal(usd), usd_per_hour=None, epoch=epoch
            )
    assert [(row["usd"], row["runway_s"]) for row in (await shown(books))["balance"]] == [(7200, None)]

    await lately(books, seconds=10)  # 3,600 dollars an hour
    await books.tick()

    assert [row["runway_s"] for row in (await shown(books))["balance"]] == [7200]


async def test_the_age_of_a_reconciliation_is_since_the_bill_was_fetched(books: Books):
    async with begin(books.engine) as conn:
        await ledger_rules.put_rules(
            conn, provider="modal", account="default", rules=(RULE,), bills=True, epoch=books.epoch
        )
    assert [row["age_s"] for row in (await shown(books))["reconciliation"]] == [None]

    async with begin(books.engine) as conn:
        await bills.fetched(conn, provider="modal", account="default", epoch=books.epoch)

    (row,) = (await shown(books))["reconciliation"]
    assert 0 <= row["age_s"] < 60


async def test_a_former_leader_writes_no_price_rule_budget_or_bill(books: Books):
    former = books.epoch - 1
    line = bills.Line(
        resource_id="m", meter="", starts_at=now(), ends_at=now(), usd=Decimal(1), identity=None,
        claim_uid=None, final=True,
    )  # fmt: skip
    price = Listed(
        sku="s", region="", tier="Spot", meter="gpu", unit="unit-hour", quantity=Decimal(1), usd=Decimal(1)
    )
    where = {"provider": "other", "account": "default", "epoch": former}
    async with begin(books.engine) as conn:
        await ledger_rules.put_rules(conn, rules=(), bills=True, **where)
        await bills.put(conn, [line], **where)
        await ledger_upkeep.list_prices(conn, rows=[price], **where)
        await budgets.put(
            conn, [Budget(name="nodepool/a", amount_usd=Decimal(1), period="day")], epoch=former
        )
        await ledger_upkeep.seal_day(conn, now().date(), epoch=former)

    for table in (
        "billing_rule where provider = 'other'",
        "provider_bill_line",
        "price_point",
        "budget",
        "cost_day",
    ):
        assert await books.sql(f"select 1 from {table}") == [], table


async def test_the_series_have_no_pod_in_them(books: Books):
    await lately(books, seconds=10)
    await put(books)
    await books.tick()
    registry = CollectorRegistry()
    registry.register(Shown(snapshot=Snapshot(**await shown(books))))

    text = generate_latest(registry).decode()

    assert (
        'nebula_burn_rate_usd_per_hour{accelerator="H100",capacity_type="OnDemand",namespace="team-a"' in text
    )
    assert "nebula_cost_usd_total{" in text
    assert 'nebula_budget_used_ratio{budget="b"}' in text
    assert "train-" not in text
