"""How fast the reports are on ten million segments: a table beside the figures to beat, no assertion on time.

A year of closed months in the archive and the last ones beside the open one, as the leader's own clocks leave
them. ``SEGMENTS`` makes another number of them. Never in CI.
"""

import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from app.store import costs, ledger_metrics, ledger_periods, ledger_upkeep
from app.store.costs import Window
from app.store.devserver import DevPostgres
from app.store.engine import begin, create_engine
from app.store.installation import get_or_create, next_epoch
from app.store.migrate import migrate

SEGMENTS = int(os.environ.get("SEGMENTS") or 10_000_000)
RAW = not os.environ.get("NO_RAW")  # whole months from their segments: slow, and nobody's daily question
LABELS = 3_600
OPEN = 5_000
RUNS = max(OPEN, SEGMENTS // 4)
NOW = datetime.now(UTC)
THIS = NOW.replace(day=1, hour=0, minute=0, second=0, microsecond=0)


def _back(months: int) -> datetime:
    count = THIS.year * 12 + THIS.month - 1 - months
    return THIS.replace(year=count // 12, month=count % 12 + 1)


BEGIN = _back(12)
SERVER = {"shared_buffers": "512MB", "max_wal_size": "4GB"}  # the first as in the figures to beat
# Every segment lies in one month, as in the archive; half of a day's begin on Spot; eight GPUs each. Rows are
# made by their number, so that each month can be made by itself, and two at once.
_STEP_S = (NOW - BEGIN).total_seconds() / SEGMENTS
_ROWS = f"""
    select {{first}} (select min(id) from run) + n / 4 % {RUNS} as run_id,
        (select min(id) from label_set) + (n::bigint * 7919) % {LABELS} as label_set_id, 'gpu' as meter,
        'running' as phase, tstzrange(b.at, least(b.at + make_interval(secs => 600 + n::bigint * 104729 % 7200),
            date_trunc('month', b.at, 'UTC') + interval '1 month')) as period,
        8 as quantity, 2.4901 as usd, 4.1999 as list_usd, 'quoted' as price_source, 'firm' as confidence{{last}}
    from generate_series({{low}}, {{high}}) n, lateral (select timestamptz '{BEGIN.isoformat()}'
        + make_interval(secs => n * {_STEP_S})) b (at)
    where b.at >= timestamptz '{{since}}' and b.at < timestamptz '{{until}}'
"""
_WHO = (
    f"""
insert into label_set (hash, namespace, workload_kind, workload_name, team, cost_center, pool, provider, account,
    account_id, region, sku, tier, accelerator, accelerator_count)
select 'h' || n, 'ns-' || n % 300, 'Job', 'train-' || n, 'team-' || n % 40, '', 'pool-' || n % 25,
    'cloud-' || n % 5, 'default', '', 'r-' || n % 7, 'sku', case n % 3 when 0 then 'OnDemand' else 'Spot' end,
    'gpu-' || n % 12, 8
from generate_series(1, {LABELS}) n
""",
    f"""
insert into run (claim_uid, provider, account, resource_id, region, tier, accelerator, pool, pod_namespace,
    pod_name, pod_uid, changed_at, gone_at)
select 'c' || n, 'cloud-' || n % 5, 'default', 'm' || n, '', 'Spot', 'gpu:8', 'pool', 'ns', 'p', 'u' || n,
    case when n > {OPEN} then b.at else now() end, case when n > {OPEN} then b.at end
from generate_series(1, {RUNS}) n, lateral (select timestamptz '{BEGIN.isoformat()}'
    + make_interval(secs => n * {(NOW - BEGIN).total_seconds() / RUNS})) b (at)
""",
    f"""
insert into ledger_run (run_id, label_set_id, facts_at, prices_at, closed_at, billed_at, ended_at, waste_at,
    rules, begun_at, over_at)
select id, (select min(id) from label_set) + id % {LABELS}, changed_at, now(), c.at, c.at, c.at, c.at, '[]',
    now() - interval '1 day', c.at
from run, lateral (select case when id >= (select min(id) from run) + {OPEN} then now() end) c (at)
""",
    "alter table billing_segment drop constraint billing_segment_once_excl, set unlogged",
)


def _rows(month: int, *, first: str = "", last: str = "") -> str:
    """The rows of the month so many back."""
    since, until = _back(month), _back(month - 1) if month else NOW
    low, high = ((at - BEGIN).total_seconds() / _STEP_S for at in (since, until))
    edges = {"since": since.isoformat(), "until": until.isoformat()}
    return _ROWS.format(first=first, last=last, low=max(1, int(low) - 2), high=int(high) + 2, **edges)


def _archived(month: int) -> tuple[str, ...]:
    """A month's partition, filled before it is one: its indexes are made once, and nothing is logged."""
    first, name = _back(month).date(), ledger_periods.partition(_back(month).date())
    return (
        f"create unlogged table {name} (like billing_segment_archive including defaults)",
        f"""
insert into {name} (id, month, run_id, label_set_id, meter, phase, period, quantity, usd, list_usd,
    price_source, confidence, why, gpus, seconds, dollar_seconds)
select id, '{first}', run_id, label_set_id, meter, phase, period, quantity, usd, list_usd, price_source,
    confidence, '', 8, e.seconds, quantity * usd * e.seconds
from ({_rows(month, first="n as id,")}) s,
    lateral (select extract(epoch from upper(period) - lower(period)) as seconds) e
""",
        f"alter table billing_segment_archive attach partition {name}"
        f" for values from ('{first}') to ('{_back(month - 1).date()}')",
        f"vacuum analyze {name}",
    )


_HOT = tuple(
    f"""
insert into billing_segment (run_id, label_set_id, meter, phase, period, quantity, usd, list_usd, price_source,
    confidence, gpus, frozen) {_rows(month, last=", 8 as gpus, true as frozen")}
"""
    for month in (2, 1, 0)
)
_REST = (
    "drop index billing_segment_period_idx, billing_segment_begins_idx",
    *_HOT,
    f"""
insert into billing_segment (run_id, label_set_id, meter, phase, period, quantity, usd, list_usd, price_source,
    confidence, gpus, frozen)
select (select min(id) from run) + n - 1, (select min(id) from label_set) + n % {LABELS}, 'gpu:open', 'running',
    tstzrange(now() - interval '1 hour', null), 8, 2.4901, 4.1999, 'quoted', 'firm', 8, false
from generate_series(1, {OPEN}) n
""",
    "create index billing_segment_period_idx on billing_segment using gist (period)",
    "create index billing_segment_begins_idx on billing_segment (lower(period))",
    f"""
insert into closed_month (month, summed) select m::date, false from generate_series(
    timestamp '{BEGIN:%Y-%m-%d}', timestamp '{_back(1):%Y-%m-%d}', interval '1 month') m
""",
)


def fill(dsn: str) -> None:
    """Make the rows on an empty, migrated server; with two connections, since none of it waits."""

    def run(statements: Iterable[str]) -> None:
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("set maintenance_work_mem = '512MB'")
            conn.execute("set session_replication_role = replica")  # no trigger looks at each row
            for statement in statements:
                conn.execute(statement)

    run(_WHO)
    with ThreadPoolExecutor(2) as pool:
        parts = [_REST, *(_archived(month) for month in range(12, 2, -1))]
        for done in [pool.submit(run, part) for part in parts]:
            done.result()
    run(["vacuum analyze"])


@pytest.fixture(scope="module")
async def filled() -> AsyncIterator[AsyncEngine]:
    with DevPostgres(durable=False, settings=SERVER) as server:
        await migrate(server.url)
        began = time.monotonic()
        fill(server.dsn)
        print(f"\n{SEGMENTS:,} segments made in {time.monotonic() - began:.0f} s", flush=True)
        engine = create_engine(server.url, timeout_s=1800)
        yield engine
        await engine.dispose()


async def test_cost_31_reports_on_ten_million_segments(filled: AsyncEngine) -> None:
    print(f"\n{'question':<50} {'seconds':>8}  to beat")

    def note(what: str, seconds: float, beat: str) -> None:
        print(f"{what:<50} {seconds:8.3f}  {beat}", flush=True)

    async def best_of(times: int, ask: Callable[..., Awaitable[object]]) -> float:
        best = float("inf")
        for _ in range(times):
            async with begin(filled) as conn:
                began = time.monotonic()
                await ask(conn)
                best = min(best, time.monotonic() - began)
        return best

    def report(window: Window, group: str, unit: str | None) -> Callable[..., Awaitable[object]]:
        return lambda conn: costs.report(conn, window, groups=[group], unit=unit, where={})

    async with begin(filled) as conn:
        await get_or_create(conn, new_id="abcdefghij")
        epoch = await next_epoch(conn, 0)

    async def burn(conn: AsyncConnection) -> object:
        return await costs.rows(conn, costs.BURN)

    old, young = Window(since=_back(6), until=_back(5)), Window(since=_back(1), until=THIS)
    year = Window(since=_back(12), until=THIS)
    if RAW:
        note("archived month, from its segments", await best_of(2, report(old, "namespace", None)), "1")
        note("last month, from its segments", await best_of(2, report(young, "namespace", None)), "1")
    note("burn over 5,000 open segments", await best_of(5, burn), "0.01")

    days, longest, began = 0, 0.0, time.monotonic()
    while True:
        async with begin(filled) as conn:
            due = await ledger_upkeep.due_days(conn, grace_s=0)
        for day in due:
            async with begin(filled) as conn:
                started = time.monotonic()
                await ledger_upkeep.seal_day(conn, day, epoch=epoch)
                longest = max(longest, time.monotonic() - started)
        days += len(due)
        if not due:
            break
    note("one day's sums, mean of all", (time.monotonic() - began) / max(days, 1), "0.1")
    note("one day's sums, the longest", longest, "-")
    yesterday = (NOW - timedelta(days=1)).date()
    seal = await best_of(3, lambda conn: ledger_upkeep.seal_day(conn, yesterday, epoch=epoch))
    note("one day's sums, yesterday", seal, "0.1")
    note("month by namespace, from daily sums", await best_of(3, report(young, "namespace", None)), "0.3")
    now = Window(since=THIS, until=datetime.now(UTC))
    note("this month by namespace, now included", await best_of(3, report(now, "namespace", None)), "0.3")
    months, began = 0, time.monotonic()
    while True:
        async with begin(filled) as conn:
            if not await ledger_periods.sum_months(conn, epoch=epoch):
                break
        months += 1
    note("one month's sums, from its days", (time.monotonic() - began) / max(months, 1), "-")
    async with begin(filled) as conn:
        await conn.execute(text("analyze"))
    note("month by namespace, from a closed month", await best_of(3, report(young, "namespace", None)), "0.3")
    note("year by team and month, closed months", await best_of(3, report(year, "team", "month")), "0.2")
    note("year by namespace", await best_of(3, report(year, "namespace", None)), "2")
    note("what a report says of itself", await best_of(3, lambda conn: costs.footer(conn, now)), "-")
    note(
        "what /metrics is read from",
        await best_of(3, lambda conn: ledger_metrics.read(conn, epoch=epoch)),
        "-",
    )
    note("burn over 5,000 open segments", await best_of(5, burn), "0.01")
    assert months == 12
