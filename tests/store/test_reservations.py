"""What claims take from pools' limits: rows that come before the claim and go with its end."""

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from app.store import refusals, reservations
from app.store.engine import begin
from app.store.reservations import Reservation, Sum


def a_row(pod: str = "u-1", **changes) -> Reservation:
    row = Reservation(
        pod_uid=pod,
        claim_name=f"team-{pod}",
        pool="gpu",
        provider="modal",
        account="default",
        gpus=8,
        usd_per_hour=Decimal("25.5"),
    )
    return replace(row, **changes)


async def rental(conn: AsyncConnection, state: str, *, pod: str = "u-1", uid: str = "c-1") -> None:
    """A rental of the claim; with a machine unless it is open."""
    values = {"uid": uid, "pod": pod, "name": f"team-{pod}", "state": state}
    values["resource"] = None if state == "open" else f"i-{uid}"
    await conn.execute(
        text("""
            insert into rental (claim_uid, claim_name, pod_namespace, pod_name, pod_uid, pool, provider,
                account, region, tier, accelerator, state, epoch, resource_id, ended_at)
            values (:uid, :name, 'team', 'p', :pod, 'gpu', 'modal', 'default', '', 'Spot', 'h100:8', :state,
                1, :resource, case when cast(:state as text) = 'ended' then clock_timestamp() end)
        """),
        values,
    )


async def run(conn: AsyncConnection, usd: str | None, *, uid: str = "c-1", resource: str = "i-c-1") -> None:
    await conn.execute(
        text("""
            insert into run (claim_uid, attempt, provider, account, resource_id, region, tier, accelerator,
                pool, pod_namespace, pod_name, pod_uid, usd_per_hour)
            values (:uid, (select count(*) + 1 from run), 'modal', 'default', :resource, '', 'Spot', 'h100:8',
                'gpu', 'team', 'p', 'u-1', :usd)
        """),
        {"uid": uid, "resource": resource, "usd": None if usd is None else Decimal(usd)},
    )


async def held(conn: AsyncConnection) -> tuple[int, int, Decimal, int]:
    """Machines, GPUs, dollars and unpriced machines of the pool."""
    sums = await reservations.sums(conn, ["gpu"])
    return (
        sum(each.machines for each in sums),
        sum(each.gpus for each in sums),
        sum((each.usd_per_hour for each in sums), Decimal(0)),
        sum(each.unpriced for each in sums),
    )


async def test_sums_are_by_pool_and_provider_account(engine: AsyncEngine):
    rows = [
        a_row("u-1"),
        a_row("u-2", usd_per_hour=None),
        a_row("u-3", provider="aws", gpus=1, usd_per_hour=Decimal("0.1")),
        a_row("u-4", pool="other"),
    ]
    async with begin(engine) as conn:
        await reservations.put(conn, rows)
        found = await reservations.sums(conn, ["gpu", "none"])

    base = {"pool": "gpu", "account": "default"}
    assert found == [
        Sum(**base, provider="aws", machines=1, gpus=1, usd_per_hour=Decimal("0.1"), unpriced=0),
        Sum(**base, provider="modal", machines=2, gpus=16, usd_per_hour=Decimal("25.5"), unpriced=1),
    ]


async def test_a_machine_rented_at_a_known_price_counts_with_it(engine: AsyncEngine):
    async with begin(engine) as conn:
        await reservations.put(conn, [a_row()])
        await rental(conn, "live")
        await run(conn, "9.75")
        await run(conn, "1000", resource="i-extra")  # an extra is provisioning's to end

        assert await held(conn) == (1, 8, Decimal("9.75"), 0)


@pytest.mark.parametrize("state", ["open", "live", "ending"])
async def test_until_the_price_is_known_what_was_promised_counts(engine: AsyncEngine, state: str):
    async with begin(engine) as conn:
        await reservations.put(conn, [a_row()])
        await rental(conn, state)
        if state != "open":
            await run(conn, None)

        assert await held(conn) == (1, 8, Decimal("25.5"), 0)


