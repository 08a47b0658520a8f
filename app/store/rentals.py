"""Rentals, attempts and runs: the rows that keep a machine from doubling or leaking.

Every change of state is one statement, a compare-and-set that also carries the leader's epoch; zero rows mean
that somebody else was first. Nothing here decides; `app.provisioning` does. Times are the database's.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import orjson
from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncConnection

from providers.base import ClaimUid, ResourceId


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRow:
    """One attempt. ``outcome`` None: it may have taken effect. ``*_s``: seconds on the database's clock."""

    number: int
    sequence: int
    identity: str | None
    request_hash: str | None
    ceiling_usd_per_hour: Decimal | None
    region: str
    sends: int
    send_by: datetime
    send_by_in_s: float
    age_s: float
    outcome: str | None
    rejection: str | None
    message: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One machine of the claim. ``seen``: a list or get has shown it."""

    attempt: int | None
    resource_id: ResourceId
    region: str
    usd_per_hour: Decimal | None
    extra: bool
    seen: bool
    gone: bool
    accepted_ago_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """All that is written of one claim, in the store of ``installation``. ``state`` None: no rental row."""

    installation: str | None = None
    state: str | None
    resource_id: ResourceId | None
    resource_region: str | None
    attempts: tuple[AttemptRow, ...]
    runs: tuple[RunRow, ...]
    avoid_hosts: frozenset[str]

    def unsettled(self) -> tuple[AttemptRow, ...]:
        return tuple(attempt for attempt in self.attempts if attempt.outcome is None)


NO_ROWS = Rows(
    state=None, resource_id=None, resource_region=None, attempts=(), runs=(), avoid_hosts=frozenset()
)

_ATTEMPTS = """
    select coalesce(jsonb_agg(jsonb_build_object(
        'number', number, 'sequence', sequence, 'identity', identity, 'request_hash', request_hash,
        'ceiling_usd_per_hour', ceiling_usd_per_hour::text, 'region', region, 'sends', sends,
        'send_by', send_by, 'send_by_in_s', extract(epoch from send_by - clock_timestamp())::float8,
        'age_s', extract(epoch from clock_timestamp() - created_at)::float8,
        'outcome', outcome, 'rejection', rejection, 'message', message) order by number), '[]'::jsonb)
    from provision_attempt a where a.claim_uid = asked.uid
"""
_RUNS = """
    select coalesce(jsonb_agg(jsonb_build_object(
        'attempt', attempt, 'resource_id', resource_id, 'region', region, 'usd_per_hour', usd_per_hour::text,
        'extra', extra, 'seen', first_seen_at is not null, 'gone', gone_at is not null,
        'accepted_ago_s', extract(epoch from clock_timestamp() - accepted_at)::float8) order by id),
        '[]'::jsonb)
    from run where run.claim_uid = asked.uid
"""
_LOAD = text(f"""
    select asked.uid, i.id as installation, r.state, r.resource_id, r.resource_region,
        ({_ATTEMPTS}) as attempts, ({_RUNS}) as runs,
        array(select host from block where provider = asked.provider and account = asked.account
              and host is not null and expires_at > clock_timestamp()) as hosts
    from unnest(cast(:uids as text[]), cast(:providers as text[]), cast(:accounts as text[]))
        as asked (uid, provider, account)
        cross join installation i left join rental r on r.claim_uid = asked.uid
