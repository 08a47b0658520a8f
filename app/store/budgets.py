"""Budgets: what may be spent by whom in a period, and where each of them stands.

Spent is what the ledger has billed in the period, what has no price yet at the ceiling of its claim; what
runs, and what placement has promised (`reservation`), counts for the budget's look-ahead on top. So a budget
holds before the money is gone.

One with labels has its action in a column of its own, and by `action` only tells: a version before 0011,
which may lead once more after a rollback, knows no labels, and would take it for a budget of everything.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Any

import orjson
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

POOL_PREFIX = "nodepool/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """One budget. A scope that is None holds for any, as do no ``labels``; a Pod must have all of these."""

    name: str
    amount_usd: Decimal
    period: str
    namespace: str | None = None
    team: str | None = None
    pool: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    thresholds: tuple[int, ...] = (50, 80, 100)
    action: str = "Alert"
    look_ahead_s: int = 3600
    set_by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One budget that may refuse, at this moment. ``usd_per_hour`` is what runs or is promised."""

    name: str
    amount_usd: Decimal
    period: str
    namespace: str | None
    team: str | None
    pool: str | None
    action: str
    look_ahead_s: int
    spent_usd: Decimal
    usd_per_hour: Decimal = Decimal(0)
    unpriced: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)

    def concerns(self, *, namespace: str, team: str, pool: str, labels: Mapping[str, str]) -> bool:
        """Whether a machine of these is counted by it; ``labels`` are the Pod's, as its claim keeps them."""
        return concerns(self, namespace=namespace, team=team, pool=pool, labels=labels)

    def left_usd(self) -> Decimal:
        """What is left once all that runs or is promised has gone on for the look-ahead."""
        return self.amount_usd - self.spent_usd - self.usd_per_hour * self.look_ahead_s / 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """One budget in its period, for people."""

    name: str
    namespace: str | None
    team: str | None
    pool: str | None
    amount_usd: Decimal
    period: str
    period_start: datetime
    spent_usd: Decimal
    usd_per_hour: Decimal
    used_ratio: Decimal
    forecast_usd: Decimal
    exhausted_at: datetime | None
    action: str
    thresholds: tuple[int, ...]
    labels: Mapping[str, str] = field(default_factory=dict)


def concerns(
    each: Standing | Status, *, namespace: str, team: str, pool: str, labels: Mapping[str, str]
) -> bool:
    """Whether a machine of these is in the scope of the budget."""
    return (
        each.namespace in (None, namespace)
        and each.team in (None, team)
        and each.pool in (None, pool)
        and each.labels.items() <= labels.items()
    )


_PUT = text("""
    insert into budget (name, namespace, team, pool, labels, amount_usd, period, thresholds, action,
        label_action, look_ahead_s, set_by)
    select :name, :namespace, :team, :pool, cast(:labels as jsonb), cast(:amount_usd as numeric), :period,
        cast(:thresholds as int[]), :action, :label_action, cast(:look_ahead_s as int), :set_by
    from installation where cast(:epoch as bigint) is null or epoch = :epoch
    on conflict (name) do update set namespace = excluded.namespace, team = excluded.team,
        pool = excluded.pool, labels = excluded.labels, amount_usd = excluded.amount_usd,
        period = excluded.period, thresholds = excluded.thresholds, action = excluded.action,
        label_action = excluded.label_action, look_ahead_s = excluded.look_ahead_s, set_by = excluded.set_by
    where (budget.namespace, budget.team, budget.pool, budget.labels, budget.amount_usd, budget.period,
        budget.thresholds, budget.action, budget.label_action, budget.look_ahead_s)
        is distinct from (excluded.namespace, excluded.team, excluded.pool, excluded.labels,
        excluded.amount_usd, excluded.period, excluded.thresholds, excluded.action, excluded.label_action,
        excluded.look_ahead_s)
""")


async def put(conn: AsyncConnection, budgets: Collection[Budget], *, epoch: int | None = None) -> None:
    """Write budgets down, each in place of what had its name; ``epoch`` of a leader, None: a person does."""
    rows = [
        {name: getattr(each, name) for name in Budget.__dataclass_fields__}
        | {"thresholds": sorted(each.thresholds), "epoch": epoch}
        | {"labels": orjson.dumps(dict(each.labels)).decode()}
        | ({"action": "Alert", "label_action": each.action} if each.labels else {"label_action": None})
        for each in sorted(budgets, key=lambda each: each.name)
    ]
    if rows:
        await conn.execute(_PUT, rows)


async def drop(conn: AsyncConnection, name: str) -> bool:
    """Forget one; False if there was none."""
    return bool((await conn.execute(text("delete from budget where name = :name"), {"name": name})).rowcount)


