"""What people say about money: contract prices, prepayments, credits; each counts once."""

import asyncio
from decimal import Decimal
from typing import Any

import pytest
from click.testing import CliRunner, Result
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from app.cli import main
from app.store import ledger_periods, views
from app.store.engine import begin
from tests.store.ledger.world import Books, at, gpu


@pytest.fixture
def nebula(database_url: str) -> Any:
    async def call(*args: str) -> Result:
        runner = CliRunner()
        return await asyncio.to_thread(
            lambda: runner.invoke(main, [*args], env={"NEBULA_DATABASE_URL": database_url})
        )

    return call


async def sums(books: Books) -> tuple[Decimal, Decimal]:
    """Dollars billed and effective, of all time."""
    (row,) = await books.sql(
        "select coalesce(sum(billed_dollar_seconds), 0) / 3600 as billed,"
        " coalesce(sum(effective_dollar_seconds), 0) / 3600 as effective"
        " from charge_between('2020-01-01', '2100-01-01')"
    )
    return row["billed"], row["effective"]


async def test_cost_22_a_prepayment_is_billed_once_and_spread_over_what_it_covers(books: Books, nebula: Any):
    term = ("--from", "2026-03-01T12:00", "--to", "2026-03-01T22:00")
    said = await nebula(
        "cost", "commitment", "add", "--provider", "modal", "--amount", "100", "--usd-per-hour", "10", *term
    )
    assert said.exit_code == 0, said.output
    run = await books.run(meters=[gpu("2.49")])
    await books.over(run, after_s=4 * 3600)
    await books.tick()

    billed, effective = await sums(books)

    assert (billed, effective) == (100, 100)
    rows = await books.sql(
        "select kind, effective_dollar_seconds / 3600 as usd from charge_between('2020-01-01', '2100-01-01')"
        " where kind in ('usage', 'unused') order by 1"
    )
    assert [(row["kind"], row["usd"]) for row in rows] == [("unused", 60), ("usage", 40)]
    (segment,) = await books.segments(run)
    assert (segment["price_source"], segment["list_usd"]) == ("commitment", Decimal("19.92"))


async def test_cost_22_a_prepayment_covers_its_machines_and_its_amount_and_no_more(books: Books, nebula: Any):
    """Two machines beside one that was paid for, for two hours of its ten: the rest is billed."""
    term = ("--from", "2026-03-01T12:00", "--to", "2026-03-01T22:00", "--machines", "1")
    said = await nebula(
        "cost", "commitment", "add", "--provider", "modal", "--amount", "20", "--usd-per-hour", "10", *term
    )
    assert said.exit_code == 0, said.output
    first, second = await books.run(meters=[gpu("1", 1)]), await books.run(meters=[gpu("1", 1)])
    await books.over(second, after_s=3 * 3600)
    await books.tick()
    assert [row["price_source"] for row in await books.segments(first)] == ["commitment", "quoted"]
    assert [row["price_source"] for row in await books.segments(second)] == ["quoted"]

    await books.over(
        first, after_s=3600
    )  # it ends early: the other one was covered for an hour, it turns out
    await books.tick()

    assert {row["price_source"] for row in await books.segments(first)} == {"commitment"}
    assert await sums(books) == (20 + 2, 20 + 2)
    shown = (await nebula("cost", "commitment")).output
    assert [word for word in shown.splitlines()[1].split() if word.startswith("20")][:1] == ["20"]
    assert await books.tick() == 0
    assert (await nebula("cost", "verify")).exit_code == 0


async def test_a_prepayment_noted_after_its_month_was_closed_is_billed_in_an_open_one(
    books: Books, nebula: Any
):
    run = await books.run(meters=[gpu("5", 1)])
    await books.tick()
    async with begin(books.engine) as conn:
        for month in await ledger_periods.due_months(conn, after_s=0):
            await ledger_periods.close_month(conn, month, epoch=books.epoch)
    march = await books.cost(at(-86400), at(86400))
    add = ("cost", "commitment", "add", "--provider", "modal", "--amount", "10000", "--usd-per-hour", "10")

    late = await nebula(*add, "--from", "2026-03-01", "--to", "2026-04-01")
    said = await nebula(*add, "--from", "2026-03-01", "--to", "2026-12-31")
    await books.tick()

    assert late.exit_code == 2
    assert "every month is closed" in late.output
    assert said.exit_code == 0, said.output
    assert await books.cost(at(-86400), at(86400)) == march
    await books.over(run, after_s=86400)
    await books.tick()
    assert await books.cost(at(-86400), at(86400)) == march
    billed, _ = await sums(books)
    assert billed == 10_000  # the machine's day was taken from it, and off what was billed
    assert (await nebula("cost", "verify")).exit_code == 0