""")


async def load(conn: AsyncConnection, uid: ClaimUid, *, provider: str, account: str) -> Rows:
    """Everything about one claim, in one statement."""
    return (await load_many(conn, [(uid, provider, account)]))[uid]


async def load_many(
    conn: AsyncConnection, asked: Collection[tuple[ClaimUid, str, str]]
) -> dict[ClaimUid, Rows]:
    """Everything about these claims, each with its provider and account, in one statement."""
    values = {
        "uids": [uid for uid, _, _ in asked],
        "providers": [provider for _, provider, _ in asked],
        "accounts": [account for _, _, account in asked],
    }
    found = {row.uid: _rows(row) for row in await conn.execute(_LOAD, values)}
    # None at all in a store that was emptied, and is nobody's yet.
    return {uid: found.get(uid, NO_ROWS) for uid, _, _ in asked}


def _rows(row: Row[Any]) -> Rows:
    return Rows(
        installation=row.installation,
        state=row.state,
        resource_id=row.resource_id,
        resource_region=row.resource_region,
        attempts=tuple(
            AttemptRow(**_exact(item, "ceiling_usd_per_hour") | {"send_by": _time(item["send_by"])})
            for item in row.attempts
        ),
        runs=tuple(RunRow(**_exact(item, "usd_per_hour")) for item in row.runs),
        avoid_hosts=frozenset(row.hosts),
    )


def _exact(item: dict[str, Any], money: str) -> dict[str, Any]:
    """JSON would make money a float: it travels as text."""
    return item | {money: None if item[money] is None else Decimal(item[money])}


def _time(text_: str) -> datetime:
    return datetime.fromisoformat(text_).astimezone(UTC)


async def next_sequences(conn: AsyncConnection, *, above: int, count: int = 1) -> list[int]:
    """Sequence numbers above ``above``, rising, for the caller alone; all that are given out later exceed it.

    Fewer than ``count`` where others were given out up to ``above`` meanwhile, but never none.
    """
    drawn = await conn.execute(
        text("select nextval('attempt_sequence') from generate_series(1, :count)"), {"count": count}
    )
    if numbers := sorted(number for number in drawn.scalars() if number > above):
        return numbers
    raised = text("""
        select setval('attempt_sequence', greatest(:above, (select last_value from attempt_sequence)) + 1)
    """)
    return [int((await conn.execute(raised, {"above": above})).scalar_one())]


RENTAL_COLUMNS = (
    "claim_uid",
    "claim_name",
    "pod_namespace",
    "pod_name",
    "pod_uid",
    "pool",
    "provider",
    "account",
    "region",
    "tier",
    "accelerator",
)
_RENTAL = f"insert into rental ({', '.join(RENTAL_COLUMNS)}, state, epoch)"
# Made by the leader alone: a row of somebody who has lost the Lease would be kept open by nobody.
_OPENED = f"""
    {_RENTAL} select {", ".join(":" + name for name in RENTAL_COLUMNS)}, 'open', :epoch
    from installation where epoch = :epoch
"""

_OPEN = text(f"{_OPENED} on conflict (claim_uid) do nothing")


async def open_rental(conn: AsyncConnection, claim: Mapping[str, str], *, epoch: int) -> None:
    """Make the rental row, open, unless there is one."""
    await conn.execute(_OPEN, {**claim, "epoch": epoch})


_INTENT = text(f"""
    with row as (
        {_OPENED} on conflict (claim_uid) do update set epoch = rental.epoch
        returning state
    )
    insert into provision_attempt (claim_uid, number, sequence, identity, request_hash, provider, account,
        region, tier, accelerator, shape, ceiling_usd_per_hour, epoch, send_by, created_at)
    select :claim_uid, cast(:number as int), :sequence, :identity, :request_hash, :provider, :account,
        :region, :tier, :accelerator, :shape, :ceiling, :epoch,
        clock_timestamp() + make_interval(secs => cast(:window_s as float8)), clock_timestamp()
    from row, installation i
    where row.state = 'open' and i.epoch = :epoch and not exists (
        select from provision_attempt a where a.claim_uid = :claim_uid and a.outcome is null)
    returning send_by
""")


async def intend(
    conn: AsyncConnection,
    claim: Mapping[str, str],
    *,
    epoch: int,
    number: int,
    sequence: int,
    identity: str,
    request_hash: str,
    shape: str,
    ceiling: Decimal | None,
    window_s: float,
) -> datetime | None:
    """Lock the rental (made open if missing) and insert an attempt; its ``send_by``, or None if not allowed.

    Not allowed: the rental is not open, the epoch is not ours (then no rental is made, either), or an attempt
    is unsettled.
    """
    values = {
        **claim,
        "epoch": epoch,
        "number": number,
        "sequence": sequence,
        "identity": identity,
        "request_hash": request_hash,
        "shape": shape,
        "ceiling": ceiling,
        "window_s": window_s,
    }
    return (await conn.execute(_INTENT, values)).scalar_one_or_none()


_REBUILD = text("""
    insert into provision_attempt (claim_uid, number, sequence, provider, account, region, tier, accelerator,
        epoch, send_by)
    select claim_uid, (select coalesce(max(number), 0) + 1 from provision_attempt a where a.claim_uid = :uid),
        :sequence, provider, account, region, tier, accelerator, :epoch, :send_by
    from rental where claim_uid = :uid and (select epoch from installation) = :epoch
    on conflict (claim_uid, sequence) do update set outcome = null, settled_at = null, rejection = null,
        message = null, identity = null, request_hash = null, send_by = excluded.send_by
    where provision_attempt.send_by < excluded.send_by
