"""What is left of accounts that are paid in advance: the newest balance that each cloud has told."""

from decimal import Decimal

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

_PUT = text("""
    insert into provider_balance (provider, account, usd, usd_per_hour)
    select :provider, :account, cast(:usd as numeric), cast(:usd_per_hour as numeric)
    from installation where epoch = :epoch
    on conflict (provider, account) do update
        set usd = excluded.usd, usd_per_hour = excluded.usd_per_hour, observed_at = now()
""")


async def put(
    conn: AsyncConnection,
    *,
    provider: str,
    account: str,
    usd: Decimal,
    usd_per_hour: Decimal | None,
    epoch: int,
) -> None:
    """Keep an account's balance in dollars; ``usd_per_hour`` is what its cloud says is being spent."""
    values = {"provider": provider, "account": account, "usd": usd, "usd_per_hour": usd_per_hour}
    await conn.execute(_PUT, values | {"epoch": epoch})
