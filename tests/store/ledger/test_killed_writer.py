"""SIGKILL in the middle of the ledger's own write: the next tick makes the very rows that were lost."""

import asyncio
import signal
import sys
from decimal import Decimal

from sqlalchemy import text

from app.store.engine import connect
from tests.store.ledger.world import Books, at, gpu

_TICK = """
import asyncio, sys
from app.ledger.writer import Writer
from app.store.engine import create_engine
asyncio.run(Writer(engine=create_engine(sys.argv[1])).tick(epoch=int(sys.argv[2])))
"""
# The run's own row comes last: who finds another transaction's there waits with its segments in hand.
_IN_ITS_WAY = text("""
    with who as (
        insert into label_set (hash, namespace, workload_kind, workload_name, team, cost_center, pool,
            provider, account, account_id, region, sku, tier, accelerator, accelerator_count)
        values ('other', '', '', '', '', '', '', '', '', '', '', '', '', '', 0) returning id
    )
    insert into ledger_run (run_id, label_set_id, facts_at, prices_at, rules)
    select :run, id, now(), now(), '[]' from who
""")
_WAITS = """
    select pid from pg_stat_activity where datname = current_database() and wait_event = 'transactionid'
"""


async def test_cost_26_killed_while_it_writes_the_next_tick_makes_the_same_rows(
    books: Books, database_url: str
):
    over, lasts = await books.run(meters=[gpu("2.49")]), await books.run(meters=[gpu("1", 1)])
    await books.over(over, after_s=600)

    async with connect(books.engine) as other:  # which commits nothing
        await other.execute(_IN_ITS_WAY, {"run": lasts})
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _TICK, database_url, str(books.epoch)
        )
        async with asyncio.timeout(30):
            while not await books.sql(_WAITS):
                assert child.returncode is None
        child.send_signal(signal.SIGKILL)
        assert await child.wait() == -signal.SIGKILL
    assert await books.segments(over) + await books.segments(lasts) == []

    assert await books.tick() == 2

    (segment,) = await books.segments(over)
    assert (segment["start"], segment["end"], segment["frozen"]) == (at(0), at(600), True)
    (segment,) = await books.segments(lasts)
    assert (segment["start"], segment["end"]) == (at(0), None)
    assert await books.cost(until=at(600)) == Decimal("2.49") * 8 * 600 + 600
    assert await books.tick() == 0