""")


async def rebuild_attempt(
    conn: AsyncConnection, uid: ClaimUid, *, sequence: int, send_by: datetime, epoch: int
) -> None:
    """Write down, unsettled, an attempt that only the claim's mark remembers.

    An older one of the same number, of a time before a restore, gives way to it.
    """
    await conn.execute(_REBUILD, {"uid": uid, "sequence": sequence, "send_by": send_by, "epoch": epoch})


_FENCE = text("""
    select asked.uid, asked.number, asked.epoch
    from unnest(cast(:uids as text[]), cast(:numbers as int[]), cast(:epochs as bigint[]))
        as asked (uid, number, epoch)
        join installation i on i.epoch = asked.epoch
        join rental r on r.claim_uid = asked.uid and r.state = 'open'
        join provision_attempt a on a.claim_uid = asked.uid and a.number = asked.number and a.outcome is null
""")
Sending = tuple[ClaimUid, int, int]
"""Who is about to send: the claim, the attempt's number, and the epoch of the leader that would."""


async def fence(conn: AsyncConnection, asked: Collection[Sending]) -> set[Sending]:
    """Which of these may be sent now, as far as rows tell."""
    values = {
        "uids": [uid for uid, _, _ in asked],
        "numbers": [number for _, number, _ in asked],
        "epochs": [epoch for _, _, epoch in asked],
    }
    return {(row.uid, row.number, row.epoch) for row in await conn.execute(_FENCE, values)}


_REPLAY = text("""
    update provision_attempt a
    set sends = a.sends + 1, send_by = clock_timestamp() + make_interval(secs => cast(:window_s as float8))
    from rental r, installation i
    where a.claim_uid = :uid and a.number = :number and a.outcome is null and a.request_hash = :request_hash
        and r.claim_uid = :uid and r.state = 'open' and i.epoch = :epoch
        and clock_timestamp() + make_interval(secs => cast(:window_s as float8) + cast(:effect_s as float8))
            <= a.created_at + make_interval(secs => :replay_for_s)
    returning a.send_by
""")


async def replay(
    conn: AsyncConnection,
    uid: ClaimUid,
    *,
    number: int,
    request_hash: str,
    epoch: int,
    window_s: float,
    effect_s: float,
    replay_for_s: float,
) -> datetime | None:
    """Count one more send of the same attempt; its new ``send_by``, or None if it may not be sent again.

    ``effect_s``: how long after ``send_by`` a send can still take effect.
    """
    values = {
        "uid": uid,
        "number": number,
        "request_hash": request_hash,
        "epoch": epoch,
        "window_s": window_s,
        "effect_s": effect_s,
        "replay_for_s": replay_for_s,
    }
    return (await conn.execute(_REPLAY, values)).scalar_one_or_none()


_SETTLE = text("""
    update provision_attempt set outcome = cast(:outcome as text), settled_at = clock_timestamp(),
        rejection = :rejection, message = :message
    where claim_uid = :uid and number = :number and outcome is null
        and (sends = 1 or cast(:outcome as text) = 'absent')
        and (select epoch from installation) = :epoch
""")


