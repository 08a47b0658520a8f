"""Old rows go, and what was promised and paid stays."""

from sqlalchemy import text

from app.store.engine import create_engine
from app.upkeep import Upkeep


async def test_only_what_is_old_is_pruned(database_url: str):
    engine = create_engine(database_url)
    try:
        async with engine.begin() as conn:
            for ago in ("30 days", "1 hour"):
                await conn.execute(
                    text(
                        "insert into block (provider, account, region, kind, message, pool,"
                        " pod_namespace, pod_name, claim_uid, expires_at)"
                        f" values ('p', 'a', '{ago}', 'capacity', '', '', '', '', '',"
                        f" now() - interval '{ago}')"
                    )
                )

        gone = await Upkeep(engine).prune()

        assert gone == {"backoffs": 0, "blocks": 1, "decisions": 0, "rounds": 0}
        async with engine.connect() as conn:
            assert (await conn.execute(text("select region from block"))).scalars().all() == ["1 hour"]
    finally:
        await engine.dispose()
