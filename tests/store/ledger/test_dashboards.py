"""The money dashboard's queries, each run by the role that may read the reports and nothing else."""

import json
from pathlib import Path

import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from app.store.engine import begin
from app.store.views import let_read

MONEY = Path(__file__).resolve().parents[3] / "chart" / "files" / "dashboards" / "money.json"
COLUMNS = {"time_series": {"time", "metric", "value"}, "table": set[str]()}


async def test_every_query_of_the_dashboard_runs_as_the_report_role(
    engine: AsyncEngine, database_url: str
) -> None:
    async with begin(engine) as conn:
        await conn.exec_driver_sql("create role dashboards")
        await conn.run_sync(let_read, "dashboards")
    seen = 0
    try:
        with psycopg.connect(database_url.replace("+asyncpg", "")) as reader:
            reader.execute("set role dashboards")
            for panel in json.loads(MONEY.read_text())["panels"]:
                for target in panel["targets"]:
                    if "rawSql" not in target:
                        continue
                    seen += 1
                    found = reader.execute(target["rawSql"])
                    names = {column.name for column in found.description or ()}
                    assert names >= COLUMNS[target["format"]], panel["title"]
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                reader.execute("select * from run")
            reader.rollback()
    finally:
        async with begin(engine) as conn:
            await conn.exec_driver_sql("drop owned by dashboards")
            await conn.exec_driver_sql("drop role dashboards")
    assert seen >= 9