async def settle(
    conn: AsyncConnection,
    uid: ClaimUid,
    *,
    number: int,
    outcome: str,
    epoch: int,
    rejection: str | None = None,
    message: str | None = None,
) -> bool:
    """Close one attempt; False when it was closed already or the epoch is not ours.

    What one send has come to (``unsent``, ``throttled``, a rejection) closes only an attempt that has no
    other: after a second send, whoever made it, the machine may be there all the same.
    """
    values = {
        "uid": uid,
        "number": number,
        "outcome": outcome,
        "epoch": epoch,
        "rejection": rejection,
        "message": message[:1000] if message else message,
    }
    return (await conn.execute(_SETTLE, values)).rowcount == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """A machine that exists for a claim, as first learned. Prices in dollars an hour, clocks named."""

    attempt: int | None  # None: no row of an attempt is known to have made it
    resource_id: ResourceId
    region: str
    account_id: str | None
    meters: Sequence[Mapping[str, str | None]]
    usd_per_hour: Decimal | None
    accepted: bool
    seen: bool
    provider_created_at: datetime | None
    clock_offset_s: float | None = None
    terminate_asked_at: datetime | None = None  # by another clock, and so kept within what can be true
    gone: bool = False  # proven, and written down afterwards: of its life only the ends are known


# A second machine of one attempt (a replay outside its promise) gets no attempt number: the pair is unique.
# A machine that is gone was there when it was ordered, or at the latest when its end was asked for; one that
# nobody saw, and whose attempt was proven to have made none, was gone by then.
_RECORD = text("""
    with moment as (
        select t.now, a.created_at as requested_at, t.asked_at,
            case when :gone then coalesce(a.created_at, t.asked_at, t.now) else t.now end as accepted_at,
            case when :gone then coalesce(t.asked_at, a.created_at, t.now) else t.now end as seen_at,
            case when :gone and not :seen and a.outcome = 'absent' then a.settled_at
                when :gone then t.now end as gone_at
        from (select n.now, case when cast(:terminate_asked_at as timestamptz) is not null then least(n.now,
                greatest(cast(:terminate_asked_at as timestamptz), cast(:provider_created_at as timestamptz)))
                end as asked_at from (select clock_timestamp() as now) n) t
            left join provision_attempt a on a.claim_uid = :claim_uid and a.number = cast(:attempt as int)
    ), won as (
        update rental set state = 'live', resource_id = :resource_id, resource_region = :run_region,
            live_at = clock_timestamp(), epoch = :epoch
        where claim_uid = :claim_uid and state = 'open' and (select epoch from installation) = :epoch
        returning state
    ), closed as (
        update provision_attempt set outcome = :outcome, settled_at = clock_timestamp()
        where claim_uid = :claim_uid and number = :attempt and outcome is null
            and (select epoch from installation) = :epoch
    ), fact as (
        insert into run (claim_uid, attempt, provider, account, account_id, resource_id, region, tier,
            accelerator, pool, pod_namespace, pod_name, pod_uid, meters, usd_per_hour, ceiling_usd_per_hour,
            clock_offset_s, requested_at, accepted_at, first_seen_at, provider_created_at, terminate_asked_at,
            gone_at, extra, source)
        select :claim_uid,
            case when exists (select from run where claim_uid = :claim_uid and attempt = :attempt
                and resource_id <> :resource_id) then null else cast(:attempt as int) end,
            :provider, :account, :account_id, :resource_id, :run_region, :tier, :accelerator, :pool,
            :pod_namespace, :pod_name, :pod_uid, cast(:meters as jsonb), :usd_per_hour,
            (select ceiling_usd_per_hour from provision_attempt
                where claim_uid = :claim_uid and number = :attempt),
            :clock_offset_s,
            requested_at, case when :accepted then accepted_at end, case when :seen then seen_at end,
            cast(:provider_created_at as timestamptz), asked_at, gone_at,
            not exists (select from won) and exists (select from rental where claim_uid = :claim_uid
                and resource_id is not null and resource_id <> :resource_id),
            case when exists (select from provision_attempt where claim_uid = :claim_uid
                and number = :attempt and identity is not null) then 'ordered' else 'recovered' end
        from moment
        on conflict (provider, account, resource_id) do update set
            accepted_at = coalesce(run.accepted_at, excluded.accepted_at),
            first_seen_at = coalesce(run.first_seen_at, excluded.first_seen_at),
            provider_created_at = coalesce(run.provider_created_at, excluded.provider_created_at),
            terminate_asked_at = least(run.terminate_asked_at, excluded.terminate_asked_at),
            gone_at = coalesce(run.gone_at, excluded.gone_at),
            clock_offset_s = coalesce(run.clock_offset_s, excluded.clock_offset_s),
            meters = case when run.meters = '[]'::jsonb then excluded.meters else run.meters end,
            usd_per_hour = coalesce(run.usd_per_hour, excluded.usd_per_hour)
    )
    select coalesce((select state from won),
            (select state from rental where claim_uid = :claim_uid)) as state,
        coalesce((select :resource_id from won),
            (select resource_id from rental where claim_uid = :claim_uid)) as resource_id
""")


