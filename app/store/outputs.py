"""The tail of what ended workloads have written: what ``kubectl logs`` shows once the machine is gone.

In Postgres and not on a volume: every replica may be asked, a new leader must have it, and it goes with the
same backup. Bounded for each Pod by whoever saves it, and in all by `save`, which lets the oldest go.
"""

from datetime import datetime

from sqlalchemy import Integer, LargeBinary, delete, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import Mapped, mapped_column

from app.store.tables import NOW, Base


class OutputTail(Base):
    """One ended workload's last output."""

    __tablename__ = "output_tail"
    __table_args__ = (
        {"comment": "The last output of ended workloads, for kubectl logs. Written by provisioning/."},
    )

    pod_uid: Mapped[str] = mapped_column(primary_key=True, comment="whose output it is; one tail a Pod")
    claim_uid: Mapped[str] = mapped_column(comment="of the machine that wrote it")
    records: Mapped[bytes] = mapped_column(
        LargeBinary, comment="zlib: times, streams and bytes; see app.machines.tail"
    )
    size_bytes: Mapped[int] = mapped_column(Integer, comment="of records; their sum is what is bounded")
    saved_at: Mapped[datetime] = mapped_column(
        server_default=NOW, index=True, comment="the oldest go first when all are too many"
    )


async def save(
    conn: AsyncConnection, *, pod_uid: str, claim_uid: str, records: bytes, limit_bytes: int
) -> None:
    """Keep a Pod's tail, in the place of an earlier one; the oldest of others go above ``limit_bytes``."""
    row = {"pod_uid": pod_uid, "claim_uid": claim_uid, "records": records, "size_bytes": len(records)}
    fresh = insert(OutputTail).values(row)
    await conn.execute(
        fresh.on_conflict_do_update(index_elements=["pod_uid"], set_=row | {"saved_at": func.now()})
    )
    newest_first = func.sum(OutputTail.size_bytes).over(
        order_by=(OutputTail.saved_at.desc(), OutputTail.pod_uid), rows=(None, 0)
    )
    running = select(OutputTail.pod_uid, newest_first.label("total")).subquery()
    old = select(running.c.pod_uid).where(running.c.total > limit_bytes)
    await conn.execute(delete(OutputTail).where(OutputTail.pod_uid.in_(old)))


async def load(conn: AsyncConnection, pod_uid: str) -> bytes | None:
    """The records of a Pod's tail."""
    found: bytes | None = (
        await conn.execute(select(OutputTail.records).where(OutputTail.pod_uid == pod_uid))
    ).scalar_one_or_none()
    return found