async def keep_pools(conn: AsyncConnection, names: Collection[str], *, epoch: int) -> None:
    """Forget the budgets of NodePools that have none any more."""
    query = text("""
        delete from budget where name like :mine and not name = any(:names)
            and (select epoch from installation) = :epoch
    """)
    await conn.execute(query, {"mine": f"{POOL_PREFIX}%", "names": sorted(names), "epoch": epoch})


_STANDING = text("""
    with held as (
        select r.namespace, r.team, r.pool, r.labels, coalesce(m.usd_per_hour, r.usd_per_hour) as usd
        from reservation r
        left join rental l on l.pod_uid = r.pod_uid and l.claim_name = r.claim_name
            and case when r.claim_uid is null then coalesce(l.ended_at > r.created_at, true)
                else l.claim_uid = r.claim_uid end
        left join run m on m.claim_uid = l.claim_uid and m.provider = l.provider and m.account = l.account
            and m.resource_id = l.resource_id
        where l.state is distinct from 'ended'
    )
    select b.name, b.amount_usd, b.period, b.namespace, b.team, b.pool, b.labels,
        coalesce(b.label_action, b.action) as action, b.look_ahead_s,
        coalesce((select sum(c.billed_dollar_seconds) from cost_lines(
            p.since, statement_timestamp(), 'all', 'UTC') c join label_set s on s.id = c.label_set_id
            where (b.namespace is null or s.namespace = b.namespace) and (b.team is null or s.team = b.team)
                and (b.pool is null or s.pool = b.pool)
                and (b.labels = '{}' or s.tags @> b.labels)), 0) / 3600
        + coalesce((select sum(u.usd) from unpriced_by_machine(p.since) u
            join label_set s on s.id = u.label_set_id
            where (b.namespace is null or s.namespace = b.namespace) and (b.team is null or s.team = b.team)
                and (b.pool is null or s.pool = b.pool)
                and (b.labels = '{}' or s.tags @> b.labels)), 0) as spent_usd,
        coalesce(h.usd, 0) as usd_per_hour, coalesce(h.unpriced, 0) as unpriced
    from budget b cross join lateral (
        select case b.period when 'total' then b.created_at
            else date_trunc(b.period, statement_timestamp(), 'UTC') end as since
    ) p left join lateral (
        select sum(usd) as usd, count(*) filter (where usd is null) as unpriced from held
        where (b.namespace is null or held.namespace = b.namespace)
            and (b.team is null or held.team = b.team) and (b.pool is null or held.pool = b.pool)
            and (b.labels = '{}' or held.labels @> b.labels)
    ) h on true
    where coalesce(b.label_action, b.action) <> 'Alert' and (b.pool is null or b.pool = any(:pools))
    order by b.name
""")


async def standing(conn: AsyncConnection, pools: Collection[str]) -> list[Standing]:
    """Every budget that may refuse a machine of these pools, with what is spent, runs and is promised."""
    found = await conn.execute(_STANDING, {"pools": sorted(pools)})
    return [Standing(**row) for row in found.mappings()]


_STATUS = text("""
    select name, namespace, team, nodepool as pool, amount as amount_usd, period, period_start,
        spent as spent_usd, committed_rate as usd_per_hour, used_ratio, forecast as forecast_usd,
        exhausted_at, coalesce(label_action, action) as action, thresholds, labels
    from budget_status order by used_ratio desc, name
""")


async def status(conn: AsyncConnection) -> list[Status]:
    """Where each budget stands, the fullest first."""
    rows = (await conn.execute(_STATUS)).mappings()
    return [Status(**{**row, "thresholds": tuple(row["thresholds"])}) for row in rows]


_TELL = text("""
    insert into budget_told (budget, period_start, threshold)
    select :name, :period_start, :threshold from installation where epoch = :epoch
    on conflict do nothing returning threshold
""")


async def tell(conn: AsyncConnection, each: Status, threshold: int, *, epoch: int) -> bool:
    """Note that a threshold is told of; False: it was, in this period, or somebody else leads."""
    values = {"name": each.name, "period_start": each.period_start, "threshold": threshold, "epoch": epoch}
    return (await conn.execute(_TELL, values)).first() is not None


def passed(each: Status) -> Sequence[int]:
    """The thresholds that its period has reached."""
    return [limit for limit in each.thresholds if each.used_ratio * 100 >= limit]


async def names(conn: AsyncConnection) -> list[dict[str, Any]]:
    """All of them as they are written."""
    return [dict(row) for row in (await conn.execute(text("select * from budget order by name"))).mappings()]