async def record(
    conn: AsyncConnection, claim: Mapping[str, str], facts: RunFacts, *, outcome: str, epoch: int
) -> tuple[str | None, ResourceId | None]:
    """Write the machine down, close its attempt, and make an open rental live.

    Returns the rental's state after it and the one machine that is recorded as the rental's: if that is
    another one, this machine is an extra. A former leader still writes the facts, but changes no state and
    closes no attempt: its successor looks for the machine.
    """
    values = {
        **claim,
        "epoch": epoch,
        "outcome": outcome,
        "attempt": facts.attempt,
        "resource_id": facts.resource_id,
        "run_region": facts.region,
        "account_id": facts.account_id,
        "meters": _json(facts.meters),
        "usd_per_hour": facts.usd_per_hour,
        "clock_offset_s": facts.clock_offset_s,
        "accepted": facts.accepted,
        "seen": facts.seen,
        "provider_created_at": facts.provider_created_at,
        "terminate_asked_at": facts.terminate_asked_at,
        "gone": facts.gone,
    }
    row = (await conn.execute(_RECORD, values)).one()
    return row.state, row.resource_id


_SHAPE = text("select shape from provision_attempt where claim_uid = :claim_uid and number = :number")


async def shape_of(conn: AsyncConnection, claim_uid: ClaimUid, *, number: int) -> str | None:
    """What an attempt ordered; None where no row tells."""
    shape: str | None = await conn.scalar(_SHAPE, {"claim_uid": claim_uid, "number": number})
    return shape


_END_BEGIN = text(f"""
    {_RENTAL.replace(", state, epoch)", ", state, epoch, ending_at, ending_reason)")}
    select {", ".join(":" + name for name in RENTAL_COLUMNS)}, 'ending', :epoch, clock_timestamp(), :reason
    from installation where epoch = :epoch
    on conflict (claim_uid) do update set
        state = case when rental.state = 'ended' then 'ended' else 'ending' end,
        ending_at = coalesce(rental.ending_at, excluded.ending_at),
        ending_reason = coalesce(rental.ending_reason, excluded.ending_reason),
        epoch = case when rental.state = 'ended' then rental.epoch else excluded.epoch end
    returning state
""")


async def begin_ending(
    conn: AsyncConnection, claim: Mapping[str, str], *, reason: str, epoch: int
) -> str | None:
    """Commit that nothing more is rented: ``ending``, or ``ended`` if it was that; None: not the leader."""
    values = {**claim, "reason": reason, "epoch": epoch}
    return (await conn.execute(_END_BEGIN, values)).scalar_one_or_none()


_ENDED = text("""
    with done as (
        update rental set state = 'ended', ended_at = clock_timestamp(), epoch = :epoch
        where claim_uid = :uid and state = 'ending' and (select epoch from installation) = :epoch
        returning 1
    ), attempts as (
        update provision_attempt set outcome = 'absent', settled_at = clock_timestamp()
        where claim_uid = :uid and outcome is null and exists (select from done)
    ), runs as (
        update run set gone_at = clock_timestamp()
        where claim_uid = :uid and gone_at is null and exists (select from done)
    )
    select exists (select from done) or exists (select from rental where claim_uid = :uid and state = 'ended')
""")


