"""Looks at gated Pods, in batches: one short transaction reads the blocks and writes the decisions of many.

A look that returned is on record, made with every block that was written before it was asked for. While the
store cannot be had, or is not this leader's yet, or waits for a person, looks fail and nothing is placed.

The same transaction carries what is taken from pools' limits and what is given back. It holds the row of the
installation, so only one is open at a time, whoever leads: each sees all that was promised before it, and a
limit holds however many Pods come at once.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Generic, Protocol, TypeVar

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from app.placement.promises import Promises
from app.placement.rank import History
from app.store import budgets, decisions, installation, refusals, reservations, standing
from app.store.backoffs import Backoff
from app.store.blocks import Block
from app.store.decisions import Decision
from app.store.engine import StoreUnavailable, begin, connect
from app.store.reservations import Key, Reservation
from providers.base import Tier

log = structlog.get_logger()

BATCH = 100
CHANGES_S = 0.2  # what claims took and gave back is gathered so long: else each Pod's end is a transaction
HISTORY_EVERY_S = 1.0
T = TypeVar("T")


class Term(Protocol):
    """Leadership, as far as placement must know it. ``epoch`` is None until the store has it."""

    @property
    def epoch(self) -> int | None: ...
    def valid(self) -> bool: ...


class MayNotPlace(Exception):
    """Nothing may be placed now. The message says why, in the same words each time: Pods carry it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a look is made with: live blocks, owners that wait, what pools hold, and the database's time."""

    blocks: Sequence[Block]
    now: datetime
    promises: Promises = field(default_factory=Promises)
    history: History = field(default_factory=History)
    backoffs: Mapping[str, Backoff] = field(default_factory=dict)  # by owner's UID


Judge = Callable[[Seen], tuple[T, Decision | None]]
"""Makes the decision, and the row to record; it may promise something (`Seen.promises`).

It must not wait: it runs inside the transaction.
"""


@dataclass(slots=True)
class _Look(Generic[T]):
    judge: Judge[T]
    answer: "asyncio.Future[T]"
    pool: str | None


@dataclass(slots=True)
class _Changes:
    """What happened to claims: noted first, written by the next transaction, in this order."""

    keep: set[Key] | None = None  # everything else is given back
    ended: set[Key] = field(default_factory=set)
    found: dict[Key, Reservation] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.keep is not None or bool(self.ended or self.found)

    def again(self, failed: "_Changes") -> None:
        """Put back what could not be written, under what has been noted since."""
        self.keep = failed.keep if self.keep is None else self.keep
        self.found = {key: row for key, row in failed.found.items() if key not in self.ended} | self.found
        self.ended |= failed.ended

    async def write(self, conn: AsyncConnection) -> None:
        if self.keep is not None:
            await reservations.keep_only(conn, self.keep)
        await reservations.release(conn, self.ended)
        await reservations.put(conn, self.found.values())