@pytest.mark.parametrize("term", [["--from", "2026-03-02", "--to", "2026-03-01"], ["--to", "2026-03-01"]])
async def test_a_contract_price_must_end_after_it_begins(books: Books, nebula: Any, term: list[str]):
    await books.run()
    await books.tick()

    result = await nebula("cost", "override", "set", "--provider", "modal", "--usd-per-hour", "1", *term)

    assert result.exit_code == 2
    assert "--to must be after --from" in result.output


@pytest.mark.parametrize(("args", "said"), [
    (["cost", "override", "set", "--provider", "modl", "--usd-per-hour", "1"],
     "--provider: nothing was ever seen of a provider 'modl'; did you mean modal?"),
    (["cost", "override", "set", "--provider", "modal", "--account", "defualt", "--usd-per-hour", "1"],
     "did you mean default?"),
    (["cost", "override", "set", "--provider", "modal", "--sku", "H100:88", "--usd-per-hour", "1"],
     "--sku: nothing was ever seen of a shape 'H100:88'; did you mean H100:8?"),
    (["cost", "commitment", "add", "--provider", "mod", "--amount", "1", "--usd-per-hour", "1",
      "--from", "2026-03-01", "--to", "2026-04-01"], "a provider 'mod'; did you mean modal?"),
    (["cost", "adjust", "credit", "--provider", "nowhere", "--amount", "-1", "--key", "k"],
     "a provider 'nowhere'; there are: modal"),
    (["budget", "set", "b", "--amount", "1", "--namespace", "team-b"], "did you mean team-a?"),
    (["budget", "set", "b", "--amount", "1", "--team", "visoin"], "did you mean vision?"),
    (["budget", "set", "b", "--amount", "1", "--pool", "gpus"], "a NodePool 'gpus'; did you mean gpu?"),
    (["budget", "set", "b", "--amount", "1", "--label", "team=vison"],
     "a label 'team=vison'; did you mean team=vision?"),
])  # fmt: skip
async def test_a_misspelt_scope_is_told_with_the_nearest_name(
    books: Books, nebula: Any, args: list[str], said: str
):
    await books.run()
    await books.tick()

    result = await nebula(*args)

    assert result.exit_code == 2
    assert said in " ".join(result.output.split())
    assert (await nebula(*args, "--new")).exit_code == 0


async def test_a_budget_by_labels_is_set_and_shown_with_what_its_machines_spend(books: Books, nebula: Any):
    await books.run(labels={"team": "vision", "app": "train"})
    await books.run(labels={"team": "vision"})
    await books.tick()
    begun = ("budget", "set", "train", "--amount", "100", "--period", "total", "--label", "app=train")

    said = await nebula(*begun, "--label", "team=vision")
    twice = await nebula(*begun, "--label", "app=serve", "--new")
    wrong = await nebula("budget", "set", "b", "--amount", "1", "--label", "app train", "--new")
    shown = await nebula("budget")

    assert said.exit_code == 0, said.output
    assert "app=train team=vision" in shown.output
    assert "19.92" in shown.output  # the one machine that has both, an hour
    assert "39.84" not in shown.output
    assert (twice.exit_code, wrong.exit_code) == (2, 2)
    assert "--label: no Pod has app twice" in twice.output
    assert "--label: 'app train' is no label of a Pod, such as app=train" in wrong.output


async def test_a_contract_price_is_set_shown_and_ended(books: Books, nebula: Any):
    first = await nebula(
        "cost", "override", "set", "--provider", "modal", "--usd-per-hour", "0", "--from", "2026-03-01"
    )
    assert first.exit_code == 0, first.output
    run = await books.run()
    await books.over(run, after_s=3600)
    await books.tick()
    assert await books.cost() == 0
    (segment,) = await books.segments(run)
    assert (segment["usd"], segment["price_source"]) == (0, "override")

    second = await nebula(
        "cost", "override", "set", "--provider", "modal", "--usd-per-hour", "5", "--from", "2026-03-01T12:30"
    )
    assert second.exit_code == 0, second.output
    await books.tick()

    assert await books.cost() == Decimal(5) * 1800  # closed by then: an adjustment
    assert (await nebula("cost", "override")).output.count("modal") == 2
    assert (await nebula("cost", "override", "end", "2")).exit_code == 0
    assert "no override 2 that still holds" in (await nebula("cost", "override", "end", "2")).output


