"""The blocklist as rows: behaviours 67 to 84."""

import asyncio
from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from app.store import blocks
from app.store.blocks import Block, Cause, Scope
from app.store.engine import begin, database_now

CAUSE = Cause(
    kind="capacity",
    message="no h100 left",
    pool="gpu",
    pod_namespace="default",
    pod_name="a",
    claim_uid="c-1",
)
H100 = Scope(provider="modal", account="default", accelerator="H100:8", tier="Spot", region="us-east")
CANDIDATE = {
    "provider": "modal",
    "account": "default",
    "accelerator": "h100:8",
    "tier": "Spot",
    "region": "us-east",
}


async def record(
    engine: AsyncEngine, scope: Scope = H100, *, ttl_s: float = 60.0, **cause: str
) -> datetime | None:
    async with begin(engine) as conn:
        return await blocks.record(conn, scope, replace(CAUSE, **cause), ttl_s=ttl_s)


async def live(engine: AsyncEngine) -> list[Block]:
    async with begin(engine) as conn:
        return await blocks.live(conn)


async def lapse(engine: AsyncEngine, *, ago: str = "1 second") -> None:
    """Let time pass: every entry has ended ``ago``, and began a minute before."""
    async with begin(engine) as conn:
        await conn.execute(
            text(
                f"update block set expires_at = clock_timestamp() - interval '{ago}',"
                f" created_at = clock_timestamp() - interval '{ago}' - interval '1 minute'"
            )
        )


@pytest.mark.behaviour(83)
async def test_a_block_names_who_met_it_and_why(engine: AsyncEngine) -> None:
    end = await record(engine, ttl_s=60)

    [block] = await live(engine)
    async with begin(engine) as conn:
        now = await database_now(conn)
    assert block.cause == CAUSE
    assert block.scope == replace(H100, accelerator="h100:8")
    assert block.expires_at == end
    assert timedelta(seconds=59) < block.expires_at - block.created_at < timedelta(seconds=61)
    assert block.created_at <= now < block.expires_at


@pytest.mark.behaviour(67)
@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan")], ids=["zero", "negative", "nan"])
async def test_no_time_records_nothing(engine: AsyncEngine, ttl_s: float) -> None:
    assert await record(engine, ttl_s=ttl_s) is None
    assert await live(engine) == []


@pytest.mark.parametrize(
    "scope",
    [replace(H100, provider=""), Scope(provider="modal", account="default")],
    ids=["no-provider", "no-axis"],
)
@pytest.mark.behaviour(212)
async def test_an_empty_scope_records_nothing(engine: AsyncEngine, scope: Scope) -> None:
    assert await record(engine, scope) is None
    assert await live(engine) == []


@pytest.mark.behaviour(68)
@pytest.mark.parametrize(
    "scope",
    [
        H100,
        Scope(provider="modal", account="default", tier="Spot"),
        Scope(provider="modal", account="default", everything=True),
        Scope(provider="modal", account="default", accelerator=""),
        Scope(provider="modal", account="default", template="t-1"),
    ],
    ids=["exact", "nulls", "everything", "not-applicable", "template"],
)
async def test_one_scope_is_one_entry_whose_end_only_moves_later(engine: AsyncEngine, scope: Scope) -> None:
    first = await record(engine, scope, ttl_s=60)
    sooner = await record(engine, scope, ttl_s=10, pod_name="b")
    later = await record(engine, scope, ttl_s=90, pod_name="c")

    [block] = await live(engine)
    assert first is not None
    assert later is not None
    assert sooner == first < later == block.expires_at
    assert block.cause.pod_name == "c"


@pytest.mark.behaviour(82)
async def test_a_shorter_block_does_not_take_the_blame(engine: AsyncEngine) -> None:
    await record(engine, ttl_s=60)
    await record(engine, ttl_s=10, pod_name="b", kind="quota")

    [block] = await live(engine)
    assert (block.cause.pod_name, block.cause.kind) == ("a", "capacity")


@pytest.mark.behaviour(78)
async def test_of_two_pods_at_once_the_later_end_holds(engine: AsyncEngine) -> None:
    ends = await asyncio.gather(*(record(engine, ttl_s=60 + jitter) for jitter in (1, 25, 7, 13)))

    [block] = await live(engine)
    assert block.expires_at == max(end for end in ends if end is not None)


@pytest.mark.behaviour(69)
async def test_scopes_that_differ_in_any_axis_are_separate(engine: AsyncEngine) -> None:
    scopes = [
        H100,
        replace(H100, account="other"),
        replace(H100, accelerator=None),
        replace(H100, accelerator=""),
        replace(H100, tier=None),
        replace(H100, region=None),
        replace(H100, region=""),
        replace(H100, host="h"),
        replace(H100, template="t"),
        Scope(provider="modal", account="default", everything=True),
    ]
    for scope in scopes:
        await record(engine, scope)

    assert len(await live(engine)) == len(scopes)


async def test_accelerators_are_one_in_any_casing(engine: AsyncEngine) -> None:
    await record(engine, H100)
    await record(engine, replace(H100, accelerator="h100:8"))

    assert len(await live(engine)) == 1


@pytest.mark.behaviour(76)
async def test_a_lapsed_entry_is_not_live_and_stays_for_reports(engine: AsyncEngine) -> None:
    await record(engine)
    await lapse(engine)

    assert await live(engine) == []
    async with begin(engine) as conn:
        assert len(await blocks.load(conn, lapsed=True)) == 1
        assert await blocks.load(conn) == []