async def end(conn: AsyncConnection, uid: ClaimUid, *, epoch: int) -> bool:
    """``ending`` -> ``ended``, strictly; attempts still open are absent, runs still open are gone."""
    return bool((await conn.execute(_ENDED, {"uid": uid, "epoch": epoch})).scalar_one())


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A rental as its row has it; ``values`` are the columns that come from the claim."""

    claim_uid: ClaimUid
    state: str
    values: Mapping[str, str]
    resource_id: ResourceId | None
    resource_region: str | None
    running: bool


async def recorded(conn: AsyncConnection, *, uid: ClaimUid | None = None) -> list[Recorded]:
    """Every rental that may still have a machine; with ``uid``, that one in whatever state."""
    columns = ", ".join(f"r.{name}" for name in RENTAL_COLUMNS)
    query = text(f"""
        select {columns}, r.state, r.resource_id, r.resource_region, run.running_at is not null as running
        from rental r left join run on run.provider = r.provider and run.account = r.account
            and run.resource_id = r.resource_id
        where {"r.state <> 'ended'" if uid is None else "r.claim_uid = :uid"}
    """)
    rows = await conn.execute(query, {} if uid is None else {"uid": uid})
    return [
        Recorded(
            claim_uid=row.claim_uid,
            state=row.state,
            values={name: getattr(row, name) for name in RENTAL_COLUMNS},
            resource_id=row.resource_id,
            resource_region=row.resource_region,
            running=bool(row.running),
        )
        for row in rows
    ]


async def without_row(conn: AsyncConnection, uids: Sequence[ClaimUid]) -> list[ClaimUid]:
    """Those claims that have no rental, not even one that has ended."""
    query = text("""
        select uid from unnest(cast(:uids as text[])) uid
        where not exists (select from rental r where r.claim_uid = uid)
    """)
    return [ClaimUid(uid) for uid in (await conn.execute(query, {"uids": list(uids)})).scalars()]


@dataclass(frozen=True, slots=True, kw_only=True)
class StrayRun:
    """An open run that no rental follows. ``age_s``: since we first knew of it, on the database's clock."""

    provider: str
    account: str
    region: str
    resource_id: ResourceId
    seen: bool
    age_s: float


_STRAYS = text("""
    select run.provider, run.account, run.region, run.resource_id, run.first_seen_at is not null as seen,
        extract(epoch from clock_timestamp() - coalesce(
            run.accepted_at, run.first_seen_at, run.requested_at, clock_timestamp()))::float8 as age_s
    from run left join rental r on r.claim_uid = run.claim_uid
    where run.gone_at is null and (r.claim_uid is null or r.state = 'ended'
        or (r.state = 'live' and r.resource_id <> run.resource_id))
""")


async def stray_runs(conn: AsyncConnection) -> list[StrayRun]:
    """Runs that a former leader wrote down after the claim's end, or whose rental a restore has lost.

    And extras of rentals that live on: a former leader may have asked for their end and not lived to see it.
    """
    return [StrayRun(**row) for row in (await conn.execute(_STRAYS)).mappings()]


async def open_run_accounts(conn: AsyncConnection) -> dict[tuple[str, str], frozenset[str]]:
    """Of each provider account with machines not proven gone: the cloud's own ids of the accounts."""
    query = text("""
        select provider, account, array_agg(distinct account_id) as ids from run
        where gone_at is null and account_id is not null group by provider, account
    """)
    return {(row.provider, row.account): frozenset(row.ids) for row in await conn.execute(query)}


async def has_attempt(conn: AsyncConnection, uid: ClaimUid, *, sequence: int) -> bool:
    """Whether the attempt that a machine names is written down."""
    query = text("select 1 from provision_attempt where claim_uid = :uid and sequence = :sequence")
    return (await conn.execute(query, {"uid": uid, "sequence": sequence})).first() is not None


async def highest_attempt(conn: AsyncConnection, *, before_epoch: int) -> int:
    """The highest sequence that earlier leaders have written down; 0 where there is none.

    Not the newest leader's own: after a restore it may give out numbers again that the clouds show already.
    """
    query = text("""
        select sequence from provision_attempt where identity is not null and epoch < :epoch
        order by sequence desc limit 1
    """)
    found: int | None = (await conn.execute(query, {"epoch": before_epoch})).scalar_one_or_none()
    return found or 0


_RELIVE = text("""
    update rental set state = 'live', resource_id = :resource_id, resource_region = :region,
        live_at = clock_timestamp(), epoch = :epoch
    where claim_uid = :uid and state = 'open' and (select epoch from installation) = :epoch
""")


