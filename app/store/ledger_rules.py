"""How clouds bill, as their adapters declare it, kept beside the runs that are billed by it."""

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import orjson
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from providers.base import BillingRule, BillsFrom, BillsUntil, MeterKind


def rules_to_json(rules: Sequence[BillingRule]) -> list[dict[str, Any]]:
    """As kept in ``billing_rule``."""
    return [
        {
            "kind": None if rule.kind is None else rule.kind.value,
            "starts": rule.starts.value,
            "until": rule.until.value,
            "step_s": rule.step_s,
            "minimum_s": rule.minimum_s,
            "reclaim_free_s": rule.reclaim_free_s,
            "stopped_times": format(rule.stopped_times, "f"),
        }
        for rule in rules
    ]


def rules_from_json(items: Iterable[Mapping[str, Any]]) -> tuple[BillingRule, ...]:
    return tuple(
        BillingRule(
            kind=None if item["kind"] is None else MeterKind(item["kind"]),
            starts=BillsFrom(item["starts"]),
            until=BillsUntil(item["until"]),
            step_s=item["step_s"],
            minimum_s=item["minimum_s"],
            reclaim_free_s=item["reclaim_free_s"],
            stopped_times=Decimal(item["stopped_times"]),
        )
        for item in items
    )


_PUT_RULES = text("""
    insert into billing_rule (provider, account, rules, bills)
    select :provider, :account, cast(:rules as jsonb), :bills from installation where epoch = :epoch
    on conflict (provider, account) do update
        set rules = excluded.rules, bills = excluded.bills, observed_at = now()
        where (billing_rule.rules, billing_rule.bills) is distinct from (excluded.rules, excluded.bills)
""")


async def put_rules(
    conn: AsyncConnection,
    *,
    provider: str,
    account: str,
    rules: Sequence[BillingRule],
    bills: bool,
    epoch: int,
) -> None:
    """Write down how an account's cloud bills; ``bills``: whether it tells afterwards what it charged."""
    values = {"provider": provider, "account": account, "bills": bills, "epoch": epoch}
    values["rules"] = orjson.dumps(rules_to_json(rules)).decode()
    await conn.execute(_PUT_RULES, values)