async def test_an_entry_that_comes_back_begins_anew(engine: AsyncEngine) -> None:
    await record(engine)
    await lapse(engine, ago="1 hour")

    await record(engine, ttl_s=60)

    [block] = await live(engine)
    assert block.expires_at - block.created_at < timedelta(seconds=61)


async def test_old_entries_are_forgotten_and_live_ones_never(engine: AsyncEngine) -> None:
    await record(engine)
    await lapse(engine, ago="8 days")
    await record(engine, replace(H100, region="eu"))

    async with begin(engine) as conn:
        assert await blocks.prune(conn, older_than_s=7 * 86400) == 1
        assert await blocks.prune(conn, older_than_s=0) == 0
        [left] = await blocks.load(conn, lapsed=True)
    assert left.scope.region == "eu"


@pytest.mark.behaviour(81, 84)
async def test_every_replica_sees_one_list(engine: AsyncEngine, database_url: str) -> None:
    from app.store.engine import create_engine

    other = create_engine(database_url)
    await record(engine)

    assert len(await live(other)) == 1
    await other.dispose()


@pytest.mark.behaviour(83)
async def test_clear_ends_only_what_was_named(engine: AsyncEngine) -> None:
    await record(engine)
    await record(engine, replace(H100, provider="aws"))
    await record(engine, replace(H100, provider="aws", region="eu"))
    [modal] = [block for block in await live(engine) if block.scope.provider == "modal"]

    async with begin(engine) as conn:
        assert [block.id for block in await blocks.clear(conn, ids=[modal.id])] == [modal.id]
        assert await blocks.clear(conn, ids=[modal.id]) == []
    assert {block.scope.provider for block in await live(engine)} == {"aws"}
    async with begin(engine) as conn:
        assert len(await blocks.clear(conn, provider="aws")) == 2
    assert await live(engine) == []
    await record(engine)
    async with begin(engine) as conn:
        assert len(await blocks.clear(conn, everything=True)) == 1
        assert len(await blocks.load(conn, lapsed=True)) == 3


async def test_clear_without_a_selector_is_refused(engine: AsyncEngine) -> None:
    async with begin(engine) as conn:
        with pytest.raises(ValueError, match="everything"):
            await blocks.clear(conn)


async def test_a_refusal_after_a_clear_blocks_again(engine: AsyncEngine) -> None:
    await record(engine, ttl_s=600)
    async with begin(engine) as conn:
        await blocks.clear(conn, everything=True)

    await record(engine, ttl_s=30)

    [block] = await live(engine)
    assert block.expires_at - block.created_at < timedelta(seconds=31)


@pytest.mark.behaviour(75)
async def test_the_latest_end_of_all_that_cover_a_candidate_is_reported(engine: AsyncEngine) -> None:
    await record(engine, ttl_s=60)
    wide = await record(engine, Scope(provider="modal", account="default", tier="Spot"), ttl_s=90)

    found = await live(engine)

    assert blocks.soonest_end(found, **CANDIDATE) == wide
    assert blocks.soonest_end(found, **CANDIDATE | {"tier": "OnDemand"}) is None


@pytest.mark.behaviour(70, 71, 72, 73, 74)
@pytest.mark.parametrize(
    ("scope", "candidate", "covered"),
    [
        (H100, {}, True),
        (H100, {"accelerator": "H100:8"}, True),
        (H100, {"accelerator": "h100:1"}, False),
        (H100, {"accelerator": "a100:8"}, False),
        (H100, {"tier": "OnDemand"}, False),
        (H100, {"region": "eu-west"}, False),
        (H100, {"provider": "aws"}, False),
        (H100, {"account": "other"}, False),
        (replace(H100, accelerator=None), {"accelerator": "a100:1"}, True),
        (replace(H100, accelerator=""), {}, False),
        (replace(H100, accelerator=""), {"accelerator": ""}, True),
        (replace(H100, tier=None), {"tier": "OnDemand"}, True),
        (replace(H100, region=""), {}, False),
        (replace(H100, region=""), {"region": ""}, True),
        (replace(H100, host="h-1"), {}, False),
        (replace(H100, host="h-1"), {"host": "h-1"}, True),
        (replace(H100, template="t-1"), {}, False),
        (replace(H100, template="t-1"), {"template": "t-1"}, True),
        (Scope(provider="modal", account="default", everything=True), {"region": "x", "tier": "y"}, True),
        (Scope(provider="modal", account="default", everything=True), {"provider": "aws"}, False),
    ],
)
def test_what_a_scope_covers(scope: Scope, candidate: dict[str, str], covered: bool) -> None:
    assert scope.covers(**CANDIDATE | candidate) is covered


@pytest.mark.behaviour(77)
@pytest.mark.parametrize(("pool_ttl_s", "seconds"), [(None, 35.0), (0.0, 35.0), (-5.0, 35.0), (600.0, 605.0)])
def test_the_pools_time_counts_and_jitter_is_added(pool_ttl_s: float | None, seconds: float) -> None:
    assert blocks.ttl_s(pool_ttl_s, jitter_s=5.0) == seconds


@pytest.mark.behaviour(79)
async def test_the_table_refuses_a_block_of_everything_by_accident(engine: AsyncEngine) -> None:
    from sqlalchemy.exc import IntegrityError

    async def insert(conn: AsyncConnection) -> None:
        await conn.execute(
            text(
                "insert into block (provider, account, kind, message, pool, pod_namespace, pod_name,"
                " claim_uid, expires_at) values ('modal', 'default', 'x', '', '', '', '', '', now())"
            )
        )

    with pytest.raises(IntegrityError, match="block_scope_check"):
        async with begin(engine) as conn:
            await insert(conn)
