"""Owners whose Pods end by themselves again and again, and until when no machine is rented for the next one.

One row an owner's UID. Pods that ran side by side and failed together count once: what counts is a failure of
a machine rented after the last one that counted. A run of some length, or a long silence, begins the count
anew. Times are the database's. Every function runs in the caller's transaction.
"""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import delete, func, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.store import tables

MESSAGE_CHARS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long an owner waits: ``base_s`` after the first failure, doubled after each, at most ``max_s``.

    A Pod that ran for ``reset_s`` was no part of a loop.
    """

    base_s: float
    max_s: float
    reset_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One end that its Pod's restartPolicy would answer with a restart. ``ran_s``: how long it had run."""

    owner_uid: str
    claim_uid: str
    message: str
    ran_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """One row."""

    owner_uid: str
    failures: int
    message: str
    until: datetime


# The wait is computed from the count that the same statement settles, so that two ends noted at one moment
# cannot both start from the old one: the second waits for the row and then sees the first.
_NOTE = text("""
    insert into owner_backoff as held (owner_uid, failures, claim_uid, message, failed_at, until)
    values (:owner_uid, 1, :claim_uid, :message, clock_timestamp(),
            clock_timestamp() + make_interval(secs => cast(:base_s as float8)))
    on conflict (owner_uid) do update set (failures, claim_uid, message, failed_at, until) = (
        select count.failures, excluded.claim_uid, excluded.message,
            case when news.anew or news.later then excluded.failed_at else held.failed_at end,
            greatest(held.until, excluded.failed_at + make_interval(secs => least(
                cast(:max_s as float8), cast(:base_s as float8) * power(2, least(count.failures - 1, 30)))))
        from (
            select cast(:ran_s as float8) >= cast(:reset_s as float8)
                    or held.until + make_interval(secs => cast(:reset_s as float8)) < excluded.failed_at
                    as anew,
                coalesce((select created_at > held.failed_at from rental where claim_uid = :claim_uid), true)
                    as later
        ) news, lateral (
            select case when news.anew then 1 when news.later then held.failures + 1 else held.failures end
                as failures
        ) count
    )
    where held.claim_uid <> excluded.claim_uid
    returning until
""")


async def note(conn: AsyncConnection, failure: Failure, *, pace: Pace) -> datetime | None:
    """Count a failure, once for each claim; until when the owner waits now. None: it was counted before."""
    values = {
        "owner_uid": failure.owner_uid,
        "claim_uid": failure.claim_uid,
        # A cloud's own words: the one character that no text column takes must not cost the record.
        "message": failure.message.replace("\0", "")[:MESSAGE_CHARS],
        "ran_s": failure.ran_s,
        "base_s": pace.base_s,
        "max_s": pace.max_s,
        "reset_s": pace.reset_s,
    }
    until: datetime | None = (await conn.execute(_NOTE, values)).scalar_one_or_none()
    return until


async def prune(conn: AsyncConnection, *, older_than_s: float) -> int:
    """Forget owners that have not waited for ``older_than_s`` seconds; returns how many."""
    limit = func.clock_timestamp() - func.make_interval(0, 0, 0, 0, 0, 0, older_than_s)
    table = tables.OwnerBackoff
    return (await conn.execute(delete(table).where(table.until < limit))).rowcount
