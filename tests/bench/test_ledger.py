"""How fast the reports are on ten million segments: a table beside the figures to beat, and no assertion on time.

``SEGMENTS`` makes another number of them (the default takes the better part of an hour to make on two cores,
most of it the index on periods). Never in CI.
"""

import os
import time
from collections.abc import AsyncIterator

import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from app.store import costs, ledger_upkeep
from app.store.costs import Window
from app.store.devserver import DevPostgres
from app.store.engine import begin, create_engine

SEGMENTS = int(os.environ.get("SEGMENTS") or 10_000_000)
LABELS = 3_600
OPEN = 5_000
_MAKE = f"""
insert into label_set (hash, namespace, workload_kind, workload_name, team, cost_center, pool, provider, account,
    account_id, region, sku, tier, accelerator, accelerator_count)
select 'h' || n, 'ns-' || n % 300, 'Job', 'train-' || n, 'team-' || n % 40, '', 'pool-' || n % 25,
    'cloud-' || n % 5, 'default', '', 'r-' || n % 7, 'sku', case n % 3 when 0 then 'OnDemand' else 'Spot' end,
    'gpu-' || n % 12, 8
from generate_series(1, {LABELS}) n;
insert into run (claim_uid, provider, account, resource_id, region, tier, accelerator, pool, pod_namespace,
    pod_name, pod_uid)
select 'c' || n, 'cloud-' || n % 5, 'default', 'm' || n, '', 'Spot', 'gpu:8', 'pool', 'ns', 'p', 'u' || n
from generate_series(1, {max(OPEN, SEGMENTS // 4)}) n;
alter table billing_segment drop constraint billing_segment_once_excl;
drop index billing_segment_period_idx, billing_segment_begins_idx;
insert into billing_segment (run_id, label_set_id, meter, phase, period, quantity, usd, list_usd, price_source,
    confidence, gpus, frozen)
select (select min(id) from run) + n / 4 % {max(OPEN, SEGMENTS // 4)},
    (select min(id) from label_set) + (n::bigint * 7919) % {LABELS}, 'gpu', 'running',
    tstzrange(b.at, b.at + make_interval(secs => 600 + n::bigint * 104729 % 7200)), 8, 2.4901, 4.1999, 'quoted',
    'firm', 8, true
from generate_series(1, {SEGMENTS}) n,
    lateral (select timestamptz '2025-01-01' + make_interval(secs => n * 31536000.0 / {SEGMENTS})) b (at);
insert into billing_segment (run_id, label_set_id, meter, phase, period, quantity, usd, list_usd, price_source,
    confidence, gpus, frozen)
select (select min(id) from run) + n - 1, (select min(id) from label_set) + n % {LABELS}, 'gpu:open', 'running',
    tstzrange(now() - interval '1 hour', null), 8, 2.4901, 4.1999, 'quoted', 'firm', 8, false
from generate_series(1, {OPEN}) n;
create index billing_segment_period_idx on billing_segment using gist (period);
create index billing_segment_begins_idx on billing_segment (lower(period));
"""


@pytest.fixture(scope="module")
async def filled() -> AsyncIterator[AsyncEngine]:
    from app.store.migrate import migrate

    with DevPostgres(durable=False) as server:
        await migrate(server.url)
        began = time.monotonic()
        with psycopg.connect(server.dsn, autocommit=True) as conn:
            for statement in _MAKE.split(";"):
                if statement.strip():
                    conn.execute(statement)
            conn.execute("vacuum analyze")
        print(f"\n{SEGMENTS:,} segments made in {time.monotonic() - began:.0f} s")
        engine = create_engine(server.url, timeout_s=600)
        yield engine
        await engine.dispose()


async def test_cost_31_reports_on_ten_million_segments(filled: AsyncEngine) -> None:
    month = Window(since=_day("2025-06-01"), until=_day("2025-07-01"))
    year = Window(since=_day("2025-01-01"), until=_day("2026-01-01"))
    took: list[tuple[str, float, str]] = []

    async def timed(what: str, beat: str, window: Window | None, groups: list[str], unit: str | None) -> None:
        async with begin(filled) as conn:
            best = float("inf")
            for _ in range(3):
                began = time.monotonic()
                if window is None:
                    await costs.rows(conn, costs.BURN)
                else:
                    await costs.report(conn, window, groups=groups, unit=unit, where={})
                best = min(best, time.monotonic() - began)
        took.append((what, best, beat))

    await timed("month by namespace, from the segments", "-", month, ["namespace"], None)
    await timed("burn over 5,000 open segments", "0.01", None, [], None)
    days = 0
    began = time.monotonic()
    while True:
        async with begin(filled) as conn:
            due = await ledger_upkeep.due_days(conn, grace_s=3600)
        for day in due:
            async with begin(filled) as conn:
                await ledger_upkeep.seal_day(conn, day, epoch=books.epoch)
        days += len(due)
        if not due:
            break
    took.append(("one day's sums", (time.monotonic() - began) / max(days, 1), "0.1"))
    await timed("month by namespace, from daily sums", "0.3", month, ["namespace"], None)
    await timed("year by team and month", "0.2", year, ["team"], "month")

    print(f"\n{'question':<42} {'seconds':>8}  to beat")
    for what, seconds, beat in took:
        print(f"{what:<42} {seconds:8.3f}  {beat}")
    assert len(took) == 5


def _day(text: str) -> "costs.datetime":
    from datetime import UTC, datetime

    return datetime.fromisoformat(text).replace(tzinfo=UTC)
