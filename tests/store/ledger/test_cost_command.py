"""``nebula cost`` and its kin: what they print is the ledger, and bad input is one clear error."""

import asyncio
import csv
import io
import json
import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from app.cli import main
from app.cli.questions import QUESTIONS
from app.ledger.rounding import rounded, shares
from app.ledger.rules import total
from tests.store.ledger.world import Books, at, gpu


@pytest.fixture
def nebula(database_url: str) -> Any:
    async def call(*args: str, prog_name: str = "nebula") -> Result:
        runner = CliRunner()
        return await asyncio.to_thread(
            lambda: runner.invoke(
                main, [*args], env={"NEBULA_DATABASE_URL": database_url}, prog_name=prog_name
            )
        )

    return call


async def a_month(books: Books) -> None:
    """Three namespaces in March: $1.245, $2.49, and seconds without a price."""
    for index, (namespace, seconds) in enumerate((("a", 1800), ("b", 3600))):
        run = await books.run(meters=[gpu("2.49", 1)], pod_namespace=namespace, pod_name=f"p-{index}")
        await books.change(run, provider_started_at=at(60), running_at=at(60))
        await books.over(run, after_s=seconds)
    run = await books.run(meters=[gpu(None, 1)], pod_namespace="c", tier="Spot")
    await books.over(run, after_s=600)
    await books.tick()


MARCH = ("--from", "2026-03", "--to", "2026-04")


async def test_a_report_ends_with_all_that_must_be_known_of_it(books: Books, nebula: Any):
    await a_month(books)

    result = await nebula("cost", *MARCH)

    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].split() == ["NAMESPACE", "GPU-HOURS", "LIST", "$", "EFFECTIVE", "$", "BILLED", "$"]
    assert [line.split()[0] for line in lines[1:4]] == ["b", "a", "c"]
    assert lines[-1] == (
        "Total $3.7350 from 2026-03-01 00:00 to 2026-04-01 00:00 (UTC); guessed 0.0%; unpriced 1 (0.17 h);"
        " no price is listed"
    )


@pytest.mark.parametrize(
    "by", ["namespace", "team", "pool", "provider", "accelerator", "workload", "tier", "day", "week", "month",
           "day,team", "namespace,phase", "hour", "account", "region", "meter", "kind", "sku", "cost-center",
           "label:team", "label:app.kubernetes.io/name,label:team,day"]
)  # fmt: skip
async def test_cost_01_every_grouping_has_the_same_total(books: Books, nebula: Any, by: str):
    await a_month(books)

    result = await nebula("cost", *MARCH, "--group-by", by, "-o", "json")

    body = json.loads(result.output)
    assert Decimal(body["totalUSD"]) == Decimal("3.735")
    assert sum(Decimal(line["billedUSD"]) for line in body["lines"]) == Decimal("3.735")
    assert {"zone", "guessedUSD", "unpriced", "newestPriceAgeSeconds"} <= set(body)


async def test_csv_and_sql_say_the_same(books: Books, nebula: Any):
    await a_month(books)

    rows = list(csv.DictReader(io.StringIO((await nebula("cost", *MARCH, "-o", "csv")).output)))
    query = (await nebula("cost", *MARCH, "--sql")).output
    by_hand = await books.sql(query.strip().rstrip(";").replace(":", r"\:"))

    assert [(row["namespace"], Decimal(row["billed_usd"])) for row in rows] == [
        (row["namespace"], row["billed"] / 3600) for row in by_hand
    ]


async def test_only_filters_and_a_quote_in_a_value_is_text(books: Books, nebula: Any):
    await a_month(books)

    one = json.loads((await nebula("cost", *MARCH, "--only", "namespace=a", "-o", "json")).output)
    none = json.loads((await nebula("cost", *MARCH, "--only", "namespace=a' or 1=1", "-o", "json")).output)
    query = (await nebula("cost", *MARCH, "--only", "namespace=a' or 1=1", "--sql")).output

    assert (one["totalUSD"], none["lines"]) == ("1.245000000000", [])
    assert "'a'' or 1=1'" in query


