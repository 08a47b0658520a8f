"""What is kept of ended output: one tail a Pod, and never more in all than was allowed."""

from sqlalchemy.ext.asyncio import AsyncEngine

from app.store import outputs
from app.store.engine import begin


async def save(engine: AsyncEngine, pod: str, size: int, *, limit: int = 1000) -> None:
    async with begin(engine) as conn:
        records = bytes([ord(pod[-1])]) * size
        await outputs.save(conn, pod_uid=pod, claim_uid=f"claim-{pod}", records=records, limit_bytes=limit)


async def held(engine: AsyncEngine, pod: str) -> int | None:
    async with begin(engine) as conn:
        records = await outputs.load(conn, pod)
    return None if records is None else len(records)


async def test_a_pod_has_one_tail_and_the_newest_counts(engine: AsyncEngine):
    await save(engine, "p-1", 10)
    await save(engine, "p-1", 20)

    assert await held(engine, "p-1") == 20
    assert await held(engine, "p-2") is None


async def test_the_oldest_go_when_all_are_too_many(engine: AsyncEngine):
    for pod in ("p-1", "p-2", "p-3"):
        await save(engine, pod, 400)

    assert [await held(engine, pod) for pod in ("p-1", "p-2", "p-3")] == [None, 400, 400]


async def test_a_tail_that_is_alone_too_large_is_not_kept(engine: AsyncEngine):
    await save(engine, "p-1", 100)
    await save(engine, "p-2", 2000)

    assert await held(engine, "p-2") is None