async def test_cost_28_a_refund_of_a_closed_month_is_a_correction_in_the_open_one(books: Books, nebula: Any):
    run = await books.run(meters=[gpu("1")])
    await books.over(run, after_s=3600)
    await books.tick()
    async with begin(books.engine) as conn:
        for month in await ledger_periods.due_months(conn, after_s=0):
            await ledger_periods.close_month(conn, month, epoch=books.epoch)
    march = await books.cost(at(-3600), at(86400))
    refund = ("cost", "adjust", "refund", "--provider", "modal", "--amount", "-2.50", "--key", "inv-7/1")

    said = [(await nebula(*refund, "--at", "2026-03-01T13:00")).output for _ in range(2)]

    assert [line.strip() for line in said] == ["written", "it was written before: nothing changes"]
    assert await books.cost(at(-3600), at(86400)) == march
    (row,) = await books.sql(
        'select "ChargeClass", "ChargeCategory", "BilledCost" from focus_1_2 where "ChargeClass" is not null'
    )
    assert (row["ChargeClass"], row["ChargeCategory"], row["BilledCost"]) == (
        "Correction",
        "Credit",
        Decimal("-2.5"),
    )


async def test_a_credit_refund_or_tax_of_an_account_is_no_waste(books: Books, nebula: Any):
    run = await books.run(meters=[gpu("1")], pod_namespace="", pod_name="")
    await books.over(run, after_s=3600)
    await books.tick()
    for kind, amount in (("credit", "-3"), ("refund", "-2"), ("tax", "1")):
        written = await nebula(
            "cost", "adjust", kind, "--provider", "modal", "--amount", amount, "--key", kind
        )
        assert written.exit_code == 0, written.output

    assert {(row["reason"], row["cost"] > 0) for row in await books.sql("select * from waste")} == {
        ("orphan", True)
    }
    (rest,) = await books.sql("select count(*) as n, sum(effective_once) / 3600 as usd from charge_use"
        " where run_id is null and reason = 'useful'")  # fmt: skip
    assert (rest["n"], rest["usd"]) == (3, Decimal(-4))


@pytest.mark.parametrize(("args", "said"), [
    (["override", "set", "--provider", "m", "--usd-per-hour", "-1"], "is no amount of dollars"),
    (["override", "set", "--provider", "m", "--usd-per-hour", "1,5"], "is no amount of dollars"),
    (["override", "set", "--provider", "m", "--usd-per-hour", "1", "--from", "soon"], "'soon' is no time"),
    (["commitment", "add", "--provider", "m", "--amount", "1", "--usd-per-hour", "1", "--from", "2026-03-01",
      "--to", "2026-03-01"], "--to must be after --from"),
])  # fmt: skip
async def test_nonsense_is_one_clear_error(nebula: Any, args: list[str], said: str):
    result = await nebula("cost", *args)

    assert result.exit_code == 2
    assert said in result.output


async def test_a_reader_sees_the_reports_and_nothing_else(books: Books, nebula: Any):
    run = await books.run()
    await books.over(run, after_s=3600)
    await books.tick()
    await books.sql("do $$ begin create role reports; exception when duplicate_object then null; end $$")
    assert "there is no role 'nobody'" in (await nebula("cost", "reader", "nobody")).output

    assert (await nebula("cost", "reader", "reports")).exit_code == 0
    async with books.engine.begin() as conn:
        await conn.run_sync(views.install)  # a newer version's views are still his to read

    for query in (
        "select * from cost_by_namespace",
        "select * from budget_status",
        "select * from cost_lines('2026-03-01', '2026-04-01', 'day', 'UTC')"
        " join attribution using (label_set_id)",
        "select * from charge_daily('Europe/Berlin')",
    ):
        async with books.engine.begin() as conn:
            await conn.execute(text("set local role reports"))
            await conn.execute(text(query))
    for table in ("run", "billing_segment", "label_set", "installation"):
        async with books.engine.connect() as conn:
            await conn.execute(text("set local role reports"))
            with pytest.raises(DBAPIError, match="permission denied"):
                await conn.execute(text(f"select * from {table}"))


async def test_every_view_says_what_a_row_is(books: Books):
    rows = await books.sql(
        "select relname from pg_class where relkind = 'v' and relnamespace = 'public'::regnamespace"
        " and obj_description(oid, 'pg_class') is null"
    )

    assert rows == []
    assert set(views.names()) == {
        row["relname"]
        for row in await books.sql(
            "select relname from pg_class where relkind = 'v' and relnamespace = 'public'::regnamespace"
        )
    }
