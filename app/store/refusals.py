"""How orders have fared lately, by the place where they were made; a summary of attempts, for placement.

Only orders that were answered count: a refusal of the cloud, or a machine. Whatever was ordered, the place is
the same: a place that has just refused one shape may well have another.
"""

from datetime import timedelta

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

LATELY = timedelta(hours=1)

Place = tuple[str, str, str, str]
"""Provider, account, region token, tier."""

_IN_A_ROW = text("""
    with answered as (
        select provider, account, region, tier, outcome = 'rejected' as refused, settled_at
        from provision_attempt
        where settled_at > clock_timestamp() - make_interval(secs => cast(:within_s as float8))
            and outcome in ('rejected', 'accepted', 'found')
    ), served as (
        select provider, account, region, tier, max(settled_at) as at
        from answered where not refused group by provider, account, region, tier
    )
    select provider, account, region, tier, count(*) as times
    from answered left join served using (provider, account, region, tier)
    where refused and (at is null or settled_at > at)
    group by provider, account, region, tier
""")


async def in_a_row(conn: AsyncConnection, *, within: timedelta = LATELY) -> dict[Place, int]:
    """How often each place has refused since it last gave a machine, within this time; none without any."""
    rows = await conn.execute(_IN_A_ROW, {"within_s": within.total_seconds()})
    return {(row.provider, row.account, row.region, row.tier): row.times for row in rows}
