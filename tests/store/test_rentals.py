"""The rows of renting, statement by statement: numbers that nobody else gets, and facts written once."""

from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.store import rentals
from app.store.engine import StoreUnavailable, begin, connect, create_engine, single

T0 = datetime(2026, 1, 1, tzinfo=UTC)
NOTHING: dict[str, Any] = dict.fromkeys(("seen", "running", "again", "exited", "gone"), False)
NOTHING |= dict.fromkeys(
    ("provider_created_at", "provider_started_at", "provider_ended_at", "end_reason", "exit_code")
)
NOTHING["meters"] = ()


def a_fact(machine: str, **facts: Any) -> dict[str, Any]:
    return {"provider": "fake", "account": "default", "resource_id": machine, **NOTHING, **facts}


async def runs(engine: AsyncEngine) -> dict[str, Any]:
    async with connect(engine) as conn:
        rows = await conn.execute(text("select * from run order by resource_id"))
        return {row.resource_id: row for row in rows}


@pytest.fixture
async def two_runs(engine: AsyncEngine) -> AsyncEngine:
    async with begin(engine) as conn:
        await conn.execute(
            text("""
                insert into run (claim_uid, provider, account, resource_id, region, tier, accelerator, pool,
                    pod_namespace, pod_name, pod_uid)
                select 'c-' || n, 'fake', 'default', 'm-' || n, 'r1', 'Spot', 'T4:1', 'gpu', 'ns', 'p', 'u'
                from generate_series(1, 2) n
            """)
        )
    return engine


async def test_facts_of_many_machines_are_one_statement_and_each_is_written_once(two_runs: AsyncEngine):
    async with single(two_runs) as conn:
        await rentals.observe(
            conn,
            [
                a_fact("m-2", asked_ago_s=0.0),
                a_fact("m-1", seen=True, running=True, again=True, provider_started_at=T0),
                a_fact("unknown", seen=True, gone=True),
            ],
        )
    before = await runs(two_runs)
    async with single(two_runs) as conn:
        await rentals.observe(
            conn,
            [
                a_fact("m-1", seen=True, exited=True, end_reason="failed", exit_code=3, provider_ended_at=T0),
                a_fact("m-2", seen=True, asked_ago_s=0.0, gone=True),
            ],
        )
    after = await runs(two_runs)

    assert before["m-1"].provider_started_at == T0
    assert before["m-1"].terminate_asked_at is None
    assert before["m-2"].terminate_asked_at is not None
    assert before["m-2"].first_seen_at is None  # being asked for its end shows nothing of a machine
    assert after["m-1"].running_at == before["m-1"].running_at
    assert (after["m-1"].end_reason, after["m-1"].exit_code) == ("failed", 3)
    assert after["m-2"].terminate_asked_at == before["m-2"].terminate_asked_at
    assert after["m-2"].gone_at is not None


async def test_what_is_asked_of_a_machine_that_is_gone_is_no_end_that_we_asked_for(two_runs: AsyncEngine):
    """Else one that vanished while nobody looked would be billed until it was missed."""
    for fact in (a_fact("m-1", gone=True), a_fact("m-1", asked_ago_s=0.0)):
        async with single(two_runs) as conn:
            await rentals.observe(conn, [fact])

    run = (await runs(two_runs))["m-1"]
    assert run.gone_at is not None
    assert run.terminate_asked_at is None


async def test_a_terminate_that_could_not_be_written_for_an_hour_was_an_hour_ago(two_runs: AsyncEngine):
    async with single(two_runs) as conn:
        await rentals.observe(conn, [a_fact("m-1", asked_ago_s=3600.0, gone=True)])

    run = (await runs(two_runs))["m-1"]
    assert (run.gone_at - run.terminate_asked_at).total_seconds() == pytest.approx(3600, abs=1)


async def test_numbers_are_drawn_by_the_dozen_and_nobody_else_gets_them(engine: AsyncEngine):
    async with single(engine) as one, single(engine) as other:
        first = await rentals.next_sequences(one, above=0, count=8)
        second = await rentals.next_sequences(other, above=0, count=8)
        third = await rentals.next_sequences(one, above=100, count=8)
        fourth = await rentals.next_sequences(other, above=0, count=8)

    assert first == sorted(first)
    assert len({*first, *second, *third, *fourth}) == len(first) + len(second) + len(third) + len(fourth)
    assert min(third) > 100
    assert min(fourth) > max(third)


async def test_a_single_statement_is_committed_by_itself_and_the_connection_is_as_before(
    two_runs: AsyncEngine,
):
    async with single(two_runs) as conn:
        await conn.execute(text("update run set region = 'r2'"))
        assert {row.region for row in (await runs(two_runs)).values()} == {"r2"}
    async with connect(two_runs) as conn:  # the next user of the connection has transactions again
        await conn.execute(text("update run set region = 'r3'"))

    assert {row.region for row in (await runs(two_runs)).values()} == {"r2"}


async def test_a_single_statement_on_a_broken_connection_may_have_happened(database_url: str):
    engine = create_engine(database_url)
    with pytest.raises(StoreUnavailable) as raised:
        async with single(engine) as conn:
            await conn.execute(text("select pg_terminate_backend(pg_backend_pid())"))
    await engine.dispose()

    assert raised.value.uncertain
