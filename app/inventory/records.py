"""Rounds and machines written down: a row of `instance_seen` when a machine changes, stretches of rounds.

A store that is away loses nothing but detail: the newest state of every machine and place is written when it
is back. One that was put back has lost what it was told since, and is told again (`Recorder.again`): the
sweep counts a machine's grace from its row, and without one it would begin anew with every sweep.
"""

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from app.inventory.identity import parse
from app.inventory.rounds import Inventory, Judged, Place
from app.store import rounds, seen
from app.store.engine import StoreUnavailable, begin, database_now
from providers.base import Machine, ResourceId, usd_per_hour

log = structlog.get_logger()
EVERY_S = 0.5


class Recorder:
    """Follows an inventory's rounds; `run` writes them in batches."""

    def __init__(self, inventory: Inventory, *, engine: AsyncEngine, installation: str) -> None:
        self._engine, self._installation, self._inventory = engine, installation, inventory
        self._rounds: dict[Place, Judged] = {}
        self._changed: dict[seen.Key, seen.Seen] = {}
        self._absent: dict[Place, set[ResourceId]] = {}
        self._written: dict[Place, dict[ResourceId, seen.Seen]] = {}
        self._due = asyncio.Event()
        inventory.on_round(self._take)

    def _take(self, judged: Judged) -> None:
        place = judged.place
        self._rounds[place] = judged
        held = self._written.setdefault(place, {})
        shown = {}
        for machine in judged.machines:
            row = _seen(machine, judged, self._installation)
            shown[machine.ref.resource_id] = row
            if held.get(machine.ref.resource_id) != row:
                held[machine.ref.resource_id] = row
                self._changed[row.key] = row
        if judged.unknown is None:
            for resource_id in held.keys() - shown.keys():
                self._absent.setdefault(place, set()).add(resource_id)
                del held[resource_id]
        self._due.set()

    def again(self) -> None:
        """The store may have lost rows: what it has been told is told once more."""
        for held in self._written.values():
            self._changed |= {row.key: row for row in held.values()}
        self._due.set()

    async def run(self) -> None:
        """Write what has changed, at most every half second, until cancelled."""
        while True:
            await self._due.wait()
            self._due.clear()
            try:
                await self._flush()
            except StoreUnavailable as error:
                log.info("rounds not written yet", error=str(error)[:256])
                self._due.set()
            await asyncio.sleep(EVERY_S)

    async def _flush(self) -> None:
        judged, changed, absent = self._rounds, self._changed, self._absent
        self._rounds, self._changed, self._absent = {}, {}, {}
        try:
            try:
                await self._write(judged, changed, absent)
            except DBAPIError as error:
                # One that Postgres refuses, a stranger's say, must not keep the others from being written.
                log.error("machines seen were refused", error=str(error.orig)[:256])
                await self._write_apart(judged, changed, absent)
        except StoreUnavailable:
            self._rounds = judged | self._rounds
            self._changed = changed | self._changed
            for place, ids in absent.items():
                back = {
                    ResourceId(key[2]) for key in self._changed if key[:2] == (place.provider, place.account)
                }
                self._absent.setdefault(place, set()).update(ids - back)
            raise

    async def _write_apart(
        self,
        judged: Mapping[Place, Judged],
        changed: Mapping[seen.Key, seen.Seen],
        absent: Mapping[Place, set[ResourceId]],
    ) -> None:
        """Each in a transaction of its own; what cannot be written is left out, and said."""
        for key, row in changed.items():
            try:
                await self._write({}, {key: row}, {})
            except DBAPIError as error:
                log.error("a machine seen was refused", machine=key[2], error=str(error.orig)[:256])
        try:
            await self._write(judged, {}, absent)
        except DBAPIError as error:
            log.error("rounds were refused", error=str(error.orig)[:256])

    async def _write(
        self,
        judged: Mapping[Place, Judged],
        changed: Mapping[seen.Key, seen.Seen],
        absent: Mapping[Place, set[ResourceId]],
    ) -> None:
        async with begin(self._engine) as conn:
            now, here = await database_now(conn), self._inventory.now()
            await seen.record(conn, changed.values())
            for place, ids in sorted(absent.items(), key=lambda item: str(item[0])):
                await seen.mark_absent(
                    conn,
                    provider=place.provider,
                    account=place.account,
                    resource_ids=sorted(ids),
                    since=now,
                )
            await rounds.record(conn, [_round(one, now, here) for one in judged.values()])


def _seen(machine: Machine, judged: Judged, installation: str) -> seen.Seen:
    identity = parse(machine.identity)
    ours = identity if identity is not None and identity.installation == installation else None
    return seen.Seen(
        provider=machine.ref.provider,
        account=machine.ref.account,
        resource_id=machine.ref.resource_id,
        region=machine.ref.region,
        state=machine.state.value,
        account_id=judged.account_id,
        identity=_clean(machine.identity),
        claim_uid=ours.claim_uid if ours else None,
        attempt=ours.attempt if ours else None,
        sequence=ours.sequence if ours else None,
        end_reason=machine.end.reason.value if machine.end else None,
        exit_code=machine.end.exit_code if machine.end else None,
        endpoint=_clean(machine.endpoint),
        host=_clean(machine.host),
        usd_per_hour=usd_per_hour(machine.meters),
        provider_created_at=machine.created_at,
    )


def _clean(text: str | None) -> str | None:
    """Without NUL, which Postgres has no place for: a stranger's machine may be named anything."""
    return text.replace("\0", "") if text else text


def _round(judged: Judged, now: datetime, here: float) -> rounds.Round:
    """The round on the database's clock: ``here`` is our monotonic clock at database time ``now``."""
    return rounds.Round(
        provider=judged.place.provider,
        account=judged.place.account,
        region=judged.place.region,
        complete=judged.unknown is None,
        reason=judged.unknown[:500] if judged.unknown else None,
        account_id=judged.account_id,
        machines=len(judged.machines),
        began_at=(now - timedelta(seconds=here - judged.began_at)).astimezone(UTC),
        ended_at=(now - timedelta(seconds=here - judged.ended_at)).astimezone(UTC),
    )
