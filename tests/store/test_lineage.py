"""Whether a store is the one that it was: a restore shows, and ordinary work does not."""

import asyncio

from sqlalchemy import text

from app.store.devserver import DevPostgres
from app.store.engine import begin, create_engine
from app.store.installation import get_or_create, lineage, next_epoch
from app.store.migrate import migrate


async def lineage_of(url: str) -> str:
    engine = create_engine(url, pool_size=1)
    try:
        async with begin(engine) as conn:
            return await lineage(conn)
    finally:
        await engine.dispose()


async def test_work_does_not_change_it_and_a_copy_put_in_its_place_does(own_server: DevPostgres):
    await migrate(own_server.url)
    engine = create_engine(own_server.url, pool_size=1)
    before = await lineage_of(own_server.url)
    async with begin(engine) as conn:
        await get_or_create(conn, new_id="aaaaaaaaaa")
        await next_epoch(conn, 4)
    assert await lineage_of(own_server.url) == before

    async with begin(engine) as conn:  # what a restore of the data alone does
        await conn.execute(text("truncate rental cascade"))
    await engine.dispose()
    truncated = await lineage_of(own_server.url)
    assert truncated != before

    await asyncio.to_thread(own_server.restart)  # what every other kind of restore needs
    assert await lineage_of(own_server.url) != truncated
