"""The ledger held against what it was made from: every run derived again, by the rules used then."""

from dataclasses import replace

from sqlalchemy.ext.asyncio import AsyncConnection

from app.ledger.changes import changes_of
from app.ledger.writer import covers_of
from app.store import costs, ledger, ledger_prices
from app.store.engine import database_now
from app.store.ledger_rules import rules_from_json

AT_ONCE = 500
# By the rules, and by the name of its accelerator, that were used.
_USED = """
    select l.run_id, l.rules,
        case when s.accelerator <> '' then s.accelerator || ':' || s.accelerator_count end as named
    from ledger_run l left join label_set s on s.id = l.label_set_id
"""


async def verify(conn: AsyncConnection) -> list[str]:
    """What is wrong, a line each; empty when nothing is. Changes nothing."""
    wrong = [
        f"run {row['run_id']}: segments {row['id']} and {row['other']} of meter {row['meter']} overlap"
        for row in await costs.rows(conn, costs.OVERLAPS)
    ]
    wrong += [
        f"run {row['run_id']}: meter {row['meter']} has a gap from {row['since']} to {row['until']}"
        for row in await costs.rows(conn, costs.GAPS)
    ]
    wrong += [
        f"day {row['day']}: its sum is {row['sealed']}, its charges are {row['ledger']} dollar-seconds"
        for row in await costs.rows(conn, costs.STALE_SUMS)
    ]
    wrong += [
        f"month {row['month']}: closed at {row['closed']}, its charges are {row['ledger']} dollar-seconds"
        for row in await costs.rows(conn, costs.MOVED_MONTHS)
    ]
    wrong += [
        f"run {row['run_id']} ({row['provider']} {row['resource_id']}) is not in the ledger"
        for row in await costs.rows(conn, costs.UNBOOKED)
    ]
    return wrong + await _derived_again(conn)


async def _derived_again(conn: AsyncConnection) -> list[str]:
    now, prices = await database_now(conn), await ledger_prices.prices(conn)
    used = {row["run_id"]: row for row in await costs.rows(conn, _USED)}
    ids = sorted(used)
    covers = covers_of(await ledger_prices.lasting(conn), (), prices, now=now) if prices.commitments else {}
    wrong = []
    for start in range(0, len(ids), AT_ONCE):
        for due in await ledger.derivable(conn, ids[start : start + AT_ONCE]):
            mine = replace(prices, commitments=covers.get(due.run.id, ()))
            before = used[due.run.id]
            named = replace(due, run=replace(due.run, accelerator=before["named"] or due.run.accelerator))
            changes = changes_of(named, mine, now=now, rules=rules_from_json(before["rules"]))
            if due.is_current and (changes.gone or changes.new or changes.adjustments):
                wrong.append(
                    f"run {due.run.id} ({due.run.provider} {due.run.resource_id}): its facts say otherwise"
                )
    return wrong
