"""Runs as provisioning writes them, for tests of the ledger: a valid one, of which a test names its part."""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.ledger.writer import Writer
from app.store import ledger_rules
from app.store.engine import begin
from app.store.installation import get_or_create, next_epoch
from providers.base import BillingRule, BillsFrom, BillsUntil

T0 = datetime(2026, 3, 1, 12, tzinfo=UTC)
RULE = BillingRule(kind=None, starts=BillsFrom.ACCEPTED, until=BillsUntil.TERMINATE_ASKED, step_s=0)
_numbers = itertools.count(1)


def at(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


def gpu(usd: str | None, quantity: int = 8) -> dict[str, Any]:
    return {"kind": "gpu", "quantity": str(quantity), "usd": usd, "label": ""}


@dataclass
class Books:
    """One database with a leader."""

    engine: AsyncEngine
    epoch: int = 0
    writer: Writer = field(init=False)

    async def open(self, *rules: BillingRule) -> "Books":
        async with begin(self.engine) as conn:
            await get_or_create(conn, new_id="abcdefghij")
            self.epoch = await next_epoch(conn, 0)
            await ledger_rules.put_rules(
                conn,
                provider="modal",
                account="default",
                rules=rules or (RULE,),
                bills=False,
                epoch=self.epoch,
            )
        self.writer = Writer(engine=self.engine)
        return self

    async def run(
        self,
        *,
        meters: Sequence[Mapping[str, Any]] = (gpu("2.49"),),
        labels: Mapping[str, str] | None = None,
        **columns: Any,
    ) -> int:
        """A run's id; its claim says who pays. Accepted at `T0`, by the cloud's clock too."""
        number = next(_numbers)
        row: dict[str, Any] = {
            "claim_uid": f"c-{number}",
            "attempt": 1,
            "provider": "modal",
            "account": "default",
            "resource_id": f"m-{number}",
            "region": "us-east",
            "tier": "OnDemand",
            "accelerator": "H100:8",
            "pool": "gpu",
            "pod_namespace": "team-a",
            "pod_name": f"train-{number}",
            "pod_uid": f"p-{number}",
            "requested_at": T0,
            "accepted_at": T0,
            "first_seen_at": T0,
            "provider_created_at": T0,
        } | columns
        names = ", ".join(row)
        values = ", ".join(f":{name}" for name in row)
        async with begin(self.engine) as conn:
            await conn.execute(
                text(
                    "insert into claim (uid, name, pod_namespace, pod_name, pod_uid, pool, provider, account,"
                    " region, tier, accelerator, phase, resource_version, created_at, workload_kind,"
                    " workload_name, labels) values (:claim_uid, :claim_uid, :pod_namespace, :pod_name,"
                    " :pod_uid, :pool, :provider, :account, :region, :tier, :accelerator, '', 1,"
                    " :requested_at, 'Deployment', 'train', cast(:labels as jsonb))"
                    " on conflict do nothing"
                ),
                row | {"labels": json.dumps({"team": "vision"} if labels is None else dict(labels))},
            )
            found = await conn.execute(
                text(
                    f"insert into run ({names}, meters) values ({values}, cast(:meters as jsonb))"
                    " returning id"
                ),
                row | {"meters": json.dumps(list(meters))},
            )
            return int(found.scalar_one())

    async def change(self, run_id: int, **columns: Any) -> None:
        json_columns = {"meters", "repriced", "stops"}
        changes = ", ".join(
            f"{name} = cast(:{name} as jsonb)" if name in json_columns else f"{name} = :{name}"
            for name in columns
        )
        await self.sql(f"update run set {changes} where id = :id", id=run_id, **columns)

    async def over(self, run_id: int, *, after_s: float, **columns: Any) -> None:
        """The machine was terminated so long after `T0`, by the cloud's own word."""
        values = {"end_reason": "terminated", "provider_ended_at": at(after_s)} | columns
        await self.change(run_id, gone_at=at(after_s + 1), terminate_asked_at=at(after_s), **values)

    async def tick(self) -> int:
        return await self.writer.tick(epoch=self.epoch)

    async def sql(self, query: str, **values: Any) -> list[dict[str, Any]]:
        async with begin(self.engine) as conn:
            found = await conn.execute(text(query), values)
            return [dict(row) for row in found.mappings()] if found.returns_rows else []

    async def segments(self, run_id: int) -> list[dict[str, Any]]:
        return await self.sql(
            'select meter, phase, lower(period) as start, upper(period) as "end", quantity, usd, list_usd,'
            " price_source, confidence, frozen, dollar_seconds from billing_segment where run_id = :run"
            " order by lower(period), meter",
            run=run_id,
        )

    async def adjustments(self, run_id: int) -> list[dict[str, Any]]:
        return await self.sql(
            "select kind, meter, at, seconds, dollar_seconds from billing_adjustment where run_id = :run"
            " order by id",
            run=run_id,
        )

    async def cost(
        self, since: datetime | None = None, until: datetime | None = None, **where: Any
    ) -> Decimal:
        """Dollar-seconds, by the function that every report reads."""
        wanted = " and ".join(f"l.{name} = :{name}" for name in where) or "true"
        rows = await self.sql(
            "select coalesce(sum(c.billed_dollar_seconds), 0) as sum from cost_lines(:since,"
            " :until, 'all', 'UTC') c"
            f" join label_set l on l.id = c.label_set_id where {wanted}",
            since=since or at(-86400 * 400),
            until=until or at(86400 * 400),
            **where,
        )
        return rows[0]["sum"]