async def test_the_end_of_the_rental_gives_back_what_its_claim_took(engine: AsyncEngine):
    async with begin(engine) as conn:
        await reservations.put(conn, [a_row()])
    async with begin(engine) as conn:
        await rental(conn, "ended")

        assert await held(conn) == (0, 0, Decimal(0), 0)
        assert await reservations.load(conn) == []


async def test_an_ended_rental_of_an_earlier_claim_of_the_name_gives_nothing_back(engine: AsyncEngine):
    async with begin(engine) as conn:
        await rental(conn, "ended", uid="c-0")
    async with begin(engine) as conn:
        await reservations.put(conn, [a_row()])

        assert await held(conn) == (1, 8, Decimal("25.5"), 0)


async def test_a_claim_that_was_found_goes_with_its_own_rental_only(engine: AsyncEngine):
    async with begin(engine) as conn:
        await rental(conn, "ended", uid="c-1")  # before the row: the claim is found by a later leader
        await reservations.put(conn, [a_row(claim_uid="c-2")])
        assert (await held(conn))[0] == 1

        await reservations.put(conn, [a_row(claim_uid="c-1")])
        assert (await held(conn))[0] == 0


async def test_of_a_row_that_is_there_the_new_words_count_but_a_price_is_not_forgotten(engine: AsyncEngine):
    async with begin(engine) as conn:
        await reservations.put(conn, [a_row(), a_row("u-2")])
        await reservations.put(conn, [a_row(provider="aws", usd_per_hour=None), a_row("u-2", gpus=1)])

        assert await reservations.load(conn, pool="gpu") == [a_row(provider="aws"), a_row("u-2", gpus=1)]


async def test_release_gives_back_exactly_the_named_and_may_be_repeated(engine: AsyncEngine):
    async with begin(engine) as conn:
        await reservations.put(conn, [a_row("u-1"), a_row("u-2")])
        for _ in range(2):
            await reservations.release(conn, {a_row("u-1").key, ("u-2", "another-name")})

        assert await reservations.load(conn) == [a_row("u-2")]


async def test_only_the_claims_that_there_are_keep_what_they_took(engine: AsyncEngine):
    async with begin(engine) as conn:
        await reservations.put(conn, [a_row("u-1"), a_row("u-2"), a_row("u-3")])

        assert await reservations.keep_only(conn, {a_row("u-2").key}) == 2
        assert await reservations.load(conn) == [a_row("u-2")]
        assert await reservations.keep_only(conn, set()) == 1


@pytest.mark.parametrize("column", ["gpus", "usd_per_hour"])
async def test_the_table_takes_nothing_below_zero(engine: AsyncEngine, column: str):
    with pytest.raises(IntegrityError):
        async with begin(engine) as conn:
            await reservations.put(conn, [a_row(**{column: -1})])


# --- how orders have fared -----------------------------------------------------------------------


async def attempt(conn: AsyncConnection, number: int, outcome: str | None, *, minutes_ago: float) -> None:
    await conn.execute(
        text("""
            insert into provision_attempt (claim_uid, number, sequence, provider, account, region, tier,
                accelerator, epoch, send_by, outcome, settled_at)
            values ('c-1', :number, cast(:number as int), 'modal', 'default', 'r1', 'Spot', 'h100:8', 1,
                now(), :outcome,
                case when cast(:outcome as text) is null then null
                    else clock_timestamp() - make_interval(secs => cast(:ago as float8)) end)
        """),
        {"number": number, "outcome": outcome, "ago": minutes_ago * 60},
    )


async def test_refusals_in_a_row_are_those_since_the_last_machine(engine: AsyncEngine):
    async with begin(engine) as conn:
        await rental(conn, "open")
        history = ["rejected", "accepted", "rejected", "throttled", "rejected", None]
        for number, outcome in enumerate(history, start=1):
            await attempt(conn, number, outcome, minutes_ago=30 - number)

        place = ("modal", "default", "r1", "Spot")
        assert await refusals.in_a_row(conn) == {place: 2}
        assert await refusals.in_a_row(conn, within=timedelta(minutes=26)) == {place: 1}
        assert await refusals.in_a_row(conn, within=timedelta(minutes=1)) == {}
