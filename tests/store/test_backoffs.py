"""Owners that wait between machines, because their Pods end by themselves: a crash loop buys few of them."""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.provisioning.core import Core
from app.provisioning.keep import Keeper
from app.settings import load
from app.store import backoffs, standing
from app.store.backoffs import Backoff, Failure, Pace
from app.store.engine import begin

PACE = Pace(base_s=10, max_s=300, reset_s=600)
FAILURE = Failure(owner_uid="rs-1", claim_uid="c-1", message="exit code 3", ran_s=2.0)


async def fail(engine: AsyncEngine, **changes: Any) -> datetime | None:
    async with begin(engine) as conn:
        return await backoffs.note(conn, replace(FAILURE, **changes), pace=PACE)


async def row(engine: AsyncEngine) -> Backoff:
    async with begin(engine) as conn:
        return (await standing.read(conn)).backoffs["rs-1"]


async def wait_s(engine: AsyncEngine) -> float:
    """From the last failure that counted until the owner is free."""
    async with begin(engine) as conn:
        found = await conn.execute(text("select until - failed_at from owner_backoff"))
        spread: timedelta = found.scalar_one()
        return round(spread.total_seconds(), 3)


async def rent(engine: AsyncEngine, claim_uid: str, *, after_s: float) -> None:
    """A machine rented so long after the last failure that counted (before it, if negative)."""
    async with begin(engine) as conn:
        await conn.execute(
            text(
                "insert into rental (claim_uid, claim_name, pod_namespace, pod_name, pod_uid, pool, provider,"
                " account, region, tier, accelerator, state, epoch, created_at)"
                f" select '{claim_uid}', '', '', '', '', '', 'p', 'a', '', '', '', 'open', 1,"
                f" failed_at + make_interval(secs => {after_s}) from owner_backoff"
            )
        )


async def test_each_failure_in_a_row_doubles_the_wait_up_to_the_most(engine: AsyncEngine) -> None:
    waits = []
    for number in range(1, 8):
        await fail(engine, claim_uid=f"c-{number}")
        waits.append(await wait_s(engine))

    assert waits == [10, 20, 40, 80, 160, 300, 300]
    assert (await row(engine)).failures == 7


async def test_one_machines_end_counts_once_however_often_it_is_noted(engine: AsyncEngine) -> None:
    first = await fail(engine)

    assert first is not None
    assert await fail(engine) is None
    assert ((await row(engine)).failures, (await row(engine)).until) == (1, first)


async def test_pods_that_ran_side_by_side_count_as_one_failure(engine: AsyncEngine) -> None:
    await fail(engine)
    await rent(engine, "c-2", after_s=-5)
    await fail(engine, claim_uid="c-2")
    assert (await row(engine)).failures == 1

    await rent(engine, "c-3", after_s=0.001)
    await fail(engine, claim_uid="c-3")

    assert (await row(engine)).failures == 2


@pytest.mark.parametrize("ran_s", [600.0, 86400.0])
async def test_a_pod_that_ran_for_long_begins_the_count_anew(engine: AsyncEngine, ran_s: float) -> None:
    for number in range(1, 4):
        await fail(engine, claim_uid=f"c-{number}")

    await fail(engine, claim_uid="c-4", ran_s=ran_s)

    assert (await row(engine)).failures == 1


async def test_a_failure_long_after_the_last_wait_begins_the_count_anew(engine: AsyncEngine) -> None:
    for number in range(1, 4):
        await fail(engine, claim_uid=f"c-{number}")
    async with begin(engine) as conn:
        await conn.execute(
            text(
                "update owner_backoff set until = clock_timestamp() - interval '601 seconds',"
                " failed_at = clock_timestamp() - interval '701 seconds'"
            )
        )

    await fail(engine, claim_uid="c-4")

    assert ((await row(engine)).failures, await wait_s(engine)) == (1, 10)


async def test_an_owner_whose_wait_is_over_is_not_live_and_is_forgotten_later(engine: AsyncEngine) -> None:
    await fail(engine)
    async with begin(engine) as conn:
        await conn.execute(text("update owner_backoff set until = clock_timestamp() - interval '2 seconds'"))
        assert (await standing.read(conn)).backoffs == {}
        assert await backoffs.prune(conn, older_than_s=3600) == 0
        assert await backoffs.prune(conn, older_than_s=1) == 1


async def test_a_clouds_words_with_a_nul_in_them_are_taken_without_it(engine: AsyncEngine) -> None:
    await fail(engine, message="out of\0 memory")

    assert (await row(engine)).message == "out of memory"


async def test_a_failure_that_the_database_refuses_loses_no_other_owners_wait(engine: AsyncEngine) -> None:
    nobody: Any = None
    keeper = Keeper(
        core=Core(
            accounts=nobody,
            inventory=nobody,
            offerings=nobody,
            engine=engine,
            settings=load({}, {}),
            installation="i",
            leadership=nobody,
        )
    )
    keeper._pending = [replace(FAILURE, owner_uid="bad\0"), replace(FAILURE, owner_uid="rs-2")]

    await keeper.note(FAILURE)

    assert keeper._pending == []
    async with begin(engine) as conn:
        assert set((await standing.read(conn)).backoffs) == {"rs-1", "rs-2"}