async def test_a_report_by_a_label_tells_pods_apart_and_can_be_of_one_value(books: Books, nebula: Any):
    for app, seconds in (("train", 600), ("serve", 300)):
        run = await books.run(meters=[gpu("3.6", 1)], labels={"app.kubernetes.io/name": app, "Team": "a"})
        await books.over(run, after_s=seconds)
    await books.over(await books.run(meters=[gpu("3.6", 1)]), after_s=100)
    await books.tick()
    by = ("cost", *MARCH, "--group-by", "label:app.kubernetes.io/name,label:Team")

    whole = await nebula(*by, "-o", "csv")
    part = await nebula(*by, "--only", "label:app.kubernetes.io/name=serve", "-o", "csv")
    query = await nebula(*by, "--only", "label:Team=it's", "--sql")

    rows = [line.split(",") for line in whole.output.splitlines()]
    assert [row[:2] for row in rows[1:]] == [["train", "a"], ["serve", "a"], ["<none>", "<none>"]]
    assert [line.split(",")[0] for line in part.output.splitlines()[1:]] == ["serve"]
    assert await books.sql(query.output.rstrip().rstrip(";").replace(":", r"\:")) == []


@pytest.mark.parametrize(("args", "said"), [
    (["--group-by", "namespce"], "did you mean namespace?"),
    (["--group-by", "day,month"], "one unit of time"),
    (["--group-by", "label:"], "names no label of a Pod, such as label:app"),
    (["--group-by", "label:a'b"], "names no label of a Pod"),
    (["--only", "label:a b=c"], "names no label of a Pod"),
    (["--zone", "Mars/Olympus"], "there is no time zone 'Mars/Olympus'"),
    (["--from", "yesterday"], "'yesterday' is no time"),
    (["--from", "2026-04", "--to", "2026-03"], "--to must be after --from"),
    (["--from", "2026-03-01", "--to", "2026-03-01"], "--to must be after --from"),
    (["--from", "2026-03-01T00:00+01:00"], "leave the offset away"),
    (["--only", "planet=mars"], "is not GROUP=VALUE"),
])  # fmt: skip
async def test_bad_input_is_one_clear_error(books: Books, nebula: Any, args: list[str], said: str):
    result = await nebula("cost", *args)

    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output


async def test_every_standing_question_has_an_answer_as_table_csv_json_and_sql(books: Books, nebula: Any):
    await a_month(books)
    failed = await books.run(meters=[gpu("1")], tier="Spot")
    await books.over(failed, after_s=60, end_reason="failed")
    await books.run(meters=[gpu(None)])
    await books.tick()

    for question in QUESTIONS:
        for style in ("table", "csv", "json"):
            result = await nebula("cost", "ask", question, *MARCH, "-o", style)
            assert result.exit_code == 0, (question, result.output)
        query = (await nebula("cost", "ask", question, *MARCH, "--sql")).output
        assert len(await books.sql(query.rstrip().rstrip(";").replace(":", r"\:"))) == len(
            json.loads((await nebula("cost", "ask", question, *MARCH, "-o", "json")).output)
        ), question

    wasted = json.loads((await nebula("cost", "ask", "waste", *MARCH, "-o", "json")).output)
    assert "failed_provision" in {row["reason"] for row in wasted}
    unknown = await nebula("cost", "ask", "wast")
    assert (unknown.exit_code, "did you mean waste?" in unknown.output) == (2, True)


async def test_a_standing_question_is_answered_for_its_period_and_no_more(books: Books, nebula: Any):
    """A machine that boots from 22:00 on the last of March to 04:00 on the first of April, on Spot."""
    begun = datetime(2026, 3, 31, 22, tzinfo=UTC)
    times = ("requested_at", "accepted_at", "first_seen_at", "provider_created_at")
    run = await books.run(meters=[gpu("1", 1)], tier="Spot", **dict.fromkeys(times, begun))
    end = begun + timedelta(hours=6)
    await books.change(run, gone_at=end, terminate_asked_at=end, provider_ended_at=end, end_reason="failed")
    await books.tick()

    async def asked(question: str, column: str, *period: str) -> Decimal:
        said = await nebula("cost", "ask", question, *period, "-o", "json")
        return sum((Decimal(row[column]) for row in json.loads(said.output)), Decimal(0))

    assert await asked("spot", "spot_usd", *MARCH) == 2
    assert await asked("waste", "usd", *MARCH) == 2
    assert await asked("waste", "usd", "--from", "2026-03-31T23:00", "--to", "2026-04-01T01:30") == Decimal(
        "2.5"
    )
    assert await asked("waste", "usd", "--from", "2026-04-01T04:00", "--to", "2026-04-02") == 0


async def test_the_receipt_of_a_pod_has_every_phase_and_its_sum(books: Books, nebula: Any):
    await a_month(books)

    result = await nebula("cost", "pod", "p-1", "-n", "b")

    assert result.exit_code == 0, result.output
    assert [line.split()[4:6] for line in result.output.splitlines()[1:3]] == [
        ["OnDemand", "booting"],
        ["OnDemand", "running"],
    ]
    assert result.output.splitlines()[-1] == "b/p-1 (Deployment train): $2.4900"
    missing = await nebula("cost", "pod", "nobody")
    assert (missing.exit_code, "nothing was ever rented" in missing.output) == (1, True)