class Desk:
    """Collects with `look` and the notes on claims, works in `run`.

    ``renewed`` is called when our epoch has become another one: the store had lost it, and with it all that
    was promised and decided. What it notes is written before anything else is looked at.
    """

    def __init__(self, engine: AsyncEngine, *, term: Term, renewed: Callable[[], None]) -> None:
        self._engine, self._term, self._renewed = engine, term, renewed
        self._epoch: int | None = None
        self._waiting: list[_Look[Any]] = []
        self._changes = _Changes()
        self._history, self._read_at = History(), -math.inf
        self._filled, self._asked = asyncio.Event(), asyncio.Event()

    def claims_are(self, rows: Iterable[Reservation]) -> None:
        """These are all claims that there are: nothing stays taken for any other."""
        found = {row.key: row for row in rows}
        self._changes = _Changes(keep=set(found), found=found)
        self._filled.set()

    def claim_found(self, row: Reservation) -> None:
        """A claim has come to light that takes this, whatever was written of it before."""
        self._changes.found[row.key] = row
        self._filled.set()

    def claim_ended(self, key: Key) -> None:
        """A claim is gone, or will not be made: what it took is given back before the next look."""
        self._changes.found.pop(key, None)
        self._changes.ended.add(key)
        self._filled.set()

    def mind_the_epoch(self) -> None:
        """See whether the store has lost our epoch since this was asked last."""
        epoch = self._term.epoch
        if epoch is None or epoch == self._epoch:
            return
        before, self._epoch = self._epoch, epoch
        if before is not None:
            self._renewed()

    async def look(self, judge: Judge[T], *, pool: str | None = None) -> T:
        """What ``judge`` decides, once its row is committed. `run` must be running.

        ``pool``: whose usage it needs to see.

        Raises:
            MayNotPlace: there is no store, or it is not ours to place from. What ``judge`` raises.
        """
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Look(judge, answer, pool))
        self._filled.set()
        self._asked.set()
        return await answer

    async def live_blocks(self) -> Seen:
        """The blocks that hold now.

        Raises:
            StoreUnavailable: see there.
        """
        async with connect(self._engine) as conn:
            stands = await standing.read(conn)
        return Seen(blocks=stands.blocks, now=stands.now)

    async def run(self) -> None:
        """Serve looks until cancelled; those left then are cancelled too."""
        batch: list[_Look[Any]] = []
        self._epoch = None
        try:
            while True:
                await self._filled.wait()
                if not self._waiting:  # only changes: nobody waits for them but the next look
                    with suppress(TimeoutError):
                        async with asyncio.timeout(CHANGES_S):
                            await self._asked.wait()
                self._asked.clear()
                batch, self._waiting = self._waiting[:BATCH], self._waiting[BATCH:]
                if not self._waiting:
                    self._filled.clear()
                await self._serve(batch)
        finally:
            for look in (*batch, *self._waiting):
                look.answer.cancel()

    async def _serve(self, batch: list[_Look[Any]]) -> None:
        answers: list[tuple[_Look[Any], Any]] = []
        pools = {look.pool for look in batch if look.pool is not None}
        self.mind_the_epoch()
        changes, self._changes = self._changes, _Changes()
        try:
            async with begin(self._engine) as conn:
                self._check(await installation.get(conn, lock=bool(pools or changes)))
                await changes.write(conn)
                if batch:
                    answers = await self._judge(conn, batch, pools)
        except StoreUnavailable as error:
            log.warning("placement waits for the database", error=str(error))
            self._changes.again(changes)
            self._refuse(batch, MayNotPlace("the database cannot be used"))
        except MayNotPlace as error:
            self._changes.again(changes)
            self._refuse(batch, error)
        except Exception as error:
            self._changes.again(changes)
            self._refuse(batch, error)
        else:
            for look, answer in answers:
                if not look.answer.done():
                    look.answer.set_result(answer)

    async def _judge(
        self, conn: AsyncConnection, batch: list[_Look[Any]], pools: set[str]
    ) -> list[tuple[_Look[Any], Any]]:
        """Have each of the batch decided, and write down what was."""
        stands = await standing.read(conn)
        seen = Seen(
            blocks=stands.blocks,
            now=stands.now,
            promises=Promises(
                await reservations.sums(conn, pools) if pools else (),
                await budgets.standing(conn, pools) if pools else (),
            ),
            history=await self._lately(conn) if pools else History(),
            backoffs=stands.backoffs,
        )
        answers: list[tuple[_Look[Any], Any]] = []
        rows: list[Decision] = []
        for look in batch:
            if look.answer.done():
                continue  # nobody waits for it any more
            try:
                answer, row = look.judge(seen)
            except Exception as error:
                look.answer.set_exception(error)
                continue
            answers.append((look, answer))
            if row is not None:
                rows.append(row)
        await reservations.put(conn, seen.promises.rows)
        await decisions.record(conn, rows)
        return answers

    async def _lately(self, conn: AsyncConnection) -> History:
        """How orders have fared, read once a second at most: it explains, and decides nothing."""
        now = time.monotonic()
        if now - self._read_at >= HISTORY_EVERY_S:
            rows = await refusals.in_a_row(conn)
            self._history = History(
                refusals={
                    (name, account, region, Tier(tier)): n
                    for (name, account, region, tier), n in rows.items()
                }
            )
            self._read_at = now
        return self._history

    def _check(self, found: installation.Installation | None) -> None:
        if found is None:
            raise MayNotPlace("the database has no installation yet")
        if found.epoch != self._term.epoch:
            raise MayNotPlace("the database does not know this leader yet")

    @staticmethod
    def _refuse(batch: list[_Look[Any]], error: Exception) -> None:
        for look in batch:
            if not look.answer.done():
                look.answer.set_exception(error)
