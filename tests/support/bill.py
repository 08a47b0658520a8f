"""The ledger beside a simulator's true bill, machine by machine, to the last stored digit.

For any test that ends with money: wait with `is_settled` until every run is closed and its cloud's bill was
compared, then `expect_the_true_bill`. ``namespace`` None: every Pod's machines.
"""

from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.ledger.rules import dollars
from app.store.engine import begin

_SETTLED = text("""
    select count(*) as runs, count(l.billed_at) as billed from run r left join ledger_run l on l.run_id = r.id
    where cast(:namespace as text) is null or r.pod_namespace = :namespace
""")
_COSTS = text("""
    select r.resource_id, sum(c.billed_dollar_seconds) as sum
    from charge_between('2020-01-01', '2100-01-01') c join run r on r.id = c.run_id
    where cast(:namespace as text) is null or r.pod_namespace = :namespace group by 1
""")


async def is_settled(engine: AsyncEngine, *, namespace: str | None = None) -> bool:
    """Whether there are runs, all are closed, and each was compared with its cloud's final bill."""
    async with begin(engine) as conn:
        row = (await conn.execute(_SETTLED, {"namespace": namespace})).one()
    return bool(row.runs == row.billed > 0)


async def ledger_costs(engine: AsyncEngine, *, namespace: str | None = None) -> dict[str, Decimal]:
    """Dollars in the ledger by machine, each divided once, as a cloud bills each machine."""
    async with begin(engine) as conn:
        rows = (await conn.execute(_COSTS, {"namespace": namespace})).all()
    return {row.resource_id: dollars(row.sum) for row in rows}


async def expect_the_true_bill(
    engine: AsyncEngine, machines: Iterable[Mapping[str, Any]], *, namespace: str | None = None
) -> Decimal:
    """Assert ledger = bill for these machines of `FakeCloud.truth`; returns the dollars.

    A machine that cost nothing may have no row; one that only the ledger knows is an error.
    """
    truth = {str(each["id"]): Decimal(each["bill_usd"]) for each in machines}
    ours = await ledger_costs(engine, namespace=namespace)
    wrong = {
        machine: (ours.get(machine), truth.get(machine))
        for machine in truth.keys() | ours.keys()
        if (ours.get(machine) or Decimal(0)) != (truth.get(machine) or Decimal(0))
    }
    assert wrong == {}, f"machine: (ledger, bill) in dollars: {wrong}"
    return sum(truth.values(), Decimal(0))
