"""A person's word that keeps a machine, as it is read right before an end begins."""

from datetime import timedelta

from sqlalchemy.ext.asyncio import AsyncEngine

from app.store import findings
from app.store.engine import begin, database_now


async def test_orphans_s19_the_newest_word_of_any_of_its_names_protects_until_its_end(engine: AsyncEngine):
    async def kept(*names: str, provider: str = "fake") -> bool:
        async with begin(engine) as conn:
            return await findings.is_protected(conn, provider, "default", names)

    async def protect(*, seconds: float) -> None:
        async with begin(engine) as conn:
            until = await database_now(conn) + timedelta(seconds=seconds)
            await findings.protect(
                conn,
                provider="fake",
                account="default",
                resource_id="m-1",
                until=until,
                reason="core dump",
                by="ada",
            )

    assert not await kept("m-1")

    await protect(seconds=3600)
    assert await kept("m-1")
    assert await kept("key/m-1", "m-1")
    assert not await kept("m-2")
    assert not await kept("m-1", provider="other")

    await protect(seconds=-1)
    assert not await kept("m-1")