async def test_burn_counts_an_unpriced_machine_with_its_ceiling(books: Books, nebula: Any):
    await books.run(meters=[gpu("2.49")])
    await books.run(meters=[gpu(None)], ceiling_usd_per_hour=Decimal(25))
    await books.tick()

    result = await nebula("burn")

    assert result.output.splitlines()[-1].startswith("$44.92/h now; 1 machines have no price")


async def test_a_right_ledger_verifies_and_a_wrong_one_does_not(books: Books, nebula: Any):
    await a_month(books)
    assert (await nebula("cost", "verify")).output.splitlines()[-1] == "the ledger agrees with itself"

    await books.sql("alter table billing_segment disable trigger all")
    await books.sql("update billing_segment set usd = usd + 1 where usd is not null")
    await books.sql("alter table billing_segment enable trigger all")
    result = await nebula("cost", "verify")

    assert result.exit_code == 1
    assert result.output.count("its facts say otherwise") == 2


async def test_kubectl_nebula_is_the_same(books: Books, nebula: Any):
    await a_month(books)

    ours = (await nebula("cost", *MARCH)).output

    assert (await nebula("cost", *MARCH, prog_name="kubectl nebula")).output == ours


async def test_cost_09_focus_rows_multiply_out_and_add_up(books: Books, nebula: Any):
    run = await books.run(
        meters=[gpu("2.4901"), {"kind": "disk", "quantity": "17", "usd": "0.000131", "label": ""}]
    )
    await books.over(run, after_s=3 * 3600 + 1234.567891)
    await books.tick()

    result = await nebula("cost", "export", "--focus", *MARCH)

    rows = list(csv.DictReader(io.StringIO(result.output)))
    for row in rows:
        for cost, price in (("ContractedCost", "ContractedUnitPrice"), ("ListCost", "ListUnitPrice")):
            assert Decimal(row[cost]) == Decimal(row[price]) * Decimal(row["PricingQuantity"])
        assert all(not isinstance(tag, dict | list) for tag in json.loads(row["Tags"]).values())
        assert row["ChargePeriodStart"].endswith("Z")
    exported = sum(Decimal(row["BilledCost"]) for row in rows)
    assert abs(exported - await books.cost() / 3600) < Decimal("1e-6")
    names = list(rows[0])
    first_own = next(index for index, name in enumerate(names) if name.startswith("x_"))
    assert all(name.startswith("x_") for name in names[first_own:])
    assert names[:first_own] == sorted(names[:first_own])
    mandatory = {"BilledCost", "BillingAccountId", "BillingCurrency", "BillingPeriodStart", "ChargeCategory",
                 "ChargeClass", "ChargePeriodEnd", "EffectiveCost", "InvoiceIssuerName", "ListCost",
                 "PricingQuantity", "PricingUnit", "ProviderName", "PublisherName", "ServiceCategory",
                 "ServiceName"}  # fmt: skip
    assert mandatory <= set(names)


AMOUNTS = st.lists(st.decimals(min_value=-(10**6), max_value=10**6, places=7), max_size=50)


@given(parts=AMOUNTS, digits=st.integers(0, 6))
def test_cost_05_rounded_parts_add_up_to_the_rounded_total(parts: list[Decimal], digits: int):
    found = shares(parts, digits=digits)

    assert sum(found, Decimal(0)) == rounded(total(parts), digits=digits)
    step = Decimal(3600).scaleb(-digits)
    assert all(abs(mine * 3600 - part) < step for mine, part in zip(found, parts, strict=True))


async def test_the_page_shows_an_hour_that_has_only_begun_at_what_it_costs_an_hour(
    books: Books, nebula: Any, tmp_path: Path
):
    (time,) = await books.sql("select now() - interval '3 hours' as at")
    begun = dict.fromkeys(("requested_at", "accepted_at", "first_seen_at", "provider_created_at"), time["at"])
    await books.run(meters=[gpu("3.6", 1)], **begun)
    await books.tick()

    said = await nebula("report", "--html", str(tmp_path / "cost.html"), "--from", f"{time['at']:%Y-%m-%d}")

    assert said.exit_code == 0, said.output
    text = (tmp_path / "cost.html").read_text()
    bars = re.findall(r"<title>[-0-9]+ [0-9:]+ modal \$([0-9.]+)</title>", text)
    assert len(bars) >= 3
    assert set(bars[1:]) == {"3.60"}