async def make_live(
    conn: AsyncConnection, uid: ClaimUid, *, resource_id: ResourceId, region: str, epoch: int
) -> bool:
    """Open -> live with a machine that a run row has already; False if somebody was first."""
    values = {"uid": uid, "resource_id": resource_id, "region": region, "epoch": epoch}
    return (await conn.execute(_RELIVE, values)).rowcount == 1


_FACTS: Mapping[str, str] = {
    "provider": "text",
    "account": "text",
    "resource_id": "text",
    "seen": "bool",
    "asked_ago_s": "float8",
    "running": "bool",
    "again": "bool",
    "exited": "bool",
    "gone": "bool",
    "provider_created_at": "timestamptz",
    "provider_started_at": "timestamptz",
    "provider_ended_at": "timestamptz",
    "end_reason": "text",
    "exit_code": "int",
    "meters": "text",
}
# One statement for many machines (it was two for each): the rows arrive as one array a column.
_OBSERVE = text(f"""
    update run set
        first_seen_at = coalesce(first_seen_at, case when f.seen then clock_timestamp() end),
        -- what is asked of a machine that is known to be gone ends nothing: it had ended by itself
        terminate_asked_at = coalesce(terminate_asked_at,
            case when gone_at is null or clock_timestamp() - make_interval(secs => f.asked_ago_s) < gone_at
                then clock_timestamp() - make_interval(secs => f.asked_ago_s) end),
        running_at = coalesce(running_at, case when f.running then clock_timestamp() end),
        stops = case when f.again and coalesce(run.provider_ended_at, run.exited_at) is not null
            then run.stops || jsonb_build_array(jsonb_build_object(
                'ended', coalesce(run.provider_ended_at, run.exited_at), 'again', clock_timestamp()))
            else run.stops end,
        meters = case when run.meters = '[]'::jsonb then cast(f.meters as jsonb) else run.meters end,
        repriced = case when cast(f.meters as jsonb) = '[]'::jsonb or run.meters = '[]'::jsonb
                or cast(f.meters as jsonb) = coalesce(run.repriced -> -1 -> 'meters', run.meters)
                then run.repriced
            else run.repriced || jsonb_build_array(jsonb_build_object(
                'at', clock_timestamp(), 'meters', cast(f.meters as jsonb))) end,
        exited_at = case when f.again then null
            else coalesce(exited_at, case when f.exited then clock_timestamp() end) end,
        gone_at = coalesce(gone_at, case when f.gone then clock_timestamp() end),
        provider_created_at = coalesce(run.provider_created_at, f.provider_created_at),
        provider_started_at = coalesce(run.provider_started_at, f.provider_started_at),
        provider_ended_at = case when f.again then null
            else coalesce(run.provider_ended_at, f.provider_ended_at) end,
        end_reason = case when f.again then null else coalesce(run.end_reason, f.end_reason) end,
        exit_code = case when f.again then null else coalesce(run.exit_code, f.exit_code) end
    from unnest({", ".join(f"cast(:{name} as {kind}[])" for name, kind in _FACTS.items())})
        as f ({", ".join(_FACTS)})
    where run.provider = f.provider and run.account = f.account and run.resource_id = f.resource_id
""")


async def observe(conn: AsyncConnection, rows: Sequence[Mapping[str, Any]]) -> None:
    """First moments and ends of runs, each column written once; of one machine at most one row.

    But ``again``: the machine runs, and so an end of its workload that was told before has been undone by a
    restart; the end is kept among ``stops``. ``asked_ago_s``: the cloud has taken a terminate so long ago,
    which by itself shows nothing of the machine. ``meters`` other than the last ones are added with the time.
    """
    if rows:
        ordered = sorted(rows, key=lambda row: (row["provider"], row["account"], row["resource_id"]))
        ordered = [{**row, "meters": _json(row["meters"])} for row in ordered]
        await conn.execute(_OBSERVE, {name: [row.get(name) for row in ordered] for name in _FACTS})


def _json(meters: Sequence[Mapping[str, str | None]]) -> str:
    return orjson.dumps([dict(meter) for meter in meters]).decode()
