"""What holds at this moment for every look at a gated Pod: live blocks, owners that wait, the time.

One statement instead of three, because each look of a burst needs them. Times are the database's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.store import blocks
from app.store.backoffs import Backoff
from app.store.blocks import Block


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Blocks in the order of `blocks.live`, the latest end first; back-offs by their owner's UID."""

    now: datetime
    blocks: Sequence[Block]
    backoffs: Mapping[str, Backoff]


_READ = text("""
    select clock_timestamp() as now,
        (select jsonb_agg(to_jsonb(b) order by b.expires_at desc, b.id) from block b
            where b.expires_at > clock_timestamp()) as blocks,
        (select jsonb_agg(to_jsonb(o)) from owner_backoff o where o.until > clock_timestamp()) as backoffs
""")


async def read(conn: AsyncConnection) -> Standing:
    """As it stands now."""
    row = (await conn.execute(_READ)).one()
    waiting = (
        Backoff(
            owner_uid=one["owner_uid"],
            failures=one["failures"],
            message=one["message"],
            until=_time(one["until"]),
        )
        for one in row.backoffs or ()
    )
    return Standing(
        now=row.now,
        blocks=[
            blocks.of_row(one | {name: _time(one[name]) for name in ("created_at", "expires_at")})
            for one in row.blocks or ()
        ],
        backoffs={one.owner_uid: one for one in waiting},
    )


def _time(text_: str) -> datetime:
    return datetime.fromisoformat(text_).astimezone(UTC)
